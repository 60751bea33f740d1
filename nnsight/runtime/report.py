"""What a trace did: how it ran, what was spliced, what was compiled.

A report holds text and numbers, never tensors, so keeping a tracer keeps no activation alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Break:
    """A point where a concrete value was needed, so the graph was cut there.

    Attributes:
        location: The location at which the block stood.
        reason: What needed the value.
        filename: The user's file.
        line: The user's line.
    """

    location: str
    reason: str
    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}: {self.reason} at `{self.location}`"


@dataclass
class Report:
    """Account of one trace; ``print(tracer.report)`` shows it.

    Attributes:
        mode: ``"eager"`` or ``"compiled"``; empty until the model ran.
        graphs: Captured graphs that took part in the run.
        spliced: Locations the block read or wrote in those graphs, in order.
        breaks: Where graphs were cut because a value was needed.
        recordings: Programs recorded anew; 0 when the run followed programs that were known.
        compiles: Graphs lowered anew during the run.
        replayed: Whether the block itself did not run, because its effects were known.
    """

    mode: str = ""
    graphs: int = 0
    spliced: list[str] = field(default_factory=list)
    breaks: list[Break] = field(default_factory=list)
    recordings: int = 0
    compiles: int = 0
    replayed: bool = False
    _code: list[Callable[[], str]] = field(default_factory=list, repr=False)

    @property
    def code(self) -> str:
        """The spliced graphs as Python source, lines that come from the user's block marked; empty when eager."""
        return "\n\n".join(render() for render in self._code)

    def __str__(self) -> str:
        if self.mode != "compiled":
            return f"trace: {self.mode or 'not run'}"
        lines = [
            f"trace: compiled, {self.graphs} graph{'s' * (self.graphs != 1)}, "
            f"{len(self.breaks)} break{'s' * (len(self.breaks) != 1)}, "
            f"{self.recordings} recorded, {self.compiles} compiled",
        ]
        if self.spliced:
            lines.append("  spliced at")
            lines += [f"    {location}" for location in self.spliced]
        if self.breaks:
            lines.append("  cut at")
            lines += [f"    {cut}" for cut in self.breaks]
        return "\n".join(lines)
