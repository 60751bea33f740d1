"""Models of transformers, for every task of ``transformers.pipeline``, with its preprocessors and inputs."""

from .model import TransformersModel

__all__ = ["TransformersModel"]
