"""Results that are not computed by a graph but given by its inputs: an input, edited or not, or a view of an edited input.

Ahead-of-time autograd mixes up the results of a graph that returns an edited input and also edits another one that requires a gradient. And
it makes views of edited inputs from the sizes, strides and storage offset of the tensors that the graph was lowered with, also if the input
of a later call is at another place of its memory. So such results are removed from the graph, and its caller makes them from the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_aggregate

from ..effects import Kind, edited, kind_of, name_of

logger = logging.getLogger("nnsight.fx")

#: Methods that change the sizes or strides of a tensor in place, so that a view that was made before is not one of the same sizes later.
_CHANGING_SHAPES = frozenset("as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split())


class Given(NamedTuple):
    """A result that the inputs give: the position of an input, and the calls that return a view of it, in order."""

    position: int
    views: tuple[_View, ...]

    def result(self, inputs: Sequence[Any]) -> Any:
        """Return the result for these inputs of the graph."""
        value = inputs[self.position]
        for view in self.views:
            value = view.of(value, inputs)
        return value


@dataclass(frozen=True)
class _Position:
    """Stands for an input of the graph in the arguments of a call."""

    number: int


#: Stands for the viewed tensor in the arguments of a call.
_VIEWED = object()


class _View(NamedTuple):
    target: Any
    args: Any
    kwargs: Any

    def of(self, value: Any, inputs: Sequence[Any]) -> Any:
        """Return the view of ``value``. ``inputs`` are those of the graph: some are sizes and numbers."""

        def argument(leaf: Any) -> Any:
            return value if leaf is _VIEWED else inputs[leaf.number] if isinstance(leaf, _Position) else leaf

        args, kwargs = map_aggregate(self.args, argument), map_aggregate(self.kwargs, argument)
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)


def drop_given_results(graph_module: torch.fx.GraphModule) -> dict[int, Given]:
    """Remove the results that the inputs give from the results of a graph, whose placeholders have an ``example_value``.

    Returns:
        The removed results, by their positions.
    """
    graph = graph_module.graph
    inputs = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    examples = [node.meta.get("example_value") for node in inputs]
    output = graph.output_node()
    changed = {_origin(node, inputs)[0] for node in graph.nodes if edited(node) is not None}
    reshaped = any(name_of(node) in _CHANGING_SHAPES for node in graph.nodes)
    returned, found = [], {}
    for place, node in enumerate(output.args[0]):  # type: ignore[arg-type]
        source, views = _origin(node, inputs) if isinstance(node, torch.fx.Node) else (None, ())
        given = Given(inputs[source], views) if source in inputs else None
        is_tensor = given is not None and isinstance(examples[given.position], torch.Tensor)
        if given and is_tensor and (not views or (source in changed and not reshaped and _is_view(given, examples))):
            found[place] = given
        else:
            returned.append(node)
    if found:
        output.args = (tuple(returned),)
        graph.lint()
        graph_module.recompile()
    return found


def with_given_results(function: Callable[..., Any], given: dict[int, Given]) -> Callable[..., Any]:
    """Return a function that also returns the results that :func:`drop_given_results` has removed."""

    def with_given(*inputs: Any) -> list[Any]:
        results = list(function(*inputs))
        with torch._C.DisableTorchFunction():  # function modes of the user have seen these views already
            for place, one in sorted(given.items()):
                results.insert(place, one.result(inputs))
        return results

    return with_given


def edited_tensor(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that computed the tensor that ``node`` returns, before any edits in place."""
    while (source := edited(node)) is not None:
        node = source
    return node


def _origin(node: torch.fx.Node, inputs: Mapping[torch.fx.Node, int]) -> tuple[torch.fx.Node, tuple[_View, ...]]:
    """Return the tensor of which ``node`` is, or may be, a view, before any edits in place, and the calls that make this view, in order."""
    views: list[_View] = []
    while True:
        node = edited_tensor(node)
        sources = [source for source in node.all_input_nodes if not _is_number(source)]
        if kind_of(node) not in (Kind.VIEW, Kind.READ) or len(sources) != 1:
            return node, tuple(reversed(views))
        source = sources[0]
        stand_ins: dict[Any, Any] = {number: _Position(inputs[number]) for number in node.all_input_nodes if number is not source}
        stand_ins[source] = _VIEWED
        views.append(_View(node.target, *torch.fx.map_arg((node.args, node.kwargs), stand_ins.__getitem__)))
        node = source


def _is_number(node: torch.fx.Node) -> bool:
    """Whether ``node`` is an input that is a size or a number."""
    return node.op == "placeholder" and not isinstance(node.meta.get("example_value"), torch.Tensor)


def _is_view(given: Given, examples: Sequence[Any]) -> bool:
    """Whether a result is a view of an input that requires no gradient; ``examples`` are fake inputs. A ``reshape`` may return a copy."""
    example = examples[given.position]
    if example.requires_grad:
        return False
    try:
        with example.fake_mode:  # an index such as `[0, 1]` becomes a tensor
            result = given.result(examples)
    except Exception as error:
        logger.debug("a result cannot be made from fake inputs: %s", error)
        return False
    return isinstance(result, torch.Tensor) and result.untyped_storage()._cdata == example.untyped_storage()._cdata
