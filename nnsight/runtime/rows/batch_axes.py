"""The batch axis of each tensor: the dimension that has the rows of the batch.

The size of a dimension does not identify it: ``[2, 768]`` may be two prompts or two experts, and ``[6, 2, 768]`` may have its two prompts
in the middle. So :mod:`~nnsight.runtime.probing` runs the model twice on fake tensors, with two different numbers of rows. The dimension
that grows with the rows is the batch axis, and a tensor without such a dimension belongs to all invokes. The probe runs once for each model
and kind of input; after that, a location costs a look-up.

* A batch axis may have several entries for each row, such as the ``[batch * sequence]`` of a router. :class:`Rows` has their order.
* If two dimensions grow with the rows (scores of every row against every row), the first is narrowed.
* A list or tuple with one item for each row, in both runs of the probe, is narrowed to the items of the invoke.
* If the model sorts the entries by something other than the rows, each invoke gets the whole tensor, and a warning says so.
* Sizes are taken from the tensor of the run, so sequences and beams may grow. A tensor whose size is no multiple of the number of rows
  is not narrowed.
* Where the probe has no result (an optional argument, or a model that does not run on fake tensors), the first dimension is the batch axis
  if its size is the number of rows.

For the arguments of the model, those of the invokes are compared with the result of ``_batch``: a joined dimension has as many entries as
the invokes have together. If ``_batch`` builds another structure, first dimensions with the number of rows are the batch axes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..batched_containers import is_batched_container

logger = logging.getLogger("nnsight.runtime")


@dataclass(frozen=True)
class Rows:
    """The batch axis of a tensor, and the order of the rows' entries in it.

    Attributes:
        outer: How often the batch is repeated in ``dim``: entry ``i`` belongs to row ``i // inner % rows``. It is 1 if a row's entries
            are adjacent, as in ``x.flatten(0, 1)`` of ``[batch, sequence]``; 2 in ``cat([x, x])``; the length of the sequence in
            ``x.flatten(0, 1)`` of ``[sequence, batch]``.
    """

    dim: int  # the batch axis
    rank: int | None = None  # number of dimensions of the tensor; `None` if it was not probed
    outer: int = 1
    inner: int = 1  # number of adjacent entries of a row
    exact: bool = False  # whether each row has exactly one entry

    def fit(self, tensor: torch.Tensor, count: int) -> bool:
        """Whether ``tensor`` can have ``count`` rows in this way, by its number of dimensions and its size."""
        shape = tensor.shape
        if len(shape) <= self.dim or self.rank not in (None, len(shape)):
            return False
        if self.exact or not count or not shape[self.dim]:
            return shape[self.dim] == count
        if shape[self.dim] % count:
            return False
        # It is not known whether `outer` or `inner` grows with the sequence, so the size must be that of the probe.
        return self.outer == 1 or self.inner == 1 or shape[self.dim] == self.outer * count * self.inner

    @property
    def scattered(self) -> bool:
        """Whether the entries of a row are not adjacent, so that no view has them all."""
        return self.outer != 1

    def split(self, tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, int, int]:
        """Split the batch axis so that a dimension has size ``count``; return the result, that dimension, and how many were added."""
        dim = self.dim
        if tensor.shape[dim] == count:
            return tensor, dim, 0
        # One size is -1, independent of the length of the sequence: otherwise a compiled trace would be recorded again for each length.
        if self.outer == 1:
            return tensor.unflatten(dim, (count, -1)), dim, 1
        if self.inner == 1:
            return tensor.unflatten(dim, (-1, count)), dim + 1, 1
        return tensor.unflatten(dim, (self.outer, count, self.inner)), dim + 1, 2

    def merge(self, tensor: torch.Tensor, added: int) -> torch.Tensor:
        """Undo :meth:`split`."""
        return tensor.flatten(self.dim, self.dim + added) if added else tensor


#: The rule for tensors that were not probed: the first dimension, if its size is the number of rows.
FIRST = Rows(0, exact=True)

#: Stands for a batch axis whose entries are in an unknown order. It fits no tensor.
MIXED_ROWS = Rows(0, rank=-1)

#: The rule for the result of a generation: one or several sequences for each row.
SEQUENCES = Rows(0)


@dataclass
class OccurrenceRows:
    """The batch axes of the value at one occurrence of a location."""

    rows: dict[str, Rows | None]  # the batch axis of each leaf, by the leaf's path; `None` for a leaf without rows
    row_lists: frozenset[str] = frozenset()  # the paths of lists and tuples with one item for each row, see `lists_in`
    otherwise: Rows = FIRST  # the rule for leaves that were not probed
    #: A cache of the results of `of`, the latest structure first.
    known: list[tuple[pytree.TreeSpec, tuple[Rows | None, ...]]] = field(default_factory=list)

    def of(self, value: Any, structure: pytree.TreeSpec, is_leaf: Callable[[Any], bool]) -> tuple[Rows | None, ...]:
        """Return the batch axis of each leaf of ``value``, whose pytree spec is ``structure``."""
        for other, found in self.known:
            if other == structure:
                return found
        found = tuple(self.rows.get(path, self.otherwise) for path in leaf_paths(value, is_leaf))
        del self.known[8:]
        self.known.insert(0, (structure, found))
        return found


@dataclass
class BatchDims:
    """The batch axes of all values of a model, for one kind of input."""

    by_location: dict[str, tuple[OccurrenceRows, ...]] = field(default_factory=dict)  # one for each occurrence, or one if all are equal
    in_containers: dict[str, Rows | None] = field(default_factory=dict)  # rows of tensors in batched containers, by class and attribute
    mixed: set[str] = field(default_factory=set)  # the locations of which a warning has said that their rows are mixed

    def of(
        self, location: str, occurrence: int, value: Any, structure: pytree.TreeSpec, is_leaf: Callable[[Any], bool] = is_batched_container
    ) -> Sequence[Rows | None]:
        """Return the batch axis of each leaf of ``value`` at ``location``; ``None`` for a leaf without rows."""
        occurrences = self.by_location.get(location)
        if occurrences is None:
            return (FIRST,) * structure.num_leaves
        found = occurrences[occurrence % len(occurrences)].of(value, structure, is_leaf)
        if MIXED_ROWS in found and location not in self.mixed:
            self.mixed.add(location)
            logger.warning(
                "Each invoke sees and edits all rows of the batch at `%s`, because the model puts their entries into an order of its own.",
                location,
            )
        return found

    def row_lists(self, location: str, occurrence: int, value: Any, rows: int) -> list[Any]:
        """Return the lists and tuples in ``value`` at ``location`` that have one item for each of the ``rows``."""
        occurrences = self.by_location.get(location, ())
        paths = occurrences[occurrence % len(occurrences)].row_lists if occurrences else None
        return [found for path, found in lists_in(value) if path in paths and len(found) == rows] if paths else []


def lists_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the lists and tuples in ``value``, with a path for each."""
    if type(value) in (list, tuple):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
    for key, item in items:
        yield from lists_in(item, f"{path}[{key!r}]")


def leaf_paths(value: Any, is_leaf: Callable[[Any], bool] = is_batched_container) -> list[str]:
    """Return a path for each leaf of ``value``, such as ``[0]['hidden']``. Batched containers are leaves."""
    try:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(value, is_leaf=is_leaf)[0]]
    except ValueError:  # a container type is registered with pytree without keys
        leaves, structure = pytree.tree_flatten(value, is_leaf=is_leaf)
        return [f"{number} of {structure}" for number in range(len(leaves))]
