"""Descriptions of models: guards for cached copies of models.

A copy of a model with fake tensors, and the values at its locations, can be cached until the model changes. Torch does not report changes
of a model, so the model is *described*. A description has the classes of the modules and their ``forward``, the sizes and dtypes of their
tensors, and the plain values in their attributes, in their configurations, and in the closures of their functions. Models with equal
descriptions run alike on fake tensors. The values of weights do not matter for that, and are not part of a description. A description costs
about a microsecond per attribute, and does not refer to any module.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any

import torch

#: Maximum depth to which attributes of attributes are described.
_DEPTH = 3

#: Attributes of modules that depend on other attributes, that a run sets, or that the module tree tracks.
_LEFT_OUT = frozenset({"_modules", "_call_impl", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"})

_WEIGHTS = frozenset({"_parameters", "_buffers"})

#: Types of containers. Most containers in attributes of modules are empty, and empty ones are skipped.
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})

_PLAIN = frozenset({bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def describe(modules: Iterable[torch.nn.Module]) -> Hashable:
    """Return a description of ``modules``. Equal descriptions mean that the modules run alike on fake tensors."""
    known: dict[int, Any] = {}
    found: list[Any] = []
    with torch._C.DisableTorchFunction():  # hides the reads of metadata from the modes of a recording
        for module in modules:
            kind = type(module)
            found += kind, kind.forward
            for name, value in module.__dict__.items():
                kind = type(value)
                if kind in _CONTAINERS and not value:
                    continue
                if kind in _PLAIN:
                    found += name, kind, value
                elif kind is float:
                    found += name, repr(value)
                elif name in _WEIGHTS:
                    for weight, tensor in value.items():
                        found += weight, None if tensor is None else _description_of(tensor)
                elif name not in _LEFT_OUT:
                    found += name, _describe(value, _DEPTH, known)
    return tuple(found)


def _describe(value: Any, depth: int, known: dict[int, Any]) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (float, complex, slice, range):
        return kind, repr(value)
    if issubclass(kind, torch.Tensor):  # `isinstance` would read `__class__` of the object, which is slow for a configuration
        return _description_of(value)
    if issubclass(kind, torch.nn.Module) or depth == 0:
        return (kind,)
    if issubclass(kind, (list, tuple, set, frozenset)):
        return kind, tuple([(type(item), item) if type(item) in _PLAIN else _describe(item, depth - 1, known) for item in value])
    if issubclass(kind, dict):
        items = [(type(item), item) if type(item) in _PLAIN else _describe(item, depth - 1, known) for item in value.values()]
        return kind, tuple([_describe(key, 1, known) if type(key) is not str else key for key in value]), tuple(items)
    found = known.get(id(value))
    if found is None:
        found = known[id(value)] = kind, _inside(value, kind, depth - 1, known)
    return found


def _description_of(tensor: torch.Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _inside(value: Any, kind: type, depth: int, known: dict[int, Any]) -> Hashable:
    """Return a description of the contents of a function or an object."""
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return value.__code__, tuple(_describe(content, depth, known) for content in cells)
    if kind is types.MethodType:
        return _describe(value.__func__, depth, known)
    if issubclass(kind, functools.partial):
        return tuple(_describe(part, depth, known) for part in (value.func, value.args, value.keywords))
    content = getattr(value, "__dict__", None)
    return _describe(content, depth, known) if type(content) is dict else None


def facts_of(root: torch.nn.Module) -> dict[str, str]:
    """Return what the name of a model leaves open and blocks can depend on: ``dtype`` and ``attn_implementation``, where it has them."""
    weight = next((weight for weight in root.parameters() if weight.is_floating_point()), None)
    attention = getattr(getattr(root, "config", None), "_attn_implementation", None)
    known = {"dtype": None if weight is None else str(weight.dtype), "attn_implementation": attention}
    return {name: value for name, value in known.items() if isinstance(value, str)}


def key_of(arguments: Any) -> Hashable:
    """Return a key of the sizes and plain values in the arguments of a model. They determine how it runs on fake tensors.

    Raises:
        TypeError: If the arguments contain other objects than tensors and plain data.
    """
    if isinstance(arguments, torch.Tensor):
        return arguments.shape, arguments.stride(), arguments.dtype, arguments.device
    if isinstance(arguments, dict):
        return type(arguments), tuple((key, key_of(item)) for key, item in arguments.items())
    if isinstance(arguments, (list, tuple)):
        return type(arguments), tuple(map(key_of, arguments))
    if type(arguments) in _PLAIN:
        return type(arguments), arguments
    if type(arguments) is float:
        return float, repr(arguments)
    raise TypeError(f"A {type(arguments).__name__} is neither a tensor nor plain data.")
