"""Directions for steering, by name, from files and from tensors.

A *vector* is one idea, such as a mood: a direction of the residual stream for each of some layers, or a single direction for any layer.
Layers are counted from 0, and a direction belongs to the hidden state after its layer. Control vectors of llama.cpp and repeng are counted
in the same way: in their files ``direction.N`` is that of layer ``N``.

Two formats are read. Both are tables of numbers that run no code:

* safetensors: a key ``N``, or one that ends in ``.N``, is the direction of layer ``N``; a sole tensor is one for any layer. A file may
  have several vectors, whose keys begin with their names: ``happy.3``, ``happy.4``, ``sad.3``.
* GGUF with the architecture ``controlvector``, see :mod:`~nnsight.vllm.steering.gguf`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .gguf import MAGIC, control_vector

#: The directions of a vector by the number of their layer; the one under ``None`` is for any layer.
Vector = dict[int | None, torch.Tensor]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_KEY = re.compile(r"(?:(?P<group>.+)\.)?(?P<layer>\d+)")


def parse_vector(data: bytes, source: str, name: str | None = None) -> Vector:
    """Return the vector in the content of a file, in float32; ``name`` says which of several vectors in the file.

    A file that is not right raises ``ValueError``, which names ``source`` and key, and one in GGUF without the package ``gguf``
    ``ImportError``.
    """
    tensors = control_vector(data, source) if data[:4] == MAGIC else _safetensors(data, source)
    groups: dict[str, dict[int | None, tuple[str, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        group, layer = (found["group"] or "", int(found["layer"])) if found else (key, None)
        groups.setdefault(group, {})[layer] = key, tensor
    if not groups:
        raise ValueError(f"{source}: the file has no tensors.")
    if len(groups) > 1 and name not in groups:
        raise ValueError(
            f"{source}: the file has several vectors, {', '.join(map(repr, sorted(groups)))}, and none is called {name!r}. Load one by "
            "its name."
        )
    chosen = groups[name] if name in groups else next(iter(groups.values()))
    return {layer: _direction(tensor, f"{source}: {key!r}") for layer, (key, tensor) in sorted(chosen.items(), key=_order)}


def _order(item: tuple[int | None, Any]) -> int:
    return -1 if item[0] is None else item[0]


def _safetensors(data: bytes, source: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return dict(load(data))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{source}: neither a safetensors file nor one in GGUF ({type(error).__name__}: {error}).") from error


def _direction(tensor: Any, what: str) -> torch.Tensor:
    """Return ``tensor`` as a direction on the CPU, in float32."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}, and a direction is a tensor [hidden].")
    if tensor.dim() != 1 or not len(tensor):
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, and a direction is [hidden]: keep one tensor for each layer, under the "
            "layer's number."
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{what} has dtype {tensor.dtype}, and a direction has floating point numbers.")
    with torch.inference_mode(False):
        direction = tensor.detach().to("cpu", torch.float32, copy=True)
    if not torch.isfinite(direction).all():
        raise ValueError(f"{what} has values that are not finite.")
    return direction


class Vectors(Mapping[str, Vector]):
    """The vectors that requests name; ``hidden`` are the channels of the model's hidden state, ``None`` if they are not known yet."""

    def __init__(self, hidden: int | None = None) -> None:
        self.hidden = hidden
        self._vectors: dict[str, Vector] = {}

    def load(self, path: str | os.PathLike[str], name: str | None = None) -> str:
        """Register the vector in a file and return its name.

        Args:
            path: A safetensors file or a control vector in GGUF.
            name: Its name, and which of several vectors in the file; by default the name of the file, without its suffix.

        Raises:
            ImportError: If the file is in GGUF, and the package ``gguf`` is not installed.
            OSError: If the file cannot be read.
            ValueError: If the name is taken, or the file is not right.
        """
        return self.add_parsed(Path(path).stem if name is None else name, Path(path).read_bytes(), str(path))

    def add(self, name: str, value: torch.Tensor | Mapping[int, torch.Tensor]) -> str:
        """Register a direction for any layer, ``[hidden]``, or one for each of some layers, by their numbers; return its name.

        Raises:
            TypeError: If ``value`` is neither.
            ValueError: If the name is taken, or a direction has another size, dtype or values that are not finite.
        """
        given: dict[Any, Any] = dict(value) if isinstance(value, Mapping) else {None: value}
        for layer in given:
            if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
                raise TypeError(f"vector {name!r}: layers are numbers from 0, not {layer!r}.")
        if not given:
            raise ValueError(f"vector {name!r} has no directions.")
        made: Vector = {
            layer: _direction(tensor, f"vector {name!r}" + ("" if layer is None else f", layer {layer}"))
            for layer, tensor in sorted(given.items(), key=_order)
        }
        return self._add(name, made, f"vector {name!r}")

    def add_parsed(self, name: str, data: bytes, source: str) -> str:
        """Register the vector in the content of a file, which messages call ``source``; see :func:`parse_vector`."""
        return self._add(name, parse_vector(data, source, name), source)

    def _add(self, name: str, vector: Vector, source: str) -> str:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a vector: names have letters, digits and '_', '-', '.'.")
        if name in self._vectors:
            raise ValueError(f"There is a vector {name!r} already: remove it first, or choose another name.")
        sizes = {len(direction) for direction in vector.values()}
        if len(sizes) > 1:
            raise ValueError(f"{source}: the directions have different sizes, {', '.join(map(str, sorted(sizes)))}.")
        if self.hidden is not None and sizes != {self.hidden}:
            raise ValueError(_SIZE.format(what=source, size=sizes.pop(), hidden=self.hidden))
        self._vectors[name] = vector
        return name

    def fit(self, hidden: int) -> None:
        """Set the channels of the model's hidden state, and raise ``ValueError`` if a registered vector has another size."""
        self.hidden = hidden
        for name, vector in self._vectors.items():
            self.direction(name, next(iter(vector)) or 0, hidden)

    def remove(self, name: str) -> None:
        """Forget a vector. Requests that run go on with its directions. An unknown name raises ``KeyError``."""
        self[name]  # raises if there is none
        del self._vectors[name]

    def __getitem__(self, name: str) -> Vector:
        if name not in self._vectors:
            raise KeyError(f"There is no vector {name!r}. Registered: {', '.join(self._vectors) or 'none'}.")
        return self._vectors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {_layers_of(vector)}" for name, vector in self._vectors.items()) or "no vectors"

    def layers(self, name: str) -> list[int] | None:
        """Return the layers for which a vector has a direction; ``None`` if it has one for any. An unknown name raises ``ValueError``."""
        vector = self._found(name)
        return None if None in vector else [layer for layer in vector if layer is not None]

    def direction(self, name: str, layer: int, hidden: int) -> torch.Tensor:
        """Return the direction of a vector for a layer, float32 ``[hidden]``; raise ``ValueError`` if there is none of this size."""
        vector = self._found(name)
        direction = vector.get(layer, vector.get(None))
        if direction is None:
            raise ValueError(f"The vector {name!r} has no direction for layer {layer}, but for {_layers_of(vector)}.")
        if len(direction) != hidden:
            raise ValueError(_SIZE.format(what=f"The vector {name!r}", size=len(direction), hidden=hidden))
        return direction

    def _found(self, name: str) -> Vector:
        try:
            return self[name]
        except KeyError as error:
            raise ValueError(error.args[0]) from None


_SIZE = "{what}: a direction has {size} channels, and the model's hidden state has {hidden}."


def _layers_of(vector: Vector) -> str:
    return "any layer" if None in vector else "layers " + ", ".join(str(layer) for layer in vector)
