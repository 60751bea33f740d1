"""The documented import path of :class:`nnsight.vllm.VLLM`."""

from ..vllm import VLLM

__all__ = ["VLLM"]
