"""Edits and programs of requests that run where the engine stops, in one call for all requests with the same program.

At a stop, this module gathers the rows of the requests that ask for a part, calls the part on them, and writes the new hidden states back.
The parameters of all requests are joined to tensors with one row for each gathered row. These tensors stay valid until the batch changes.
The step keeps the values that a part computes for later stops. No Python of a block runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..blocks.recording import StepProgram
from ..blocks.stepping import Steps
from ..steering.graph_parts import GraphPart

if TYPE_CHECKING:
    from .steps import Part


@dataclass(frozen=True, eq=False)
class StopProgram:
    """A program, or an edit at one location, with its parts by location. A program has a ``digest``.

    ``pairs`` are the locations at which the hidden state is the sum of two tensors; see :mod:`~nnsight.vllm.steering.pairs`.
    """

    parts: Mapping[str, GraphPart]
    digest: str = ""
    pairs: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class BlockProgram(StopProgram):
    """The program that parked blocks run in a step, made from the recording ``recorded``."""

    recorded: StepProgram | None = None

    @classmethod
    def of(cls, recorded: StepProgram) -> BlockProgram:
        return cls(recorded.parts, recorded=recorded)


@dataclass(frozen=True, eq=False)
class ProgramUse:
    """A program that a request runs from position ``start`` on, with its parameters. If it replaces a parked block, ``steps`` is set."""

    program: StopProgram
    parameters: Mapping[str, torch.Tensor]
    start: int
    steps: Steps | None = None


class _Group:
    """The requests of a step that run one program, with their rows and parameters, and with the values that later stops need."""

    def __init__(self, program: StopProgram) -> None:
        self.program = program
        self.members: list[tuple[Part, ProgramUse]] = []
        self._spans: list[tuple[int, int]] | None = None
        self._rows: torch.Tensor | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Find the rows of this step that each request edits: the rows at its position ``start`` and behind."""
        self._kept = {}
        spans = []
        for part, use in self.members:
            skipped = min(max(use.start - part.run.position, 0), part.tokens.size)
            spans.append((part.tokens.start + skipped, part.tokens.size - skipped))
        if spans != self._spans:
            self._spans, self._rows = spans, None

    def _fill(self, device: torch.device) -> torch.Tensor:
        """Make the index of the rows, and the parameters with one row for each. Return the index."""
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

    def run(self, location: str, value: Any, sampling: bool) -> Any:
        """Return ``value`` with the new hidden states in the rows of the group. With ``sampling``, ``value`` has one row per request."""
        pair = not isinstance(value, torch.Tensor)
        first = (value[0] if pair else value).clone()
        residual = value[1] if pair and location in self.program.pairs else None
        rows = self._fill(first.device) if self._rows is None else self._rows
        if not len(rows):
            return value
        flat = self._flat(first, location, sampling)
        mine = flat[rows]
        beside = None if residual is None else self._flat(residual, location, sampling)[rows]
        hidden = mine if beside is None else mine + beside
        (new,) = self._run_part(location, [hidden])
        flat[rows] = new if beside is None else mine + (new - hidden)
        return (first, *value[1:]) if pair else first

    def _flat(self, leaf: torch.Tensor, location: str, sampling: bool) -> torch.Tensor:
        """Return a view of ``leaf`` with the rows of the step as first dimension."""
        part = self.members[0][0]
        rows = part.request if sampling else part.tokens
        flat = rows.flat(leaf)
        if flat is None:
            raise ValueError(f"`{location}` has a tensor without the {rows.total} rows of the step.")
        return flat

    def _run_part(self, location: str, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the part at ``location`` on ``leaves``, tensors with the rows of this group, and keep the values that later parts need."""
        part = self.program.parts[location]
        found = part(*leaves, *(self._parameters[name] for name in part.parameters), *(self._kept[name] for name in part.takes))
        self._kept |= dict(zip(part.gives or (), found[len(leaves) :], strict=True))
        return list(found[: len(leaves)])


class _BlockGroup(_Group):
    """The requests of a step whose parked blocks have the same program. Each has one row."""

    program: BlockProgram
    _versions = 0  # sum of the versions of the parameters, which the Python of other requests may edit in the same step

    def run(self, location: str, value: Any, sampling: bool) -> Any:
        recorded = self.program.recorded
        assert recorded is not None
        leaves, structure = pytree.tree_flatten(value)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        versions = sum([tensor._version for _, use in self.members for tensor in use.parameters.values()])
        if self._rows is None or versions != self._versions:
            self._versions = versions
            device = self._fill(leaves[places[0]].device).device
            starts = [[part.tokens.start, part.request.start] for part, _ in self.members]
            self._rows_by_kind = [_indices(numbers, device) for numbers in zip(*starts, strict=True)]
        rows = self._rows_by_kind[sampling]
        new = self._run_part(location, [self._flat(leaves[place], location, sampling)[rows].clone() for place in places])
        for number in recorded.edited.get(location, ()):
            leaf = leaves[places[number]]
            with torch.inference_mode(leaf.is_inference()):
                self._flat(leaf, location, sampling)[rows] = new[number]
        for number in recorded.replaced.get(location, ()):
            leaf = leaves[places[number]] = leaves[places[number]].clone()
            self._flat(leaf, location, sampling)[rows] = new[number]
        if location == recorded.last:
            for row, (_, use) in enumerate(self.members):
                if use.steps is not None:
                    use.steps.take(self._kept, row)
        return pytree.tree_unflatten(leaves, structure) if location in recorded.replaced else value


def _indices(numbers: Sequence[int], device: torch.device) -> Any:
    """Return an index of these rows: a slice if they are consecutive, otherwise a tensor."""
    first = numbers[0]
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return torch.tensor(numbers, device=device)


class StepPrograms:
    """The programs of the requests in a step. ``locations`` has all locations of their parts."""

    def __init__(self, parts: Iterable[Part]) -> None:
        groups: dict[tuple[int, StopProgram], _Group] = {}
        for part in parts:
            before: Counter[str] = Counter()
            for use in part.run.uses:
                # How many programs of the request come before it at its locations: two requests may order the same programs differently.
                number = max(before[location] for location in use.program.parts)
                before |= Counter(dict.fromkeys(use.program.parts, number + 1))
                kind = _BlockGroup if use.steps is not None else _Group
                groups.setdefault((number, use.program), kind(use.program)).members.append((part, use))
        self._groups = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
        self.locations = frozenset(location for group in self._groups for location in group.program.parts)
        self.begin()

    def begin(self) -> None:
        """Begin a step with the same rows, one position further."""
        for group in self._groups:
            group.begin()

    def run(self, location: str, value: Any, sampling: bool) -> Any:
        """Run the programs at ``location``, and return ``value`` with their changes; see :meth:`_Group.run`. Errors end the requests."""
        for group in self._groups:
            if location not in group.program.parts:
                continue
            try:
                value = group.run(location, value, sampling)
            except Exception as error:
                for part, _ in group.members:
                    part.run.fail(error)
        return value
