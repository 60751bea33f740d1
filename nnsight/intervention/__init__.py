"""Import paths of the public documentation; each module here only re-exports what lives elsewhere."""

from ..lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
