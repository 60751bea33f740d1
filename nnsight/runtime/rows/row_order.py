"""The order of the rows' entries in a batch axis, followed through the operations of a run on fake tensors.

The size of a batch axis does not determine the order. In an axis of size 12, from six tokens times two rows, the tokens of a row may be
adjacent (``[batch, sequence]``, flattened), or the rows of a token (``[sequence, batch]``, flattened), or the batch may be doubled. So each
operation is followed: views, ``cat``, ``repeat`` and ``repeat_interleave`` change the order, sorting mixes the rows, and all other
operations keep the order of their inputs. The inverse of a sort's permutation restores the order, as in a mixture of experts.

Entries that are selected by values (``hidden[mask]``) have no batch axis, but come from all rows. They are followed, too, until they are
put into a tensor with a batch axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: The order of entries that were sorted or selected by something other than their rows: it is not known which entry belongs to which row.
MIXED = 0

#: Attribute of a fake tensor with the result of `outer_of`.
_TAG = "_nnsight_outer"

#: Attribute of a permutation that a sort has returned: the order before the sort.
_BEFORE = "_nnsight_before"

#: Attribute of a part of a batch: the rows of its entries in the former batch axis, or one row if all of it belongs to that row.
_ROWS = "_nnsight_rows"

#: Attribute of a fake result whose size depends on values.
SELECTED = "_nnsight_selected"

_aten = torch.ops.aten
_VIEWS = {_aten.view, _aten._unsafe_view, _aten.reshape, _aten._reshape_alias}
_SPLITS = {_aten.split, _aten.split_with_sizes, _aten.unbind, _aten.tensor_split, _aten.chunk}
_SORTS = {_aten.sort, _aten.argsort, _aten.topk}
_PICKS = {_aten.index, _aten.index_select, _aten.gather, _aten.take_along_dim}
_PUTS = {
    *(_aten.index_put, _aten.index_put_, _aten.index_add, _aten.index_add_, _aten.index_copy, _aten.index_copy_),
    *(_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.scatter_reduce),
    _aten._index_put_impl_,
}


def batch_dim(shape: Iterable[int], rows: int) -> int | None:
    """Return the first dimension whose size is a multiple of ``rows``, or ``None``."""
    return next((dim for dim, size in enumerate(shape) if size and size % rows == 0), None)


def outer_of(tensor: torch.Tensor) -> int:
    """Return how often the batch is repeated in the batch axis of ``tensor``, or :data:`MIXED`."""
    return int(getattr(tensor, _TAG, 1))


class RowOrder(TorchDispatchMode):
    """Follows the order of the rows through all operations. The number of rows, ``rows``, must divide no other size."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        start = 0  # of a part in the axis that is split
        for number, tensor in enumerate(tensors):
            dim = batch_dim(tensor.shape, self._rows)
            rows, start = self._rows_of_part(func.overloadpacket, args, kwargs, tensor, start)
            if dim is not None:
                outer = self._outer(func.overloadpacket, args, kwargs, tensor, dim, number)
                if outer != 1 or hasattr(tensor, _TAG):
                    setattr(tensor, _TAG, outer)
            elif rows is not None:
                setattr(tensor, _ROWS, rows)
            elif tensor.dim() and self._is_selected(tensor, (args, kwargs)):
                setattr(tensor, _TAG, MIXED)
        return result

    def _is_selected(self, result: torch.Tensor, given: Any) -> bool:
        """Whether ``result``, without a batch axis, has entries that were selected by values from the batch."""
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        selects = hasattr(result, SELECTED) and any(batch_dim(tensor.shape, self._rows) is not None for tensor in tensors)
        return selects or any(outer_of(tensor) == MIXED and batch_dim(tensor.shape, self._rows) is None for tensor in tensors)

    def _rows_of_part(self, packet: Any, args: Any, kwargs: Any, part: torch.Tensor, start: int) -> tuple[tuple[int, ...] | None, int]:
        """Return the rows of the entries of a part of a batch, and where the next part starts in the axis that an operation splits."""
        first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        axis = None if first is None else batch_dim(first.shape, self._rows)
        if first is None:
            return None, 0
        if axis is None or packet not in (*_SPLITS, _aten.select, _aten.slice):
            known = {getattr(leaf, _ROWS) for leaf in pytree.tree_leaves((args, kwargs)) if hasattr(leaf, _ROWS)}
            rows = known.pop() if len(known) == 1 else None
            return (rows if rows and len(rows) in (1, *part.shape[:1]) else None), 0
        is_split = packet in _SPLITS
        dim = self._argument(args, kwargs, 1 if not is_split or packet is _aten.unbind else 2, "dim", 0)
        if dim % first.dim() != axis or outer_of(first) == MIXED:
            return None, 0
        whole, size = first.shape[axis], part.shape[axis] if part.dim() == first.dim() else 1
        if not is_split:
            start = self._argument(args, kwargs, 2, "index" if packet is _aten.select else "start", 0) or 0
            start = max(0, start + whole if start < 0 else start)
        inner = max(self._entries(first) // max(outer_of(first), 1), 1)
        step = self._argument(args, kwargs, 4, "step", 1) if packet is _aten.slice else 1
        rows = tuple((start + step * index) // inner % self._rows for index in range(size))
        return (rows[:1] if len(set(rows)) == 1 else rows if axis == 0 else None), start + size

    def _outer(self, packet: Any, args: Any, kwargs: Any, result: torch.Tensor, dim: int, number: int) -> int:
        entries = result.shape[dim] // self._rows
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = given[0] if given else None
        if packet in _SORTS and first is not None:
            sorted_dim = self._argument(args, kwargs, 2 if packet is _aten.topk else 1, "dim", -1)
            if sorted_dim % max(first.dim(), 1) == batch_dim(first.shape, self._rows):
                return self._after_sort(packet, first, result, number)
        if packet in _VIEWS and first is not None:
            return self._after_view(first, result, dim, entries)
        if packet is _aten.repeat and first is not None:
            times = args[1][dim]
            return outer_of(first) * times if self._entries(first) * times == entries else 1
        if packet is _aten.repeat_interleave and first is not None:
            return outer_of(first)
        if packet in (_aten.cat, _aten.stack) and self._argument(args, kwargs, 1, "dim", 0) % result.dim() == dim:
            if packet is _aten.stack or any(hasattr(part, _ROWS) for part in args[0]):
                return self._after_parts(args[0], result.shape[dim], dim if packet is _aten.cat else None)
            return self._after_cat(args[0])
        if packet in _PUTS:
            back = [getattr(index, _BEFORE) for index in given[1:] if hasattr(index, _BEFORE)]
            if back and outer_of(given[0]) == MIXED:
                return int(back[0])
            given = given[:1]
        elif packet is _aten.gather and first is not None and self._argument(args, kwargs, 1, "dim", 0) % max(first.dim(), 1) != dim:
            given = given[:1]  # entries stay in their rows, whatever the index says
        elif packet in _PICKS:
            given = [tensor for tensor in given[1:] if self._entries(tensor) == entries] or given[:1]
        orders = {outer_of(tensor) for tensor in given if hasattr(tensor, _TAG) and self._entries(tensor) == entries}
        if len(orders) == 1:
            return orders.pop()
        if orders:
            return MIXED
        # A part of a batch axis that repeats the batch, such as a result of `chunk`.
        if first is not None and outer_of(first) > 1 and self._entries(first) > entries:
            outer, rest = divmod(outer_of(first) * entries, self._entries(first))
            return MIXED if rest else outer
        return 1

    def _entries(self, tensor: torch.Tensor) -> int:
        """Return the number of entries of each row in the batch axis; 0 without a batch axis."""
        dim = batch_dim(tensor.shape, self._rows)
        return 0 if dim is None else tensor.shape[dim] // self._rows

    def _after_view(self, given: torch.Tensor, result: torch.Tensor, dim: int, entries: int) -> int:
        """Return the order after a view, which keeps the sequence of all elements."""
        before = batch_dim(given.shape, self._rows)
        outer = outer_of(given)
        if before is None or outer == MIXED:
            return MIXED if outer == MIXED else 1
        stride = self._entries(given) // outer * math.prod(given.shape[before + 1 :])  # elements between neighbouring rows
        inner, rest = divmod(stride, math.prod(result.shape[dim + 1 :]))
        if rest or inner == 0 or entries % inner:
            return MIXED
        return entries // inner

    @staticmethod
    def _after_sort(packet: Any, given: torch.Tensor, result: torch.Tensor, number: int) -> int:
        """Return the order after sorting the rows; ``number`` of the result is 0 for values and 1 for the permutation."""
        if packet is _aten.argsort or (packet is _aten.sort and number == 1):
            if hasattr(given, _BEFORE):  # sorting a permutation returns its inverse
                return int(getattr(given, _BEFORE))
            setattr(result, _BEFORE, outer_of(given))
        return MIXED

    def _after_cat(self, parts: list[torch.Tensor]) -> int:
        """Return the order after the concatenation of batches along the batch axis."""
        parts = [part for part in parts if part.numel()]
        inner = {self._entries(part) // max(outer_of(part), 1) for part in parts}
        if len(inner) > 1 or 0 in inner or any(outer_of(part) == MIXED for part in parts):
            return MIXED
        return sum(outer_of(part) for part in parts)

    def _after_parts(self, parts: list[torch.Tensor], size: int, dim: int | None) -> int:
        """Return the order after joining parts of batches along ``dim``, or along a new dimension (``None``), to ``size`` entries."""
        rows: list[int] = []
        for part in parts:
            own, count = getattr(part, _ROWS, ()), 1 if dim is None else part.shape[dim]
            if part.numel():
                rows += own * count if len(own) == 1 else own
        if dim is None and not rows:
            return 1
        inner = next((index for index, row in enumerate(rows) if row != rows[0]), 1)
        in_order = [index // inner % self._rows for index in range(size)]
        return size // self._rows // inner if rows == in_order else MIXED

    @staticmethod
    def _argument(args: Any, kwargs: Any, position: int, name: str, default: int) -> int:
        return args[position] if len(args) > position else kwargs.get(name, default)
