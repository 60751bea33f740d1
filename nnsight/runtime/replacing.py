"""What a block puts in place of a model's value, compared with that value, in a run whose modules are Python.

Python models accept many things: None instead of a mask, or a tensor of another dtype. So only certain mistakes are refused, at the
user's line: a tensor in place of a tuple, and inputs that are not ``(args, kwargs)``. Other differences are recorded, and if the model
fails, its error names them. A compiled run refuses more, because its graph is captured for one structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tracing.errors import user_position_now
from .errors import ReplacementShapeError, replacement_message


class Replacements:
    """Checks the replacements of one run; called with location, the model's value and the replacement."""

    def __init__(self) -> None:
        self.reshaped: list[str] = []  # replacements by a tensor of another shape, a line for each: the likely cause if the model fails
        self.odd: list[str] = []  # other differences, which may be the cause if the model fails

    def __call__(self, location: str, old: Any, new: Any) -> None:
        """Raise for a replacement that is a certain mistake; record one that differs.

        Raises:
            ReplacementShapeError: For a tensor in place of a tuple, list or dict, and inputs that are not ``(args, kwargs)``.
        """
        if location.endswith(".input"):
            pair = isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], (tuple, list)) and isinstance(new[1], dict)
            if not pair:
                raise ReplacementShapeError(
                    f"The replacement of `{location}` has another structure than the model's value there: `.inputs` is a pair of a "
                    f"tuple and a dict, not a {type(new).__name__}. Write `.inputs = (x,), {{}}`, or assign the first argument alone: "
                    "`.input = x`."
                )
        elif location == "result":  # nothing follows it
            return
        elif isinstance(old, (tuple, list, Mapping)) and isinstance(new, torch.Tensor):
            raise ReplacementShapeError(
                f"The replacement of `{location}` has another structure than the model's value there: a tensor instead "
                f"of a {type(old).__name__} of {len(old)}. Assign a {type(old).__name__}, as in `(new, *output[1:])`, "
                "or edit its tensors in place."
            )
        elif isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor):
            found = f"The replacement of `{location}` has a {type(new).__name__} where the model has a tensor."
            self.odd.append(_here(found))
        elif isinstance(old, torch.Tensor):
            if new.shape != old.shape:
                self.reshaped.append(_here(replacement_message(location, tuple(new.shape), tuple(old.shape))))
            if (new.dtype, new.device) != (old.dtype, old.device):
                found = f"is {new.dtype} on {new.device}, but the model has {old.dtype} on {old.device} there."
                self.odd.append(_here(f"The replacement of `{location}` {found}"))

    def note_skip(self, path: str, value: Any) -> None:
        """Record that the module or operation at ``path`` returns ``value`` unrun; what it would return is not known."""
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        self.odd.append(_here(f"`{path}` was skipped and returned {kind}."))


def _here(message: str) -> str:
    """Return ``message`` with the user's file and line in front."""
    return "{}:{}: {}".format(*user_position_now(), message)
