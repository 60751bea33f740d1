"""The rows of one request in the values of a step.

A step of the engine runs the tokens of all its requests as one flat batch, ``[tokens, hidden]``. Values behind the last layer have one row
for each request, ``[requests, vocabulary]``. A block gets its rows as a copy, for two reasons. The engine writes to its activations in
place (fused norms do), so a saved view would change later. And the engine runs in inference mode, whose tensors cannot be used in autograd
afterwards. When the block moves on, its edits in place are written to the rows, and its replacements become new tensors, so that other
names of the model for the old ones keep them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...runtime.errors import ReplacementShapeError, structure_message
from ...runtime.replacing import Replacements


class RequestRows(NamedTuple):
    """The rows of one request in a flat batch: the first, their number, and the number of all rows, padding included."""

    start: int
    size: int
    total: int

    def has(self, leaf: Any) -> bool:
        """Whether ``leaf`` is a tensor with the rows of this batch."""
        return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.total

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows in ``tensor``, as a view."""
        return tensor[self.start : self.start + self.size]


@contextmanager
def ordinary() -> Iterator[None]:
    """Let blocks have tensors that can be used in autograd later, and record nothing for autograd here."""
    with torch.inference_mode(False), torch.no_grad():
        yield


#: The structure of a value that is one tensor.
_ONE = pytree.tree_structure(0)


class RowView:
    """The rows of one request in the value at a location; to be made in :func:`ordinary`.

    ``whole`` is the value of the whole batch, ``earlier`` are values of this request that come before its ``rows``. Its ``value`` has the
    rows as copies, ordinary tensors.
    """

    def __init__(self, rows: RequestRows, location: str, whole: Any, earlier: Sequence[Any] = ()) -> None:
        self._rows, self._location, self._whole = rows, location, whole
        if isinstance(whole, torch.Tensor) and not earlier:  # nearly always
            self._leaves, self._structure = [whole], _ONE
            self.value = self._copy(whole)
            self._given, self._versions = [self.value], [self.value._version]
            return
        self._leaves, self._structure = pytree.tree_flatten(whole)
        self._given = [self._copy(leaf) for leaf in self._leaves]
        if earlier:
            parts = zip(*map(pytree.tree_leaves, earlier), self._given, strict=True)
            self._given = [
                torch.cat(pieces) if rows.has(leaf) else pieces[-1] for leaf, pieces in zip(self._leaves, parts, strict=True)
            ]
        # Copies of the engine's tensors may begin at another version than 0.
        self._versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in self._given]
        self.value = pytree.tree_unflatten(self._given, self._structure)

    def _copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return (self._rows.of(leaf) if self._rows.has(leaf) else leaf).clone()

    def _edited(self, index: int) -> bool:
        """Whether the block edited a leaf in place."""
        leaf = self._given[index]
        return isinstance(leaf, torch.Tensor) and leaf._version > self._versions[index]

    def is_changed(self, left: Any) -> bool:
        """Whether the block, which left the value ``left``, edited or replaced something."""
        if left is self.value and isinstance(left, torch.Tensor):
            return self._edited(0)
        replaced = any(new is not old for new, old in zip(pytree.tree_leaves(left), self._given, strict=True))
        return replaced or any(map(self._edited, range(len(self._given))))

    def put_back(self, left: Any) -> Any:
        """Return the value of the whole batch with the block's changes in its rows.

        The block has left the value ``left``, :attr:`value` if it replaced nothing. If that does not fit, or the block changed a tensor
        that it shares with other requests, this raises ``ReplacementShapeError``.
        """
        if left is self.value and not self.is_changed(left):
            return self._whole
        check_replacement(self._location, self.value, left)
        changed = list(self._leaves)
        for index, (leaf, given, new) in enumerate(zip(self._leaves, self._given, pytree.tree_leaves(left), strict=True)):
            edited = self._edited(index)
            if not edited and new is given:
                continue
            if not self._rows.has(leaf):
                raise ReplacementShapeError(
                    f"The value at `{self._location}` that the block changed has no rows of its own: other requests of the "
                    "same step use it, too."
                )
            with torch.inference_mode(leaf.is_inference()):
                if edited:
                    self._rows.of(leaf).copy_(given)
                if new is not given:
                    changed[index] = leaf.clone()
                    self._rows.of(changed[index]).copy_(new)
        if all(new is old for new, old in zip(changed, self._leaves, strict=True)):
            return self._whole
        return pytree.tree_unflatten(changed, self._structure)


class RequestReplacements(Replacements):
    """Checks the replacements of one request, at the user's line; nothing can be replaced at the ``captured`` locations."""

    def __init__(self, captured: Collection[str]) -> None:
        super().__init__()
        self._captured = captured

    def __call__(self, location: str, old: Any, new: Any) -> None:
        """Raise for a replacement of another structure or shape than the request's rows, and of a copy that the model does not use."""
        if location in self._captured:
            raise read_only(location)
        super().__call__(location, old, new)
        if location != "result":
            check_replacement(location, old, new)


def place_of(location: str) -> str:
    """Return the name of a location in ``taps=``."""
    return location.removeprefix("model.").removesuffix(".output")


def read_only(location: str) -> ValueError:
    """Return the error for an edit of a captured value."""
    return ValueError(
        f"`{location}` was edited, and this engine captures it: its value is copied out of the compiled graph and handed to blocks "
        f"when the model has run, where an edit comes too late. Make the model with `taps=[..., {place_of(location)!r}]`, or edit a "
        "clone."
    )


def check_replacement(location: str, old: Any, new: Any) -> None:
    """Raise a ``ReplacementShapeError`` unless ``new`` fits in place of ``old``."""
    old_leaves, structure = pytree.tree_flatten(old)
    new_leaves, found = pytree.tree_flatten(new)
    if found != structure:
        raise ReplacementShapeError(structure_message(location, found, structure))
    for before, after in zip(old_leaves, new_leaves, strict=True):
        if not isinstance(before, torch.Tensor):
            continue
        shape = tuple(after.shape) if isinstance(after, torch.Tensor) else None
        if shape != tuple(before.shape):
            raise ReplacementShapeError(
                f"The replacement of `{location}` has {'no shape' if shape is None else shape} in place of this request's "
                f"{tuple(before.shape)}: a request may not change how many rows, or channels, it has. vLLM's batch is flat: "
                "`[tokens, hidden]`, without a dimension for the prompt."
            )
