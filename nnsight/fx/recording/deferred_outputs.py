"""Deferred outputs: outputs of a model that are not tensors, such as a key-value cache, which a block can use before they exist.

A captured graph computes tensors only. The code that dynamo puts around the graph makes or updates the objects that contain them, after
the graph has run. So a block that reads the output of the whole model gets a :class:`Deferred` in place of each object. A ``Deferred``
becomes the object at the end of the run, or earlier, when the block uses it: then the block waits until the model has returned.
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
    """Return a special method that applies ``function`` to the object that the model returns."""
    return lambda self, *args, **kwargs: function(self._object(), *args, **kwargs)


class Deferred(Opaque):
    """Takes the place of an object until the model has returned it."""

    def __init__(self, kind: str, output: DeferredOutput) -> None:
        super().__init__(kind, output.location)
        self.__dict__["output"] = output
        self.__dict__["real"] = None

    def become(self, real: Any) -> None:
        """Take the class and the attributes of ``real``. Where Python does not allow that, become a proxy of ``real``."""
        try:
            object.__setattr__(self, "__class__", type(real))
            object.__setattr__(self, "__dict__", vars(real))
        except TypeError:
            self.__dict__["real"] = (real,)

    def _object(self) -> Any:
        """Wait until the model has returned the object, and return it; raise ``TypeError`` if it cannot be waited for."""
        if self.__dict__["real"] is None:
            waited = self.__dict__["output"].wait()
            if type(self) is not Deferred:
                return self
            if not waited or self.__dict__["real"] is None:
                raise self._refuse()
        return self.__dict__["real"][0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # a look-up of a protocol, such as `__torch_function__`, must not wait
        return getattr(self._object(), name)

    def __repr__(self) -> str:
        try:
            return repr(self._object())
        except TypeError:  # the run has failed before the model returned
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
    """The objects in one output of the whole model, which the blocks of a run read at ``location``."""

    def __init__(self, run: Interleaver, location: str, structure: pytree.TreeSpec) -> None:
        self._run: Interleaver | None = run
        self.location = location
        self._structure = structure
        self._given: list[tuple[int, weakref.ref[Deferred]]] = []
        self._value: Any = None  # the value that the waiting block was given, with stand-ins
        self._leaves: list[Any] = []  # the leaves of that value when the model returned

    def stand_in(self, opaque: Opaque, number: int) -> Deferred:
        """Return a stand-in for leaf number ``number`` of the output, which is ``opaque`` in the captured graph."""
        made = Deferred(opaque.__dict__["kind"], self)
        self._given.append((number, weakref.ref(made)))
        return made

    @property
    def is_referenced(self) -> bool:
        """Whether a stand-in is still referred to."""
        return any(reference() is not None for _, reference in self._given)

    def wait(self) -> bool:
        """Let the running block wait until the model returns. Returns whether it could wait: only a block at ``location`` can."""
        run = self._run
        mediator = None if run is None or run is not active_interleaver() else run.current
        if mediator is None or not mediator.stands_at(self.location):
            return False
        self._value = mediator.request(self.location)
        mediator.wait_for_return()
        return True

    def fulfil(self, output: Any) -> None:
        """Turn the stand-ins into the objects in ``output``, which the model has returned."""
        self._run = None
        if not self.is_referenced:
            return
        try:
            leaves = leaves_of(output, self._structure)
        except ValueError as error:  # a hook of the model has replaced the output
            logger.debug("the output at `%s` has another structure than the captured one: %s", self.location, error)
            return
        for number, reference in self._given:
            stand_in = reference()
            if stand_in is not None:
                stand_in.become(leaves[number])
        if self._value is not None:
            self._leaves = leaves_of(self._value, self._structure)

    def changed(self, output: Any) -> Any:
        """Return ``output`` with the leaves that blocks have replaced in the value of the waiting block since the model returned."""
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
    """Give the blocks the output of a call of the model. Returns the output for the caller, with the edits of the blocks."""
    deferred, run.deferred_outputs = run.deferred_outputs, []
    for each in deferred or ():
        each.fulfil(output)
        output = each.changed(run.handle_returned(each.location, output))
    return output
