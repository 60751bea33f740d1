"""Batched containers: objects with rows in their attributes, such as the key-value cache of a transformers model.

Tuples, lists and dicts can be rebuilt with other items. An object like a ``DynamicCache`` cannot, because the model keeps a reference to it
and fills it. So an invoke gets a shallow *copy* of the object, with views of its rows in the attributes. The attributes that the invoke
assigns are written back to the original.

Batched containers are caches of transformers and their layers, instances of dataclasses, and instances of classes that were registered
with :func:`register_batched_container`. Containers of ``torch.utils._pytree`` are not among them. An invoke gets any other object whole.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from .errors import ReplacementShapeError

#: Maps one tensor: ``(place, tensor) -> tensor``. A place is the container's class and the attribute, as in ``DynamicLayer.keys``.
OnTensor = Callable[[str, torch.Tensor], torch.Tensor]

#: Writes the rows that an invoke has left into the whole tensor: ``(place, whole tensor, given view, rows left) -> whole tensor``.
PutBack = Callable[[str, torch.Tensor, torch.Tensor, Any], Any]

_Class = TypeVar("_Class", bound=type)

_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_registered: weakref.WeakSet[type] = weakref.WeakSet()
_PLAIN = frozenset({type(None), int, float, bool, str, torch.device, torch.dtype})
_NEVER = frozenset({torch.Tensor, torch.nn.Parameter, tuple, list, dict, *_PLAIN})


def register_batched_container(kind: _Class) -> _Class:
    """Register ``kind``, with its subclasses, as a batched container: each invoke sees the tensors in an instance narrowed to its rows.

    Returns ``kind``, so it can be used as a decorator. Tensors are found in attributes, and in containers and batched containers there.
    """
    _registered.add(kind)
    _known.clear()
    return kind


def is_batched_container(value: Any) -> bool:
    """Whether ``value`` is a batched container, see the module docstring."""
    kind = type(value)
    if kind in _NEVER:
        return False
    known = _known.get(kind)
    if known is None:
        known = _known[kind] = _holds_rows(kind)
    return known


def _holds_rows(kind: type) -> bool:
    if issubclass(kind, (torch.Tensor, torch.nn.Module, type)):
        return False
    if any(base in _registered or is_cache(base) for base in kind.__mro__):
        return True
    return dataclasses.is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES


def is_cache(kind: type) -> bool:
    """Whether ``kind`` is a cache of transformers, or a layer of one. It is recognised by name, to avoid importing transformers."""
    package = kind.__module__.partition(".")[0]
    return package == "transformers" and (kind.__module__.endswith(".cache_utils") or kind.__name__.endswith("Cache"))


def _is_container(value: Any) -> bool:
    """Whether pytree can flatten ``value``."""
    kind = type(value)
    return kind in pytree.SUPPORTED_NODES or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def attributes(container: Any) -> Mapping[str, Any]:
    """Return the attributes of ``container`` by name, from its ``__dict__`` or its ``__slots__``."""
    if hasattr(container, "__dict__"):
        return vars(container)
    names = [name for base in type(container).__mro__ for name in getattr(base, "__slots__", ())]
    return {name: getattr(container, name) for name in names if hasattr(container, name)}


def on_tensors(value: Any, function: OnTensor, place: str = "") -> Any:
    """Return ``value`` with ``function`` applied to each tensor in it. Nothing is changed in place.

    Only the containers around a changed tensor are copied. Without any change the result is ``value`` itself.
    """
    if isinstance(value, torch.Tensor):
        return function(place, value)
    if is_batched_container(value):
        changed = {}
        for name, item in attributes(value).items():
            if type(item) in _PLAIN:
                continue
            new = on_tensors(item, function, f"{type(value).__qualname__}.{name}")
            if new is not item:
                changed[name] = new
        if not changed:
            return value
        made = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(made, name, new)
        return made
    if type(value) in _PLAIN or not _is_container(value):
        return value
    leaves, structure = pytree.tree_flatten(value, is_leaf=is_batched_container)
    mapped = [on_tensors(leaf, function, f"{place}[{index}]") for index, leaf in enumerate(leaves)]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(mapped, structure)


def write_back(location: str, whole: Any, given: Any, left: Any, put: PutBack, place: str = "") -> Any:
    """Write an invoke's changes of its copy back to the batched container of the whole batch; return the container, or its replacement.

    Args:
        location: The location of the container, for messages.
        whole: The container of the whole batch (or the part of it at ``place``), which is changed in place.
        given: The invoke's copy before its turn.
        left: The invoke's copy after its turn, or the object that the invoke put in its place.
        put: Returns the whole tensor with the invoke's rows; called for rows that the invoke did not replace, too.
        place: The position of ``whole`` inside the container.

    Raises:
        ReplacementShapeError: If ``left`` has another structure than ``given``.
    """
    if isinstance(given, torch.Tensor):
        return put(place, whole, given, left)
    if given is whole:  # it contains no rows, so the invoke got the object itself
        return left
    if type(left) is not type(given):
        raise ReplacementShapeError(
            f"The replacement of `{location}` has a {type(left).__name__} in place of this invoke's {type(given).__name__}"
            f"{f' at {place}' if place else ''}. With several invokes each may replace its own rows only."
        )
    if is_batched_container(given):
        before, after = attributes(given), attributes(left)
        for name, item in after.items():
            inner = f"{type(given).__qualname__}.{name}"
            old = attributes(whole).get(name)
            new = write_back(location, old, before[name], item, put, inner) if name in before else item
            if new is not old:
                object.__setattr__(whole, name, new)
        return whole
    whole_leaves, structure = pytree.tree_flatten(whole, is_leaf=is_batched_container)
    left_leaves, left_structure = pytree.tree_flatten(left, is_leaf=is_batched_container)
    if left_structure != structure:
        raise ReplacementShapeError(
            f"This invoke left {place} of `{location}` with another number of entries. With several invokes each may replace "
            "its own rows only."
        )
    given_leaves = pytree.tree_leaves(given, is_leaf=is_batched_container)
    merged = [
        write_back(location, *leaves, put, f"{place}[{index}]")
        for index, leaves in enumerate(zip(whole_leaves, given_leaves, left_leaves, strict=True))
    ]
    if all(new is old for new, old in zip(merged, whole_leaves, strict=True)):
        return whole
    return pytree.tree_unflatten(merged, structure)
