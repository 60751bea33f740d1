"""Dynamo's captures and compiled calls of one function.

:func:`watch_captures` surrounds each capture of a compiled function. :func:`capturing` changes dynamo for the time of one capture, in which
nobody else compiles. :func:`caller_of_compiled` calls the function past the wrapper of ``torch.compile``, half of which is there for
compiling: if dynamo would have to compile, or would run the function as Python, :class:`NotCompiled` is raised and nothing has run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import types
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

_numbers = itertools.count()


@dataclass(frozen=True)
class Missed:
    """A call of a function that no compiled entry of dynamo fits.

    Attributes:
        code: Of the compiled function, or of a function that it calls behind a break of the graph.
        variables: Its arguments by name.
        entries: Dynamo's entries for other calls of it, the latest first.
    """

    code: types.CodeType
    variables: dict[str, Any]
    entries: Sequence[Any]

    def failed_guards(self) -> list[str]:
        """Return the first guard of each entry that fails for this call, as dynamo writes it; first those with most guards checked."""
        found = [_failed_guard(entry.guard_manager, self.variables) for entry in self.entries]
        return [guard for _, guard in sorted(found, key=lambda each: -each[0]) if guard]


def watch_captures(function: Callable[..., Any], around: Callable[[Missed, Callable[[], Any]], Any]) -> None:
    """Have ``around(missed, capture)`` called where dynamo is about to capture ``function``, a result of ``torch.compile``.

    It returns the result of ``capture()``, or that of :func:`left_uncompiled`, after which dynamo does not capture the function again.
    Under some settings of torch the wrapper is of another kind, and captures go on unwatched.
    """
    cell = variables_of_wrapper(function).get("callback")
    callback: Any = None if cell is None else cell.cell_contents
    if cell is None or not hasattr(callback, "_torchdynamo_orig_backend"):
        return

    def watched(frame: Any, *rest: Any, **named: Any) -> Any:
        code = frame.f_code
        entries = frame_evaluation._debug_get_cache_entry_list(code)
        known = [entry for entry in entries if not isinstance(entry.guard_manager, guards.DeletedGuardManagerWrapper)]
        missed = Missed(code, frame.f_locals, known)
        return around(missed, lambda: callback(frame, *rest, **named))

    watched._torchdynamo_orig_backend = callback._torchdynamo_orig_backend  # type: ignore[attr-defined] # its code may run
    cell.cell_contents = watched


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Change dynamo for the captures in this context, in which nobody else compiles.

    Dynamo captures without a limit of its own, and takes Python floats for constants: only its own pipeline can lower symbolic ones.
    Sets are iterated in the order of Python: in another order, calls of one module for each item would have other numbers.
    """
    unlimited: dict[str, Any] = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    handlers = symbolic_convert.compare_op_handlers
    watching = {name: functools.partial(_compare_identity, handlers[name]) for name in ("is", "is not")}
    # These changes are process-wide: two contexts that overlap would leave them in place.
    with compile_lock, quiet_fakes, dynamo_config.patch(**unlimited, specialize_float=True), contextlib.ExitStack() as stack:
        _tensors_compared.clear()
        stack.enter_context(following_instances())
        stack.enter_context(failing_on_fakes())
        stack.enter_context(replaced(symbolic_convert, "compare_op_handlers", {**handlers, **watching}))
        for name in METHODS_ITERATING:
            ordered = functools.partialmethod(_in_order_of_python, getattr(SetVariable, name))
            stack.enter_context(replaced(SetVariable, name, ordered))
        yield


