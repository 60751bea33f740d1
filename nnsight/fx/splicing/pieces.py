"""Pieces of a captured graph, and the spliced graphs that are made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capturing.graph import CapturedGraph
from ..program import Value
from .passes import PassRun


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of a captured graph between two cuts.

    Attributes:
        start: Number of its first node.
        inputs: The graph's placeholders, then the nodes of earlier pieces that this or a later piece uses.
        input_index: Position of each in ``inputs``.
    """

    start: int
    inputs: tuple[torch.fx.Node, ...]
    input_index: dict[torch.fx.Node, int]

    @staticmethod
    def of(graph: CapturedGraph, start: int) -> Piece:
        """Return the piece of ``graph`` that begins at node number ``start``."""
        inputs = list(graph.placeholders)
        if start:
            inputs += [
                node
                for node in graph.nodes[:start]
                if node.op != "placeholder"
                and isinstance(node.meta.get("example_value"), (torch.Tensor, torch.SymInt))
                and any(graph.order[user] >= start for user in node.users)
            ]
        return Piece(start, tuple(inputs), {node: index for index, node in enumerate(inputs)})

    def without_duplicates(self, values: Sequence[Any]) -> Piece:
        """Return this piece with one input for each tensor, because backends take none twice; ``values`` are equal for equal inputs."""
        inputs: list[torch.fx.Node] = []
        position: dict[Any, int] = {}
        index: dict[torch.fx.Node, int] = {}
        for node, value in zip(self.inputs, values, strict=True):
            if value not in position:
                position[value] = len(inputs)
                inputs.append(node)
            index[node] = position[value]
        return Piece(self.start, tuple(inputs), index)


#: A result of a piece: a value of the program, or a node of the captured graph.
Result = Value | torch.fx.Node


@dataclass(frozen=True, eq=False)
class SplicedGraph:
    """A piece of a captured graph with a program in it.

    Attributes:
        graph_module: The new graph; returns a tuple, one tensor for each requested result.
        inputs: Positions of those inputs of the piece that it takes, before its externals.
        externals: Number of externals it takes.
        marks: Names of the nodes that come from the user's block, with the user's line.
        passes: The passes over it, with numbers of nodes.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[int, ...]
    externals: int
    marks: dict[str, str]
    passes: tuple[PassRun, ...] = ()

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return those of ``inputs`` that the graph takes: some of the piece's, and all externals and numbers behind them."""
        own = sum(node.op == "placeholder" for node in self.graph_module.graph.nodes) - len(self.inputs)
        return [inputs[index] for index in self.inputs] + list(inputs[len(inputs) - own :])

    def copy(self) -> torch.fx.GraphModule:
        """Return a copy of the graph module, for a backend to consume."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.graph_module.graph, {}))
        for new, old in zip(graph.nodes, self.graph_module.graph.nodes, strict=True):
            new.meta = dict(old.meta)
        return torch.fx.GraphModule(self.graph_module, graph, class_name="Spliced")

    def code(self) -> str:
        """Return the graph as Python source, with a comment at each line that comes from the user's block."""
        source = self.graph_module.graph.python_code("self").src
        lines = []
        for line in source.splitlines():
            name = self.node_of(line)
            lines.append(f"{line}  # <-- {self.marks[name]}" if name in self.marks else line)
        return "\n".join(lines).strip()

    def node_of(self, line: str) -> str | None:
        """Return the name of the node that ``line`` of the generated source computes, if it shows one."""
        assigned = re.match(r"\s*(\w+)(?: :[^=]*)? = ", line) or re.search(r";\s+(\w+) = None$", line)
        name = assigned.group(1) if assigned else None
        if name not in self.marks and "] =" in line:  # an assignment to an index shows its node among those that it deletes
            ended = re.findall(r"\b(\w+) = None\b", line)
            name = next((other for other in ended if other in self.marks), name)
        return name


def as_argument(number: int | float) -> int | torch.Tensor:
    """Return a number of a program as the spliced graph takes it."""
    return number if isinstance(number, int) else torch.tensor(number, dtype=torch.float64)
