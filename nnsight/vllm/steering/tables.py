"""Edits that are the same at every token, so that they need no stop: parameters instead of a block.

``layer.steer(add=..., scale=..., remove=...)`` at the top of a block says what happens to the residual stream after a layer, at
every token of the request. For a hidden state ``h`` with the directions ``remove`` projected out of it the result is
``scale * h + add``; as a difference to ``h``::

    h * gain + add + up @ (down @ h)

In a compiled engine (``edits=`` of the model) this sum is a part of the graph, with a table of parameters for each layer. Each row of the
batch has a number, its *slot*, which says which entry of the tables applies to the row; entry 0 is all zeros. So requests with different
edits share a step, and new values are a write to a table: nothing is compiled or recorded again, and no Python runs at the layer. An
engine that stops between its modules adds the same sum there.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...steering.choices import Choice, orthonormal
from ...steering.registry import Vectors
from .graph_functions import EditFunction, finite, fitted
from .graph_programs import ProgramPart

#: The parameters of an edit.
TABLES = ("add", "gain", "down", "up")


@dataclass(frozen=True)
class Steering:
    """The edit of the hidden state after one layer."""

    add: torch.Tensor  # added, `[hidden]`
    gain: torch.Tensor  # factor of the hidden state itself in the difference, `[hidden]`
    down: torch.Tensor  # directions that are read, `[rank, hidden]`
    up: torch.Tensor  # what is added for each direction, `[rank, hidden]`
    start: int = 0  # first position of the request that is edited
    #: Parameters of functions that are called on the result, by name; see :mod:`~nnsight.vllm.steering.graph_functions`.
    functions: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, hidden: int, add: Any, scale: Any, remove: Any, start: int, functions: Any = None) -> Steering:
        """Return the parameters for arguments of :meth:`LayerEnvoy.steer` and ``hidden`` channels; raise as that does."""
        if add is None and scale is None and remove is None and not functions:
            raise ValueError("steer() was given nothing to do: pass `add=`, `scale=`, `remove=` or `use=`.")
        if isinstance(start, bool) or not isinstance(start, int):
            raise TypeError(f"steer(start=...) is a position of the request, an int; not {type(start).__name__}.")
        if start < 0:
            raise ValueError(f"steer(start={start}): positions are counted from the start of the prompt, from 0.")
        added = fitted("steer(add=...)", 0.0 if add is None else add, (hidden,))
        factor = fitted("steer(scale=...)", 1.0 if scale is None else scale, (hidden,))
        directions = torch.zeros(0, hidden) if remove is None else _orthonormal(remove, hidden)
        return cls(added, factor - 1, directions, -directions * factor, start, functions or {})

    @property
    def rank(self) -> int:
        """How many directions it reads."""
        return self.down.shape[0]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal parameters."""
        parts = [table.numpy().tobytes() for table in (self.add, self.gain, self.down, self.up)]
        for name, parameters in sorted(self.functions.items()):
            parts.append(f"{name}({', '.join(parameters)})".encode())
            parts += [value.numpy().tobytes() for value in parameters.values()]
        return hashlib.sha256(b"".join([*parts, str(self.start).encode()])).hexdigest()

    def difference(self, hidden: torch.Tensor, functions: Mapping[str, EditFunction]) -> torch.Tensor:
        """Return what is to be added to ``hidden``, ``[tokens, hidden]``; ``functions`` are those of the engine."""
        add, gain, down, up = (table.to(hidden) for table in (self.add, self.gain, self.down, self.up))
        difference = hidden * gain + add + (hidden @ down.T) @ up
        for name, function in functions.items():
            if name in self.functions:
                difference = function(hidden + difference, self.functions[name]) - hidden
        return difference

    def plus(self, other: Steering) -> Steering:
        """Return this and then ``other``, both at one layer; raise ``ValueError`` if they cannot be one edit."""
        twice, edited = self.functions.keys() & other.functions.keys(), self.rank or self.gain.any()
        adds = not (other.rank or other.gain.any())
        if twice or not (adds or not (edited or self.add.any())) or self.start != other.start:
            raise ValueError(
                "steer() was called twice for one layer of a request. Only additions from the same position can follow another edit: "
                "say everything in one call, `steer(add=..., scale=..., remove=...)`. Different functions and programs may be asked for "
                "in different calls."
            )
        first = self if edited else other
        return Steering(self.add + other.add, first.gain, first.down, first.up, self.start, {**self.functions, **other.functions})


