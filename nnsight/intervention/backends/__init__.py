"""Import paths from the public documentation, for backends."""

from ...lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
