"""Re-exports :class:`ExecutionBackend`."""

from ...tracing import ExecutionBackend

__all__ = ["ExecutionBackend"]
