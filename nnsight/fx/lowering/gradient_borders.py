"""Gradient borders: where a graph must be split so that the gradients of its results are complete.

A backend turns a graph into one function, which autograd treats as one operation: all results depend on its inputs, and no result depends
on another one. So if a result is also used inside the graph, its gradient lacks the part that flows through the other results. A border
after the computation of that result splits the graph, and makes the gradient complete. :func:`mark_borders` marks such borders, at which
:mod:`~nnsight.fx.lowering.regions` cuts, and :func:`partial_results` finds the tensors whose gradient is incomplete.

Inputs that the graph edits in place, and tensors that share memory with them, count as results, too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..effects import Kind, Memory, edited, edits, kind_of, name_of
from ..splicing.passes import base_of
from .region_plan import STRETCH

if TYPE_CHECKING:
    from ..splicing.pieces import SplicedGraph
    from .region_plan import Plan

#: Calls through which no gradient flows.
_ENDING = frozenset({"detach", "detach_", "item", "tolist", "size", "stride", "dim", "numel"})


class _Results:
    """The tensors that leave a graph, by place: the position of a result, or ``~n`` for input number ``n`` if it is edited.

    A call that only *may* edit a tensor moves the border of the tensor, but uses of the tensor before this call still count. A ``plan`` is
    more precise than the graph alone: it knows the arguments to which each call writes, for example those of ``batch_norm``.

    Attributes:
        order: Number of each node.
        since: For each tensor, the node that made it or surely edited it last.
        ready: For each tensor, the last node that makes it or may edit it.
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

    @functools.cached_property
    def _in_memory(self) -> dict[torch.fx.Node, list[torch.fx.Node]]:
        """The nodes whose tensors share memory, by the node that allocates it."""
        found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in self.order:
            found.setdefault(base_of(node), []).append(node)
        return found

    def uses(self, place: int) -> Iterator[torch.fx.Node]:
        """Yield the calls that use the tensor after its last sure edit."""
        tensor, since = self._tensors[place], self.since[place]
        names = [tensor] if since is tensor else self._aliases[self._base(tensor)]
        for node in names:
            yield from (user for user in node.users if user.op != "output" and self.order[user] > self.order[since])

    def later_uses(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Return the calls that use the result of ``node``, or the tensor that it edits, after it. The output node counts as one."""
        source = edited(node)
        names = [] if source is None else self._in_memory[base_of(source)]
        later = [user for name in names for user in name.users if user.op == "output" or self.order[user] > self.order[node]]
        return [*node.users, *later]


#: Kinds of calls whose result surely is, or may be, a view of their first argument.
_SURELY, _MAYBE = (Kind.VIEW,), (Kind.VIEW, Kind.READ)


def _base(node: torch.fx.Node, kinds: tuple[Kind, ...] = _SURELY) -> torch.fx.Node:
    """Return the node that computes the base of ``node``, through views and edits in place."""
    while True:
        source = edited(node)
        if source is None and kind_of(node) in kinds and node.all_input_nodes:
            source = node.all_input_nodes[0]
        if source is None:
            return node
        node = source


def _last_of_several(node: torch.fx.Node) -> torch.fx.Node:
    """Return the last of the consecutive calls, from ``node`` on, that unpack the same tuple: no border may separate them."""
    while node.target is operator.getitem and node.next.target is operator.getitem and node.next.args[0] is node.args[0]:
        node = node.next
    return node


def mark_borders(graph_module: torch.fx.GraphModule, sharing: Sequence[int] = (), plan: Plan | None = None) -> bool:
    """Renumber the stretches of a graph, so that one ends after each result that the graph also uses, if there is one.

    ``sharing`` has, for each input, the position of the first input that it shares memory with; it is empty if none do.
    """
    results = _Results(graph_module.graph, sharing, plan)
    borders = {_last_of_several(ready) for place, ready in results.ready.items() if any(results.uses(place))}
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
    """Return the places of the tensors whose gradient may be incomplete; ``part_of`` returns the lowered function that a node is in."""
    if not torch.is_grad_enabled():
        return frozenset()
    results = _Results(graph, sharing, plan)
    found = set()
    for place, since in results.since.items():
        part = part_of(since)
        pending = [user for user in results.uses(place) if part_of(user) is part]
        seen: set[torch.fx.Node] = set()
        while pending:
            node = pending.pop()
            if node in seen or not _passes_gradients(node):
                continue
            seen.add(node)
            users = results.later_uses(node)
            if node in results.leaving or any(user.op == "output" or part_of(user) is not part for user in users):
                found.add(place)
                break
            pending += users
    return frozenset(found)


def patched_rows(spliced: SplicedGraph, rows: Mapping[Any, tuple[torch.fx.Node, torch.fx.Node]]) -> frozenset[Any]:
    """Return the keys of ``rows`` whose gradient is incomplete because the block of another invoke edits their whole tensor in place.

    ``rows`` has the node of the rows of an invoke, and that of their whole tensor. The gradient is that of the whole tensor after the edit,
    so it lacks what was computed from the rows before.
    """
    graph = spliced.graph_module.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    edits_by_block = [(node, source) for node in graph.nodes if node.name in spliced.marks and (source := edited(node)) is not None]
    found = set()
    for key, (given, whole) in rows.items():
        own = _way(given, whole)
        ways = {edit: way for edit, source in edits_by_block if (way := _way(source, whole)) is not None and order[edit] > order[given]}
        others = [order[edit] for edit, way in ways.items() if own is None or way[: len(own)] != own]
        # An edit by the block of the rows is no such use: for autograd, too, their gradient is that after the edit.
        if others and any(order[user] <= max(others) and (user not in ways or order[user] in others) for user in _users_of_views(given)):
            found.add(key)
    return frozenset(found)


def _way(node: torch.fx.Node, whole: torch.fx.Node) -> list[Any] | None:
    """Return the views that lead from ``whole`` to ``node``: for each, what is called, and the arguments but for the tensor."""
    way: list[Any] = []
    while node is not whole:
        source = edited(node)
        if source is None and kind_of(node) in _MAYBE and node.all_input_nodes:
            source = node.all_input_nodes[0]
        if source is None:
            return None
        if edited(node) is None:
            way.append((node.target, node.args[1:], node.kwargs))
        node = source
    return way[::-1]


def _users_of_views(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the calls that compute with a tensor or with a view of it, if gradients flow through them."""
    for user in node.users:
        if user.op == "output" or edited(user) is node or not _passes_gradients(user):
            continue
        if kind_of(user) in _SURELY and user.args[0] is node:
            yield from _users_of_views(user)
        else:
            yield user


def _passes_gradients(node: torch.fx.Node) -> bool:
    if name_of(node) in _ENDING:
        return False
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or example.is_floating_point() or example.is_complex()
