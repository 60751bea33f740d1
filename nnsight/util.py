"""Small helpers that programs import from ``nnsight.util``.

An instance of :class:`WrapperModule` that is set as an attribute of a module is a location of its own when it is called in a block, with
``hook=True`` or inside such a call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

__all__ = ["WrapperModule", "apply", "fetch_attr"]


class WrapperModule(torch.nn.Module):
    """Returns what it is given: one argument as it is, several as a tuple."""

    def forward(self, *args: Any) -> Any:
        """Return the argument, or the tuple of arguments."""
        return args[0] if len(args) == 1 else args


def fetch_attr(object: Any, path: str) -> Any:
    """Return what a dotted path below ``object`` names; ``object`` itself for an empty path.

    Raises:
        AttributeError: If a part of the path does not exist.
    """
    return reduce(getattr, filter(None, path.split(".")), object)


def apply(data: Any, fn: Callable[[Any], Any], cls: type) -> Any:
    """Return ``data`` with ``fn`` applied to every instance of ``cls`` in it, through lists, tuples, dicts and slices."""
    if isinstance(data, cls):
        return fn(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(apply(item, fn, cls) for item in data))
    if type(data) in (list, tuple):
        return type(data)(apply(item, fn, cls) for item in data)
    if isinstance(data, dict):
        return {key: apply(value, fn, cls) for key, value in data.items()}
    if isinstance(data, slice):
        return slice(*(apply(bound, fn, cls) for bound in (data.start, data.stop, data.step)))
    return data