def _in_order_of_python(variable: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Put the items of a set that the model makes in the order of Python, before ``method`` iterates over them."""
    is_made_here = type(variable) in (SetVariable, FrozensetVariable) and variable.source is None
    if is_made_here and all(item.vt.is_python_constant() for item in variable.items):
        items = {item.vt.as_python_constant(): item for item in variable.items}
        variable.items = {items[value]: variable.items[items[value]] for value in set(iter(items))}  # added one by one, as in the model
    return method(variable, *args, **kwargs)


#: Not empty if the model has asked, in the present capture, whether two tensors are one object.
_tensors_compared: list[bool] = []


def _compare_identity(handler: Callable[..., Any], tx: Any, operands: Any, named: Any) -> Any:
    """Compare with dynamo's handler whether two values are one object, and note if they are tensors."""
    operands = list(operands)
    result = handler(tx, operands, named)
    if all(isinstance(operand.unwrap(), TensorVariable) for operand in operands):
        _tensors_compared.append(True)
    return result


def tensors_were_compared() -> bool:
    """Whether the model asks whether two tensors are one object; for a backend, in :func:`capturing`."""
    return bool(_tensors_compared)


def left_uncompiled() -> Any:
    """Return dynamo's instruction to run a function as Python from now on, where no compiled entry fits the arguments."""
    run_only = frame_evaluation._FrameAction.RUN_ONLY
    return ConvertFrameReturn(frame_exec_strategy=frame_evaluation._FrameExecStrategy(run_only, run_only))


_LOCAL = re.compile(r"L\['(\w+)'\]")


def _failed_guard(manager: Any, variables: dict[str, Any]) -> tuple[int, str]:
    """Return how many guards of an entry were checked up to the first that fails, and that one; empty if all hold."""
    checked = 0
    try:
        info = manager.check_verbose(variables)
        checked = info.num_guards_executed
        parts = [] if info.result else list(info.verbose_code_parts)
        if len(parts) > 1:  # conditions of one guard on several sizes
            scope = {"L": variables, "G": manager.global_scope["G"], **manager.closure_vars}
            parts = [part for part in parts if not eval(part, dict(manager.global_scope), scope)]
    except Exception as error:  # a guard may call code of the user
        parts = [f"{type(error).__name__} in a guard"]
    return checked, _LOCAL.sub(r"\1", parts[0].partition("\n")[0].partition("  # ")[0].strip()) if parts else ""


def kept_guards(chosen: Callable[..., Any] | None, guards: Sequence[Any]) -> list[bool]:
    """Return which guards of a capture dynamo checks before each call.

    Those on the intercepted calls, many for each module, always hold: the function was made for the interception of this version of the
    tree, which is installed for each call.
    """
    kept = [True] * len(guards) if chosen is None else list(chosen(guards))
    return [keep and not _is_ours(guard.name) for keep, guard in zip(kept, guards, strict=True)]


def _is_ours(source: str) -> bool:
    """Whether a guard is on a global of this package, or on an intercepted call as seen from the root.

    Behind a break of the graph modules have frames of their own, where such a guard distinguishes modules of one class.
    """
    installed = source.startswith("the_model") and f".{INTERCEPTED_METHOD}." in f"{source}."
    return installed or source.startswith("G['__import_nnsight_dot_")


def new_caller(root: torch.nn.Module) -> types.FunctionType:
    """Return a new function ``(root, args, kwargs)`` that calls ``root``, for ``torch.compile``.

    Dynamo keeps its cache on the code object, compiled functions in the globals, and by the name of the code which sizes have changed
    between calls. So each model gets its own code, globals and name, which are freed with it.
    """
    code = _call_model.__code__.replace(co_name=f"call_{type(root).__name__}_{next(_numbers)}")
    return types.FunctionType(code, {"__builtins__": __builtins__}, code.co_name)


def _call_model(the_model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return the_model._call_impl(*args, **kwargs)  # past a compiled call that was set on the module


class NotCompiled(Exception):
    """There is no compiled code for these arguments; nothing has run."""


def caller_of_compiled(function: Callable[..., Any], code: types.CodeType) -> Callable[..., Any] | None:
    """Return a function that runs dynamo's compiled entry for its arguments, or raises :class:`NotCompiled`.

    Call it where :func:`~nnsight.fx.torch_compat.is_outermost` holds. ``code`` is that of the function behind ``function``, a result of
    ``torch.compile``. ``None`` if its wrapper is of another kind, as under some settings of torch.
    """
    variables = variables_of_wrapper(function)
    if not {"self", "callback", "fn"} <= variables.keys():
        return None
    context, callback, plain = (variables[name].cell_contents for name in ("self", "callback", "fn"))
    if not isinstance(context, eval_frame.OptimizeContext) or getattr(plain, "__code__", None) is not code:
        return None

    def refuse(frame: Any, *_: Any, **__: Any) -> Any:
        """Compile nothing: raise for the function, and let others run as Python."""
        if frame.f_code is code:
            raise NotCompiled
        return ConvertFrameReturn()

    refuse._torchdynamo_orig_backend = eval_frame.innermost_backend(callback)  # type: ignore[attr-defined] # its code may run
    enter_all, layers, set_callback = tuple(context.enter_exit_hooks), torch._C._functorch, frame_evaluation.set_eval_frame
    included, excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set

    def call(*args: Any) -> Any:
        leave_all = [enter() for enter in enter_all]
        depth = layers.get_dynamic_layer_stack_depth()
        set_callback(refuse)
        try:
            with torch._C._ForceDispatchKeyGuard(included(), excluded()):  # compiled code may fail between two nodes that change them
                return plain(*args)
        finally:
            set_callback(None)
            layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            for leave in leave_all:
                leave()

    return call
