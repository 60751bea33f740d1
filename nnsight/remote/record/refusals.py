"""What cannot be sent, said to the user: where it stands in the block, and what to write instead."""

from __future__ import annotations

from ...tracing.errors import user_position_now
from .listening import TORCH, position_of_block


def here(message: str) -> str:
    """Return a message with the line of the block in front."""
    filename, line = position_of_block.get() or user_position_now(skip=TORCH)
    return f"{filename}:{line}: {message}"


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
