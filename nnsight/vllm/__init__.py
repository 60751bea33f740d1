"""Models in a vLLM engine, traced request by request.

vLLM runs many requests at once: their tokens lie side by side in one flat batch that changes with every step of the engine. A block is
written against one request, so each request is a run of its own, with its own count of occurrences. The batch of a step only says which
rows belong to whom. :mod:`~nnsight.vllm.worker` is what runs inside vLLM; :mod:`~nnsight.vllm.steering` has the edits that are parameters
of the compiled graph; :mod:`~nnsight.vllm.serving` is vLLM's own server, for requests that are steered.

vLLM itself is imported when a model is made, not with this package.
"""

from .model import VLLM

__all__ = ["VLLM"]
