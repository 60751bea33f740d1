"""The text of printed values. It is made in the process that runs the model, see :mod:`~nnsight.program.record.printing`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

#: Format specifications of numbers. Widths have at most two digits, because the server makes the text.
_FORMAT = re.compile(r"(?:[^{}]?[<>=^])?[+\- ]?z?#?0?\d{0,2}[_,]?(?:\.\d{1,2})?[bcdeEfFgGnoxX%]?")

#: Maximum count of numbers in the text of a tensor. The summary that torch prints can exceed it for a tensor with many dimensions.
_MOST_NUMBERS = 5000


def is_format(spec: Any) -> bool:
    """Whether ``spec`` is the format specification of a number, with a short result."""
    return type(spec) is str and len(spec) < 20 and _FORMAT.fullmatch(spec) is not None


def text_of(pieces: list[Any], tensor: Callable[[Any], torch.Tensor]) -> str:
    """Return the text of a ``log`` node. ``tensor(reference)`` returns the values in it."""
    return "".join(
        piece if type(piece) is str else _shown(tensor(piece["value"]), piece.get("format")) for piece in pieces
    )


def _shown(tensor: torch.Tensor, spec: str | None) -> str:
    value = tensor.detach()
    if spec is not None and not value.dim():
        return format(value.item(), spec)
    shortened = value.numel() > 1000
    if math.prod(min(size, 6) if shortened else size for size in value.shape) > _MOST_NUMBERS:
        return f"tensor of shape {tuple(value.shape)}, {value.dtype}"
    return repr(value.cpu())


def limited(log: Callable[[str], None], characters: int) -> Callable[[str], None]:
    """Return a function that passes text on to ``log``, at most ``characters`` in total."""
    left = characters

    def pass_on(text: str) -> None:
        nonlocal left
        if left > 0:
            log(text[:left])
            left -= len(text)
            if left <= 0:
                log(f"(The job prints more than {characters} characters. The rest is left out.)")

    return pass_on
