"""Modules of the engine that a block calls on values of its own, as in ``model.lm_head(model.model.norm(hidden))``.

A call passes no location, and leaves out what a layout has put into the module. A head, which vLLM applies inside of its sampler
only, makes logits, ``[tokens, vocabulary]``, as in transformers: without the scale and the cap that some models apply to them.

On several devices all ranks make the call if the weights are spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .requests import RequestRun

#: Why a module cannot be called.
SPREAD = (
    "A block cannot call a module whose weights are spread over {devices} devices here: the block runs in one process, and the "
    "others would not answer. Call it after the block has got a value of the model in this step, such as `layer.output`; or make "
    "the model with `tensor_parallel_size=1`."
)


def called(run: RequestRun, path: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the module at ``path`` makes of values of a block of ``run``."""
    devices = max(getattr(part, "tp_size", 1) for part in module.modules())
    if devices == 1:
        return apply(module, args, kwargs)
    if run.call_together is None:
        raise NotImplementedError(SPREAD.format(devices=devices))
    return run.call_together(path, args, kwargs)


def apply(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a module, or the part of it that is on this device."""
    kind = kind_of(module)
    if is_head(kind) and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return _logits(module, *args, **kwargs)
    return kind.forward(module, *args, **kwargs) if kind is not type(module) else module.forward(*args, **kwargs)


def kind_of(module: torch.nn.Module) -> Any:
    """Return the class of ``module`` before it was tapped."""
    return getattr(type(module), "nnsight_base", type(module))


def is_head(kind: Any) -> bool:
    """Whether modules of this class have a row of weights for each token: heads, and embeddings that may be heads too."""
    return any(base.__name__ == "VocabParallelEmbedding" for base in kind.__mro__)


def _logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    from vllm.distributed import tensor_model_parallel_all_gather

    logits = head.quant_method.apply(head, hidden.to(head.weight.dtype), bias=getattr(head, "bias", None))
    if head.tp_size > 1:
        logits = tensor_model_parallel_all_gather(logits)
    made: torch.Tensor = logits[..., : head.org_vocab_size]
    return made
