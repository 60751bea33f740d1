"""Pipelines of `diffusers` as models: :class:`DiffusionModel`."""

from .model import DiffusionModel
from .module import Diffuser

__all__ = ["Diffuser", "DiffusionModel"]
