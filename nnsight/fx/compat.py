"""What differs between supported torch versions, or is not public in them; kept in one place.

Two functions of torch are replaced here, which torch 2.11 to 2.13 have, and whose work nothing public does. A lazy tensor may get
into a function that the user has compiled, which dynamo would trace. So the decision what such a function does is asked for the
thread that records (:func:`run_compiled_functions_as_written`). And it may get into a ``torch.autograd.Function``, which torch
runs out of sight of ``__torch_function__`` (:func:`watch_autograd_functions`). With a torch that lacks one of the two, importing
the compiler fails and says so.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo import eval_frame as in_c
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import convert_frame, eval_frame, guards, symbolic_convert, variables
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.source import AttrSource
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters as dynamo_counters
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile

from ..runtime.fakes import quiet_fakes
from ..tracing.block import is_bound
from . import backward

__all__ = [
    "BackendCallable",
    "Missed",
    "NotCompiled",
    "allow_code",
    "backend_name",
    "caller_of_compiled",
    "capturing",
    "compile_lock",
    "compiled_entries",
    "forget_entries",
    "forget_fixed_floats",
    "frames_seen",
    "generated_code_in",
    "graph_breaks_seen",
    "is_held_by_argument",
    "is_whole_call",
    "left_uncompiled",
    "may_share",
    "only_returns",
    "options_of_compiled",
    "resolve_backend",
    "run_compiled_functions_as_written",
    "skip_code",
    "stands_aside",
    "tensors_were_compared",
    "watch_autograd_functions",
    "watch_captures",
    "why_followed_in_vain",
    "why_it_ends",
    "with_backward_repeatable",
    "with_gradients_apart",
    "without_fusion",
    "without_view_replay",
]

#: Held by dynamo while it compiles; inductor relies on it for thread safety.
compile_lock = convert_frame.compile_lock

#: Compiles ``(graph module, example inputs)`` to a callable, as a backend of ``torch.compile`` does.
BackendCallable = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def resolve_backend(
    backend: Any = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> BackendCallable:
    """Return the callable that ``torch.compile`` would use for these arguments."""
    if backend == "inductor":
        return _Inductor(mode, options, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


class _Inductor(torch._TorchCompileInductorWrapper):
    """Inductor with the options of ``torch.compile``; it lowers backward passes when they first run."""

    def __call__(self, model_: torch.fx.GraphModule, inputs_: list[Any], **_: Any) -> Callable[..., Any]:
        return backward.lower(model_, inputs_, self.config)


def without_fusion(backend: BackendCallable) -> BackendCallable:
    """Return ``backend`` with each operation in a kernel of its own if it is Inductor, for a graph that edits memory its inputs share.

    Such an edit becomes a copy into a part of a buffer. Inductor may fuse it with a read of other parts of that buffer, and then values
    and gradients are wrong (pytorch/pytorch issue 198270).
    """
    if not isinstance(backend, _Inductor):
        return backend
    unfused = copy.copy(backend)
    unfused.config = {**backend.config, "max_fusion_size": 1}
    return unfused


def backend_name(backend: BackendCallable) -> str:
    """Return how a user calls ``backend``."""
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name or type(backend).__name__)


def is_whole_call(graph_module: torch.fx.GraphModule, function_name: str) -> bool:
    """Whether a graph that dynamo has just captured is all that the function of this name does."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    context = torch._guards.TracingContext.try_get()
    traced: list[Any] = getattr(context, "traced_code", None) or []
    return reason is not None and not reason.graph_break and [code.co_name for code in traced[:1]] == [function_name]


