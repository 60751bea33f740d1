"""Models in a vLLM engine, traced request by request.

vLLM runs many requests at once. Their tokens lie side by side in one flat batch, which changes with every step of the engine. A block is
written against one request, so each request is a run of its own, with its own count of occurrences. Each step tells which rows of the batch
belong to which request. :mod:`~nnsight.vllm.worker` runs inside vLLM. :mod:`~nnsight.vllm.steering` has the edits that are parameters of
the compiled graph. :mod:`~nnsight.vllm.serving` is vLLM's own server, for steered requests.

This package imports vLLM when the first model is created.
"""

from .model import VLLM

__all__ = ["VLLM"]
