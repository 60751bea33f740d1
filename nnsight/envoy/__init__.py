"""The user's view of a model: an envoy for each module, and ``source`` for the operations inside a function."""

from .envoy import Envoy

__all__ = ["Envoy"]
