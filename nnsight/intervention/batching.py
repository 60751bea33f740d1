"""Re-exports the protocol of models that prepare and batch inputs, the rows of a block, and the batcher for a user's own drivers."""

from ..compat.interleaver import Batcher
from ..runtime.rows.batching import BatchGroup
from ..runtime.tracer import Batchable

__all__ = ["BatchGroup", "Batchable", "Batcher"]
