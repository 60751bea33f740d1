"""Small helpers that programs import from ``nnsight.util``.

A :class:`WrapperModule` gives a value of a block its own location: set one as an attribute of a module, and call it in a block with
``hook=True``, or inside such a call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["Object", "WrapperModule", "apply", "fetch_attr", "from_import_path", "to_import_path"]


class Object(torch.Tensor if TYPE_CHECKING else object):  # type: ignore[misc]
    """Annotation for values of a trace. Type checkers treat it as a tensor; at run time nothing is an instance of it."""


class WrapperModule(torch.nn.Module):
    """An identity module: returns one argument as it is, and several arguments as a tuple."""

    def forward(self, *args: Any) -> Any:
        """Return the argument, or the tuple of arguments."""
        return args[0] if len(args) == 1 else args


def fetch_attr(object: Any, path: str) -> Any:
    """Return the attribute of ``object`` at a dotted path, such as ``"transformer.h"``; ``object`` itself for an empty path.

    Raises:
        AttributeError: If a part of the path does not exist.
    """
    return reduce(getattr, filter(None, path.split(".")), object)


def to_import_path(cls: Any) -> str:
    """Return the module and the qualified name of a class or function, joined by a dot."""
    return f"{cls.__module__}.{cls.__qualname__}"


def from_import_path(path: str) -> Any:
    """Return the class or function at ``path``, as :func:`to_import_path` returns it.

    Raises:
        ImportError: If there is no such module.
        AttributeError: If the module has no such name.
    """
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            continue
        return fetch_attr(module, ".".join(parts[length:]))
    raise ImportError(f"{path!r} is not the path of a class or function in a module that exists.")


def apply(data: Any, fn: Callable[[Any], Any], cls: type, n: int = 0) -> Any:
    """Return ``data`` with ``fn`` applied to every instance of ``cls`` in it, through lists, tuples, sets, dicts and slices.

    Containers are rebuilt; a subclass of dict keeps its class. With ``n > 0``, the attributes of other objects are replaced in place, down
    to a depth of ``n`` objects.
    """
    if isinstance(data, cls):
        return fn(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(apply(item, fn, cls, n) for item in data))
    if type(data) in (list, tuple, set, frozenset):
        return type(data)(apply(item, fn, cls, n) for item in data)
    if isinstance(data, dict):
        made = copy.copy(data)
        for key, value in data.items():
            made[key] = apply(value, fn, cls, n)
        return made
    if isinstance(data, slice):
        return slice(*(apply(bound, fn, cls, n) for bound in (data.start, data.stop, data.step)))
    if n > 0 and hasattr(data, "__dict__") and not isinstance(data, type):
        for name, value in list(vars(data).items()):
            setattr(data, name, apply(value, fn, cls, n - 1))
    return data
