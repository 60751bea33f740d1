"""What a trace did: how it ran, what was spliced, what was compiled.

A report holds text and numbers, never tensors, so keeping a tracer keeps no activation alive.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Break:
    """A point where a concrete value was needed, so the graph or the job was cut there, or where the model itself broke it."""

    location: str  # where the block stood, or behind which the model broke the graph
    reason: str  # what needed the value
    filename: str  # the user's file, or the model's
    line: int  # the line in it

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}: {self.reason} at `{self.location}`"


@dataclass(frozen=True)
class Capture:
    """A graph that was captured for a call, because none that was there fits it."""

    reason: str  # in words: "gradients are enabled now", "another length of prompt: 5 -> 9, sizes are symbolic from here on"
    #: "first", "size", "value", "arguments", "type", "cache", "torch" (its grad mode and the like), "model", "break" or "unknown".
    kind: str = "first"
    guard: str = ""  # the condition of torch that did not hold, as torch writes it; empty if there was none

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Report:
    """Account of one trace; ``print(tracer.report)`` shows it."""

    mode: str = ""  # "eager", "compiled" or "remote"; empty until the model ran
    graphs: int = 0  # captured graphs that took part in the run
    spliced: list[str] = field(default_factory=list)  # locations the block read or wrote in those graphs, in order
    breaks: list[Break] = field(default_factory=list)  # where graphs or jobs were cut for a value, and where the model broke them
    captures: list[Capture] = field(default_factory=list)  # graphs that were captured for the run, and why
    notes: list[str] = field(default_factory=list)  # what ran uncompiled although no value was needed there, and why
    recordings: int = 0  # programs recorded anew; 0 when the run followed programs that were known
    compiles: int = 0  # graphs lowered anew during the run
    replayed: bool = False  # whether the block itself did not run, because its effects were known
    where: str = ""  # file and line of the `with` statement
    pieces: list[Any] = field(default_factory=list, repr=False)  # what ran, in order; the compiler's to fill and to explain

    @property
    def code(self) -> str:
        """The spliced graphs as Python source, lines that come from the user's block marked; empty when eager."""
        return "\n\n".join(piece.code() for piece in self.pieces)

    def __str__(self) -> str:
        if self.mode != "compiled":
            return "\n  cut at ".join([f"trace: {self.mode or 'not run'}", *map(str, self.breaks)])
        lines = [
            f"trace: compiled, {self.graphs} graph{'s' * (self.graphs != 1)}, "
            f"{len(self.breaks)} break{'s' * (len(self.breaks) != 1)}, "
            f"{self.recordings} recorded, {self.compiles} compiled",
        ]
        times = Counter(map(str, self.captures))
        reasons = [f"{reason}{f' ({count} graphs)' * (count > 1)}" for reason, count in times.items()]
        for title, items in (("captured because", reasons), ("spliced at", self.spliced), ("cut at", self.breaks)):
            lines += [f"  {title}", *(f"    {item}" for item in items)] if items else []
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


#: The list of :func:`collected_reports`.
_collected: ContextVar[list[Report] | None] = ContextVar("nnsight_collected_reports", default=None)


@contextlib.contextmanager
def collected_reports() -> Iterator[list[Report]]:
    """Collect the reports of the traces that start inside, in this context."""
    reports: list[Report] = []
    token = _collected.set(reports)
    try:
        yield reports
    finally:
        _collected.reset(token)


def trace_starts(report: Report) -> None:
    """Add ``report`` to the list of :func:`collected_reports`."""
    reports = _collected.get()
    if reports is not None:
        reports.append(report)
