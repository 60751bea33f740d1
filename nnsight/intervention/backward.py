"""Re-exports :class:`BackwardsTracer`, a block that runs along with a backward pass."""

from ..runtime.gradients import BackwardsTracer

__all__ = ["BackwardsTracer"]
