"""Events, and the queues of a mediator. Nothing is queued: the queues are views of the state of the mediator."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable
from enum import Enum
from typing import Any


class Events(Enum):
    """The kinds of requests of a block to its run, see :meth:`Mediator.send`."""

    VALUE = "value"
    SWAP = "swap"
    END = "end"
    EXCEPTION = "exception"
    SKIP = "skip"
    BARRIER = "barrier"


class Value:
    """A box that passes one value from a thread to another.

    Attributes:
        value: The value in the box; ``None`` if it is empty.
        has_value: Whether there is a value in the box.
        lock: :meth:`put` releases it, and :meth:`wait` acquires it.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self.has_value = False
        self.lock = allocate_lock()
        self.lock.acquire()

    def get(self) -> Any:
        """Take the value out and return it; ``None`` if the box is empty."""
        value, self.value, self.has_value = self.value, None, False
        return value

    def put(self, value: Any) -> None:
        """Put ``value`` in, in place of the present one, and wake a waiting thread."""
        self.restore(value)
        if self.lock.locked():
            self.lock.release()

    def restore(self, value: Any) -> None:
        """Put back the value that :meth:`get` took out, without waking a thread."""
        self.value, self.has_value = value, True

    def wait(self) -> Any:
        """Wait until a value is put, and return it. The value stays in the box."""
        self.lock.acquire()
        return self.value


class Queue(Value):
    """A queue of a mediator: ``look`` returns its present value or ``None``, and ``put`` is called with values that are put in or back."""

    def __init__(self, look: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._look = look
        self.put = self.restore = put  # type: ignore[assignment, method-assign]

    def get(self) -> Any:
        """Return the present value; ``None`` if there is none."""
        return self._look()

    wait = get
    value = property(get)
    has_value = property(lambda self: self.value is not None)
