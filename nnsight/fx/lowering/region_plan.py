"""Where a graph may be cut into regions.

A lowered graph keeps the order of its own effects only, so a cut must not come between an effect and those who see it. The graph
is run once on fakes to see which nodes share memory and which write to it (the version of a tensor counts its writes). Stretches are
merged until

* what crosses a border is a tensor, or a size that can be computed on both sides;
* memory that is computed in one region is not written in a later one;
* of memory that comes in from outside, no view made in one region is used once a later one has written, and, where
  gradients are computed, neither is that memory itself, because autograd may have kept it;
* grad mode and the like are at a border as they were at the start.
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

from ...runtime.switching.modes import thread_state
from .lowering import Prepared
from .repeated_modules import STRETCH

#: Results that each region which uses them computes again.
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, int, float, bool)

#: What yields them: methods of tensors, and functions of these modules on other sizes.
_SIZE_METHODS = frozenset({"size", "stride", "dim", "numel", "storage_offset"})
_SIZE_MODULES = frozenset({"_operator", "math", "builtins", "torch"})


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


class Like(NamedTuple):
    """What a lowering has to know of a tensor that a region takes."""

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
        """The numbers that may be symbolic."""
        return (*self.size, *self.stride, self.offset)


class Plan:
    """Decides where to cut, from a run on fakes.

    Attributes:
        values: What each node returned.
        likes: How a tensor was when a stretch first used it.
        stretch: Number of the stretch of each node, growing in graph order.
        written: For calls that write to tensors, the arguments that hold them.
    """

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.module = prepared.graph_module
        self.values: dict[torch.fx.Node, Any] = {}
        self.likes: dict[torch.fx.Node, dict[int, Like]] = defaultdict(dict)
        self.stretch: dict[torch.fx.Node, int] = {}
        self.written: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        # By memory: nodes that hold it and come from outside, that compute it; stretches that use it, that write to it.
        self._outside: dict[int, list[torch.fx.Node]] = defaultdict(list)
        self._computed: dict[int, list[torch.fx.Node]] = defaultdict(list)
        self._uses: dict[int, set[int]] = defaultdict(set)
        self._writes: dict[int, set[int]] = defaultdict(set)
        self._merged: list[tuple[int, int]] = []
        grad = torch.set_grad_enabled(torch.is_grad_enabled())  # the graph may switch it
        layers = torch._C._functorch
        depth = layers.get_dynamic_layer_stack_depth()
        with prepared.symbols.mode, enable_python_dispatcher(), torch._C.DisableTorchFunction(), grad:
            try:
                self._run()
            finally:  # a run that fails inside of a `vmap` of the model has not left it
                layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)

    # -- the run on fakes ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fakes = iter(self.prepared.fakes)
        state = thread_state()
        # What a block adds before the first captured node belongs to that node's stretch.
        last = next((node.meta[STRETCH] for node in self.module.graph.nodes if STRETCH in node.meta), 0)
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                value = next(fakes) if node.op == "placeholder" else attribute_at(self.module, str(node.target))
                if isinstance(value, torch.Tensor):
                    if node.op == "get_attr":
                        value = self.prepared.symbols.mode.from_tensor(value, static_shapes=True)
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
            raise NotImplementedError(f"a node of kind {node.op}")
        writes_all = _writes_unseen(node.target)
        for (source, tensor), version in zip(given, versions, strict=True):
            if writes_all or tensor._version != version:
                self._writes[memory_of(tensor)].add(stretch)
                self.written.setdefault(node, []).append(source)
        for tensor in _tensors(result):
            self._computed[memory_of(tensor)].append(node)
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

    def memory(self, node: torch.fx.Node) -> int | None:
        """What is equal for nodes whose tensors share memory."""
        value = self.values.get(node)
        return memory_of(value) if isinstance(value, torch.Tensor) else None

    def copies_for_backward(self) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
        """Calls, each with an argument whose values a backward pass may need as they are at the call.

        The argument is in memory that comes in from outside, and the graph writes to it: later, or in this call, with a gradient.
        """
        found: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        waiting: dict[int | None, list[tuple[torch.fx.Node, torch.fx.Node]]] = defaultdict(list)
        for node in self.stretch:
            written = self.written.get(node, [])
            for source in written:
                found += waiting.pop(self.memory(source), [])
            if len(written) == 1 and self.memory(written[0]) in self._outside and self._ends_as(node, written[0]):
                found.append((node, written[0]))
            if not (written or _tensors(self.values.get(node))):
                continue  # a size, or the end
            unused = {self.memory(source) for source in written} or {self.memory(node)}  # a view looks at no values
            for source in node.all_input_nodes:
                memory = self.memory(source)
                if memory in self._outside and memory not in unused:
                    waiting[memory].append((node, source))
        return found

    def _ends_as(self, node: torch.fx.Node, source: torch.fx.Node) -> bool:
        """Whether ``node`` changes the values of ``source`` and nothing else, so that autograd follows."""
        value, result = self.values[source], self.values[node]
        is_plain = not _writes_unseen(node.target) and (result is None or result is value)
        return is_plain and isinstance(value, torch.Tensor) and value.requires_grad

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


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    """Return what is equal for tensors that share memory; inside ``vmap``, what is equal for those that they are rows of."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()._cdata


def attribute_at(root: torch.nn.Module, path: str) -> Any:
    """Return the attribute of ``root`` at a dotted path."""
    return functools.reduce(getattr, path.split("."), root)


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
