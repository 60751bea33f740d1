"""Edits that are the same at every token, so that they need no stop: parameters instead of a block.

``layer.steer(add=..., scale=..., remove=...)`` at the top of a block says what happens to the residual stream after a layer for
every token of the request. For a hidden state ``h`` with the directions ``remove`` projected out of it the result is
``scale * h + add``; as a difference to ``h``::

    h * gain + add + up @ (down @ h)

In a compiled engine (``edits=`` of the model) this sum is a part of the graph, with a table of parameters for each layer. A row of the
batch says by a number, its *slot*, which entry of the tables applies to it; entry 0 is all zeros. So requests with different edits share
a step, and new values are a write to a table: nothing is compiled or recorded anew, and no Python runs at the layer. In an
engine that stops between its modules the same sum is added there.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .graph_functions import EditFunction

_NOTHING: Mapping[str, Mapping[str, torch.Tensor]] = {}


@dataclass(frozen=True)
class Steering:
    """What is done to the hidden state after one layer.

    Attributes:
        add: Added, ``[hidden]``.
        gain: What is added of the hidden state itself, ``[hidden]``.
        down: Directions that are read, ``[rank, hidden]``.
        up: What is added for each, ``[rank, hidden]``.
        start: First position of the request to which it is done.
        functions: Parameters of functions that are called on the hidden state behind all that, by name; see
            :mod:`~nnsight.vllm.steering.graph_functions`.
    """

    add: torch.Tensor
    gain: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    start: int = 0
    functions: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, hidden: int, add: Any, scale: Any, remove: Any, start: int, functions: Mapping[str, Mapping[str, torch.Tensor]] = _NOTHING
    ) -> Steering:
        """Return the parameters for what a user asks for.

        Args:
            hidden: Channels of the hidden state.
            add: As for :meth:`LayerEnvoy.steer`; likewise the others.
            scale: Number or vector.
            remove: Direction or directions.
            start: First position.
            functions: Parameters of functions.

        Raises:
            ValueError: For another size, values that are not finite, or nothing to do.
            TypeError: For what is no number or tensor.
        """
        if add is None and scale is None and remove is None and not functions:
            raise ValueError("steer() was given nothing to do: pass `add=`, `scale=`, `remove=` or `use=`.")
        if isinstance(start, bool) or not isinstance(start, int):
            raise TypeError(f"steer(start=...) is a position of the request, an int; not {type(start).__name__}.")
        if start < 0:
            raise ValueError(f"steer(start={start}): positions are counted from the start of the prompt, from 0.")
        added = _vector("add", 0.0 if add is None else add, hidden)
        factor = _vector("scale", 1.0 if scale is None else scale, hidden)
        directions = torch.zeros(0, hidden)
        if remove is not None:
            given = torch.atleast_2d(_tensor("remove", remove))
            if given.dim() != 2 or given.shape[1] != hidden or not given.shape[0] <= hidden:
                raise ValueError(
                    f"steer(remove=...) has shape {tuple(given.shape)}; it is [{hidden}] or [directions, {hidden}]."
                )
            basis, triangle = torch.linalg.qr(given.double().T)
            if (triangle.diagonal().abs() <= 1e-10 * triangle.abs().max()).any():
                raise ValueError(
                    "steer(remove=...) has directions that depend on each other, or a zero: leave them out."
                )
            directions = basis.T.float().contiguous()
        return cls(added, factor - 1, directions, -directions * factor, start, functions)

    @property
    def rank(self) -> int:
        """How many directions it reads."""
        return self.down.shape[0]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for equal parameters."""
        return hashlib.sha256(b"".join([self._bytes(), str(self.start).encode()])).hexdigest()

    def _bytes(self) -> bytes:
        parts = [bytes(table.numpy().tobytes()) for table in (self.add, self.gain, self.down, self.up)]
        for name, parameters in sorted(self.functions.items()):
            parts.append(f"{name}({', '.join(parameters)})".encode())
            parts += [bytes(value.numpy().tobytes()) for value in parameters.values()]
        return b"".join(parts)

    def difference(self, hidden: torch.Tensor, functions: Mapping[str, EditFunction]) -> torch.Tensor:
        """Return what is to be added to ``hidden``, ``[tokens, hidden]``; ``functions`` are those of the engine."""
        add, gain, down, up = (table.to(hidden) for table in (self.add, self.gain, self.down, self.up))
        difference = hidden * gain + add + (hidden @ down.T) @ up
        for name, function in functions.items():
            if name in self.functions:
                difference = function(hidden + difference, self.functions[name]) - hidden
        return difference

    def plus(self, other: Steering) -> Steering:
        """Return this and then ``other``, both at one layer.

        Raises:
            ValueError: If they do more than add and call different functions, or begin at different positions.
        """
        twice = self.functions.keys() & other.functions.keys()
        if twice or self.rank or other.rank or self.gain.any() or other.gain.any() or self.start != other.start:
            raise ValueError(
                "steer() was called twice for one layer of a request. Only additions from the same position can be joined: say "
                "everything in one call, `steer(add=..., scale=..., remove=...)`. Different functions may be asked for in different calls."
            )
        return Steering(self.add + other.add, self.gain, self.down, self.up, self.start, {**self.functions, **other.functions})


