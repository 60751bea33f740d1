"""Calls that fail: because of their values, or because of shapes and dtypes alone.

A recorded call runs with its graph, after the block has continued. An error that does not depend on values is raised at the line of the
call, because the call fails on fake tensors. Some calls fail because of values: an index out of range, a matrix without an inverse. The
graph raises their errors, with the user's line, but too late for a handler around the call. So such a call cuts the graph if it is inside
a ``try`` or a ``with``. The exception tables of the running code objects tell whether it is. Each ``try`` counts, also with ``finally``
only. Each ``with`` counts, except those of torch's modes, such as ``with torch.no_grad():``. Code inside an ``except`` or ``finally``
clause is not inside its ``try``.

Fake tensors do not detect all mistakes. They accept dtypes for which the operator has no kernel (``~hidden`` of floats), and edits of
elements that share an address. They also raise errors where the call itself raises another type, or succeeds. So a call that fails on
fakes is tried on zeros, and one that fakes accept on zeros, then on ones. If fakes and trials disagree, the call cuts the graph.
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
from ..effects import divides_by_zero, is_failing
from .functions import edits_in_place, is_custom

_TORCH = torch.__file__.rsplit("/", 1)[0]

#: Names that the header of a ``with`` may use if it catches no error; attributes begin with a dot.
_HARMLESS = frozenset(
    "torch .no_grad .enable_grad .set_grad_enabled .inference_mode .autocast .bfloat16 .float16 .random .fork_rng".split()
)

#: Calls that no value makes fail. They are listed in :data:`~nnsight.fx.effects.FAILING` because their fakes accept wrong arguments.
_TOTAL = frozenset({"softmax", "log_softmax", "normal_"})

#: Most elements of a tensor with which a call is tried.
_LARGEST = 2**20

#: Calls that may fail because of the values of an index, but not because of a dtype that fakes accept.
_INDEXING = frozenset({"__getitem__", "__setitem__"})


def may_fail_by_values(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call that succeeds on fakes may raise an error because of values."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(item, (torch.Tensor, list)) for item in index)
    return (is_failing(name) and name not in _TOTAL) or divides_by_zero(name, args, kwargs)


def handler(only_try: bool = False) -> str | None:
    """Return, in words, a statement around the running user code that may catch an error; ``None`` if there is none.

    With ``only_try``, a ``with`` does not count.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:  # a block runs in a greenlet, whose frames do not include those around the block
        code = frame.f_code
        if not is_internal(code) and not code.co_filename.startswith(_TORCH):
            for header in _scopes(code, frame.f_lasti):
                if header is None:
                    return "a `try`"
                if not only_try and (not header <= _HARMLESS or frame.f_globals.get("torch") is not torch):
                    return "a `with` that may catch it"
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _scopes(code: types.CodeType, offset: int) -> tuple[frozenset[str] | None, ...]:
    """Return the statements around the instruction at ``offset``: ``None`` for a ``try``, the names in the header for a ``with``."""
    table = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    instructions = list(dis.get_instructions(code))
    found: list[frozenset[str] | None] = []
    while (entry := next((entry for entry in table if entry.start <= offset < entry.end), None)) is not None:
        offset = entry.target  # the entry of the handler itself is the one around this entry
        names = [instruction.opname for instruction in instructions if instruction.offset >= offset]
        if names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            start = min(other.start for other in table if other.target == offset)
            found.append(_header([instruction for instruction in instructions if instruction.offset < start]))
        elif names[0] == "PUSH_EXC_INFO":  # other handlers only clean up, after an `except` clause or a comprehension
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


def error_on_values(
    event: Call, references: Sequence[Reference], fakes: Sequence[torch.Tensor], failure: Exception
) -> tuple[bool, Exception | None]:
    """Return whether it is known how a call that raises ``failure`` on fakes ends, and its error, if any. The call is tried on zeros.

    A call on another device is tried on the CPU: a kernel that fails on a GPU can make the GPU unusable for the process. A call on several
    devices needs no trial.
    """
    devices = list(dict.fromkeys(str(fake.device) for fake in fakes if fake.dim()))
    if len(devices) > 1 and "device" in str(failure).lower():  # the words of fakes do not say what is wrong
        found = " and ".join(devices)
        return True, RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {found}!")
    if any(fake.numel() > _LARGEST for fake in fakes) or len({fake.device for fake in fakes}) > 1:
        return False, None
    error = _error_on(0, event, references, fakes)
    if error is not None and fakes and fakes[0].device.type != "cpu" and "device" in str(error):  # a constant is on the real device
        return False, None
    return True, error


def is_possible(event: Call, references: Sequence[Reference], fakes: Sequence[torch.Tensor], result: Any) -> bool:
    """Whether a call that fakes accept has a kernel for its arguments; ``True`` where a trial on zeros and ones cannot tell."""
    name = getattr(event.function, "__name__", "").partition(".")[0]
    overlaps = edits_in_place(event.function) and isinstance(result, torch.Tensor) and 0 in result.stride()
    if is_custom(event.function) or any(fake.device.type != "cpu" or fake.numel() > _LARGEST for fake in fakes):
        return True  # a custom operator may have side effects
    fails = is_failing(name) and not edits_in_place(event.function)  # zeros and ones may be invalid values for it
    if (fails or name in _INDEXING) and not overlaps:
        return True
    return any(_error_on(number, event, references, fakes) is None for number in (0, 1))


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
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="cpu").fill_(number)
