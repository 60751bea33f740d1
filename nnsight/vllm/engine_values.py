"""Values of an engine that belong to no module: the logits, and the sampled tokens.

``model.logits`` is the place and the value. ``model.logits.output`` reads the value; so does everything that one does with a tensor:
``model.logits[-1]``, ``model.logits.argmax(-1)``, ``torch.softmax(model.logits, -1)``. Both can be edited in place and assigned.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..runtime.modules.located import Located
from ..runtime.modules.tree import ModuleTree


class EngineValue(Located):
    """A value of the engine at each of its steps, by the location ``path``."""

    interleaver = None  # outside of a run it has no value, and asks for none

    def __init__(self, path: str, tree: ModuleTree) -> None:
        self._path, self._tree = path, tree

    @property
    def path(self) -> str:
        """The prefix of its location, ``<path>.output``."""
        return self._path

    def save(self) -> torch.Tensor:
        """Save the value, and return it."""
        value: Any = self.output
        saved: torch.Tensor = value.save()
        return saved

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the values in the places of such objects."""
        args, kwargs = pytree.tree_map(_value_of, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.output, name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.output[index] = _value_of(value)

    def __repr__(self) -> str:
        return f"<{self._path}.output, a value of each step of the engine>"


def _value_of(item: Any) -> Any:
    return item.output if isinstance(item, EngineValue) else item


def _operation(function: Any) -> Any:
    def call(self: EngineValue, *others: Any) -> Any:
        return function(self.output, *map(_value_of, others))

    return call


def _reflected(function: Any) -> Any:
    def call(self: EngineValue, other: Any) -> Any:
        return function(other, self.output)

    return call


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")

for _name in (*_BINARY, "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "getitem", "index"):
    setattr(EngineValue, f"__{_name}__", _operation(getattr(operator, f"__{_name}__")))
for _name in _BINARY:
    setattr(EngineValue, f"__r{_name}__", _reflected(getattr(operator, f"__{_name}__")))
    setattr(EngineValue, f"__i{_name}__", _operation(getattr(operator, f"__i{_name}__")))
for _name, _function in {"len": len, "iter": iter, "bool": bool, "int": int, "float": float}.items():
    setattr(EngineValue, f"__{_name}__", _operation(_function))
EngineValue.__hash__ = object.__hash__  # type: ignore[method-assign]  # lost with `__eq__`


class engine_value:  # noqa: N801 - a descriptor, like `property`
    """A descriptor for an :class:`EngineValue` of a model; assigning replaces the value, as ``.output = ...`` does."""

    def __init__(self, name: str, doc: str) -> None:
        self._name, self.__doc__ = name, doc

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        return self if owner is None else EngineValue(f"model.{self._name}", owner._tree)

    def __set__(self, owner: Any, value: Any) -> None:
        self.__get__(owner).output = _value_of(value)
