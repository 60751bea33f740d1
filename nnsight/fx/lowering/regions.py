"""Regional lowering: equal parts of a graph are lowered once.

Compiling a whole model takes long, and most of a model is one layer repeated. So a spliced graph is cut into *regions* at the borders of
repeated modules, as far as its effects allow (:mod:`~nnsight.fx.lowering.region_plan`). Equal regions
(:mod:`~nnsight.fx.lowering.region_graph`) are lowered once, and each is called with its own parameters, which are inputs of captured
graphs. A new edit lowers only the regions that it changes.

A generated Python function calls the regions one after the other. It calls the code of each region without the backend's wrappers, where
they have no effect (:mod:`~nnsight.fx.lowering.lowering`), and drops each value at its last use, so that its memory is free.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..counters import counters
from .backends import BackendCallable
from .early_results import hand_over
from .gradient_borders import partial_results
from .lowering import Direct, Lowered, Prepared, lower_prepared
from .region_graph import RegionGraph
from .region_plan import STRETCH, Plan, attribute_at
from .symbols import as_python, expression, is_contiguous, with_strides

logger = logging.getLogger("nnsight.fx")


class KnownRegions:
    """The lowered regions of a model, shared by all its graphs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._lowered: dict[Any, list[Lowered]] = defaultdict(list)

    def find(self, graph: RegionGraph) -> Lowered | None:
        """Return the lowering of an equal region that is valid for the sizes of ``graph``; ``None`` if there is none."""
        return next((known for known in self._lowered.get(graph.key, ()) if known.accepts(graph.binding)), None)

    def add(self, graph: RegionGraph, lowered: Lowered) -> None:
        """Keep a lowering of ``graph``."""
        self._lowered[graph.key].append(lowered)


def lower_in_regions(
    prepared: Prepared,
    inputs: Sequence[Any],
    binding: tuple[int | float, ...],
    backend: BackendCallable,
    known: KnownRegions,
    early: bool = False,
) -> Lowered | None:
    """Lower a graph region by region; return ``None`` if it has no borders of repeated modules, or cannot be planned.

    With ``early``, results are handed over after the region that computes them (:mod:`~nnsight.fx.lowering.early_results`).

    A piece between two cuts may be a single region, equal to the region of another layer. The graph itself is not changed.
    """
    if any(isinstance(number, torch.SymFloat) for number in prepared.symbols.numbers):
        return None  # a float is the item of a tensor, and no border may separate the two
    graph = prepared.graph_module.graph
    if not any(STRETCH in node.meta for node in graph.nodes):
        return None
    actual = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    try:
        plan = Plan(prepared)
        graphs = [RegionGraph(plan, region, actual, binding) for region in plan.regions()]
    except Exception as error:  # for example an operation that fakes cannot run; the caller lowers the whole graph
        logger.info("not cut into regions: %s: %s", type(error).__name__, str(error).strip().split("\n", 1)[0])
        logger.debug("planning of regions failed", exc_info=True)
        return None
    if not graphs:
        return None
    calls, conditions, compiles, node_by_node = [], list(prepared.symbols.conditions()), 0, True
    with known.lock:
        for region in graphs:
            lowered = known.find(region)
            if lowered is None:
                lowered = lower_prepared(region.prepare(), backend)
                known.add(region, lowered)
                compiles += lowered.compiles
            else:
                counters.add("reuses")
            renamed = dict(zip(lowered.symbols, region.symbols, strict=True))
            conditions += [condition.xreplace(renamed) for condition in lowered.conditions]
            calls.append(lowered.direct)
            node_by_node = node_by_node and lowered.node_by_node
    function = _assemble(plan, graphs, calls, early)
    partial = partial_results(graph, plan.region.get, () if node_by_node else prepared.placement.sharing, plan)
    return Lowered(function, tuple(conditions), prepared.symbols.symbols, compiles, partial=partial, regions=len(graphs))


def _assemble(plan: Plan, graphs: Sequence[RegionGraph], calls: Sequence[Direct], early: bool) -> Callable[..., Any]:
    """Return a generated function that calls the regions one after the other, and drops each value after its last use."""
    nodes = list(plan.module.graph.nodes)
    names = {node: f"v{number}" for number, node in enumerate(nodes)}
    scope: dict[str, Any] = {f"region_{number}": call for number, call in enumerate(calls)}
    scope["profiler"], scope["with_strides"] = torch.autograd.profiler, with_strides
    scope["hand_over"] = hand_over
    sizes = _names_of_sizes(plan, names)
    for node in nodes:
        if node.op == "get_attr" and plan.is_tensor(node):
            scope[names[node]] = attribute_at(plan.module, str(node.target))
    output = plan.module.graph.output_node()
    kept = set(output.all_input_nodes)
    positions = {item: position for position, item in reversed([*enumerate(output.args[0])])} if early else {}  # type: ignore[arg-type]
    made_by = {node: number for number, graph in enumerate(graphs) for node in graph.outputs}
    made_by |= dict.fromkeys(plan.module.graph.find_nodes(op="get_attr"), -1)
    lines: list[str] = []
    for number, graph in reversed(list(enumerate(graphs))):
        done = [names[node] for node in graph.inputs if node in plan.stretch and node not in kept]
        others = [names[node] for node, maker in made_by.items() if maker < number and (node in kept or names[node] in scope)]
        kept.update(graph.inputs)
        region = f"region_{number}"
        results = "".join(f"{names[node]}, " for node in graph.outputs)
        handed = {index: positions[node] for index, node in enumerate(graph.outputs) if node in positions}
        lines.append(f"    {results}= {_handed_over(handed, others)}" if results else "    call(inputs)")
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

    returned = "".join(f"{shown(item)}, " for item in output.args[0])  # type: ignore[union-attr]
    scope["constants"] = constants
    start = [f"def run({parameters}):", "    profiled = profiler._is_profiler_enabled"]
    source = "\n".join([*start, *reversed(lines), f"    return ({returned})"])
    exec(compile(source, "<regions>", "exec"), scope)
    return scope["run"]


def _handed_over(handed: dict[int, int], others: Iterable[str]) -> str:
    """Return the source of the call of a region, some of whose results are handed over."""
    return f"hand_over([*call(inputs)], {handed}, [{', '.join(others)}])" if handed else "call(inputs)"


def _names_of_sizes(plan: Plan, names: dict[torch.fx.Node, str]) -> dict[Any, str]:
    """Return, for each symbol that is a size of an input of the graph, the source that reads it."""
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
    """Return the source of an input of a region, copied if it has other strides than those for which the region was lowered."""
    name = names[node]
    if node not in plan.stretch or not plan.is_tensor(node):  # inputs of the graph have the strides of their fakes
        return name
    like = graph.like(node)
    if is_contiguous(like.size, like.stride):
        return f"{name}.contiguous()"
    return f"with_strides({name}, ({''.join(as_python(stride, sizes) + ', ' for stride in like.stride)}))"
