"""Events, and the queues of a mediator: nothing is queued, they show what the mediator knows."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable
from enum import Enum
from typing import Any


class Events(Enum):
    """What a block can ask of its run, see :meth:`Mediator.send`."""

    VALUE = "value"
    SWAP = "swap"
    END = "end"
    EXCEPTION = "exception"
    SKIP = "skip"
    BARRIER = "barrier"


class Value:
    """A box for one value, between two threads.

    Attributes:
        value: The value in the box; ``None`` if it is empty.
        has_value: Whether there is a value in the box.
        lock: Released by a value that is put, and acquired by waiting for it.
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
        """Put ``value`` in, in place of what is there, and wake a waiting thread."""
        self.restore(value)
        if self.lock.locked():
            self.lock.release()

    def restore(self, value: Any) -> None:
        """Put back what :meth:`get` took out, without waking a thread."""
        self.value, self.has_value = value, True

    def wait(self) -> Any:
        """Wait until a value is put, and return it; it stays in the box."""
        self.lock.acquire()
        return self.value


class Queue(Value):
    """A queue of a mediator, of which ``look`` returns the present value, or ``None``; ``put`` gets what is put in or back."""

    def __init__(self, look: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._look = look
        self.put = self.restore = put  # type: ignore[assignment, method-assign]

    def get(self) -> Any:
        """Return what the queue has now; ``None`` for nothing."""
        return self._look()

    wait = get
    value = property(get)
    has_value = property(lambda self: self.value is not None)
