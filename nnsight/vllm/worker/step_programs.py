"""Edits and programs of requests, run where the engine stops: one call for all requests that ask for the same.

At a stop, the rows of the requests that ask for a part are gathered, the part is called on them, and the new hidden states are written
back. The parameters of a request are rows of tables, which hold as long as the batch is the same. Values for later stops wait with the
step. No Python of a block runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..steering.graph_parts import GraphPart, is_layer
from ..steering.graph_programs import module_of

if TYPE_CHECKING:
    from .steps import Part


@dataclass(frozen=True, eq=False)
class StopProgram:
    """A program, or an edit at one location, with its parts by location; ``digest`` is that of a program."""

    parts: Mapping[str, GraphPart]
    digest: str = ""


@dataclass(frozen=True, eq=False)
class ProgramUse:
    """A program that a request runs, with its parameters, from position ``start`` on."""

    program: StopProgram
    parameters: Mapping[str, torch.Tensor]
    start: int


class _Group:
    """The requests of a step that run one program: their rows and parameters, and the values for later stops."""

    def __init__(self, program: StopProgram) -> None:
        self.program = program
        self.members: list[tuple[Part, ProgramUse]] = []
        self._spans: list[tuple[int, int]] | None = None
        self._rows: torch.Tensor | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Find the rows of this step: those from the first position on."""
        self._kept = {}
        spans = []
        for part, use in self.members:
            skipped = min(max(use.start - part.run.position, 0), part.tokens.size)
            spans.append((part.tokens.start + skipped, part.tokens.size - skipped))
        if spans != self._spans:
            self._spans, self._rows = spans, None

    def _fill(self, device: torch.device) -> torch.Tensor:
        """Make the numbers of the rows, and the parameters of each of them."""
        assert self._spans is not None
        rows = torch.cat([torch.arange(start, start + size) for start, size in self._spans])
        counts = torch.tensor([size for _, size in self._spans])
        self._parameters = {}
        for part in self.program.parts.values():
            for name, default in part.defaults.items():
                values = torch.stack([use.parameters[name] for _, use in self.members]).to(device, default.dtype)
                self._parameters[name] = values.repeat_interleave(counts.to(device), 0)
        self._rows = rows.to(device)
        return self._rows

    def run(self, location: str, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the new hidden states of its rows, which are ``hidden``; ``None`` if it has none in this step."""
        part = self.program.parts[location]
        if not len(hidden):
            return None
        new, *kept = part(hidden, *(self._parameters[name] for name in part.parameters), *(self._kept[name] for name in part.takes))
        self._kept |= dict(zip(part.gives or (), kept, strict=True))
        return new

    def rows(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of its rows."""
        return self._fill(device) if self._rows is None else self._rows


class StepPrograms:
    """The programs of the requests in a step; ``locations`` are where they stop."""

    def __init__(self, parts: Iterable[Part]) -> None:
        groups: dict[tuple[int, StopProgram], _Group] = {}
        for part in parts:
            before: Counter[str] = Counter()
            for use in part.run.uses:
                # How many come before it at its locations: requests may have the same programs in different orders.
                number = max(before[location] for location in use.program.parts)
                before |= Counter(dict.fromkeys(use.program.parts, number + 1))
                groups.setdefault((number, use.program), _Group(use.program)).members.append((part, use))
        self._groups = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
        self.locations = frozenset(location for group in self._groups for location in group.program.parts)
        self.begin()

    def begin(self) -> None:
        """Begin a step with the same rows, one position further."""
        for group in self._groups:
            group.begin()

    def run(self, location: str, value: Any) -> Any:
        """Return ``value`` as the programs leave it; a program that fails ends its requests."""
        pair = not isinstance(value, torch.Tensor)
        first = (value[0] if pair else value).clone()
        residual = value[1] if pair and is_layer(module_of(location)) else None
        for group in self._groups:
            if location not in group.program.parts:
                continue
            rows = group.rows(first.device)
            mine = first[rows]
            beside = None if residual is None else residual[rows]
            hidden = mine if beside is None else mine + beside
            try:
                new = group.run(location, hidden)
            except Exception as error:
                for part, _ in group.members:
                    part.run.fail(error)
                continue
            if new is not None:
                first[rows] = new if beside is None else mine + (new - hidden)
        return (first, *value[1:]) if pair else first
