"""Re-exports :func:`wrap_exception` and :class:`WithBlockNotFoundError`."""

from ...tracing import WithBlockNotFoundError, wrap_exception

__all__ = ["WithBlockNotFoundError", "wrap_exception"]
