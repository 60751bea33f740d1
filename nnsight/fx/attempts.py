"""Calls that a block tries: where a failure would be caught.

A recorded call runs with its graph, behind the block's line. Where the call fails whatever the values are, its fake
says so at the line. Some calls fail because of values: an index out of range, a matrix that has no inverse. That too
is raised where nothing would catch it, with the user's line in the graph. Inside a ``try`` it matters where: there
such a call is one that needs values.

Whether a frame stands in a ``try`` with an ``except`` is read off its code, whose exception table names the handlers.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

import torch

from ..tracing.errors import BLOCK_NAME, is_internal
from .effects import is_failing

_TORCH = torch.__file__.rsplit("/", 1)[0]

#: What a handler checks the exception by. One without a type drops the exception at once.
_CHECKS = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH")

#: Calls whose fakes are less strict about arguments, but which fail by no value.
_TOTAL = frozenset({"softmax", "log_softmax"})


def may_fail_by_values(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call that is possible on fakes may raise an error because of values."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(item, (torch.Tensor, list)) for item in index)
    return is_failing(name) and name not in _TOTAL


def is_tried() -> bool:
    """Whether the user's code that is running, up to the block it belongs to, would catch an error."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_internal(code) and not code.co_filename.startswith(_TORCH):
            if any(start <= frame.f_lasti < end for start, end in _tried(code)):
                return True
            if code.co_name == BLOCK_NAME:
                return False
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _tried(code: types.CodeType) -> tuple[tuple[int, int], ...]:
    """Return stretches of ``code`` whose errors a handler may catch."""
    instructions = list(dis.get_instructions(code))
    position = {instruction.offset: number for number, instruction in enumerate(instructions)}
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return tuple((entry.start, entry.end) for entry in entries if _catches(instructions[position[entry.target] :]))


def _catches(handler: list[dis.Instruction]) -> bool:
    """Whether the handler that begins here is an ``except`` clause, rather than the end of a ``with`` or a ``finally``."""
    if not handler or handler[0].opname != "PUSH_EXC_INFO":
        return False
    names = (instruction.opname for instruction in handler[1:])
    for number, name in enumerate(names):
        if name in _CHECKS or (number == 0 and name == "POP_TOP"):
            return True
        if name in ("WITH_EXCEPT_START", "RERAISE"):
            return False
    return False
