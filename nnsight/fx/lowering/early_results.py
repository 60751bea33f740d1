"""Results that the block takes while a lowered graph still runs.

Autograd knows a tensor by its object: the later regions of a graph must get the object that the block holds. Otherwise hooks,
``retain_grad`` and ``torch.autograd.grad`` would be about a tensor that nothing depends on. Torch can make a lazy tensor the real one
(``torch.utils.swap_tensors``) only before autograd saves it. So a graph with gradient borders hands each result over where it is computed.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..effects import Kind, kind_of

#: Takes the position of a result and the result; returns the object with which the graph goes on.
Take = Callable[[int, torch.Tensor], torch.Tensor]

_local = threading.local()


@contextlib.contextmanager
def taking(take: Take | None) -> Iterator[None]:
    """Call ``take`` with the results that graphs hand over in this context."""
    before, _local.take = getattr(_local, "take", None), take
    try:
        yield
    finally:
        _local.take = before


def hand_over(results: list[Any], positions: dict[int, int], others: Sequence[Any]) -> list[Any]:
    """Hand over results of a graph that still runs; return the objects with which it goes on. Called by graphs.

    Args:
        results: Results of a part of the graph.
        positions: For some of ``results``, by index, the position in the results of the graph.
        others: Values that the graph needs further. If a result is one of these objects, it is not handed over.
    """
    take: Take | None = getattr(_local, "take", None)
    if take is None:
        return results
    for index, position in positions.items():
        real = results[index]
        taken = real if any(real is other for other in others) else take(position, real)
        results = [taken if result is real else result for result in results]
    return results


def with_hand_overs(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph, to be run node by node, that hands over each result that it also uses."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    order = {node: number for number, node in enumerate(graph.nodes)}
    for position, result in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        if isinstance(result, torch.fx.Node) and result.op not in ("placeholder", "get_attr") and len(result.users) > 1:
            others = [node for node in _maybe_the_same(result) if any(order.get(user, -1) > order[result] for user in node.users)]
            with graph.inserting_after(result):
                handed = graph.call_function(hand_over, ([result], {0: position}, others))  # type: ignore[dict-item]
            with graph.inserting_after(handed):
                taken = graph.call_function(operator.getitem, (handed, 0))
            result.replace_all_uses_with(taken, delete_user_cb=functools.partial(operator.is_not, handed))
    return torch.fx.GraphModule(graph_module, graph)


def _maybe_the_same(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes whose value may be the same object as that of ``node``, as for ``contiguous()`` and edits in place."""
    found, pending = [], [node]
    while pending:
        last = pending.pop()
        if last.op not in ("placeholder", "get_attr") and kind_of(last) is not Kind.NEW:
            pending += last.all_input_nodes
            found += last.all_input_nodes
    return list(dict.fromkeys(found))
