"""Adapters of the package ``peft``, attached to a model in place. An adapted module has the original as ``base_layer``.

Paths in the model do not change, so blocks for the plain model also run with an adapter. In a lazy model, the modules of the adapter have
no weights either; :meth:`.TransformersModel._load` attaches the adapter again, with weights.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_NAME = "default"

#: Prefix of the names of saved weights: the path of the model inside peft's wrapper.
_PREFIX = "base_model.model."


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("Adapters need the package `peft`: `pip install peft`.") from error
    return peft


def attach(module: torch.nn.Module, source: str | os.PathLike[str]) -> None:
    """Attach the adapter of a repository or folder to ``module``; without its weights if the module is on the meta device.

    Raises:
        ValueError: If the adapter changes prompts instead of modules, or does not fit. The module is then unchanged.
        ImportError: If ``peft`` is not installed.
    """
    peft = _peft()
    source, on_meta = os.fspath(source), any(weight.is_meta for weight in module.parameters())
    trained = {weight: weight.requires_grad for weight in module.parameters()}
    with torch.device("cpu"):
        config = peft.PeftConfig.from_pretrained(source)
        if config.is_prompt_learning:
            kind = config.peft_type.value
            raise ValueError(f"The adapter {source!r} ({kind}) changes prompts and no modules: such adapters are not supported.")
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
        weight.requires_grad_(requires_grad)  # peft freezes the weights of the model


def detach(module: torch.nn.Module) -> None:
    """Remove the adapter from ``module``, and put the original modules back in place."""
    for path, layer in _adapted(module).items():
        parent, _, name = path.rpartition(".")
        original = layer.base_layer if hasattr(layer, "base_layer") else layer.original_module
        setattr(module.get_submodule(parent), name, original)
    vars(module).pop("peft_config", None)


def _adapted(module: torch.nn.Module) -> dict[str, Any]:
    """Return the outermost modules of adapters, by path."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        is_below = any(path.startswith(f"{above}.") for above in found)
        if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not is_below:
            found[path] = part
    return found


def _check(source: str, expected: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` if the names or shapes of saved ``weights`` are not those ``expected`` by the adapter's modules."""
    different = sorted(expected.keys() ^ weights.keys())
    if different:
        raise ValueError(f"the saved weights and the adapted modules do not match at {', '.join(different[:5])}")
    for name, value in expected.items():
        if value.shape != weights[name].shape:
            raise ValueError(f"`{name}` has shape {tuple(weights[name].shape)}, and should have {tuple(value.shape)}")
