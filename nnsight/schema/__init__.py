"""Import paths of the configuration."""

from ..lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
