"""A captured graph: dynamo's graph for one model and one set of guards, with its taps and the tree of programs recorded on it.

A captured graph may switch modes: grad mode, autocast, inference mode. The switches are calls in the graph. A block between two of them
computes in the model's autocast, but has its own grad mode. If the graph is cut between them, the piece before the cut leaves the modes,
and the next piece enters them again.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...runtime.report import Break
from ..block_events import State
from ..effects import Memory, all_edited, edits_of_inputs, may_draw
from .nested import unnest
from .structures import parse_structure
from .taps import OPAQUE_MARK, Opaque, tap

_ENTERING = (autocast_mode._enter_autocast, grad_mode._enter_inference_mode)
_LEAVING = {
    autocast_mode._exit_autocast: autocast_mode._enter_autocast,
    grad_mode._exit_inference_mode: grad_mode._enter_inference_mode,
}


@dataclass(frozen=True)
class SwitchedModes:
    """The modes that a graph has switched before some node.

    Attributes:
        grad: The grad mode that the graph has set; ``None`` if it has set none.
        entered: The nodes that entered a mode that is still active, in order.
    """

    grad: bool | None = None
    entered: tuple[torch.fx.Node, ...] = ()

    def leave(self, graph: torch.fx.Graph, env: dict[torch.fx.Node, Any], grad: bool) -> None:
        """Add calls to ``graph`` that leave these modes. ``grad`` is the grad mode outside of the graph."""
        for node in reversed(self.entered):
            leave = next(leave for leave, enter in _LEAVING.items() if enter is node.target)
            graph.call_function(leave, (env[node],))
        if self.grad is not None and self.grad != grad:
            graph.call_function(torch._C._set_grad_enabled, (grad,))

    def enter(self, graph: torch.fx.Graph, env: dict[torch.fx.Node, Any], grad: bool) -> None:
        """Add calls to ``graph`` that enter these modes, and store their nodes in ``env`` for :meth:`leave`."""
        for node in self.entered:
            env[node] = graph.node_copy(node)
        if self.grad is not None and self.grad != grad:
            graph.call_function(torch._C._set_grad_enabled, (self.grad,))

    def on_thread(self) -> contextlib.AbstractContextManager[Any]:
        """Set the grad mode and the autocast of these modes on the current thread."""
        stack = contextlib.ExitStack()
        if self.grad is not None:
            stack.enter_context(torch.set_grad_enabled(self.grad))
        for node in self.entered:
            if node.target is autocast_mode._enter_autocast:
                stack.enter_context(torch.autocast(*node.args))  # type: ignore[arg-type]
        return stack


def switched_at(nodes: Sequence[torch.fx.Node], wanted: set[torch.fx.Node]) -> dict[torch.fx.Node, SwitchedModes]:
    """Return the modes that the graph with ``nodes`` has switched before each of ``wanted``; nodes without switches are left out."""
    found: dict[torch.fx.Node, SwitchedModes] = {}
    now = SwitchedModes()
    for node in nodes:
        if node in wanted:
            if now != SwitchedModes():
                found[node] = now
        elif node.op != "call_function":
            continue
        elif node.target is torch._C._set_grad_enabled:
            now = SwitchedModes(bool(node.args[0]), now.entered)
        elif node.target in _ENTERING:
            now = SwitchedModes(now.grad, (*now.entered, node))
        elif node.target in _LEAVING:
            now = SwitchedModes(now.grad, tuple(entered for entered in now.entered if entered is not node.args[0]))
    return found


if TYPE_CHECKING:
    from ..lowering.backends import BackendCallable
    from ..lowering.regions import KnownRegions
    from ..splicing.pieces import Piece


@dataclass(frozen=True, eq=False)
class Tap:
    """A location in a captured graph.

    Attributes:
        index: Number of the tap, in graph order.
        location: The location it marks.
        node: The tap's node.
        leaves: Leaves of the value: a node for each tensor or symbolic number, else the constant.
        structure: ``TreeSpec`` of the value.
        outputs: For each tensor leaf, by number, the nodes that extract it from the tap.
    """

    index: int
    location: str
    node: torch.fx.Node
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    outputs: dict[int, list[torch.fx.Node]] = field(default_factory=dict)

    @cached_property
    def is_single(self) -> bool:
        """Whether the value is one leaf, without a container."""
        return self.structure.is_leaf()

    @cached_property
    def tensor_leaves(self) -> tuple[int, ...]:
        """Numbers of the leaves that are tensors."""
        return tuple(number for number, leaf in enumerate(self.leaves) if self.is_tensor(leaf))

    def is_tensor(self, leaf: Any) -> bool:
        """Whether ``leaf`` of this tap is a tensor."""
        return isinstance(leaf, torch.fx.Node) and isinstance(leaf.meta.get("example_value"), torch.Tensor)


class CapturedGraph:
    """A captured graph with its taps and the programs known for it.

    Args:
        graph_module: The graph module that dynamo passed to the backend. It is copied, because dynamo uses it later.
        backend: Lowers the plain graph and the spliced graphs.
        regions: Keeps lowered regions; with ``None`` graphs are lowered as a whole.
        background: Whether whole graphs are lowered in the background.
        is_whole: Whether a call of the model is one call of this graph, without other graphs and Python around it.
        only_output: Whether ``is_whole``, and the tensors of the graph only become part of the model's result.

    Attributes:
        each_size: Whether each combination of sizes is lowered separately, because the backend failed on symbolic sizes.
        has_subclasses: Whether inputs are tensors of wrapper subclasses, such as quantised weights, which may override operations.
        compares_tensors: Whether the model tests whether two tensors are the same object. The graph contains the answer.
        passed: The locations of the taps, in their order.
        tap_number: For each node of a tap, the number of the tap.
        tapped: For each node that extracts a tensor from a tap, the numbers of the tap and of the leaf.
        identities: For each node that returns its argument itself, the argument. A backend would lower such a call to a copy. Then an
            in-place edit of one would not change the other, as it does in the eager model.
        switched: For each tap, the modes that the graph has switched before it. Taps without switches are left out.
        symbols: For each symbolic size, the position of an input that is this size, and its symbol.
        lock: Held while variants are made.
        fake_mode: Mode of all fakes that blocks see. It is not thread-safe: its fakes are only used under ``fake_lock``.
    """

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        backend: BackendCallable,
        regions: KnownRegions | None = None,
        background: bool = False,
        is_whole: bool = False,
        only_output: bool = False,
    ) -> None:
        self.is_whole = is_whole
        self.compares_tensors = False
        self.graph_module = copy.deepcopy(graph_module)
        unnest(self.graph_module)
        self.backend = backend
        self.regions = regions
        self.background = background
        self.each_size = False
        graph = self.graph_module.graph
        self.nodes = list(graph.nodes)
        self.order = {node: number for number, node in enumerate(self.nodes)}
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.input_index = {node: index for index, node in enumerate(self.placeholders)}
        self.output_node = graph.output_node()
        returned = self.output_node.args[0]
        self.outputs: tuple[Any, ...] = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        self.taps: list[Tap] = []
        self.tap_number: dict[torch.fx.Node, int] = {}
        self.tapped: dict[torch.fx.Node, tuple[int, int]] = {}
        for node in graph.find_nodes(op="call_function", target=tap):
            self._add_tap(node)
        self.passed = [made.location for made in self.taps]
        self.locations = frozenset(self.passed)
        self.identities = {node: source for node in self.nodes if (source := _passed_on(node)) is not None}
        self.switched: dict[torch.fx.Node, SwitchedModes] = switched_at(self.nodes, set(self.tap_number))
        self.symbols: list[tuple[int, Any]] = []
        for index, node in enumerate(self.placeholders):
            example = node.meta.get("example_value")
            symbol = example.node.expr if isinstance(example, torch.SymInt) else None
            if symbol is not None and symbol.is_symbol and all(symbol != known for _, known in self.symbols):  # not by identity
                self.symbols.append((index, symbol))
        self.has_subclasses = any(is_traceable_wrapper_subclass(node.meta.get("example_value")) for node in self.placeholders)
        self.cuts: set[Break] = set()
        self.start = State()
        self.whole: Any = None  # the uncut graph as a piece; its first recording makes it
        self._edits: dict[Piece, list[tuple[int, frozenset[int]]]] = {}
        self.fake_mode = FakeTensorMode()
        self.lock = threading.RLock()
        self.fake_lock = threading.RLock()
        self._fakes: dict[tuple[torch.fx.Node, tuple[int, ...]], torch.Tensor] = {}
        self._stand_ins: dict[tuple[int, ...], list[Any]] = {}
        #: Whether the graph may return stand-ins in a run in which nothing uses the model's output.
        self.may_stand_in = only_output and all(map(self._has_stand_in, self.outputs))

    def _add_tap(self, node: torch.fx.Node) -> None:
        location, leaves, structure = node.args
        index = len(self.taps)
        made = Tap(index, str(location), node, tuple(leaves), parse_structure(str(structure)))  # type: ignore[arg-type]
        self.taps.append(made)
        self.tap_number[node] = index
        for user in node.users:
            _, position = user.args  # operator.getitem(tap, position)
            leaf_number = made.tensor_leaves[position]  # type: ignore[index]
            self.tapped[user] = (index, leaf_number)
            made.outputs.setdefault(leaf_number, []).append(user)

    @cached_property
    def last_work(self) -> int:
        """Number of the last node that computes something. Only taps, the nodes that extract their tensors, and the output follow."""
        works = (number for number, node in enumerate(self.nodes) if not (node in self.tap_number or node in self.tapped))
        return max((number for number in works if self.nodes[number] is not self.output_node), default=-1)

    @cached_property
    def _draws(self) -> list[int]:
        """Numbers of the nodes that may draw random numbers."""
        return [number for number, node in enumerate(self.nodes) if may_draw(node)]

    def draws_between(self, start: int, stop: int) -> bool:
        """Whether a node from number ``start`` up to ``stop`` may draw random numbers."""
        return any(start <= number < stop for number in self._draws)

    @cached_property
    def memory(self) -> Memory:
        """Alias analysis of the graph."""
        return Memory(self.graph_module.graph)

    def edits_in(self, piece: Piece) -> list[tuple[int, frozenset[int]]]:
        """Return the model's calls that may edit inputs of ``piece`` in place: their numbers, and the positions of these inputs."""
        edits = self._edits.get(piece)
        if edits is None:
            nodes = self.nodes[piece.start :]
            found = edits_of_inputs(self.graph_module.graph, self._source_of, piece.input_index, nodes)
            edits = self._edits[piece] = [(self.order[node], positions) for node, positions, _ in found]
        return edits

    @cached_property
    def edited_groups(self) -> frozenset[Any]:
        """Groups of nodes whose memory the model edits in place."""
        nodes = [source for node in self.nodes if node not in self.tap_number for source in all_edited(node)]
        return frozenset(self.memory.group(node) for node in nodes)

    def _source_of(self, node: torch.fx.Node) -> torch.fx.Node | None:
        if node not in self.tapped:
            return self.identities.get(node)
        tap, leaf = self.tapped[node]
        return self.taps[tap].leaves[leaf]

    def binding(self, inputs: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the value of each symbol of the graph for these inputs."""
        return tuple(int(inputs[index]) for index, _ in self.symbols)

    def concrete(self, number: Any, binding: tuple[int, ...]) -> Any:
        """Return the plain number for ``number``, which may be symbolic, under ``binding``."""
        if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return number
        values = {symbol: value for (_, symbol), value in zip(self.symbols, binding, strict=True)}
        expression = number.node.expr.xreplace(values)
        kind = int if isinstance(number, torch.SymInt) else float if isinstance(number, torch.SymFloat) else bool
        return kind(expression)

    def fake(self, node: torch.fx.Node, binding: tuple[int, ...]) -> torch.Tensor:
        """Return a fake tensor with the metadata of ``node``'s value, with plain sizes, that requires no gradient."""
        key = (node, binding)
        found = self._fakes.get(key)
        if found is None:
            example = node.meta["example_value"]
            size = [self.concrete(number, binding) for number in example.shape]
            stride = [self.concrete(number, binding) for number in example.stride()]
            with self.fake_lock, self.fake_mode, torch.no_grad():
                found = torch.empty_strided(size, stride, dtype=example.dtype, device=example.device)
            if len(self._fakes) > 4096:
                self._fakes.clear()
            self._fakes[key] = found
        return found

    def stand_ins(self, binding: tuple[int, ...]) -> list[Any]:
        """Return tensors with the metadata of the outputs, each with one element of memory, for a run in which nothing uses them."""
        found = self._stand_ins.get(binding)
        if found is None:
            if len(self._stand_ins) > 64:
                self._stand_ins.clear()
            found = self._stand_ins[binding] = [self._stand_in(output, binding) for output in self.outputs]
        return [*found]

    def _stand_in(self, output: Any, binding: tuple[int, ...]) -> Any:
        example = output.meta["example_value"] if isinstance(output, torch.fx.Node) else output
        if not isinstance(example, torch.Tensor):
            return self.concrete(example, binding)
        with torch.inference_mode(False), torch.no_grad():
            value = torch.zeros((), dtype=example.dtype, device=example.device)
            return value.expand([self.concrete(number, binding) for number in example.shape])

    def _has_stand_in(self, output: Any) -> bool:
        """Whether an output is a constant, or a plain tensor or number whose sizes follow from the inputs."""
        if not isinstance(output, torch.fx.Node):
            return True
        example = output.meta.get("example_value")
        if isinstance(example, torch.Tensor):
            plain = type(example) is FakeTensor and example.layout is torch.strided
            numbers: Sequence[Any] = example.shape
        else:
            plain, numbers = isinstance(example, torch.SymInt), [example]
        known = {symbol for _, symbol in self.symbols}
        return plain and all(number.node.expr.free_symbols <= known for number in numbers if isinstance(number, torch.SymInt))

    def constant_leaf(self, tap: Tap, leaf: Any, binding: tuple[int, ...]) -> Any:
        """Return a leaf of ``tap`` that is not a tensor, as the block sees it."""
        if isinstance(leaf, torch.fx.Node):
            return self.concrete(leaf.meta["example_value"], binding)
        if isinstance(leaf, str) and leaf.startswith(OPAQUE_MARK):
            return Opaque(leaf.removeprefix(OPAQUE_MARK), tap.location)
        return leaf


#: Dropout functions with the names of their parameters.
_DROPOUTS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "training"),
}


def _passed_on(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the argument if ``node`` returns it unchanged and uncopied, as dropout does outside of training or with ``p=0``."""
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return None
    given = {**dict(zip(_DROPOUTS[node.target], node.args, strict=False)), **node.kwargs}
    source, p = given.get("input"), given.get("p")
    drops_nothing = (type(p) in (int, float) and p == 0) or given.get("training", given.get("train", True)) is False
    return source if drops_nothing and isinstance(source, torch.fx.Node) else None
