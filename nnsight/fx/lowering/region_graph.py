"""Regions as graphs of their own, with a key for comparison.

One lowering serves two regions with the same operations on inputs with the same metadata, under the same settings of torch. So the graph
of a region has canonical names and symbols, and its key contains everything on which a lowering depends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx.node import map_arg

from ...runtime.switching.modes import process_state, thread_state
from ..torch_compat import static_fake
from .lowering import Prepared
from .region_plan import Like, Plan, Region, attribute_at, memory_of
from .symbols import Symbols, wanting_grad

#: Types of constants that are compared by type and value.
_COMPARABLE = (str, bytes, int, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)

#: Entries of a node's ``meta`` that are hints for a backend. The last one numbers checkpoints; its values only have to differ.
_HINTS = ("custom", "recompute", "ac_graph_id")


class RegionGraph:
    """A region as a graph of its own, with names and symbols that are the same for equal regions.

    Attributes:
        key: Equal for regions that one lowering serves.
        inputs: Nodes of the whole graph whose values it takes.
        outputs: Nodes of the whole graph that it computes.
        symbols: The symbols of the whole graph that occur in its inputs.
        binding: The size of each of these symbols.
    """

    def __init__(self, plan: Plan, region: Region, actual: dict[torch.fx.Node, Any], binding: tuple[int | float, ...]) -> None:
        self._plan = plan
        self._actual = actual
        self._first = region.first
        sizes = dict(zip(plan.prepared.symbols.symbols, binding, strict=True))
        numbers = [number for node in region.inputs for number in self._numbers(node) if isinstance(number, torch.SymInt)]
        found = dict.fromkeys(symbol for number in numbers for symbol in sorted(number.node.expr.free_symbols, key=str))
        self.symbols = tuple(found)
        self.binding = tuple(sizes[symbol] for symbol in self.symbols)
        # A backend gets each symbol as an input, as dynamo would pass it, because it may not be able to solve for the symbol.
        passed = [(plan.values[node], node) for node in actual]
        given = {value.node.expr: node for value, node in passed if isinstance(value, torch.SymInt)}
        self.inputs = list(dict.fromkeys([*(given[symbol] for symbol in self.symbols if symbol in given), *region.inputs]))
        self.outputs = region.outputs
        self._write(region)
        self.key = (tuple(self._described()), _encode(self.graph, plan.module), thread_state(), process_state())

    def _numbers(self, node: torch.fx.Node) -> tuple[Any, ...]:
        value = self._plan.values[node]
        return self.like(node).numbers() if isinstance(value, torch.Tensor) else (value,)

    def like(self, node: torch.fx.Node) -> Like:
        """Return the metadata of a tensor at the start of the region."""
        likes = self._plan.likes[node]
        return likes[min((stretch for stretch in likes if stretch >= self._first), default=max(likes))]

    def _write(self, region: Region) -> None:
        self.graph = torch.fx.Graph()
        env = {node: self.graph.placeholder(f"input_{number}") for number, node in enumerate(self.inputs)}

        def copied(node: torch.fx.Node) -> torch.fx.Node:
            if node not in env:
                args, kwargs = map_arg((node.args, node.kwargs), copied)
                name = f"{node.op}_{len(env)}"
                env[node] = self.graph.create_node(node.op, node.target, args, kwargs, name=name)
                env[node].meta = {hint: node.meta[hint] for hint in _HINTS if hint in node.meta}
            return env[node]

        for node in region.nodes:
            copied(node)
        self.graph.output(tuple(env[node] for node in region.outputs))
        self.graph.lint()

    def _described(self) -> Iterator[Any]:
        """Yield, for each input, the properties on which a lowering depends."""
        canonical = {symbol: sympy.Symbol(f"s{number}", integer=True) for number, symbol in enumerate(self.symbols)}
        same: dict[int, int] = {}
        memories: dict[int, int] = {}

        def shown(number: Any) -> Any:
            return str(number.node.expr.xreplace(canonical)) if isinstance(number, torch.SymInt) else number

        for node in self.inputs:
            value = self._plan.values[node]
            if not isinstance(value, torch.Tensor):
                yield type(value), shown(value)
                continue
            like = self.like(node)
            real = self._real(node)
            yield (
                None if real is None else (type(real), real.is_leaf, real._is_view()),
                tuple(map(shown, like.numbers())),
                like[3:],
                same.setdefault(id(value), len(same)),
                memories.setdefault(memory_of(value), len(memories)),
            )

    def _real(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the real tensor of an input, if its class, or autograd, requires more than the metadata and its sizes are plain."""
        value = attribute_at(self._plan.module, str(node.target)) if node.op == "get_attr" else self._actual.get(node)
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) is torch.Tensor and not (torch.is_grad_enabled() and (value.requires_grad or value._is_view())):
            return None  # equal to a computed tensor with the same metadata
        like = self.like(node)
        plain = all(isinstance(number, int) for number in like.numbers())
        return value if plain and like.requires_grad == value.requires_grad else None

    def prepare(self) -> Prepared:
        """Return the region with fake inputs."""
        whole = self._plan.prepared.symbols
        symbols = Symbols(self.symbols, self.binding, free=whole.symbols[len(whole.fresh) :])
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
            return static_fake(symbols.mode, real)
        like = self.like(node)
        size, stride = [symbols.renewed(n) for n in like.size], [symbols.renewed(n) for n in like.stride]
        offset = symbols.renewed(like.offset)
        with symbols.mode, torch.no_grad():
            if isinstance(offset, int) and offset == 0:
                fake = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
            else:
                extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
                memory = torch.empty(offset + extent, dtype=like.dtype, device=like.device)
                with torch._C._AutoDispatchBelowADInplaceOrView():  # so that autograd does not see a view
                    fake = memory.as_strided(size, stride, offset)
            if not like.requires_grad:
                return fake
            given = self._actual.get(node)
            return wanting_grad(fake, isinstance(given, torch.Tensor) and given.is_leaf)


class _Identity:
    """Compares an object by identity, and keeps it alive, so that no other object can get its ``id``."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._thing is other._thing

    def __hash__(self) -> int:
        return id(self._thing)


def _encode(graph: torch.fx.Graph, root: torch.nn.Module) -> tuple[Any, ...]:
    """Return a hashable encoding of a graph, equal for graphs with the same operations on the same constants."""
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
            return type(item), repr(item)  # so that -0.0 differs from 0.0, and nan equals nan
        if isinstance(item, _COMPARABLE):
            return type(item), item
        return _Identity(item)

    nodes = []
    for node in graph.nodes:
        number[node] = len(number)
        target: Any = node.target
        if node.op == "placeholder":
            target = None
        elif node.op == "get_attr":
            found = attribute_at(root, str(target))
            target = _encode(found.graph, found) if isinstance(found, torch.fx.GraphModule) else _Identity(found)
        elif not isinstance(target, str):
            target = _Identity(target)
        hints = tuple((hint, repr(node.meta[hint])) for hint in _HINTS[:2] if hint in node.meta)
        nodes.append((node.op, target, encoded(node.args), encoded(node.kwargs), hints))
    return tuple(nodes)
