"""Indices of a recording that mean the same for other sizes.

torch drops a slice that is the whole dimension, such as ``:5`` of five entries, and gives the value of an assignment the sizes of the part
that it is written to. Both are right only for the recorded sizes. Here the slice becomes an operator of its own, and operators for all
sizes take the place of those that set sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .recorded_calls import NodeRecorder

_aten = torch.ops.aten
_MASKS = frozenset({torch.bool, torch.uint8})


def with_bounds(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """Take the slices of ``index`` that torch would drop. Return the part of ``tensor``, and the index in it."""
    items, dim = list(index) if isinstance(index, tuple) else [index], 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            dim = tensor.dim() - sum(map(_indexed, items[place + 1 :]))
        elif isinstance(item, slice) and dim < tensor.dim() and _is_dropped(item, tensor.shape[dim]):
            tensor, items[place] = _aten.slice.Tensor(tensor, dim, 0, item.stop), slice(None)
        dim += _indexed(item)
    return tensor, tuple(items) if isinstance(index, tuple) else items[0]


def _is_dropped(item: slice, size: Any) -> bool:
    return item.start in (None, 0) and item.step in (None, 1) and type(item.stop) is int and item.stop == size


def _indexed(item: Any) -> int:
    """Return the number of dimensions that an item of an index stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype in _MASKS else 1


class Assignments:
    """Records the operators of assignments to parts of tensors, such as ``hidden[:, 0] = vector``."""

    def __init__(self, recorder: NodeRecorder) -> None:
        self._recorder = recorder
        self._part: tuple[Any, Any] = None, None  # an assignment, and the part of the tensor that it writes to

    def operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator that torch calls in an assignment."""
        recorder = self._recorder
        called, part = self._part
        if called is not recorder._called:
            part = recorder.substitute(recorder._called[1][0])
        if operator is _aten.view.default:  # removes leading dimensions of size 1, which can have another size in other runs
            return recorder.operator(_aten.alias.default, args[:1], {})
        if operator is _aten.expand.default and list(part.shape) == list(args[1]):
            return recorder.operator(_aten.expand_as.default, (self._with_dims(args[0], part.dim()), part), {})
        if operator is _aten.index_put_.default:
            args = (*args[:2], self._with_dims(args[2], _dims_of_part(*args[:2])), *args[3:])
        result = recorder.operator(operator, args, kwargs)
        self._part = recorder._called, result
        return result

    def _with_dims(self, value: torch.Tensor, dims: int) -> torch.Tensor:
        """Return ``value`` with at most ``dims`` dimensions. Those that are removed must have size 1 in each run."""
        extra = list(range(value.dim() - dims))
        removed: torch.Tensor = self._recorder.operator(_aten.squeeze.dims, (value, extra), {}) if extra else value
        return removed


def _dims_of_part(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> int:
    """Return the number of dimensions of ``tensor[indices]``."""
    given = [index for index in indices if index is not None]
    return tensor.dim() - sum(map(_indexed, given)) + max((1 if index.dtype in _MASKS else index.dim() for index in given), default=0)
