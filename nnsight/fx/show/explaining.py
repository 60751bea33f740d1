"""Explanations: the compilation of a trace, from capture to lowering, as text.

``nnsight.fx.explain(tracer)`` shows a trace that has run. For each captured graph it shows the number of nodes and the symbolic sizes. For
each piece it shows the program of the block, the spliced graph, the passes, the backend, and the conditions under which the lowering is
used again. It lists the cuts with their reasons. ``nnsight.fx.explain(function, *args)`` calls a function and shows all traces in it.

A run adds a :class:`RanPiece` for each piece to its report. These objects refer to the cache of variants; texts are made on demand.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.report import Break, Report, collected_reports
from ..block_events import State
from ..capturing.graph import CapturedGraph
from ..counters import counters
from ..lowering.backends import backend_name
from ..lowering.lowering import Lowered

if TYPE_CHECKING:
    from ..lowering.variant import Variant


class RanPiece(NamedTuple):
    """A piece of a captured graph that ran, with a program in it.

    Attributes:
        state: The state at the end of the program.
        binding: The values of the graph's symbols.
        stop: Number of the first node after the piece.
        cut: The cut at which the piece ends; ``None`` if the graph was not cut there.
    """

    graph: CapturedGraph
    state: State
    variant: Variant
    lowered: Lowered
    binding: tuple[int, ...]
    stop: int
    cut: Break | None

    def code(self) -> str:
        """Return the spliced graph as Python source."""
        return self.variant.spliced.code()

    def program(self) -> str:
        """Return the program as text, with locations and the user's lines."""
        taps, lines = self.graph.taps, []
        location = None
        for step in self.state.program().steps:
            if step.position >= 0 and taps[step.position].location != location:
                location = taps[step.position].location
                lines.append(f"at {location}")
            lines.append(f"    {step}")
        return "\n".join(lines)

    def ending(self) -> str:
        """Return where the piece ends, and why."""
        if self.cut is not None:
            return f"cut: {self.cut}"
        tap = self.graph.tap_number.get(self.graph.nodes[self.stop])
        return "to the end of the graph" if tap is None else f"stopped at `{self.graph.taps[tap].location}`"

    def sizes(self) -> str:
        """Return the symbolic sizes of the graph with their values, as text."""
        named = zip(self.graph.symbols, self.binding, strict=True)
        return ", ".join(f"{symbol} = {size}" for (_, symbol), size in named) or "none"

    def conditions(self) -> str:
        """Return the conditions on sizes under which the lowering is used again, as text."""
        names = dict(zip(self.lowered.symbols, (symbol for _, symbol in self.graph.symbols), strict=False))
        return ", ".join(str(condition.xreplace(names)) for condition in self.lowered.conditions) or "none"

    def passes(self) -> str:
        """Return the numbers of nodes before and after each pass that changed the graph, as text."""
        runs = [run for run in self.variant.spliced.passes if run.before != run.after]
        return ", ".join(f"{run.name} {run.before} -> {run.after}" for run in runs) or "nothing"

    def captured(self) -> str:
        """Return a line with the numbers of calls, taps and inputs of the captured graph, and its symbolic sizes."""
        graph = self.graph
        calls = len(graph.nodes) - len(graph.placeholders) - len(graph.taps) - len(graph.tapped) - 1
        counted = f"{calls} calls, {len(graph.taps)} taps, {len(graph.placeholders)} inputs"
        return f"{counted}; symbolic sizes: {self.sizes()}"

    def lines(self) -> list[str]:
        """Return the lines with which :func:`explain` shows the piece."""
        nodes = len(self.variant.spliced.graph_module.graph.nodes)
        return [
            f"  piece, {self.ending()}",
            "    program",
            *_indented(self.program() or "(empty)"),
            f"    spliced graph, {nodes} nodes; removed by passes: {self.passes()}",
            *_indented(self.code()),
            f"    lowered by {backend_name(self.graph.backend)}; conditions on sizes: {self.conditions()}",
        ]


def _indented(text: str) -> list[str]:
    return [f"      {line}" for line in text.splitlines()]


@dataclass(frozen=True)
class Explanation:
    """An explanation of traces; ``print`` shows it.

    Attributes:
        reports: The reports of the traces, in the order in which they started.
        counts: Changes of :data:`~nnsight.fx.counters` during the call; empty for a tracer.
    """

    reports: tuple[Report, ...]
    counts: dict[str, int]

    @property
    def breaks(self) -> list[Break]:
        """The cuts of all traces."""
        return [cut for report in self.reports for cut in report.breaks]

    def __str__(self) -> str:
        texts = ["\n".join(_lines(report)) for report in self.reports]
        if self.counts:
            counted = ", ".join(f"{value} {name}" for name, value in self.counts.items())
            texts.insert(0, f"{len(self.reports)} trace{'s' * (len(self.reports) != 1)}: {counted}")
        return "\n\n".join(texts) or "no trace ran"


def _lines(report: Report) -> list[str]:
    lines = [f"{report.where}: {report}" if report.where else str(report)]
    last = None
    for piece in report.pieces:
        if piece.graph is not last:
            lines.append(f"captured graph: {piece.captured()}")
            last = piece.graph
        lines += piece.lines()
    return lines


def explain(traced: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Explain the compilation of a trace that has run, or of all traces that run in a call.

    Args:
        traced: A tracer, or a function to call.
        *args: Positional arguments of the function.
        **kwargs: Keyword arguments of the function.

    Raises:
        TypeError: If ``traced`` is neither a tracer nor a function, or if a tracer is given together with arguments.
        ValueError: If the trace has not run yet.
    """
    report = getattr(traced, "report", None)
    if isinstance(report, Report):
        if args or kwargs:
            raise TypeError("fx.explain() takes a tracer alone. Only a function takes further arguments.")
        if not report.mode:
            raise ValueError("fx.explain() got a tracer whose trace has not run: call it after the block.")
        return Explanation((report,), {})
    if not callable(traced):
        raise TypeError(f"fx.explain() takes a tracer, as in `with model.trace(x) as tracer:`, or a function to call, not {traced!r}.")
    before = {item.name: getattr(counters, item.name) for item in fields(counters) if item.type == "int"}
    with collected_reports() as reports:
        traced(*args, **kwargs)
    return Explanation(tuple(reports), {name: getattr(counters, name) - count for name, count in before.items()})
