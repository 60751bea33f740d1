"""Gradient borders: where autograd can see gradients in a lowered graph.

A backend turns a graph into one function, which autograd treats as one operation: all results depend on its inputs, and none on another
result. So the gradient of a result lacks what flows through the other results, unless a border behind the tensor splits the graph.
:func:`mark_borders` marks such borders, at which :mod:`~nnsight.fx.lowering.regions` cuts, and :func:`partial_results` finds the tensors
without one.

An input that the graph edits in place, and a tensor that shares memory with it, count as results, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..effects import Kind, Memory, edited, edits, kind_of, name_of
from .region_plan import STRETCH

if TYPE_CHECKING:
    from .region_plan import Plan

#: Calls behind which no gradient flows.
_ENDING = frozenset({"detach", "detach_", "item", "tolist", "size", "stride", "dim", "numel"})


class _Observed:
    """The tensors that a graph hands out, by place: a result's position, or ``~n`` for input number ``n`` that is edited.

    A possible edit moves the border, but hides no use. A plan is more precise than the graph alone: it has seen on fakes what each call
    writes to, for example which arguments of ``batch_norm``.

    Attributes:
        order: Number of each node.
        since: For each tensor the node that made or last edited it.
        ready: For each tensor the node behind which no edit of it is possible.
        leaving: Calls that edit an input.
    """

    def __init__(self, graph: torch.fx.Graph, sharing: Sequence[int], plan: Plan | None) -> None:
        memory = Memory(graph)
        group: Callable[[torch.fx.Node], Any] = memory.group if plan is None else plan.memory
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._first = {node: inputs[first] for node, first in zip(inputs, sharing, strict=False) if first < len(inputs)}
        self.order = memory.order
        self.since: dict[int, torch.fx.Node] = {}
        self.ready: dict[int, torch.fx.Node] = {}
        self._tensors: dict[int, torch.fx.Node] = {}
        known = [(node, source) for node in graph.nodes if (source := edited(node)) is not None]
        possible = edits(graph) if plan is None else [(node, source) for node, given in plan.written.items() for source in given]
        self.leaving = {node for node, source in known if _base(source, _MAYBE).op == "placeholder"}
        self._aliases: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in graph.nodes:
            self._aliases.setdefault(self._base(node), []).append(node)

        def add(place: int, tensor: torch.fx.Node) -> None:
            base, place_in_memory, made = self._base(tensor), group(tensor), self.order[tensor]
            own = [edit for edit, source in known if self.order[edit] > made and self._base(source) is base]
            others = [edit for edit, source in possible if self.order[edit] > made and group(source) == place_in_memory]
            self._tensors[place] = tensor
            self.since[place] = max(own, key=self.order.__getitem__, default=tensor)
            self.ready[place] = max((self.since[place], *others), key=self.order.__getitem__)

        for place, result in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
            if isinstance(result, torch.fx.Node) and result.op not in ("placeholder", "get_attr"):
                add(place, result)
        changed = {self._base(source) for _, source in known}
        for number, node in enumerate(inputs):
            if self._base(node) in changed:
                add(~number, node)

    def _base(self, node: torch.fx.Node) -> torch.fx.Node:
        base = _base(node)
        return self._first.get(base, base)

    def uses(self, place: int) -> Iterator[torch.fx.Node]:
        """Yield the calls that use the tensor after the last edit of it."""
        tensor, since = self._tensors[place], self.since[place]
        names = [tensor] if since is tensor else self._aliases[self._base(tensor)]
        for node in names:
            yield from (user for user in node.users if user.op != "output" and self.order[user] > self.order[since])


#: Kinds of calls whose result is, and may be, a view of their first argument.
_SURELY, _MAYBE = (Kind.VIEW,), (Kind.VIEW, Kind.READ)


def _base(node: torch.fx.Node, kinds: tuple[Kind, ...] = _SURELY) -> torch.fx.Node:
    """Return the node of which ``node`` is a view, or the same tensor."""
    while True:
        source = edited(node)
        if source is None and kind_of(node) in kinds and node.all_input_nodes:
            source = node.all_input_nodes[0]
        if source is None:
            return node
        node = source


def _last_of_several(node: torch.fx.Node) -> torch.fx.Node:
    """Return the last of the calls from ``node`` on that unpack one tuple; no border may separate them."""
    while node.target is operator.getitem and node.next.target is operator.getitem and node.next.args[0] is node.args[0]:
        node = node.next
    return node


def mark_borders(graph_module: torch.fx.GraphModule, sharing: Sequence[int] = (), plan: Plan | None = None) -> bool:
    """Number the stretches of a graph anew, so that one ends behind each tensor that it hands out and uses further on, if there is one.

    ``sharing`` is for each input the first that it shares memory with, if any do.
    """
    observed = _Observed(graph_module.graph, sharing, plan)
    borders = {_last_of_several(ready) for place, ready in observed.ready.items() if any(observed.uses(place))}
    stretch = passed = 0
    for node in graph_module.graph.nodes:
        stretch = max(stretch, node.meta.get(STRETCH, stretch))
        if node.op not in ("placeholder", "get_attr"):
            node.meta[STRETCH] = stretch * (len(borders) + 1) + passed
        passed += node in borders
    return bool(borders)


def partial_results(
    graph: torch.fx.Graph,
    part_of: Callable[[torch.fx.Node], Any] = lambda node: None,
    sharing: Sequence[int] = (),
    plan: Plan | None = None,
) -> frozenset[int]:
    """Return the places of those tensors whose gradient may lack a part; ``part_of`` returns the lowered function that a node is in."""
    if not torch.is_grad_enabled():
        return frozenset()
    observed = _Observed(graph, sharing, plan)
    found = set()
    for place, since in observed.since.items():
        part = part_of(since)
        pending = [user for user in observed.uses(place) if part_of(user) is part]
        seen: set[torch.fx.Node] = set()
        while pending:
            node = pending.pop()
            if node in seen or not _passes_gradients(node):
                continue
            seen.add(node)
            if node in observed.leaving or any(user.op == "output" or part_of(user) is not part for user in node.users):
                found.add(place)
                break
            pending += node.users
    return frozenset(found)


def _passes_gradients(node: torch.fx.Node) -> bool:
    if name_of(node) in _ENDING:
        return False
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or example.is_floating_point() or example.is_complex()
