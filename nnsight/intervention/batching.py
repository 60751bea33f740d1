"""Re-exports what a trace asks of a model about inputs, the rows of a block, and a look at them for drivers of one's own."""

from ..compat.interleaver import Batcher
from ..runtime.rows.batching import BatchGroup
from ..runtime.tracer import Batchable

__all__ = ["BatchGroup", "Batchable", "Batcher"]
