"""Import paths from the public documentation, for the tracing layer."""

from ...lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
