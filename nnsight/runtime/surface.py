"""The parts of interleaver and mediator that only extensions use.

The engine itself needs :meth:`~nnsight.runtime.interleaver.Interleaver.handle` and the request, swap and skip of a mediator. What
stands here is for those who write tracers, drivers and properties of their own against the documented names. All of it is
read off what the engine keeps anyway; no member here has a state of its own.

A *requester* is the name of a location, with or without the number of a passage: ``model.layer.output`` is the passage that
requests of the block ask for now, ``model.layer.output.i2`` is the third one.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from greenlet import GreenletExit, greenlet

if TYPE_CHECKING:
    from .mediator import Mediator


class Events(Enum):
    """What a block can ask of its run, see :meth:`MediatorSurface.send`."""

    VALUE = "value"
    SWAP = "swap"
    END = "end"
    EXCEPTION = "exception"
    SKIP = "skip"
    BARRIER = "barrier"


class EarlyStopException(Exception):
    """Raised in a block by ``tracer.stop()``; ends the run without being an error."""


class SkipException(Exception):
    """Raised in a block that stands at the input of a module: ends the block, and the module returns ``value`` unrun.

    Args:
        value: What the module returns.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


def split_requester(requester: str) -> tuple[str, int | None]:
    """Return location and number of the passage that ``requester`` names; ``None`` if it names no passage."""
    location, dot, number = requester.rpartition(".i")
    return (location, int(number)) if dot and number.isdecimal() else (requester, None)


class InterleaverSurface:
    """Members of :class:`~nnsight.runtime.interleaver.Interleaver` for extensions.

    Attributes:
        batcher: Always ``None``: the rows of a block are known to its mediator, as ``mediator.batch_group``.
    """

    __slots__ = ()

    batcher: None = None

    def initialize(self: Any, mediators: list[Mediator], tracer: Any = None, batcher: None = None) -> None:
        """Prepare for a new run, with nothing of an earlier one.

        Raises:
            ValueError: If this run is active.
        """
        if self.interleaving:
            raise ValueError("This interleaver is in the middle of a run; initialize it before or after.")
        type(self).__init__(self, mediators, tracer, batcher)

    def iterate_requester(self: Any, requester: str) -> str:
        """Return ``requester`` with the number of the passage that the running block asks for now.

        ``model.layer.output`` becomes ``model.layer.output.i0``; a requester that has a number keeps it.

        Raises:
            ValueError: If no block is running.
        """
        if self.current is None:
            raise ValueError(f"Which passage of `{requester}` is meant, is known while a block runs only.")
        location, occurrence = split_requester(requester)
        return requester if occurrence is not None else f"{location}.i{self.current.next_occurrence(location)}"

    def check_dangling_mediators(self: Any) -> None:
        """End the blocks after the model has returned; the same as :meth:`Interleaver.finish`."""
        self.finish()

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """Return one without blocks: a run belongs to its model and its thread, and cannot be copied."""
        return type(self)([])


