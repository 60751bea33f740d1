"""Parts of an engine's compiled graph that edit hidden states, for the rows that ask for them.

A :class:`GraphPart` belongs to a module and edits the hidden state after it. It is the sum of :mod:`.tables`, a function of the user
(:mod:`.graph_functions`), or the nodes of a program at this module (:mod:`.graph_programs`). The graph computes a part for all rows of a
step, but rows of requests that do not ask for it stay unchanged, bit for bit.

Each row has a *slot*, a number. Tables, indexed by slot, tell whether a row asks for a part, and with which parameters. Rows without edits
have slot 0. So requests with different edits share a step, and new parameters are a write to a table: nothing is compiled again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+$")


def is_layer(path: str) -> bool:
    """Whether the module at ``path`` is a layer of the model, which may return its hidden state in two parts."""
    return _LAYER.search(path) is not None


@dataclass(frozen=True, eq=False)
class GraphPart:
    """An edit of hidden states at one module.

    Attributes:
        name: Name of the function or program.
        graph: Takes the hidden state ``[tokens, hidden]``, the parameters, the values of earlier parts, and the constants. Parameters and
            values have a row per token. Returns the new hidden state, or a tuple of the new hidden state and the values for later parts.
        parameters: Names of the parameters, in the order of the graph.
        defaults: Values of the parameters for requests that do not give them.
        constants: Other tensors of the graph.
        takes: Names of the values that it takes from earlier parts.
        gives: For each value that it gives to later parts: its name, and an example for one token.
    """

    name: str
    graph: Callable[..., Any]
    parameters: Sequence[str]
    defaults: Mapping[str, torch.Tensor]
    constants: Sequence[torch.Tensor] = ()
    takes: Sequence[str] = ()
    gives: Mapping[str, torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the new hidden states and the values for later parts. ``given`` are the parameters and the values of earlier parts."""
        results = self.graph(hidden, *given, *self.constants)
        return results if isinstance(results, tuple) else (results,)


class GraphCall(NamedTuple):
    """The call of a part. The other fields are names of buffers of the module."""

    graph: Callable[..., Any]
    chosen: str  # whether a slot asks for the part, by slot
    tables: list[str]  # its parameters, by slot
    taken: list[str]  # values of earlier parts, by row
    constants: list[str]
    given: list[str]  # values for later parts, by row


def add_part(module: Any, part: GraphPart, slots: int, carried: dict[str, torch.Tensor]) -> None:
    """Add ``part`` to ``module``, with tables for ``slots`` edits: which of them ask for the part, and their parameters.

    ``carried`` has the buffers of the values that earlier parts give to later parts, by name. This adds the buffers of ``part.gives``.
    """
    rows = module.nnsight_rows
    held: dict[str, torch.Tensor] = {_name(part): rows.new_zeros(slots + 1, 1, dtype=torch.bool)}
    for name, default in part.defaults.items():
        held[_name(part, name)] = default.to(rows.device).repeat(slots + 1, *([1] * default.dim()))
    constants = [_name(part, f"{number}") for number in range(len(part.constants))]
    held |= {name: constant.to(rows.device) for name, constant in zip(constants, part.constants, strict=True)}
    gives = part.gives or {}
    for name, like in gives.items():
        carried[name] = torch.zeros(len(rows), *like.shape, dtype=like.dtype, device=rows.device)
    held |= {_name(part, f"value_{name}"): carried[name] for name in (*part.takes, *gives)}
    for name, tensor in held.items():  # buffers are inputs of the graph
        module.register_buffer(name, tensor, persistent=False)
    tables = [_name(part, name) for name in part.parameters]
    taken, given = ([_name(part, f"value_{name}") for name in names] for names in (part.takes, gives))
    module.nnsight_calls.append(GraphCall(part.graph, _name(part), tables, taken, constants, given))
    module.nnsight_parts.append(part)


def _name(part: GraphPart, parameter: str = "") -> str:
    """Return the name of a buffer: of a parameter, constant or value, or, without ``parameter``, of the slots that ask for the part."""
    return f"nnsight_of_{part.name}__{parameter}"


def write(module: Any, slot: int, asked: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write the edits ``asked`` to entry ``slot`` of the tables of ``module``: parameters by name, by name of the part that they ask for.

    A parameter with fewer rows than its table is padded with zeros.
    """
    for part in module.nnsight_parts:
        chosen = asked.get(part.name)
        getattr(module, _name(part))[slot] = chosen is not None
        if chosen is None:
            continue
        for name in part.defaults:
            table, value = getattr(module, _name(part, name))[slot], chosen[name]
            if table.shape == value.shape:
                table.copy_(value)
            else:
                table.zero_()
                table[: len(value)] = value


def edited(module: Any, output: Any) -> Any:
    """Apply the parts of ``module`` to its ``output``, and return the result. Dynamo traces this."""
    pair = not isinstance(output, torch.Tensor)
    first = output[0] if pair else output
    residual = output[1] if pair and module.nnsight_returns_parts else None
    batched = module.nnsight_batched and first.dim() > 2  # `[1, tokens, hidden]`, by the Transformers backend
    if batched:
        first, residual = first[0], None if residual is None else residual[0]
    count = first.shape[0]
    rows = module.nnsight_rows[:count]
    for call in module.nnsight_calls:
        hidden = first if residual is None else first + residual
        values = [_by_slot(getattr(module, table), rows) for table in call.tables]
        values += [getattr(module, name)[:count] for name in call.taken]
        results = call.graph(hidden, *values, *[getattr(module, name) for name in call.constants])
        new, *kept = results if isinstance(results, tuple) else (results,)
        for name, value in zip(call.given, kept, strict=True):
            getattr(module, name)[:count].copy_(value)
        if residual is not None:
            new = first + (new - hidden)
        first = torch.where(getattr(module, call.chosen)[rows], new, first)
    if batched:
        first = first[None]
    return (first, *output[1:]) if pair else first


def _by_slot(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(rows, table) if table.dim() == 2 else table[rows]
