"""The layers of a model, whose outputs are the hidden states that steering vectors change."""

from __future__ import annotations

from typing import Any

import torch

from ..envoy.envoy import Envoy
from ..modeling.base import NNsight


def layers_path(model: NNsight) -> str:
    """Return the path of the list of layers, such as ``"transformer.h"``: the outermost ``ModuleList`` with the most parameters.

    Raises:
        ValueError: If there is no list, or several of similar size, such as those of an encoder and a decoder.
    """
    found: dict[str, int] = {}
    for path, module in model._module.named_modules():
        inside_another = any(path.startswith(f"{other}.") for other in found)
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1 and not inside_another:
            found[path] = sum(parameter.numel() for parameter in module.parameters())
    largest = sorted(found, key=found.__getitem__, reverse=True)
    if not largest:
        raise ValueError(f"{type(model._module).__name__} has no list of layers: give its path with `at=`, as in `at='blocks'`.")
    if len(largest) > 1 and found[largest[1]] > found[largest[0]] / 2:
        raise ValueError(f"{type(model._module).__name__} has several lists of layers, {', '.join(largest)}: choose one with `at=`.")
    return largest[0]


def count_of(model: NNsight, at: str) -> int:
    """Return the number of layers in the list at the path ``at``; raise ``ValueError`` if there is no list."""
    try:
        return len(model._module.get_submodule(at))  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        raise ValueError(f"The model has no list of layers at {at!r}: choose another path with `at=`.") from None


def device_of(model: NNsight, path: str) -> torch.device:
    """Return the device of a layer; the CPU if the layer has no weights, or they are not loaded yet."""
    device = next((parameter.device for parameter in model._module.get_submodule(path).parameters()), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def hidden_of(output: Any) -> torch.Tensor:
    """Return the hidden state, ``[batch, positions, hidden]``, in the output of a layer.

    Raises:
        TypeError: If the output is neither a tensor nor a tuple that begins with one.
    """
    hidden = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(hidden, torch.Tensor):
        kind = type(hidden).__name__
        raise TypeError(f"The layer returns a {kind}. To be steered, a layer must return a hidden state, or a tuple that begins with it.")
    return hidden


def with_hidden(output: Any, hidden: torch.Tensor) -> Any:
    """Return the output of a layer with ``hidden`` as its hidden state."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def read(layer: Envoy) -> Any:
    """Return the output of a layer, in a block. The layer may have a child called ``output``, as in BERT."""
    return getattr(layer, _name_of_output(layer))


def write(layer: Envoy, value: Any) -> None:
    """Replace the output of a layer by ``value``, in a block."""
    setattr(layer, _name_of_output(layer), value)


def _name_of_output(layer: Envoy) -> str:
    return "nns_output" if hasattr(type(layer), "nns_output") else "output"
