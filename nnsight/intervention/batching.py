"""Re-exports what a trace asks of a model about inputs, and the rows of a block."""

from ..runtime.batching import BatchGroup
from ..runtime.tracer import Batchable

__all__ = ["BatchGroup", "Batchable"]
