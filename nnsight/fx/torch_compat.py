"""Private names of torch's compiler, and the differences between the supported versions, 2.11 to 2.15, in one place.

Other modules of this package import such names from here. The import changes nothing in torch; context managers change it temporarily.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._C._dynamo import eval_frame as frame_evaluation
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, eval_frame, exc, guards, symbolic_convert, variables
from torch._dynamo.decorators import mark_static_address
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, ConstantSource, DictGetItemSource, LocalSource
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters as dynamo_counters
from torch._dynamo.variables import FrozensetVariable, SetVariable
from torch._dynamo.variables import nn_module as module_variables
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import DeletedVariable, GetAttrVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from ..shared_changes import replaced
from ..tracing.block import is_bound

#: Methods in which dynamo's variable for a set iterates over the items: up to 2.12 only the second one, later both.
METHODS_ITERATING = [name for name in ("tp_iter_impl", "unpack_var_sequence") if hasattr(SetVariable, name)]

#: Whether dynamo can list the attributes of an object, ``list(vars(value))``: from 2.12 on.
LISTS_ATTRIBUTES = hasattr(variables, "DunderDictVariable")

#: Further arguments of dynamo's variable for a nested function, in 2.11.
EXTRA_FUNCTION_ARGUMENTS: dict[str, None] = {} if LISTS_ATTRIBUTES else {"annotations": None}

#: The method with which dynamo looks up an attribute of a variable. It has a new name since 2.14.
_GETATTR = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"

#: Sets dynamo's count of compiled frames in a call with ``fullgraph=True``. The call fails if the count is 0; -1 turns counting off.
set_counted_frames: Callable[[int], Any] = getattr(eval_frame, "set_fullgraph_compiled_frame_count", lambda count: None)

#: The lock that dynamo holds while it compiles. Inductor relies on it for thread safety.
compile_lock = convert_frame.compile_lock


def stands_aside() -> bool:
    """Whether compiled functions run as Python, or in an unusual way: inside another tracer, or under a stance."""
    stance = eval_frame._stance
    return (
        stance.stance != "default"
        or stance.backend is not None
        or TracingContext.try_get() is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        or torch._C._is_tracing()
    )


def why_python(fullgraph: bool) -> str:
    """Return why torch would run a compiled function as Python now; empty if it would not, or if torch raises an error (``fullgraph``).

    A compiled function must not be called in this state: unless it raises, dynamo would run it as Python for good.
    """
    stance = eval_frame._stance
    if stance.backend is not None:
        return "`torch.compiler.set_stance(force_backend=...)` is in effect"
    if stance.stance not in ("default", "eager_on_recompile", "fail_on_recompile"):
        return f"`torch.compiler.set_stance({stance.stance!r})` is in effect"
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    names = [type(mode).__name__ for mode in modes if not mode.is_infra_mode() and not mode.ignore_compile_internals()]
    if fullgraph:
        return ""
    if torch._C._are_functorch_transforms_active():
        return "torch.compile compiles nothing inside a transform of `torch.func`, such as `vmap`"
    if names:
        return f"torch.compile compiles nothing under the dispatch mode `{names[-1]}`"
    return "`torch._dynamo.config.disable` is set" if dynamo_config.disable else ""


def is_outermost() -> bool:
    """Whether a call made here is not inside another compiled function, and compiled functions run as usual."""
    return not (
        frame_evaluation.get_eval_frame_callback() is not None
        or eval_frame._stance.skip_guard_eval_unsafe
        or forward_ad._current_level >= 0
        or stands_aside()
    )


def is_slow(backend: Any = "inductor", mode: str | None = None, options: dict[str, Any] | None = None, **_: Any) -> bool:
    """Whether lowering is so slow that equal regions should be lowered once. ``False`` with CUDA graphs, which should be whole."""
    if backend != "inductor" or mode not in (None, "default", "max-autotune-no-cudagraphs"):
        return False
    from torch._inductor import config

    return not (options or {}).get("triton.cudagraphs", config.triton.cudagraphs)


def is_whole_call(graph_module: torch.fx.GraphModule, function_name: str) -> bool:
    """Whether a graph that dynamo has just captured is the whole function ``function_name``."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    context = TracingContext.try_get()
    traced: list[Any] = getattr(context, "traced_code", None) or []
    return reason is not None and not reason.graph_break and [code.co_name for code in traced[:1]] == [function_name]


def attribute_of(tx: Any, variable: Any, name: str) -> Any:
    """Return the attribute ``name`` of a variable of dynamo, as a variable. ``tx`` is the frame that dynamo executes."""
    return getattr(variable, _GETATTR)(tx, name)


