"""Import paths from the public documentation. The modules here re-export classes and functions from other packages."""

from ..lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
