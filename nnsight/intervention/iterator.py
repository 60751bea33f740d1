"""Re-exports the loop over occurrences: :class:`IteratorTracer` and :class:`Iterations`."""

from ..runtime.iteration import Iterations, IteratorTracer

__all__ = ["Iterations", "IteratorTracer"]
