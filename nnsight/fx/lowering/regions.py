"""Regional lowering: equal parts of a graph are lowered once.

Compiling a whole model takes long, and most of it is the same block over and over. So a spliced graph is cut at the borders of repeated
modules (:mod:`~nnsight.fx.lowering.repeated_modules`) into *regions*, as far as its effects allow
(:mod:`~nnsight.fx.lowering.region_plan`). Equal regions (:mod:`~nnsight.fx.lowering.region_graph`) are lowered once and called with the
parameters of the one or the other, for parameters are inputs of captured graphs. What an edit does not touch has been lowered before: a new
edit lowers the regions it stands in.

Calls of regions follow one another in a generated function. It goes straight to the generated code of each
(:mod:`~nnsight.fx.capturing.direct`), and hands over each value for the last time, so that its memory is free again within the call.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import progress
from ..capturing.direct import Direct
from ..counters import counters
from .backends import BackendCallable
from .gradient_borders import partial_results
from .lowering import Lowered, Prepared, lower_prepared
from .region_graph import RegionGraph
from .region_plan import Plan, attribute_at
from .repeated_modules import STRETCH
from .strides import as_python, expression, is_contiguous, with_strides

logger = logging.getLogger("nnsight.fx")


class KnownRegions:
    """Regions that have been lowered, for any graph of a model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._lowered: dict[Any, list[Lowered]] = defaultdict(list)

    def find(self, key: Any, binding: tuple[int | float, ...]) -> Lowered | None:
        """Return a lowering of a region equal to ``key`` that is valid for these sizes of its symbols."""
        return next((known for known in self._lowered.get(key, ()) if known.accepts(binding)), None)

    def add(self, key: Any, lowered: Lowered) -> None:
        """Keep a lowering."""
        self._lowered[key].append(lowered)


def lower_in_regions(
    prepared: Prepared, inputs: Sequence[Any], binding: tuple[int | float, ...], backend: BackendCallable, known: KnownRegions
) -> Lowered | None:
    """Lower a graph region by region, or return ``None`` if it has no borders of repeated modules.

    A piece between two cuts may well be a single region, equal to that of another layer.

    Args:
        prepared: The graph, which is left as it is.
        inputs: The values it is about to be called with.
        binding: The sizes of its symbols in these.
        backend: Lowers a region.
        known: Regions that need not be lowered.
    """
    if any(isinstance(number, torch.SymFloat) for number in prepared.symbols.numbers):
        return None  # a float is taken out of a tensor, which no border may separate
    if prepared.taken is not None:
        inputs = [inputs[position] for position in prepared.taken]
    nodes = prepared.graph_module.graph.nodes
    if not any(STRETCH in node.meta for node in nodes):
        return None
    actual = dict(zip((node for node in nodes if node.op == "placeholder"), inputs, strict=True))
    try:
        plan = Plan(prepared)
        regions = plan.regions()
        graphs = [RegionGraph(plan, region, actual, binding) for region in regions]
    except Exception as error:  # an operation that fakes cannot run, say; the whole graph can always be lowered
        logger.info("not cut into regions: %s: %s", type(error).__name__, str(error).strip().split("\n", 1)[0])
        logger.debug("planning of regions failed", exc_info=True)
        return None
    if not regions:
        return None
    calls, conditions, compiles, node_by_node = [], list(prepared.symbols.conditions()), 0, True
    with known.lock, progress.expected(len({graph.key for graph in graphs if not known.find(graph.key, graph.binding)})):
        for graph in graphs:
            lowered = known.find(graph.key, graph.binding)
            if lowered is None:
                lowered = lower_prepared(graph.prepare(), backend)
                known.add(graph.key, lowered)
                compiles += lowered.compiles
            else:
                counters.add("reuses")
            renamed = dict(zip(lowered.symbols, graph.symbols, strict=True))
            conditions += [condition.xreplace(renamed) for condition in lowered.conditions]
            calls.append(lowered.direct)
            node_by_node = node_by_node and lowered.node_by_node
    function = prepared.with_all_inputs(_assemble(plan, graphs, calls))
    sharing = () if node_by_node else prepared.placement.sharing
    partial = partial_results(prepared.graph_module.graph, plan.region.get, sharing, plan)
    return Lowered(function, tuple(conditions), prepared.symbols.symbols, compiles, partial=partial, regions=len(regions))


def _assemble(plan: Plan, graphs: Sequence[RegionGraph], calls: Sequence[Direct]) -> Callable[..., Any]:
    """Return a function that calls the regions one after the other, and lets go of what no later one needs."""
    nodes = list(plan.module.graph.nodes)
    names = {node: f"v{number}" for number, node in enumerate(nodes)}
    scope: dict[str, Any] = {f"region_{number}": call for number, call in enumerate(calls)}
    scope["profiler"], scope["with_strides"] = torch.autograd.profiler, with_strides
    sizes = _names_of_sizes(plan, names)
    for node in nodes:
        if node.op == "get_attr" and plan.is_tensor(node):
            scope[names[node]] = attribute_at(plan.module, str(node.target))
    (output,) = (node for node in nodes if node.op == "output")
    kept = set(output.all_input_nodes)
    lines: list[str] = []
    for number, graph in reversed(list(enumerate(graphs))):
        done = [names[node] for node in graph.inputs if node in plan.stretch and node not in kept]
        kept.update(graph.inputs)
        region = f"region_{number}"
        results = "".join(f"{names[node]}, " for node in graph.outputs)
        lines.append(f"    {results}= call(inputs)" if results else "    call(inputs)")
        lines.append(f"    call = {region}.whole if profiled else {region}.call or {region}.first")
        if done:
            lines.append(f"    del {', '.join(done)}")
        taken = [_as_planned(plan, graph, node, names, sizes) for node in graph.inputs]
        lines.append(f"    inputs = [{', '.join(taken)}]")
    parameters = ", ".join(names[node] for node in nodes if node.op == "placeholder")
    constants: list[Any] = []

    def shown(item: Any) -> str:
        if isinstance(item, torch.fx.Node):
            return names[item]
        constants.append(item)
        return f"constants[{len(constants) - 1}]"

    returned = "".join(f"{shown(item)}, " for item in output.args[0])
    scope["constants"] = constants
    start = [f"def run({parameters}):", "    profiled = profiler._is_profiler_enabled"]
    source = "\n".join([*start, *reversed(lines), f"    return ({returned})"])
    exec(compile(source, "<regions>", "exec"), scope)
    return scope["run"]


def _names_of_sizes(plan: Plan, names: dict[torch.fx.Node, str]) -> dict[Any, str]:
    """Return source for each symbol that an input of the graph tells."""
    found: dict[Any, str] = {}
    for node in plan.module.graph.nodes:
        value = plan.values.get(node) if node.op == "placeholder" else None
        if isinstance(value, torch.SymInt):
            found[expression(value)] = names[node]
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                found.setdefault(expression(size), f"{names[node]}.size({dim})")
    return found


def _as_planned(
    plan: Plan, graph: RegionGraph, node: torch.fx.Node, names: dict[torch.fx.Node, str], sizes: dict[Any, str]
) -> str:
    """Return source for an input of a region, with the strides that the region was lowered for."""
    name = names[node]
    if node not in plan.stretch or not plan.is_tensor(node):  # an input of the graph has the strides of its fake
        return name
    like = graph.like(node)
    if is_contiguous(like.size, like.stride):
        return f"{name}.contiguous()"
    return f"with_strides({name}, ({''.join(as_python(stride, sizes) + ', ' for stride in like.stride)}))"
