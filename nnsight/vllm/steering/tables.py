"""Edits that are the same at every token: they are parameters instead of a block, so they need no stop.

``layer.steer(add=..., scale=..., remove=...)`` at the top of a block edits the residual stream after a layer, at every token of the
request. With the directions ``remove`` projected out of the hidden state ``h``, the result is ``scale * h + add``. As a difference to the
original ``h``, this is::

    h * gain + add + up @ (down @ h)

In a compiled engine (``edits=`` of the model) this sum is a part of the graph, with tables of parameters for each layer
(:mod:`.graph_parts`), and no Python runs at the layer. An engine that stops between its modules adds the same sum there.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...steering.choices import Choice, orthonormal
from ...steering.registry import Vectors
from .graph_functions import finite, fitted
from .graph_parts import GraphPart
from .graph_programs import GraphProgram

#: The name of this part of the graph. No function or program can have it, because it is empty.
TABLES = ""


def tables_part(rank: int, hidden: int, dtype: torch.dtype) -> GraphPart:
    """Return the part of the graph that adds this sum, for edits that remove up to ``rank`` directions."""
    shapes = {"add": (hidden,), "gain": (hidden,), "down": (rank, hidden), "up": (rank, hidden)}
    return GraphPart(TABLES, _summed, [*shapes], {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()})


def _summed(hidden: torch.Tensor, add: torch.Tensor, gain: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    difference = hidden * gain + add
    if down.shape[1]:
        difference = difference + (up * (down * hidden[:, None]).sum(-1, keepdim=True)).sum(1)
    return hidden + difference


@dataclass(frozen=True)
class Steering:
    """The edit of the hidden state after one layer. See the formula above; tensors are float32 on the CPU."""

    add: torch.Tensor  # `[hidden]`
    gain: torch.Tensor  # the scale minus 1, `[hidden]`
    down: torch.Tensor  # directions whose coefficients in the hidden state are computed, `[rank, hidden]`
    up: torch.Tensor  # for each direction, the vector that is multiplied with the coefficient and added, `[rank, hidden]`
    start: int = 0  # first position of the request that is edited
    #: Parameters of the functions and programs that are called on the result, by name; see :mod:`.graph_functions`.
    functions: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, hidden: int, add: Any, scale: Any, remove: Any, start: int, functions: Any = None) -> Steering:
        """Return the edit for arguments of :meth:`LayerEnvoy.steer` and ``hidden`` channels. Errors are those of that method."""
        if add is None and scale is None and remove is None and not functions:
            raise ValueError("steer() was given nothing to do: pass `add=`, `scale=`, `remove=` or `use=`.")
        if isinstance(start, bool) or not isinstance(start, int):
            raise TypeError(f"steer(start=...) is a position of the request, an int, not {type(start).__name__}.")
        if start < 0:
            raise ValueError(f"steer(start={start}): positions are counted from the start of the prompt, from 0.")
        added = fitted("steer(add=...)", 0.0 if add is None else add, (hidden,))
        factor = fitted("steer(scale=...)", 1.0 if scale is None else scale, (hidden,))
        directions = torch.zeros(0, hidden) if remove is None else _orthonormal(remove, hidden)
        return cls(added, factor - 1, directions, -directions * factor, start, functions or {})

    @property
    def rank(self) -> int:
        """The number of directions that it removes."""
        return self.down.shape[0]

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the parameters, equal for equal edits."""
        parts = [table.numpy().tobytes() for table in (self.add, self.gain, self.down, self.up)]
        for name, parameters in sorted(self.functions.items()):
            parts.append(f"{name}({', '.join(parameters)})".encode())
            parts += [value.numpy().tobytes() for value in parameters.values()]
        return hashlib.sha256(b"".join([*parts, str(self.start).encode()])).hexdigest()

    @property
    def parts(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The parts of the graph that it asks for, with the parameters of each."""
        asks = self.rank or self.gain.any() or self.add.any()
        tables = {"add": self.add, "gain": self.gain, "down": self.down, "up": self.up}
        return {**({TABLES: tables} if asks else {}), **self.functions}

    def plus(self, other: Steering) -> Steering:
        """Return the edit that does this and then ``other``, at one layer. Raise ``ValueError`` if one edit cannot do both."""
        twice, is_scaled = self.functions.keys() & other.functions.keys(), self.rank or self.gain.any()
        scales_again = (is_scaled or self.add.any()) and (other.rank or other.gain.any())
        if twice or scales_again or self.start != other.start:
            raise ValueError(
                "steer() was called twice for one layer of a request. Only additions from the same position can follow another edit: "
                "pass everything in one call, `steer(add=..., scale=..., remove=...)`. Different functions and programs may be in "
                "different calls."
            )
        first = self if is_scaled else other
        return Steering(self.add + other.add, first.gain, first.down, first.up, self.start, {**self.functions, **other.functions})


def _orthonormal(remove: Any, hidden: int) -> torch.Tensor:
    """Return an orthonormal basis, ``[directions, hidden]``, of the directions to remove."""
    given = torch.atleast_2d(finite("steer(remove=...)", remove))
    if given.dim() != 2 or given.shape[1] != hidden or not given.shape[0] <= hidden:
        raise ValueError(f"steer(remove=...) has shape {tuple(given.shape)}; it is [{hidden}] or [directions, {hidden}].")
    try:
        return orthonormal(given)
    except ValueError as error:
        raise ValueError("steer(remove=...) has directions that depend on each other, or one that is zero: leave them out.") from error


def steering_of(choice: Choice, vectors: Vectors, places: Mapping[int, str], hidden: int, rank: int | None) -> dict[str, Steering]:
    """Return the edits that a request has chosen, by location. ``places`` has the locations by layer number.

    Other arguments and errors are those of :meth:`.Choice.at_layers`.
    """
    chosen = choice.at_layers(vectors, places, hidden, rank)
    return {places[layer]: Steering.of(hidden, found.add, None, found.remove, choice.start) for layer, found in chosen.items()}


def edits_of(program: GraphProgram, given: Mapping[str, Any], start: int, hidden: int) -> dict[str, Steering]:
    """Return edits that ask for ``program``, by location. ``given`` and errors are those of :meth:`.GraphProgram.parameters`."""
    asked = {program.name: program.parameters(given)}
    return {f"model.{path}.output": Steering.of(hidden, None, None, None, start, asked) for path in program.modules}


def salt_of(steering: Mapping[str, Steering]) -> str:
    """Return a salt for cached prefixes, which is equal exactly for requests with the same edits."""
    parts = sorted(f"{location}={found.digest}" for location, found in steering.items())
    return "nnsight-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


class RowSlots:
    """The table entry of each row of a step.

    ``rows``, which the layers read, has the slots, int64 ``[tokens]``, at first zeros. Only the first ``filled`` rows can be nonzero.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._on_device = rows.device.type != "cpu"
        self.filled = 0
        self._entries: Sequence[tuple[int, int, int]] = []

    def fill(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Set the slots of rows. Each entry is ``(first row, end row, slot)``. All other rows get slot 0.

        The copy to a device is asynchronous, and the device may still run the previous step. So each call copies from new memory. The
        allocator of pinned memory does not reuse this memory before the copy is done.
        """
        if entries == self._entries:
            return
        self._entries = entries
        before, self.filled = self.filled, max((stop for _, stop, _ in entries), default=0)
        end = max(before, self.filled)
        numbers = torch.zeros(end, dtype=torch.int64, pin_memory=self._on_device)
        given = numbers.numpy()  # writing to a tensor row by row is slow
        for start, stop, entry in entries:
            given[start:stop] = entry
        self._rows[:end].copy_(numbers, non_blocking=True)
