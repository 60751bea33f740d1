"""Adapters of the package ``peft``, put into a model in place: an adapted module holds the original as ``base_layer``.

Paths of the model stay, so blocks written for the plain model run with an adapter. The modules of an adapter are made as those of the
model are: without weights in a lazy model, which :meth:`.TransformersModel._load` gets again with weights.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_NAME = "default"

#: What the names of saved weights begin with: where peft keeps the model.
_PREFIX = "base_model.model."


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("Adapters need the package `peft`: `pip install peft`.") from error
    return peft


def attach(module: torch.nn.Module, source: str | os.PathLike[str]) -> None:
    """Put the adapter of a repository or folder into ``module``; on the meta device without its weights.

    Raises:
        ValueError: If the adapter changes prompts and no modules, or does not fit. The module is as before then.
        ImportError: If ``peft`` is not installed.
    """
    peft = _peft()
    source, on_meta = os.fspath(source), any(weight.is_meta for weight in module.parameters())
    trained = {weight: weight.requires_grad for weight in module.parameters()}
    with torch.device("cpu"):
        config = peft.PeftConfig.from_pretrained(source)
        if config.is_prompt_learning:
            kind = config.peft_type.value
            raise ValueError(f"The adapter {source!r} ({kind}) is one of prompts, and changes no module: it is not supported.")
        saved = peft.load_peft_weights(source, device="cpu")
    weights = {name.removeprefix(_PREFIX): value for name, value in saved.items()}
    try:
        peft.inject_adapter_in_model(config, module, _NAME, low_cpu_mem_usage=on_meta)
        _check(source, peft.get_peft_model_state_dict(module, adapter_name=_NAME), weights)
        if not on_meta:
            peft.set_peft_model_state_dict(module, weights, _NAME)
    except (ValueError, RuntimeError, KeyError) as error:
        detach(module)
        raise ValueError(f"The adapter {source!r} does not fit this {type(module).__name__}: {error}") from error
    for layer in _adapted(module).values():
        layer.train(layer.base_layer.training if hasattr(layer, "base_layer") else layer.original_module.training)
    for weight, requires_grad in trained.items():
        weight.requires_grad_(requires_grad)  # peft freezes what it adapts


def detach(module: torch.nn.Module) -> None:
    """Take the adapter out of ``module``: the modules that it held are in its places again."""
    for path, layer in _adapted(module).items():
        parent, _, name = path.rpartition(".")
        original = layer.base_layer if hasattr(layer, "base_layer") else layer.original_module
        setattr(module.get_submodule(parent), name, original)
    vars(module).pop("peft_config", None)


def _adapted(module: torch.nn.Module) -> dict[str, Any]:
    """Return the outermost modules of adapters by their paths."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        is_below = any(path.startswith(f"{above}.") for above in found)
        if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not is_below:
            found[path] = part
    return found


def _check(source: str, expected: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """Raise if the names or shapes of saved weights are not those of the adapter's modules."""
    different = sorted(expected.keys() ^ weights.keys())
    if different:
        raise ValueError(f"its weights and the modules do not match at {', '.join(different[:5])}")
    for name, value in expected.items():
        if value.shape != weights[name].shape:
            raise ValueError(f"`{name}` is {tuple(weights[name].shape)}, and should be {tuple(value.shape)}")
