"""Splicing: a program written into a captured graph.

The result is a new graph module. Captured nodes are copied in order; where a tap stood, the program's calls of that tap
follow, and uses of a replaced tensor go to its replacement. Taps themselves are gone. In-place edits need no
special treatment: they are calls on the same value that the model uses, and lowering functionalizes them as it does the model's own.

The inputs are the captured graph's inputs, then the values carried over from the piece before (if the graph was
cut), then the program's externals.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .graph import CapturedGraph
from .program import (
    Call,
    Constant,
    Declare,
    External,
    Input,
    Nest,
    Program,
    Reference,
    Skip,
    Step,
    Value,
    Visit,
    Write,
)


@dataclass(frozen=True, eq=False)
class Piece:
    """A stretch of a captured graph between two cuts.

    Attributes:
        start: Number of its first node.
        inputs: The graph's placeholders, then the nodes of earlier pieces that this or a later piece uses.
        input_index: Position of each in ``inputs``.
    """

    start: int
    inputs: tuple[torch.fx.Node, ...]
    input_index: dict[torch.fx.Node, int]

    @staticmethod
    def of(graph: CapturedGraph, start: int) -> Piece:
        """Return the piece of ``graph`` that begins at node number ``start``."""
        inputs = list(graph.placeholders)
        if start:
            inputs += [
                node
                for node in graph.nodes[:start]
                if node.op != "placeholder"
                and isinstance(node.meta.get("example_value"), (torch.Tensor, torch.SymInt))
                and any(graph.order[user] >= start for user in node.users)
            ]
        return Piece(start, tuple(inputs), {node: index for index, node in enumerate(inputs)})

    def without_duplicates(self, values: Sequence[Any]) -> Piece:
        """Return this piece with one input for nodes that stand for one tensor; backends take no tensor twice.

        Args:
            values: What each input is, equal for inputs that are the same.
        """
        inputs: list[torch.fx.Node] = []
        position: dict[Any, int] = {}
        index: dict[torch.fx.Node, int] = {}
        for node, value in zip(self.inputs, values, strict=True):
            if value not in position:
                position[value] = len(inputs)
                inputs.append(node)
            index[node] = position[value]
        return Piece(self.start, tuple(inputs), index)


#: Something a piece returns: a value of the program, or a node of the captured graph.
Result = Value | torch.fx.Node


@dataclass(frozen=True, eq=False)
class SplicedGraph:
    """A piece of a captured graph with a program in it.

    Attributes:
        graph_module: The new graph; returns a tuple, one tensor for each requested result.
        inputs: Positions of those inputs of the piece that it takes, before its externals.
        externals: Number of externals it takes.
        marks: Names of the nodes that come from the user's block, with the user's line.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[int, ...]
    externals: int
    marks: dict[str, str]

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
            assigned = re.match(r"\s*(\w+)(?: :[^=]*)? = ", line) or re.search(r";\s+(\w+) = None$", line)
            mark = self.marks.get(assigned.group(1)) if assigned else None
            if mark is None:
                names = re.findall(r"\b(\w+) = None\b", line)
                mark = next((self.marks[name] for name in names if name in self.marks and "] =" in line), None)
            lines.append(f"{line}  # <-- {mark}" if mark else line)
        return "\n".join(lines).strip()


def splice(
    graph: CapturedGraph, piece: Piece, program: Program, stop: int, results: Sequence[Result]
) -> SplicedGraph:
    """Write ``program`` into the nodes ``piece.start`` to ``stop`` of ``graph``.

    Args:
        graph: The captured graph; not changed.
        piece: Where to begin.
        program: What to add; its positions are numbers of taps.
        stop: Number of the first node that is left out.
        results: What the new graph returns.
    """
    return _Splicer(graph, piece, program, stop).run(results)