def is_held_by_argument(placeholder: torch.fx.Node) -> bool:
    """Whether an input of a captured graph is an attribute of an argument of the model, such as a tensor of a cache."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return isinstance(source, AttrSource) and source.name.startswith(("L['args']", "L['kwargs']"))


def only_returns() -> bool:
    """Whether the tensors of the graph that dynamo hands to its backend only become part of the function's result.

    Otherwise Python code after the graph stores them in objects that existed before the call, or registers hooks on them.
    """
    tx = symbolic_convert.InstructionTranslator.current_tx()
    effects = tx.output.side_effects
    if effects.tensor_hooks or effects.save_for_backward or tx.output.backward_state or tx.debug_locals:
        return False
    new = (AttributeMutationNew, ValueMutationNew)
    stored: list[Any] = []
    waiting = [found for found in effects._get_modified_vars() if not isinstance(found.mutation_type, new)]
    seen: dict[int, Any] = {}

    def look_at(found: Any) -> None:
        if isinstance(found, TensorVariable) or (isinstance(found, SymNodeVariable) and found.python_type() is float):
            stored.append(found)
        waiting.extend(effects.store_attr_mutations.get(found, {}).values())

    while waiting:
        VariableTracker.visit(look_at, waiting.pop(), seen)
    return all(found.source is not None for found in stored)


@contextlib.contextmanager
def following_instances() -> Iterator[None]:
    """Let dynamo of torch 2.11 handle attributes of single instances, as later versions do. Only for a holder of the compile lock.

    Dynamo of torch 2.11 cannot list the attributes of an object. Nor does it guard a bound method that is stored in the namespace of a
    module, such as an intercepted call: it would use the capture of one module for another module of the same class.
    """
    if LISTS_ATTRIBUTES:
        yield
        return
    instance = variables.UserDefinedObjectVariable
    can_unpack, unpack, attribute = GetAttrVariable.has_unpack_var_sequence, GetAttrVariable.unpack_var_sequence, instance.var_getattr

    def lists(variable: Any) -> bool:
        return variable.name == "__dict__" and isinstance(variable.obj, instance)

    def names(variable: Any, tx: Any) -> list[Any]:
        if not lists(variable):
            return cast("list[Any]", unpack(variable, tx))
        stored = tx.output.side_effects.store_attr_mutations.get(variable.obj, {})
        found = {**vars(variable.obj.value), **stored}
        return [ConstantVariable.create(name) for name, held in found.items() if not isinstance(held, DeletedVariable)]

    def guarded(variable: Any, tx: Any, name: str) -> Any:
        found = attribute(variable, tx, name)
        if variable.source is not None and isinstance(found, variables.UserMethodVariable) and found.source_fn is None:
            found.source = AttrSource(variable.source, name)
            found.source_fn = AttrSource(found.source, "__func__")
        return found

    with (
        replaced(GetAttrVariable, "has_unpack_var_sequence", lambda variable, tx: lists(variable) or can_unpack(variable, tx)),
        replaced(GetAttrVariable, "unpack_var_sequence", names),
        replaced(instance, "var_getattr", guarded),
    ):
        yield


@contextlib.contextmanager
def failing_on_fakes() -> Iterator[None]:
    """Let dynamo raise a ``TorchRuntimeError`` if an operation of the model fails on fakes. Only for a holder of the compile lock.

    Dynamo usually does so. But since torch 2.14 it forgets where such an error came from if the error passes a ``with`` or ``finally`` of
    the model. Then it assumes that the model raises the error, runs the function as Python, and traces the functions that it calls.
    """
    if not hasattr(exc, "FakeTensorObservedException"):
        yield
        return
    translator: Any = symbolic_convert.InstructionTranslatorBase
    handle = translator.exception_handler

    def handler(tx: Any, raised: Any) -> Any:
        try:
            return handle(tx, raised)
        except exc.Unsupported as error:
            message = str(raised)
            if _ON_FAKES not in message:
                raise
            raise exc.TorchRuntimeError(message, error.real_stack) from None

    with replaced(translator, "exception_handler", handler):
        yield


#: The beginning of dynamo's message about an operation that fails on fake tensors.
_ON_FAKES = "Dynamo failed to run FX node with fake tensors"


def why_it_ends(graph_module: torch.fx.GraphModule) -> tuple[str, list[Any]] | None:
    """Return why dynamo ended a graph before the end of the function, and the stack there, outermost first; ``None`` if it did not."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = str(reason.reason).strip().split("\n", 1)[0]
    return "data-dependent branching" if text.startswith("generic_jump") else text, list(reason.user_stack)


def frames_seen() -> int:
    """Return the number of frames that dynamo has tried to compile in this process."""
    return int(dynamo_counters["frames"]["total"])


