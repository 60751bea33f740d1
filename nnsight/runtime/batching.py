"""Several inputs in one forward pass: each invoke sees its own rows.

The inputs of all invokes run as one batch. A :class:`BatchGroup` is the stretch of rows that belongs to one invoke. At each
location the invoke gets the value narrowed to these rows; the rows are views, so in-place edits reach the model by
themselves, and a replacement is put back between the rows of the others. Narrowing and putting back are ordinary tensor operations:
compiled, they become part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .errors import ReplacementShapeError


@dataclass(frozen=True)
class BatchGroup:
    """The rows of one invoke.

    Attributes:
        start: First row.
        size: Number of rows.
        total: Rows of the whole batch.
    """

    start: int
    size: int
    total: int

    def _has_rows(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.total

    def narrow(self, value: Any) -> Any:
        """Return ``value`` with every tensor of the batch narrowed to the rows of this group."""
        return pytree.tree_map(
            lambda leaf: leaf.narrow(0, self.start, self.size) if self._has_rows(leaf) else leaf, value
        )

    def widen(self, location: str, whole: Any, before: Any, after: Any) -> Any:
        """Return ``whole`` with what an invoke changed in its rows.

        Args:
            location: For messages.
            whole: The value of the whole batch.
            before: What the invoke was given.
            after: What it left, the same objects where it replaced nothing.

        Raises:
            ReplacementShapeError: If a replacement does not fit in place of the invoke's rows.
        """
        whole_leaves, structure = pytree.tree_flatten(whole)
        after_leaves, after_structure = pytree.tree_flatten(after)
        if after_structure != structure:
            raise ReplacementShapeError(
                f"The replacement of `{location}` has another structure than the model's value there: {after_structure} "
                f"instead of {structure}. With several invokes each may replace its own rows only."
            )
        changed = False
        for index, (old, new) in enumerate(zip(pytree.tree_leaves(before), after_leaves, strict=True)):
            row = whole_leaves[index]
            # The model goes on with the block's own view of its rows where gradients may be asked of it.
            followed = self._has_rows(row) and row.requires_grad and torch.is_grad_enabled()
            if old is new and not followed:
                continue
            changed = True
            if not self._has_rows(row):
                whole_leaves[index] = new
                continue
            if not isinstance(new, torch.Tensor) or new.shape[:1] != old.shape[:1]:
                raise ReplacementShapeError(
                    f"The replacement of `{location}` has {tuple(getattr(new, 'shape', ()))} in place of this invoke's "
                    f"{tuple(old.shape)}: an invoke may not change how many rows it has."
                )
            end = self.start + self.size
            whole_leaves[index] = torch.cat([row[: self.start], new, row[end:]])
        return pytree.tree_unflatten(whole_leaves, structure) if changed else whole


def join_rows(values: Sequence[Any], groups: Sequence[BatchGroup]) -> Any:
    """Return one value of the whole batch from the values of its groups, which nest alike and come in order."""
    flat = [pytree.tree_flatten(value) for value in values]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise ReplacementShapeError("The invokes of one batch give values of different structure for one module.")
    joined = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        rows = [
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == group.size
            for leaf, group in zip(leaves, groups, strict=True)
        ]
        joined.append(torch.cat(list(leaves)) if all(rows) else leaves[0])
    return pytree.tree_unflatten(joined, structure)