class _Splicer:
    """Builds one spliced graph; see :func:`splice`."""

    def __init__(self, graph: CapturedGraph, piece: Piece, program: Program, stop: int) -> None:
        self.graph = graph
        self.piece = piece
        self.stop = stop
        self.new = torch.fx.Graph()
        self.env: dict[torch.fx.Node, Any] = {}
        self.values: list[Any] = []
        self.marks: dict[str, str] = {}
        self.passive = self.graph.tapped.keys() | self.graph.identities.keys()
        self.skip_to: torch.fx.Node | None = None
        self.used_inputs: list[int] = []
        self.external_nodes: list[torch.fx.Node] = []
        self.declared = [step.event for step in program.steps if isinstance(step.event, Declare)]
        self.steps: dict[int, list[Step]] = {}
        for step in program.steps:
            self.steps.setdefault(step.position, []).append(step)

    def run(self, results: Sequence[Result]) -> SplicedGraph:
        self._add_inputs(results)
        for node in self.graph.nodes[self.piece.start : self.stop]:
            if self.skip_to is not None and node is not self.skip_to:
                continue
            self.skip_to = None
            if node in self.graph.tap_number:
                self._at_tap(self.graph.tap_number[node])
            elif node.op not in ("placeholder", "output") and node not in self.passive:
                self.env[node] = self.new.node_copy(node, self._captured)
        stopped_at = self.graph.tap_number.get(self.graph.nodes[self.stop])
        if stopped_at is not None:  # the graph was cut here, after these calls
            self._at_tap(stopped_at)
        returned = [
            self.values[result.index] if isinstance(result, Value) else self._captured(result) for result in results
        ]
        self.new.output(tuple(returned))
        self.new.lint()
        module = torch.fx.GraphModule(self.graph.graph_module, self.new, class_name="Spliced")
        return SplicedGraph(module, tuple(self.used_inputs), len(self.external_nodes), self.marks)

    def _add_inputs(self, results: Sequence[Result]) -> None:
        needed = self._needed_inputs(results)
        for index, node in enumerate(self.piece.inputs):
            if index in needed:
                placeholder = self.new.placeholder(node.name)
                placeholder.meta = dict(node.meta)
                self.env[node] = placeholder
                self.used_inputs.append(index)
        for number, declaration in enumerate(self.declared):
            placeholder = self.new.placeholder(f"external_{number}")
            placeholder.meta["declaration"] = declaration
            self.external_nodes.append(placeholder)

    def _needed_inputs(self, results: Sequence[Result]) -> set[int]:
        """Positions of the inputs to take: all of an uncut graph, those in use behind a cut."""
        index = self.piece.input_index
        if self.piece.start == 0:
            return set(range(len(self.piece.inputs)))
        used = {result for result in results if isinstance(result, torch.fx.Node)}
        for node in self.graph.nodes[self.piece.start : self.stop]:
            used.update(node.all_input_nodes)
        needed = {index[node] for node in used if node in index}
        for steps in self.steps.values():
            for step in steps:
                needed.update(reference.index for reference in references(step.event) if isinstance(reference, Input))
        return needed

    def _captured(self, node: torch.fx.Node) -> Any:
        """Return the new node for a captured one; what a tap passes on is what it was given."""
        while node not in self.env:
            if node in self.graph.identities:
                node = self.graph.identities[node]
                continue
            if node not in self.graph.tapped:
                raise ValueError(
                    f"A module cannot be skipped in this compiled trace: the model uses a value that is computed inside it "
                    f"({node.name}) in another way than as its output, such as a key-value cache. Switch the cache off "
                    "(`use_cache=False`) or use `trace(..., compile=False)`."
                )
            tap, leaf = self.graph.tapped[node]
            node = self.graph.taps[tap].leaves[leaf]
        return self.env[node]

    def _at_tap(self, number: int) -> None:
        tap = self.graph.taps[number]
        for step in self.steps.pop(number, ()):
            event = step.event
            if isinstance(event, Visit):
                self.values += [self._captured(tap.leaves[leaf]) for leaf in event.fresh]
            elif isinstance(event, Call):
                self._add_call(event, step)
            elif isinstance(event, Skip):
                until = self.graph.taps[event.until]
                self.skip_to = until.node
                self.env.update({until.leaves[leaf]: self._referred(source) for leaf, source in event.sources})
            elif isinstance(event, Write):
                for node in tap.outputs.get(event.leaf, ()):
                    self.env[node] = self._referred(event.source)

    def _referred(self, reference: Reference) -> Any:
        if isinstance(reference, Value):
            return self.values[reference.index]
        if isinstance(reference, External):
            return self.external_nodes[reference.index]
        return self.env[self.piece.inputs[reference.index]]

    def _add_call(self, call: Call, step: Step) -> None:
        args = tuple(self._argument(argument) for argument in call.args)
        kwargs = {name: self._argument(argument) for name, argument in call.kwargs}
        if call.grad is not None:
            self._mark(self.new.call_function(torch._C._set_grad_enabled, (call.grad,)), step)
        node = _emit(self.new, call.function, args, kwargs)
        self._mark(node, step)
        if call.grad is not None:
            self._mark(self.new.call_function(torch._C._set_grad_enabled, (not call.grad,)), step)
        assert step.outcome is not None
        paths = step.outcome.paths
        for leaf, path in zip(step.outcome.leaves, paths, strict=True):
            if isinstance(leaf, int) and leaf == len(self.values):
                value: Any = node
                for key in path:
                    value = self.new.call_function(getattr if isinstance(key, str) else operator.getitem, (value, key))
                    self._mark(value, step)
                self.values.append(value)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, (Value, Input, External)):
            return self._referred(argument)
        if isinstance(argument, Constant):
            return argument.value
        if isinstance(argument, Nest):
            return argument.build([self._argument(item) for item in argument.items])
        return argument

    def _mark(self, node: torch.fx.Node, step: Step) -> None:
        node.stack_trace = step.stack_trace
        found = re.search(r'File "([^"]*)", line (\d+)', step.stack_trace)
        self.marks[node.name] = f"{found.group(1).rsplit('/', 1)[-1]}:{found.group(2)}" if found else "block"


def references(event: Any) -> list[Reference]:
    """Return the tensors an event uses."""
    if isinstance(event, Write):
        return [event.source]
    if isinstance(event, Skip):
        return [source for _, source in event.sources]
    if not isinstance(event, Call):
        return []
    found: list[Reference] = []
    pending: list[Any] = [*event.args, *(value for _, value in event.kwargs)]
    while pending:
        item = pending.pop()
        if isinstance(item, (Value, Input, External)):
            found.append(item)
        elif isinstance(item, Nest):
            pending.extend(item.items)
    return found


#: Methods that read better as the operator they implement.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "__add__": operator.add,
    "__sub__": operator.sub,
    "__mul__": operator.mul,
    "__truediv__": operator.truediv,
    "__floordiv__": operator.floordiv,
    "__mod__": operator.mod,
    "__matmul__": operator.matmul,
    "__pow__": operator.pow,
    "__neg__": operator.neg,
    "__invert__": operator.invert,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__iadd__": operator.iadd,
    "__isub__": operator.isub,
    "__imul__": operator.imul,
    "__itruediv__": operator.itruediv,
}


def _emit(graph: torch.fx.Graph, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """Add a node for a torch function as ``__torch_function__`` receives it."""
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
