"""What of torch's compiler is not public, or differs between the supported versions, 2.11 to 2.13: in one place.

Other modules of this package take such names from here. What a torch of another version may lack is found, and mended, in this file.
Nothing of torch is changed by importing it; what :func:`with_backward_repeatable` and the like change is changed in their context.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch._C._dynamo import eval_frame as frame_evaluation
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, eval_frame, exc, guards, symbolic_convert, variables
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, ConstantSource, DictGetItemSource, GetItemSource
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters as dynamo_counters
from torch._dynamo.variables import FrozensetVariable, SetVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.nn_module import guard_to_detect_forward_monkeypatching
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._guards import TracingContext, tracing

from ..shared_changes import replaced
from ..tracing.block import is_bound

#: Methods in which dynamo's variable of a set takes the items one after the other: the second one up to 2.12, both since.
METHODS_ITERATING = [name for name in ("tp_iter_impl", "unpack_var_sequence") if hasattr(SetVariable, name)]

#: Sets how many compiled frames dynamo has counted in a call with ``fullgraph=True``: with none it fails, and with -1 it does not count.
#: Torch 2.11 never counts.
set_counted_frames: Callable[[int], Any] = getattr(eval_frame, "set_fullgraph_compiled_frame_count", lambda count: None)

#: Held by dynamo while it compiles; inductor relies on it for thread safety.
compile_lock = convert_frame.compile_lock

def stands_aside() -> bool:
    """Whether compiled functions run as they are, or not as always: inside of another tracer, or by a stance that was chosen."""
    stance = eval_frame._stance
    return (
        stance.stance != "default"
        or stance.backend is not None
        or TracingContext.try_get() is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        or torch._C._is_tracing()
    )


def is_outermost() -> bool:
    """Whether a call made here is neither inside of something else that dynamo runs, which has settings of its own, nor unusual."""
    return not (
        frame_evaluation.get_eval_frame_callback() is not None
        or eval_frame._stance.skip_guard_eval_unsafe
        or stands_aside()
    )


def is_slow(backend: Any = "inductor", mode: str | None = None, options: dict[str, Any] | None = None, **_: Any) -> bool:
    """Whether lowering takes so long that it should be done once for equal parts. A CUDA graph should be whole."""
    if backend != "inductor" or mode not in (None, "default", "max-autotune-no-cudagraphs"):
        return False
    from torch._inductor import config

    return not (options or {}).get("triton.cudagraphs", config.triton.cudagraphs)


def is_whole_call(graph_module: torch.fx.GraphModule, function_name: str) -> bool:
    """Whether a graph that dynamo has just captured is all that the function of this name does."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    context = TracingContext.try_get()
    traced: list[Any] = getattr(context, "traced_code", None) or []
    return reason is not None and not reason.graph_break and [code.co_name for code in traced[:1]] == [function_name]


def is_held_by_argument(placeholder: torch.fx.Node) -> bool:
    """Whether an input of a captured graph is an attribute of an object that the model was given, such as a tensor of a cache."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if not isinstance(source, AttrSource):
        return False
    return source.name.startswith(("L['args']", "L['kwargs']"))


def only_returns() -> bool:
    """Whether the tensors of the graph that dynamo is handing to its backend go into what the function returns, and nowhere else.

    Behind the graph Python may have more to do than to put the result together: to store tensors in objects that were there before, or
    to hook them.
    """
    tx = symbolic_convert.InstructionTranslator.current_tx()
    effects = tx.output.side_effects
    if effects.tensor_hooks or effects.save_for_backward or tx.output.backward_state or tx.debug_locals:
        return False
    stored: list[Any] = []

    def look_at(found: Any) -> None:
        if isinstance(found, TensorVariable) or (isinstance(found, SymNodeVariable) and found.python_type() is float):
            stored.append(found)

    new = (AttributeMutationNew, ValueMutationNew)
    changed = [found for found in effects._get_modified_vars() if not isinstance(found.mutation_type, new)]
    VariableTracker.visit(look_at, changed, side_effects=effects)
    return all(found.source is not None for found in stored)


def why_it_ends(graph_module: torch.fx.GraphModule) -> tuple[str, list[Any]] | None:
    """Return why dynamo ended a graph before the function did, and the stack of the place, outermost first."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = str(reason.reason).strip().split("\n", 1)[0]
    return "data-dependent branching" if text.startswith("generic_jump") else text, list(reason.user_stack)


def frames_seen() -> int:
    """Return how many frames dynamo has tried to compile in this process, in vain or not."""
    return int(dynamo_counters["frames"]["total"])


def graph_breaks_seen() -> dict[str, int]:
    """Return how often dynamo has broken a graph, or given up on a function, in this process, by its reason."""
    return dict(dynamo_counters["graph_break"])


def compiled_entries(code: types.CodeType) -> list[types.CodeType]:
    """Return the code that dynamo has compiled for calls of a function; it checks the conditions of one after the other."""
    return [entry.code for entry in frame_evaluation._debug_get_cache_entry_list(code)]


