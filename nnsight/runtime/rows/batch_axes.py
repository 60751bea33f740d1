"""Which dimension of a tensor has the rows of the batch.

Sizes do not tell: ``[2, 768]`` may be two prompts or two experts, ``[6, 2, 768]`` may have its two prompts in the middle. So
:mod:`~nnsight.runtime.probing` runs the model twice on fake tensors, with two other numbers of rows. The dimension that grows with the rows
has them, and a tensor without such a dimension belongs to all invokes. This is done once for a model and a kind of input; after that a
location costs a look-up.

* A dimension may have several entries for each row, such as the ``[batch * sequence]`` of a router; :class:`Rows` has their order.
* If two dimensions grow with the rows (scores of every row against every row), the first is narrowed.
* Sizes are taken from the tensor at hand, so sequences and beams may grow. A tensor whose size is no multiple of the number of rows
  is given whole.
* Where the probe saw nothing (an optional argument, or a model that does not run on fakes), the first dimension has the rows if it has
  their number.

The arguments of the invokes are compared with what ``_batch`` has joined: a joined dimension has as many entries as those of the invokes
together. If ``_batch`` builds another structure, the first dimensions of its tensors are judged by their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..batched_containers import is_batched_container


@dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor are.

    Attributes:
        outer: How often the batch is repeated in ``dim``: entry ``i`` belongs to row ``i // inner % rows``. It is 1 where a row's entries
            lie side by side, as in ``x.flatten(0, 1)`` of ``[batch, sequence]``; 2 in ``cat([x, x])``; the length in ``x.flatten(0, 1)``
            of ``[sequence, batch]``.
    """

    dim: int  # the dimension
    rank: int | None = None  # how many dimensions the tensor has; `None` where the place was not probed
    outer: int = 1
    inner: int = 1  # how many entries of a row lie side by side
    exact: bool = False  # whether the dimension has one entry for each row

    def fit(self, tensor: torch.Tensor, count: int) -> bool:
        """Whether ``tensor`` can have ``count`` rows here."""
        shape = tensor.shape
        if len(shape) <= self.dim or self.rank not in (None, len(shape)):
            return False
        if self.exact or not count or not shape[self.dim]:
            return shape[self.dim] == count
        if shape[self.dim] % count:
            return False
        # Which of both grows with a sequence is not known.
        return self.outer == 1 or self.inner == 1 or shape[self.dim] == self.outer * count * self.inner

    @property
    def scattered(self) -> bool:
        """Whether the entries of a row do not lie side by side, so that no view has them all."""
        return self.outer != 1

    def split(self, tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, int, int]:
        """Return ``tensor`` with a dimension of size ``count``, that dimension, and how many were added."""
        dim = self.dim
        if tensor.shape[dim] == count:
            return tensor, dim, 0
        # One size is left open: which, must not depend on the sequence, or a compiled trace would be recorded for each length.
        if self.outer == 1:
            return tensor.unflatten(dim, (count, -1)), dim, 1
        if self.inner == 1:
            return tensor.unflatten(dim, (-1, count)), dim + 1, 1
        return tensor.unflatten(dim, (self.outer, count, self.inner)), dim + 1, 2

    def merge(self, tensor: torch.Tensor, added: int) -> torch.Tensor:
        """Undo :meth:`split`."""
        return tensor.flatten(self.dim, self.dim + added) if added else tensor


#: The rule where nothing is known.
FIRST = Rows(0, exact=True)

#: The rule for what a generation returns: one or several sequences for each row.
SEQUENCES = Rows(0)


@dataclass
class Place:
    """What is known of one occurrence of a location."""

    rows: dict[str, Rows | None]  # by the path of a leaf, where its rows are; `None` if it has none
    otherwise: Rows = FIRST  # the rule for leaves that are not among them
    #: The answers for structures that were asked for lately.
    known: list[tuple[pytree.TreeSpec, tuple[Rows | None, ...]]] = field(default_factory=list)

    def of(self, value: Any, structure: pytree.TreeSpec) -> tuple[Rows | None, ...]:
        """Return where the rows of each leaf of ``value`` are."""
        for other, found in self.known:
            if other == structure:
                return found
        found = tuple(self.rows.get(path, self.otherwise) for path in leaf_paths(value))
        del self.known[8:]
        self.known.insert(0, (structure, found))
        return found


@dataclass
class BatchDims:
    """What is known of the dimensions of a model's tensors, for one kind of input."""

    places: dict[str, tuple[Place, ...]] = field(default_factory=dict)  # occurrences of each location in a forward pass; one, if they agree
    in_containers: dict[str, Rows | None] = field(default_factory=dict)  # rows of tensors in batched containers, by class and attribute

    def of(self, location: str, occurrence: int, value: Any, structure: pytree.TreeSpec) -> Sequence[Rows | None]:
        """Return where the rows of each leaf of ``value``, or of one of its ``structure``, are; ``None`` for a leaf without."""
        places = self.places.get(location)
        if places is None:
            return (FIRST,) * structure.num_leaves
        return places[occurrence % len(places)].of(value, structure)


def leaf_paths(value: Any) -> list[str]:
    """Return a name for each leaf of ``value``: its keys from the root, batched containers being leaves."""
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value, is_leaf=is_batched_container)[0]]
    except ValueError:  # a container that was registered without keys
        leaves, structure = pytree.tree_flatten(value, is_leaf=is_batched_container)
        return [f"{number} of {structure}" for number in range(len(leaves))]
