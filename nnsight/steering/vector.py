"""Steering vectors: directions of the hidden state, and how they are applied to a model."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..modeling.base import NNsight
from .formats import directions_of, parse_vector
from .gguf import MAGIC, write_control_vector
from .layers import count_of, device_of, hidden_of, layers_path, read, with_hidden, write

Mode = Literal["add", "ablate", "project", "clamp"]
_MODES = ("add", "ablate", "project", "clamp")

#: A factor, or one for each step of a generation.
Scale = float | Callable[[int], float]


@dataclass(frozen=True, eq=False)
class SteeringVector(Mapping[int, torch.Tensor]):
    """A direction of the hidden state after each of some layers, float32 ``[hidden]`` on the CPU, by the number of the layer from 0.

    It is a mapping, as the engine for vLLM takes it: ``engine.vectors.add("mood", vector)``. Its files are those that
    ``nnsight vllm serve --vectors`` reads.

    Attributes:
        directions: The directions.
        at: Path of the list of layers; found out when the vector is applied if it is empty.
        effects: How well each direction tells the prompts apart that it was found with, see :func:`~nnsight.steering.contrast`.
        about: How it was made: plain text by name.

    Raises:
        TypeError: If a direction is no tensor, or a layer no number.
        ValueError: If directions have other shapes than ``[hidden]``, different sizes, or values that are not finite; or if one is for any
            layer (``None``).
    """

    directions: Mapping[int, torch.Tensor]
    at: str = ""
    effects: Mapping[int, float] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if None in self.directions:
            raise ValueError("The direction is for any layer. Name its layers: `SteeringVector({5: direction})`.")
        object.__setattr__(self, "directions", directions_of(self.directions, "The steering vector"))

    def __getitem__(self, layer: int) -> torch.Tensor:
        if layer not in self.directions:
            raise KeyError(f"The vector has no direction for layer {layer}, but for {', '.join(map(str, self.directions))}.")
        return self.directions[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.directions)

    def __len__(self) -> int:
        return len(self.directions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SteeringVector):
            return NotImplemented
        return self.directions.keys() == other.directions.keys() and all(torch.equal(self[layer], other[layer]) for layer in self)

    __hash__ = None  # type: ignore[assignment]

    def __mul__(self, factor: float) -> SteeringVector:
        return replace(self, directions={layer: direction * factor for layer, direction in self.items()})

    __rmul__ = __mul__

    def __neg__(self) -> SteeringVector:
        return self * -1.0

    def __repr__(self) -> str:
        hidden = len(next(iter(self.values())))
        return f"SteeringVector(layers {', '.join(map(str, self))} of {self.at or '?'}, {hidden} channels)"

    @property
    def best_layer(self) -> int:
        """The layer whose direction tells the prompts apart best.

        Raises:
            ValueError: If the vector has no effects, as one that was made by hand.
        """
        if not self.effects:
            raise ValueError("The vector has no effects by which its layers could be compared: choose a layer, or sweep over them.")
        return max(self.effects, key=lambda layer: self.effects[layer])

    # -- applying ----------------------------------------------------------------------------------------------------

    def apply(
        self,
        model: NNsight,
        scale: Scale = 1.0,
        *,
        mode: Mode = "add",
        layers: int | Sequence[int] | None = None,
        positions: int | slice | None = None,
        steps: int | slice | Sequence[int] | None = None,
        low: float = -math.inf,
        high: float = math.inf,
        match_norm: bool = False,
    ) -> Any:
        """Return a copy of ``model`` that is steered in every call, trace and generation; it shares the weights.

        With ``u`` for the direction of length 1, the hidden state ``h`` after a layer becomes:

        ========= ====================================================================================
        add       ``h + scale * direction``
        ablate    ``h - (h . u) u``: nothing along the direction is left
        project   ``(h . u) u``: nothing else is left
        clamp     ``h + (min(max(h . u, low), high) - h . u) u``: the part along ``u`` lies between both
        ========= ====================================================================================

        The copy is an edited model as ``model.edit()`` makes it: it can be compiled, baked and edited again. On a compiled one the steering
        is part of the graph, and ``steered.params["scale"] = 2.0`` sets another factor without compiling.

        Args:
            model: The model.
            scale: Factor of the directions, for "add"; or a function that returns the factor for the number of a step of a generation.
            mode: What is done, see above.
            layers: The layers where it is done; all that the vector has by default.
            positions: Positions in each call of the model; all by default. A generation has its prompt in the first call.
            steps: Steps of a generation, counted from 0; all by default. A call outside of a generation is step 0.
            low: Least part along the direction, for "clamp".
            high: Largest part along it.
            match_norm: Give each changed hidden state the length that it had before.

        Raises:
            ValueError: If the mode is unknown, ``low`` is above ``high`` or "clamp" has neither, or the model does not fit the vector.
            KeyError: If the vector has no direction for one of the layers.
        """
        _check(mode, low, high)
        chosen = list(self) if layers is None else [layers] if isinstance(layers, int) else sorted(set(layers))
        directions = torch.stack([self[layer] if mode == "add" else _unit(self[layer]) for layer in chosen])
        paths = self._paths(model, chosen)
        directions = directions.to(device_of(model, paths[0]))
        limits = torch.tensor(float(low), device="cpu"), torch.tensor(float(high), device="cpu")
        which = slice(None) if positions is None else positions
        if steps is None and not callable(scale):
            return _edited(model, paths, directions, torch.tensor(float(scale), device="cpu"), mode, limits, match_norm, which)
        with model.edit() as (tracer, steered):
            for step in tracer.iter[slice(None) if steps is None else steps]:
                for number, path in enumerate(paths):
                    layer = steered.get(path)
                    output = read(layer)
                    factor = scale(step) if callable(scale) else scale
                    hidden = _changed(hidden_of(output), directions[number], mode, factor, limits, match_norm, which)
                    write(layer, with_hidden(output, hidden))
        return steered

    def _paths(self, model: NNsight, layers: Sequence[int]) -> list[str]:
        """Return the paths of layers of a model; raise ``ValueError`` if it has no such layers."""
        at = self.at or layers_path(model)
        count = count_of(model, at)
        if any(layer >= count for layer in layers):
            raise ValueError(f"The vector has a direction for layer {max(layers)}, and the model has {count} layers at `{at}`.")
        return [f"{at}.{layer}" for layer in layers]

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the vector to a file, and return its path: a control vector of llama.cpp if its name ends in ``.gguf``, else safetensors.

        Raises:
            ImportError: For ``.gguf`` without the package ``gguf``.
            OSError: If the file cannot be written.
        """
        target = Path(path)
        notes = {"at": self.at, "effects": json.dumps({str(layer): effect for layer, effect in self.effects.items()})}
        if target.suffix == ".gguf":
            write_control_vector(target, self.directions, self.about.get("model", self.at))
            return target
        from safetensors.torch import save_file

        tensors = {str(layer): direction.contiguous() for layer, direction in self.items()}
        save_file(tensors, target, metadata={**notes, "about": json.dumps(dict(self.about))})
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str | None = None) -> SteeringVector:
        """Return the vector in a file; ``name`` says which of several. Nothing in the file is run.

        Raises:
            ImportError: If the file is in GGUF, and the package ``gguf`` is not installed.
            OSError: If the file cannot be read.
            ValueError: If it is not right, or its direction is for any layer: it is then a tensor, not a vector with layers.
        """
        data = Path(path).read_bytes()
        directions: Any = parse_vector(data, str(path), name)
        return cls(directions, *_notes(data, str(path)))

    def push(self, repository: str, file: str = "vector.safetensors", **options: Any) -> str:
        """Upload the vector to a repository of the Hugging Face hub, and return the address; ``options`` are those of ``upload_file``."""
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            path = self.save(Path(folder) / Path(file).name)
            return str(HfApi().upload_file(path_or_fileobj=str(path), path_in_repo=file, repo_id=repository, **options))

    @classmethod
    def pull(cls, repository: str, file: str = "vector.safetensors", name: str | None = None, **options: Any) -> SteeringVector:
        """Return a vector from a repository of the hub; ``options`` are those of ``hf_hub_download``. Raises as :meth:`load`."""
        from huggingface_hub import hf_hub_download

        return cls.load(hf_hub_download(repository, file, **options), name)



