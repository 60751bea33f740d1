"""Refusals of blocks that cannot be sent: the line of the block, the reason, and what to write instead."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from ...tracing.errors import user_position_now
from ..format.errors import NotExpressibleError

#: Where torch and other libraries are installed: their lines are not those of the user.
LIBRARIES = torch.__file__.rsplit("/", 2)[0]

#: File and line of the block that is recorded while the model runs.
position_of_block: ContextVar[tuple[str, int] | None] = ContextVar("nnsight_recorded_position", default=None)

#: What to do where a size depends on values.
WITHOUT_SIZE = (
    "Save the tensor and use its size after the block; `sum` and `mean` need no size, and `torch.where(mask, value, 0.0)` keeps that of "
    "the value."
)


def position() -> tuple[str, int]:
    """Return file and line of the block."""
    return position_of_block.get() or user_position_now(skip=LIBRARIES)


def here(message: str) -> str:
    """Return a message with the line of the block in front."""
    filename, line = position()
    return f"{filename}:{line}: {message}"


def refused(message: str) -> NotExpressibleError:
    """Return the error to raise for something at the line of the block."""
    return NotExpressibleError(here(message))


def shown(name: str) -> str:
    """Return what a user calls a function that needs values."""
    what = {
        "__repr__": "printing a tensor",
        "__str__": "printing a tensor",
        "__format__": "formatting a tensor",
        "__bool__": "a condition on a tensor",
        "is_nonzero": "a condition on a tensor",
        "__index__": "using a tensor as a number",
        "__deepcopy__": "a deep copy of a tensor",
    }.get(name, f"`{name.strip('_')}`")
    return what[0].upper() + what[1:]


def why_demand(name: str) -> str:
    """Return why a function that needs values cannot be called."""
    why = f"{shown(name)} needs values, and they are where the model runs. "
    if name in ("__repr__", "__str__", "__format__"):
        return why + "Only what is printed as it is can be sent: make other text of `x.item()` or `x.tolist()`."
    return why + "Save the tensor and use it after the block; decide with `torch.where`, select with `gather` or `index_select`."
