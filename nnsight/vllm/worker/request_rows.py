"""The rows of one request in the values of a step.

A step of the engine runs the tokens of all its requests as one flat batch, ``[tokens, hidden]``; what comes after the last
layer has one row for each request, ``[requests, vocabulary]``. A block gets its rows as a copy, for two reasons. The engine
writes to its activations in place (fused norms do), so a view that was saved would change later. And it runs in inference
mode, whose tensors cannot be used in autograd afterwards; a step leaves that mode for what blocks do (:func:`ordinary`), and enters it
again to write. When the block moves on, what it edited in place is written to the
rows; what it replaced becomes a new tensor, so that other names of the model for the old one keep it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...runtime.errors import ReplacementShapeError
from ...runtime.replacing import Replacements


class RequestRows(NamedTuple):
    """Which rows of a flat batch belong to one request.

    Attributes:
        start: The first.
        size: How many.
        total: RequestRows of the whole batch, those that only pad it included.
    """

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
    """Let blocks have tensors that can be used in autograd later, while nothing here is."""
    with torch.inference_mode(False), torch.no_grad():
        yield


#: The structure of a value that is one tensor.
_ONE = pytree.tree_structure(0)


class RowView:
    """What one request is given of the value at a location; to be made in :func:`ordinary`.

    Args:
        rows: Its rows.
        location: Where the model is.
        whole: The value of the whole batch.
        earlier: Values of this request that come before its rows.

    Attributes:
        value: The value of its rows: copies, as ordinary tensors.
    """

    def __init__(self, rows: RequestRows, location: str, whole: Any, earlier: Sequence[Any] = ()) -> None:
        self._rows, self._location, self._whole = rows, location, whole
        if isinstance(whole, torch.Tensor) and not earlier:  # as nearly always
            self._leaves, self._structure = [whole], _ONE
            self.value = (rows.of(whole) if rows.has(whole) else whole).clone()
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

    def is_changed(self, left: Any) -> bool:
        """Whether the block edited or replaced something; ``left`` is what it left."""
        if left is self.value and isinstance(left, torch.Tensor):
            return left._version > self._versions[0]
        given = zip(self._given, self._versions, strict=True)
        edited = any(isinstance(leaf, torch.Tensor) and leaf._version > version for leaf, version in given)
        return edited or any(new is not old for new, old in zip(pytree.tree_leaves(left), self._given, strict=True))

    def put_back(self, left: Any) -> Any:
        """Return the value of the whole batch with what the block changed in its rows.

        Args:
            left: What the block left: :attr:`value` where it replaced nothing.

        Raises:
            ReplacementShapeError: If a replacement does not fit in place of the rows, or the block changed what it shares with
                other requests.
        """
        if left is self.value and not self.is_changed(left):
            return self._whole
        check_replacement(self._location, self.value, left)
        changed = list(self._leaves)
        for index, (leaf, given, new) in enumerate(
            zip(self._leaves, self._given, pytree.tree_leaves(left), strict=True)
        ):
            edited = isinstance(given, torch.Tensor) and given._version > self._versions[index]
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
    """Looks at the replacements of one request, at the user's line; see :class:`~nnsight.runtime.replacing.Replacements`.

    Args:
        captured: Locations at which nothing can be replaced.
    """

    def __init__(self, captured: Collection[str]) -> None:
        super().__init__()
        self._captured = captured

    def __call__(self, location: str, old: Any, new: Any) -> None:
        """Raise for a replacement that does not fit in place of the request's rows.

        Raises:
            ReplacementShapeError: If structure or shape differ: the other rows of the batch are as they are.
            ValueError: If the value is a copy that the model does not use.
        """
        if location in self._captured:
            raise read_only(location)
        super().__call__(location, old, new)
        if location != "result":
            check_replacement(location, old, new)


def place_of(location: str) -> str:
    """Return what a location is called in ``taps=``."""
    return location.removeprefix("model.").removesuffix(".output")


def read_only(location: str) -> ValueError:
    """Return the error for an edit of what is captured."""
    return ValueError(
        f"`{location}` was edited, and this engine captures it: its value is copied out of the compiled graph and handed to blocks "
        f"when the model has run, where an edit comes too late. Make the model with `taps=[..., {place_of(location)!r}]`, or edit a "
        "clone."
    )


def check_replacement(location: str, old: Any, new: Any) -> None:
    """Raise unless ``new`` fits in place of ``old``.

    Raises:
        ReplacementShapeError: If it does not.
    """
    old_leaves, structure = pytree.tree_flatten(old)
    new_leaves, found = pytree.tree_flatten(new)
    if found != structure:
        raise ReplacementShapeError(
            f"The replacement of `{location}` has another structure than the model's value there: {found} instead of "
            f"{structure}."
        )
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
