"""Regional lowering: equal parts of a graph are lowered once.

Compiling a whole model takes long, and most of it is the same block over and over. So a spliced graph is cut at the borders of repeated
modules (:mod:`~nnsight.fx.blocks`) into *regions*. Two regions are equal if they have the same operations on inputs with the
same metadata; then one lowering serves both, called with the parameters of the one or the other, for parameters are inputs
of captured graphs. What an edit does not touch has been lowered before: a new edit lowers the regions it stands in.

A lowered graph keeps the order of its own effects only, so a cut must not come between an effect and those who see it. The graph
is run once on fakes to see which nodes share memory and which write to it (the version of a tensor counts its writes). Regions are
merged until

* what crosses a border is a tensor, or a size that can be computed on both sides;
* memory that is computed in one region is not written in a later one;
* of memory that comes in from outside, no view made in one region is used once a later one has written, and, where
  gradients are computed, neither is that memory itself, because autograd may have kept it;
* grad mode and the like are at a border as they were at the start.

Calls of regions follow one another in a generated function that drops each value after its last use.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .blocks import STRETCH
from .borders import partial_results
from .compat import BackendCallable
from .counters import counters
from .lowering import Lowered, Prepared, Symbols, lower_prepared, wanting_grad

logger = logging.getLogger("nnsight.fx")

#: Results that each region which uses them computes again.
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, int, float, bool)

#: What yields them: methods of tensors, and functions of these modules on other sizes.
_SIZE_METHODS = frozenset({"size", "stride", "dim", "numel", "storage_offset"})
_SIZE_MODULES = frozenset({"_operator", "math", "builtins", "torch"})

#: Constants that are compared, together with their type.
_COMPARABLE = (
    str,
    bytes,
    int,
    bool,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)

#: What a node's ``meta`` may ask of a backend.
_WISHES = ("custom", "recompute", "ac_graph_id")


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
    """Lower a graph region by region, or return ``None`` if it cannot be cut.

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
    if len({node.meta.get(STRETCH) for node in nodes} - {None}) < 2:
        return None
    actual = dict(zip((node for node in nodes if node.op == "placeholder"), inputs, strict=True))
    try:
        plan = _Plan(prepared)
        regions = plan.regions()
        graphs = [_RegionGraph(plan, region, actual, binding) for region in regions]
    except Exception as error:  # an operation that fakes cannot run, say; the whole graph can always be lowered
        logger.info("not cut into regions: %s: %s", type(error).__name__, str(error).strip().split("\n", 1)[0])
        logger.debug("planning of regions failed", exc_info=True)
        return None
    if len(regions) < 2:
        return None
    functions, conditions, compiles = [], list(prepared.symbols.conditions()), 0
    with known.lock:
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
            functions.append(lowered.function)
    function = prepared.with_all_inputs(_assemble(plan, graphs, functions))
    partial = partial_results(prepared.graph_module.graph, plan.region.get)
    return Lowered(function, tuple(conditions), prepared.symbols.symbols, compiles, partial=partial)


@dataclass(eq=False)
class Region:
    """A part of a graph.

    Attributes:
        first: Number of its first stretch.
        nodes: Its nodes, in order.
        inputs: Nodes outside whose values it takes, in order of use.
        outputs: Its nodes whose values are used outside, in order.
    """

    first: int
    nodes: list[torch.fx.Node] = field(default_factory=list)
    inputs: list[torch.fx.Node] = field(default_factory=list)
    outputs: list[torch.fx.Node] = field(default_factory=list)