def is_held_by_argument(placeholder: torch.fx.Node) -> bool:
    """Whether an input of a captured graph is an attribute of an object that the model was given, such as a tensor of a cache."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if not isinstance(source, AttrSource):
        return False
    name: Any = source.name  # a method, in older versions
    return str(name() if callable(name) else name).startswith(("L['args']", "L['kwargs']"))


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
    return [entry.code for entry in in_c._debug_get_cache_entry_list(code)]


def forget_entries(code: types.CodeType, known: Sequence[types.CodeType]) -> int:
    """Let dynamo forget what it has compiled for a function besides ``known``, or that it has given up on the function.

    What is forgotten never runs again, but still counts for dynamo's limits. Returns how many entries these are.
    """
    forgotten = 0
    for entry in in_c._debug_get_cache_entry_list(code):
        manager: Any = entry.guard_manager
        if not any(entry.code is one for one in known) and manager.extra_state is not None:
            manager.extra_state.invalidate(entry, guards.DeletedGuardManagerWrapper("the call it was compiled for has failed"))
            forgotten += 1
    allow_code(code)
    return forgotten


def allow_code(code: types.CodeType) -> None:
    """Let dynamo try again to compile a function that it has given up on; what it has compiled of it stays."""
    in_c.set_code_exec_strategy(code, in_c._FrameExecStrategy(in_c._FrameAction.DEFAULT, in_c._FrameAction.DEFAULT))


_any_alias: Callable[..., bool] | None = getattr(torch._C, "_any_output_is_alias_to_input_or_output", None)


def may_share(tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> bool:
    """Whether one of ``tensors`` may share memory with another, or with one of ``others``; ``False`` is certain."""
    return _any_alias is None or _any_alias(tuple(others), {}, tuple(tensors))


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
    _require(graph_compile, "collect_bw_donated_buffer_idxs")
    before = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_, **__: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = before


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
    dynamo, followed = torch._dynamo.exc, getattr(error, "real_stack", None)
    if not followed or (followed[0].filename, followed[0].name) != (code.co_filename, code.co_name):
        return None
    where = f" (line {followed[-1].lineno} of {followed[-1].filename})"
    if isinstance(error, dynamo.TorchRuntimeError):
        found = _FAILED_ON_FAKES.search(str(error))
        return (f"{found['kind']}: {found['message']}" if found else "an operation failed") + where
    if isinstance(error, dynamo.TorchDynamoException):
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


def options_of_compiled(module: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the module behind ``torch.compile(module)`` or ``module.compile()``, and the options that were given."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        context, original = module.dynamo_ctx, module._orig_mod
        found = _options_of_context(context)
        return original, found
    context = getattr(module._compiled_call_impl, "__closure__", None)
    for cell in context or ():
        if isinstance(cell.cell_contents, torch._dynamo.eval_frame._TorchDynamoContext):
            return module, _options_of_context(cell.cell_contents)
    return module, {}


def _options_of_context(context: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"fullgraph": bool(getattr(context, "fullgraph", False))}
    callback: Any = getattr(context, "callback", None)
    wrapper = _innermost_backend(callback)
    if isinstance(wrapper, torch._TorchCompileInductorWrapper):
        found |= {"backend": "inductor", "dynamic": wrapper.dynamic, "options": dict(wrapper.config) or None}
    elif isinstance(wrapper, torch._TorchCompileWrapper):
        found |= {"backend": wrapper.compiler_fn, "dynamic": wrapper.dynamic}
        found |= {key: wrapper.kwargs[key] for key in ("mode", "options") if key in wrapper.kwargs}
    elif callable(wrapper):
        found["backend"] = wrapper
    return found


def _innermost_backend(callback: Any) -> Any:
    """Follow the chain of callables that dynamo wraps around a backend."""
    for _ in range(8):
        if isinstance(callback, (torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper)):
            return callback
        inner = getattr(callback, "_torchdynamo_orig_backend", None) or getattr(
            callback, "_torchdynamo_orig_callable", None
        )
        if inner is None:
            return callback
        callback = inner
    return callback


class NotCompiled(Exception):
    """There is no compiled code for these arguments; nothing has run."""


#: By thread, the code of a function that is about to be called compiled or not at all.
_wanted: dict[int, types.CodeType] = {}
_callback_as_it_is: Any = eval_frame._callback_from_stance
_skips_guards: Callable[[], bool] = getattr(eval_frame, "_is_skip_guard_eval_unsafe_stance", lambda: False)


def caller_of_compiled(function: Callable[..., Any], code: types.CodeType) -> Callable[..., Any]:
    """Return what calls a function with what dynamo has compiled for the arguments, if there is something.

    If there is not, because dynamo would have to compile or would run the function as it is, what is returned raises
    :class:`NotCompiled`, before anything has run.

    Half of what surrounds a compiled function is there for compiling; where dynamo is as this module knows it, that is left out.

    Args:
        function: What ``torch.compile`` returned.
        code: Of the function that it was given.
    """

    def call_wrapped(*args: Any) -> Any:
        thread = threading.get_ident()
        _wanted[thread] = code
        try:
            return function(*args)
        finally:
            _wanted.pop(thread, None)

    call = _without_wrapper(function, code, call_wrapped) or call_wrapped

    def call_compiled(*args: Any) -> Any:
        if stands_aside():
            raise NotCompiled
        return call(*args)

    return call_compiled


def stands_aside() -> bool:
    """Whether compiled functions run as they are, or not as always: inside of another tracer, or by a stance that was chosen."""
    return (
        getattr(torch._guards._TLS, "tracing_context", None) is not None
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        or torch._C._is_tracing()
        or _callback_as_it_is(_refusing) is not _refusing  # a stance
    )


def _without_wrapper(
    function: Callable[..., Any], code: types.CodeType, call_wrapped: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Return what calls ``function`` with compiled code past its wrapper; ``None`` if the wrapper is not of the known kind."""
    wrapper = getattr(function, "__code__", None)
    variables = dict(zip(wrapper.co_freevars, getattr(function, "__closure__", None) or (), strict=True)) if wrapper else {}
    if not {"self", "callback", "fn"} <= variables.keys():
        return None
    context, callback, plain = (variables[name].cell_contents for name in ("self", "callback", "fn"))
    if not isinstance(context, eval_frame.OptimizeContext) or getattr(plain, "__code__", None) is not code or context.fullgraph:
        return None
    refuse, enter_all, layers = _refusing(callback, code), tuple(context.enter_exit_hooks), torch._C._functorch

    def call(*args: Any) -> Any:
        outer = set_eval_frame(None)
        if outer is not None or _skips_guards():  # inside of something else that dynamo runs, which has settings of its own
            set_eval_frame(outer)
            return call_wrapped(*args)
        leave_all = [enter() for enter in enter_all]
        depth = layers.get_dynamic_layer_stack_depth()
        included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        succeeded = False
        set_eval_frame(refuse)
        try:
            result = plain(*args)
            succeeded = True
            return result
        finally:
            set_eval_frame(None)
            layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            if not succeeded:
                _restore_dispatch_keys(included, excluded)
            for leave in leave_all:
                leave()

    return call


