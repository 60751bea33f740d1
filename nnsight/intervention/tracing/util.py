"""Re-exports :func:`wrap_exception`."""

from ...tracing import WithBlockNotFoundError, wrap_exception

__all__ = ["WithBlockNotFoundError", "wrap_exception"]
