"""Variants: the compiled form of one program in one captured graph.

A variant is found by following a program, never by comparing programs, so finding it costs nothing beyond the steps of the
block itself. It holds the spliced graph, one lowering for each set of sizes that a backend would not treat alike, and the plan that
says which result goes where.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .counters import counters
from .graph import CapturedGraph
from .lowering import Lowered, lower
from .program import External, Input, Program, Value
from .splice import Piece, Result, splice

logger = logging.getLogger("nnsight.fx")

#: For how many combinations of sizes and numbers the lowering is looked up rather than found by its conditions.
_KEPT_BINDINGS = 1024

#: How many lowerings of one program are kept: one that a number is a constant of is worth little when the number has gone.
_KEPT_LOWERINGS = 64


def run_as_is(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Lower a graph by not lowering it: its nodes run one by one."""
    return graph_module.forward


class Variant:
    """A program spliced into a piece of a captured graph.

    Args:
        graph: The captured graph.
        piece: Where the piece begins.
        program: What is spliced in.
        stop: Number of the first node that is left out.
        alive: Numbers of the values that become real tensors.
        wanted: What else is needed: references, captured nodes, or constants.

    Attributes:
        spliced: The spliced graph.
        positions: Position of each alive value among the graph's results.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        piece: Piece,
        program: Program,
        stop: int,
        alive: Sequence[int],
        wanted: Sequence[Any],
    ) -> None:
        results: dict[Result, int] = {}
        for item in (*(Value(index) for index in alive), *wanted):
            if isinstance(item, (Value, torch.fx.Node)):
                results.setdefault(item, len(results))
        self._graph = graph
        self.spliced = splice(graph, piece, program, stop, list(results))
        counters.add("splices")
        self.positions = {index: results[Value(index)] for index in alive}
        self._plan = [
            (0, results[item])
            if isinstance(item, (Value, torch.fx.Node))
            else (1, item.index)
            if isinstance(item, Input)
            else (2, item.index)
            if isinstance(item, External)
            else (3, item)
            for item in wanted
        ]
        self._lowerings: list[Lowered] = []
        # Positions on which the choice of a lowering depends, and the choice for each of their values.
        self._known: tuple[tuple[int, ...], dict[tuple[int | float, ...], Lowered]] = ((), {})
        self._fixed: frozenset[type] = frozenset()  # kinds of numbers that the backend takes as constants only

    def find(self, binding: tuple[int | float, ...]) -> Lowered | None:
        """Return the lowering for these sizes and numbers, if there is one."""
        restricted, by_binding = self._known
        key = tuple(binding[position] for position in restricted)
        found = by_binding.get(key)
        if found is None:
            found = next((lowered for lowered in self._lowerings if lowered.accepts(binding)), None)
            if found is not None:
                if len(by_binding) >= _KEPT_BINDINGS:
                    by_binding.clear()
                by_binding[key] = found
        return found

    def lower(self, binding: tuple[int | float, ...], arguments: Sequence[Any]) -> tuple[Lowered, bool]:
        """Return the lowering for these sizes and whether it was made now.

        Args:
            binding: Sizes of the captured graph's symbols, then the program's numbers.
            arguments: What the graph is about to be called with.
        """
        with self._graph.lock:
            found = self.find(binding)
            if found is not None:
                return found, False
            symbols = [symbol for _, symbol in self._graph.symbols]
            try:
                made = self._lower_numbers(symbols, binding, arguments)
            except Exception as error:
                # A backend's own failure must not change what a trace computes.
                logger.warning(
                    "lowering failed, so this graph runs node by node: %s: %s",
                    type(error).__name__,
                    str(error).strip().split("\n", 1)[0],
                )
                made = lower(self.spliced.copy(), arguments, symbols, binding, run_as_is)
            self._lowerings = [*self._lowerings[-_KEPT_LOWERINGS:], made]
            restricted = {position for lowered in self._lowerings for position in lowered.restricted()}
            self._known = (tuple(sorted(restricted)), {})
            return made, True

    def _lower_numbers(self, symbols: list[Any], binding: tuple[int | float, ...], arguments: Sequence[Any]) -> Lowered:
        """Lower for all numbers of the program or, where the backend cannot, with those of now as constants."""
        kinds = frozenset(type(number) for number in binding[len(symbols) :])
        while True:
            try:
                return lower(self.spliced.copy(), arguments, symbols, binding, self._graph.backend, self._fixed)
            except Exception as error:
                if kinds <= self._fixed:
                    raise
                self._fixed |= {float} if float in kinds - self._fixed else kinds
                logger.debug("numbers become constants: %s: %s", type(error).__name__, error)

    def deliver(self, computed: Sequence[Any], inputs: Sequence[Any], externals: Sequence[Any]) -> list[Any]:
        """Return the value of each wanted item."""
        sources = (computed, inputs, externals)
        return [item if source == 3 else sources[source][item] for source, item in self._plan]
