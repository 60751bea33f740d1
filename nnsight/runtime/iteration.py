"""Loops over the occurrences of locations, as in generation, where every module runs once per token.

``tracer.iter[...]`` yields step numbers and, before each, points the block at that occurrence: the first request of the
step waits for it, later ones take whatever comes next. It can be written as a ``for`` loop, or as a ``with`` block
that runs once for each step.

A loop without an end does not know how many steps there are. Each step but step 0 waits until something of it occurs, that is until
any location occurs for the time that the step says: nothing of the step can be missed before, and there would be nothing to ask for.
Where the model finishes first, the loop is ended, with a warning. A location that occurs more often than the one the body asks for
(a module that several layers share) begins a step, too; the body then waits for what does not come, and is ended there.
A step in which the body asks nothing of the model, as in ``if step == 2: ...``, waits for
the end of the call of the model in a generation, and elsewhere for the location that the loop waited for last; where there
is none, nothing tells how many steps there are, and the loop ends with a warning.
"""

from __future__ import annotations

import itertools
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
        ValueError: If no block is running; ``what`` names the call that needs one.
    """
    run = active_interleaver()
    if run is None or run.current is None:
        raise ValueError(f"{what} can be used inside the block of a trace only.")
    return run.current


class IteratorTracer(Tracer):
    """The steps selected by ``tracer.iter[...]``, as an iterable and as a context manager.

    Args:
        steps: An occurrence, a slice or a list of occurrences, counted from 0.

    Raises:
        ValueError: For negative steps: the number of occurrences is not known in advance.
    """

    must_be_entered = False  # it may be looped over instead

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = _numbers(steps)

    def __iter__(self) -> Iterator[int]:
        mediator = running_mediator("tracer.iter")
        before, visited = mediator.begin_loop()
        is_open = isinstance(self._steps, itertools.count)
        try:
            for step in self._steps:
                if is_open and step:
                    mediator.await_step(step)
                mediator.point_at(step)
                requests = mediator.requests
                yield step
                if mediator.requests > requests or not is_open:
                    continue
                if not mediator.keep_pace(step, visited):  # an endless loop that never waits for the model would never end
                    warnings.warn(
                        f"The loop over tracer.iter[...] has no end, and ended after step {step}, in which its body asked nothing "
                        "of the model: nothing tells how many steps there are. Bound the loop, as in `tracer.iter[:3]`.",
                        UserWarning,
                        stacklevel=2,
                    )
                    return
        finally:
            mediator.end_loop(before)

    def run(self) -> None:
        """Run the body of the ``with`` block once for each step; the target of ``as`` is the step."""
        assert self.info is not None and self.scope is not None and self._frame is not None
        for step in self:
            self.info.bind(self.scope, step, self._frame.f_globals)()


class Iterations:
    """``tracer.iter``: choose steps by indexing it."""

    def __getitem__(self, steps: Steps) -> IteratorTracer:
        return IteratorTracer(steps)

    def __iter__(self) -> Iterator[int]:
        # Python would else call __getitem__ with 0, 1, 2, … for ever.
        raise TypeError(
            "Choose the steps of tracer.iter by an index, as in `tracer.iter[:3]`; `tracer.iter[:]` is all."
        )


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
                f"tracer.iter cannot count from the end (got {number}): how many steps there will be is not known."
            )