def salt_of(steering: Mapping[str, Steering]) -> str:
    """Return what keeps cached prefixes of requests apart: equal for requests that are steered alike."""
    parts = sorted(f"{location}={found.digest}" for location, found in steering.items())
    return "nnsight-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Slots:
    """The tables of a compiled model: who has which entry.

    Args:
        modules: The modules that have tables, by the location of their output.
        count: Entries of each table, without the first.

    Attributes:
        elsewhere: Called with a slot and what is written there, if there are other tables that have to be the same.
    """

    def __init__(self, modules: Mapping[str, Any], count: int) -> None:
        self._modules = dict(modules)
        self._free = list(range(count, 0, -1))
        self._users: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        self.elsewhere: Callable[[int, Mapping[str, Steering]], None] | None = None

    def take(self, steering: Mapping[str, Steering]) -> int:
        """Return the slot of ``steering``, whose parameters are in the tables from then on.

        Raises:
            ValueError: If no entry is free.
        """
        salt = salt_of(steering)
        if salt not in self._slots:
            if not self._free:
                raise ValueError(
                    f"The engine has room for {len(self._slots)} different edits at a time, and all are in use. Make the model with "
                    "more, as in `edits={'modules': [...], 'slots': 32}`, or trace fewer requests at once."
                )
            slot = self._slots[salt] = self._free.pop()
            self.write(slot, steering)
            if self.elsewhere is not None:
                self.elsewhere(slot, steering)
        self._users[salt] = self._users.get(salt, 0) + 1
        return self._slots[salt]

    def give_back(self, steering: Mapping[str, Steering]) -> None:
        """Say that one request less uses ``steering``."""
        salt = salt_of(steering)
        self._users[salt] -= 1
        if not self._users[salt]:
            del self._users[salt]
            self._free.append(self._slots.pop(salt))

    def write(self, slot: int, steering: Mapping[str, Steering]) -> None:
        """Write the parameters of ``steering`` to the tables."""
        for location, module in self._modules.items():
            self._write(module, slot, steering.get(location))

    def _write(self, module: Any, slot: int, steering: Steering | None) -> None:
        for name in ("add", "gain", "down", "up"):
            table = getattr(module, f"nnsight_{name}")[slot]
            table.zero_()
            if steering is not None:
                values = getattr(steering, name)
                (table[: steering.rank] if name in {"down", "up"} else table).copy_(values)
        for function in module.nnsight_functions:
            chosen = None if steering is None else steering.functions.get(function.name)
            getattr(module, _table(function.name))[slot] = chosen is not None
            for name, value in (chosen or {}).items():
                getattr(module, _table(function.name, name))[slot] = value


class RowSlots:
    """Says for each row of a step which entry of the tables applies to it.

    Args:
        rows: What the layers look at, zeros, int64 ``[tokens]``.

    Attributes:
        filled: How many rows of the last step were looked at; 0 where no row had an entry.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._on_device = rows.device.type != "cpu"
        self.filled = 0
        self._entries: Sequence[tuple[int, int, int]] = []

    def fill(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Set rows to entries, given as the first row, the row behind the last one, and the number of the entry; others to none.

        Most steps have the same as the one before: a token of each request. Then nothing is done.

        The rows of a device are copied to it while the step before may still run there, and this call does not wait for it. So they come
        from memory of this call alone: what is pinned is not given to others before it has been copied.
        """
        if entries == self._entries:
            return
        self._entries = entries
        before, self.filled = self.filled, max((stop for _, stop, _ in entries), default=0)
        end = max(before, self.filled)
        numbers = torch.zeros(end, dtype=torch.int64, pin_memory=self._on_device)
        given = numbers.numpy()  # written to row by row, which a tensor is slow at
        for start, stop, entry in entries:
            given[start:stop] = entry
        self._rows[:end].copy_(numbers, non_blocking=True)


