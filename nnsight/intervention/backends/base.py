"""Re-exports :class:`Backend`."""

from ...tracing import Backend, ExecutionBackend

__all__ = ["Backend", "ExecutionBackend"]
