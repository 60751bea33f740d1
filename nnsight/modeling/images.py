"""What a pipeline returns, such that each invoke gets the images of its own prompts.

Invokes are given their rows of tensors, wherever in a value these are. Images come as lists or arrays. So a list is handed to the
run as the positions of its items, which are a tensor, and the items; an array as a tensor that shares its memory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


class RowList(list[Any]):
    """A list with an item, or several, for each row of the batch."""

    held: _Items | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowList, (list(self),)


class RowArray(np.ndarray[Any, Any]):
    """An array with an entry, or several, for each row of the batch in its first dimension."""


class _Items:
    """What all lists that were taken from one list may hold; one leaf, which they share, so that their positions agree."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def position(self, item: Any) -> int:
        """Return where ``item`` is, having put it there if it is new."""
        for number, known in enumerate(self.items):
            if known is item:
                return number
        self.items.append(item)
        return len(self.items) - 1


def _list_to_leaves(rows: RowList) -> tuple[list[Any], None]:
    held = rows.held = rows.held or _Items()
    return [torch.tensor([held.position(item) for item in rows], dtype=torch.int64), held], None


def _list_from_leaves(leaves: Any, _: Any) -> RowList:
    positions, held = leaves
    if not (isinstance(positions, torch.Tensor) and isinstance(held, _Items)):
        return RowList(leaves)
    rows = RowList(held.items[index] for index in positions.tolist())
    rows.held = held
    return rows


def _array_from_leaves(leaves: Any, _: Any) -> Any:
    (leaf,) = leaves
    return leaf.numpy().view(RowArray) if isinstance(leaf, torch.Tensor) else leaf


pytree.register_pytree_node(RowList, _list_to_leaves, _list_from_leaves)
pytree.register_pytree_node(
    RowArray, lambda rows: ([torch.from_numpy(rows.view(np.ndarray))], None), _array_from_leaves
)


def with_rows(output: Any) -> Any:
    """Return the output of a pipeline with its lists and arrays as those of this module."""
    if isinstance(output, (tuple, list)):
        made = [_rows(value) for value in output]
        return tuple(made) if isinstance(output, tuple) else RowList(output)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        return _remakable(type(output))(**{name: _rows(getattr(output, name)) for name in names})
    return _rows(output)


def _rows(value: Any) -> Any:
    if type(value) is list:
        return RowList(value)
    return value.view(RowArray) if type(value) is np.ndarray else value


@functools.cache
def _remakable(kind: type) -> type:
    """Return a subclass of an output class of `diffusers` that can be made again from its leaves.

    The classes are registered with pytree as their fields that are not None, and cannot be made without the others.
    """
    names = [field.name for field in dataclasses.fields(kind)]

    def __init__(self: Any, **values: Any) -> None:  # noqa: N807 - becomes a method
        kind.__init__(self, **{name: values.get(name) for name in names})  # type: ignore[misc]

    def __reduce__(self: Any) -> tuple[Any, ...]:  # noqa: N807 - likewise
        return kind, tuple(getattr(self, name) for name in names)

    namespace = {"__init__": __init__, "__reduce__": __reduce__, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), namespace)
