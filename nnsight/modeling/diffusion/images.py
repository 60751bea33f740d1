"""The output of a pipeline, with special lists and arrays, from which each invoke gets the items of its own prompts."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import numpy as np

from ...runtime.rows.batching import RowList, RowSequence


class RowArray(RowSequence, np.ndarray[Any, Any]):
    """An array whose first dimension has one or several entries for each row of the batch."""

    def part(self, items: slice) -> Any:
        return self[items]


def with_rows(output: Any) -> Any:
    """Return the output of a pipeline with its lists as ``RowList`` and its arrays as :class:`RowArray`."""
    if isinstance(output, tuple):
        return tuple(map(_rows, output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        return _unflattenable(type(output))(**{name: _rows(getattr(output, name)) for name in names})
    return _rows(output)


def make_classes(pipeline: Any) -> None:
    """Make the output classes of a pipeline, before a capture: making one later registers it with pytree, which invalidates the capture."""
    for value in list(vars(sys.modules[type(pipeline).__module__]).values()):
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__.startswith("diffusers."):
            _unflattenable(value)


def _rows(value: Any) -> Any:
    if type(value) is list:
        return RowList(value)
    return value.view(RowArray) if type(value) is np.ndarray else value


@functools.cache
def _unflattenable(kind: type) -> type:
    """Return a subclass of an output class of `diffusers` that pytree can unflatten.

    pytree stores only the fields that are not None, and the original class cannot be constructed without the others.
    """
    names = [field.name for field in dataclasses.fields(kind)]

    def __init__(self: Any, **values: Any) -> None:  # noqa: N807 - becomes a method
        kind.__init__(self, **{name: values.get(name) for name in names})  # type: ignore[misc]

    def __reduce__(self: Any) -> tuple[Any, ...]:  # noqa: N807 - likewise
        return kind, tuple(getattr(self, name) for name in names)

    namespace = {"__init__": __init__, "__reduce__": __reduce__, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), namespace)
