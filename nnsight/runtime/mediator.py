"""One block while it runs.

A mediator runs the function of a block in a greenlet. A request for a location switches to the model's greenlet, which runs until it offers
that location and switches back. So either the model or the block runs at a time, on one thread, and they share torch's state of the thread.
Modes are the exception: ``torch.no_grad()`` in a block must not affect the model while the block waits, so model and block have separate
mode contexts (:mod:`~nnsight.runtime.switching.mode_contexts`).

While the model is stopped at a location, the block *visits* it: it can read the location again, or replace the value, without a switch.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet
from torch import is_grad_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils import _pytree as pytree

from ..tracing.errors import user_position_of
from .errors import EarlyStopException, OutOfOrderError, SkipException, loop_ended_message, passed_message
from .interleaver import ANYWHERE, RETURNED, split_requester
from .rows.batching import BatchGroup, View
from .switching.checkpointing import CheckpointVisit, checkpoint_hooks, in_reentrant_checkpoint
from .switching.mode_contexts import ModeContexts
from .switching.workers import borrow

if TYPE_CHECKING:
    from .interleaver import Interleaver


#: The kind of a request that only reads a value.
_VALUE = ("value",)


class Mediator:
    """Runs the function ``intervention`` of one block in one run.

    Args:
        intervention: The function of a block, without arguments.
        info: The captured block, if the function was compiled from one.
        name: Identifies the block in its run.
        batch_group: The rows that belong to this block; all by default.
        publish: Called whenever the block gives up its turn, to make its variables visible to other blocks.
        explain: Called with an error of the block, to add the cause to its message if the trace knows the cause.
    """

    def __init__(
        self,
        intervention: Callable[[], Any],
        info: Any = None,
        name: str | None = None,
        batch_group: BatchGroup | None = None,
        publish: Callable[[], None] | None = None,
        explain: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.intervention: Callable[[], Any] | None = intervention
        self.info = info
        self.name = name or f"Mediator{id(self)}"
        self.interleaver: Interleaver | None = None
        self.waiting: tuple[str, int] | None = None  # the location and occurrence that the block waits for
        self.asks: tuple[Any, ...] = _VALUE  # the kind of its request: "value", "barrier", or "swap" or "skip" followed by the value
        self.batch_group = batch_group
        self._publish = publish
        self._explain = explain
        #: The occurrence that requests ask for; `None` for the next one. A step of a loop over occurrences sets it for its first
        #: request only, because modules that are called less often than others may never reach that number.
        self.iteration: int | None = 0
        self.loops = 0  # number of nested loops over occurrences that the block is in
        self.steps: Any = None  # the step numbers of the outermost loop: a range, or a list
        self.made = -1  # the last step of that loop that has already run elsewhere, as a program; the loop skips steps up to it
        self.ends_in_loop = False  # whether no code is lost if the model finishes in a loop after its first visit, so no warning is due
        self.is_edit = False  # whether it is an edit of the model; a stopped run may end before the locations of edits
        self.stopped = False  # whether `tracer.stop()` has ended it
        self.requests = 0  # number of its requests so far
        self.visited: tuple[str, int] | None = None  # location and occurrence of the latest visit
        self._mode_contexts = ModeContexts()
        self._began_with_grad = False  # whether gradients were enabled when the block began
        self._greenlet: greenlet | None = None
        self._error: BaseException | None = None
        self.disregarded: str | None = None  # a location whose occurrences begin no step
        self._location: str | None = None  # location, occurrence and value of the current visit
        self._occurrence = 0
        self._value: Any = None
        self._view: View | None = None  # the block's rows of the whole value at the current visit
        self._on_leave: list[Callable[[], Any]] = []  # functions that send edited views back, see `on_leave`
        self._held: dict[str | None, Any] = {}  # views of the value of this visit that were not yet sent back, by name

    # -- the model's side -------------------------------------------------------------------------------------

    def start(self, interleaver: Interleaver) -> None:
        """Run the block up to its first request."""
        self.interleaver = interleaver
        self.disregarded = getattr(interleaver.tracer, "surplus", None)
        worker = self._greenlet = borrow()
        worker.gr_context = contextvars.copy_context()
        self._began_with_grad = is_grad_enabled()
        self._turn(worker.switch, self._main)

    def waits_at(self, location: str, occurrence: int) -> bool:
        """Whether the block waits for this occurrence of ``location``."""
        if self.waiting is None or self.waiting[1] != occurrence:
            return False
        return self.waiting[0] == location or (self.waiting[0] == ANYWHERE and location != self.disregarded)

    @property
    def awaits_step(self) -> bool:
        """Whether the block waits for the beginning of a step, and not for a value."""
        return self.waiting is not None and self.waiting[0] == ANYWHERE

    def visit(self, location: str, occurrence: int, value: Any) -> Any:
        """Give ``value`` to the block, let it run until its next wait or its end, and return the value with its changes."""
        if self.awaits_step:
            self._stop_waiting()
            self._resume(location)
            return value
        self._stop_waiting()
        if location == self.disregarded:
            self.disregarded = None
        group = self.batch_group
        view = self._view = None if group is None else group.view(location, occurrence, value)
        self._location, self._occurrence = location, occurrence
        self._value = value if view is None else view.value
        self.visited = (location, occurrence)
        if self.iteration == occurrence != 0:
            self.iteration = None
        self._resume(location)
        if self._on_leave:
            self._send_views_back()
        left = self.whole_value
        self._value = self._location = self._view = None
        return left

    @property
    def whole_value(self) -> Any:
        """The value of the whole batch at the current visit, with the block's changes to its rows."""
        return self._value if self._view is None else self._view.widen(self._value)

    def _resume(self, location: str) -> None:
        """Resume the block at ``location``. Inside an activation checkpoint, autograd keeps the tensors of the block nevertheless."""
        assert self._greenlet is not None
        inside = _top_saved_tensors_default_hooks(True) is not None and checkpoint_hooks() is not None
        if not inside and not (self._began_with_grad and not is_grad_enabled() and in_reentrant_checkpoint()):
            self._turn(self._greenlet.switch)
            return
        visit = CheckpointVisit(location, self._value, user_position_of(self._greenlet.gr_frame))
        with visit.apart():
            self._turn(self._greenlet.switch)
        visit.warn_if_edited(self._value)

    @property
    def last_visited(self) -> str | None:
        """The location of the latest visit with its occurrence, as in ``model.layer.output.i0``."""
        return None if self.visited is None else "{}.i{}".format(*self.visited)

    def proceed(self) -> None:
        """Resume the block after a wait for something other than a value, such as a barrier."""
        self._stop_waiting()
        assert self._greenlet is not None
        self._turn(self._greenlet.switch)

    def leave_loop(self) -> None:
        """End the block inside a loop whose next occurrence does not come, with a warning if code of the block did not run."""
        assert self.waiting is not None and self._greenlet is not None
        location, occurrence = self.waiting
        if self.awaits_step:
            location = "model.input" if self.visited is None else self.visited[0]
        position = user_position_of(self._greenlet.gr_frame)
        self._stop_waiting()
        self._go(self._greenlet.throw, GreenletExit)
        self._stop_waiting()  # in a `finally` clause, the block may have asked for another location
        if not self.ends_in_loop or self.visited is None:
            warnings.warn_explicit(loop_ended_message(location, occurrence), UserWarning, *position)

    def throw(self, error: BaseException) -> None:
        """Raise ``error`` in the block, at the line where it waits."""
        self._stop_waiting()
        assert self._greenlet is not None
        self._turn(self._greenlet.throw, error)

    def cancel(self) -> None:
        """End the block, which runs its ``finally`` clauses, and drop the references that the mediator holds."""
        self._stop_waiting()
        if self._greenlet is not None:
            self._error = None
            self._go(self._greenlet.throw, GreenletExit)
        self._greenlet = self.interleaver = self.intervention = None
        self._value = self._view = self._location = self._error = None

    @property
    def alive(self) -> bool:
        """Whether the block has started and has not ended."""
        return self._greenlet is not None

    def _turn(self, switch: Callable[..., Any], *arguments: Any) -> None:
        """Let the block run until it waits or ends; ``switch(*arguments)`` switches to it."""
        interleaver = self.interleaver
        assert interleaver is not None
        previous, interleaver.current = interleaver.current, self
        try:
            self._go(switch, *arguments)
        finally:
            interleaver.current = previous
        if isinstance(self._error, EarlyStopException):  # the run ends after this location, see `Interleaver.end_if_stopped`
            self.stopped = interleaver.stopped = True
            self._error = None
        if self._error is not None and not self.keep_error():
            interleaver.failure, self._error = self._error, None
            raise interleaver.failure

    def keep_error(self) -> bool:
        """Return whether an error of the block is kept for later instead of ending the run. A subclass may keep it."""
        return False

    def _go(self, switch: Callable[..., Any], *arguments: Any) -> None:
        """Switch to the block and back, and exchange the mode contexts of model and block."""
        worker, here = self._greenlet, getcurrent()
        assert worker is not None
        if worker.parent is not here:  # another block called the model
            worker.parent = here
        model = self._mode_contexts.begin(self.interleaver)
        try:
            switch(*arguments)
        finally:
            self._mode_contexts.end(model, self._greenlet is None)

    def _main(self) -> None:
        """Run the block in its greenlet. Errors are stored in ``_error`` and not raised."""
        intervention, self.intervention = self.intervention, None  # so that its variables are freed when it ends
        assert intervention is not None
        try:
            intervention()
        except GreenletExit:
            pass
        except SkipException as skip:
            self._error = self._skip_here(skip)
        except BaseException as error:
            self._error = error
            if self._explain is not None:
                self._explain(error)
        finally:
            self._greenlet = self._explain = None
            if self._publish is not None:
                self._publish()
                self._publish = None

    def _stop_waiting(self) -> None:
        if self.waiting is None or self.interleaver is None:
            return
        self.interleaver.waited.remove(self.waiting[0])
        self.waiting, self.asks = None, _VALUE

    # -- the block's side ---------------------------------------------------------------------------------------

    def request_once(self, location: str) -> Any:
        """Return the value at a location that occurs once in a run. :attr:`iteration` has no effect."""
        if self._location != location and not (location == "result" and self._has_result_early()):
            self._wait_for(location, 0)
        return self._value

    def _has_result_early(self) -> bool:
        """Wait at the run's ``output_location``, if it has one; return whether the value there is the whole result, with no opaque leaf."""
        interleaver = self.interleaver
        location = None if interleaver is None else interleaver.output_location
        if interleaver is None or location is None:
            return False
        if self._location != location:
            if interleaver.counts.get(location, 0):
                return False
            self._switch_to_model(location, 0)
        if any(hasattr(type(leaf), "is_opaque") for leaf in pytree.tree_leaves(self._value)):
            return False
        self._location, self.visited = "result", ("result", 0)
        return True

    def request(self, location: str) -> Any:
        """Let the model run to ``location`` and return the value there. :attr:`iteration` is the occurrence, unless ``x.i2`` names one.

        Raises:
            OutOfOrderError: If the model has passed the location, or finishes without reaching it.
        """
        if not self._is_at(location):
            self._wait_for(location, self._next_occurrence(location))
        if self._on_leave:
            self._send_views_back()
        return self._value

    def swap(self, location: str, value: Any) -> None:
        """Let the model continue with ``value`` at ``location``; waits for the location like :meth:`request`."""
        if not self._is_at(location):
            self._wait_for(location, self._next_occurrence(location), ("swap", value))
        self._replace(value)

    def _replace(self, value: Any) -> None:
        """Check the replacement of the value at the current location, and make it."""
        interleaver = self.interleaver
        assert interleaver is not None and self._location is not None
        if interleaver.check_replacement is not None:
            interleaver.check_replacement(self._location, self._value, value)
        self._value = value
        self._drop_views()

    def skip(self, location: str, value: Any) -> None:
        """Let the module whose input is at ``location`` return ``value`` instead of running.

        Raises:
            OutOfOrderError: If the module is running or has run.
            ValueError: If ``location`` is not the location of an input.
        """
        if not split_requester(location)[0].endswith(".input"):
            raise ValueError(f"A module is skipped at its input, such as `model.layer.input`, not at `{location}`.")
        if not self._is_at(location):
            self._wait_for(location, self._next_occurrence(location), ("skip", value))
        self._leave_out(value)

    def _leave_out(self, value: Any) -> None:
        """Check the result of the module that is skipped at the current location, and skip it."""
        interleaver = self.interleaver
        assert interleaver is not None and self._location is not None
        if interleaver.check_skip is not None:
            interleaver.check_skip(self._location.removesuffix(".input"), value)
        interleaver.skips.setdefault(self._location, {})[self] = value

    def _skip_here(self, skip: SkipException) -> BaseException | None:
        """Skip the module at whose input the block's visit is; return an error if the visit is elsewhere."""
        if self.interleaver is None or self._location is None or not self._location.endswith(".input"):
            return ValueError(
                "SkipException was raised where no module is about to run. Read the `.input` of the module before you skip it."
            ).with_traceback(skip.__traceback__)
        self.interleaver.skips.setdefault(self._location, {})[self] = skip.value
        return None

    def on_leave(self, transform: Callable[[], Any], name: str | None = None, view: Any = None) -> None:
        """Replace the value of this visit by ``transform()`` once the block asks for anything but ``view``, the view called ``name``."""
        self._on_leave.append(transform)
        self._held[name] = view

    def held_view(self, location: str, name: str | None) -> Any:
        """Return the view ``name`` of the value at ``location``, or ``None`` if there is none that was not yet sent back."""
        return self._held.get(name) if self._held and self._is_at(location) else None

    def _send_views_back(self) -> None:
        """Replace the value by the results of the functions of :meth:`on_leave`."""
        for transform in self._on_leave:
            self._value = transform()
        self._drop_views()

    def _drop_views(self) -> None:
        self._on_leave.clear()
        self._held.clear()

    def swap_here(self, value: Any) -> None:
        """Let the model continue with ``value`` at the location of the current visit."""
        self._value = value

    def pause(self, reason: str) -> None:
        """Let the other blocks and the model run until :meth:`proceed` is called; ``reason`` takes the place of a location in messages."""
        self._switch_to_model(reason, 0, ("barrier",))

    def wait_for_return(self) -> None:
        """Wait until the model has returned the deferred output of this visit. The value of the visit is then the returned value."""
        assert self._location is not None
        self._switch_to_model(self._location + RETURNED, self._occurrence)

    def wait_for_step(self, step: int) -> None:
        """Wait until any location has its occurrence number ``step``."""
        self._switch_to_model(ANYWHERE, step)

    def advance(self, steps: int) -> None:
        """Let requests ask for a later occurrence: ``steps`` after :attr:`iteration`, or after the latest visit if that is ``None``."""
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"next() takes an int, not {type(steps).__name__}.")
        if steps < 0:
            raise ValueError(f"next() cannot count from the end or backwards (got {steps}): the model does not go back.")
        self.iteration = (self._occurrence if self.iteration is None else self.iteration) + steps

    def _is_at(self, location: str) -> bool:
        """Count a request, and return whether the model is stopped at ``location``, at the occurrence that requests ask for."""
        self.requests += 1
        return self.stands_at(location)

    def next_occurrence(self, location: str) -> int:
        """Return the occurrence of ``location`` that a request would read."""
        return self._occurrence if self.stands_at(location) else self._next_occurrence(location)

    def stands_at(self, location: str) -> bool:
        """Whether the model is stopped at ``location`` for this block, so that a request would not wait."""
        return self._location == location and self.iteration in (None, self._occurrence)

    def _next_occurrence(self, location: str) -> int:
        if self.iteration is not None:
            return self.iteration
        return 0 if self.interleaver is None else self.interleaver.counts.get(location, 0)

    def _wait_for(self, location: str, occurrence: int, asks: tuple[Any, ...] = _VALUE) -> None:
        interleaver = self.interleaver
        if interleaver is None:
            raise ValueError(f"`{location}` was requested after its trace had ended.")
        if location[-1:].isdecimal():
            location, number = split_requester(location)
            if number is not None:
                occurrence = number
                if (location, number) == (self._location, self._occurrence):
                    return
        interleaver.check_request(location)
        passed = interleaver.counts.get(location, 0) > occurrence
        if passed and ((location, occurrence) not in interleaver.visits or self._location == "result"):
            raise OutOfOrderError(passed_message(location, occurrence, self.last_visited))
        self._switch_to_model(location, occurrence, asks)

    def _switch_to_model(self, location: str, occurrence: int, asks: tuple[Any, ...] = _VALUE) -> None:
        interleaver = self.interleaver
        assert interleaver is not None
        self.waiting, self.asks = (location, occurrence), asks
        interleaver.waited.add(location)
        model = getcurrent().parent
        assert model is not None
        if self._publish is not None:
            self._publish()
        model.switch()


