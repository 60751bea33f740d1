"""The rows of one request in the values of a step.

A step of the engine runs the tokens of all its requests as one flat batch, ``[tokens, hidden]``. Values after the last layer have one row
per request, ``[requests, vocabulary]``. A block gets its rows as a copy, for two reasons. The engine writes to its activations in place
(fused norms do), so a saved view would change later. And the engine runs in inference mode, and inference tensors cannot be used in
autograd later. When the block moves on, its in-place edits are written to the rows of the engine's tensor. Its replacements go into a new
tensor, so that aliases of the old tensor in the model do not change.

Models that vLLM runs with its Transformers backend are models of transformers. Their values have a batch of one sequence, with the tokens
of all requests, ``[1, tokens, hidden]``. Blocks get their rows of it without the batch, as from other models.
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
    """The rows of one request in a batch: first row, number of rows, and number of all rows of the batch, including padding.

    ``batched`` says that values have the form of the Transformers backend, ``[1, tokens, ...]``, or inside of attention
    ``[1, heads, tokens, ...]``.
    """

    start: int
    size: int
    total: int
    batched: bool = False

    def flat(self, leaf: Any) -> torch.Tensor | None:
        """Return a view of ``leaf`` with the rows of this batch as first dimension, or ``None`` if it is no tensor with these rows.

        Raises:
            ValueError: If two dimensions may be the rows, and the choice matters.
        """
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return None
        if self.batched and leaf.dim() > 1 and leaf.shape[0] == 1:
            found = [axis for axis in (1, 2)[: max(leaf.dim() - 2, 1)] if leaf.shape[axis] == self.total]
            if len(found) == 2 and self.size < self.total:
                raise ValueError(
                    f"This value, {list(leaf.shape)}, has as many heads as the step has tokens of all requests, so the rows of this "
                    "request cannot be told. Read the output of a module, such as `q_proj`."
                )
            if found:
                return leaf[0].transpose(0, found[0] - 1)
        return leaf if leaf.shape[0] == self.total else None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``tensor``, as a view, or ``tensor`` itself if it has no rows of this batch."""
        flat = self.flat(tensor)
        return tensor if flat is None else flat[self.start : self.start + self.size]


@contextmanager
def ordinary() -> Iterator[None]:
    """Leave inference mode, so that blocks get tensors that autograd can use later; but record nothing for autograd here."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same values, for all that can be told without waiting for a GPU. NaN is equal to NaN.

    In-place edits through ``x.data``, ``x.numpy()`` or DLPack do not change the version of a tensor, so only its values show them.
    """
    if one.device.type != "cpu":
        return True
    if one.dtype.itemsize == 1:  # torch compares no 8-bit floating-point numbers
        one, other = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


#: The structure of a value that is one tensor.
_ONE = pytree.tree_structure(0)


class RowView:
    """The rows of one request in the value at a location. Make it inside of :func:`ordinary`.

    ``whole`` is the value of the whole batch. ``earlier`` are values of this request from earlier steps, for the tokens before ``rows``.
    The attribute ``value`` has copies of all these rows, as ordinary tensors.
    """

    def __init__(self, rows: RequestRows, location: str, whole: Any, earlier: Sequence[Any] = ()) -> None:
        self._rows, self._location, self._whole, self._earlier = rows, location, whole, earlier
        if isinstance(whole, torch.Tensor) and not earlier:  # fast path for the usual case
            self._leaves, self._structure = [whole], _ONE
            self._mine: list[Any] = [rows.of(whole)]
            self.value = self._mine[0].clone()
            self._given, self._versions = [self.value], [self.value._version]
            return
        self._leaves, self._structure = pytree.tree_flatten(whole)
        self._mine = [rows.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        self._given = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._mine]
        if earlier:
            parts = zip(*map(pytree.tree_leaves, earlier), self._given, strict=True)
            self._given = [
                pieces[-1] if rows.flat(leaf) is None else torch.cat(pieces) for leaf, pieces in zip(self._leaves, parts, strict=True)
            ]
        # The version of a new copy of an engine's tensor need not be 0.
        self._versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in self._given]
        self.value = pytree.tree_unflatten(self._given, self._structure)

    def _edited(self, index: int) -> bool:
        """Whether the block edited leaf ``index`` in place."""
        leaf = self._given[index]
        if not isinstance(leaf, torch.Tensor):
            return False
        if leaf._version > self._versions[index]:
            return True
        before = self._mine[index]
        if self._earlier and before is not self._leaves[index]:
            before = torch.cat([*(pytree.tree_leaves(value)[index] for value in self._earlier), before])
        return not is_same(leaf, before)

    def is_changed(self, left: Any) -> bool:
        """Whether the block edited or replaced something. ``left`` is the value that the block left."""
        if left is self.value and isinstance(left, torch.Tensor):
            return self._edited(0)
        replaced = any(new is not old for new, old in zip(pytree.tree_leaves(left), self._given, strict=True))
        return replaced or any(map(self._edited, range(len(self._given))))

    def put_back(self, left: Any) -> Any:
        """Return the value of the whole batch with the block's changes in its rows.

        ``left`` is the value that the block left; it is :attr:`value` itself if the block replaced nothing. This raises
        ``ReplacementShapeError`` if ``left`` has other shapes, or if the block changed a tensor that it shares with other requests.
        """
        if left is self.value and not self.is_changed(left):
            return self._whole
        check_replacement(self._location, self.value, left)
        changed = list(self._leaves)
        for index, (leaf, given, new) in enumerate(zip(self._leaves, self._given, pytree.tree_leaves(left), strict=True)):
            edited = self._edited(index)
            if not edited and new is given:
                continue
            if self._rows.flat(leaf) is None:
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
    """Checks the replacements of one request, at the user's line. At the ``captured`` locations every replacement is an error."""

    def __init__(self, captured: Collection[str]) -> None:
        super().__init__()
        self._captured = captured

    def __call__(self, location: str, old: Any, new: Any) -> None:
        """Raise ``ReplacementShapeError`` for another structure or shape, and ``ValueError`` at a captured location."""
        if location in self._captured:
            raise read_only(location)
        super().__call__(location, old, new)
        if location != "result":
            check_replacement(location, old, new)


def place_of(location: str) -> str:
    """Return the name that stands for ``location`` in ``taps=``."""
    return location.removeprefix("model.").removesuffix(".output")


def read_only(location: str) -> ValueError:
    """Return the error for an edit of a captured value."""
    return ValueError(
        f"`{location}` was edited, and this engine captures it: blocks get a copy of the value after the model has run, when an edit "
        f"comes too late. Make the model with `taps=[..., {place_of(location)!r}]`, or edit a clone."
    )


def check_replacement(location: str, old: Any, new: Any) -> None:
    """Raise ``ReplacementShapeError`` unless ``new`` has the structure and the shapes of ``old``."""
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
