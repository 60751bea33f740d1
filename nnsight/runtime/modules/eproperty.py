"""Properties whose value is in a running model.

Reading an :class:`eproperty` waits until the run offers the location ``<path>.<key>`` of its owner and returns the value there; assigning
to it replaces that value. An owner is what :class:`IEnvoy` describes: an envoy (``.output``, ``.input``), a tracer (``.result``), or an
object of a user's class.

The decorated function is a stub: it gives the property its name and docstring, and its body does not run, unless it takes the value:
``def heads(self, value)`` is the ``preprocess`` as well. Several properties can share one key to show different views of one value:
``preprocess`` and ``postprocess`` convert between the model's value and the view, and ``transform`` sends an edited view back, when the
block next asks for anything else. Until then each read gives the same view, so ``e.view[0] += f(e.view)`` edits one view.

A decorator between ``eproperty`` and the stub can prepare the request, for instance by registering a hook: its wrapper of the stub is
called with the owner before each request that waits. Such a hook offers its value with :meth:`eproperty.provide`. Modules and operations
need no preparation, because all their calls are intercepted; the ``requires_...`` of this module only mark stubs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import MissedProviderError
from ..interleaver import Interleaver, active_interleaver


class IEnvoy(Protocol):
    """What an owner of eproperties has."""

    path: str | None  # the prefix of its locations; without one, or with an empty one, the key alone is the location

    @property
    def interleaver(self) -> Interleaver:
        """The run to ask where none is active in this context; an owner can do without."""
        ...


def requires_output(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a stub whose value is the output of a module. Every module call is intercepted, so nothing is registered."""
    return stub

#: The same for the input of a module, and for output and input of an operation of ``.source``.
requires_input = requires_operation_output = requires_operation_input = requires_output


