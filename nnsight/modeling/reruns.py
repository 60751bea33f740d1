"""Second runs of blocks: ``tracer.program`` runs a block once more, on fake tensors, with the variables and inputs of its trace.

The record of a trace keeps no object of the user alive. It contains numbers and strings themselves, the content of built-in containers and
namedtuples before the block ran, and weak references to tensors and all other objects. An input tensor that no longer exists is replaced by
one of the same size, dtype and device, since a run on fake tensors ignores values. A variable that no longer exists is an error.
"""

from __future__ import annotations

import copy
import numbers
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..tracing import Scope

if TYPE_CHECKING:
    from .tracing import ModelTracer

#: Types of values that are kept as they are.
_PLAIN = frozenset(
    {int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice}
    | {types.EllipsisType, types.BuiltinFunctionType}
)

#: Containers with more items, or at a deeper level of nesting, are not kept.
_LONGEST, _DEEPEST = 256, 4

#: Containers that :func:`container_copy` copies.
_CONTAINERS = {list, dict, set, bytearray, deque, defaultdict, OrderedDict, Counter}

#: Stands for a value that cannot be kept.
_NOT_KEPT = object()


class GoneError(LookupError):
    """A value no longer exists, or could not be kept."""


class _KeptContainer(NamedTuple):
    """The content of a container; of a dict, its keys, and its values as ``items``."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]
    option: Any = None  # the length limit of a deque, or the record of the factory of a defaultdict


class _KeptTensor(NamedTuple):
    """A weak reference to an input tensor, and the properties by which it can be replaced."""

    reference: weakref.ref[torch.Tensor]
    size: torch.Size
    dtype: torch.dtype
    device: torch.device


class Rerun:
    """The block, variables and inputs of a trace that is about to run; see the module.

    Attributes:
        block: The block.
        kind: Class of the object that calls the model, such as ``Generation``; ``None`` if the trace calls the model itself.
    """

    def __init__(self, tracer: ModelTracer) -> None:
        assert tracer.info is not None and tracer.scope is not None and tracer._call is not None
        self.block, self._globals = tracer.info, tracer.module_globals
        self._names, given = tuple(tracer.scope.cells), tracer.module_globals
        known: dict[int, _KeptContainer] = {}
        mentioned = self.block.shared  # a session has the variables of all its traces
        self._variables = [(name, _kept(value, known)) for name, value in tracer.scope.items() if name in mentioned]
        self._used = [(name, _kept(given[name], known)) for name in self.block.globals_read if name in given]
        _, function, args, kwargs = tracer._call
        self._inputs = [_kept_input(argument) for argument in args], [(name, _kept_input(value)) for name, value in kwargs.items()]
        model: Any = tracer._model
        self._model = weakref.ref(model)
        self.kind: type | None = None if function is model else type(function)

    @property
    def has_inputs(self) -> bool:
        """Whether all tensors among the inputs still exist."""
        described = [*self._inputs[0], *(value for _, value in self._inputs[1])]
        return all(value.reference() is not None for value in _leaves(described) if type(value) is _KeptTensor)

    def tracer(self) -> ModelTracer:
        """Return a trace with the same block and inputs, ready to run, with copies of the variables.

        Raises:
            GoneError: If the model, or a variable from outside the block, no longer exists.
        """
        model = self._model()
        if model is None:
            raise GoneError("the model")
        made: dict[int, Any] = {}
        copies: dict[int, Any] = {}
        cells = {name: types.CellType() for name in self._names}
        for name, value in _values(self._variables, made, self.block.stored):
            cells[name].cell_contents = container_copy(value, copies)
        used = {name: container_copy(value, copies) for name, value in _values(self._used, made)}
        args = [_value(argument, made) for argument in self._inputs[0]]
        kwargs = dict(_values(self._inputs[1], made))
        calls = model if self.kind is None else self.kind(model)
        tracer: ModelTracer = model._tracer(calls, args, kwargs, False, None)
        tracer._entered, tracer.info, tracer.scope = True, self.block, Scope(cells)
        tracer.module_globals = self._globals | used
        return tracer


def _kept(value: Any, known: dict[int, _KeptContainer], depth: int = 0) -> Any:
    """Return the record of a value; ``known`` has the records of earlier containers, by identity."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, numbers.Number):
        return value
    if kind is tuple or kind in _CONTAINERS or (isinstance(value, tuple) and hasattr(kind, "_make")):
        if id(value) in known:
            return known[id(value)]
        if len(value) > _LONGEST or depth > _DEEPEST:
            return _NOT_KEPT
        is_dict = isinstance(value, dict)
        kept = tuple([_kept(item, known, depth + 1) for item in (value.values() if is_dict else value)])
        option = _kept(value.maxlen if kind is deque else getattr(value, "default_factory", None), known)
        known[id(value)] = made = _KeptContainer(kind, tuple(value) if is_dict else (), kept, option)
        return made
    try:
        return weakref.ref(value)
    except TypeError:
        return _NOT_KEPT


def _leaves(kept: Iterable[Any]) -> Iterator[Any]:
    for item in kept:
        yield from _leaves(item.items) if type(item) is _KeptContainer else [item]


def _kept_input(value: Any) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        return _KeptTensor(weakref.ref(value), value.size(), value.dtype, value.device)
    if kind is dict and len(value) <= _LONGEST:
        return _KeptContainer(kind, tuple(value), tuple(map(_kept_input, value.values())))
    return _kept(value, {})


def _values(kept: Iterable[tuple[str, Any]], made: dict[int, Any], assigned: frozenset[str] = frozenset()) -> list[tuple[str, Any]]:
    """Return values with their names, without values that are gone and whose name the block assigns itself."""
    found = []
    for name, entry in kept:
        try:
            found.append((name, _value(entry, made)))
        except GoneError:
            if name not in assigned:
                raise GoneError(f"`{name}`") from None
    return found


def _value(kept: Any, made: dict[int, Any]) -> Any:
    """Return the value of a record; ``made`` has the containers made so far, so that one container stays one object."""
    kind = type(kept)
    if kind is weakref.ref:
        found = kept()
        if found is not None:
            return found
        raise GoneError("a value")
    if kept is _NOT_KEPT:
        raise GoneError("a value")
    if kind is _KeptTensor:
        known = kept.reference()
        return torch.ones(kept.size, dtype=kept.dtype, device=kept.device) if known is None else known
    if kind is _KeptContainer:
        if id(kept) not in made:
            made[id(kept)] = _container(kept, [_value(item, made) for item in kept.items], _value(kept.option, made))
        return made[id(kept)]
    return kept


def _container(kept: _KeptContainer, items: list[Any], option: Any) -> Any:
    kind: Any = kept.kind
    if issubclass(kind, dict):
        pairs = dict(zip(kept.keys, items, strict=True))
        return kind(option, pairs) if kind is defaultdict else kind(pairs)
    if issubclass(kind, tuple):
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    return kind(items, option) if kind is deque else kind(items)


def container_copy(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of ``value`` in which all nested built-in containers are copied, each once, and other objects are shared."""
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        return tuple(container_copy(item, copies) for item in value)
    if type(value) not in _CONTAINERS:
        return value
    made = copies[id(value)] = copy.copy(value)
    if isinstance(made, dict):
        for key, item in made.items():
            made[key] = container_copy(item, copies)  # not by `update`, which adds to the counts of a `Counter`
    elif not isinstance(made, (set, bytearray)):
        for index, item in enumerate(made):
            made[index] = container_copy(item, copies)
    return made
