"""The choice of registered vectors by a request.

A request has its choice as plain JSON data, so that it can be sent to a server (``vllm_xargs``). A block makes the same choice with
``model.steer(...)`` of an engine. Both become a :class:`Choice`, and the choice becomes an :class:`Addition` for each layer. A choice that
cannot be applied in full is an error, because a partly steered answer looks like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .registry import Vectors

#: Prefix of the names of the parameters in a request to a server.
PREFIX = "nnsight_"

_KNOWN = ("vector", "scale", "remove", "layers", "start")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
#: Limit on the length of a range of layers. No model has more, and a request must not make the server count further.
_MOST_LAYERS = 10_000


def orthonormal(directions: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the rows of ``[directions, hidden]``, float32; raise ``ValueError`` if they are linearly dependent."""
    basis, triangle = torch.linalg.qr(directions.double().T)
    if (triangle.diagonal().abs() <= 1e-10 * triangle.abs().max()).any():
        raise ValueError("The directions to remove depend on each other linearly, or one is zero: leave out the superfluous ones.")
    return basis.T.float().contiguous()


class Addition(NamedTuple):
    """The change of a hidden state: the plane with the orthonormal basis ``remove``, ``[directions, hidden]``, is projected out, then
    ``add``, ``[hidden]``, is added. Both are float32 on the CPU; ``None`` skips the step.
    """

    add: torch.Tensor | None
    remove: torch.Tensor | None


@dataclass(frozen=True)
class Choice:
    """The vectors that a request chooses."""

    add: tuple[tuple[str, float], ...] = ()  # names of vectors, each with its factor
    remove: tuple[str, ...] = ()  # names of vectors that are projected out
    layers: tuple[int, ...] | None = None  # `None` for all layers of the vectors
    start: int = 0  # first position of the request that is steered
    prefix: str = field(default="", compare=False)  # prefix of the names of parameters in messages

    @classmethod
    def of(cls, parameters: Mapping[str, Any], prefix: str = "") -> Choice:
        """Return the choice that ``parameters`` describe; raise ``ValueError`` if they are not valid.

        They are the arguments of ``model.steer``, with ``prefix`` before each name. Several values can also be one text with commas.
        """
        unknown = sorted(name for name in parameters if name.removeprefix(prefix) not in _KNOWN)
        if unknown:
            known = ", ".join(prefix + name for name in _KNOWN)
            raise ValueError(f"{', '.join(unknown)}: unknown. The parameters are {known}.")
        given = {name.removeprefix(prefix): value for name, value in parameters.items()}
        names, removed = _names(prefix + "vector", given.get("vector")), _names(prefix + "remove", given.get("remove"))
        if not names and not removed:
            raise ValueError(f"{prefix}vector or {prefix}remove is missing: name at least one vector.")
        if "scale" in given and not names:
            raise ValueError(f"{prefix}scale is for {prefix}vector, which is missing.")
        if len(set(removed)) < len(removed):
            raise ValueError(f"{prefix}remove names a vector twice.")
        scales = _scales(prefix + "scale", given.get("scale", 1.0), len(names))
        start = start_of(parameters, prefix)
        layers = _layers(prefix + "layers", given.get("layers"))
        return cls(tuple(zip(names, scales, strict=True)), removed, layers, start, prefix)

    def at_layers(self, vectors: Vectors, known: Collection[int], hidden: int, rank: int | None) -> dict[int, Addition]:
        """Return the addition for each layer; raise ``ValueError`` if the choice cannot be applied.

        ``known`` has the layers that can be steered; ``rank`` is the largest number of directions to remove, ``None`` for any number.
        """
        layers = self._own_layers(vectors) if self.layers is None else self.layers
        missing = [layer for layer in layers if layer not in known]
        if missing:
            raise ValueError(
                f"Layer {', '.join(map(str, missing))} cannot be steered: there are tables for "
                f"{', '.join(map(str, sorted(known))) or 'no layer'}. Choose layers with {self.prefix}layers."
            )
        if rank is not None and len(self.remove) > rank:
            raise ValueError(
                f"{self.prefix}remove has {len(self.remove)} vectors, and there is room for {rank} in each layer (the rank of the tables)."
            )
        made = {}
        for layer in layers:
            added = [scale * vectors.direction(name, layer, hidden) for name, scale in self.add]
            removed = [vectors.direction(name, layer, hidden) for name in self.remove]
            made[layer] = Addition(torch.stack(added).sum(0) if added else None, orthonormal(torch.stack(removed)) if removed else None)
        return made

    def _own_layers(self, vectors: Vectors) -> list[int]:
        """Return the layers of the vectors; raise ``ValueError`` if these differ, or if all vectors are for any layer."""
        names = list(dict.fromkeys([*(name for name, _ in self.add), *self.remove]))
        found = {name: layers for name in names if (layers := vectors.layers(name)) is not None}
        if not found:
            raise ValueError(
                f"{self.prefix}layers is missing: {', '.join(map(repr, names))} is for any layer, so choose the layers to steer."
            )
        first = next(iter(found.values()))
        if any(layers != first for layers in found.values()):
            raise ValueError(f"{', '.join(map(repr, found))} have different layers: choose layers with {self.prefix}layers.")
        return first


def start_of(parameters: Mapping[str, Any], prefix: str = "") -> int:
    """Return the first steered position in ``parameters``, 0 by default; raise ``ValueError`` if it is not a position."""
    start = parameters.get(prefix + "start", 0)
    if not _is_natural(start) or start >= 2**63:
        raise ValueError(f"{prefix}start is a position, an integer from 0, not {start!r}.")
    return int(start)


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _names(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(found, str) and found.strip() for found in names):
        raise ValueError(f"{name} is the name of a vector, or several with commas or in a list, not {value!r}.")
    return tuple(found.strip() for found in names)


def _scales(name: str, value: Any, count: int) -> tuple[float, ...]:
    values = value if isinstance(value, (list, tuple)) else [value] * count
    if not all(isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < math.inf for found in values):
        raise ValueError(f"{name} is a finite number, or one for each vector, not {value!r}.")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers for {count} vectors.")
    try:
        return tuple(map(float, values))
    except OverflowError:
        raise ValueError(f"{name} is too large: {value!r}.") from None


def _layers(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    found: list[int] = []
    for part in parts:
        match = _RANGE.fullmatch(part.strip()) if isinstance(part, str) else None
        first: Any = int(match[1]) if match else part
        last: Any = int(match[2] or match[1]) if match else part
        if not _is_natural(first) or not 0 <= last - first < _MOST_LAYERS:
            raise ValueError(f"{name} is a number, or several as in \"2,5-8\" or [2, 5], not {value!r}.")
        found += range(first, last + 1)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{name} names no layer, or one twice: {value!r}.")
    return tuple(sorted(found))
