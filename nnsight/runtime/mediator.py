"""One block while it runs.

A mediator runs the function of a block in a greenlet. Asking for a location switches to the model's greenlet,
which goes on until it offers that location and switches back; so exactly one of model and block runs at a time, on
one thread, and the state torch keeps per thread is theirs together. The exception is grad mode: a block under
``torch.no_grad()`` must not switch gradients off in the model that runs while it waits, so each side keeps its own.

While the model is stopped at a location, that stop is a *visit*: reading the location again, or replacing it, needs no
switch.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from ..tracing.errors import user_position_now, user_position_of
from ..tracing.saving import save
from .batching import BatchGroup
from .errors import MissedProviderError as _MissedProviderError
from .errors import OutOfOrderError as _OutOfOrderError
from .errors import passed_message, replacement_message

if TYPE_CHECKING:
    from .interleaver import Interleaver


torch.Tensor.save = save  # type: ignore[attr-defined]  # for helper functions; blocks do not need it


class EarlyStopException(Exception):
    """Raised in a block by ``tracer.stop()``; ends the run without being an error."""


class Mediator:
    """Runs ``intervention`` against one run.

    Args:
        intervention: The function of a block, without arguments.
        name: Shown in messages.
        batch_group: The rows that belong to this block; all by default.
        publish: Called whenever the block gives up its turn, to show its variables to others.

    Attributes:
        waiting: Location and occurrence the block waits for, or ``None``.
        iteration: Occurrence that requests ask for; ``None`` asks for the next one, whichever it is. A step of a
            loop over occurrences is pinned for its first request only: modules that are called less often than others
            would else never reach it.
        loops: How many loops over occurrences the block is in.
        last_visited: The location of the latest visit, for messages.
    """

    OutOfOrderError = _OutOfOrderError
    MissedProviderError = _MissedProviderError

    __slots__ = (
        "_error",
        "_greenlet",
        "_location",
        "_occurrence",
        "_on_leave",
        "_publish",
        "_value",
        "batch_group",
        "interleaver",
        "intervention",
        "iteration",
        "last_visited",
        "loops",
        "name",
        "requests",
        "waiting",
    )

    def __init__(
        self,
        intervention: Callable[[], Any],
        name: str = "invoke 0",
        batch_group: BatchGroup | None = None,
        publish: Callable[[], None] | None = None,
    ) -> None:
        self.intervention: Callable[[], Any] | None = intervention
        self.name = name
        self.interleaver: Interleaver | None = None
        self.waiting: tuple[str, int] | None = None
        self.batch_group = batch_group
        self._publish = publish
        self.iteration: int | None = 0
        self.loops = 0
        self.requests = 0
        self.last_visited: str | None = None
        self._greenlet: greenlet | None = None
        self._error: BaseException | None = None
        self._location: str | None = None  # of the current visit
        self._occurrence = 0
        self._value: Any = None
        self._on_leave: list[Callable[[], Any]] = []

    # -- the model's side -------------------------------------------------------------------------------------

    def start(self, interleaver: Interleaver) -> None:
        """Run the block up to its first request."""
        self.interleaver = interleaver
        self._greenlet = greenlet(self._main, getcurrent())
        self._greenlet.gr_context = contextvars.copy_context()
        self._resume()

    def waits_at(self, location: str, occurrence: int) -> bool:
        """Whether the block waits for this passage of ``location``."""
        return self.waiting is not None and self.waiting[0] == location and self.waiting[1] == occurrence

    def visit(self, location: str, occurrence: int, value: Any) -> Any:
        """Give ``value`` to the block, let it run until it waits for something else, and return the value then."""
        self._stop_waiting()
        group = self.batch_group
        mine = value if group is None else group.narrow(value)
        self._location, self._occurrence, self._value = location, occurrence, mine
        self.last_visited = f"{location}.i{occurrence}"
        if self.iteration == occurrence != 0:
            self.iteration = None
        self._resume()
        self._send_views_back()
        left, self._value, self._location = self._value, None, None
        return left if group is None else group.widen(location, value, mine, left)

    def proceed(self) -> None:
        """Run on after something other than a location was waited for."""
        self._stop_waiting()
        self._resume()

    def throw(self, error: BaseException) -> None:
        """Raise ``error`` in the block, at the line where it waits."""
        self._stop_waiting()
        self._resume(error)

    def leave_loop(self) -> None:
        """End the block in the loop where it waits for an occurrence that does not come."""
        assert self.waiting is not None and self._greenlet is not None
        location, occurrence = self.waiting
        filename, line = user_position_of(self._greenlet.gr_frame)
        self._stop_waiting()
        self._greenlet.throw(GreenletExit)
        warnings.warn_explicit(
            f"The loop ended at `{location}.i{occurrence}`, which did not occur: the model had finished. What the loop "
            "did so far is kept; the rest of this step and the code after the loop were not run. Bound the loop, as in "
            "`tracer.iter[:3]`, or put what follows into an invoke of its own.",
            UserWarning,
            filename,
            line,
        )

    def cancel(self) -> None:
        """End the block, running its ``finally`` clauses, and drop everything it held."""
        self._stop_waiting()
        if self._greenlet is not None and self._greenlet:
            self._error = None
            self._greenlet.throw(GreenletExit)
        self._greenlet = self.interleaver = self.intervention = self._value = self._location = self._error = None

    @property
    def alive(self) -> bool:
        """Whether the block has started and not ended."""
        return bool(self._greenlet)

    def _resume(self, error: BaseException | None = None) -> None:
        interleaver, worker = self.interleaver, self._greenlet
        assert interleaver is not None and worker is not None
        previous, interleaver.current = interleaver.current, self
        if worker.parent is not getcurrent():  # this time another block plays the model's part
            worker.parent = getcurrent()
        grad_enabled = torch.is_grad_enabled()
        try:
            if error is None:
                worker.switch()
            else:
                worker.throw(error)
        finally:
            interleaver.current = previous
            if torch.is_grad_enabled() != grad_enabled:
                torch.set_grad_enabled(grad_enabled)
        if self._error is not None:
            interleaver.failure, self._error = self._error, None
            raise interleaver.failure

    def _main(self) -> None:
        intervention, self.intervention = self.intervention, None  # its variables end with it
        assert intervention is not None
        try:
            intervention()
        except GreenletExit:
            pass
        except BaseException as error:
            self._error = error
        finally:
            if self._publish is not None:
                self._publish()
                self._publish = None

    def _stop_waiting(self) -> None:
        if self.waiting is None or self.interleaver is None:
            return
        location, waited = self.waiting[0], self.interleaver.waited
        self.waiting = None
        if waited[location] == 1:
            del waited[location]
        else:
            waited[location] -= 1

    # -- the block's side ---------------------------------------------------------------------------------------

    def request_once(self, location: str) -> Any:
        """Return the value at a location that occurs once in a run, whatever occurrence requests ask for."""
        if self._location != location:
            self._wait_for(location, 0)
        return self._value

    def request(self, location: str) -> Any:
        """Return the value at ``location``, letting the model run until it gets there.

        Raises:
            OutOfOrderError: If the model has passed the location, or finishes without reaching it.
        """
        if not self._is_at(location):
            self._wait_for(location, self._next_occurrence(location))
        self._send_views_back()
        return self._value

    def swap(self, location: str, value: Any) -> None:
        """Let the model continue with ``value`` at ``location``; waits for the location as :meth:`request` does."""
        if not self._is_at(location):
            self._wait_for(location, self._next_occurrence(location))
        interleaver = self.interleaver
        assert interleaver is not None
        if interleaver.check_replacement is not None:
            interleaver.check_replacement(location, self._value, value)
        shape, expected = getattr(value, "shape", None), getattr(self._value, "shape", None)
        if shape != expected and shape is not None and expected is not None:
            where = "{}:{}: ".format(*user_position_now())
            interleaver.reshaped.append(where + replacement_message(location, tuple(shape), tuple(expected)))
        self._value = value

    def skip(self, path: str, value: Any) -> None:
        """Let the module at ``path`` return ``value`` instead of running.

        Raises:
            OutOfOrderError: If the module already runs or has run.
        """
        location = f"{path}.input"
        interleaver = self.interleaver
        if not self._is_at(location):
            self._wait_for(location, self._next_occurrence(location))
        assert interleaver is not None
        interleaver.skips.setdefault(location, {})[self] = value

    def on_leave(self, transform: Callable[[], Any]) -> None:
        """Replace the value of the current visit by what ``transform`` returns when the block moves on."""
        self._on_leave.append(transform)

    def _send_views_back(self) -> None:
        """Make the value of the visit what blocks left in the views they were given of it."""
        for transform in self._on_leave:
            self._value = transform()
        self._on_leave.clear()

    def advance(self, steps: int) -> None:
        """Let requests ask for the occurrence ``steps`` after the one they ask for now."""
        here = self.iteration
        if here is None:  # the occurrence of the latest visit
            here = self._occurrence
        self.iteration = here + steps

    def swap_here(self, value: Any) -> None:
        """Let the run continue with ``value`` at the location where it is stopped."""
        self._value = value

    def pause(self, reason: str) -> None:
        """Let the others run until somebody calls :meth:`proceed`; ``reason`` names what is waited for."""
        self._switch_to_model(reason, 0)

    def _is_at(self, location: str) -> bool:
        """Whether the model is stopped at ``location``, at the occurrence that requests ask for."""
        self.requests += 1
        return self._location == location and self.iteration in (None, self._occurrence)

    def _next_occurrence(self, location: str) -> int:
        if self.iteration is not None:
            return self.iteration
        return 0 if self.interleaver is None else self.interleaver.counts.get(location, 0)

    def _wait_for(self, location: str, occurrence: int) -> None:
        interleaver = self.interleaver
        if interleaver is None:
            raise ValueError(f"`{location}` was requested after its trace had ended.")
        interleaver.check_request(location)
        if interleaver.counts.get(location, 0) > occurrence and interleaver.at != (location, occurrence):
            raise _OutOfOrderError(passed_message(location, occurrence, self.last_visited))
        self._switch_to_model(location, occurrence)

    def _switch_to_model(self, location: str, occurrence: int) -> None:
        interleaver = self.interleaver
        assert interleaver is not None
        self.waiting = (location, occurrence)
        interleaver.waited[location] = interleaver.waited.get(location, 0) + 1
        grad_enabled = torch.is_grad_enabled()
        model = getcurrent().parent
        assert model is not None
        if self._publish is not None:
            self._publish()
        try:
            model.switch()
        finally:
            if torch.is_grad_enabled() != grad_enabled:
                torch.set_grad_enabled(grad_enabled)
