"""Indices that are numbers of a program.

In ``hidden[:, i]`` torch asks a symbolic ``i`` for its value, which would make every index a lowering of its own.
``hidden.select(1, i)`` asks only whether it is negative and in range. So an index that varies is taken first, by ``select``,
and what is left of the brackets is applied to the view that gives. The result is the same, a view of the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..program import Constant, Nest, Number


def select_numbers(index: Any, fake_of: Callable[[Any], torch.Tensor]) -> tuple[list[tuple[int, Number]], Any]:
    """Split an index in brackets.

    Args:
        index: As it appears in an event.
        fake_of: Returns a tensor like the one that a reference stands for.

    Returns:
        The dimension and the number of each integer index that varies, in the order in which to select them, and
        what is left of the index; ``None`` if nothing is left.
    """
    items = index.items if isinstance(index, Nest) and index.kind == "tuple" else (index,)
    wanted = [place for place, item in enumerate(items) if isinstance(item, Number)]
    if not wanted:
        return [], index
    consumed = [_consumed(item, fake_of) for item in items]
    gap = next((place for place, item in enumerate(items) if item is ...), len(items))
    # Dimensions are counted from the end of the index that has no `...` on the way, and stay valid if the last goes first.
    behind = [(sum(consumed[place + 1 :]), items[place]) for place in wanted if place > gap]
    before = [(sum(consumed[:place]), items[place]) for place in wanted if place < gap]
    selected = [(-1 - count, number) for count, number in behind] + [(dim, number) for dim, number in reversed(before)]
    left = tuple(item for item in items if not isinstance(item, Number))
    if all(item is ... or item == Nest("slice", (None, None, None)) for item in left):
        return selected, None
    return selected, Nest("tuple", left)


def _consumed(item: Any, fake_of: Callable[[Any], torch.Tensor]) -> int:
    """Return for how many dimensions an item of an index stands."""
    if item is None or item is ... or (isinstance(item, Constant) and item.kind is bool):
        return 0
    depth, inner = 0, item
    while isinstance(inner, Nest) and inner.kind != "slice" and inner.items:
        depth, inner = depth + 1, inner.items[0]
    if depth and isinstance(inner, Constant) and inner.kind is bool:  # a mask, written as lists
        return depth
    if isinstance(item, (Number, Constant, Nest)):
        return 1
    fake = fake_of(item)
    return fake.dim() if fake.dtype in (torch.bool, torch.uint8) else 1
