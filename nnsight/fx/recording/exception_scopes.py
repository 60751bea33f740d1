"""Calls that may fail because of values, and the handlers that would see their errors.

A recorded call runs with its graph, when the block has gone on. An error that does not depend on values is raised at the
call's line by its fake. Some calls fail because of values: an index out of range, a matrix without an inverse. Their errors
are raised by the graph, with the user's line, too late for a handler around the call. So such a call cuts the graph if it
is inside a ``try`` or a ``with``.

The exception tables of the running frames' code tell where that is. What a handler does is not looked at: every ``try``
counts, also with ``finally`` only, and every ``with``, except one whose header calls one of :data:`_HARMLESS` by its name,
as in ``with torch.no_grad():``. Code inside an ``except`` or ``finally`` clause is not inside its ``try``.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
from typing import Any

import torch

from ...tracing.block import variables_of
from ...tracing.errors import is_internal
from ..effects import is_failing

_TORCH = torch.__file__.rsplit("/", 1)[0]

#: Context managers that let all errors through.
_HARMLESS = (
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.inference_mode,
    torch.autocast,
    torch.random.fork_rng,
    contextlib.nullcontext,
)

#: Instructions that a name begins with, those that go on to an attribute, and those of a call that are no part of its name.
_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_OTHERS = ("PUSH_NULL", "EXTENDED_ARG", "KW_NAMES", "LOAD_CONST")

#: Calls whose fakes are less strict about arguments, but which fail by no value.
_TOTAL = frozenset({"softmax", "log_softmax"})


def may_fail_by_values(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call that is possible on fakes may raise an error because of values."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(item, (torch.Tensor, list)) for item in index)
    return is_failing(name) and name not in _TOTAL


def handler() -> str | None:
    """Return in words what an error of the user's code that is running may be caught by, up to its outermost block."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:  # the frames of a block end with those of its worker
        code = frame.f_code
        if not is_internal(code) and not code.co_filename.startswith(_TORCH):
            for header in _handlers(code, frame.f_lasti):
                if header is None:
                    return "a `try`"
                if not _is_harmless(header, frame):
                    return "a `with` that may catch it"
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _handlers(code: types.CodeType, offset: int) -> tuple[tuple[str, ...] | None, ...]:
    """Return what is around the instruction at ``offset``: ``None`` for a ``try``, for a ``with`` the name that its header calls."""
    table = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    instructions = list(dis.get_instructions(code))
    found: list[tuple[str, ...] | None] = []
    while (entry := next((entry for entry in table if entry.start <= offset < entry.end), None)) is not None:
        offset = entry.target  # the handler may raise the error again, for the one around it
        names = [instruction.opname for instruction in instructions if instruction.offset >= offset]
        if names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            start = min(other.start for other in table if other.target == offset)
            found.append(_called(instructions, start))
        elif names[0] == "PUSH_EXC_INFO":  # others only clean up, behind an `except` clause or a comprehension
            found.append(None)
    return tuple(found)


def _called(instructions: list[dis.Instruction], start: int) -> tuple[str, ...]:
    """Return the dotted name that the header of a ``with`` calls, for a body at ``start``; empty if the header is anything else."""
    *before, call, enter = (found for found in instructions if found.offset < start)
    if enter.opname != "BEFORE_WITH" or enter.is_jump_target or not call.opname.startswith("CALL"):
        return ()
    name: list[dis.Instruction] = []  # it begins where the call begins; arguments begin behind it
    for found in reversed(before):
        if _begin(found) == _begin(call) and found.positions != call.positions and found.opname not in _OTHERS:
            name.insert(0, found)
            if found.opname in _NAMES:
                break
    if not name or None in _begin(call) or any(found.opname not in _ATTRIBUTES for found in name[1:]) or name[0].opname not in _NAMES:
        return ()
    names = tuple(found.argval for found in name)
    changes = (found.argval for found in instructions if found.offset >= start and found.opname.startswith(("STORE_", "DELETE_")))
    changed = {item for argval in changes for item in (argval if isinstance(argval, tuple) else (argval,))}
    return () if changed.intersection(names) else names


def _begin(instruction: dis.Instruction) -> tuple[int | None, ...]:
    position = instruction.positions
    return (None,) if position is None else (position.lineno, position.col_offset)


def _is_harmless(names: tuple[str, ...], frame: types.FrameType) -> bool:
    """Whether a dotted name is that of a context manager that lets all errors through; no code is run to find out."""
    if not names:
        return False
    found = variables_of(frame).get(names[0], frame.f_globals.get(names[0]))
    for name in names[1:]:
        found = inspect.getattr_static(found, name, None)
    return any(found is harmless for harmless in _HARMLESS)