class eproperty(property):  # noqa: N801 - a descriptor used as a decorator, like its base
    """Descriptor for a value of the running model.

    Args:
        key: Last part of the location; the stub's name by default. The stub itself, if the decorator has no parentheses.
        description: A few words for the tree that ``print(model)`` shows; without them the property is not listed there.
        iterate: Whether the location can occur several times in a run, so that requests name an occurrence.
    """

    def __init__(
        self, key: str | Callable[..., Any] | None = None, description: str | None = None, iterate: bool = True
    ) -> None:
        self.key = key if isinstance(key, str) else None
        self.description = description
        self.iterate = iterate
        self.name: str | None = None
        self.kind: str | None = None  # what the stub is annotated to return
        self._identity: str | None = None  # tells its views from those of other properties of the same location
        self._prepare: Callable[..., Any] | None = None
        self._preprocess: Callable[..., Any] | None = None
        self._postprocess: Callable[..., Any] | None = None
        self._transform: Callable[..., Any] | None = None
        if callable(key):
            self(key)

    def __call__(self, stub: Callable[..., Any]) -> eproperty:
        """Take name and docstring from the decorated stub, and remember what a decorator made of it."""
        # A decorator's wrapper has the stub in its closure; a bare stub has nothing there.
        bare = isinstance(stub, types.FunctionType) and stub.__closure__ is None
        if _arity(stub) == 2:
            self._preprocess = stub
        else:
            self._prepare = None if bare else stub
        # Dynamo calls the functions of a property in place of its `__get__` and `__set__`.
        property.__init__(self, lambda owner: eproperty.__get__(self, owner), lambda owner, value: eproperty.__set__(self, owner, value))
        self.name = stub.__name__
        returned = getattr(stub, "__annotations__", {}).get("return")
        self.kind = None if returned in (None, Any, "Any") else str(getattr(returned, "__name__", returned))
        self._identity = f"{stub.__module__}.{stub.__qualname__}.{stub.__name__}"
        self.key = self.key or stub.__name__
        self.__doc__ = stub.__doc__
        return self

    def preprocess(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(self, value) -> view``, applied when the property is read.

        An ``AttributeError`` in it becomes a ``RuntimeError``: an envoy would look for the property in its module.
        """
        self._preprocess = function
        return self

    def postprocess(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(self, view) -> value``, applied when the property is assigned."""
        self._postprocess = function
        return self

    def transform(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(view) -> value``: after a read, what the block left in the view goes to the model.

        With three parameters it is ``function(self, view, value)``, with the value that ``preprocess`` was given. Needed when
        ``preprocess`` returns a copy; a view that shares memory with the value needs none.
        """
        function = function.__func__ if isinstance(function, staticmethod) else function
        alone = _arity(function) == 1
        self._transform = (lambda owner, view, value: function(view)) if alone else function
        return self

    def location(self, owner: IEnvoy) -> str:
        """Return the location of this property of ``owner``, without occurrence number."""
        path = getattr(owner, "path", None)
        if path is not None and not isinstance(path, str):
            path = getattr(owner, "nns_path", path)  # an envoy with a child module called `path`
        return f"{path}.{self.key}" if path else str(self.key)

    def __get__(self, owner: Any, owner_type: type | None = None) -> Any:
        if owner is None:
            return self
        location = self.location(owner)
        if active_interleaver() is None:
            scanned = getattr(owner, "_fakes", {})
            if location in scanned:  # outside of a run, what the latest scan saw
                return scanned[location] if self._preprocess is None else self._preprocess(owner, scanned[location])
        mediator = self._mediator(owner, location)
        held = mediator.held_view(location, self._identity)
        if held is not None:
            return held
        raw = value = mediator.request(location) if self.iterate else mediator.request_once(location)
        if self._preprocess is not None:
            try:
                value = self._preprocess(owner, raw)
            except AttributeError as error:  # Python would take it to mean that the owner has no such property
                raise RuntimeError(f"`.{self.name}` could not be made of the value at `{location}`: {error}") from error
        if self._transform is not None:
            transform, view = self._transform, value
            mediator.on_leave(lambda: transform(owner, view, raw), self._identity, view)
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        location = self.location(owner)
        mediator = self._mediator(owner, location)
        if self._postprocess is not None:
            value = self._postprocess(owner, value)
        mediator.swap(location, value)

    def provide(self, owner: IEnvoy, value: Any) -> Any:
        """Offer ``value`` at this property of ``owner`` to the active run; return what the run made of it."""
        run = _run_of(owner)
        return value if run is None else run.handle(self.location(owner), value)

    def _mediator(self, owner: Any, location: str) -> Any:
        """Return the mediator of the block that uses the property, everything being prepared for its request."""
        run = active_interleaver()
        mediator: Any = getattr(_run_of(owner), "current", None) if run is None else run.current
        if mediator is None:
            raise ValueError(
                f"Cannot access `{location}` outside of interleaving: the value exists while the model runs. "
                "Read it inside `with model.trace(...)` and keep it with `.save()`."
            )
        tree = mediator.interleaver.tree
        if tree is not None and getattr(owner, "_tree", tree) is not tree:
            raise MissedProviderError(
                f"`{location}` was asked of a model that does not run here: the trace is one of another model, which may have "
                "a module of that name. Use the envoys of the model that is traced."
            )
        if self._prepare is not None and not mediator.stands_at(location):
            self._prepare(owner)
        return mediator


def _arity(function: Callable[..., Any]) -> int | None:
    """Return the number of parameters of a Python function."""
    return function.__code__.co_argcount if isinstance(function, types.FunctionType) else None


def _run_of(owner: Any) -> Any:
    """Return the run of this context, else the one that ``owner`` says, or ``None``."""
    run = active_interleaver()
    return getattr(owner, "interleaver", None) if run is None else run


def described(owner: type, base: type) -> dict[str, str]:
    """Return the descriptions, by name and type, of the eproperties that ``owner`` has beyond those of ``base``."""
    plain = {id(value) for kind in base.__mro__ for value in vars(kind).values()}
    found: dict[str, eproperty] = {}
    for kind in reversed(owner.__mro__):
        for name, value in vars(kind).items():
            found.pop(name, None)  # of a base class, and overridden
            if isinstance(value, eproperty) and value.description and id(value) not in plain:
                found[name] = value
    return {f"({name})" + (f" -> {value.kind}" if value.kind else ""): str(value.description) for name, value in found.items()}