def _check(mode: str, low: float, high: float) -> None:
    """Raise ``ValueError`` if there is no such mode, or it has no such limits."""
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r}: the modes are {', '.join(map(repr, _MODES))}.")
    if (mode == "clamp" and low == -math.inf and high == math.inf) or low > high:
        raise ValueError(f"low={low} and high={high}: clamp takes one limit or both, the lower one first.")

def _edited(
    model: NNsight,
    paths: Sequence[str],
    directions: torch.Tensor,
    scale: torch.Tensor,
    mode: str,
    limits: tuple[torch.Tensor, torch.Tensor],
    match_norm: bool,
    which: int | slice,
) -> Any:
    """Return a copy of ``model`` with the same edit at each step; the names of tensors here are those of its parameters."""
    low, high = limits
    with model.edit() as (tracer, steered):
        for _ in tracer.iter[:]:
            for number, path in enumerate(paths):
                layer = steered.get(path)
                output = read(layer)
                hidden = _changed(hidden_of(output), directions[number], mode, scale, (low, high), match_norm, which)
                write(layer, with_hidden(output, hidden))
    return steered


def _changed(
    hidden: torch.Tensor,
    direction: torch.Tensor,
    mode: str,
    scale: float | torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor],
    match_norm: bool,
    which: int | slice,
) -> torch.Tensor:
    """Return a hidden state, ``[batch, positions, hidden]``, with ``direction``, ``[hidden]``, applied at the positions ``which``."""
    whole = which == slice(None)
    part = hidden if whole else hidden[:, which]
    direction = direction.to(hidden)
    if mode == "add":
        changed = part + scale * direction
    else:
        along = (part * direction).sum(-1, keepdim=True)
        if mode == "project":
            changed = along * direction
        else:
            target = torch.clamp(along, *(limit.to(along) for limit in limits)) if mode == "clamp" else 0.0
            changed = part + (target - along) * direction
    if match_norm:
        changed = changed * (part.norm(dim=-1, keepdim=True) / changed.norm(dim=-1, keepdim=True).clamp_min(1e-12))
    if whole:
        return changed
    copied = hidden.clone()
    copied[:, which] = changed
    return copied


def _unit(direction: torch.Tensor) -> torch.Tensor:
    length = direction.norm()
    if not length:
        raise ValueError("A direction of length 0 cannot be ablated, projected on or clamped along.")
    return direction / length


def _notes(data: bytes, source: str) -> tuple[str, dict[int, float], dict[str, str]]:
    """Return the path of the layers, the effects and how the vector was made, as far as a file that could be read has them."""
    if data[:4] == MAGIC:
        return "", {}, {}
    notes = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    try:
        effects = {int(layer): float(effect) for layer, effect in json.loads(notes.get("effects", "{}")).items()}
        about = {str(key): str(value) for key, value in json.loads(notes.get("about", "{}")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: the notes beside the directions are damaged ({error}).") from error
    return notes.get("at", ""), effects, about
