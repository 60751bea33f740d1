"""Re-exports :class:`Backend` and :class:`ExecutionBackend`."""

from ...tracing import Backend, ExecutionBackend

__all__ = ["Backend", "ExecutionBackend"]
