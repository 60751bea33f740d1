"""Errors for blocks that cannot be a program. They have the line of the block, the reason, and an alternative."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from ...tracing.errors import user_position_now
from ..format.errors import NotExpressibleError

#: The folder of installed libraries, such as torch. Lines of files in it are not lines of the user.
LIBRARIES = torch.__file__.rsplit("/", 2)[0]

#: File and line of the block that is recorded, while code of the model or of this package runs in its turn.
position_of_block: ContextVar[tuple[str, int] | None] = ContextVar("nnsight_recorded_position", default=None)

#: Advice for sizes that depend on values.
WITHOUT_SIZE = (
    "Save the tensor and use its size after the block; `sum` and `mean` need no size, and `torch.where(mask, value, 0.0)` keeps the size "
    "of the value."
)


def position() -> tuple[str, int]:
    """Return the file and the present line of the block."""
    return position_of_block.get() or user_position_now(skip=LIBRARIES)


def here(message: str) -> str:
    """Return ``message`` with the file and line of the block in front."""
    filename, line = position()
    return f"{filename}:{line}: {message}"


def refused(message: str) -> NotExpressibleError:
    """Return a :class:`NotExpressibleError` with the line of the block and ``message``."""
    return NotExpressibleError(here(message))


def shown(name: str) -> str:
    """Return words for a function that needs values, for the start of a sentence: ``"A condition on a tensor"`` for ``"__bool__"``."""
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
    """Return the reason why a function that needs values is refused, and advice."""
    why = f"{shown(name)} needs values, and they are where the model runs. "
    if name in ("__repr__", "__str__", "__format__"):
        return why + "Text of a tensor can only be printed as it is. Make other text from `x.item()` or `x.tolist()`."
    return why + "Save the tensor and use it after the block; decide with `torch.where`, select with `gather` or `index_select`."