def _orthonormal(remove: Any, hidden: int) -> torch.Tensor:
    """Return an orthonormal basis, ``[directions, hidden]``, of the directions to remove."""
    given = torch.atleast_2d(finite("steer(remove=...)", remove))
    if given.dim() != 2 or given.shape[1] != hidden or not given.shape[0] <= hidden:
        raise ValueError(f"steer(remove=...) has shape {tuple(given.shape)}; it is [{hidden}] or [directions, {hidden}].")
    try:
        return orthonormal(given)
    except ValueError as error:
        raise ValueError("steer(remove=...) has directions that depend on each other, or a zero: leave them out.") from error


def steering_of(choice: Choice, vectors: Vectors, places: Mapping[int, str], hidden: int, rank: int | None) -> dict[str, Steering]:
    """Return the edits of hidden states that a request has chosen, by location; ``places`` are the locations by number of the layer.

    Other arguments and errors are those of :meth:`.Choice.at_layers`.
    """
    chosen = choice.at_layers(vectors, places, hidden, rank)
    return {places[layer]: Steering.of(hidden, found.add, None, found.remove, choice.start) for layer, found in chosen.items()}


def salt_of(steering: Mapping[str, Steering]) -> str:
    """Return a salt for cached prefixes: equal for requests that are steered alike, and for no others."""
    parts = sorted(f"{location}={found.digest}" for location, found in steering.items())
    return "nnsight-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


class RowSlots:
    """Says for each row of a step which entry of the tables applies to it.

    The layers read ``rows``, zeros, int64 ``[tokens]``. Only the first ``filled`` rows may have an entry.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._on_device = rows.device.type != "cpu"
        self.filled = 0
        self._entries: Sequence[tuple[int, int, int]] = []

    def fill(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Set rows to entries, given as the first row, the row behind the last one, and the number of the entry; others to none.

        A device may still run the step before when its rows for this step are copied, and this call does not wait for it. So each call
        copies from new memory: the allocator of pinned memory gives it to nobody else before it has been copied.
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


class GraphCall(NamedTuple):
    """A graph that is called on the hidden state after a module, for rows that ask for it, with the names of the module's buffers."""

    graph: torch.fx.GraphModule
    chosen: str  # which slots ask for it
    tables: list[str]  # of its parameters, by slot
    taken: list[str]  # values of earlier parts, by row
    constants: list[str]
    given: list[str]  # values for later parts, by row


def add_tables(module: Any, rows: torch.Tensor, slots: int, rank: int, hidden: int, dtype: torch.dtype) -> None:
    """Give ``module`` tables for ``slots`` edits; ``rows`` has the slot of each row of a step."""
    module.nnsight_has_tables = True
    for name, shape in {"add": (hidden,), "gain": (hidden,), "down": (rank, hidden), "up": (rank, hidden)}.items():
        module.register_buffer(f"nnsight_{name}", rows.new_zeros(slots + 1, *shape, dtype=dtype), persistent=False)