class _Like(NamedTuple):
    """What a lowering has to know of a tensor that a region takes."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> _Like:
        size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
        return _Like(size, stride, offset, tensor.dtype, tensor.device, tensor.requires_grad)

    def numbers(self) -> tuple[Any, ...]:
        """The numbers that may be symbolic."""
        return (*self.size, *self.stride, self.offset)


class _Plan:
    """Decides where to cut, from a run on fakes.

    Attributes:
        values: What each node returned.
        likes: How a tensor was when a stretch first used it.
        stretch: Number of the stretch of each node, growing in graph order.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.module = prepared.graph_module
        self.values: dict[torch.fx.Node, Any] = {}
        self.likes: dict[torch.fx.Node, dict[int, _Like]] = defaultdict(dict)
        self.stretch: dict[torch.fx.Node, int] = {}
        # By memory: nodes that hold it and come from outside, that compute it; stretches that use it, that write to it.
        self._outside: dict[int, list[torch.fx.Node]] = defaultdict(list)
        self._computed: dict[int, list[torch.fx.Node]] = defaultdict(list)
        self._uses: dict[int, set[int]] = defaultdict(set)
        self._writes: dict[int, set[int]] = defaultdict(set)
        self._merged: list[tuple[int, int]] = []
        grad = torch.set_grad_enabled(torch.is_grad_enabled())  # the graph may switch it
        with prepared.symbols.mode, enable_python_dispatcher(), torch._C.DisableTorchFunction(), grad:
            self._run()

    # -- the run on fakes ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fakes = iter(self.prepared.fakes)
        state = _thread_state()
        # What a block adds before the first captured node belongs to that node's stretch.
        last = next((node.meta[STRETCH] for node in self.module.graph.nodes if STRETCH in node.meta), 0)
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                value = next(fakes) if node.op == "placeholder" else _attribute(self.module, str(node.target))
                if isinstance(value, torch.Tensor):
                    if node.op == "get_attr":
                        value = self.prepared.symbols.mode.from_tensor(value, static_shapes=True)
                    self._outside[_memory(value)].append(node)
                self.values[node] = value
                continue
            stretch = max(last, node.meta.get(STRETCH, last))
            if stretch != last and _thread_state() != state:
                self._merged.append((last, stretch))
            last = self.stretch[node] = stretch
            if node.op != "output":
                self._run_node(node, stretch)

    def _run_node(self, node: torch.fx.Node, stretch: int) -> None:
        for source in node.all_input_nodes:
            value = self.values[source]
            if isinstance(value, torch.Tensor):
                self._uses[_memory(value)].add(stretch)
                if stretch not in self.likes[source]:
                    self.likes[source][stretch] = _Like.of(value)
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in given]
        if node.op == "call_function":
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            raise NotImplementedError(f"a node of kind {node.op}")
        writes_all = _writes_unseen(node.target)
        for tensor, version in zip(given, versions, strict=True):
            if writes_all or tensor._version != version:
                self._writes[_memory(tensor)].add(stretch)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._computed[_memory(tensor)].append(node)
        self.values[node] = result

    # -- where to cut --------------------------------------------------------------------------------------------------

    def regions(self) -> list[Region]:
        """Return the regions in order."""
        found: dict[int, Region] = {}
        self.region: dict[torch.fx.Node, Region] = {}
        first = 0
        ends = self._ends()
        last = None
        for node, stretch in self.stretch.items():
            if last is None or (stretch != last and last in ends):
                first = stretch
            last = stretch
            if node.op != "output":
                self.region[node] = region = found.setdefault(first, Region(first))
                region.nodes.append(node)
        taken: set[torch.fx.Node] = set(self.returned())
        for region in found.values():
            needed = dict.fromkeys(item for node in region.nodes for item in self._needed(node, region))
            region.inputs = list(needed)
            taken |= needed.keys()
        for region in found.values():
            region.outputs = [node for node in region.nodes if node in taken]
        return list(found.values())

    def returned(self) -> list[torch.fx.Node]:
        """The nodes whose values the graph returns."""
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        return output.all_input_nodes

    def _needed(self, node: torch.fx.Node, region: Region) -> Iterator[torch.fx.Node]:
        """The values from outside of ``region`` that ``node`` needs."""
        for source in node.all_input_nodes:
            if source.op == "placeholder" or (source.op == "get_attr" and self.is_tensor(source)):
                yield source
            elif source.op != "get_attr" and self.region[source] is not region:
                if self.is_size(source):
                    yield from self._needed(source, region)
                else:
                    yield source

    def is_tensor(self, node: torch.fx.Node) -> bool:
        return isinstance(self.values[node], torch.Tensor)

    def is_size(self, node: torch.fx.Node) -> bool:
        """Whether ``node`` is a size that can be computed anywhere."""
        if not isinstance(self.values[node], _SIZES) or not node.all_input_nodes:
            return False
        if node.op == "call_method":
            return node.target in _SIZE_METHODS
        if node.target is getattr:
            return True
        return getattr(node.target, "__module__", None) in _SIZE_MODULES and all(
            isinstance(self.values[source], _SIZES) for source in node.all_input_nodes
        )

    def _ends(self) -> set[int]:
        """The stretches behind which the graph is cut."""
        merged = list(self._merged)
        for node in [node for node in self.stretch if node.op != "output"]:
            users = [self.stretch[user] for user in node.users if user.op != "output"]
            if max(users, default=0) > self.stretch[node] and not (_crosses(self.values[node]) or self.is_size(node)):
                merged.append((self.stretch[node], max(users)))
        for memory, writes in self._writes.items():
            last = max(writes)
            if memory not in self._outside:
                merged.append((min(self.stretch[node] for node in self._computed[memory]), last))
                continue
            if len({id(self.values[node]) for node in self._outside[memory]}) > 1:
                raise ValueError("a graph writes to memory that it gets twice")
            if torch.is_grad_enabled():
                merged.append((min(self._uses[memory]), last))
            merged += [(self.stretch[node], last) for node in self._computed[memory] if self._is_used_later(node)]
        stretches = sorted(set(self.stretch.values()))
        return {stretch for stretch in stretches if not any(start <= stretch < stop for start, stop in merged)}

    def _is_used_later(self, node: torch.fx.Node) -> bool:
        return any(user.op == "output" or self.stretch[user] > self.stretch[node] for user in node.users)


