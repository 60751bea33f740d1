"""Re-exports :class:`EditingTracer`, which keeps a block for later runs."""

from ..runtime.editing import EditingTracer

__all__ = ["EditingTracer"]