def add_call(
    module: Any, part: EditFunction | ProgramPart, slots: int, dtype: torch.dtype, carried: dict[str, torch.Tensor]
) -> None:
    """Give ``module`` a part of a program, or a function, with tables of its parameters and users for ``slots`` edits.

    ``carried`` are the values that parts have for later ones, by name; those that this one gives are added.
    """
    rows = module.nnsight_rows
    chosen = _table(part.name)
    module.register_buffer(chosen, rows.new_zeros(slots + 1, 1, dtype=torch.bool), persistent=False)
    constants = [_table(part.name, f"{number}") for number in range(len(part.constants))]
    for name, constant in zip(constants, part.constants, strict=True):  # buffers are inputs of the graph
        module.register_buffer(name, constant, persistent=False)
    of_program = isinstance(part, ProgramPart)
    for name, default in part.defaults.items():
        value = default.to(rows.device, default.dtype if of_program else dtype)
        module.register_buffer(_table(part.name, name), value.repeat(slots + 1, *([1] * value.dim())), persistent=False)
    names, takes, gives = (part.parameters, part.takes, part.gives) if isinstance(part, ProgramPart) else ([*part.defaults], (), {})
    for name, like in gives.items():
        carried[name] = torch.zeros(len(rows), *like.shape, dtype=like.dtype, device=rows.device)
    for name in (*takes, *gives):
        module.register_buffer(_table(part.name, f"value_{name}"), carried[name], persistent=False)
    taken, given = ([_table(part.name, f"value_{name}") for name in names] for names in (takes, gives))
    module.nnsight_calls.append(GraphCall(part.graph, chosen, [_table(part.name, name) for name in names], taken, constants, given))
    module.nnsight_parts[part.name] = [*part.defaults]


def _table(function: str, parameter: str = "") -> str:
    """Return the name of the table of a parameter, of a constant, or of the table of the slots that use the function."""
    return f"nnsight_of_{function}__{parameter}"


def write(module: Any, slot: int, steering: Steering | None) -> None:
    """Write the parameters of ``steering``, none if it is ``None``, to the entry ``slot`` of the tables of ``module``."""
    for name in TABLES if module.nnsight_has_tables else ():
        table = getattr(module, f"nnsight_{name}")[slot]
        table.zero_()
        if steering is not None:
            values = getattr(steering, name)
            (table[: steering.rank] if name in {"down", "up"} else table).copy_(values)
    for part, parameters in module.nnsight_parts.items():
        chosen = None if steering is None else steering.functions.get(part)
        getattr(module, _table(part))[slot] = chosen is not None
        if chosen is not None:
            for name in parameters:
                getattr(module, _table(part, name))[slot] = chosen[name]


def steered(module: Any, output: Any) -> Any:
    """Return ``output`` of a module with the edits in its tables, and those of programs. Dynamo traces this."""
    pair = not isinstance(output, torch.Tensor)
    first = output[0] if pair else output
    residual = output[1] if pair and module.nnsight_returns_parts else None
    hidden = first if residual is None else first + residual
    count = hidden.shape[0]
    rows = module.nnsight_rows[:count]
    if module.nnsight_has_tables:
        first = torch.where((rows > 0)[:, None], first + _difference(module, hidden, rows), first)  # others stay as they are, bit by bit
    for call in module.nnsight_calls:
        hidden = first if residual is None else first + residual
        values = [getattr(module, table)[rows] for table in call.tables]
        values += [getattr(module, name)[:count] for name in call.taken]
        results = call.graph(hidden, *values, *[getattr(module, name) for name in call.constants])
        new, *kept = results if isinstance(results, tuple) else (results,)
        for name, value in zip(call.given, kept, strict=True):
            getattr(module, name)[:count].copy_(value)
        if residual is not None:
            new = new - residual
        first = torch.where(getattr(module, call.chosen)[rows], new, first)
    return (first, *output[1:]) if pair else first


def _difference(module: Any, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    lookup = torch.nn.functional.embedding
    difference = hidden * lookup(rows, module.nnsight_gain) + lookup(rows, module.nnsight_add)
    if module.nnsight_down.shape[1]:
        read = (module.nnsight_down[rows] * hidden[:, None]).sum(-1, keepdim=True)
        difference = difference + (module.nnsight_up[rows] * read).sum(1)
    return difference
