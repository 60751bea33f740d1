"""Pieces of a captured graph, and spliced graphs.

Cuts divide a captured graph into pieces. A program is written into each piece, which gives a spliced graph. The functions here answer the
questions of this step: which tensors and numbers an event uses, to which cache a node appends, and which node calls a torch function.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..block_events import (
    Call,
    Constant,
    Declare,
    External,
    Input,
    Nest,
    Number,
    Reference,
    Skip,
    ValueNumber,
    Write,
)
from ..capturing.graph import CapturedGraph
from ..effects import Kind, kind_of, name_of
from ..torch_compat import is_held_by_argument
from .passes import PassRun

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of a captured graph between two cuts.

    Attributes:
        start: Number of its first node.
        inputs: The graph's placeholders, then the nodes of earlier pieces that this or a later piece uses.
        input_index: The position of each input. Several nodes may be the same input.
        repeated: Nodes of earlier pieces that are computed again: symbolic numbers that are computed from such numbers. A graph cannot
            take a symbolic float, and Inductor's cache fails on a graph that takes ``s0 * s1`` without ``s0`` and ``s1``.
    """

    start: int
    inputs: tuple[torch.fx.Node, ...]
    input_index: dict[torch.fx.Node, int]
    repeated: frozenset[torch.fx.Node] = frozenset()

    @staticmethod
    def of(graph: CapturedGraph, start: int) -> Piece:
        """Return the piece of ``graph`` that begins at node number ``start``."""
        carried: list[torch.fx.Node] = []
        repeated: set[torch.fx.Node] = set()
        for node in reversed(graph.nodes[:start]):
            if node.op != "placeholder" and any(graph.order[user] >= start or user in repeated for user in node.users):
                if is_of_numbers(node):
                    repeated.add(node)
                elif isinstance(node.meta.get("example_value"), (torch.Tensor, torch.SymInt)):
                    carried.append(node)
        inputs = [*graph.placeholders, *reversed(carried)]
        return Piece(start, tuple(inputs), {node: index for index, node in enumerate(inputs)}, frozenset(repeated))

    def without_duplicates(self, values: Sequence[Any]) -> Piece:
        """Return this piece with one input per tensor, because backends take none twice. ``values`` identify the inputs' tensors."""
        inputs: list[torch.fx.Node] = []
        position: dict[Any, int] = {}
        index: dict[torch.fx.Node, int] = {}
        for node, value in zip(self.inputs, values, strict=True):
            if value not in position:
                position[value] = len(inputs)
                inputs.append(node)
            index[node] = position[value]
        return Piece(self.start, tuple(inputs), index, self.repeated)


def is_of_numbers(node: torch.fx.Node) -> bool:
    """Whether ``node`` computes a symbolic number from symbolic numbers alone."""
    return all(isinstance(item.meta.get("example_value"), _SYMBOLIC) for item in (node, *node.all_input_nodes))


#: A result of a piece: a value of the program, or a node of the captured graph.
Result = ValueNumber | torch.fx.Node


@dataclass(frozen=True, eq=False)
class SplicedGraph:
    """A piece of a captured graph with a program in it.

    Attributes:
        graph_module: The new graph. It returns a tuple with one tensor for each requested result.
        inputs: Positions of the piece's inputs that the graph takes. Its externals and numbers follow them.
        externals: The number of externals that it takes.
        marks: The user's line, by the name of the node, for each node that comes from the user's block.
        passes: The passes that ran on it, with numbers of nodes.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[int, ...]
    externals: int
    marks: dict[str, str]
    passes: tuple[PassRun, ...] = ()

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the items of ``inputs`` that the graph takes: some inputs of the piece, and all externals and numbers after them."""
        own = sum(node.op == "placeholder" for node in self.graph_module.graph.nodes) - len(self.inputs)
        return [inputs[index] for index in self.inputs] + list(inputs[len(inputs) - own :])

    def copy(self) -> torch.fx.GraphModule:
        """Return a copy of the graph module, for a backend to consume."""
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.graph_module.graph, {}))
        for new, old in zip(graph.nodes, self.graph_module.graph.nodes, strict=True):
            new.meta = dict(old.meta)
        return torch.fx.GraphModule(self.graph_module, graph, class_name="Spliced")

    def code(self) -> str:
        """Return the graph as Python source, with a comment at each line that comes from the user's block."""
        source = self.graph_module.graph.python_code("self").src
        lines = []
        for line in source.splitlines():
            name = self.node_of(line)
            lines.append(f"{line}  # <-- {self.marks[name]}" if name in self.marks else line)
        return "\n".join(lines).strip()

    def node_of(self, line: str) -> str | None:
        """Return the name of the node that ``line`` of the generated source computes; ``None`` if the line shows none."""
        assigned = re.match(r"\s*(\w+)(?: :[^=]*)? = ", line) or re.search(r";\s+(\w+) = None$", line)
        name = assigned.group(1) if assigned else None
        if name not in self.marks and "] =" in line:  # for an assignment to an index, the node is among the names set to `None`
            ended = re.findall(r"\b(\w+) = None\b", line)
            name = next((other for other in ended if other in self.marks), name)
        return name


def as_argument(number: int | float) -> int | torch.Tensor:
    """Return a number of a program in the form that the spliced graph takes: floats as float64 scalar tensors on the CPU."""
    return number if isinstance(number, int) else torch.tensor(number, dtype=torch.float64, device="cpu")


