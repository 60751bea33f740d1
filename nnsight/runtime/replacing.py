"""What a block puts in place of a model's value, compared with that value, in a run whose modules are Python.

Python models take many things: a module may accept None where it got a mask, or a tensor of another dtype. So only
what cannot be meant is refused, at the user's line: a tensor in place of a tuple, which the next ``[0]`` would silently
take a row of, and inputs that are not ``(args, kwargs)``. What merely looks odd is remembered; if the model then fails,
the error says so. A compiled run refuses more, because its graph is made for one structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..tracing.errors import user_position_now
from .errors import ReplacementShapeError


class Replacements:
    """Looks at the replacements of one run; called with location, the model's value and the replacement.

    Attributes:
        odd: What may be why the model fails, one line for each replacement.
    """

    def __init__(self) -> None:
        self.odd: list[str] = []

    def __call__(self, location: str, old: Any, new: Any) -> None:
        """Raise for a replacement that cannot be meant; remember one that looks odd.

        Raises:
            ReplacementShapeError: For a tensor in place of a tuple, list or dict, and inputs that are not ``(args, kwargs)``.
        """
        if location.endswith(".input"):
            _check_inputs(location.removesuffix(".input"), new)
        elif location != "result":  # nothing follows it
            if isinstance(old, (tuple, list, Mapping)) and isinstance(new, torch.Tensor):
                raise ReplacementShapeError(
                    f"The replacement of `{location}` has another structure than the model's value there: a tensor instead "
                    f"of a {type(old).__name__} of {len(old)}. Assign a {type(old).__name__}, as in `(new, *output[1:])`, "
                    "or edit its tensors in place."
                )
            self._remember(location, old, new)

    def note_skip(self, path: str, value: Any) -> None:
        """Remember that the module or operation at ``path`` returns ``value`` unrun; what it would return is not known."""
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        file, line = user_position_now()
        self.odd.append(f"{file}:{line}: `{path}` was skipped and returned {kind}.")

    def _remember(self, location: str, old: Any, new: Any) -> None:
        if not isinstance(old, torch.Tensor):
            return
        if not isinstance(new, torch.Tensor):
            found = f"has a {type(new).__name__} where the model has a tensor"
        elif (new.dtype, new.device) != (old.dtype, old.device):
            found = f"is {new.dtype} on {new.device}, but the model has {old.dtype} on {old.device} there"
        else:
            return
        file, line = user_position_now()
        self.odd.append(f"{file}:{line}: The replacement of `{location}` {found}.")


def _check_inputs(path: str, new: Any) -> None:
    """Raise unless ``new`` is ``(args, kwargs)``."""
    if not (
        isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], (tuple, list)) and isinstance(new[1], dict)
    ):
        raise ReplacementShapeError(
            f"The replacement of `{path}.input` has another structure than the model's value there: `.inputs` is a pair of a "
            f"tuple and a dict, not a {type(new).__name__}. Write `.inputs = (x,), {{}}`, or assign the first argument alone: "
            "`.input = x`."
        )
