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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from ..tracing.errors import user_position_now
from ..tracing.saving import save
from .errors import MissedProviderError as _MissedProviderError
from .errors import OutOfOrderError as _OutOfOrderError
from .errors import passed_message, replacement_message

if TYPE_CHECKING:
    from .interleaver import Interleaver


torch.Tensor.save = save  # type: ignore[attr-defined]  # for helper functions; blocks do not need it


class Mediator:
    """Runs ``intervention`` against one run.

    Args:
        intervention: The function of a block, without arguments.
        name: Shown in messages.

    Attributes:
        waiting: Location and occurrence the block waits for, or ``None``.
        iteration: Occurrence that requests ask for.
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
        "_value",
        "interleaver",
        "intervention",
        "iteration",
        "last_visited",
        "name",
        "waiting",
    )

    def __init__(self, intervention: Callable[[], Any], name: str = "invoke 0") -> None:
        self.intervention: Callable[[], Any] | None = intervention
        self.name = name
        self.interleaver: Interleaver | None = None
        self.waiting: tuple[str, int] | None = None
        self.iteration = 0
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
        self._location, self._occurrence, self._value = location, occurrence, value
        self.last_visited = f"{location}.i{occurrence}"
        self._resume()
        for transform in self._on_leave:
            self._value = transform()
        self._on_leave.clear()
        value, self._value, self._location = self._value, None, None
        return value

    def throw(self, error: BaseException) -> None:
        """Raise ``error`` in the block, at the line where it waits."""
        self._stop_waiting()
        self._resume(error)

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
        assert self.intervention is not None
        try:
            self.intervention()
        except GreenletExit:
            pass
        except BaseException as error:
            self._error = error

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

    def request(self, location: str) -> Any:
        """Return the value at ``location``, letting the model run until it gets there.

        Raises:
            OutOfOrderError: If the model has passed the location, or finishes without reaching it.
        """
        if self._location != location or self._occurrence != self.iteration:
            self._wait_for(location)
        return self._value

    def swap(self, location: str, value: Any) -> None:
        """Let the model continue with ``value`` at ``location``; waits for the location as :meth:`request` does."""
        if self._location != location or self._occurrence != self.iteration:
            self._wait_for(location)
        interleaver = self.interleaver
        assert interleaver is not None
        if interleaver.check_replacement is not None:
            interleaver.check_replacement(location, self._value, value)
        shape, expected = getattr(value, "shape", None), getattr(self._value, "shape", None)
        if shape != expected and shape is not None and expected is not None:
            where = "{}:{}: ".format(*user_position_now())
            interleaver.reshaped.append(where + replacement_message(location, tuple(shape), tuple(expected)))
        self._value = value

    def on_leave(self, transform: Callable[[], Any]) -> None:
        """Replace the value of the current visit by what ``transform`` returns when the block moves on."""
        self._on_leave.append(transform)

    def _wait_for(self, location: str) -> None:
        interleaver = self.interleaver
        if interleaver is None:
            raise ValueError(f"`{location}` was requested after its trace had ended.")
        occurrence = self.iteration
        if interleaver.counts.get(location, 0) > occurrence:
            raise _OutOfOrderError(passed_message(location, occurrence, self.last_visited))
        self.waiting = (location, occurrence)
        interleaver.waited[location] = interleaver.waited.get(location, 0) + 1
        grad_enabled = torch.is_grad_enabled()
        model = getcurrent().parent
        assert model is not None
        try:
            model.switch()
        finally:
            if torch.is_grad_enabled() != grad_enabled:
                torch.set_grad_enabled(grad_enabled)