def _restore_dispatch_keys(included: Any, excluded: Any) -> None:
    """Set the dispatch keys of this thread as they were before compiled code failed between two of its nodes that change them."""
    for key in torch._C.DispatchKey.__members__.values():
        if torch._C._dispatch_tls_is_dispatch_key_included(key) != included.has(key):
            torch._C._dispatch_tls_set_dispatch_key_included(key, included.has(key))
        if torch._C._dispatch_tls_is_dispatch_key_excluded(key) != excluded.has(key):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded.has(key))


def _refusing(callback: Any, code: types.CodeType) -> Any:
    """Return a callback that finds what was compiled with ``callback``, and compiles nothing; least of all ``code``."""

    def refuse(frame: Any, *_: Any, **__: Any) -> Any:
        if frame.f_code is code:
            raise NotCompiled
        return ConvertFrameReturn()

    refuse._torchdynamo_orig_backend = callback  # type: ignore[attr-defined] # compiled code belongs to a backend
    return refuse


@dataclass(frozen=True)
class Missed:
    """A call of a function for which dynamo has compiled nothing yet: none of what it has compiled fits the arguments.

    Attributes:
        code: Of the function: the one that was compiled, or what it calls behind a break of the graph.
        variables: Its arguments by name.
        entries: What dynamo has compiled for other calls of it, the latest first.
    """

    code: types.CodeType
    variables: dict[str, Any]
    entries: Sequence[Any]

    def failed_guards(self) -> list[str]:
        """Return the first guard that does not hold for this call, of each entry, as dynamo writes it.

        In order of how many guards of the entry hold before that one: the entry that comes nearest to the call is the first.
        """
        found = [_failed_guard(entry.guard_manager, self.variables) for entry in self.entries]
        return [guard for _, guard in sorted(found, key=lambda each: -each[0]) if guard]


