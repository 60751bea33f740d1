"""What passes which location in a run of a model on fakes, kept for later runs of the same kind.

A block that reads and edits in place changes no size, so in the next run with inputs of the same sizes the same fakes pass the same
locations: they are offered to the block without running the model. When a block replaces a value, skips a module, or asks for
something that cannot be kept, the model is run after all. Up to the place where the block stands it is given the values that the
block has seen, from there on it goes its own way.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..runtime.carriers import is_carrier, on_tensors
from ..runtime.interleaver import Interleaver, active_run

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.FunctionType)


class Passage(NamedTuple):
    """A value that passed a location; ``leaves`` is ``None`` for one that cannot be kept."""

    location: str
    leaves: tuple[Any, ...] | None
    structure: Any

    def value(self) -> Any:
        """Return the value, in containers of its own."""
        assert self.leaves is not None
        return pytree.tree_unflatten(map(_copied, self.leaves), self.structure)


class Everywhere(dict[str, int]):
    """Says of every location that somebody waits there."""

    def __contains__(self, location: object) -> bool:
        return True


class Passing(Interleaver):
    """The run of a model as its modules see it: notes what passes, and hands everything over to the run of the blocks.

    Args:
        run: The run of the blocks.
        before: What has been offered to them already.
        left: What they left of the value that comes next, in a tuple; empty if it has not been offered.

    Attributes:
        passages: What passed, as long as the blocks changed nothing that changes sizes; else ``None``.
    """

    __slots__ = ("_before", "_left", "_run", "passages")

    def __init__(self, run: Interleaver, before: list[Passage], left: tuple[Any, ...]) -> None:
        super().__init__([])
        self._run, self._before, self._left = run, list(reversed(before)), left
        self.passages: list[Passage] | None = None if before or left else []
        self.offer = lambda run, location, value: run.handle(location, value)
        self.waited, self.counts, self.skips = Everywhere(), run.counts, run.skips

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        if self._before:
            known = self._before.pop()
            return value if known.leaves is None or any(map(is_carrier, known.leaves)) else known.value()
        if self._left:
            (value,), self._left = self._left, ()
            return value
        if self.passages is not None:
            self.passages.append(kept(location, value))
        if location not in self._run.waited:
            self.counts[location] = self.counts.get(location, 0) + 1
            return value
        before = _inside(value)
        left = self._run.offer(self._run, location, value)
        if self._run.skips or not _alike(before, _inside(left)):
            self.passages = None
        return left

    def is_waited(self, location: str) -> bool:
        return True


def kept(location: str, value: Any) -> Passage:
    """Return a value that passes a location, to be offered again later."""
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_carrier)
    try:
        return Passage(location, tuple(map(_copied, leaves)), structure)
    except _OddError:
        return Passage(location, None, structure)


class _OddError(Exception):
    """A value cannot be kept."""


def _copied(leaf: Any) -> Any:
    """Return a leaf; of an object that the model goes on filling, such as a cache, a copy with the same tensors."""
    if isinstance(leaf, (torch.Tensor, *_PLAIN)):
        return leaf
    if not is_carrier(leaf):
        raise _OddError
    tensors: dict[int, Any] = {}
    on_tensors(leaf, lambda _, tensor: tensors.setdefault(id(tensor), tensor))
    try:
        return copy.deepcopy(leaf, tensors)
    except Exception as error:
        raise _OddError from error


def _inside(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a value, and the tensors in those that carry some; and how it is built."""
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_carrier)
    carried: list[Any] = []
    for leaf in leaves:
        if is_carrier(leaf):
            on_tensors(leaf, lambda _, tensor: carried.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return leaves + carried, structure


def _alike(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> bool:
    """Whether a block has left a value built of the same objects."""
    (leaves, structure), (left, other) = before, after
    return (
        len(leaves) == len(left)
        and structure == other
        and all(one is two for one, two in zip(leaves, left, strict=True))
    )


def play(
    passages: list[Passage], run: Interleaver, go_on: Callable[[list[Passage], tuple[Any, ...]], Any]
) -> tuple[bool, Any]:
    """Offer what passed to the blocks of a run; return whether that was all, and what the run returns.

    Args:
        passages: What passed; the last of them is what the model returned.
        run: The run of the blocks.
        go_on: Runs the model from where the blocks stand: called with what was offered before, and what they left of the next value.
    """
    value: Any = None
    for number, passage in enumerate(passages):
        location = passage.location
        if location not in run.waited and number < len(passages) - 1:
            run.counts[location] = run.counts.get(location, 0) + 1
            continue
        if passage.leaves is None:
            return False, go_on(passages[:number], ())
        value = passage.value()
        before = _inside(value)
        left = run.offer(run, location, value)
        if run.skips or not _alike(before, _inside(left)):
            return False, go_on(passages[:number], (left,))
        value = left
    return True, value


def passing(
    run: Interleaver, before: list[Passage], left: tuple[Any, ...], call: Callable[[], Any]
) -> tuple[Any, list[Passage] | None]:
    """Call a model within ``run``; return its output, and what passed if that can be offered again."""
    passing = Passing(run, before, left)
    token = active_run.set(passing)
    try:
        output = call()
    finally:
        active_run.reset(token)
    return output, passing.passages
