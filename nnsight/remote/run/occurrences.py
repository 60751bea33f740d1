"""What passes which location in a run of a model on fakes, kept for later runs of the same kind.

A block that reads and edits in place changes no size, so in the next run with inputs of the same sizes the like of the same fakes passes
the same locations: it is offered to the block without running the model. The fakes are new ones each time (:class:`Anew`), for a
fake stands for one value of one run, also in lists of the user that wait for results. When a block replaces a value, skips a module, or
asks for something that cannot be kept, the model is run after all. Up to the place where the block stands it is given the values that the
block has seen, from there on it goes its own way.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.carriers import is_carrier, on_tensors
from ...runtime.interleaver import Everywhere, Interleaver, active_run

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.FunctionType)


class Passage(NamedTuple):
    """A value that passed a location; ``leaves`` is ``None`` for one that cannot be kept."""

    location: str
    leaves: tuple[Any, ...] | None
    structure: Any

    def value(self, anew: Anew) -> Any:
        """Return the value, in containers of its own, with new fakes."""
        assert self.leaves is not None
        return pytree.tree_unflatten([_copied(leaf, anew) for leaf in self.leaves], self.structure)


class Anew:
    """New fakes in place of known ones, the same for the same, which share memory as those do.

    Args:
        kept: What identifies memory that stays what it is: that of the model.
    """

    def __init__(self, kept: frozenset[int]) -> None:
        self._kept = kept
        self._made: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, known: torch.Tensor) -> torch.Tensor:
        """Return what stands for ``known``."""
        if not isinstance(known, FakeTensor):
            return known
        made = self._made.get(id(known))
        if made is None:
            made = self._made[id(known)] = self._make(known)
        return made

    def _make(self, known: FakeTensor) -> torch.Tensor:
        storage = known.untyped_storage()
        if storage._cdata in self._kept:
            return known
        new = self._storages.get(storage._cdata)
        with _disable_current_modes():
            if new is None:
                new = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
                self._storages[storage._cdata] = new
            like = torch.empty(0, dtype=known.dtype, device="meta")
            like.set_(new, known.storage_offset(), known.size(), known.stride())
            return FakeTensor(known.fake_mode, like, known.device)


def fake_like(known: FakeTensor) -> torch.Tensor:
    """Return a new fake of the same size and type."""
    return Anew(frozenset())._make(known)


class Passing(Interleaver):
    """The run of a model as its modules see it: notes what passes, and hands everything over to the run of the blocks.

    Args:
        run: The run of the blocks.
        before: What has been offered to them already.
        left: What they left of the value that comes next, in a tuple; empty if it has not been offered.

    Attributes:
        passages: What passed, as long as the blocks changed nothing that changes sizes; else ``None``.
    """

    __slots__ = ("_anew", "_before", "_left", "_run", "passages")

    def __init__(self, run: Interleaver, before: list[Passage], left: tuple[Any, ...], anew: Anew) -> None:
        super().__init__([])
        self._run, self._before, self._left, self._anew = run, list(reversed(before)), left, anew
        self.passages: list[Passage] | None = None if before or left else []
        self.offer = lambda run, location, value: run.handle(location, value)
        self.waited, self.counts, self.skips = Everywhere(), run.counts, run.skips

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        if self._before:
            known = self._before.pop()
            odd = known.leaves is None or any(map(is_carrier, known.leaves))
            return value if odd else known.value(self._anew)
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


def _copied(leaf: Any, tensor: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    """Return a leaf; of an object that the model goes on filling, such as a cache, a copy. ``tensor`` gives the tensors."""
    if isinstance(leaf, torch.Tensor):
        return tensor(leaf)
    if isinstance(leaf, _PLAIN):
        return leaf
    if not is_carrier(leaf):
        raise _OddError
    tensors: dict[int, Any] = {}

    def note(_: str, found: torch.Tensor) -> torch.Tensor:
        tensors[id(found)] = tensor(found)
        return found

    on_tensors(leaf, note)
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
    passages: list[Passage], run: Interleaver, anew: Anew, go_on: Callable[[list[Passage], tuple[Any, ...]], Any]
) -> tuple[bool, Any]:
    """Offer what passed to the blocks of a run; return whether that was all, and what the run returns.

    Args:
        passages: What passed; the last of them is what the model returned.
        run: The run of the blocks.
        anew: Makes the fakes.
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
        value = passage.value(anew)
        before = _inside(value)
        left = run.offer(run, location, value)
        if run.skips or not _alike(before, _inside(left)):
            return False, go_on(passages[:number], (left,))
        value = left
    return True, value


def passing(
    run: Interleaver, before: list[Passage], left: tuple[Any, ...], anew: Anew, call: Callable[[], Any]
) -> tuple[Any, list[Passage] | None]:
    """Call a model within ``run``; return its output, and what passed if that can be offered again."""
    passing = Passing(run, before, left, anew)
    token = active_run.set(passing)
    try:
        output = call()
    finally:
        active_run.reset(token)
    return output, passing.passages