def watch_captures(function: Callable[..., Any], around: Callable[[Missed, Callable[[], Any]], Any]) -> bool:
    """Have ``around(missed, capture)`` called where dynamo is about to capture for a call of ``function``.

    It returns what ``capture()`` returns, or what :func:`left_uncompiled` does, after which dynamo does not capture the function again.

    Args:
        function: What ``torch.compile`` returned.
        around: Called while the arguments, and the state of torch, are those of the call.

    Returns:
        Whether this is possible: with what some backends and settings make of ``function`` it is not.
    """
    wrapper = getattr(function, "__code__", None)
    variables = dict(zip(wrapper.co_freevars, getattr(function, "__closure__", None) or (), strict=True)) if wrapper else {}
    if "callback" not in variables or not hasattr(variables["callback"].cell_contents, "_torchdynamo_orig_backend"):
        return False
    callback = variables["callback"].cell_contents

    def watched(frame: Any, *rest: Any, **named: Any) -> Any:
        code = frame.f_code
        entries = in_c._debug_get_cache_entry_list(code)
        known = [entry for entry in entries if not isinstance(entry.guard_manager, guards.DeletedGuardManagerWrapper)]
        missed = Missed(code, frame.f_locals, known)
        return around(missed, lambda: callback(frame, *rest, **named))

    watched._torchdynamo_orig_backend = callback  # type: ignore[attr-defined] # compiled code belongs to a backend
    callback._nnsight_watched = watched
    return True


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Have dynamo capture a function as this package needs it, in this context, in which nobody else compiles.

    It does so as often as it is asked to. And it takes Python floats for constants: of a float it makes a symbol otherwise, which only
    its own pipeline can lower. A set is iterated in the order of Python: in another one, the first call of a module would be another one.
    """
    unlimited: dict[str, Any] = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    handlers = symbolic_convert.compare_op_handlers
    before = {name: handlers[name] for name in ("is", "is not")}
    # The settings are those of the process: two contexts that overlap would leave them changed.
    with compile_lock, quiet_fakes, torch._dynamo.config.patch(**unlimited, specialize_float=True):
        _tensors_compared.clear()
        handlers.update({name: functools.partial(_compare_identity, handler) for name, handler in before.items()})
        iterate = {name: getattr(_SETS[0], name) for name in _ITERATING if hasattr(_SETS[0], name)}
        for name, method in iterate.items():
            setattr(_SETS[0], name, functools.partialmethod(_in_order_of_python, method))
        try:
            yield
        finally:
            handlers.update(before)
            for name, method in iterate.items():
                setattr(_SETS[0], name, method)


#: What dynamo has sets as, and the methods in which it takes their items one after the other, of one version or another.
_SETS: tuple[Any, Any] = (variables.SetVariable, variables.FrozensetVariable)  # type: ignore[attr-defined]
_ITERATING = ("tp_iter_impl", "unpack_var_sequence")


def _in_order_of_python(variable: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Put the items of a set that the model makes in the order in which Python has them, before ``method`` takes one after the other."""
    if type(variable) in _SETS and variable.source is None and all(item.vt.is_python_constant() for item in variable.items):
        items = {item.vt.as_python_constant(): item for item in variable.items}
        in_order = [items[value] for value in set(iter(items))]  # added one by one, as in the model
        variable.items = {item: variable.items[item] for item in in_order}
    return method(variable, *args, **kwargs)


