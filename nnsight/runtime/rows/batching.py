"""Several inputs in one forward pass: each invoke sees only its own rows.

The inputs of all invokes run as one batch. A :class:`BatchGroup` is the range of rows of one invoke. At each location the invoke gets the
value narrowed to these rows. The rows are views, so in-place edits change the model's value. A replacement is concatenated with the rows of
the other invokes. All of this is done by ordinary tensor operations, which become part of a compiled graph.
:mod:`~nnsight.runtime.rows.batch_axes` finds the dimension that has the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..batched_containers import is_batched_container, on_tensors, write_back
from ..errors import ReplacementShapeError, structure_message
from .batch_axes import FIRST, BatchDims, Rows
from .gradient_sources import note_turn, share_rows


class RowSequence:
    """Base class of lists and arrays with one or several items for each row. Pytree must treat a subclass as a leaf."""

    def part(self, items: slice) -> Any:
        """Return the items of a slice, as an object of this class."""
        raise NotImplementedError

    def put_items(self: Any, items: slice, part: Any) -> None:
        """Replace the items of a slice by those of ``part``."""
        self[items] = part


class RowList(RowSequence, list[Any]):
    """A list with one or several items for each row."""

    def part(self, items: slice) -> RowList:
        return RowList(self[items])


@dataclass(frozen=True)
class BatchGroup:
    """The rows of one invoke."""

    start: int  # the first row
    size: int  # number of rows of the invoke
    total: int  # number of rows of the whole batch
    #: The batch axes of the model's values. By default, a first dimension of size `total` is a batch axis.
    dims: BatchDims = field(default_factory=BatchDims, compare=False)

    def __iter__(self) -> Iterator[int]:
        """Yield the first row and the number of rows."""
        return iter((self.start, self.size))

    def __getitem__(self, index: int) -> int:
        return (self.start, self.size)[index]

    def narrow(self, value: Any, location: str = "", occurrence: int = 0) -> Any:
        """Return ``value``, the model's value at ``location``, with all its tensors narrowed to these rows."""
        return View(self, location, occurrence, value).value

    def view(self, location: str, occurrence: int, whole: Any) -> View:
        """Return the view of this group on ``whole``, the value of the whole batch."""
        return View(self, location, occurrence, whole)

    def items_of(self, sequence: Any) -> slice:
        """Return the slice of a sequence that belongs to this group; all items if the length is no multiple of the number of rows."""
        each, rest = divmod(len(sequence), self.total)
        return slice(None) if rest else slice(self.start * each, (self.start + self.size) * each)

    def rows_of(self, tensor: torch.Tensor, found: Rows | None) -> Rows | None:
        """Return ``found``, the batch axis for the location of ``tensor``, if the tensor fits it; otherwise ``None``."""
        return found if found is not None and found.fit(tensor, self.total) else None

    def take(self, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the rows of this group in ``tensor``: a view, or a copy if the rows are scattered or share memory."""
        split, dim, added = rows.split(tensor, self.total)
        taken = rows.merge(split.narrow(dim, self.start, self.size), added)
        return taken.clone() if self.share_memory(tensor, rows) else taken

    def give(self, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the rows of this group for a block: those of :meth:`take`, whose gradient is part of that of ``tensor``."""
        given = self.take(tensor, rows)
        if torch.is_grad_enabled() and not self.is_copied(tensor, rows):
            share_rows(given, tensor, self, rows)
        return given

    def must_be_put(self, tensor: torch.Tensor, rows: Rows, given: torch.Tensor) -> bool:
        """Whether the model must continue with ``given``, the rows of this group, although the block did not replace them.

        So it is if they are a copy, or require a gradient that ``tensor`` does not require. Otherwise the model keeps ``tensor``, which
        may have other names in the model, and has the gradient of the rows.
        """
        with torch._C.DisableTorchFunction():  # a recorded block has the same tensors in both, or the graph was cut
            gained = torch.is_grad_enabled() and given.requires_grad and not tensor.requires_grad
        return gained or self.is_copied(tensor, rows)

    def is_copied(self, tensor: torch.Tensor, rows: Rows) -> bool:
        """Whether the rows of this group in ``tensor`` are a copy, because they are scattered or share memory."""
        return rows.scattered or self.share_memory(tensor, rows)

    def share_memory(self, tensor: torch.Tensor, rows: Rows) -> bool:
        """Whether all rows are in the same memory, as in ``x.expand(rows, -1)``: an edit of one in place would edit the others."""
        if self.total == 1 or tensor.layout is not torch.strided:
            return False
        # A recording must not take this look at the strides of a fake tensor for one of the block.
        unseen = torch._C.DisableTorchFunction() if isinstance(tensor, FakeTensor) else contextlib.nullcontext()
        with unseen:
            return tensor.stride(rows.dim) == 0

    def put(self, location: str, tensor: torch.Tensor, rows: Rows, given: torch.Tensor, new: Any) -> torch.Tensor:
        """Return a copy of ``tensor`` with ``new`` in place of ``given``, the rows of this group.

        Raises:
            ReplacementShapeError: If ``new`` is not a tensor with the shape of ``given``.
        """
        if not isinstance(new, torch.Tensor) or new.shape != given.shape:
            raise ReplacementShapeError(
                f"The replacement of `{location}` has {tuple(getattr(new, 'shape', ()))} in place of this invoke's "
                f"{tuple(given.shape)}: rows keep their shape, and an invoke may not change how many rows it has."
            )
        whole, dim, added = rows.split(tensor, self.total)
        mine = rows.split(new, self.size)[0] if added else new
        end = self.start + self.size
        pieces = [whole.narrow(dim, 0, self.start), mine, whole.narrow(dim, end, self.total - end)]
        return rows.merge(torch.cat(pieces, dim), added)


class View:
    """The value at a location for one invoke: :attr:`value` is ``whole``, narrowed to the rows of ``group``."""

    def __init__(self, group: BatchGroup, location: str, occurrence: int, whole: Any) -> None:
        self._group = group
        self._location = location
        self._whole = whole
        row_lists = group.dims.row_lists(location, occurrence, whole, group.total)
        self._is_leaf = partial(_is_one_of, list(map(id, row_lists))) if row_lists else is_batched_container
        self._leaves, self._structure = pytree.tree_flatten(whole, is_leaf=self._is_leaf)
        found = group.dims.of(location, occurrence, whole, self._structure, self._is_leaf)
        self._rows: list[Rows | None] = []
        self._given: list[Any] = []  # the leaves of `value`, kept separately because the block may change its containers
        given: list[Any] = []
        taken: dict[int, tuple[Rows | None, torch.Tensor]] = {}  # one view for each tensor, which may occur several times
        kept: Any
        for leaf, place in zip(self._leaves, found, strict=True):
            rows = None
            if isinstance(leaf, torch.Tensor):
                rows = group.rows_of(leaf, place)
                if id(leaf) not in taken or taken[id(leaf)][0] != rows:
                    taken[id(leaf)] = rows, leaf if rows is None else group.give(leaf, rows)
                kept = taken[id(leaf)][1]
                given.append(kept)
            elif is_batched_container(leaf):
                take = partial(_take_once, group, {})
                kept = on_tensors(leaf, take)
                given.append(on_tensors(leaf, take))
            elif isinstance(leaf, RowSequence):
                kept = leaf.part(group.items_of(leaf))
                given.append(kept)
            elif isinstance(leaf, list | tuple):  # one of `row_lists`
                kept = list(leaf[group.start : group.start + group.size])
                given.append(type(leaf)(kept))
            else:
                kept = leaf
                given.append(leaf)
            self._rows.append(rows)
            self._given.append(kept)
        unchanged = all(new is old for new, old in zip(given, self._leaves, strict=True))
        self.value = whole if unchanged else pytree.tree_unflatten(given, self._structure)

    def widen(self, left: Any) -> Any:
        """Return the value of the whole batch with the invoke's rows taken from ``left``, the invoke's value after its turn.

        Raises:
            ReplacementShapeError: If a replacement does not have the shape of the invoke's rows.
        """
        left_leaves, structure = pytree.tree_flatten(left, is_leaf=is_batched_container)
        if self._is_leaf is not is_batched_container:
            with contextlib.suppress(ValueError):
                left_leaves, structure = self._structure.flatten_up_to(left), self._structure
        if structure != self._structure:
            message = structure_message(self._location, structure, self._structure)
            raise ReplacementShapeError(f"{message} With several invokes each may replace its own rows only.")
        changed = False
        leaves = list(self._leaves)
        made: dict[tuple[int, int, int], torch.Tensor] = {}  # likewise, one tensor for the model
        for index, (given, new) in enumerate(zip(self._given, left_leaves, strict=True)):
            whole, rows = leaves[index], self._rows[index]
            if rows is not None:
                note_turn(given, whole)
                if given is not new or self._group.must_be_put(whole, rows, given):
                    key = id(whole), id(given), id(new)
                    if key not in made:
                        made[key] = self._group.put(self._location, whole, rows, given, new)
                    leaves[index] = made[key]
            elif is_batched_container(whole):
                leaves[index] = write_back(self._location, whole, given, new, self._put_in_container)
            elif isinstance(whole, RowSequence):
                if len(new) != len(given):
                    raise ReplacementShapeError(
                        f"This invoke has {len(given)} items at `{self._location}` and left {len(new)}: an invoke may not change how "
                        "many rows it has."
                    )
                whole.put_items(self._group.items_of(whole), new)
            elif isinstance(whole, list | tuple):
                leaves[index] = self._put_in_list(whole, given, new)
            elif given is not new:
                leaves[index] = new
            changed = changed or leaves[index] is not whole
        return pytree.tree_unflatten(leaves, self._structure) if changed else self._whole

    def _put_in_list(self, whole: Any, given: list[Any], new: Any) -> Any:
        """Return ``whole``, a list or tuple with one item for each row, with ``new`` in place of the ``given`` items."""
        if type(new) is not type(whole) or len(new) != len(given):
            raise ReplacementShapeError(
                f"This invoke has {len(given)} items at `{self._location}` and left {new!r}: an invoke may not change how many rows it has."
            )
        if all(one is other for one, other in zip(given, new, strict=True)):
            return whole
        start, end = self._group.start, self._group.start + self._group.size
        return type(whole)([*whole[:start], *new, *whole[end:]])

    def _put_in_container(self, place: str, whole: torch.Tensor, given: torch.Tensor, new: Any) -> Any:
        rows = _rows_in_container(self._group, place, whole)
        where = f"{self._location}` in `{place}"
        if rows is None:
            return new
        if new is given and not self._group.must_be_put(whole, rows, given):
            return whole
        if isinstance(new, torch.Tensor) and new.shape != given.shape:
            raise ReplacementShapeError(
                f"The replacement of `{where}` has {tuple(new.shape)} in place of this invoke's {tuple(given.shape)}. "
                "The rows of all invokes share one tensor there, so none can change its size."
            )
        return self._group.put(where, whole, rows, given, new)


def _is_one_of(ids: Sequence[int], value: Any) -> bool:
    """Whether ``value`` is a leaf: a batched container, or one of the objects with these ids."""
    return id(value) in ids or is_batched_container(value)


def _rows_in_container(group: BatchGroup, place: str, tensor: torch.Tensor) -> Rows | None:
    return group.rows_of(tensor, group.dims.in_containers.get(place, FIRST))


def _take_once(group: BatchGroup, taken: dict[int, torch.Tensor], place: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the group's rows of a tensor in a batched container. Repeated calls return the same view, from ``taken``."""
    known = taken.get(id(tensor))
    if known is None:
        rows = _rows_in_container(group, place, tensor)
        known = taken[id(tensor)] = tensor if rows is None else group.give(tensor, rows)
    return known


def join_rows(values: Sequence[Any], groups: Sequence[BatchGroup], location: str = "", occurrence: int = 0) -> Any:
    """Join the values of the ``groups`` of a batch, which are in the order of their rows, to the value of the whole batch at ``location``.

    Raises:
        ReplacementShapeError: If the values differ in structure, or do not have the rows of their groups.
    """
    flat = [pytree.tree_flatten(value) for value in values]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ReplacementShapeError(f"The invokes of one batch give values of different structure for `{location}`.")
    found = groups[0].dims.of(location, occurrence, values[0], structure)
    joined = []
    for rows, leaves in zip(found, zip(*(leaves for leaves, _ in flat), strict=True), strict=True):
        fitting = rows is not None and [
            isinstance(leaf, torch.Tensor) and rows.fit(leaf, group.size)
            for leaf, group in zip(leaves, groups, strict=True)
        ]
        if rows is None or not fitting or not any(fitting):
            joined.append(leaves[0])
            continue
        entries = {
            leaf.shape[rows.dim] // max(group.size, 1)
            for leaf, group, fits in zip(leaves, groups, fitting, strict=True)
            if fits
        }
        if not all(fitting) or len(entries) > 1:
            raise ReplacementShapeError(
                f"The invokes give values for `{location}` of {[tuple(getattr(leaf, 'shape', ())) for leaf in leaves]}, which "
                f"do not fit {[group.size for group in groups]} rows in dimension {rows.dim}: each invoke must give its own rows."
            )
        split = [rows.split(leaf, group.size) for leaf, group in zip(leaves, groups, strict=True)]
        _, dim, added = split[0]
        joined.append(rows.merge(torch.cat([leaf for leaf, _, _ in split], dim), added))
    return pytree.tree_unflatten(joined, structure)
