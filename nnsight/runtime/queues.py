"""A box for one value, and the two queues of a mediator as such boxes.

No queue is needed where model and block take turns on one thread. What the two show is read off the block: the event it waits
with, and, for an answer that is put in, the turn that it is given at once.
"""

from __future__ import annotations

from _thread import LockType, allocate_lock
from typing import Any, NoReturn

from .surface import Events


def _requester(event: tuple[Events, Any]) -> str | None:
    """Return which value an event is about."""
    data = event[1]
    return data if isinstance(data, str) or data is None else str(data[0])


def described(event: tuple[Events, Any] | None) -> str:
    """Say what a block waits with."""
    if event is None:
        return "does not wait for anything"
    requester = _requester(event)
    return f"waits with {event[0]}" + (f" for `{requester}`" if requester else "")


class Value:
    """A box for one value, between two threads.

    Attributes:
        lock: Held until a value is put that nobody has waited for yet.
    """

    def __init__(self) -> None:
        self._content: tuple[Any, ...] = ()
        self.lock = allocate_lock()
        self.lock.acquire()

    @property
    def has_value(self) -> bool:
        """Whether there is a value in the box."""
        return bool(self._content)

    @property
    def value(self) -> Any:
        """The value in the box; ``None`` if it is empty."""
        return self._content[0] if self._content else None

    def get(self) -> Any:
        """Take the value out and return it; ``None`` if the box is empty."""
        value, self._content = self.value, ()
        return value

    def put(self, value: Any) -> None:
        """Put ``value`` in, in place of what is there, and wake who waits."""
        self._content = (value,)
        if self.lock.locked():
            self.lock.release()

    def restore(self, value: Any) -> None:
        """Put back what :meth:`get` took out; nobody is woken for it."""
        self._content = (value,)

    def wait(self) -> Any:
        """Wait until a value is put, and return it; it stays in the box."""
        self.lock.acquire()
        return self.value


class _Queue(Value):
    """One of the two queues of a mediator: a look at it, with nothing of its own."""

    def __init__(self, mediator: Any) -> None:
        self._mediator = mediator

    @property
    def lock(self) -> LockType:  # type: ignore[override]
        """Not there.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError("The queues of a mediator have no lock: block and model take turns on one thread.")


class EventQueue(_Queue):
    """What a block waits for. The event stays until the block has been answered, also when it is looked at with ``get``."""

    @property
    def has_value(self) -> bool:
        """Whether the block waits."""
        return self._mediator.waiting is not None

    @property
    def value(self) -> tuple[Events, Any] | None:
        """The event as :meth:`Mediator.send` takes it, such as ``(Events.VALUE, "x.i0")``; ``None`` if the block does not wait."""
        return self._mediator._event() if self.has_value else None

    def get(self) -> tuple[Events, Any] | None:
        """Return :attr:`value`."""
        return self.value

    def wait(self) -> tuple[Events, Any]:
        """Return :attr:`value`.

        Raises:
            ValueError: If the block does not wait: it runs up to its next request whenever it has its turn, so none can come.
        """
        event = self.value
        if event is None:
            raise ValueError("The block does not wait for anything: it has not begun, is running now, or has ended.")
        return event

    def put(self, value: Any) -> NoReturn:
        """Not for others to do.

        Raises:
            ValueError: Always.
        """
        raise ValueError("Only the block itself asks for something: call `mediator.send(event, requester)` in it.")

    def restore(self, value: Any) -> None:
        """Leave the event that the block waits with where it is.

        Raises:
            ValueError: For another one.
        """
        mine = self.value
        if mine is None or value[0] is not mine[0] or _requester(value) != _requester(mine):
            raise ValueError(f"The block {described(mine)}; an event cannot be changed from outside.")


class ResponseQueue(_Queue):
    """Where the block gets its answers from: always empty, for what is put in is taken at once."""

    has_value = False
    value = None

    def get(self) -> None:
        """Return ``None``."""

    def put(self, value: Any) -> None:
        """Give the block the value it waits for, see :meth:`Mediator.respond`."""
        self._mediator.respond(value)

    restore = put

    def wait(self) -> NoReturn:
        """Not needed.

        Raises:
            ValueError: Always.
        """
        raise ValueError("The answer to an event is what `mediator.send(event, requester)` returns in the block.")
