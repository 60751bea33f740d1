"""What a block reads from outside, and what tells that it is as it was.

The *roots* of a block are variables, and attributes of them. A replay (:mod:`nnsight.fx.replay`) compares them with what they
were; which comparison is needed depends on the kind of object:

==============  =========================================================================================
``"tensor"``    type, shape, strides, dtype, device, and whether it requires a gradient; not its values
``"constant"``  numbers, strings, dtypes and tuples of them: equal, and of the same type
``"object"``    envoys, functions, Python modules and instances: the same object
``"items"``     a list, tuple or dict of tensors and constants: each of its items
``"envoys"``    a list or tuple of envoys: the same objects
``"filled"``    a list that the block appends to, and does not look at: whether it is another one of these
==============  =========================================================================================
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..located import Located

#: Longest container whose items are compared one by one.
_LONGEST = 64

_CONSTANT_TYPES = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip

_PLAIN_LOOKUP: tuple[Any, ...] = tuple(
    kind.__getattribute__ for kind in (object, types.ModuleType, types.SimpleNamespace)
)


class Root(NamedTuple):
    """Something a block reads from outside: a variable, or an attribute of one."""

    name: str
    attributes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.name, *self.attributes))


def look_up(value: Any, name: str) -> Any:
    """Return an attribute of an instance or a Python module without running any code of its class.

    Raises:
        KeyError: If it is not simply stored there.
    """
    kind = type(value)
    if kind.__getattribute__ not in _PLAIN_LOOKUP or hasattr(kind, name):
        raise KeyError(name)
    own = value.__dict__
    if name in own or not isinstance(value, torch.nn.Module):
        return own[name]
    return next(table for table in (value._parameters, value._buffers, value._modules, own) if name in table or table is own)[name]


def kind_of(value: Any) -> str | None:
    """Return how ``value`` is compared in a replay, ``None`` if it cannot be."""
    if isinstance(value, torch.Tensor):
        return "tensor" if type(value) in (torch.Tensor, torch.nn.Parameter) else None
    if is_constant(value):
        return "constant"
    if type(value) in (list, tuple, dict):
        items = list(value.values() if type(value) is dict else value)
        if items and type(value) is not dict and all(isinstance(item, Located) for item in items):
            return "envoys"
        keys = list(value) if type(value) is dict else []
        fits = len(items) <= _LONGEST and all(kind_of(item) in ("tensor", "constant") for item in items)
        return "items" if fits and all(is_constant(key) for key in keys) else None
    return "object" if _can_be_referred_to(value) else None


def is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(is_constant(item) for item in value)
    return type(value) in _CONSTANT_TYPES


def _can_be_referred_to(value: Any) -> bool:
    try:
        weakref.ref(value)
    except TypeError:
        return isinstance(value, types.BuiltinFunctionType)
    return True


class Read(NamedTuple):
    """What the roots of a block are.

    Attributes:
        key: What tells that they are as they were.
        tensors: The tensors.
        objects: The objects that are compared by identity.
        filled: The lists that the block appends to.
    """

    key: tuple[Any, ...]
    tensors: list[torch.Tensor]
    objects: list[Any]
    filled: list[list[Any]]


def read_roots(roots: tuple[tuple[Root, str], ...], variable: Callable[[str], Any]) -> Read | None:
    """Return what the roots are now; ``None`` if one is of another kind."""
    key: list[Any] = []
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []
    filled: list[list[Any]] = []
    looked_at: set[int] = set()
    for (name, attributes), kind in roots:
        try:
            value = variable(name)
            for attribute in attributes:
                value = look_up(value, attribute)
        except (KeyError, AttributeError):
            return None
        if kind == "object":
            key.append(id(value))
            objects.append(value)
        elif kind == "filled":
            if type(value) is not list:
                return None
            filled.append(value)
        elif kind_of(value) != kind:
            return None
        elif kind == "envoys":
            key.append((type(value), *map(id, value)))
            objects += value
        elif kind == "items":
            looked_at.add(id(value))
            entries = list(value.items()) if type(value) is dict else list(enumerate(value))
            key.append((type(value), len(entries)))
            for index, item in entries:
                key.append((type(index), index))
                _add_item(item, key, tensors)
        else:
            _add_item(value, key, tensors)
    if filled:
        numbers = list(map(id, filled))
        if not looked_at.isdisjoint(numbers):
            return None
        key += map(numbers.index, numbers)
    return Read(tuple(key), tensors, objects, filled)


def _add_item(value: Any, key: list[Any], tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key.append(
            (type(value), value.shape, value.stride(), value.dtype, value.device, value.layout, value.requires_grad, value.is_leaf)
        )
    else:
        key.append(_constant_key(value))


def _constant_key(value: Any) -> Any:
    """Return what is equal for equal constants of equal types: ``1 == 1.0 == True``, ``0.0 == -0.0``."""
    if type(value) is tuple:
        return tuple(map(_constant_key, value))
    if type(value) in (float, complex, slice, range):
        return type(value), repr(value)
    return type(value), value
