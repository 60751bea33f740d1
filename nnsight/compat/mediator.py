"""A mediator with the documented names of earlier versions, with which a user's own driver can serve a block.

A *requester* or *provider* is a location with an occurrence: ``model.layer.output.i2`` is the third time that the model passes
``model.layer.output``. A block requests it, and a driver provides its value.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from greenlet import GreenletExit

from ..runtime import errors
from ..runtime import mediator as runtime
from ..runtime.interleaver import split_requester
from ..runtime.iteration import IteratorTracer
from ..tracing.block import Branch
from .events import Events, Queue, Value

if TYPE_CHECKING:
    from ..runtime.cache import Cache
    from ..runtime.interleaver import Interleaver

_BARRIER = "barrier()"
_STATE = ("intervention", "info", "name", "batch_group", "_publish", "iteration", "all_stop", "args")


class Mediator(runtime.Mediator):
    """Runs the function of a block, see :class:`nnsight.runtime.mediator.Mediator`."""

    MissedProviderError, OutOfOrderError, Value = errors.MissedProviderError, errors.OutOfOrderError, Value
    lock = 0  # always 0: block and model take turns on one thread
    skip_container = None  # not used: the run has the values that skipped modules return

    def __init__(
        self,
        intervention: Callable[..., Any],
        info: Any = None,
        name: str | None = None,
        batch_group: Any = None,
        stop: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(intervention, info, name, batch_group, **options)
        self.all_stop = stop  # the number of calls of the function, each for the next occurrence of its locations; one for `None`
        self.args: Sequence[Any] = []  # the arguments of the function; they must be set before the run
        self.deferred_exception: Exception | None = None  # the error of the block, in a run with `defer_exceptions`
        self.hooks: list[Any] = []  # handles of hooks, such as those of a user's own property; removed when the run ends

    def __enter__(self) -> Mediator:
        """Return the mediator. The ``with`` statement ends the block: for a mediator that is started without ``with run:``."""
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle; raise ``ValueError`` if the block has started."""
        if self.intervention is None:
            raise ValueError(f"The block of {self.name!r} has already started: copy or pickle a mediator before its run.")
        return {name: getattr(self, name) for name in _STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Mediator.__init__(self, state["intervention"])
        for name, value in state.items():
            setattr(self, name, value)

    def start(self, interleaver: Interleaver) -> None:
        """Run the block up to its first request."""
        if self.intervention is not None and (self.args or self.all_stop is not None):
            self.intervention = partial(_call, self.intervention, self.args, self.all_stop)
        super().start(interleaver)

    def cancel(self) -> None:
        """End the block, and remove its hooks."""
        super().cancel()
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove the :attr:`hooks`."""
        while self.hooks:
            self.hooks.pop().remove()

    def set_user_cache(self, cache: Cache) -> None:
        """From now on, keep the values of this block's rows in ``cache``."""
        if self.interleaver is None:
            raise ValueError(f"{self.name!r} is not in a run, so the cache would get no values: call this during a run.")
        cache.attach(self.interleaver, self)

    # -- state of the block ---------------------------------------------------------------------------------------

    worker = property(lambda self: self._greenlet, doc="The greenlet that runs the block.")
    cross_invoker = property(lambda self: self._publish is not None, doc="Whether other blocks can use variables of this block.")
    event_queue = property(lambda self: Queue(self._event, self._check), doc="The event that the block waits with, see `send`.")
    response_queue = property(lambda self: Queue(lambda: None, self.respond), doc="Empty: the block takes a value as soon as it is put.")
    idx = property(lambda self: self.interleaver and self.interleaver.mediators.index(self), doc="Position among the blocks of the run.")
    transform = property(
        lambda self: self._on_leave[-1] if self._on_leave else None,
        runtime.Mediator.on_leave,
        doc="Called without arguments when the block moves on; its result replaces the value of this visit.",
    )
    original_globals = property(lambda self: getattr(self.frame, "f_globals", {}), doc="Globals of the block while it runs.")
    iteration_tracker = property(
        lambda self: Counter(getattr(self.interleaver, "counts", {})),
        doc="A copy of the number of occurrences of each location so far; 0 for others.",
    )

    user_cache = property(
        lambda self: [cache for mediator, cache in getattr(self.interleaver, "caches", ()) if mediator is self],
        doc="The caches of the block, during the run.",
    )

    @property
    def history(self) -> set[str]:
        """The occurrences that the run has passed so far, such as ``model.layer.output.i0``; the same for all blocks of the run."""
        return {f"{location}.i{number}" for location, count in self.iteration_tracker.items() for number in range(count)}

    @property
    def frame(self) -> types.FrameType | None:
        """The frame of the block's function; ``None`` before it has started and after it has ended."""
        frame = None if not self._greenlet else self._greenlet.gr_frame or sys._getframe(1)
        while frame is not None and (frame.f_back is None or frame.f_back.f_code not in _CALLERS):
            frame = frame.f_back
        return frame

    def push(self) -> None:
        """Publish the variables of the block to other blocks now, and not only when it waits."""
        if self._publish is not None:
            self._publish()

    def pull(self) -> None:
        """Bind variables that this block assigns later to the values that others have pushed. All other variables are shared."""
        branch = getattr(self._publish, "__self__", None)
        if isinstance(branch, Branch):
            branch.pull()

    # -- for blocks -----------------------------------------------------------------------------------------------

    def send(self, event: Events, requester: Any = None) -> Any:
        """Send a request to the run.

        ``requester`` is a location with an occurrence; for a swap or a skip, a tuple of this and the value; for an exception, the
        exception; for a barrier, the names of the mediators to release, or ``None`` to wait for the release.
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

    def stop(self) -> NoReturn:
        """End the whole run here, without an error."""
        raise errors.EarlyStopException()

    def end(self) -> NoReturn:
        """End this block here; the model and the other blocks go on."""
        raise GreenletExit()

    def exception(self, exception: BaseException) -> NoReturn:
        """End the run with an error."""
        raise exception

    # -- for drivers ----------------------------------------------------------------------------------------------

    def _event(self) -> tuple[Events, Any] | None:
        """Return the event that the block waits with, such as ``(Events.VALUE, "x.i0")``; ``None`` if it does not wait."""
        if self.waiting is None:
            return None
        kind, *given = self.asks
        requester = None if kind == "barrier" else "{}.i{}".format(*self.waiting)
        return Events(kind), (requester, *given) if given else requester

    def _check(self, event: tuple[Events, Any]) -> None:
        """Raise ``ValueError`` unless the block waits with this event; only the block itself can make another request."""
        if self._event() != event:
            raise ValueError(f"The block waits with {self._event()}. Only the block can change this: it cannot be answered as {event}.")

    def handle(self, provider: str, value: Any = None) -> Any:
        """Offer ``value`` to this block alone, without counting the occurrence; return the value with the block's edits."""
        run = self.interleaver
        location, occurrence = split_requester(provider)
        if run is None or not self.waits_at(location, run.counts.get(location, 0) if occurrence is None else occurrence):
            return value
        assert self.waiting is not None
        run.visits.append(self.waiting)
        value = self.respond(value)
        run.run_ready()
        run.visits.pop()
        return value

    def respond(self, value: Any = None) -> Any:
        """Give the block the value it waits for, at any location; return the value with the block's edits."""
        if self.waiting is None:
            raise ValueError("The block does not wait for a value, so it cannot take one.")
        run, value = self.interleaver, self.visit(*self.waiting, value)
        if run is not None:
            run.end_if_stopped()
        return value

    def handle_value_event(self, requester: str, provider: str) -> bool:
        """If the block waits at ``provider``, give it the batcher's current value, which then becomes the value with the block's edits.

        Returns:
            Whether the block waits there. If not, it continues to wait.
        """
        return self._answer(provider, requester, (Events.VALUE, requester))

    def handle_swap_event(self, provider: str, requester: str, swap_value: Any) -> bool:
        """Let the block replace the current value by ``swap_value``, as in :meth:`handle_value_event`."""
        return self._answer(provider, requester, (Events.SWAP, (requester, swap_value)))

    def handle_skip_event(self, provider: str, requester: str, value: Any) -> bool:
        """Let the block store ``value`` for ``interleaver.take_skip(input)``, as in :meth:`handle_value_event`."""
        return self._answer(provider, requester, (Events.SKIP, (requester, value)))

    def _answer(self, provider: str, requester: str, event: tuple[Events, Any]) -> bool:
        self._check(event)
        served, run = provider == requester, cast("Any", self.interleaver)
        if served:
            run.batcher.current_value = self.handle(provider, run.batcher.current_value)
        return served

    def handle_barrier_event(self, provider: str | None, participants: set[str] | None) -> bool:
        """Release the blocks named in ``participants`` that wait in ``send(Events.BARRIER, None)``; return whether there are any."""
        run: Any = self.interleaver
        waiting = [other for other in run.mediators if other.name in (participants or ()) and other.waits_at(_BARRIER, 0)]
        run.ready.extend(other for other in waiting if other not in run.ready)
        if run.current is None:  # a block that releases others continues first
            run.run_ready()
        return bool(waiting)

    def handle_end_event(self) -> None:
        """End the block; the model and the other blocks go on."""
        if self.interleaver is not None and self.interleaver.current is self:
            self.end()
        self.cancel()

    def handle_exception_event(self, exception: Exception) -> bool:
        """End the block with an error. Raise the error, or, if the run defers errors, keep it and return ``False``."""
        if self.interleaver is not None and self.interleaver.current is self:
            self.exception(exception)
        self._error = exception
        kept = self.keep_error()
        self.cancel()
        if not kept:
            raise exception
        return False

    def keep_error(self) -> bool:
        """If the run defers errors, keep the error of the block as :attr:`deferred_exception`; return whether it was kept."""
        error = self._error
        defers = getattr(self.interleaver, "defer_exceptions", False) and not isinstance(error, errors.EarlyStopException)
        if not defers or not isinstance(error, Exception):
            return False
        traceback = error.__traceback__
        if traceback is not None and traceback.tb_frame.f_code in _CALLERS:
            error = error.with_traceback(traceback.tb_next)  # without the frame that would keep the mediator alive
        self.deferred_exception, self._error = error, None
        return True


def _call(function: Callable[..., Any], args: Sequence[Any], times: int | None) -> None:
    """Call ``function`` with ``args``, ``times`` times, each time for the next occurrence of its locations."""
    for _ in (0,) if times is None else IteratorTracer(range(times)):
        function(*args)


#: Code of the functions that call the function of a block.
_CALLERS = (runtime.Mediator._main.__code__, _call.__code__)
