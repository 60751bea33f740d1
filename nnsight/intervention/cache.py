"""Re-exports the result of ``tracer.cache()``, its views and its entries."""

from ..runtime.cache import Cache, CacheView
from ..runtime.cache import CacheEntry as Entry

__all__ = ["Cache", "CacheView", "Entry"]