def graph_breaks_seen() -> dict[str, int]:
    """Return, for each reason, how often dynamo has broken a graph or given up on a function in this process."""
    return dict(dynamo_counters["graph_break"])


def compiled_entries(code: types.CodeType) -> list[types.CodeType]:
    """Return the code objects that dynamo has compiled for calls of a function."""
    return [entry.code for entry in frame_evaluation._debug_get_cache_entry_list(code)]


def forget_entries(code: types.CodeType, known: Sequence[types.CodeType]) -> int:
    """Invalidate the compiled entries of a function, except for ``known``, and let dynamo compile the function again.

    Returns the number of invalidated entries. They never run again, but still count towards dynamo's limits.
    """
    forgotten = 0
    for entry in frame_evaluation._debug_get_cache_entry_list(code):
        manager: Any = entry.guard_manager
        if not any(entry.code is one for one in known) and manager.extra_state is not None:
            manager.extra_state.invalidate(entry, guards.DeletedGuardManagerWrapper("the call it was compiled for has failed"))
            forgotten += 1
    allow_code(code)
    return forgotten


def allow_code(code: types.CodeType) -> None:
    """Let dynamo compile a function again after it has given up on it. Compiled entries stay."""
    default = frame_evaluation._FrameAction.DEFAULT
    frame_evaluation.set_code_exec_strategy(code, frame_evaluation._FrameExecStrategy(default, default))


def cache_counts() -> tuple[int, int]:
    """Return the numbers of hits and misses of Inductor's caches on disk in this process."""
    inductor, autograd = dynamo_counters["inductor"], dynamo_counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"]
    return hits, inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]


