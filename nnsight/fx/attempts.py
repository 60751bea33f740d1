"""Calls that a block tries: where a failure would be caught.

A recorded call runs with its graph, behind the block's line. Where the call fails whatever the values are, its fake
says so at the line. Some calls fail because of values: an index out of range, a matrix that has no inverse. That too
is raised where nothing would catch it, with the user's line in the graph. Where something would, it matters where: there
such a call is one that needs values.

Whether a frame stands where errors are caught is read off its code, whose exception table names the handlers: an ``except``, a
``finally`` that is left by ``break``, ``continue`` or ``return``, and the end of a ``with``, unless its manager is one that lets
all errors through (:mod:`~nnsight.fx.managers`).
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

from ..tracing.errors import is_internal
from .effects import is_failing
from .managers import Expression, Variables, lets_errors_through, manager_of

_TORCH = torch.__file__.rsplit("/", 1)[0]

#: What a handler checks the exception by. One without a type drops the exception at once.
_CHECKS = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH")

#: Calls whose fakes are less strict about arguments, but which fail by no value.
_TOTAL = frozenset({"softmax", "log_softmax"})


@dataclass(frozen=True)
class _Stretch:
    """Instructions, and the handler at ``target`` that is told of their errors; it may catch them, or it ends a ``with``."""

    start: int
    end: int
    target: int
    catches: bool
    is_with: bool
    manager: Expression | None


def may_fail_by_values(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call that is possible on fakes may raise an error because of values."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(item, (torch.Tensor, list)) for item in index)
    return is_failing(name) and name not in _TOTAL


def catcher() -> str | None:
    """Return in words what would catch an error of the user's code that is running, up to its outermost block, if anything would."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:  # the frames of a block end with those of its worker
        code = frame.f_code
        if not is_internal(code) and not code.co_filename.startswith(_TORCH):
            found = _caught_at(code, frame.f_lasti, Variables.of_frame(frame), frozenset())
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _caught_at(
    code: types.CodeType, offset: int, variables: Variables, inside: frozenset[types.CodeType]
) -> str | None:
    """Return in words what catches errors of the instruction at ``offset``, if anything does.

    Args:
        code: The code.
        offset: Where in it.
        variables: The variables there.
        inside: Code of generators for which this is being asked.
    """
    stretches = _stretches(code)
    while True:
        stretch = next((found for found in stretches if found.start <= offset < found.end), None)
        if stretch is None:
            return None
        if stretch.catches:
            return "a `try`"
        if stretch.is_with and (stretch.manager is None or not _lets_through(stretch.manager, variables, inside)):
            return "a `with` that may catch it"
        offset = stretch.target  # the handler raises the error again, for the one around it


def _lets_through(expression: Expression, variables: Variables, inside: frozenset[types.CodeType]) -> bool:
    manager = expression.value(variables)
    if manager.generator is None:
        return lets_errors_through(manager)
    code, its_variables = manager.generator
    if code in inside:
        return False
    return all(_caught_at(code, offset, its_variables, inside | {code}) is None for offset in _yields(code))


@functools.lru_cache(maxsize=1024)
def _yields(code: types.CodeType) -> tuple[int, ...]:
    return tuple(found.offset for found in dis.get_instructions(code) if found.opname == "YIELD_VALUE")


@functools.lru_cache(maxsize=1024)
def _stretches(code: types.CodeType) -> tuple[_Stretch, ...]:
    """Return the stretches of ``code`` that have a handler; an instruction is in one of them at most."""
    instructions = list(dis.get_instructions(code))
    position = {instruction.offset: number for number, instruction in enumerate(instructions)}
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    first: dict[int, int] = {}
    for entry in entries:
        first[entry.target] = min(entry.start, first.get(entry.target, entry.start))
    found = []
    for start, end, target in sorted({(entry.start, entry.end, entry.target) for entry in entries}):
        handler = instructions[position[target] :]
        is_with = _ends_with(handler)
        manager = manager_of(instructions[: position[first[target]]]) if is_with else None
        found.append(_Stretch(start, end, target, not is_with and _catches(handler), is_with, manager))
    return tuple(found)


def _ends_with(handler: list[dis.Instruction]) -> bool:
    """Whether the handler that begins here is the end of a ``with``."""
    return [instruction.opname for instruction in handler[:2]] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]


def _catches(handler: list[dis.Instruction]) -> bool:
    """Whether the handler that begins here is an ``except`` clause, or a ``finally`` that may drop the exception."""
    if not handler or handler[0].opname != "PUSH_EXC_INFO":
        return False
    names = (instruction.opname for instruction in handler[1:])
    for number, name in enumerate(names):
        if name in _CHECKS or name == "POP_EXCEPT" or (number == 0 and name == "POP_TOP"):
            return True
        if name == "RERAISE":
            return False
    return False
