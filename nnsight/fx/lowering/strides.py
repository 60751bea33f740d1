"""Strides of tensors that one lowered graph hands to another.

A lowering is made for inputs of certain strides, and generated code relies on them. The fakes of a plan have the strides of eager
operations, but a backend may return others: Inductor drops ``torch.cat([empty, keys])`` and returns ``keys``, a view of a fused projection.

* Between regions, a tensor with other strides than the next region was lowered for is copied (:func:`with_strides`). Few are.
* Behind a cut, the rest of the graph is lowered for the strides that its inputs have. Where sizes are symbolic, so are the
  strides: a *layout* says how strides follow from sizes, and a lowering serves all inputs of one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

#: For each dimension, innermost first: its number, and its stride as a multiple of that of a tensor without gaps. Dimensions of size one
#: come last, because their strides are never used.
Layout = tuple[tuple[int, int], ...]


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return how the strides of ``tensor`` follow from its sizes; ``None`` if they overlap or leave gaps that are no multiple."""
    sizes, strides = tensor.shape, tensor.stride()
    found: list[tuple[int, int]] = []
    dense = 1
    single = [dim for dim, size in enumerate(sizes) if size == 1]
    for dim in sorted(set(range(len(sizes))).difference(single), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] % dense:
            return None
        found.append((dim, strides[dim] // dense))
        dense = strides[dim] * sizes[dim] or dense
    return (*found, *((dim, 1) for dim in single))


def strides_in(layout: Layout, sizes: Sequence[Any]) -> list[Any]:
    """Return the strides that a tensor of these sizes, symbolic or not, has in a layout."""
    strides: list[Any] = [0] * len(sizes)
    dense: Any = 1
    for dim, gap in layout:
        strides[dim] = dense * gap
        if gap:
            dense = strides[dim] * sizes[dim]
    return strides


def are_equal(sizes: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two sets of strides put the elements of a tensor of these sizes at the same places."""
    return all(one == other or size == 1 for size, one, other in zip(sizes, strides, others, strict=True))


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor``, or a copy of it that has these strides; gradients flow through the copy."""
    if tensor.stride() == strides or are_equal(tensor.shape, tensor.stride(), strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def now(number: int | torch.SymInt) -> int:
    """Return the present value of a size, without assuming that it stays so."""
    return int(number.node.hint) if isinstance(number, torch.SymInt) else number


def is_contiguous(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether strides, symbolic or not, are those of a contiguous tensor, for all values of the symbols."""
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if expression(size) == 1:
            continue
        if expression(stride) != expected:
            return False
        expected = expected * expression(size)
    return True


def expression(number: Any) -> Any:
    """Return a size as a SymPy expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def as_python(number: Any, names: dict[Any, str]) -> str:
    """Return source that computes a symbolic size from the source in ``names`` for each symbol; raise ``LookupError`` if one is missing."""
    found = expression(number)
    missing = found.free_symbols - names.keys()
    if missing:
        raise LookupError(f"no input tells the size {sorted(map(str, missing))[0]}")
    return str(PythonPrinter().doprint(found.xreplace({symbol: sympy.Symbol(names[symbol]) for symbol in found.free_symbols})))
