"""Properties whose value is in a running model.

Reading an :class:`eproperty` waits until the run offers the location ``<path>.<key>`` of its owner, and returns the value there. Assigning
to it replaces that value. An owner is an object with the attributes of :class:`IEnvoy`: an envoy (``.output``, ``.input``), a tracer
(``.result``), or an object of a user's class.

The decorated function is a stub: it gives the property its name and docstring, and its body does not run. A stub that takes the value,
``def heads(self, value)``, is also the ``preprocess``. Several properties can share one key and show different views of one value.
``preprocess`` and ``postprocess`` convert between the model's value and the view. ``transform`` sends an edited view back when the block
next asks for anything else. Until then each read returns the same view, so ``e.view[0] += f(e.view)`` edits one view.

A decorator between ``eproperty`` and the stub can prepare a request, for instance by registering a hook. Its wrapper of the stub is called
with the owner before each request that waits, and the hook offers its value with :meth:`eproperty.provide`. Modules and operations need no
preparation, because all their calls are intercepted; the ``requires_...`` decorators of this module only mark stubs.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import MissedProviderError
from ..interleaver import Interleaver, active_interleaver


class IEnvoy(Protocol):
    """The attributes that an owner of eproperties has."""

    path: str | None  # the prefix of its locations; if it is missing or empty, the key alone is the location

    @property
    def interleaver(self) -> Interleaver:
        """The run to use if no run is active in this context. This attribute is optional."""
        ...


def requires_output(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a stub whose value is the output of a module. Nothing is registered, because every module call is intercepted."""
    return stub

#: Likewise for the input of a module, and for the output and the input of an operation.
requires_input = requires_operation_output = requires_operation_input = requires_output


class eproperty(property):  # noqa: N801 - a descriptor used as a decorator, like its base
    """Descriptor for a value of the running model.

    Args:
        key: Last part of the location; by default the stub's name. It is the stub itself if the decorator is used without parentheses.
        description: A few words for the tree that ``print(model)`` shows. A property without a description is not listed there.
        iterate: Whether the location can occur several times in a run, so that requests name an occurrence.
    """

    def __init__(
        self, key: str | Callable[..., Any] | None = None, description: str | None = None, iterate: bool = True
    ) -> None:
        self.key = key if isinstance(key, str) else None
        self.description = description
        self.iterate = iterate
        self.name: str | None = None
        self.kind: str | None = None  # the stub's return annotation
        self._identity: str | None = None  # distinguishes its views from those of other properties of the same location
        self._prepare: Callable[..., Any] | None = None
        self._preprocess: Callable[..., Any] | None = None
        self._postprocess: Callable[..., Any] | None = None
        self._transform: Callable[..., Any] | None = None
        if callable(key):
            self(key)

    def __call__(self, stub: Callable[..., Any]) -> eproperty:
        """Take name and docstring from the stub. If another decorator has wrapped the stub, keep the wrapper as preparation."""
        # A decorator's wrapper has the stub in its closure; a bare stub has no closure.
        bare = isinstance(stub, types.FunctionType) and stub.__closure__ is None
        if _arity(stub) == 2:
            self._preprocess = stub
        else:
            self._prepare = None if bare else stub
        # Dynamo does not call `__get__` and `__set__` of a property, but the functions that it was made with.
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

        An ``AttributeError`` in it becomes a ``RuntimeError``, because an envoy would take it for a missing attribute.
        """
        self._preprocess = function
        return self

    def postprocess(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(self, view) -> value``, applied when the property is assigned."""
        self._postprocess = function
        return self

    def transform(self, function: Callable[..., Any]) -> eproperty:
        """Register ``function(view) -> value``. After a read, the model continues with its result for the view that the block has edited.

        With three parameters it is ``function(self, view, value)``, where ``value`` is the argument of ``preprocess``. It is needed if
        ``preprocess`` returns a copy, and not if the view shares memory with the value.
        """
        function = function.__func__ if isinstance(function, staticmethod) else function
        alone = _arity(function) == 1
        self._transform = (lambda owner, view, value: function(view)) if alone else function
        return self

    def location(self, owner: IEnvoy) -> str:
        """Return the location of this property of ``owner``, without an occurrence number."""
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
            if location in scanned:  # outside of a run, the fake tensors of the latest scan
                return scanned[location] if self._preprocess is None else self._preprocess(owner, scanned[location])
        mediator = self._mediator(owner, location)
        held = mediator.held_view(location, self._identity)
        if held is not None:
            return held
        raw = value = mediator.request(location) if self.iterate else mediator.request_once(location)
        if self._preprocess is not None:
            try:
                value = self._preprocess(owner, raw)
            except AttributeError as error:  # Python would report that the owner has no such property
                raise RuntimeError(f"`.{self.name}` could not be computed from the value at `{location}`: {error}") from error
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
        """Offer ``value`` at the location of this property of ``owner`` to the run; return the value with which to continue."""
        run = _run_of(owner)
        return value if run is None else run.handle(self.location(owner), value)

    def _mediator(self, owner: Any, location: str) -> Any:
        """Return the mediator of the running block, after the preparation of its request; raises outside of a run of the owner's model."""
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
                f"`{location}` was requested from a model that does not run here: the trace belongs to another model, which may have "
                "a module of that name. Use the envoys of the traced model."
            )
        if self._prepare is not None and not mediator.stands_at(location):
            self._prepare(owner)
        return mediator


def _arity(function: Callable[..., Any]) -> int | None:
    """Return the number of parameters of a Python function; ``None`` for other callables."""
    return function.__code__.co_argcount if isinstance(function, types.FunctionType) else None


def _run_of(owner: Any) -> Any:
    """Return the active run of this context, else the ``interleaver`` of ``owner``, else ``None``."""
    run = active_interleaver()
    return getattr(owner, "interleaver", None) if run is None else run


def described(owner: type, base: type) -> dict[str, str]:
    """Return the descriptions of the eproperties that ``owner`` adds to those of ``base``, by ``(name) -> type``."""
    plain = {id(value) for kind in base.__mro__ for value in vars(kind).values()}
    found: dict[str, eproperty] = {}
    for kind in reversed(owner.__mro__):
        for name, value in vars(kind).items():
            found.pop(name, None)  # this class overrides the property of a base class
            if isinstance(value, eproperty) and value.description and id(value) not in plain:
                found[name] = value
    return {f"({name})" + (f" -> {value.kind}" if value.kind else ""): str(value.description) for name, value in found.items()}