def forget_entries(code: types.CodeType, known: Sequence[types.CodeType]) -> int:
    """Let dynamo forget what it has compiled for a function besides ``known``, or that it has given up on the function.

    What is forgotten never runs again, but still counts for dynamo's limits. Returns how many entries these are.
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
    """Let dynamo try again to compile a function that it has given up on; what it has compiled of it stays."""
    default = frame_evaluation._FrameAction.DEFAULT
    frame_evaluation.set_code_exec_strategy(code, frame_evaluation._FrameExecStrategy(default, default))


@contextlib.contextmanager
def found_in_cache() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether all code of the lowerings in this context came from Inductor's caches on disk.

    Spliced graphs and regions reach Inductor as ordinary graphs with names that are the same in every process, so it finds what an earlier
    process has left and generates no code. Only for a caller who holds :data:`compile_lock`: the counts are those of the process.
    """
    hits, misses = _cache_counts()
    after = hits, misses

    def found() -> bool:
        return after[0] > hits and after[1] == misses

    yield found
    after = _cache_counts()


def _cache_counts() -> tuple[int, int]:
    """Return how many graphs Inductor has found in its caches, and how many not."""
    inductor, autograd = dynamo_counters["inductor"], dynamo_counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"]
    return hits, inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]


def may_share(tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> bool:
    """Whether one of ``tensors`` may share memory with another, or with one of ``others``; ``False`` is certain."""
    return bool(torch._C._any_output_is_alias_to_input_or_output(tuple(others), {}, tuple(tensors)))


def without_view_replay() -> contextlib.AbstractContextManager[Any]:
    """Let ahead-of-time autograd make views among the results of a graph from their sizes and strides, in this context.

    By default it calls the view functions of the graph again. For a view and what was detached from it, it calls them on the wrong one
    of two tensors: ``x.T.detach()`` beside ``x.T`` comes out as ``x``, without a word.
    """
    patch: contextlib.AbstractContextManager[Any] = functorch_config.patch(view_replay_for_aliased_outputs=False)
    return patch


@contextlib.contextmanager
def with_backward_repeatable() -> Iterator[None]:
    """Let backward passes of what is lowered in this context be made more than once, as ``retain_graph=True`` asks for.

    By default a compiled backward pass may overwrite what the forward pass has kept, and refuses ``retain_graph``. Torch has an option
    against that, but looks at it again in the backward pass. So no buffer is named as one that may be overwritten. Only for a caller who
    holds :data:`compile_lock`.
    """
    with replaced(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_, **__: []):
        yield


@contextlib.contextmanager
def without_tracebacks_of_autograd() -> Iterator[None]:
    """Keep ahead-of-time autograd from warning where a backward pass cannot be traced: the error says so, and is dealt with.

    Only this filter is added and removed. ``warnings.catch_warnings`` would put back all filters, those of other threads, too.
    """
    warnings.filterwarnings("ignore", message="Error detected in .* Traceback of forward call", category=UserWarning)
    added = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the list is another one, which a `catch_warnings` has put back
            cast("list[Any]", warnings.filters).remove(added)


@contextlib.contextmanager
def with_gradients_apart() -> Iterator[None]:
    """Let no two gradients that a compiled backward pass returns share memory, for what is lowered in this context.

    Autograd keeps the first gradient of a parameter as it is and adds later ones to it in place. Torch does not look whether compiled
    code has returned two views of one tensor, as where a token is put in front of a batch of one and positions are added: from the
    second backward pass on, both gradients are wrong.

    The tag keeps code that was compiled without this out of torch's caches. A pass that the user has set comes first.
    """
    config: Any = torch.compiler.config
    tag, before = f"{config.cache_key_tag}nnsight", functorch_config.joint_custom_pass

    def change(joint: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        return _copy_shared_gradients(before(joint, inputs) if callable(before) else joint, inputs)

    with functorch_config.patch(joint_custom_pass=change), config.patch(cache_key_tag=tag):
        yield


def _copy_shared_gradients(joint: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
    """Copy each gradient that shares memory with an earlier one and is not the same value: autograd sees that itself.

    Args:
        joint: A graph of forward and backward pass, which returns results and then the gradients of its inputs.
        inputs: The inputs of the forward pass, and those of the backward pass.
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


def why_followed_in_vain(error: Exception, code: types.CodeType) -> str | None:
    """Return what failed where dynamo followed a function on fake tensors; ``None`` if ``error`` is not such a failure.

    Args:
        error: What calling the compiled function raised.
        code: Of the function. If dynamo was following another one, a part of the function may have run as Python before.
    """
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


#: What dynamo says of an operation that fails on fake tensors: the error is shown by its ``repr``.
_FAILED_ON_FAKES = re.compile(r"""got (?P<kind>\w+)\((?P<quote>['"])(?P<message>.*?)(?P=quote),?\)$""", re.MULTILINE)


def forget_fixed_floats() -> None:
    """Forget which symbolic floats a lowering had to take as constants; torch keeps them by name, for a second attempt."""
    symbolic_convert.TensorifyState.clear()


def generated_code_in(function: Callable[..., Any]) -> Any:
    """Return the object of inductor's whose ``current_callable`` is the generated code that ``function`` calls.

    ``None`` if there is none, or several, or if ``function`` is not made by torch alone.
    """
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
        elif type(item).__name__ == "SerializableCompiledFunction":  # what autograd's cache of compiled functions can hold
            pending.append(item.compiled_fn)
    return next(iter(found.values())) if len(found) == 1 else None


def variables_of_wrapper(function: Any) -> dict[str, types.CellType]:
    """Return the cells with what the wrapper that ``torch.compile`` has put around a function refers to, by name."""
    code = getattr(function, "__code__", None)
    return {} if code is None else dict(zip(code.co_freevars, function.__closure__ or (), strict=True))


def options_of_compiled(module: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the module behind ``torch.compile(module)`` or ``module.compile()``, and the options that were given."""
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
