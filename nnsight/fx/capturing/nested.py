"""Graphs nested in a captured graph: activation checkpoints, and nested compile regions of the model.

Dynamo captures such a part of the model as a graph of its own, which an operator calls. A program knows one list of nodes and could not
reach the taps inside. So the nodes are written into the outer graph, and a :class:`NestedGraph` keeps where they came from. Where a program
does nothing inside, the splicer writes the call of the operator instead of the nodes, so a checkpoint is recomputed in the backward pass.

Operators that may call a graph any number of times, such as loops and branches, stay as they are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from .taps import tap

#: Operators that call their first argument, a graph, once, with the position of the graph's first input among their arguments.
_FIRST_INPUT = {"tag_activation_checkpoint": 1, "invoke_subgraph": 2}


@dataclass(frozen=True, eq=False)
class NestedGraph:
    """A stretch of a captured graph that was a graph of its own.

    Attributes:
        start: The first of its nodes.
        last: The last of them.
        operator: The operator that called the graph.
        name: The attribute that holds the graph, without taps.
        args: The arguments of the operator behind the graph.
        kwargs: Those by name.
        results: The nodes or constants that the graph returns.
        outcome: The ``example_value`` of the call.
    """

    start: torch.fx.Node
    last: torch.fx.Node
    operator: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]
    outcome: Any


def unnest(graph_module: torch.fx.GraphModule) -> list[NestedGraph]:
    """Write the graphs with taps that operators of ``graph_module`` call once into the graph itself.

    Returns:
        Where they came from, an outer one before those in it.
    """
    calls = [node for node in graph_module.graph.nodes if _is_called_once(graph_module, node)]
    found = [nested for node in calls for nested in _write_out(graph_module, node)]
    if found:
        graph_module.graph.lint()
        graph_module.recompile()
    return found


def call_nested(graph: torch.fx.Graph, nested: NestedGraph, find: Callable[[torch.fx.Node], Any]) -> dict[torch.fx.Node, torch.fx.Node]:
    """Write a call of ``nested`` into ``graph``, in which ``find`` returns the new node for a captured one; return that of each result."""
    args, kwargs = torch.fx.map_arg((nested.args, nested.kwargs), find)
    function = graph.get_attr(nested.name)
    call = graph.call_function(nested.operator, (function, *args), kwargs)
    call.meta = {**nested.start.meta, "example_value": nested.outcome}
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for number, result in enumerate(nested.results):
        if isinstance(result, torch.fx.Node) and result not in nested.args:
            made[result] = graph.call_function(operator.getitem, (call, number))
            made[result].meta = {**call.meta, "example_value": nested.outcome[number]}
    return made


def _is_called_once(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether ``node`` calls once a graph with taps in it."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() not in _FIRST_INPUT:
        return False
    function: Any = node.args[0] if node.args else None
    if getattr(function, "op", "") != "get_attr" or any(user.target is not operator.getitem for user in node.users):
        return False
    body = getattr(graph_module, function.target)
    is_graph = isinstance(body, torch.fx.GraphModule)
    return is_graph and any(inner.target is tap or _is_called_once(body, inner) for inner in body.graph.nodes)


def _write_out(graph_module: torch.fx.GraphModule, call: Any) -> list[NestedGraph]:
    """Replace ``call`` by the nodes of the graph it calls."""
    graph, function = graph_module.graph, call.args[0]
    original = getattr(graph_module, function.target)
    body = copy.deepcopy(original)  # two calls may share it
    inner = unnest(body)
    name = _add(graph_module, f"{function.target}_untapped", _without_taps(original))
    first = _FIRST_INPUT[call.target.name()]
    new: dict[torch.fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[first:], strict=True))
    written: list[torch.fx.Node] = []
    results: tuple[Any, ...] = ()
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "output":
                results = tuple(torch.fx.map_arg(node.args[0], new.__getitem__))
            elif node.op != "placeholder":
                new[node] = graph.node_copy(node, new.__getitem__)
                written.append(new[node])
                if node.op == "get_attr":
                    new[node].target = _add(graph_module, str(node.target), attrgetter(str(node.target))(body))
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    outcome = call.meta["example_value"]
    outer = NestedGraph(written[0], written[-1], call.target, name, call.args[1:], dict(call.kwargs), results, outcome)
    graph.erase_node(call)
    if not function.users:
        graph.erase_node(function)
    moved = []
    for nested in inner:
        args, kwargs, results = torch.fx.map_arg((nested.args, nested.kwargs, nested.results), new.__getitem__)
        held = _add(graph_module, nested.name, getattr(body, nested.name))
        ends = {"start": new[nested.start], "last": new[nested.last]}
        moved.append(replace(nested, **ends, name=held, args=args, kwargs=kwargs, results=results))
    return [outer, *moved]


def _without_taps(original: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph, and of those it calls, without taps."""
    untapped = copy.deepcopy(original)
    for module in untapped.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=tap):
                nodes = [leaf for leaf in node.args[1] if isinstance(leaf, torch.fx.Node)]
                tensors = [leaf for leaf in nodes if isinstance(leaf.meta.get("example_value"), torch.Tensor)]
                for user in list(node.users):
                    user.replace_all_uses_with(tensors[user.args[1]])
                    module.graph.erase_node(user)
                module.graph.erase_node(node)
            module.recompile()
    return untapped


def _add(graph_module: torch.fx.GraphModule, name: str, value: Any) -> str:
    """Give ``graph_module`` an attribute; return its name, which begins with ``name``."""
    stem, number = name.replace(".", "_"), 0
    name = stem
    while hasattr(graph_module, name):
        number += 1
        name = f"{stem}_{number}"
    setattr(graph_module, name, value)
    return name
