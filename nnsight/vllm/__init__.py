"""Models in a vLLM engine, traced request by request.

vLLM runs many requests at once: their tokens lie side by side in one flat batch that changes with every step of the engine. A block is
written against one request, so each request is a run of its own, with its own count of occurrences. The batch of a step only says which
rows belong to whom.

* :mod:`~nnsight.vllm.model` is the root envoy, :mod:`~nnsight.vllm.request_tracing` its traces, :mod:`~nnsight.vllm.asynchronous` those
  that are awaited;
* :mod:`~nnsight.vllm.engine` is an engine in this process and the requests in it, :mod:`~nnsight.vllm.samples` the requests for several
  samples, :mod:`~nnsight.vllm.prompts` what users pass, :mod:`~nnsight.vllm.skeleton` the model before its engine runs;
* :mod:`~nnsight.vllm.worker` is what runs inside vLLM: the steps of the model, and which rows of a step are whose;
* :mod:`~nnsight.vllm.steering` has the edits that are parameters of the compiled graph, so that no block has to run at a layer;
* :mod:`~nnsight.vllm.serving` is vLLM's own server, for requests that are steered.

vLLM itself is imported when a model is made, not with this package.
"""

from .model import VLLM

__all__ = ["VLLM"]