class _RegionGraph:
    """A region as a graph of its own, with names and symbols that are the same for equal regions.

    Attributes:
        key: Equal for regions for which one lowering serves.
        inputs: Nodes of the whole graph whose values it takes.
        outputs: Nodes of the whole graph that it computes.
        symbols: Symbols of the whole graph's lowering that its own stand for.
        binding: Their sizes.
    """

    def __init__(self, plan: _Plan, region: Region, actual: dict[torch.fx.Node, Any], binding: tuple[int | float, ...]) -> None:
        self._plan = plan
        self._actual = actual
        self._first = region.first
        sizes = dict(zip(plan.prepared.symbols.symbols, binding, strict=True))
        found: dict[Any, None] = {}
        for node in region.inputs:
            for number in self._numbers(node):
                if isinstance(number, torch.SymInt):
                    found.update(dict.fromkeys(sorted(number.node.expr.free_symbols, key=str)))
        self.symbols = tuple(found)
        self.binding = tuple(sizes[symbol] for symbol in self.symbols)
        # A backend gets each symbol as an input, as dynamo would pass it, and does not have to solve for it.
        given = {
            value.node.expr: node
            for node in actual
            if isinstance(value := plan.values[node], torch.SymInt) and value.node.expr in found
        }
        self.inputs = list(
            dict.fromkeys([*(given[symbol] for symbol in self.symbols if symbol in given), *region.inputs])
        )
        self.outputs = region.outputs
        self._write(region)
        self.key = (
            tuple(self._described()),
            _encode(self.graph, plan.module),
            _thread_state(),
            _process_state(),
        )

    def _numbers(self, node: torch.fx.Node) -> tuple[Any, ...]:
        value = self._plan.values[node]
        return self._like(node).numbers() if isinstance(value, torch.Tensor) else (value,)

    def _like(self, node: torch.fx.Node) -> _Like:
        """How a tensor is when the region begins."""
        likes = self._plan.likes[node]
        return likes[min((stretch for stretch in likes if stretch >= self._first), default=max(likes))]

    def _write(self, region: Region) -> None:
        self.graph = torch.fx.Graph()
        env: dict[torch.fx.Node, torch.fx.Node] = {}
        for number, node in enumerate(self.inputs):
            env[node] = self.graph.placeholder(f"input_{number}")

        def copied(node: torch.fx.Node) -> torch.fx.Node:
            if node not in env:
                args, kwargs = map_arg((node.args, node.kwargs), copied)
                name = f"{node.op}_{len(env)}"
                env[node] = self.graph.create_node(node.op, node.target, args, kwargs, name=name)
                env[node].meta = {wish: node.meta[wish] for wish in _WISHES if wish in node.meta}
            return env[node]

        for node in region.nodes:
            copied(node)
        self.graph.output(tuple(env[node] for node in region.outputs))
        self.graph.lint()

    def _described(self) -> Iterator[Any]:
        """What a lowering depends on, for each input."""
        canonical = {symbol: f"s{number}" for number, symbol in enumerate(self.symbols)}
        same: dict[int, int] = {}
        memories: dict[int, int] = {}

        def shown(number: Any) -> Any:
            if not isinstance(number, torch.SymInt):
                return number
            expression = number.node.expr
            return str(expression.xreplace({symbol: _symbol(name) for symbol, name in canonical.items()}))

        for node in self.inputs:
            value = self._plan.values[node]
            if not isinstance(value, torch.Tensor):
                yield type(value), shown(value)
                continue
            like = self._like(node)
            real = self._real(node)
            yield (
                None if real is None else (type(real), real.is_leaf, real._is_view()),
                tuple(map(shown, like.numbers())),
                like[3:],
                same.setdefault(id(value), len(same)),
                memories.setdefault(_memory(value), len(memories)),
            )

    def _real(self, node: torch.fx.Node) -> torch.Tensor | None:
        """The tensor from outside that is the input now, if its sizes are plain numbers."""
        value = _attribute(self._plan.module, str(node.target)) if node.op == "get_attr" else self._actual.get(node)
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) is torch.Tensor and not (torch.is_grad_enabled() and (value.requires_grad or value._is_view())):
            return None  # like any value that another region hands over
        like = self._like(node)
        plain = all(isinstance(number, int) for number in like.numbers())
        return value if plain and like.requires_grad == value.requires_grad else None

    def prepare(self) -> Prepared:
        """Return the region with fake inputs."""
        symbols = Symbols(self.symbols, self.binding, self._plan.prepared.symbols.number_symbols)
        fakes = [self._fake(node, symbols) for node in self.inputs]
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node, fake in zip(placeholders, fakes, strict=True):
            node.meta["example_value"] = fake
        module = torch.fx.GraphModule(self._plan.module, self.graph, class_name="Region")
        return Prepared(module, fakes, symbols)

    def _fake(self, node: torch.fx.Node, symbols: Symbols) -> Any:
        value = self._plan.values[node]
        if not isinstance(value, torch.Tensor):
            return symbols.renewed(value)
        real = self._real(node)
        if real is not None:
            return symbols.mode.from_tensor(real, static_shapes=True)
        like = self._like(node)
        size, stride = [symbols.renewed(n) for n in like.size], [symbols.renewed(n) for n in like.stride]
        offset = symbols.renewed(like.offset)
        with symbols.mode, torch.no_grad():
            at_start = isinstance(offset, int) and offset == 0
            if at_start:
                fake = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
            else:
                extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
                memory = torch.empty(offset + extent, dtype=like.dtype, device=like.device)
                with torch._C._AutoDispatchBelowADInplaceOrView():  # to autograd it is a tensor of its own
                    fake = memory.as_strided(size, stride, offset)
            if not like.requires_grad:
                return fake
            given = self._actual.get(node)
            return wanting_grad(fake, not at_start or (isinstance(given, torch.Tensor) and given.is_leaf))


