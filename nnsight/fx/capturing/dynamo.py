"""Dynamo's captures and compiled calls of one function.

:func:`watch_captures` wraps each capture of a compiled function. :func:`capturing` changes dynamo during one capture, while no other thread
compiles. :func:`caller_of_compiled` calls the function without the wrapper of ``torch.compile``, because half of that wrapper serves
compiling. If dynamo would have to compile, or would run the function as Python, it raises :class:`NotCompiled` before anything runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.modules.interception import INTERCEPTED_METHOD
from ...runtime.rows.fakes import quiet_fakes
from ...shared_changes import replaced
from ..torch_compat import (
    METHODS_ITERATING,
    ConvertFrameReturn,
    FrozensetVariable,
    SetVariable,
    TensorVariable,
    compile_lock,
    dynamo_config,
    eval_frame,
    failing_on_fakes,
    following_instances,
    frame_evaluation,
    guards,
    symbolic_convert,
    variables_of_wrapper,
)
from .traced_calls import ROOT_ARGUMENT, executing_calls

_numbers = itertools.count()


@dataclass(frozen=True)
class CacheMiss:
    """A call of a function for which none of dynamo's compiled entries fits.

    Attributes:
        code: The code object of the compiled function, or of a function that it calls after a graph break.
        variables: The arguments by name.
        entries: Dynamo's valid entries for other calls of this function, the latest first.
    """

    code: types.CodeType
    variables: dict[str, Any]
    entries: Sequence[Any]

    def failed_guards(self) -> list[str]:
        """Return, for each entry, the first guard that fails for this call, as dynamo writes it; those after most other guards first."""
        found = [_failed_guard(entry.guard_manager, self.variables) for entry in self.entries]
        return [guard for _, guard in sorted(found, key=lambda each: -each[0]) if guard]


def watch_captures(function: Callable[..., Any], around: Callable[[CacheMiss, Callable[[], Any]], Any]) -> None:
    """Call ``around(miss, capture)`` whenever dynamo is about to capture ``function``, a result of ``torch.compile``.

    ``around`` returns ``capture()``, or :func:`left_uncompiled()`; then dynamo does not capture the function again. Under some settings of
    torch the wrapper has another form, and captures are not watched.
    """
    cell = variables_of_wrapper(function).get("callback")
    callback: Any = None if cell is None else cell.cell_contents
    if cell is None or not hasattr(callback, "_torchdynamo_orig_backend"):
        return

    def watched(frame: Any, *rest: Any, **named: Any) -> Any:
        code = frame.f_code
        entries = frame_evaluation._debug_get_cache_entry_list(code)
        known = [entry for entry in entries if not isinstance(entry.guard_manager, guards.DeletedGuardManagerWrapper)]
        miss = CacheMiss(code, frame.f_locals, known)
        return around(miss, lambda: callback(frame, *rest, **named))

    # Dynamo runs compiled entries only under the backend that they were made for.
    watched._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # type: ignore[attr-defined]
    cell.cell_contents = watched


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Change dynamo for the captures in this context. It holds the compile lock, so no other thread compiles meanwhile.

    Dynamo captures without its own limit, and treats Python floats as constants: only its own pipeline can lower symbolic ones. It iterates
    over sets in Python's order: if the model calls a module for each item, another order would change the occurrence numbers.
    """
    unlimited: dict[str, Any] = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    handlers = symbolic_convert.compare_op_handlers
    watching = {name: functools.partial(_compare_identity, handlers[name]) for name in ("is", "is not")}
    # These changes are process-wide. Without the lock, two overlapping contexts would leave them in place.
    with compile_lock, quiet_fakes, dynamo_config.patch(**unlimited, specialize_float=True), contextlib.ExitStack() as stack:
        _tensors_compared.clear()
        stack.enter_context(following_instances())
        stack.enter_context(failing_on_fakes())
        stack.enter_context(executing_calls())
        stack.enter_context(replaced(symbolic_convert, "compare_op_handlers", {**handlers, **watching}))
        # Dynamo measures how long its guards take, for its logs. First it empties the processor's cache, which takes 20 ms and more.
        stack.enter_context(replaced(guards, "profile_guard_manager", lambda *_: 0.0))
        for name in METHODS_ITERATING:
            ordered = functools.partialmethod(_in_order_of_python, getattr(SetVariable, name))
            stack.enter_context(replaced(SetVariable, name, ordered))
        yield


