"""Region planning: the places at which a graph may be cut into regions.

The borders of repeated modules divide a graph into *stretches*. Modules are repeated if siblings (children of one module, or several calls
of one) have the same sequence of operations in the graph; taps mark the start and the end of each. Every node has the number of its
stretch: before the first repeated module, in it, between two, and so on. Copies of a node keep the number in ``meta``, so a spliced graph
has its stretches.

Not every border is safe: a lowered graph keeps only the order of its own effects, so no border may separate an effect from a later read of
it. The plan runs the graph once on fakes to find the nodes that share memory or write to it (the version of a tensor counts its writes).
A region consists of one or more stretches, which are merged until

* every value that crosses a border is a tensor, or a size that both regions can compute;
* no region writes to memory that an earlier one has computed;
* no region uses an earlier region's view of an input after a region in between has written to that input. If gradients are enabled,
  no region writes to an input that an earlier one has read, because autograd may have saved it. Writes, and views, are no reads if the
  input requires no gradient afterwards;
* the modes at each border, such as grad mode, are those at the start.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...runtime.switching.mode_stacks import unseen
from ...runtime.switching.modes import thread_state
from ..capturing.graph import CapturedGraph
from ..effects import overloads_of
from ..torch_compat import static_fake
from .lowering import Prepared

#: The key in ``node.meta`` of the number of the stretch.
STRETCH = "nnsight_stretch"

#: Fewest operations of a repeated module. Smaller modules are not worth a call of their own.
_FEWEST_OPERATIONS = 4


class _Call(NamedTuple):
    """A call of a module: the path of its parent, the number of its first node, and of the first node after it."""

    parent: str
    start: int
    stop: int


def mark_stretches(graph: CapturedGraph) -> None:
    """Number the stretches of ``graph`` between the borders of repeated modules, if it has any."""
    borders = sorted({border for call in _repeated(graph) for border in (call.start, call.stop)})
    if not borders:
        return
    stretch = 0
    for number, node in enumerate(graph.nodes):
        while stretch < len(borders) and borders[stretch] <= number:
            stretch += 1
        node.meta[STRETCH] = stretch


def copy_stretches(source: torch.fx.Graph, target: torch.fx.Graph) -> None:
    """Copy the numbers of the stretches from ``source`` to ``target``, which has the same nodes."""
    for old, new in zip(source.nodes, target.nodes, strict=True):
        if STRETCH in old.meta:
            new.meta[STRETCH] = old.meta[STRETCH]


def _repeated(graph: CapturedGraph) -> list[_Call]:
    """Return calls of repeated modules that do not overlap, with the groups first that save the most operations."""
    groups: dict[Any, list[_Call]] = defaultdict(list)
    operations = [_operation(graph, node) for node in graph.nodes]
    for call in _calls(graph):
        signature = tuple(operation for operation in operations[call.start : call.stop] if operation is not None)
        if len(signature) >= _FEWEST_OPERATIONS:
            groups[call.parent, signature].append(call)
    chosen: list[_Call] = []
    saved = {key: len(key[1]) * (len(calls) - 1) for key, calls in groups.items()}
    for key in sorted(groups, key=lambda key: -saved[key]):
        apart = (call.stop <= other.start or other.stop <= call.start for call in groups[key] for other in chosen)
        if saved[key] and all(apart):
            chosen += groups[key]
    return chosen


def _operation(graph: CapturedGraph, node: torch.fx.Node) -> Any:
    """Return the operation of a node, for comparison; ``None`` if it computes nothing."""
    passive = node in graph.tap_number or node in graph.tapped or node in graph.identities
    return None if passive or node.op in ("placeholder", "output") else (node.op, node.target)


def _calls(graph: CapturedGraph) -> list[_Call]:
    """Return the calls of modules whose input and output taps are both in the graph."""
    calls: list[_Call] = []
    pending: list[tuple[str, int]] = []
    for tap in graph.taps:
        path, _, kind = tap.location.rpartition(".")
        if ".source." in tap.location:
            continue
        if kind == "input":
            pending.append((path, graph.order[tap.node]))
        elif kind == "output" and any(path == other for other, _ in pending):
            while pending[-1][0] != path:
                pending.pop()
            calls.append(_Call(path.rpartition(".")[0], pending.pop()[1], graph.order[tap.node]))
    return calls


#: Types of sizes, which each region computes for itself.
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, int, float, bool)

#: Methods of tensors that return sizes, and modules whose functions compute sizes from other sizes.
_SIZE_METHODS = frozenset({"size", "stride", "dim", "numel", "storage_offset"})
_SIZE_MODULES = frozenset({"_operator", "math", "builtins", "torch"})


@dataclass(eq=False)
class Region:
    """A part of a graph.

    Attributes:
        first: Number of its first stretch.
        inputs: Nodes outside the region whose values it uses, in order of use.
        outputs: Its nodes whose values are used outside the region, in order.
    """

    first: int
    nodes: list[torch.fx.Node] = field(default_factory=list)
    inputs: list[torch.fx.Node] = field(default_factory=list)
    outputs: list[torch.fx.Node] = field(default_factory=list)


class Like(NamedTuple):
    """The metadata of a tensor on which a lowering depends."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Like:
        size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
        return Like(size, stride, offset, tensor.dtype, tensor.device, tensor.requires_grad)

    def numbers(self) -> tuple[Any, ...]:
        """Return the entries that may be symbolic."""
        return (*self.size, *self.stride, self.offset)


