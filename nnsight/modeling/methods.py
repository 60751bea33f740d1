"""Traces of other calls than the model's own.

``with model.encode(x) as tracer:`` runs the method ``encode`` of the wrapped module with the block. The trace calls a function that
prepares and joins inputs as the model does; its locations are those of the modules that the method calls. A class can define what a traced
method does by a method ``__nnsight_encode__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..envoy.envoy import Envoy
from ..runtime.tracer import Arguments

if TYPE_CHECKING:
    from .base import NNsight


class TracedFunction:
    """A ``function`` that calls modules of the model ``root``, for a trace; ``prepares``: on input prepared as the model's."""

    def __init__(self, root: NNsight, function: Callable[..., Any], prepares: bool = True) -> None:
        self._root, self._function, self._prepares = root, function, prepares

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def _prepare_input(self, *args: Any, **kwargs: Any) -> Arguments:
        return self._root._prepare_input(*args, **kwargs)[:2] if self._prepares else (args, kwargs)

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        return self._root._batch(batched, *args, **kwargs)


def traced_method(root: NNsight, envoy: Envoy, name: str) -> TracedFunction:
    """Return a method of the module of ``envoy``, which is looked up when it runs, as the module may be loaded by then."""

    def call(*args: Any, **kwargs: Any) -> Any:
        own = getattr(envoy, f"__nnsight_{name}__", None)
        return (own or getattr(envoy._module, name))(*args, **kwargs)

    return TracedFunction(root, call, prepares=envoy is root)
