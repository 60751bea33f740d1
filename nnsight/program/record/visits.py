"""Visits: a recorded block gets the value at a location, and leaves a value there. References of blocks to these and other values."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ...runtime.batched_containers import is_batched_container
from ..run.occurrences import tensors_at


class References:
    """The node and output that each fake tensor is. A block refers to a node of its own, if it has one for the tensor.

    Blocks can read the same tensor at different locations. The node of another block may run later than the present one.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._latest: Any = WeakIdKeyDictionary()
        self._by_block: dict[Hashable, Any] = {}

    @property
    def own(self) -> Any:
        """The references that the block whose turn it is has made."""
        block = len(self._recorder.runs), self._recorder.block
        if block not in self._by_block:
            self._by_block[block] = WeakIdKeyDictionary()
        return self._by_block[block]

    def __setitem__(self, fake: torch.Tensor, reference: tuple[int, int]) -> None:
        self._latest[fake] = self.own[fake] = reference

    def get(self, fake: torch.Tensor, default: Any = None) -> Any:
        found = self.own.get(fake)
        return self._latest.get(fake, default) if found is None else found

    def __getitem__(self, fake: torch.Tensor) -> tuple[int, int]:
        found: tuple[int, int] | None = self.get(fake)
        if found is None:
            raise KeyError("the tensor has no node")
        return found

    def for_block(self, fake: torch.Tensor) -> tuple[int, int]:
        """Return the reference of a tensor. The running block gets a node of its own for a constant or a weight."""
        found = self[fake]
        node = self._recorder.nodes[found[0]]
        if node["do"] in ("const", "weight") and fake not in self.own:
            content = {key: node[key] for key in ("tensor", "name") if key in node}
            found = self[fake] = (self._recorder.emit(node["do"], **content), 0)
        return found

    def __contains__(self, fake: torch.Tensor) -> bool:
        return fake in self._latest

    def items(self) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
        """Yield all tensors, each with its reference."""
        for fake in list(self._latest):
            yield fake, self[fake]


@dataclass
class Visit:
    """A visit of ``block`` to the location ``site``, at occurrence ``at``."""

    block: int | None
    site: str
    at: int
    loop: bool  # whether the block waits in a loop over occurrences
    structure: Any  # the nesting of the value
    passed: Any  # the value in the model
    given: Any  # the value for the block
    own: dict[int, torch.Tensor]  # the model's tensors for which the block gets objects of its own, by `id` of the object
    places: list[tuple[int, int | None]]  # number of each leaf, and number inside it if the leaf is a cache
    leaves: list[Any]
    reads: dict[int, int] = field(default_factory=dict)  # the `read` node of each leaf
    keys: list[tuple[str, int]] = field(default_factory=list)  # for each leaf of a dict: its key, and the number of the first leaf there
    lists: dict[str | None, list[int]] = field(default_factory=dict)  # lengths of the lists in the value, by key if it is a dict
    edited: set[int] = field(default_factory=set)  # `read` nodes of leaves that were edited in place
    barrier: dict[str, Any] | None = None  # the barrier in which the block waits when it leaves the location

    def place(self, number: int) -> dict[str, Any]:
        """Return the content of a node that names the leaf in ``places[number]``."""
        leaf, inside = self.places[number]
        said: dict[str, Any] = {"site": self.site, "at": self.at, "leaf": leaf}
        key: str | None = None
        if self.keys:
            key, first = self.keys[leaf]
            said |= {"key": key, "leaf": leaf - first}
        if key in self.lists:
            said["lists"] = self.lists[key]
        if inside is not None:
            said["inside"] = inside
        return {**said, "loop": True} if self.loop else said

    def for_model(self, left: Any) -> Any:
        """Return the value that the block leaves, with the model's tensors in place of the block's own objects."""
        if torch.is_grad_enabled():  # by the model, for a derivative of its own
            left = self._with_gradients(left)
        if not self.own:
            return left
        if left is self.given and all(map(operator.is_, tensors_at(left), self.leaves)):
            return self.passed
        return pytree.tree_map(lambda leaf: self.own.get(id(leaf), leaf), left, is_leaf=is_batched_container)

    def _with_gradients(self, left: Any) -> Any:
        """Let autograd see replacements, which the block computes without it, as functions of the values that they replace."""
        tied = {
            id(new): new + old.sum() * 0
            for old, new in zip(self.leaves, tensors_at(left), strict=True)
            if isinstance(new, torch.Tensor) and new is not old and old.requires_grad and not new.requires_grad
        }
        return pytree.tree_map(lambda leaf: tied.get(id(leaf), leaf), left, is_leaf=is_batched_container) if tied else left

    def reads_of_known(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each ``read`` of a tensor that blocks knew before the visit, with the model's tensor."""
        for number, read in self.reads.items():
            known = self.own.get(id(self.leaves[number]))
            if known is not None:
                yield read, known
