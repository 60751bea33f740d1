"""Files of steering vectors.

A *vector* stands for one property, such as a mood. It has a direction of the residual stream for each of some layers, or one for any layer.
Layers are counted from 0, and a direction belongs to the hidden state after its layer. Control vectors of llama.cpp and repeng use the same
numbers: in their files, ``direction.N`` is the direction for layer ``N``.

Two formats are read and written. Both are tables of numbers that run no code:

* safetensors: a tensor whose key is ``N`` or ends in ``.N`` is the direction for layer ``N``; one with another key is for any layer. A
  file can have several vectors, with their names as prefixes of the keys: ``happy.3``, ``happy.4``, ``sad.3``.
* GGUF with the architecture ``controlvector``, see :mod:`~nnsight.steering.gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from .gguf import MAGIC, control_vector

#: The directions of a vector by the number of their layer; the key ``None`` stands for any layer.
Directions = dict[int | None, torch.Tensor]

_KEY = re.compile(r"(?:(?P<group>.+)\.)?(?P<layer>[0-9]+)")


def parse_vector(data: bytes, source: str, name: str | None = None) -> Directions:
    """Return the vector in the content of a file, in float32; ``name`` chooses one of several vectors in the file.

    Raises ``ImportError`` for a GGUF file if the package ``gguf`` is not installed, and ``ValueError`` if the content is not valid. The
    message names ``source`` and the key.
    """
    tensors = control_vector(data, source) if data[:4] == MAGIC else _safetensors(data, source)
    groups: dict[str, dict[int | None, tuple[str, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        group, layer = (found["group"] or "", int(found["layer"])) if found else (key, None)
        directions = groups.setdefault(group, {})
        if layer in directions:
            raise ValueError(f"{source}: the keys {directions[layer][0]!r} and {key!r} are both for layer {layer}.")
        directions[layer] = key, tensor
    if not groups:
        raise ValueError(f"{source}: the file has no tensors.")
    if len(groups) > 1 and name not in groups:
        raise ValueError(
            f"{source}: the file has several vectors, {', '.join(map(repr, sorted(groups)))}, and none has the name {name!r}. Load one "
            "of them by its name."
        )
    chosen = groups[name] if name in groups else next(iter(groups.values()))
    return directions_of({layer: direction_of(tensor, f"{source}: {key!r}") for layer, (key, tensor) in chosen.items()}, source)


def _safetensors(data: bytes, source: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(data))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{source}: neither a safetensors file nor a GGUF file ({type(error).__name__}: {error}).") from error


def directions_of(given: Mapping[Any, Any], what: str) -> Directions:
    """Return directions on the CPU, in float32, sorted by layer; raise ``TypeError`` or ``ValueError`` if they are not valid."""
    for layer in given:
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
            raise TypeError(f"{what}: layers are numbers from 0, not {layer!r}.")
    places = {layer: what if layer is None else f"{what}, layer {layer}" for layer in sorted(given, key=lambda layer: layer or 0)}
    made = {layer: direction_of(given[layer], place) for layer, place in places.items()}
    sizes = {len(direction) for direction in made.values()}
    if len(sizes) != 1:
        raise ValueError(f"{what}: the directions have different sizes, {sorted(sizes)}." if sizes else f"{what} has no directions.")
    return made


def direction_of(tensor: Any, what: str) -> torch.Tensor:
    """Return ``tensor`` as a direction, float32 on the CPU; raise ``TypeError`` or ``ValueError`` if it is not valid."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}, and a direction is a tensor [hidden].")
    if tensor.dim() != 1 or not len(tensor):
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, and a direction has shape [hidden]: give one tensor for each layer, with the layer's "
            "number as its key."
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{what} has dtype {tensor.dtype}, and a direction needs a floating-point dtype.")
    with torch.inference_mode(False):
        direction = tensor.detach().to("cpu", torch.float32, copy=True)
    if not torch.isfinite(direction).all():
        raise ValueError(f"{what} has values that are not finite.")
    return direction
