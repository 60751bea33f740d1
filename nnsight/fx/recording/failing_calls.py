"""Calls that fail: which may because of values, what would catch their errors, and which fail for any values.

A recorded call runs with its graph, when the block has gone on. An error that does not depend on values is raised at the
call's line by its fake. Some calls fail because of values: an index out of range, a matrix without an inverse. Their errors
are raised by the graph, with the user's line, too late for a handler around the call. So such a call cuts the graph if it
is inside a ``try`` or a ``with``. The exception tables of the running frames' code tell where that is. Each ``try`` counts, also with
``finally`` only, and each ``with``, except those of torch's modes, as in ``with torch.no_grad():``. Code inside an ``except`` or
``finally`` clause is not inside its ``try``.

Fakes do not raise all mistakes: they accept dtypes that no kernel of the operator takes (``~hidden``), and edits of elements that lie in
one place. And they raise errors of their own, for other types of mistakes than the call itself does, or for calls that would succeed. So a
new call is tried on zeros. If it fails on zeros and ones alike although fakes accept it, the values have to decide.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from ...tracing.errors import is_internal
from ..block_events import Call, Reference
from ..effects import is_failing
from .functions import edits_in_place, is_own

_TORCH = torch.__file__.rsplit("/", 1)[0]

#: Names in the header of a ``with`` that lets all errors through; with a dot, those of attributes.
_HARMLESS = frozenset(
    "torch .no_grad .enable_grad .set_grad_enabled .inference_mode .autocast .bfloat16 .float16 .random .fork_rng".split()
)

#: Calls whose fakes are less strict about arguments, but which fail by no value.
_TOTAL = frozenset({"softmax", "log_softmax"})

#: Number of elements up to which a call is tried.
_LARGEST = 2**20

#: Calls that fail because of values in an index, and by no dtype that fakes accept.
_INDEXING = frozenset({"__getitem__", "__setitem__"})


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
            for header in _scopes(code, frame.f_lasti):
                if header is None:
                    return "a `try`"
                if not header <= _HARMLESS or frame.f_globals.get("torch") is not torch:
                    return "a `with` that may catch it"
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _scopes(code: types.CodeType, offset: int) -> tuple[frozenset[str] | None, ...]:
    """Return what is around the instruction at ``offset``: ``None`` for a ``try``, for a ``with`` the names in its header."""
    table = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    instructions = list(dis.get_instructions(code))
    found: list[frozenset[str] | None] = []
    while (entry := next((entry for entry in table if entry.start <= offset < entry.end), None)) is not None:
        offset = entry.target  # the handler may raise the error again, for the one around it
        names = [instruction.opname for instruction in instructions if instruction.offset >= offset]
        if names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            start = min(other.start for other in table if other.target == offset)
            found.append(_header([instruction for instruction in instructions if instruction.offset < start]))
        elif names[0] == "PUSH_EXC_INFO":  # others only clean up, behind an `except` clause or a comprehension
            found.append(None)
    return tuple(found)


def _header(before: list[dis.Instruction]) -> frozenset[str]:
    """Return the names in the header of a ``with``, given the instructions before its body."""
    entering = next(found for found in reversed(before) if found.opname == "BEFORE_WITH").positions
    if entering is None or entering.lineno is None:
        return frozenset({"unknown"})
    names = set()
    for found in before:
        place = found.positions
        if place is None or place.lineno is None or not _is_inside(place, entering):
            continue
        if found.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.add(f".{found.argval}")
        elif found.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(found.argval)
        elif found.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            names.add("a local variable")
    return frozenset(names)


def _is_inside(place: Any, whole: Any) -> bool:
    begins = (whole.lineno, whole.col_offset) <= (place.lineno, place.col_offset)
    return begins and (place.end_lineno, place.end_col_offset) <= (whole.end_lineno, whole.end_col_offset)


def error_on_values(event: Call, references: Sequence[Reference], fakes: Sequence[torch.Tensor]) -> tuple[bool, Exception | None]:
    """Return whether a call could be tried on zeros, and the error that it raised."""
    if not _can_be_tried(fakes):
        return False, None
    return True, _error_on(0, event, references, fakes)


def is_possible(event: Call, references: Sequence[Reference], fakes: Sequence[torch.Tensor], result: Any) -> bool:
    """Whether a call that fakes accept is one that there is for these dtypes, as far as trials tell."""
    name = getattr(event.function, "__name__", "").partition(".")[0]
    overlaps = edits_in_place(event.function) and isinstance(result, torch.Tensor) and 0 in result.stride()
    if is_own(event.function) or not _can_be_tried(fakes):  # the former may do more than compute
        return True
    if (is_failing(name) or name in _INDEXING) and not overlaps:  # for what reason it fails cannot be told
        return True
    return any(_error_on(number, event, references, fakes) is None for number in (0, 1))


def _can_be_tried(fakes: Sequence[torch.Tensor]) -> bool:
    return all(fake.device.type == "cpu" and fake.numel() <= _LARGEST for fake in fakes)


def _error_on(number: int, event: Call, references: Sequence[Reference], fakes: Sequence[torch.Tensor]) -> Exception | None:
    with torch._C.DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        made = {reference: _filled_like(fake, number) for reference, fake in zip(references, fakes, strict=True)}
        args, kwargs = event.arguments(made.__getitem__)
        try:
            event.function(*args, **kwargs)
        except Exception as raised:
            return raised
    return None


def _filled_like(fake: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device).fill_(number)
