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
    """A point where a concrete value was needed, so the graph was cut there, or where the model itself broke it.

    Attributes:
        location: The location at which the block stood, or behind which the model broke the graph.
        reason: What needed the value.
        filename: The user's file, or the model's.
        line: The line in it.
    """

    location: str
    reason: str
    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}: {self.reason} at `{self.location}`"


@dataclass(frozen=True)
class Capture:
    """A graph that was captured for a call, because none that was there fits it.

    Attributes:
        reason: Why, in words: "gradients are enabled now", "another length of prompt: 5 -> 9, sizes are symbolic from here on".
        kind: What kind of reason: ``"first"``, ``"size"``, ``"value"``, ``"arguments"``, ``"type"``, ``"cache"``, ``"torch"`` (its grad
            mode and the like), ``"model"``, ``"break"``, or ``"unknown"``.
        guard: The condition of torch that did not hold, as torch writes it; empty if there was none.
    """

    reason: str
    kind: str = "first"
    guard: str = ""

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Report:
    """Account of one trace; ``print(tracer.report)`` shows it.

    Attributes:
        mode: ``"eager"`` or ``"compiled"``; empty until the model ran.
        graphs: Captured graphs that took part in the run.
        spliced: Locations the block read or wrote in those graphs, in order.
        breaks: Where graphs were cut because a value was needed, and where the model broke them.
        captures: Graphs that were captured for the run, and why.
        notes: What did not run as a compiled graph although no value was needed there, and why.
        recordings: Programs recorded anew; 0 when the run followed programs that were known.
        compiles: Graphs lowered anew during the run.
        replayed: Whether the block itself did not run, because its effects were known.
        where: File and line of the ``with`` statement.
        pieces: What ran, one piece after the other; the compiler's to fill and to explain.
    """

    mode: str = ""
    graphs: int = 0
    spliced: list[str] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recordings: int = 0
    compiles: int = 0
    replayed: bool = False
    where: str = ""
    pieces: list[Any] = field(default_factory=list, repr=False)

    @property
    def code(self) -> str:
        """The spliced graphs as Python source, lines that come from the user's block marked; empty when eager."""
        return "\n\n".join(piece.code() for piece in self.pieces)

    def __str__(self) -> str:
        if self.mode != "compiled":
            return f"trace: {self.mode or 'not run'}"
        lines = [
            f"trace: compiled, {self.graphs} graph{'s' * (self.graphs != 1)}, "
            f"{len(self.breaks)} break{'s' * (len(self.breaks) != 1)}, "
            f"{self.recordings} recorded, {self.compiles} compiled",
        ]
        if self.captures:
            lines.append("  captured because")
            times = Counter(map(str, self.captures))
            lines += [f"    {reason}{f' ({count} graphs)' * (count > 1)}" for reason, count in times.items()]
        if self.spliced:
            lines.append("  spliced at")
            lines += [f"    {location}" for location in self.spliced]
        if self.breaks:
            lines.append("  cut at")
            lines += [f"    {cut}" for cut in self.breaks]
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