class Plan:
    """Decides where to cut a graph, from a run on fakes.

    Attributes:
        values: The result of each node on fakes.
        likes: For each tensor and each stretch that uses it, the metadata at the first use.
        stretch: Number of the stretch of each node. It never decreases in graph order.
        written: For each call that writes to arguments, those arguments.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.module = prepared.graph_module
        self.values: dict[torch.fx.Node, Any] = {}
        self.likes: dict[torch.fx.Node, dict[int, Like]] = defaultdict(dict)
        self.stretch: dict[torch.fx.Node, int] = {}
        self.written: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        # For each storage: the inputs in it, the nodes that compute it, and the stretches that use it, read its values, and write to it.
        self._outside: dict[int, list[torch.fx.Node]] = defaultdict(list)
        self._computed: dict[int, list[torch.fx.Node]] = defaultdict(list)
        self._uses: dict[int, set[int]] = defaultdict(set)
        self._reads: dict[int, set[int]] = defaultdict(set)
        self._writes: dict[int, set[int]] = defaultdict(set)
        self._merged: list[tuple[int, int]] = []
        grad = torch.set_grad_enabled(torch.is_grad_enabled())  # the graph may switch it
        layers = torch._C._functorch
        depth = layers.get_dynamic_layer_stack_depth()
        subclasses = any(map(is_traceable_wrapper_subclass, prepared.fakes))
        with prepared.symbols.mode, enable_python_dispatcher(), unseen(subclasses), grad:
            try:
                self._run()
            finally:  # a run that fails inside a `vmap` of the model does not leave it
                layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)

    # -- the run on fakes ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fakes = iter(self.prepared.fakes)
        state = thread_state()
        # Nodes of the block before the first captured node belong to the stretch of that node.
        last = next((node.meta[STRETCH] for node in self.module.graph.nodes if STRETCH in node.meta), 0)
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                value = next(fakes) if node.op == "placeholder" else attribute_at(self.module, str(node.target))
                if isinstance(value, torch.Tensor):
                    if node.op == "get_attr":
                        value = static_fake(self.prepared.symbols.mode, value)
                    self._outside[memory_of(value)].append(node)
                self.values[node] = value
                continue
            stretch = max(last, node.meta.get(STRETCH, last))
            if stretch != last and thread_state() != state:
                self._merged.append((last, stretch))
            last = self.stretch[node] = stretch
            if node.op != "output":
                self._run_node(node, stretch)

    def _run_node(self, node: torch.fx.Node, stretch: int) -> None:
        for source in node.all_input_nodes:
            value = self.values[source]
            if isinstance(value, torch.Tensor):
                self._uses[memory_of(value)].add(stretch)
                if stretch not in self.likes[source]:
                    self.likes[source][stretch] = Like.of(value)
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        given = [(source, tensor) for source in node.all_input_nodes for tensor in _tensors(self.values[source])]
        versions = [tensor._version for _, tensor in given]
        if node.op == "call_function":
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            raise NotImplementedError(f"the graph has a node of kind `{node.op}`")
        writes_all = _writes_unseen(node.target)
        for (source, tensor), version in zip(given, versions, strict=True):
            if writes_all or tensor._version != version:
                self._writes[memory_of(tensor)].add(stretch)
                self.written.setdefault(node, []).append(source)
        for tensor in _tensors(result):
            self._computed[memory_of(tensor)].append(node)
        viewed, written = set(map(memory_of, _tensors(result))), self.written.get(node, ())
        for source, tensor in given:
            if source not in written and memory_of(tensor) not in viewed:
                self._reads[memory_of(tensor)].add(stretch)
        self.values[node] = result

    def has_backward(self) -> bool:
        """Whether autograd can compute gradients of all results of the graph. It cannot if a call edits a tensor that it has kept."""
        results = [value for node in self.module.graph.output_node().all_input_nodes for value in _tensors(self.values[node])]
        results = [value for value in results if value.requires_grad]
        inputs = [value for value in self.prepared.fakes if isinstance(value, torch.Tensor) and value.requires_grad]
        if not results or not inputs:
            return True
        try:
            with self.prepared.symbols.mode, enable_python_dispatcher():
                torch.autograd.grad(results, inputs, [torch.ones_like(value) for value in results], allow_unused=True)
        except Exception:
            return False
        return True

    # -- the places of cuts --------------------------------------------------------------------------------------------

    def regions(self) -> list[Region]:
        """Return the regions in order."""
        found: list[Region] = []
        self.region: dict[torch.fx.Node, Region] = {}
        ends = self._ends()
        last = None
        for node, stretch in self.stretch.items():
            if node.op == "output":
                break
            if last is None or (stretch != last and last in ends):
                found.append(Region(stretch))
            last = stretch
            self.region[node] = found[-1]
            found[-1].nodes.append(node)
        taken: set[torch.fx.Node] = set(self.module.graph.output_node().all_input_nodes)
        for region in found:
            region.inputs = list(dict.fromkeys(item for node in region.nodes for item in self._needed(node, region)))
            taken.update(region.inputs)
        for region in found:
            region.outputs = [node for node in region.nodes if node in taken]
        return found

    def _needed(self, node: torch.fx.Node, region: Region) -> Iterator[torch.fx.Node]:
        """Yield the nodes outside ``region`` whose values ``node`` needs, through sizes that the region computes itself."""
        for source in node.all_input_nodes:
            if source.op == "placeholder" or (source.op == "get_attr" and self.is_tensor(source)):
                yield source
            elif source.op != "get_attr" and self.region[source] is not region:
                if self.is_size(source):
                    yield from self._needed(source, region)
                else:
                    yield source

    def memory(self, node: torch.fx.Node) -> int | None:
        """Return the identity of the memory of a node's tensor, ``None`` for other values."""
        value = self.values.get(node)
        return memory_of(value) if isinstance(value, torch.Tensor) else None

    def copies_for_backward(self) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        """Return pairs of a call and an argument that must be copied, because the backward pass may need its values at the call.

        The argument is in the memory of an input. The graph overwrites it in a later call or, if it requires a gradient, in this call.
        """
        found: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        waiting: dict[int | None, list[tuple[torch.fx.Node, torch.fx.Node]]] = defaultdict(list)
        for node in self.stretch:
            written = self.written.get(node, [])
            for source in written:
                found += waiting.pop(self.memory(source), [])
            if len(written) == 1 and self.memory(written[0]) in self._outside and self._is_tracked_edit(node, written[0]):
                found.append((node, written[0]))
            if not (written or _tensors(self.values.get(node))):
                continue  # a size, or the output node
            # A view does not read values, nor do the views that `chunk`, `split` or `unbind` returns.
            unused = {self.memory(source) for source in written} or set(map(memory_of, _tensors(self.values[node])))
            for source in node.all_input_nodes:
                memory = self.memory(source)
                if memory in self._outside and memory not in unused:
                    waiting[memory].append((node, source))
        return found

    def _is_tracked_edit(self, node: torch.fx.Node, source: torch.fx.Node) -> bool:
        """Whether ``node`` only edits ``source``, which requires a gradient, so that autograd tracks the edit."""
        value, result = self.values[source], self.values[node]
        is_plain = not _writes_unseen(node.target) and (result is None or result is value)
        return is_plain and isinstance(value, torch.Tensor) and value.requires_grad

    def is_tensor(self, node: torch.fx.Node) -> bool:
        return isinstance(self.values[node], torch.Tensor)

    def is_size(self, node: torch.fx.Node) -> bool:
        """Whether ``node`` is a size that any region can compute."""
        if not isinstance(self.values[node], _SIZES) or not node.all_input_nodes:
            return False
        if node.op == "call_method":
            return node.target in _SIZE_METHODS
        of_sizes = all(isinstance(self.values[source], _SIZES) for source in node.all_input_nodes)
        return node.target is getattr or (of_sizes and getattr(node.target, "__module__", None) in _SIZE_MODULES)

    def _ends(self) -> set[int]:
        """Return the stretches after which the graph is cut."""
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
                raise ValueError("the graph writes to memory that two of its inputs share")
            if torch.is_grad_enabled():
                tracked = any(self.values[node].requires_grad for node in self._outside[memory])
                merged.append((min((self._uses if tracked else self._reads)[memory], default=last), last))
            merged += [(self.stretch[node], last) for node in self._computed[memory] if self._is_used_later(node)]
        stretches = sorted(set(self.stretch.values()))
        return {stretch for stretch in stretches if not any(start <= stretch < stop for start, stop in merged)}

    def _is_used_later(self, node: torch.fx.Node) -> bool:
        return any(user.op == "output" or self.stretch[user] > self.stretch[node] for user in node.users)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    """Return an identity of the memory of a tensor. Inside ``vmap``, it is the memory of the batched tensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata


def attribute_at(root: torch.nn.Module, path: str) -> Any:
    """Return the attribute of ``root`` at a dotted path."""
    return functools.reduce(getattr, path.split("."), root)


def _crosses(value: Any) -> bool:
    """Whether ``value`` can cross a border: a plain strided tensor."""
    return type(value) is FakeTensor and value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def _writes_unseen(target: Any) -> bool:
    """Whether a function may write to its arguments without incrementing their versions."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "mutation" in target.name() or "auto_functionalized" in target.name()
    return any(overload._schema.is_mutable for overload in overloads_of(target))
