"""The report of a trace: how it ran, which locations were spliced, and what was captured and compiled.

A report contains text and numbers, and no tensors, so a tracer that is kept after its trace keeps no activation alive.
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
    """A cut of a graph or a remote job, where a block needed a concrete value; or a graph break of the model itself."""

    location: str  # the location of the block's visit, or the last location before the model's graph break
    reason: str  # the reason in words
    filename: str  # the user's file, or the model's
    line: int  # the line in it

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}: {self.reason} at `{self.location}`"


@dataclass(frozen=True)
class Capture:
    """A graph that was captured for a call, because no existing graph fits the call."""

    reason: str  # in words: "gradients are enabled now", "another length of prompt: 5 -> 9, sizes are symbolic from here on"
    #: "first", "size", "value", "arguments", "type", "cache", "torch" (its state, such as the grad mode), "model", "break" or "unknown".
    kind: str = "first"
    guard: str = ""  # the guard that failed, in torch's words; empty if no guard failed

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Report:
    """The report of one trace; ``print(tracer.report)`` shows it."""

    mode: str = ""  # "eager", "compiled" or "remote"; empty until the model has run
    graphs: int = 0  # number of captured graphs that took part in the run
    spliced: list[str] = field(default_factory=list)  # locations in those graphs that the block read or wrote, in order
    breaks: list[Break] = field(default_factory=list)  # cuts of graphs or jobs for a value, and graph breaks of the model
    captures: list[Capture] = field(default_factory=list)  # graphs that were captured for the run, and why
    notes: list[str] = field(default_factory=list)  # parts that ran uncompiled although no value was needed there, and why
    recordings: int = 0  # number of new recordings; 0 if the run used known programs
    compiles: int = 0  # number of graphs that were lowered during the run
    replayed: bool = False  # whether the block was replayed: its effects were known, and its code did not run
    where: str = ""  # file and line of the `with` statement
    pieces: list[Any] = field(default_factory=list, repr=False)  # the pieces of graphs that ran, in order; filled by the compiler

    @property
    def code(self) -> str:
        """The spliced graphs as Python source, in which lines from the user's block are marked; empty after an eager run."""
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
    """Collect the reports of all traces that start inside this ``with`` statement, in the current thread and context."""
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
