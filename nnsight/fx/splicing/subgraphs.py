"""Functions that an operator of a graph calls, such as the body of a loop, while they are written.

Torch's control operators take graph modules. All functions of one operator get the same arguments: those the operator passes, then
everything from around them that any of them uses, which is passed along. A function inside a function reaches what is around both
through the outer one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Function:
    """One function while it is written.

    Attributes:
        graph: Its graph, without an output until it ends.
        arguments: Placeholders of what the operator passes.
        around: The nodes of the graph around it that it uses, with the placeholder of each.
        results: What it returns.
    """

    graph: torch.fx.Graph = field(default_factory=torch.fx.Graph)
    arguments: list[torch.fx.Node] = field(default_factory=list)
    around: dict[torch.fx.Node, torch.fx.Node] = field(default_factory=dict)
    results: torch.fx.Node | tuple[torch.fx.Node, ...] = ()

    def argument(self, name: str) -> torch.fx.Node:
        """Add an argument that the operator passes."""
        self.arguments.append(self.graph.placeholder(name))
        return self.arguments[-1]

    def reach(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return what stands in this function for a node of the graph around it."""
        if node not in self.around:
            self.around[node] = self.graph.placeholder(node.name)
        return self.around[node]

    def finished(self, used: list[torch.fx.Node], modules: dict[str, torch.nn.Module]) -> torch.fx.GraphModule:
        """Return the function as a module.

        Args:
            used: What the functions of its operator use from around them, in the order in which it is passed.
            modules: Those that nodes may refer to.
        """
        graph = torch.fx.Graph()
        new = {old: graph.placeholder(old.name) for old in self.arguments}
        for node in used:
            placeholder = graph.placeholder(node.name)
            if node in self.around:
                new[self.around[node]] = placeholder
        graph.graph_copy(self.graph, new)
        graph.output(torch.fx.map_arg(self.results, new.__getitem__))
        graph.lint()
        return torch.fx.GraphModule(modules, graph, class_name="Function")
