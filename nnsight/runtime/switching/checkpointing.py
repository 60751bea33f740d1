"""Visits inside an activation checkpoint, which torch recomputes without the block.

``torch.utils.checkpoint`` saves no tensors of a part of the model. It runs that part again in the backward pass, when the run with the
block is over. So autograd must save the tensors that the block computes there. Edits of the block are missing when the part is recomputed,
and gradients are wrong, so an edit raises a warning. In a compiled trace autograd saves the tensors of a part that a block visits.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _top_saved_tensors_default_hooks,
)
from torch.utils import _pytree as pytree

#: The module that defines the saved-tensor hooks of non-reentrant checkpoints.
_CHECKPOINTS = torch.utils.checkpoint.__name__

#: The code of the forward pass of reentrant checkpoints.
_REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__


def checkpoint_hooks() -> Any:
    """Return the hooks by which the innermost activation checkpoint keeps autograd from saving tensors; ``None`` without a checkpoint."""
    hooks = _top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None and getattr(hooks[0], "__module__", None) == _CHECKPOINTS else None


def in_reentrant_checkpoint() -> bool:
    """Return whether the model is inside a checkpoint with ``use_reentrant=True``. It runs there without gradients, and without hooks."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return True
        frame = frame.f_back
    return False


class CheckpointVisit:
    """A visit of a location inside an activation checkpoint. ``position`` is the file and line where the block waits for it."""

    def __init__(self, location: str, value: Any, position: tuple[str, int]) -> None:
        self.location, self._position = location, position
        self._before = _state(value)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let autograd save the tensors that are computed in this context."""
        taken = []
        while (hooks := checkpoint_hooks()) is not None:
            taken.append(hooks)
            _pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            for pack, unpack in reversed(taken):
                _push_saved_tensors_default_hooks(pack, unpack)

    def warn_if_edited(self, value: Any) -> None:
        """Warn if ``value``, with which the model continues, differs from the value before the visit, and gradients are enabled.

        A reentrant checkpoint disables them, but recomputes its inside with gradients.
        """
        if (torch.is_grad_enabled() or in_reentrant_checkpoint()) and _state(value) != self._before:
            warnings.warn_explicit(
                f"`{self.location}` was edited inside an activation checkpoint. A backward pass recomputes the inside without the "
                "edit, so its gradients would be wrong. Switch checkpointing off (`gradient_checkpointing_disable()` of a "
                "transformers model), trace compiled (`trace(..., compile=True)`), or trace under `torch.no_grad()`.",
                UserWarning,
                *self._position,
            )


def _state(value: Any) -> list[Any]:
    """Return the ids and versions of the tensors in ``value``."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [(id(leaf), 0 if leaf.is_inference() else leaf._version) for leaf in leaves]
