"""How dynamo captures a function for this package: watched, as often as it is asked to, and true to Python.

:func:`watch_captures` surrounds each capture of one compiled function. What has to be different in dynamo itself while it captures is
changed by :func:`capturing`, for the time of one capture, in which nobody else compiles.
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
    frame_evaluation,
    guards,
    symbolic_convert,
    variables_of_wrapper,
)

_numbers = itertools.count()


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


def watch_captures(function: Callable[..., Any], around: Callable[[Missed, Callable[[], Any]], Any]) -> None:
    """Have ``around(missed, capture)`` called where dynamo is about to capture for a call of ``function``.

    It returns what ``capture()`` returns, or what :func:`left_uncompiled` does, after which dynamo does not capture the function again.
    With what some settings of torch make of ``function`` this is not possible, and captures go on unwatched.

    Args:
        function: What ``torch.compile`` returned.
        around: Called while the arguments, and the state of torch, are those of the call.
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
    """Have dynamo capture a function as this package needs it, in this context, in which nobody else compiles.

    It does so as often as it is asked to. And it takes Python floats for constants: of a float it makes a symbol otherwise, which only
    its own pipeline can lower. A set is iterated in the order of Python: in another one, the first call of a module would be another one.
    """
    unlimited: dict[str, Any] = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    handlers = symbolic_convert.compare_op_handlers
    watching = {name: functools.partial(_compare_identity, handlers[name]) for name in ("is", "is not")}
    # What is changed here belongs to the process: two contexts that overlap would leave it changed.
    with compile_lock, quiet_fakes, dynamo_config.patch(**unlimited, specialize_float=True), contextlib.ExitStack() as stack:
        _tensors_compared.clear()
        stack.enter_context(replaced(symbolic_convert, "compare_op_handlers", {**handlers, **watching}))
        for name in METHODS_ITERATING:
            ordered = functools.partialmethod(_in_order_of_python, getattr(SetVariable, name))
            stack.enter_context(replaced(SetVariable, name, ordered))
        yield


def _in_order_of_python(variable: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Put the items of a set that the model makes in the order in which Python has them, before ``method`` takes one after the other."""
    is_made_here = type(variable) in (SetVariable, FrozensetVariable) and variable.source is None
    if is_made_here and all(item.vt.is_python_constant() for item in variable.items):
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
    run_only = frame_evaluation._FrameAction.RUN_ONLY
    return ConvertFrameReturn(frame_exec_strategy=frame_evaluation._FrameExecStrategy(run_only, run_only))


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


def new_caller(root: torch.nn.Module) -> types.FunctionType:
    """Return a new function ``(root, args, kwargs)`` that calls ``root``, for ``torch.compile``.

    Dynamo keeps its cache on the code object, and what it calls in the function's globals: each model gets its own of both, which go away
    with it. By the name of the code dynamo remembers which sizes and numbers have changed between calls, so that has to be one of its own,
    too.
    """
    code = _call_model.__code__.replace(co_name=f"call_{type(root).__name__}_{next(_numbers)}")
    return types.FunctionType(code, {"__builtins__": __builtins__}, code.co_name)


def _call_model(the_model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return the_model._call_impl(*args, **kwargs)  # past a compiled call that was set on the module
