"""Re-exports :class:`Invoker`, the tracer of one invoke."""

from ...runtime.invoker import Invoker

__all__ = ["Invoker"]
