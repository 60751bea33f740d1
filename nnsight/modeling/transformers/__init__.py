"""Models of transformers: every task of ``transformers.pipeline``, its preprocessors and its inputs."""

from .model import TransformersModel

__all__ = ["TransformersModel"]