def appended_to(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the former value of the cache to which ``node`` appends; ``None`` if it appends to none.

    A concatenation of the former value, an input or an empty tensor, with new entries appends. So do a move to a device and an addition, if
    the former value belongs to an argument of the model. For a part or a copy of such a call, the result is that call.
    """
    source: Any = node.args[0] if node.args else None
    name = name_of(node)
    if name == "cat" and isinstance(source, (list, tuple)) and isinstance(source[0], torch.fx.Node):
        example = source[0].meta.get("example_value")
        is_empty = isinstance(example, torch.Tensor) and 0 in [size for size in example.shape if isinstance(size, int)]
        return source[0] if source[0].op == "placeholder" or is_empty else None
    if not isinstance(source, torch.fx.Node):
        return None
    if name in ("to", "add", "iadd") and source.op == "placeholder" and is_held_by_argument(source):
        return source
    return source if _passes_on(node) and appended_to(source) is not None else None


def _passes_on(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a part of its first argument, or has its values in another place or layout."""
    return node.target is operator.getitem or name_of(node) in ("contiguous", "clone", "to", "detach")


def is_made_of_sizes(node: torch.fx.Node) -> bool:
    """Whether a tensor is created from numbers alone, or is such a tensor in another place or layout."""
    tensors = [item for item in node.all_input_nodes if isinstance(item.meta.get("example_value"), torch.Tensor)]
    if tensors:
        return _passes_on(node) and all(map(is_made_of_sizes, tensors))
    return node.op == "call_function" and kind_of(node) is Kind.NEW


def _leaves(event: Any) -> Iterator[Any]:
    """Yield the references, numbers and constants of an event, including those in nested containers."""
    pending: list[Any] = []
    match event:
        case Write():
            pending = [event.source]
        case Skip():
            pending = [source for _, source in event.sources]
        case Declare():
            pending = [*event.shape, *(event.stride or ())]
        case Call():
            pending = [*event.args, *(value for _, value in event.kwargs)]
    while pending:
        item = pending.pop()
        if isinstance(item, Nest):
            pending += item.items
        else:
            yield item


def references(event: Any) -> list[Reference]:
    """Return the tensors that an event uses."""
    return [item for item in _leaves(event) if isinstance(item, (ValueNumber, Input, External))]


def numbers(event: Any) -> list[Number]:
    """Return the numbers of a program that an event uses."""
    return [item for item in _leaves(event) if isinstance(item, Number)]


#: Methods that the generated source shows as operators.
_OPERATORS: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, f"__{name}__")
    for name in (
        "add sub mul truediv floordiv mod matmul pow neg invert and or xor eq ne lt le gt ge getitem setitem iadd isub imul itruediv"
    ).split()
}


def emit(graph: torch.fx.Graph, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """Add a node that calls ``function``, a torch function as ``__torch_function__`` receives it."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # the getter of a property, ``Tensor.T``
        return graph.call_function(getattr, (args[0], function.__self__.__name__))
    qualname = getattr(function, "__qualname__", "")
    is_method = type(function).__name__ in ("method_descriptor", "wrapper_descriptor") or qualname.startswith("Tensor.")
    if is_method or getattr(function, "__module__", None) == "torch._tensor":
        if name in _OPERATORS and not kwargs:
            return graph.call_function(_OPERATORS[name], args)
        return graph.call_method(name, args, kwargs)
    return graph.call_function(function, args, kwargs)


def select_numbers(index: Any, fake_of: Callable[[Any], torch.Tensor]) -> tuple[list[tuple[int, Number]], Any]:
    """Split the index of a ``__getitem__`` or ``__setitem__`` into ``select`` calls for its numbers, and the rest.

    In ``hidden[:, i]`` torch asks a symbolic ``i`` for its value, which needs a lowering for every index. ``hidden.select(1, i)`` only asks
    whether ``i`` is negative and in range. ``fake_of(reference)`` returns a tensor with the dtype and number of dimensions of a reference.

    Returns:
        Pairs of dimension and number for ``select``, in the order of the calls; and the rest of the index, ``None`` if nothing is left.
    """
    items = index.items if isinstance(index, Nest) and index.kind == "tuple" else (index,)
    wanted = [place for place, item in enumerate(items) if isinstance(item, Number)]
    if not wanted:
        return [], index
    consumed = [_consumed(item, fake_of) for item in items]
    gap = next((place for place, item in enumerate(items) if item is ...), len(items))
    # Dimensions are counted from the side of the index with no `...` in between. Each later `select` is nearer to it, so they stay valid.
    behind = [(sum(consumed[place + 1 :]), items[place]) for place in wanted if place > gap]
    before = [(sum(consumed[:place]), items[place]) for place in wanted if place < gap]
    selected = [(-1 - count, number) for count, number in behind] + [(dim, number) for dim, number in reversed(before)]
    left = tuple(item for item in items if not isinstance(item, Number))
    if all(item is ... or item == Nest("slice", (None, None, None)) for item in left):
        return selected, None
    return selected, Nest("tuple", left)


def _consumed(item: Any, fake_of: Callable[[Any], torch.Tensor]) -> int:
    """Return the number of dimensions that an item of an index consumes."""
    if item is None or item is ... or (isinstance(item, Constant) and item.kind is bool):
        return 0
    depth, inner = 0, item
    while isinstance(inner, Nest) and inner.kind != "slice" and inner.items:
        depth, inner = depth + 1, inner.items[0]
    if depth and isinstance(inner, Constant) and inner.kind is bool:  # a mask, written as lists
        return depth
    if isinstance(item, (Number, Constant, Nest)):
        return 1
    fake = fake_of(item)
    return fake.dim() if fake.dtype in (torch.bool, torch.uint8) else 1
