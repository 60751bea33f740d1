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
    """A function that calls modules of the model ``root``, for a trace."""

    def __init__(self, root: NNsight, function: Callable[..., Any]) -> None:
        self._root = root
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def _prepare_input(self, *args: Any, **kwargs: Any) -> Arguments:
        return self._root._prepare_input(*args, **kwargs)[:2]

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        return self._root._batch(batched, *args, **kwargs)


class TracedMethod(TracedFunction):
    """A method of the module of ``envoy``, looked up when it runs, as the module may be loaded by then.

    Arguments are prepared if the envoy is the model ``root``.
    """

    def __init__(self, root: NNsight, envoy: Envoy, name: str) -> None:
        super().__init__(root, self._call)
        self._envoy = envoy
        self._name = name

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self._envoy, f"__nnsight_{self._name}__", None)
        return (own or getattr(self._envoy._module, self._name))(*args, **kwargs)

    def _prepare_input(self, *args: Any, **kwargs: Any) -> Arguments:
        return super()._prepare_input(*args, **kwargs) if self._envoy is self._root else (args, kwargs)
