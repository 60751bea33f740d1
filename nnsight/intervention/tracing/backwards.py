"""Re-exports :class:`BackwardsTracer`, which runs a block during a backward pass."""

from ...runtime.gradients import BackwardsTracer

__all__ = ["BackwardsTracer"]