class MediatorSurface:
    """Members of :class:`~nnsight.runtime.mediator.Mediator` for extensions."""

    __slots__ = ()

    _hooks: list[Any] | None

    # -- what it knows ------------------------------------------------------------------------------------------

    @property
    def idx(self: Any) -> int | None:
        """Position among the blocks of the run; ``None`` outside of one."""
        run = self.interleaver
        return run.mediators.index(self) if run is not None and self in run.mediators else None

    @property
    def worker(self: Any) -> greenlet | None:
        """The greenlet that runs the block."""
        return self._greenlet

    @property
    def frame(self: Any) -> types.FrameType | None:
        """The frame of the block's function; ``None`` before it has started and after it has ended."""
        if self._greenlet is None or not self._greenlet:
            return None
        inner: types.FrameType | None = self._greenlet.gr_frame or sys._getframe(1)
        main = type(self)._main.__code__
        while inner is not None:
            outer = inner.f_back
            if outer is not None and outer.f_code is main and outer.f_locals.get("self") is self:
                return inner
            inner = outer
        return None

    @property
    def history(self: Any) -> set[str]:
        """The passages that the run has made so far, such as ``model.layer.output.i0``."""
        counts = {} if self.interleaver is None else self.interleaver.counts
        return {f"{location}.i{number}" for location, count in counts.items() for number in range(count)}

    @property
    def iteration_tracker(self: Any) -> Counter[str]:
        """How often the run has passed each location so far; 0 for others. A copy."""
        return Counter({} if self.interleaver is None else self.interleaver.counts)

    @property
    def hooks(self: Any) -> list[Any]:
        """Handles with a method ``remove()``, called when the run ends. For hooks that the author of a property registers."""
        if self._hooks is None:
            self._hooks = []
        return self._hooks

    def remove_hooks(self: Any) -> None:
        """Remove the :attr:`hooks`."""
        hooks, self._hooks = self._hooks or [], None
        for hook in hooks:
            hook.remove()

    @property
    def transform(self: Any) -> Callable[[], Any] | None:
        """Called without arguments when the block moves on; what it returns replaces the value of this visit."""
        return self._on_leave[-1] if self._on_leave else None

    @transform.setter
    def transform(self: Any, function: Callable[[], Any]) -> None:
        self.on_leave(function)

    # -- the model's side ---------------------------------------------------------------------------------------

    def handle(self: Any, provider: str, value: Any = None) -> Any:
        """Offer ``value`` to this block alone, without counting the passage; return what it made of it.

        Args:
            provider: The location; without a number it is the passage that comes next.
            value: What the model has there.
        """
        location, occurrence = split_requester(provider)
        run = self.interleaver
        if run is None:
            return value
        if occurrence is None:
            occurrence = run.counts.get(location, 0)
        if not self.waits_at(location, occurrence):
            return value
        outer, run.at = run.at, (location, occurrence)
        value = self.visit(location, occurrence, value)
        run.run_ready()
        run.at = outer
        return value

    def respond(self: Any, value: Any = None) -> Any:
        """Give the block the value it waits for, wherever that is; return what it made of it.

        Raises:
            ValueError: If it does not wait.
        """
        if self.waiting is None:
            raise ValueError("The block does not wait for a value, so there is nothing to respond to.")
        return self.visit(*self.waiting, value)

    # -- the block's side ---------------------------------------------------------------------------------------

    def send(self: Any, event: Events, requester: Any = None) -> Any:
        """Ask the run for something.

        Args:
            event: What is asked for.
            requester: A requester for a value; requester and value for a swap or a skip; the error for an exception. For a
                barrier the names of the mediators to release, or ``None`` to wait for that.
        """
        if event is Events.VALUE:
            return self.request(requester)
        if event is Events.SWAP:
            return self.swap(*requester)
        if event is Events.SKIP:
            return self.skip(*requester)
        if event is Events.BARRIER:
            return self._barrier(requester)
        return self.end() if event is Events.END else self.exception(requester)

    def _barrier(self: Any, names: set[str] | None) -> None:
        run = self.interleaver
        assert run is not None
        if names is None:
            self.pause(_BARRIER)
            return
        waiting = [mediator for mediator in run.mediators if mediator.waits_at(_BARRIER, 0)]
        run.ready.extend(mediator for mediator in waiting if mediator.name in names)

    def stop(self: Any) -> NoReturn:
        """End the run here, without an error."""
        raise EarlyStopException()

    def end(self: Any) -> NoReturn:
        """End this block here; the model and the other blocks go on."""
        raise GreenletExit()

    def exception(self: Any, exception: BaseException) -> NoReturn:
        """End the run with an error."""
        raise exception

    def push(self: Any) -> None:
        """Show the variables of the block to the others now, and not only where it waits."""
        if self._publish is not None:
            self._publish()


_BARRIER = "barrier()"
