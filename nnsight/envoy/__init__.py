"""What users see of a model: an envoy for each module, and the operations inside a function as its ``source``."""

from .envoy import Envoy

__all__ = ["Envoy"]
