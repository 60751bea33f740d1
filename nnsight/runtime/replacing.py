"""Checks of the values that a block puts in place of the model's values, for eager runs.

Python models accept many things, such as None instead of a mask, or a tensor of another dtype. So a replacement is refused, at the user's
line, only if it is certainly a mistake: a tensor in place of a tuple, or inputs that are not ``(args, kwargs)``. Other differences are
recorded, and if the model fails later, its error names them. A compiled run refuses more, because its graph is captured for one structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tracing.errors import user_position_now
from .errors import ReplacementShapeError, replacement_message


class Replacements:
    """Checks the replacements of one run. Call it with the location, the model's value and the replacement."""

    def __init__(self) -> None:
        self.reshaped: list[str] = []  # a line for each replacement with another shape: the likely cause if the model fails
        self.differences: list[str] = []  # a line for each other difference: a possible cause if the model fails

    def __call__(self, location: str, old: Any, new: Any) -> None:
        """Refuse a replacement that is certainly a mistake, and record one that differs from the model's value.

        Raises:
            ReplacementShapeError: For a tensor in place of a tuple, list or dict, and for inputs that are not ``(args, kwargs)``.
        """
        if location.endswith(".input"):
            pair = isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], (tuple, list)) and isinstance(new[1], dict)
            if not pair:
                raise ReplacementShapeError(
                    f"The replacement of `{location}` has another structure than the model's value there: `.inputs` is a pair of a "
                    f"tuple and a dict, not a {type(new).__name__}. Write `.inputs = (x,), {{}}`, or assign the first argument alone: "
                    "`.input = x`."
                )
        elif location == "result":  # no code of the model uses it
            return
        elif isinstance(old, (tuple, list, Mapping)) and isinstance(new, torch.Tensor):
            raise ReplacementShapeError(
                f"The replacement of `{location}` has another structure than the model's value there: a tensor instead "
                f"of a {type(old).__name__} of {len(old)}. Assign a {type(old).__name__}, as in `(new, *output[1:])`, "
                "or edit its tensors in place."
            )
        elif isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor):
            found = f"The replacement of `{location}` has a {type(new).__name__} where the model has a tensor."
            self.differences.append(_here(found))
        elif isinstance(old, torch.Tensor):
            if new.shape != old.shape:
                self.reshaped.append(_here(replacement_message(location, tuple(new.shape), tuple(old.shape))))
            if (new.dtype, new.device) != (old.dtype, old.device):
                found = f"is {new.dtype} on {new.device}, but the model has {old.dtype} on {old.device} there."
                self.differences.append(_here(f"The replacement of `{location}` {found}"))

    def note_skip(self, path: str, value: Any) -> None:
        """Record that the module or operation at ``path`` was skipped and returns ``value``; its own result to compare with is unknown."""
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        self.differences.append(_here(f"`{path}` was skipped and returned {kind}."))


def _here(message: str) -> str:
    """Return ``message`` with the user's file and line in front."""
    return "{}:{}: {}".format(*user_position_now(), message)
