"""Loops over the occurrences of locations, as in generation, where every module runs once per token.

``tracer.iter[...]`` yields step numbers. Before each step it sets the occurrence that the block asks for: the first request of step ``n``
waits for occurrence ``n``, and later requests of the step take the next occurrence. It is a ``for`` loop, or a ``with`` block that runs
once for each step.

A loop without an end, such as ``tracer.iter[:]``, does not know how many steps there are. So each step ``n > 0`` waits until any location
has its occurrence ``n``. If the model finishes first, the loop ends with a warning. Some modules occur more often than the model has steps,
for instance a module that several layers share. They begin a step too; the block then ends where its body waits.
If the body of a step requests nothing, as in ``if step == 2: ...``, the step waits for the model's call to end in a generation, and
elsewhere for the location of the latest request. If there is none, the loop ends with a warning.
"""

from __future__ import annotations

import itertools
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from ..tracing import Tracer
from .interleaver import active_interleaver
from .mediator import Mediator

Steps = int | slice | list[int] | tuple[int, ...] | range


def running_mediator(what: str) -> Mediator:
    """Return the mediator whose block is running.

    Raises:
        ValueError: If no block is running. The message names ``what``, the call that needs one.
    """
    run = active_interleaver()
    if run is None or run.current is None:
        raise ValueError(f"{what} can be used inside the block of a trace only.")
    return run.current


class IteratorTracer(Tracer):
    """The steps selected by ``tracer.iter[...]``, counted from 0, as an iterable and as a context manager."""

    never_entered = (
        "tracer.iter[...] or tracer.all() without a loop has no effect: the block still edits the first step only. Write "
        "`for step in tracer.all():`, with the edits of each step as its body."
    )

    def __init__(self, steps: Steps) -> None:
        self._steps = _numbers(steps)
        self._step: int | None = None
        super().__init__()
        self._range: Any = self._steps
        if isinstance(self._steps, itertools.count) and isinstance(steps, slice):
            self._range = range(steps.start or 0, sys.maxsize, steps.step or 1)

    def __iter__(self) -> Iterator[int]:
        self._entered = True
        return self._each()

    def _each(self) -> Iterator[int]:
        mediator = running_mediator("tracer.iter")
        before, visited = begin_loop(mediator, self._range), mediator.visited
        is_open = isinstance(self._steps, itertools.count)
        try:
            for step in self._steps:
                if step <= mediator.made:
                    continue
                if is_open and step:
                    await_step(mediator, step)
                point_at(mediator, step)
                requests = mediator.requests
                yield step
                if mediator.requests > requests or not is_open:
                    continue
                if not keep_pace(mediator, step, visited):  # a loop that never waits for the model would run forever
                    warnings.warn(
                        f"The loop over tracer.iter[...] has no bound, and ended after step {step}, in which its body asked nothing "
                        "of the model: without requests, the number of steps is not known. Bound the loop, as in `tracer.iter[:3]`.",
                        UserWarning,
                        stacklevel=2,
                    )
                    return
        finally:
            end_loop(mediator, before)

    def run(self) -> None:
        """Run the body of the ``with`` block once for each step; ``as`` binds the number of the step."""
        assert self.scope is not None and self._frame is not None
        try:
            for step in self:
                self._step = step
                self.compile()()
        finally:
            if self._step is not None:
                self._bind(self._frame, self.scope, None, every=True)

    @property
    def target_value(self) -> int | None:
        """The number of the step; ``None`` before the first one."""
        return self._step


class Iterations:
    """``tracer.iter``: an index chooses the steps."""

    def __getitem__(self, steps: Steps) -> IteratorTracer:
        return IteratorTracer(steps)

    def __iter__(self) -> Iterator[int]:
        # Without this method, Python would call __getitem__ with 0, 1, 2, … forever.
        raise TypeError(
            "Choose the steps of tracer.iter by an index, as in `tracer.iter[:3]`; `tracer.iter[:]` is all steps."
        )


# When dynamo traces a loop of an edit inside a function that a user compiles, it calls the functions below instead of tracing them.


def begin_loop(mediator: Mediator, steps: Any) -> int | None:
    """Note that a block enters a loop over the occurrences ``steps``; return the ``iteration`` to restore with :func:`end_loop`."""
    mediator.loops += 1
    if mediator.loops == 1:
        mediator.steps, mediator.made = steps, -1
    return mediator.iteration


def point_at(mediator: Mediator, step: int) -> None:
    """Let the next request of a block ask for the occurrence ``step``."""
    mediator.iteration = step


def end_loop(mediator: Mediator, before: int | None) -> None:
    """Note that a block has left a loop; its requests ask for the occurrence ``before`` again."""
    mediator.loops -= 1
    mediator.iteration = before


def await_step(mediator: Mediator, step: int) -> None:
    """Let the model run until ``step`` begins.

    The location ``surplus`` of the tracer, which occurs more often than there are steps, begins a step only if the code mentions it.
    """
    run, location = mediator.interleaver, mediator.disregarded
    assert run is not None
    if run.recorder is not None or not getattr(run.tracer, "awaits_steps", False) or (run.at is not None and run.at[1] >= step):
        return
    if location is not None and _is_mentioned(location.split(".")[-2]):
        mediator.disregarded = None
    mediator.wait_for_step(step)


def _is_mentioned(name: str) -> bool:
    """Whether code on the call stack mentions ``name``."""
    return any(name in frame.f_code.co_names for frame, _ in traceback.walk_stack(sys._getframe(1)))


def keep_pace(mediator: Mediator, step: int, visited: object) -> bool:
    """Let the model run to the end of ``step``, in which the block has requested nothing.

    Returns whether the end is known. It is known in a generation, and if the loop has waited for a location since the visit ``visited``.
    """
    run = mediator.interleaver
    assert run is not None
    location = getattr(run.tracer, "pace", None)
    if location is None and mediator.visited is not visited and mediator.visited is not None:
        location = mediator.visited[0]
    if location is None or run.recorder is not None:
        return False
    if run.counts.get(location, 0) <= step:
        mediator.request(location)
    return True


def _numbers(steps: Steps) -> Iterable[int]:
    if isinstance(steps, slice):
        parts = (0 if steps.start is None else steps.start, steps.stop, 1 if steps.step is None else steps.step)
        _check(part for part in parts if part is not None)
        if parts[2] == 0:
            raise ValueError("The step of tracer.iter[...] cannot be zero.")
        return itertools.count(parts[0], parts[2]) if parts[1] is None else range(*parts)
    if not isinstance(steps, (int, list, tuple, range)):
        raise TypeError(f"tracer.iter takes an int, a slice or a list of ints, not {type(steps).__name__}.")
    chosen = [steps] if isinstance(steps, int) else list(steps)
    _check(chosen)
    return chosen


def _check(numbers: Iterable[Any]) -> None:
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"tracer.iter takes ints, not {type(number).__name__}.")
        if number < 0:
            raise ValueError(
                f"tracer.iter cannot count from the end (got {number}): the number of steps is not known in advance."
            )
