"""Re-exports :class:`BatchGroup`, the rows of a block."""

from ..runtime.batching import BatchGroup

__all__ = ["BatchGroup"]
