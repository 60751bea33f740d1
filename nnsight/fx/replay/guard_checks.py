"""Reading the roots of a block, in each replay.

What is on the way to several roots is looked up once, so that one more root costs about a microsecond: a :class:`GuardPlan` says in
which order.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .guards import CONTAINERS, TENSORS, WAYS, Root, constant_key, has_global_hooks, is_called_plainly, kind_of


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


class GuardPlan:
    """In which order roots are read: what is on the way to several is looked up once.

    Args:
        roots: The roots, with the kind of comparison that each needs.
    """

    def __init__(self, roots: Iterable[tuple[Root, str]]) -> None:
        self._steps: list[tuple[int, Any, Any, str]] = []
        self._calls_modules = False
        places: dict[Root, int] = {}
        for root, kind in roots:
            self._calls_modules = self._calls_modules or kind == "module"
            for length in range(len(root.steps) + 1):
                reached = Root(root.start, root.steps[:length])
                wanted = kind if reached == root else ""
                place = places.get(reached)
                if place is not None and not wanted:
                    continue
                if length:
                    step = root.steps[length - 1]
                    parent = places[Root(root.start, root.steps[: length - 1])]
                    self._steps.append((parent, WAYS[step.how], step.what, wanted))
                else:
                    self._steps.append((-1, None, root.start, wanted))
                if place is None:
                    places[reached] = len(self._steps) - 1

    def read(self, variable: Callable[[str], Any]) -> Read | None:
        """Return what the roots are now; ``None`` if one is of another kind."""
        if self._calls_modules and has_global_hooks():
            return None
        reading = _Reading()
        key, tensors, objects = reading.key, reading.tensors, reading.objects
        found: list[Any] = []
        try:
            for parent, way, what, kind in self._steps:
                value = way(found[parent], what) if way is not None else variable(what) if type(what) is str else what()
                found.append(value)
                if kind == "object":
                    key.append(id(value))
                    objects.append(value)
                elif kind == "tensor":
                    if type(value) not in TENSORS:
                        return None
                    tensors.append(value)
                    key.append(_tensor_key(value))
                elif kind and not reading.add(value, kind):
                    return None
        except (LookupError, AttributeError, TypeError, ValueError):
            return None
        return reading.finished()


class _Reading:
    """Puts together what tells that roots are as they were; the attributes are those of :class:`Read`."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self._filled: list[list[Any]] = []
        self._looked_at: set[int] = set()

    def add(self, value: Any, kind: str) -> bool:
        """Add one root, neither a tensor nor an object; return whether it is of this kind."""
        key, objects = self.key, self.objects
        if kind == "function":
            if type(value) is not types.FunctionType:
                return False
            code = value.__code__
            defaults, named = value.__defaults__, value.__kwdefaults__
            key.append((id(code), len(defaults) if defaults else 0, tuple(named) if named else ()))
            objects.append(code)
        elif kind == "module":
            if not isinstance(value, torch.nn.Module) or not is_called_plainly(value):
                return False
            key.append(type(value))
        elif kind == "children":
            if not isinstance(value, CONTAINERS):
                return False
            children = value._modules
            key.append((type(value), *children, *map(id, children.values())))
            objects += [child for child in children.values() if child is not None]
        elif kind == "filled":
            if type(value) is not list:
                return False
            self._filled.append(value)
        elif kind_of(value) != kind:
            return False
        elif kind == "envoys":
            key.append((type(value), *map(id, value)))
            objects += value
        elif kind == "members":
            self._looked_at.add(id(value))
            key.append((type(value), len(value), *(map(constant_key, value) if type(value) is dict else ())))
        elif kind == "partial":
            key.append((len(value.args), *value.keywords))
        elif kind == "items":
            self._looked_at.add(id(value))
            entries = list(value.items()) if type(value) is dict else list(enumerate(value))
            key.append((type(value), len(entries)))
            for index, item in entries:
                key.append((type(index), index))
                _add_item(item, key, self.tensors)
        else:
            _add_item(value, key, self.tensors)
        return True

    def finished(self) -> Read | None:
        """Return what was read; ``None`` if a list is filled and looked at."""
        if self._filled:
            numbers = list(map(id, self._filled))
            if not self._looked_at.isdisjoint(numbers):
                return None
            self.key += map(numbers.index, numbers)
        return Read(tuple(self.key), self.tensors, self.objects, self._filled)


def _add_item(value: Any, key: list[Any], tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key.append(_tensor_key(value))
    else:
        key.append(constant_key(value))


def _tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad,
        tensor.is_leaf,
    )  # fmt: skip
