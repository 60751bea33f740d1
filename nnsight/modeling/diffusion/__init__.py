"""Models that are pipelines of `diffusers`: :class:`DiffusionModel`."""

from .model import DiffusionModel
from .module import Diffuser

__all__ = ["Diffuser", "DiffusionModel"]
