"""Graphs within a captured graph: what an activation checkpoint, or a nested region of the model, computes.

Dynamo captures such a part of the model as a graph of its own, which an operator calls. The taps in it would be out of reach of
a program, which knows one list of nodes. So the nodes are written into the graph around them, between the same inputs and outputs,
and a :class:`NestedGraph` remembers where they came from. Where a program has nothing to do inside, the splicer writes
the call of the operator again instead of the nodes: what nobody looks into is recomputed in the backward pass, as the model says.

Operators that may call a graph any number of times, such as loops and branches, stay as they are.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .taps import tap

#: Operators that call a graph once, with the number of the argument that is its first input. The graph is the first argument.
_FIRST_INPUT = {"tag_activation_checkpoint": 1, "invoke_subgraph": 2}


@dataclass(frozen=True, eq=False)
class NestedGraph:
    """A stretch of a captured graph that was a graph of its own.

    Attributes:
        start: The first of its nodes.
        last: The last of them.
        operator: What called the graph.
        name: The attribute that holds the graph, without taps.
        args: What the operator was called with besides the graph.
        kwargs: The same by name.
        results: What the graph returns: nodes, or constants.
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
    calls = [node for node in graph_module.graph.nodes if _called_once(graph_module, node) is not None]
    found: list[NestedGraph] = []
    for node in calls:
        found += _write_out(graph_module, node)
    if found:
        graph_module.graph.lint()
        graph_module.recompile()
    return found


def call_nested(
    graph: torch.fx.Graph, nested: NestedGraph, find: Callable[[torch.fx.Node], Any]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Write the call that ``nested`` was into ``graph``.

    Args:
        graph: Where to write.
        nested: What to call.
        find: Returns what stands there for a captured node.

    Returns:
        The new node of each result.
    """
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


def _called_once(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """Return the graph that ``node`` calls once, if it does and there are taps in it."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() not in _FIRST_INPUT:
        return None
    function = node.args[0] if node.args else None
    if not isinstance(function, torch.fx.Node) or function.op != "get_attr":
        return None
    if any(user.target is not operator.getitem for user in node.users):
        return None
    body = getattr(graph_module, str(function.target))
    return body if isinstance(body, torch.fx.GraphModule) and _has_taps(body) else None


def _has_taps(body: torch.fx.GraphModule) -> bool:
    return any(node.target is tap or _called_once(body, node) is not None for node in body.graph.nodes)


def _write_out(graph_module: torch.fx.GraphModule, call: torch.fx.Node) -> list[NestedGraph]:
    """Replace ``call`` by the nodes of the graph it calls."""
    graph, function = graph_module.graph, call.args[0]
    assert isinstance(function, torch.fx.Node)
    original = getattr(graph_module, str(function.target))
    body = copy.deepcopy(original)  # two calls may share it
    inner = unnest(body)
    name = _add(graph_module, f"{function.target}_untapped", _without_taps(original))
    first = _FIRST_INPUT[call.target.name()]  # type: ignore[union-attr]
    inputs = (node for node in body.graph.nodes if node.op == "placeholder")
    new: dict[torch.fx.Node, Any] = dict(zip(inputs, call.args[first:], strict=True))
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
                    new[node].target = _add(graph_module, str(node.target), _attribute(body, str(node.target)))
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    outcome = call.meta["example_value"]
    outer = NestedGraph(written[0], written[-1], call.target, name, call.args[1:], dict(call.kwargs), results, outcome)
    graph.erase_node(call)
    if not function.users:
        graph.erase_node(function)
    return [outer, *(_moved(nested, new, graph_module, body) for nested in inner)]


def _moved(
    nested: NestedGraph,
    new: dict[torch.fx.Node, Any],
    graph_module: torch.fx.GraphModule,
    body: torch.fx.GraphModule,
) -> NestedGraph:
    """Return ``nested``, found in ``body``, as it is where the nodes of ``body`` have been written to."""
    args, kwargs, results = torch.fx.map_arg((nested.args, nested.kwargs, nested.results), new.__getitem__)
    return NestedGraph(
        new[nested.start],
        new[nested.last],
        nested.operator,
        _add(graph_module, nested.name, getattr(body, nested.name)),
        args,
        kwargs,
        results,
        nested.outcome,
    )


def _without_taps(original: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph, and of those it calls, without taps."""
    untapped = copy.deepcopy(original)
    for module in untapped.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=tap):
                tensors = [leaf for leaf in node.args[1] if _is_tensor(leaf)]
                for user in list(node.users):
                    user.replace_all_uses_with(tensors[user.args[1]])
                    module.graph.erase_node(user)
                module.graph.erase_node(node)
            module.recompile()
    return untapped


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.fx.Node) and isinstance(leaf.meta.get("example_value"), torch.Tensor)


def _attribute(module: torch.nn.Module, path: str) -> Any:
    return operator.attrgetter(path)(module)


def _add(graph_module: torch.fx.GraphModule, name: str, value: Any) -> str:
    """Give ``graph_module`` an attribute; return its name, which begins with ``name``."""
    stem, number = name.replace(".", "_"), 0
    name = stem
    while hasattr(graph_module, name):
        number += 1
        name = f"{stem}_{number}"
    setattr(graph_module, name, value)
    return name