def may_share(tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> bool:
    """Whether one of ``tensors`` may share memory with another of them, or with one of ``others``. ``False`` is certain."""
    return bool(torch._C._any_output_is_alias_to_input_or_output(tuple(others), {}, tuple(tensors)))


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Make ahead-of-time autograd agree with eager autograd for graphs lowered in this context. It holds the compile lock.

    * Views among the results are built from sizes and strides. By default ahead-of-time autograd calls the view functions again. For a view
      and its detached tensor it picks the wrong base: if both ``x.T`` and ``x.T.detach()`` are results, the second comes out as ``x``.
    * A backward pass can run more than once, as ``retain_graph=True`` asks for: no buffer is declared as one that it may overwrite.
    * No two gradients that a backward pass returns share memory. Autograd keeps the first gradient of a parameter and adds later ones to
      it in place. If that gradient were a view of another one, both would be wrong from the second backward pass on. A pass over the joint
      graph that the user has set runs first. The cache tag separates this code in torch's caches from code that was compiled without it.
    * Autograd does not warn if a backward pass cannot be traced: the caller handles the error.
    * Other threads can call compiled functions meanwhile.
    """
    compiler_config: Any = torch.compiler.config
    tag, before = f"{compiler_config.cache_key_tag}nnsight", functorch_config.joint_custom_pass

    def change(joint: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        return _copy_shared_gradients(before(joint, inputs) if callable(before) else joint, inputs)

    with (
        compile_lock,
        functorch_config.patch(view_replay_for_aliased_outputs=False, joint_custom_pass=change),
        compiler_config.patch(cache_key_tag=tag),
        replaced(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_, **__: []),
        _without_warning("Error detected in .* Traceback of forward call"),
        _tracing_unseen(),
    ):
        symbolic_convert.TensorifyState.clear()  # torch keeps, by name, the floats that an earlier lowering took as constants
        yield


@contextlib.contextmanager
def _tracing_unseen() -> Iterator[None]:
    """Clear the process-wide flag that an FX tracer of this thread sets: with the flag set, compiled functions fail in all threads."""
    tracer_class, thread = torch.fx.Tracer, threading.get_ident()
    create_args = tracer_class.create_args_for_root  # the first method that a tracer calls after it has set the flag

    def create_args_for_root(tracer: torch.fx.Tracer, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            torch.fx._symbolic_trace._is_fx_tracing_flag = False
        return create_args(tracer, *args, **kwargs)

    with replaced(tracer_class, "create_args_for_root", create_args_for_root):
        yield


def static_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> Any:
    """Return a fake of ``tensor`` with its sizes. Torch reads its ``.grad`` for that, and would warn if the tensor is not a leaf."""
    is_computed = tensor.requires_grad and not tensor.is_leaf
    with _without_warning("The .grad attribute of a Tensor") if is_computed else contextlib.nullcontext():
        return mode.from_tensor(tensor, static_shapes=True)


@contextlib.contextmanager
def _without_warning(message: str) -> Iterator[None]:
    """Suppress a warning of torch. ``warnings.catch_warnings`` would also reset filters of other threads."""
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
    added = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a `catch_warnings` of another thread may have replaced the list
            cast("list[Any]", warnings.filters).remove(added)


def _copy_shared_gradients(joint: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    """Copy each gradient that shares memory with an earlier one. (If both are the same node, autograd handles it.)

    ``joint``, forward and backward pass, returns the results, then one gradient for each of ``inputs[0]``, the inputs of the forward pass.
    """
    output = joint.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    owners: dict[int, torch.fx.Node] = {}
    for position in range(len(results) - len(inputs[0]), len(results)):
        node = results[position]
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        if owners.setdefault(value.untyped_storage()._cdata, node) is not node:
            with joint.graph.inserting_before(output):
                results[position] = joint.graph.call_function(torch.ops.aten.clone.default, (node,))
            results[position].meta = {**node.meta, "val": value.clone()}
    output.args = (tuple(results),)
    joint.recompile()
    return joint


def why_tracing_failed(error: Exception, code: types.CodeType) -> str | None:
    """Return the error that the function with ``code`` raised while dynamo traced it; ``None`` if ``error`` has another origin.

    If dynamo was tracing another function, a part of this one may have run as Python, so the result is ``None``.
    """
    if isinstance(error, exc.InternalTorchDynamoError) and isinstance(error.__context__, Exception):
        error = error.__context__  # before 2.13 torch wraps an error of the traced function
    followed = getattr(error, "real_stack", None)
    if not followed or (followed[0].filename, followed[0].name) != (code.co_filename, code.co_name):
        return None
    where = f" (line {followed[-1].lineno} of {followed[-1].filename})"
    if isinstance(error, exc.TorchRuntimeError):
        found = _FAILED_ON_FAKES.search(str(error))
        return (f"{found['kind']}: {found['message']}" if found else "an operation failed") + where
    if isinstance(error, exc.TorchDynamoException):
        return None
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{where}"


#: Dynamo's message about an operation that fails on fake tensors. It contains the ``repr`` of the error, and may be in a ``repr`` itself.
_FAILED_ON_FAKES = re.compile(r"""got (?P<kind>\w+)\((?P<quote>['"])(?P<message>.*?)(?P=quote),?\)(?:['"]\))?$""", re.MULTILINE)


def generated_code_in(function: Callable[..., Any]) -> Any:
    """Return the one ``CompiledFxGraph`` of Inductor in ``function``, under wrappers of torch alone; ``None`` if there is not one."""
    inductor: Any = sys.modules.get("torch._inductor.output_code")
    if inductor is None:
        return None
    found: dict[int, Any] = {}
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, inductor.CompiledFxGraph):
            found[id(item)] = item
        elif isinstance(item, types.FunctionType) and item.__globals__.get("__name__", "").startswith("torch."):
            cells = item.__closure__ or ()
            pending += [cell.cell_contents for cell in cells if is_bound(cell)]
        elif type(item).__name__ == "SerializableCompiledFunction":  # an entry of autograd's cache of compiled functions
            pending.append(item.compiled_fn)
    return next(iter(found.values())) if len(found) == 1 else None


def variables_of_wrapper(function: Any) -> dict[str, types.CellType]:
    """Return the closure cells, by name, of the wrapper that ``torch.compile`` has put around a function."""
    code = getattr(function, "__code__", None)
    return {} if code is None else dict(zip(code.co_freevars, function.__closure__ or (), strict=True))


def options_of_compiled(module: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the original module of ``torch.compile(module)`` or ``module.compile()``, and the options of that call."""
    if isinstance(module, eval_frame.OptimizedModule):
        return module._orig_mod, _options_of_context(module.dynamo_ctx)
    for cell in variables_of_wrapper(module._compiled_call_impl).values():
        if isinstance(cell.cell_contents, eval_frame._TorchDynamoContext):
            return module, _options_of_context(cell.cell_contents)
    return module, {}


def _options_of_context(context: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"fullgraph": bool(getattr(context, "fullgraph", False))}
    callback: Any = getattr(context, "callback", None)
    wrapper = eval_frame.innermost_backend(callback)
    if isinstance(wrapper, torch._TorchCompileInductorWrapper):
        found |= {"backend": "inductor", "dynamic": wrapper.dynamic, "options": dict(wrapper.config) or None}
    elif isinstance(wrapper, torch._TorchCompileWrapper):
        found |= {"backend": wrapper.compiler_fn, "dynamic": wrapper.dynamic}
        found |= {key: wrapper.kwargs[key] for key in ("mode", "options") if key in wrapper.kwargs}
    elif callable(wrapper):
        found["backend"] = wrapper
    return found