def _in_order_of_python(variable: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Sort the items of a set that the model creates into Python's order, then call ``method``, which iterates over them."""
    is_made_here = type(variable) in (SetVariable, FrozensetVariable) and variable.source is None
    if is_made_here and all(item.vt.is_python_constant() for item in variable.items):
        items = {item.vt.as_python_constant(): item for item in variable.items}
        variable.items = {items[value]: variable.items[items[value]] for value in set(iter(items))}  # `iter` adds them one by one
    return method(variable, *args, **kwargs)


#: Not empty if, in the current capture, the model has tested whether two tensors are the same object.
_tensors_compared: list[bool] = []


def _compare_identity(handler: Callable[..., Any], tx: Any, operands: Any, named: Any) -> Any:
    """Run dynamo's ``handler`` of an identity test, and note if both operands are tensors."""
    operands = list(operands)
    result = handler(tx, operands, named)
    if all(isinstance(operand.unwrap(), TensorVariable) for operand in operands):
        _tensors_compared.append(True)
    return result


def tensors_were_compared() -> bool:
    """Whether the model tests whether two tensors are the same object. Valid in a backend, inside :func:`capturing`."""
    return bool(_tensors_compared)


def left_uncompiled() -> Any:
    """Return dynamo's instruction to run a function as Python from now on whenever no compiled entry fits the arguments."""
    run_only = frame_evaluation._FrameAction.RUN_ONLY
    return ConvertFrameReturn(frame_exec_strategy=frame_evaluation._FrameExecStrategy(run_only, run_only))


_LOCAL = re.compile(r"L\['(\w+)'\]")


def _failed_guard(manager: Any, variables: dict[str, Any]) -> tuple[int, str]:
    """Return the number of guards of an entry that were checked, and the first that fails; ``""`` if all hold."""
    checked = 0
    try:
        info = manager.check_verbose(variables)
        checked = info.num_guards_executed
        parts = [] if info.result else list(info.verbose_code_parts)
        if len(parts) > 1:  # conditions of one guard on several sizes
            scope = {"L": variables, "G": manager.global_scope["G"], **manager.closure_vars}
            parts = [part for part in parts if not eval(part, dict(manager.global_scope), scope)]
    except Exception as error:  # a guard may call the user's code
        parts = [f"{type(error).__name__} in a guard"]
    return checked, _LOCAL.sub(r"\1", parts[0].partition("\n")[0].partition("  # ")[0].strip()) if parts else ""


def kept_guards(chosen: Callable[..., Any] | None, guards: Sequence[Any]) -> list[bool]:
    """Return, for each guard of a capture, whether dynamo checks it before each call; ``chosen`` is the user's filter.

    The guards on intercepted calls, many for each module, are dropped because they always hold: the function belongs to one version of the
    tree, and the interception of this version is installed for each call.

    Dynamo builds the guards once for this filter and once more after it, and compares the objects of both times with ``==``. For a NumPy
    array these are two new tensors, whose comparison has no truth value. So the first ones are forgotten here.
    """
    for guard in guards:
        if isinstance(made := guard.orig_guard.obj_weakref, weakref.ref) and isinstance(made(), torch.Tensor):
            guard.orig_guard.obj_weakref = None
    kept = [True] * len(guards) if chosen is None else list(chosen(guards))
    return [keep and not _is_ours(guard.name) for keep, guard in zip(kept, guards, strict=True)]


def _is_ours(source: str) -> bool:
    """Whether a guard is on a global of this package, or on an intercepted call that is reached from the root module.

    After a graph break, modules have frames of their own. There a guard on an intercepted call distinguishes modules of one class.
    """
    installed = source.startswith(ROOT_ARGUMENT) and f".{INTERCEPTED_METHOD}." in f"{source}."
    return installed or source.startswith("G['__import_nnsight_dot_")


def new_caller(root: torch.nn.Module) -> types.FunctionType:
    """Return a new function ``(root, args, kwargs)`` that calls ``root``, for ``torch.compile``.

    Dynamo keeps its cache on the code object, compiled functions in the globals, and, by the name of the code, the sizes that have changed
    between calls. So each model gets its own code, globals and name, and they are freed with the model.
    """
    code = _call_model.__code__.replace(co_name=f"call_{type(root).__name__}_{next(_numbers)}")
    return types.FunctionType(code, {"__builtins__": __builtins__}, code.co_name)


def _call_model(the_model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return the_model._call_impl(*args, **kwargs)  # not `__call__`, which would run a compiled call set on the module


class NotCompiled(Exception):
    """There is no compiled code for these arguments. Nothing has run."""


def caller_of_compiled(function: Callable[..., Any], code: types.CodeType) -> Callable[..., Any] | None:
    """Return a function that runs dynamo's compiled entry for its arguments, or raises :class:`NotCompiled`.

    Call that function only where :func:`~nnsight.fx.torch_compat.is_outermost` holds. ``function`` is a result of ``torch.compile``, and
    ``code`` the code object of the original function. Returns ``None`` if the wrapper has another form, as under some settings of torch.
    """
    variables = variables_of_wrapper(function)
    if not {"self", "callback", "fn"} <= variables.keys():
        return None
    context, callback, plain = (variables[name].cell_contents for name in ("self", "callback", "fn"))
    if not isinstance(context, eval_frame.OptimizeContext) or getattr(plain, "__code__", None) is not code:
        return None

    def refuse(frame: Any, *_: Any, **__: Any) -> Any:
        """Compile nothing: raise for the function itself, and let other functions run as Python."""
        if frame.f_code is code:
            raise NotCompiled
        return ConvertFrameReturn()

    refuse._torchdynamo_orig_backend = eval_frame.innermost_backend(callback)  # type: ignore[attr-defined] # as in `watch_captures`
    enter_all, layers, set_callback = tuple(context.enter_exit_hooks), torch._C._functorch, frame_evaluation.set_eval_frame
    included, excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set

    def call(*args: Any) -> Any:
        leave_all = [enter() for enter in enter_all]
        depth = layers.get_dynamic_layer_stack_depth()
        set_callback(refuse)
        try:
            with torch._C._ForceDispatchKeyGuard(included(), excluded()):  # compiled code may fail after a node that changed these sets
                return plain(*args)
        finally:
            set_callback(None)
            layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            for leave in leave_all:
                leave()

    return call
