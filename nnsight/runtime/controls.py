"""Methods of tracers by which a block controls its run."""

from __future__ import annotations

from typing import Self

from .errors import EarlyStopException
from .iteration import Iterations, IteratorTracer, running_mediator


class RunControls:
    """Methods of tracers whose block runs beside a model."""

    def stop(self) -> None:
        """End the run behind this location: the rest of the model does not run, and neither does the rest of this block.

        Other blocks that wait for the same occurrence get it first. One that waits for a later location gets an
        :class:`OutOfOrderError`, in a loop over steps a warning.
        """
        running_mediator("tracer.stop()")
        raise EarlyStopException()

    @property
    def iter(self) -> Iterations:
        """Choose occurrences (steps of a generation) to loop over: ``for step in tracer.iter[:3]``."""
        return Iterations()

    def all(self) -> IteratorTracer:
        """Loop over all occurrences; the same as ``tracer.iter[:]``."""
        return self.iter[:]

    def next(self, steps: int = 1) -> Self:
        """Let later requests of this block ask for the occurrence ``steps`` further on."""
        running_mediator("tracer.next()").advance(steps)
        return self
