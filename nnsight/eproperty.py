"""Properties whose value lives in a running model.

An :class:`eproperty` looks like an attribute and acts as a request: reading it waits until the run offers the
location ``<path>.<key>`` of its owner and returns the value there; assigning to it replaces that value. Owners are
anything with a ``path``: envoys (``.output``, ``.input``), tracers (``.result``), or a user's own class.

The decorated function is a stub: it gives the property its name and docstring, and its body never matters. Several
properties can share one key to show different views of one value; ``preprocess`` and ``postprocess`` convert
between the model's value and the view, and ``transform`` sends an edited view back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .runtime.interleaver import active_interleaver


class IEnvoy(Protocol):
    """What an owner of eproperties has: the prefix of its locations (empty for none)."""

    path: str


def requires_output(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a stub whose value is the output of a module. Every module call is intercepted, so nothing is registered."""
    return stub


def requires_input(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a stub whose value is the input of a module; see :func:`requires_output`."""
    return stub


class eproperty:  # noqa: N801 - a descriptor used as a decorator, like ``property``
    """Descriptor for a value of the running model.

    Args:
        key: Last part of the location; the stub's name by default.
        description: Shown where the properties of an owner are listed.
        iterate: Whether the location can occur several times in a run, so that requests name an occurrence.

    Attributes:
        name: Name under which the property is found on its owner.
    """

    def __init__(self, key: str | None = None, description: str | None = None, iterate: bool = True) -> None:
        self.key = key
        self.description = description
        self.iterate = iterate
        self.name: str | None = None
        self._preprocess: Callable[..., Any] | None = None
        self._postprocess: Callable[..., Any] | None = None
        self._transform: Callable[..., Any] | None = None

    def __call__(self, stub: Callable[..., Any]) -> eproperty:
        """Take name and docstring from the decorated stub."""
        self.name = stub.__name__
        self.key = self.key or stub.__name__
        self.__doc__ = stub.__doc__
        return self

    def preprocess(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(self, value) -> view``, applied when the property is read."""
        self._preprocess = function
        return self

    def postprocess(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(self, view) -> value``, applied when the property is assigned."""
        self._postprocess = function
        return self

    def transform(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(view) -> value``: after a read, what the block left in the view goes to the model.

        Needed when ``preprocess`` returns a copy; a view that shares memory with the value needs none.
        """
        self._transform = function.__func__ if isinstance(function, staticmethod) else function
        return self

    def location(self, owner: IEnvoy) -> str:
        """Return the location of this property of ``owner``, without occurrence number."""
        # An envoy keeps its path where no child module of the same name can hide it.
        path = getattr(owner, "_path", None) or getattr(owner, "path", "")
        return f"{path}.{self.key}" if path else str(self.key)

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        if owner is None:
            return self
        location = self.location(owner)
        run = active_interleaver()
        if run is None or run.current is None:
            raise ValueError(self._outside(location))
        value = run.current.request(location) if self.iterate else run.current.request_once(location)
        if self._preprocess is not None:
            value = self._preprocess(owner, value)
        if self._transform is not None:
            transform, view = self._transform, value
            run.current.on_leave(lambda: transform(view))
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        location = self.location(owner)
        run = active_interleaver()
        if run is None or run.current is None:
            raise ValueError(self._outside(location))
        if self._postprocess is not None:
            value = self._postprocess(owner, value)
        run.current.swap(location, value)

    def provide(self, owner: IEnvoy, value: Any) -> Any:
        """Offer ``value`` at this property of ``owner`` to the active run; return what the run made of it."""
        run = active_interleaver()
        return value if run is None else run.handle(self.location(owner), value)

    def _outside(self, location: str) -> str:
        return (
            f"Cannot access `{location}` outside of interleaving: the value exists while the model runs. "
            "Read it inside `with model.trace(...)` and keep it with `.save()`."
        )
