"""Refusals of blocks that cannot be sent: the line of the block, the reason, and what to write instead."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from ...tracing.errors import user_position_now
from ..format.errors import NotExpressibleError

TORCH = torch.__file__.rsplit("/", 1)[0]

#: File and line of the block that is recorded while the model runs.
position_of_block: ContextVar[tuple[str, int] | None] = ContextVar("nnsight_recorded_position", default=None)

#: What to do where a size depends on values.
WITHOUT_SIZE = (
    "Save the tensor and use its size after the block; `sum` and `mean` need no size, and `torch.where(mask, value, 0.0)` keeps that of "
    "the value."
)


def here(message: str) -> str:
    """Return a message with the line of the block in front."""
    filename, line = position_of_block.get() or user_position_now(skip=TORCH)
    return f"{filename}:{line}: {message}"


def refused(message: str) -> NotExpressibleError:
    """Return the error to raise for something at the line of the block."""
    return NotExpressibleError(here(message))


def why_demand(name: str) -> str:
    """Return why a function that needs values cannot be called."""
    shown = {
        "__repr__": "printing a tensor",
        "__str__": "printing a tensor",
        "__format__": "formatting a tensor",
        "__bool__": "a condition on a tensor",
        "is_nonzero": "a condition on a tensor",
        "__index__": "using a tensor as a number",
        "__deepcopy__": "a deep copy of a tensor",
    }.get(name, f"`{name.strip('_')}`")
    return (
        f"{shown[0].upper()}{shown[1:]} needs values, and they are where the model runs. Save the tensor and use it after the block; "
        "decide with `torch.where`, select with `gather` or `index_select`."
    )
