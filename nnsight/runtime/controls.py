"""Methods of tracers that let a block control its run: stop it, and choose occurrences."""

from __future__ import annotations

from typing import Self

from .errors import EarlyStopException
from .iteration import Iterations, IteratorTracer, running_mediator


class RunControls:
    """Methods of tracers whose block runs together with a model."""

    def stop(self) -> None:
        """End the run after this location: neither the rest of the model nor the rest of this block runs.

        Other blocks that wait for the same occurrence still get it. A block that waits for a later location gets an
        :class:`OutOfOrderError`, or a warning if it is in a loop over steps.
        """
        running_mediator("tracer.stop()")
        raise EarlyStopException()

    @property
    def iter(self) -> Iterations:
        """The occurrences (steps of a generation) to loop over, chosen by an index: ``for step in tracer.iter[:3]``."""
        return Iterations()

    def all(self) -> IteratorTracer:
        """Return a loop over all occurrences; the same as ``tracer.iter[:]``."""
        return self.iter[:]

    def next(self, steps: int = 1) -> Self:
        """Let later requests of this block ask for a later occurrence, ``steps`` (0 or more) after the current one; returns this tracer."""
        running_mediator("tracer.next()").advance(steps)
        return self