#: Not empty if the model asked, in the capture that is going on, whether two tensors are one object.
_tensors_compared: list[bool] = []


def _compare_identity(handler: Callable[..., Any], tx: Any, operands: Any, named: Any) -> Any:
    """Answer as dynamo does whether two things are one object, and note if they are tensors."""
    operands = list(operands)
    result = handler(tx, operands, named)
    if all(isinstance(operand.unwrap(), TensorVariable) for operand in operands):
        _tensors_compared.append(True)
    return result


def tensors_were_compared() -> bool:
    """Whether the model asks whether two tensors are one object; for a backend, in :func:`capturing`."""
    return bool(_tensors_compared)


def left_uncompiled() -> Any:
    """Return what tells dynamo to call a function as it is from now on, where nothing that is compiled fits the arguments."""
    run_only = in_c._FrameAction.RUN_ONLY
    return ConvertFrameReturn(frame_exec_strategy=in_c._FrameExecStrategy(run_only, run_only))


_LOCAL = re.compile(r"L\['(\w+)'\]")


def _failed_guard(manager: Any, variables: dict[str, Any]) -> tuple[int, str]:
    """Return how many guards of an entry were checked up to the first that does not hold, and that one; empty if they all do."""
    checked = 0
    try:
        info = manager.check_verbose(variables)
        checked = info.num_guards_executed
        parts = [] if info.result else list(info.verbose_code_parts)
        if len(parts) > 1:  # conditions of one guard on several sizes
            scope = {"L": variables, "G": manager.global_scope["G"], **manager.closure_vars}
            parts = [part for part in parts if not eval(part, dict(manager.global_scope), scope)]
    except Exception as error:  # what looks at the arguments may be code of theirs
        parts = [f"{type(error).__name__} in a guard"]
    return checked, _LOCAL.sub(r"\1", parts[0].partition("\n")[0].partition("  # ")[0].strip()) if parts else ""


def run_compiled_functions_as_written(when: Callable[[], bool]) -> None:
    """Have functions that were compiled with ``torch.compile`` run as plain Python where ``when()`` holds.

    ``torch.compiler.set_stance("force_eager")`` does the same for all threads.
    """
    _require(eval_frame, "_callback_from_stance")
    otherwise = eval_frame._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        if callback in (None, False):
            return otherwise(callback)
        if _wanted:
            code = _wanted.pop(threading.get_ident(), None)  # what else is called meanwhile is compiled as always
            if code is not None:
                return _refusing(callback, code)
        if not when():
            chosen = otherwise(callback)
            return getattr(chosen, "_nnsight_watched", chosen) if chosen is callback else chosen
        counted = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
        if counted is not None:
            counted(-1)  # with fullgraph=True it is an error that no frame is compiled, unless they are not counted
        return None

    eval_frame._callback_from_stance = callback_from_stance


def watch_autograd_functions(watch: Callable[..., Any]) -> None:
    """Have ``watch(apply, args, kwargs)`` called for each ``torch.autograd.Function`` that is applied.

    Dynamo must not compile what is called here as a frame of its own, where a function is applied between two graphs of somebody's
    compiled code: it does not compile torch's ``apply`` either.
    """
    _require(torch.autograd.function, "_SingleLevelFunction")
    base: Any = torch.autograd.function._SingleLevelFunction

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(super(base, cls).apply, args, kwargs)

    skip_code(apply.__code__)
    base.apply = classmethod(apply)


def _require(module: Any, name: str) -> None:
    """Raise an ``ImportError`` if this torch does not have a name that has to be replaced."""
    if not hasattr(module, name):
        raise ImportError(
            f"torch {torch.__version__} has no `{module.__name__}.{name}`, which compiled traces rely on. Versions 2.11 to 2.13 of "
            "torch are supported: install one of them, or trace without `compile`."
        )