def add_tables(
    module: Any, rows: torch.Tensor, slots: int, rank: int, hidden: int, dtype: torch.dtype
) -> None:
    """Give ``module`` tables for ``slots`` edits; ``rows`` has the slot of each row of a step."""
    module.nnsight_functions, module.nnsight_calls = [], []
    tables = {
        "rows": rows,
        "add": rows.new_zeros(slots + 1, hidden, dtype=dtype),
        "gain": rows.new_zeros(slots + 1, hidden, dtype=dtype),
        "down": rows.new_zeros(slots + 1, rank, hidden, dtype=dtype),
        "up": rows.new_zeros(slots + 1, rank, hidden, dtype=dtype),
    }
    for name, table in tables.items():
        module.register_buffer(f"nnsight_{name}", table, persistent=False)


def add_functions(module: Any, functions: Sequence[EditFunction], slots: int, dtype: torch.dtype) -> None:
    """Give ``module``, which has tables for ``slots`` edits, ``functions``, and tables of who goes through them with what parameters."""
    rows = module.nnsight_rows
    module.nnsight_functions += functions
    for function in functions:
        constants = []
        for number, constant in enumerate(function.constants):  # buffers, for a graph takes these for what it is given
            constants.append(_table(function.name, f"{number}"))
            module.register_buffer(constants[-1], constant, persistent=False)
        tables = [_table(function.name, name) for name in function.defaults]
        module.nnsight_calls.append((function.graph, _table(function.name), tables, constants))
        module.register_buffer(_table(function.name), rows.new_zeros(slots + 1, 1, dtype=torch.bool), persistent=False)
        for name, default in function.defaults.items():
            values = default.to(rows.device, dtype).repeat(slots + 1, *([1] * default.dim()))
            module.register_buffer(_table(function.name, name), values, persistent=False)


def _table(function: str, parameter: str = "") -> str:
    """Return the name of the table of a parameter, of a constant, or of the table that says who goes through the function."""
    return f"nnsight_of_{function}__{parameter}"


def steered(module: Any, output: Any) -> Any:
    """Return ``output`` of a layer with the edits in its tables. Dynamo traces this."""
    pair = not isinstance(output, torch.Tensor)
    first = output[0] if pair else output
    hidden = first + output[1] if pair and output[1] is not None else first
    rows = module.nnsight_rows[: hidden.shape[0]]
    lookup = torch.nn.functional.embedding
    difference = hidden * lookup(rows, module.nnsight_gain) + lookup(rows, module.nnsight_add)
    if module.nnsight_down.shape[1]:
        read = (module.nnsight_down[rows] * hidden[:, None]).sum(-1, keepdim=True)
        difference = difference + (module.nnsight_up[rows] * read).sum(1)
    first = torch.where(
        (rows > 0)[:, None], first + difference, first
    )  # rows without an edit stay as they are, bit by bit
    for graph, chosen, tables, constants in module.nnsight_calls:
        hidden = first + output[1] if pair and output[1] is not None else first
        values = [getattr(module, table)[rows] for table in tables] + [getattr(module, constant) for constant in constants]
        new = graph(hidden, *values)
        if pair and output[1] is not None:
            new = new - output[1]
        first = torch.where(getattr(module, chosen)[rows], new, first)
    return (first, *output[1:]) if pair else first


def _vector(name: str, value: Any, hidden: int) -> torch.Tensor:
    tensor = _tensor(name, value)
    if tensor.dim() == 0:
        return tensor.expand(hidden).clone()
    if tuple(tensor.shape) != (hidden,):
        raise ValueError(f"steer({name}=...) has shape {tuple(tensor.shape)}; it is a number or [{hidden}].")
    return tensor


def _tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        raise TypeError(f"steer({name}=...) is a number or a tensor, not {type(value).__name__}.")
    with torch.inference_mode(False):
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"steer({name}=...) has values that are not finite.")
    return tensor
