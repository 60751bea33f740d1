"""Deferred outputs: what a model returns beside tensors, such as a key-value cache, for blocks that see it before it exists.

A captured graph has tensors only. The objects that hold them are made, or changed, by the code that dynamo put around the graph, when
the graph has run. A block that stops at the output of the whole model is given a :class:`Deferred` for each of them. It becomes the object
when the block looks into it, for which the block waits until the model has returned, and at the end of the run.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from ...runtime.interleaver import active_interleaver
from ..capturing.structures import leaves_of, unflatten
from ..capturing.taps import Opaque

if TYPE_CHECKING:
    from ...runtime.interleaver import Interleaver

logger = logging.getLogger("nnsight.fx")


def _of_object(function: Callable[..., Any]) -> Any:
    """Return a special method that does to the object what ``function`` does."""
    return lambda self, *args, **kwargs: function(self._object(), *args, **kwargs)


class Deferred(Opaque):
    """Stands for an object until the model has returned it."""

    def __init__(self, kind: str, output: DeferredOutput) -> None:
        super().__init__(kind, output.location)
        self.__dict__["output"] = output
        self.__dict__["real"] = None

    def become(self, real: Any) -> None:
        """Be ``real`` from now on: an object of its class with its attributes or, where Python does not allow that, a proxy."""
        try:
            object.__setattr__(self, "__class__", type(real))
            object.__setattr__(self, "__dict__", vars(real))
        except TypeError:
            self.__dict__["real"] = (real,)

    def _object(self) -> Any:
        """Return the object; waits for it."""
        if self.__dict__["real"] is None:
            waited = self.__dict__["output"].wait()
            if type(self) is not Deferred:
                return self
            if not waited or self.__dict__["real"] is None:
                raise self._refuse()
        return self.__dict__["real"][0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # somebody asks what kind of object this is
        return getattr(self._object(), name)

    def __repr__(self) -> str:
        try:
            return repr(self._object())
        except TypeError:  # a failed run has not got there
            return super().__repr__()

    __setattr__ = _of_object(setattr)
    __getitem__ = _of_object(operator.getitem)
    __setitem__ = _of_object(operator.setitem)
    __len__ = _of_object(len)
    __iter__ = _of_object(iter)
    __contains__ = _of_object(operator.contains)
    __bool__ = _of_object(bool)
    __call__ = _of_object(operator.call)


class DeferredOutput:
    """Stands for the objects in one output of the whole model, which blocks of a run see at a location."""

    def __init__(self, run: Interleaver, location: str, structure: pytree.TreeSpec) -> None:
        self._run: Interleaver | None = run
        self.location = location
        self._structure = structure
        self._given: list[tuple[int, weakref.ref[Deferred]]] = []
        self._value: Any = None  # what the block that waits was given
        self._leaves: list[Any] = []

    def stand_in(self, opaque: Opaque, number: int) -> Deferred:
        """Return what stands for leaf number ``number`` of the output, instead of ``opaque``."""
        made = Deferred(opaque.__dict__["kind"], self)
        self._given.append((number, weakref.ref(made)))
        return made

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still holds a stand-in."""
        return any(reference() is not None for _, reference in self._given)

    def wait(self) -> bool:
        """Let the block that is running wait for the objects; whether they are there then."""
        run = self._run
        mediator = None if run is None or run is not active_interleaver() else run.current
        if mediator is None or not mediator.stands_at(self.location):
            return False
        self._value = mediator.request(self.location)
        mediator.wait_for_return()
        return True

    def fulfil(self, output: Any) -> None:
        """Make the stand-ins what the model has returned."""
        self._run = None
        if not self.is_wanted:
            return
        try:
            leaves = leaves_of(output, self._structure)
        except ValueError as error:  # a hook of the model has returned something else
            logger.debug("what `%s` returned is not what was captured: %s", self.location, error)
            return
        for number, reference in self._given:
            stand_in = reference()
            if stand_in is not None:
                stand_in.become(leaves[number])
        if self._value is not None:
            self._leaves = leaves_of(self._value, self._structure)

    def changed(self, output: Any) -> Any:
        """Return ``output`` with what blocks have replaced since in the value that the one that waited was given first."""
        if self._value is None:
            return output
        now, value = leaves_of(self._value, self._structure), self._value
        self._value = None
        if output is value or all(map(operator.is_, now, self._leaves)):
            return output
        real = leaves_of(output, self._structure)
        merged = [new if new is not old else kept for new, old, kept in zip(now, self._leaves, real, strict=True)]
        return unflatten(merged, self._structure)


def is_of_root(location: str) -> bool:
    """Whether ``location`` is the output of the whole model."""
    return location.count(".") == 1 and location.endswith(".output")


def returned(run: Interleaver, output: Any) -> Any:
    """Give blocks what a call of the model has returned; return what its caller is to get."""
    deferred, run.deferred_outputs = run.deferred_outputs, []
    for each in deferred or ():
        each.fulfil(output)
        output = each.changed(run.handle_returned(each.location, output))
    return output
