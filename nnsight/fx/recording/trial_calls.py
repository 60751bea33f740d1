"""Trials: recorded calls, made on made-up values to see whether they fail.

Fakes raise most of the mistakes that a call raises whatever the values are, but not all: they accept dtypes that no kernel of the
operator takes (``~hidden``), and edits of elements that lie in one place. And they raise errors of their own, for other types of
mistakes than the call itself does, or for calls that would succeed. So a new call is tried on zeros. If it fails on zeros and
ones alike although fakes accept it, the values have to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..effects import is_failing
from ..program import Call, Constant, External, Input, Nest, Reference, Value
from .functions import edits_in_place, is_own

#: Number of elements up to which a call is tried.
_LARGEST = 2**20

#: Calls that fail because of values in an index, and by no dtype that fakes accept.
_INDEXING = frozenset({"__getitem__", "__setitem__"})


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
        args, kwargs = arguments(event, made.__getitem__)
        try:
            event.function(*args, **kwargs)
        except Exception as raised:
            return raised
    return None


def arguments(call: Call, tensor: Callable[[Reference], torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with tensors for what it refers to."""
    args = tuple(_given(argument, tensor) for argument in call.args)
    return args, {name: _given(argument, tensor) for name, argument in call.kwargs}


def _given(argument: Any, tensor: Callable[[Reference], torch.Tensor]) -> Any:
    """Return what an argument in an event stands for; no function in a function, which would be a cycle that holds ``tensor``."""
    if isinstance(argument, (Value, Input, External)):
        return tensor(argument)
    if isinstance(argument, Constant):
        return argument.value
    if isinstance(argument, Nest):
        return argument.build([_given(item, tensor) for item in argument.items])
    return argument


def _filled_like(fake: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device).fill_(number)
