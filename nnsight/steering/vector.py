"""Steering vectors: directions of the hidden state, and their application to a model."""

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

#: A factor, or a function from the step of a generation to its factor.
Scale = float | Callable[[int], float]


@dataclass(frozen=True, eq=False)
class SteeringVector(Mapping[int, torch.Tensor]):
    """Directions of the hidden state after some layers: a mapping from the number of a layer, from 0, to a float32 ``[hidden]`` on the CPU.

    An engine for vLLM takes such a mapping: ``engine.vectors.add("mood", vector)``. ``nnsight vllm serve --vectors`` reads the files
    of this class.

    Attributes:
        directions: The directions.
        at: Path of the list of layers. If it is empty, the list is found when the vector is applied.
        effects: For each layer, how well its direction separates positive from negative prompts, see :func:`~nnsight.steering.contrast`.
        about: Notes on how the vector was made: plain text by name.

    Raises:
        TypeError: If a direction is not a tensor, or a layer not a number.
        ValueError: If directions have another shape than ``[hidden]``, different sizes, or values that are not finite; or if one is for any
            layer (``None``).
    """

    directions: Mapping[int, torch.Tensor]
    at: str = ""
    effects: Mapping[int, float] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if None in self.directions:
            raise ValueError("The direction is for any layer: give the number of its layer, as in `SteeringVector({5: direction})`.")
        object.__setattr__(self, "directions", directions_of(self.directions, "The steering vector"))

    def __getitem__(self, layer: int) -> torch.Tensor:
        if layer not in self.directions:
            raise KeyError(f"The vector has no direction for layer {layer}, only for {', '.join(map(str, self.directions))}.")
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
        """The layer with the largest effect, whose direction best separates positive from negative prompts.

        Raises:
            ValueError: If the vector has no effects, for example because it was made by hand.
        """
        if not self.effects:
            raise ValueError("The vector has no effects by which to compare its layers: choose a layer, or compare them with a sweep.")
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

        With the unit vector ``u`` along the direction, the hidden state ``h`` after a layer becomes:

        ========= ==================================================================================
        add       ``h + scale * direction``
        ablate    ``h - (h . u) u``: the component along ``u`` is removed
        project   ``(h . u) u``: all other components are removed
        clamp     ``h + (min(max(h . u, low), high) - h . u) u``: the component is clamped to a range
        ========= ==================================================================================

        The copy is an edited model, as ``model.edit()`` makes it: it can be compiled, baked and edited again. In a compiled copy, the
        steering is part of the graph, and ``steered.params["scale"] = 2.0`` changes the factor without a compilation.

        Args:
            model: The model.
            scale: Factor of the directions, for "add"; or a function from the step of a generation to its factor.
            mode: The change of the hidden state, see above.
            layers: The layers to steer; by default all layers of the vector.
            positions: Positions in each call of the model; all by default. In a generation, the first call has the prompt. Padding counts:
                with the padding on the left, ``-1`` is the last token of each prompt, and ``0`` that of the longest prompts only.
            steps: Steps of a generation, counted from 0; all by default. A call outside of a generation is step 0.
            low: Lower limit of the component along the direction, for "clamp".
            high: Upper limit, likewise.
            match_norm: Rescale each changed hidden state to its previous norm.

        Raises:
            ValueError: If the mode is unknown, the limits of "clamp" are missing or reversed, a factor or limit is given that the mode does
                not use, or the model lacks one of the layers.
            KeyError: If the vector lacks one of the layers.
        """
        _check(mode, scale, low, high)
        paths, directions = self._placed(model, mode, layers)
        limits = _number(low), _number(high)
        which = slice(None) if positions is None else positions
        if steps is None and not callable(scale):
            return _edited(model, paths, directions, _number(scale), mode, limits, match_norm, which)
        with model.edit() as (tracer, steered):
            for step in tracer.iter[_in_order(steps)]:
                for number, path in enumerate(paths):
                    layer = steered.get(path)
                    output = read(layer)
                    factor = scale(step) if callable(scale) else scale
                    hidden = _changed(hidden_of(output), directions[number], mode, factor, limits, match_norm, which)
                    write(layer, with_hidden(output, hidden))
        return steered

    def _placed(self, model: NNsight, mode: Mode, layers: int | Sequence[int] | None) -> tuple[list[str], torch.Tensor]:
        """Return the paths of the layers to steer, and their directions, ``[layers, width]``, on the device of the model."""
        chosen = list(self) if layers is None else [layers] if isinstance(layers, int) else sorted(set(layers))
        if not chosen:
            raise ValueError("layers=[] steers nothing: name at least one layer.")
        stacked = torch.stack([self[layer] if mode == "add" else _unit(self[layer]) for layer in chosen])
        paths = self._paths(model, chosen)
        return paths, stacked.to(device_of(model, paths[0]))

    def _paths(self, model: NNsight, layers: Sequence[int]) -> list[str]:
        """Return the paths of ``layers`` in a model; raise ``ValueError`` if the model lacks one of them."""
        at = self.at or layers_path(model)
        count = count_of(model, at)
        if any(layer >= count for layer in layers):
            raise ValueError(f"The vector has a direction for layer {max(layers)}, and the model has {count} layers at `{at}`.")
        return [f"{at}.{layer}" for layer in layers]

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the vector to a file, and return its path. A ``.gguf`` file is a control vector of llama.cpp; others are safetensors.

        Raises:
            ImportError: If the file is ``.gguf``, and the package ``gguf`` is not installed.
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
        """Return the vector in a file; ``name`` chooses one of several. Reading a file runs no code from it.

        Raises:
            ImportError: If the file is in GGUF, and the package ``gguf`` is not installed.
            OSError: If the file cannot be read.
            ValueError: If the content is not valid, or is a single direction for any layer, which is no vector with layers.
        """
        data = Path(path).read_bytes()
        directions: Any = parse_vector(data, str(path), name)
        return cls(directions, *_notes(data, str(path)))

    def push(self, repository: str, file: str = "vector.safetensors", **options: Any) -> str:
        """Upload the vector to a repository of the Hugging Face hub, and return its URL; ``options`` are those of ``upload_file``."""
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            path = self.save(Path(folder) / Path(file).name)
            return str(HfApi().upload_file(path_or_fileobj=str(path), path_in_repo=file, repo_id=repository, **options))

    @classmethod
    def pull(cls, repository: str, file: str = "vector.safetensors", name: str | None = None, **options: Any) -> SteeringVector:
        """Return a vector from a repository of the hub; ``options`` are those of ``hf_hub_download``. Raises the errors of :meth:`load`."""
        from huggingface_hub import hf_hub_download

        return cls.load(hf_hub_download(repository, file, **options), name)


def _check(mode: str, scale: Scale, low: float, high: float) -> None:
    """Raise ``ValueError`` if the mode is unknown, the limits are not valid, or the mode ignores a factor or limit."""
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r}: the modes are {', '.join(map(repr, _MODES))}.")
    if (mode == "clamp" and low == -math.inf and high == math.inf) or low > high:
        raise ValueError(f"low={low} and high={high}: clamp takes one limit or both, the lower one first.")
    if mode != "clamp" and (low, high) != (-math.inf, math.inf):
        raise ValueError(f"low={low} and high={high}: limits are for mode='clamp', and the mode is {mode!r}.")
    if mode != "add" and (callable(scale) or scale != 1.0):
        raise ValueError(f"scale={scale}: a factor is for mode='add', and the mode is {mode!r}.")


def _in_order(steps: int | slice | Sequence[int] | None) -> int | slice | list[int]:
    """Return steps as ``tracer.iter`` takes them."""
    return slice(None) if steps is None else steps if isinstance(steps, (int, slice)) else sorted(set(steps))


def _number(value: float) -> torch.Tensor:
    return torch.tensor(float(value), device="cpu")


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
    """Return a copy of ``model`` with the same edit at each step. The names of tensors here become names in its ``params``."""
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
    """Return ``hidden``, ``[batch, positions, hidden]``, with ``direction``, ``[hidden]``, applied at the positions ``which``."""
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
    if match_norm:  # in float32: in float16, a length may be too large, or too small for the limit of the divisor
        before, after = (each.norm(dim=-1, keepdim=True, dtype=torch.float32) for each in (part, changed))
        changed = (changed * (before / after.clamp_min(1e-12))).to(hidden.dtype)
    if whole:
        return changed
    copied = hidden.clone()
    copied[:, which] = changed
    return copied


def _unit(direction: torch.Tensor) -> torch.Tensor:
    length = direction.norm()
    if not length:
        raise ValueError('A direction of length 0 supports only the mode "add".')
    return direction / length


def _notes(data: bytes, source: str) -> tuple[str, dict[int, float], dict[str, str]]:
    """Return the attributes ``at``, ``effects`` and ``about`` from a valid file; empty ones if the file does not have them."""
    if data[:4] == MAGIC:
        return "", {}, {}
    notes = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    try:
        effects = {int(layer): float(effect) for layer, effect in json.loads(notes.get("effects", "{}")).items()}
        about = {str(key): str(value) for key, value in json.loads(notes.get("about", "{}")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: the metadata of the vector is damaged ({error}).") from error
    return notes.get("at", ""), effects, about
