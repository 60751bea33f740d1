"""Re-exports what ``tracer.cache()`` returns, and what is found in it."""

from ..runtime.cache import Cache, CacheView
from ..runtime.cache import CacheEntry as Entry

__all__ = ["Cache", "CacheView", "Entry"]
