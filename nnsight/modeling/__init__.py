"""Model families: what a root envoy adds to the tree, loading, inputs, and the choice of how to run."""

from ..lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
