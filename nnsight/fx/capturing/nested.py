"""Graphs nested in a captured graph: activation checkpoints, and nested compile regions of the model.

Dynamo captures such a part of the model as a separate graph, and an operator calls it. A program knows one list of nodes, and could not
reach the taps in the nested graph. So its nodes are inlined into the outer graph. The nodes of a checkpoint get the tags that the operator
would give them. With these tags, ahead-of-time autograd computes the nodes again in the backward pass.

Operators that may call a graph any number of times, such as loops and branches, stay as they are.
"""

from __future__ import annotations

import copy
import itertools
import operator
from operator import attrgetter
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from .taps import tap

#: Operators that call a graph, their first argument, once; and the position of the graph's first input among their arguments.
_FIRST_INPUT = {"tag_activation_checkpoint": 1, "invoke_subgraph": 2}

_checkpoints = itertools.count()


def unnest(graph_module: torch.fx.GraphModule) -> None:
    """Inline the nested graphs that contain taps and that an operator of ``graph_module`` calls once."""
    calls = [node for node in graph_module.graph.nodes if _is_called_once(graph_module, node)]
    for node in calls:
        _inline(graph_module, node)
    if calls:
        graph_module.graph.lint()
        graph_module.recompile()


def _is_called_once(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether ``node`` is an operator that calls a graph with taps once."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() not in _FIRST_INPUT:
        return False
    function: Any = node.args[0] if node.args else None
    if getattr(function, "op", "") != "get_attr" or any(user.target is not operator.getitem for user in node.users):
        return False
    body = getattr(graph_module, function.target)
    is_graph = isinstance(body, torch.fx.GraphModule)
    return is_graph and any(inner.target is tap or _is_called_once(body, inner) for inner in body.graph.nodes)


def _inline(graph_module: torch.fx.GraphModule, call: Any) -> None:
    """Replace ``call`` by the nodes of the graph that it calls."""
    graph, function = graph_module.graph, call.args[0]
    body = copy.deepcopy(getattr(graph_module, function.target))  # two calls may share it
    unnest(body)
    name = call.target.name()
    tags = {} if name == "invoke_subgraph" else {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(_checkpoints)}
    given = call.args[_FIRST_INPUT[name] :]
    new: dict[torch.fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
    results: Any = ()
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "output":
                results = torch.fx.map_arg(node.args[0], new.__getitem__)
            elif node.op != "placeholder":
                new[node] = graph.node_copy(node, new.__getitem__)
                new[node].meta.update(tags)
                if node.op == "get_attr":
                    new[node].target = _add(graph_module, str(node.target), attrgetter(str(node.target))(body))
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
    if not function.users:
        graph.erase_node(function)


def _add(graph_module: torch.fx.GraphModule, name: str, value: Any) -> str:
    """Add ``value`` to ``graph_module`` as a new attribute. Its name begins with ``name``, and is returned."""
    stem, number = name.replace(".", "_"), 0
    name = stem
    while hasattr(graph_module, name):
        number += 1
        name = f"{stem}_{number}"
    setattr(graph_module, name, value)
    return name