def _assemble(
    plan: _Plan, graphs: Sequence[_RegionGraph], functions: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """Return a function that calls the regions one after the other, and lets go of what no later one needs."""
    nodes = list(plan.module.graph.nodes)
    names = {node: f"v{number}" for number, node in enumerate(nodes)}
    scope: dict[str, Any] = {f"f{number}": function for number, function in enumerate(functions)}
    for node in nodes:
        if node.op == "get_attr" and plan.is_tensor(node):
            scope[names[node]] = _attribute(plan.module, str(node.target))
    (output,) = (node for node in nodes if node.op == "output")
    kept = set(output.all_input_nodes)
    lines: list[str] = []
    for number, graph in reversed(list(enumerate(graphs))):
        done = [names[node] for node in (*graph.inputs, *graph.outputs) if node in plan.stretch and node not in kept]
        kept.update(graph.inputs)
        if done:
            lines.append(f"    del {', '.join(dict.fromkeys(done))}")
        results = "".join(f"{names[node]}, " for node in graph.outputs)
        call = f"f{number}({', '.join(names[node] for node in graph.inputs)})"
        lines.append(f"    {results}= {call}" if results else f"    {call}")
    parameters = ", ".join(names[node] for node in nodes if node.op == "placeholder")
    constants: list[Any] = []

    def shown(item: Any) -> str:
        if isinstance(item, torch.fx.Node):
            return names[item]
        constants.append(item)
        return f"constants[{len(constants) - 1}]"

    returned = "".join(f"{shown(item)}, " for item in output.args[0])
    scope["constants"] = constants
    source = "\n".join([f"def run({parameters}):", *reversed(lines), f"    return ({returned})"])
    exec(compile(source, "<regions>", "exec"), scope)
    return scope["run"]


# -- keys -----------------------------------------------------------------------------------------------------------------


class _Same:
    """Compares by identity, and keeps the object, so that its identity is not given to another one."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


def _encode(graph: torch.fx.Graph, root: torch.nn.Module) -> tuple[Any, ...]:
    """Return a graph as a value that is equal for graphs which do the same."""
    number: dict[torch.fx.Node, int] = {}

    def encoded(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            return "node", number[item]
        if isinstance(item, (tuple, list)):
            return type(item).__name__, tuple(map(encoded, item))
        if isinstance(item, dict):
            return "dict", tuple((encoded(key), encoded(value)) for key, value in item.items())
        if isinstance(item, slice):
            return "slice", encoded(item.start), encoded(item.stop), encoded(item.step)
        if isinstance(item, (float, complex)):
            return type(item), repr(item)  # tells -0.0 from 0.0, and a nan is itself
        if isinstance(item, _COMPARABLE):
            return type(item), item
        return _Same(item)

    nodes = []
    for node in graph.nodes:
        number[node] = len(number)
        target: Any = node.target
        if node.op == "placeholder":
            target = None
        elif node.op == "get_attr":
            found = _attribute(root, str(target))
            target = _encode(found.graph, found) if isinstance(found, torch.fx.GraphModule) else _Same(found)
        elif not isinstance(target, str):
            target = _Same(target)
        wishes = tuple((wish, repr(node.meta[wish])) for wish in _WISHES if wish in node.meta)
        nodes.append((node.op, target, encoded(node.args), encoded(node.kwargs), wishes))
    return tuple(nodes)


def _thread_state() -> tuple[Any, ...]:
    """What calls on this thread depend on."""
    kinds = {"cpu", torch._C._get_accelerator().type if torch.accelerator.is_available() else "cpu"}
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds))
    level = torch._C._functorch.maybe_current_level()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.is_autocast_cache_enabled(),
        level,
    )


def _process_state() -> tuple[Any, ...]:
    """What lowerings depend on besides; dynamo's guards name the same."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )


# -- tensors and nodes ------------------------------------------------------------------------------------------------------


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _crosses(value: Any) -> bool:
    """Whether one region can hand ``value`` to another."""
    return type(value) is FakeTensor and value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def _writes_unseen(target: Any) -> bool:
    """Whether a function may write to its arguments without counting up their versions."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "mutation" in target.name() or "auto_functionalized" in target.name()
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    return any(overload._schema.is_mutable for overload in overloads)


def _attribute(root: torch.nn.Module, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), root)


def _symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, integer=True)
