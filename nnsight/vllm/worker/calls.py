"""Calls of the engine's modules by a block, on values of its own, as in ``model.lm_head(model.model.norm(hidden))``.

Such a call passes no location, and skips the taps, captures and tables of the module. vLLM applies a head only inside of its sampler. Here
a head returns logits, ``[tokens, vocabulary]``, as in transformers, without the scale and the cap that some models apply to them.

On several devices, all ranks make the call if the weights are spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .requests import RequestRun

#: The error message for a call of a module in which the other devices would not take part.
SPREAD = (
    "A block cannot call a module whose weights are spread over {devices} devices here: the block runs in one process, and the "
    "other processes do not listen yet. Call the module after the block has got a value of the model in this step, such as "
    "`layer.output`; or make the model with `tensor_parallel_size=1`."
)


def called(run: RequestRun, path: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module at ``path`` on values of a block of ``run``, and return its output."""
    devices = max(getattr(part, "tp_size", 1) for part in module.modules())
    if devices == 1:
        return apply(module, args, kwargs)
    if run.call_together is None:
        raise NotImplementedError(SPREAD.format(devices=devices))
    return run.call_together(path, args, kwargs)


def apply(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a module, or this device's part of it."""
    kind = untapped_class(module)
    if is_head(kind) and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return _logits(module, *args, **kwargs)
    return kind.forward(module, *args, **kwargs) if kind is not type(module) else module.forward(*args, **kwargs)


def untapped_class(module: torch.nn.Module) -> Any:
    """Return the class that ``module`` had before it was tapped."""
    return getattr(type(module), "nnsight_base", type(module))


def is_head(kind: Any) -> bool:
    """Whether modules of this class have a row of weights for each token of the vocabulary: heads, and embeddings usable as heads."""
    return any(base.__name__ == "VocabParallelEmbedding" for base in kind.__mro__)


def _logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    from vllm.distributed import tensor_model_parallel_all_gather

    logits = head.quant_method.apply(head, hidden.to(head.weight.dtype), bias=getattr(head, "bias", None))
    if head.tp_size > 1:
        logits = tensor_model_parallel_all_gather(logits)
    made: torch.Tensor = logits[..., : head.org_vocab_size]
    return made
