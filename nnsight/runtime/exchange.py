"""What a block asks for, and how it is answered, in the words of queues and events.

In the engine a request is a switch of greenlets: the block's method calls end in one, and :meth:`Mediator.visit` is its answer.
Nothing travels, and only one side ever runs. A driver of one's own may still look at a block as at a worker that sends events
and waits for answers: which event it waits with is read off its suspended frames, see :mod:`.queues` for where it shows.
"""

from __future__ import annotations

from typing import Any, NoReturn

from greenlet import GreenletExit

from ..tracing.block import variables_of
from .errors import OutOfOrderError, passed_message
from .queues import EventQueue, ResponseQueue, Value, described
from .surface import EarlyStopException, Events, split_requester

_BARRIER = "barrier()"

#: The event of the method in which a block waits.
_EVENTS = {"swap": Events.SWAP, "skip": Events.SKIP, "pause": Events.BARRIER}


class Exchange:
    """Members of :class:`~nnsight.runtime.mediator.Mediator` by which a driver of one's own serves a block.

    Attributes:
        lock: How many hold the block: always 0, as block and model take turns on one thread.
    """

    __slots__ = ()

    _error: BaseException | None

    Value = Value

    lock = 0

    @property
    def event_queue(self) -> EventQueue:
        """What the block waits for."""
        return EventQueue(self)

    @property
    def response_queue(self) -> ResponseQueue:
        """Where an answer can be put."""
        return ResponseQueue(self)

    def _event(self: Any) -> tuple[Events, Any]:
        """Return the event that the block waits with, which its suspended frames tell."""
        frame = self._greenlet.gr_frame
        while frame.f_code.co_name.startswith("_"):  # the steps that all methods have in common
            frame = frame.f_back
        event = _EVENTS.get(frame.f_code.co_name, Events.VALUE)
        if event is Events.BARRIER:
            return event, None
        requester = "{}.i{}".format(*self.waiting)
        return event, requester if event is Events.VALUE else (requester, variables_of(frame)["value"])

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

    def handle_value_event(self: Any, requester: str, provider: str) -> bool:
        """Give the block the value that it waits for, if this is where the driver stands.

        The value is :attr:`Batcher.current_value` of the run, which becomes what the block makes of it.

        Args:
            requester: What the block waits for.
            provider: Where the driver stands; without a number it is the passage that comes next.

        Returns:
            Whether the block got it. If not, it goes on waiting; or, if the run has passed what it waits for, an
            ``OutOfOrderError`` is raised in the block.

        Raises:
            ValueError: If the block does not wait for ``requester`` with this event.
        """
        return self._answer(Events.VALUE, requester, provider)

    def handle_swap_event(self: Any, provider: str, requester: str, swap_value: Any) -> bool:
        """Let the block replace the value that it waits to replace, if this is where the driver stands.

        Args:
            provider: As for :meth:`handle_value_event`.
            requester: Likewise.
            swap_value: The replacement that the block waits with.

        Returns:
            As for :meth:`handle_value_event`.

        Raises:
            ValueError: If the block does not wait with this event.
        """
        return self._answer(Events.SWAP, requester, provider, swap_value)

    def handle_skip_event(self: Any, provider: str, requester: str, value: Any) -> bool:
        """Let the block skip the module that it waits to skip, if the driver stands at its input.

        What the module is to return is then had by ``interleaver.take_skip(location of the input)``.

        Args:
            provider: As for :meth:`handle_value_event`.
            requester: Likewise.
            value: What the module is to return, which the block waits with.

        Returns:
            As for :meth:`handle_value_event`.

        Raises:
            ValueError: If the block does not wait with this event.
        """
        return self._answer(Events.SKIP, requester, provider, value)

    def _answer(self: Any, kind: Events, requester: str, provider: str, *given: Any) -> bool:
        event = self.event_queue.value
        location, number = split_requester(requester)
        if event is None or event[0] is not kind or location != self.waiting[0] or number not in (None, self.waiting[1]):
            raise ValueError(f"The block does not wait with {kind} for `{requester}`, but it {described(event)}.")
        if given and given[0] is not event[1][1]:
            raise ValueError(f"The value is not the one that the block waits with for `{requester}`: it cannot be changed here.")
        run, passage = self.interleaver, self.waiting
        here, occurrence = split_requester(provider)
        if (here, run.counts.get(here, 0) if occurrence is None else occurrence) == passage:
            before = run.batcher.current_value
            after = self.handle(provider, before)
            if after is not before:
                run.batcher.current_value = after
            return True
        if run.counts.get(location, 0) > passage[1] and run.at != passage:
            self.throw(OutOfOrderError(passed_message(location, passage[1], self.last_visited)))
        return False

    def handle_barrier_event(self: Any, provider: str | None, participants: set[str] | None) -> bool:
        """Release the blocks with these names that wait by ``send(Events.BARRIER, None)``, and let them run.

        Args:
            provider: Where the driver stands, which does not matter.
            participants: Names of mediators; ``None`` for none.

        Returns:
            Whether there were any.
        """
        run = self.interleaver
        if run is None or participants is None:
            return False
        waiting = [
            mediator
            for mediator in run.mediators
            if mediator.name in participants and mediator.waits_at(_BARRIER, 0) and mediator not in run.ready
        ]
        run.ready.extend(waiting)
        if run.current is None:  # a block that releases others goes on first
            run.run_ready()
        return bool(waiting)

    def handle_end_event(self: Any) -> None:
        """End the block; the model and the other blocks go on."""
        if self.interleaver is not None and self.interleaver.current is self:
            self.end()
        self.cancel()

    def handle_exception_event(self: Any, exception: Exception) -> bool:
        """End the block with an error: raise it, or keep it if the run defers errors.

        Returns:
            ``False``: the block has no further events.
        """
        run = self.interleaver
        if run is not None and run.current is self:
            self.exception(exception)
        self.cancel()
        self._error = exception
        if run is not None and run.defer_exceptions and self._defer():
            return False
        self._error = None
        raise exception

    def _defer(self: Any) -> bool:
        """Keep the error of the block as :attr:`deferred_exception`; return whether it is one that can be kept."""
        error = self._error
        if not isinstance(error, Exception) or isinstance(error, EarlyStopException):
            return False
        traceback = error.__traceback__
        if traceback is not None and traceback.tb_frame.f_code is type(self)._main.__code__:
            error = error.with_traceback(traceback.tb_next)  # without the frame that would hold the mediator
        self._deferred, self._error = error, None
        return True

    @property
    def deferred_exception(self) -> Exception | None:
        """What the block raised in a run with ``defer_exceptions``; ``None`` if it raised nothing. Kept after the run."""
        return getattr(self, "_deferred", None)

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
            return self.pause(_BARRIER) if requester is None else self.handle_barrier_event(None, requester)
        return self.end() if event is Events.END else self.exception(requester)

    def stop(self: Any) -> NoReturn:
        """End the run here, without an error."""
        raise EarlyStopException()

    def end(self: Any) -> NoReturn:
        """End this block here; the model and the other blocks go on."""
        raise GreenletExit()

    def exception(self: Any, exception: BaseException) -> NoReturn:
        """End the run with an error."""
        raise exception
