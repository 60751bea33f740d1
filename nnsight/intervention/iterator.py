"""Re-exports the loop over occurrences."""

from ..runtime.iteration import Iterations, IteratorTracer

__all__ = ["Iterations", "IteratorTracer"]
