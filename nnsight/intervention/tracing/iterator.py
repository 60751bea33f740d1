"""Re-exports :class:`IteratorTracer`, the loop over occurrences."""

from ...runtime.iteration import IteratorTracer

__all__ = ["IteratorTracer"]
