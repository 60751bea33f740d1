"""Re-exports :class:`Barrier`, at which invokes wait for each other."""

from ..runtime.invoker import Barrier

__all__ = ["Barrier"]
