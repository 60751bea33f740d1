"""Model families: root envoys, which load a model, prepare its inputs, and choose the driver of each trace."""

from ..lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
