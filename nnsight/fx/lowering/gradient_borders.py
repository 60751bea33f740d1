"""Where gradients can be seen in a lowered graph.

A backend turns a graph into one function, and to autograd that function is one operation: what it returns is made of what it takes, and one
result never of another. So the gradient of a result lacks whatever flows through the function's other results, unless the graph is
lowered in two, with a border right behind the tensor. :func:`mark_borders` asks for such borders, for
:mod:`~nnsight.fx.lowering.regions` to cut at, and :func:`partial_results` finds the tensors that have none.

The same holds for an input that the graph edits in place: what the caller then has is a result of the graph, too. And so for one that
shares memory with it, such as the tensor of which the block has edited a view that it took before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..effects import Kind, Memory, edited, effects, kind_of, written
from .repeated_modules import STRETCH

if TYPE_CHECKING:
    from .region_plan import Plan

#: Calls behind which no gradient flows.
_ENDING = frozenset({"detach", "detach_", "item", "tolist", "size", "stride", "dim", "numel"})


class _Observed:
    """Tensors that a graph hands out, and from where on they are what the caller will have.

    What may have been an edit, but is not known for one, moves the border and hides no use. A plan knows: it has seen on fakes what each
    call writes to, where the graph alone shows a call of ``batch_norm`` that might write to anything it is given.

    Attributes:
        order: Number of each node.
        since: For each tensor, by its place, the node that made or last edited it. Places of results are their positions; input
            number ``n`` that is edited has the place ``~n``.
        ready: For each tensor the node behind which nothing edits it any more, as far as can be told.
        leaving: Calls that edit an input.

    Args:
        graph: Not changed.
        sharing: For each input the first that it shares memory with, if any do.
        plan: What is known from a run on fakes, if there was one.
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
        edits = [(node, source) for node in graph.nodes if (source := edited(node)) is not None]
        if plan is None:
            possible = [(node, source) for node in effects(graph) if node.op != "output" for source in written(node)]
        else:
            possible = [(node, source) for node, sources in plan.written.items() for source in sources]
        self.leaving = {node for node, source in edits if _base(source, _MAYBE).op == "placeholder"}
        self._aliases: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in graph.nodes:
            self._aliases.setdefault(self._base(node), []).append(node)

        def add(place: int, tensor: torch.fx.Node) -> None:
            base, place_in_memory, made = self._base(tensor), group(tensor), self.order[tensor]
            own = [edit for edit, source in edits if self.order[edit] > made and self._base(source) is base]
            others = [edit for edit, source in possible if self.order[edit] > made and group(source) == place_in_memory]
            self._tensors[place] = tensor
            self.since[place] = max(own, key=self.order.__getitem__, default=tensor)
            self.ready[place] = max((self.since[place], *others), key=self.order.__getitem__)

        (output,) = (node for node in graph.nodes if node.op == "output")
        for place, result in enumerate(output.args[0]):
            if isinstance(result, torch.fx.Node) and result.op not in ("placeholder", "get_attr"):
                add(place, result)
        changed = {self._base(source) for _, source in edits}
        for number, node in enumerate(inputs):
            if self._base(node) in changed:
                add(~number, node)

    def _base(self, node: torch.fx.Node) -> torch.fx.Node:
        base = _base(node)
        return self._first.get(base, base)

    def uses(self, place: int) -> Iterator[torch.fx.Node]:
        """Yield the calls that take the tensor as the caller will have it."""
        tensor, since = self._tensors[place], self.since[place]
        names = [tensor] if since is tensor else self._aliases[self._base(tensor)]
        for node in names:
            yield from (user for user in node.users if user.op != "output" and self.order[user] > self.order[since])


#: Results that are, and that may be, their first argument or a view of it; beside those of edits in place.
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
    """Return the last of the nodes from ``node`` on that take apart one tuple; no border can be between them."""
    while node.target is operator.getitem and node.next.target is operator.getitem and node.next.args[0] is node.args[0]:
        node = node.next
    return node


def mark_borders(graph_module: torch.fx.GraphModule, sharing: Sequence[int] = (), plan: Plan | None = None) -> bool:
    """Number the stretches of a graph anew, so that one ends behind each tensor that it hands out and goes on to use.

    Args:
        graph_module: Changed.
        sharing: For each input the first that it shares memory with, if any do.
        plan: What is known of it from a run on fakes.

    Returns:
        Whether there is such a tensor.
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
    """Return the places of those tensors whose gradient, as autograd computes it, may lack a part.

    Args:
        graph: What is lowered.
        part_of: Tells which of the functions that it is lowered to a node is in.
        sharing: As for :func:`mark_borders`.
        plan: Likewise.
    """
    if not torch.is_grad_enabled():
        return frozenset()
    observed = _Observed(graph, sharing, plan)
    found = set()
    for place, since in observed.since.items():
        part = part_of(since)
        pending = [user for user in observed.uses(place) if part_of(user) is part]
        seen = set(pending)
        while pending:
            node = pending.pop()
            if not _passes_gradients(node):
                continue
            if node in observed.leaving or any(user.op == "output" or part_of(user) is not part for user in node.users):
                found.add(place)
                break
            for user in node.users:
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
    return frozenset(found)


def _passes_gradients(node: torch.fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _ENDING:
        return False
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or example.is_floating_point() or example.is_complex()
