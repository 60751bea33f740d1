"""Splicing: a program written into a captured graph.

The result is a new graph module. Captured nodes are copied in order; where a tap stood, the program's calls of that tap
follow, and uses of a replaced tensor go to its replacement. Taps themselves are gone. In-place edits need no
special treatment: they are calls on the same value that the model uses, and lowering functionalizes them as it does the model's own.
What is superfluous then is removed by :mod:`~nnsight.fx.splicing.passes`.

The inputs are the captured graph's inputs, then the values carried over from the piece before (if the graph was
cut), then the program's externals and its numbers. A float comes as a scalar tensor whose value the graph takes, which is how
dynamo passes the floats of a model.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capturing.graph import CapturedGraph
from ..capturing.nested import NestedGraph, call_nested
from ..capturing.switches import Switched
from ..effects import REQUIRES_GRAD, Kind, kind_of
from ..program import (
    Apply,
    Call,
    Constant,
    Declare,
    Enter,
    External,
    Input,
    Leave,
    Nest,
    Number,
    Program,
    Reference,
    Skip,
    Step,
    Value,
    Visit,
    Write,
)
from ..torch_compat import is_held_by_argument
from .indexing import select_numbers
from .passes import PassRun, run_passes
from .subgraphs import Function


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
        passes: What the passes over it did.
    """

    graph_module: torch.fx.GraphModule
    inputs: tuple[int, ...]
    externals: int
    marks: dict[str, str]
    passes: tuple[PassRun, ...] = ()

    def arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return those of ``inputs`` that the graph takes: some of the piece's, and all externals and numbers behind them."""
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
        """Return the name of the node that ``line`` of the generated source computes, if it can be told."""
        assigned = re.match(r"\s*(\w+)(?: :[^=]*)? = ", line) or re.search(r";\s+(\w+) = None$", line)
        name = assigned.group(1) if assigned else None
        if name not in self.marks and "] =" in line:  # an assignment to an index names its node among those that end
            ended = re.findall(r"\b(\w+) = None\b", line)
            name = next((other for other in ended if other in self.marks), name)
        return name


def as_argument(number: int | float) -> int | torch.Tensor:
    """Return a number of a program as the spliced graph takes it."""
    return number if isinstance(number, int) else torch.tensor(number, dtype=torch.float64)


def splice(graph: CapturedGraph, piece: Piece, program: Program, stop: int, results: Sequence[Result]) -> SplicedGraph:
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
        self.grad = torch.is_grad_enabled()  # that of the graph
        self.new = torch.fx.Graph()
        self.env: dict[torch.fx.Node, Any] = {}
        self.values: list[Any] = []
        self.fakes: list[torch.Tensor] = []
        self.numbers: dict[Number, torch.fx.Node] = {}
        self.marks: dict[str, str] = {}
        self.functions: list[Function] = []  # those that are being written, the innermost last
        self.finished: list[Function] = []  # and those that no operator has been called with yet
        self.modules: dict[str, torch.nn.Module] = {}
        self.passive = self.graph.tapped.keys() | self.graph.identities.keys()
        self.skip_to: torch.fx.Node | None = None
        self.skipped: dict[torch.fx.Node, torch.fx.Node] = {}  # with the node behind all that is skipped there
        self.used_inputs: list[int] = []
        self.external_nodes: list[torch.fx.Node] = []
        self.declared = [step.event for step in program.steps if isinstance(step.event, Declare)]
        self.steps: dict[int, list[Step]] = {}
        for step in program.steps:
            self.steps.setdefault(step.position, []).append(step)

    def run(self, results: Sequence[Result]) -> SplicedGraph:
        self._add_inputs(results)
        start, last = self.graph.nodes[self.piece.start], self.graph.nodes[self.stop]
        self._switched(start).enter(self.new, self.env, self.grad)
        for node in self.graph.nodes[self.piece.start : self.stop]:
            if self.skip_to is not None and node is not self.skip_to:
                self.skipped[node] = self.skip_to
                continue
            self.skip_to = None
            idle = self._idle_at(node, results)
            if idle is not None:
                self.env.update(call_nested(self.new, idle, self._captured))
                self.skip_to = idle.last.next  # written already
            elif node in self.graph.tap_number:
                self._at_tap(self.graph.tap_number[node])
            elif node.op not in ("placeholder", "output") and node not in self.passive:
                self.env[node] = self.new.node_copy(node, self._captured)
        stopped_at = self.graph.tap_number.get(last)
        if stopped_at is not None:  # the graph was cut here, after these calls
            self._at_tap(stopped_at)
            self._switched(last).leave(self.new, self.env, self.grad)
        returned = [
            self.values[result.index] if isinstance(result, Value) else self._captured(self._stored(result)) for result in results
        ]
        self.new.output(tuple(returned))
        self.new.lint()
        module = torch.fx.GraphModule(self._root(), self.new, class_name="Spliced")
        module, passes = run_passes(module)
        return SplicedGraph(module, tuple(self.used_inputs), len(self.external_nodes), self.marks, passes)

    def _root(self) -> Any:
        """Return what the spliced graph finds its modules and attributes in."""
        captured = self.graph.graph_module
        if not self.modules:
            return captured
        targets = {str(node.target) for node in self.new.nodes if node.op in ("get_attr", "call_module")}
        return {name: self.modules.get(name) or operator.attrgetter(name)(captured) for name in targets}

    def _add_inputs(self, results: Sequence[Result]) -> None:
        needed = self._needed_inputs(results)
        for index, node in enumerate(self.piece.inputs):
            if index in needed:
                placeholder = self.new.placeholder(node.name)
                placeholder.meta = dict(node.meta)
                self.env[node] = placeholder
                self.used_inputs.append(index)
        for node, index in self.piece.input_index.items():  # some stand for one tensor
            if index in needed:
                self.env.setdefault(node, self.env[self.piece.inputs[index]])
        for number, declaration in enumerate(self.declared):
            placeholder = self.new.placeholder(f"external_{number}")
            placeholder.meta["declaration"] = declaration
            self.external_nodes.append(placeholder)
        used = {found for steps in self.steps.values() for step in steps for found in numbers(step.event)}
        for taken in sorted(used):
            placeholder = self.new.placeholder(f"number_{taken.index}")
            placeholder.meta["number"] = taken
            self.numbers[taken] = placeholder
        for taken, placeholder in self.numbers.items():
            if taken.kind is float:
                self.numbers[taken] = self.new.call_method("item", (placeholder,))

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

    def _idle_at(self, node: torch.fx.Node, results: Sequence[Result]) -> NestedGraph | None:
        """Return the nested graph that begins with ``node`` if it is needed as a whole: nothing happens or is taken out inside."""
        order = self.graph.order
        for nested in self.graph.nested.get(node, ()):
            start, stop = order[nested.start], order[nested.last] + 1
            happens = [order[self.graph.taps[number].node] for number in self.steps]
            taken = [order[result] for result in results if isinstance(result, torch.fx.Node) and result not in nested.results]
            if stop <= self.stop and not any(start <= number < stop for number in (*happens, *taken)):
                return nested
        return None

    def _switched(self, node: torch.fx.Node) -> Switched:
        """Return the modes that the captured graph has switched when it comes to ``node``, a tap."""
        return self.graph.switched.get(node, Switched())

    def _captured(self, node: torch.fx.Node) -> Any:
        """Return the new node for a captured one; what a tap passes on is what it was given."""
        while node not in self.env:
            if node in self.graph.identities:
                node = self.graph.identities[node]
                continue
            edited = edited_by(node)
            if edited is not None:  # a buffer that a skipped module would have changed is what it was
                node = edited
                continue
            if node not in self.graph.tapped:
                raise ValueError(
                    f"{self._skipped_module(node)} cannot be skipped in this compiled trace: the model uses a value that is computed "
                    f"inside it ({node.name}) in another way than as its output, such as a state that it keeps. Use "
                    "`trace(..., compile=False)`, or `use_cache=False` if it is kept in a cache."
                )
            tap, leaf = self.graph.tapped[node]
            node = self.graph.taps[tap].leaves[leaf]
        return self.env[node]

    def _skipped_module(self, node: torch.fx.Node) -> str:
        """Name the skipped module that computes ``node``."""
        number = self.graph.tap_number.get(self.skipped.get(node, node))
        return "A module" if number is None else f"`{self.graph.taps[number].location.removesuffix('.output')}`"

    def _stored(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return what stands for a value that the model stores or returns for the next step, such as the keys of a cache.

        A module that is skipped stores nothing, so that what was stored before stays: of keys that have been appended to others, those
        others. Where nothing was stored, that is what the module itself begins with.
        """
        while node in self.skipped and node not in self.env:
            if not all(user.op == "output" or user in self.skipped for user in node.users):
                return node  # the rest of the model computes with it
            edited, former = edited_by(node), _appended_to(node)
            if edited is None and former is None:
                self._begin_with(node)
                return node
            node = edited if edited is not None else former  # type: ignore[assignment]
        return node

    def _begin_with(self, node: torch.fx.Node) -> None:
        """Compute a tensor that a skipped module makes of nothing but sizes, such as the zeros that a state begins with."""
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            return
        if _is_made_of_sizes(node):
            for made_of in node.all_input_nodes:
                if made_of in self.skipped and made_of not in self.env:
                    self._begin_with(made_of)
            self.env[node] = self.new.node_copy(node, self._captured)
            return
        if node.op != "call_function" or kind_of(node) is not Kind.NEW:
            return
        make = _LIKE.get(getattr(node.target, "__name__", ""))
        sizes = {symbol: self.graph.placeholders[position] for position, symbol in self.graph.symbols}
        shape = [sizes.get(size.node.expr) if isinstance(size, torch.SymInt) else size for size in example.shape]
        if make is not None and None not in shape:
            taken = tuple(self._captured(size) if isinstance(size, torch.fx.Node) else size for size in shape)
            self.env[node] = self.new.call_function(make, (taken,), {"dtype": example.dtype, "device": example.device})

    def _at_tap(self, number: int) -> None:
        tap = self.graph.taps[number]
        for step in self.steps.pop(number, ()):
            event = step.event
            if isinstance(event, Visit):
                self.values += [self._captured(tap.leaves[leaf]) for leaf in event.fresh]
                self.fakes += [tap.leaves[leaf].meta["example_value"] for leaf in event.fresh]
            elif isinstance(event, Call):
                self._add_call(event, step)
            elif isinstance(event, Enter):
                self._enter(event)
            elif isinstance(event, Leave):
                self._leave(event)
            elif isinstance(event, Apply):
                self._apply(event, step)
            elif isinstance(event, Skip):
                until = self.graph.taps[event.until]
                self.skip_to = until.node
                self.env.update({until.leaves[leaf]: self._referred(source) for leaf, source in event.sources})
            elif isinstance(event, Write):
                for node in tap.outputs.get(event.leaf, ()):
                    self.env[node] = self._referred(event.source)

    @property
    def writing(self) -> torch.fx.Graph:
        """The graph that calls are written to: that of the innermost function, if there is one."""
        return self.functions[-1].graph if self.functions else self.new

    def _referred(self, reference: Reference) -> Any:
        if isinstance(reference, Value):
            node = self.values[reference.index]
        elif isinstance(reference, External):
            node = self.external_nodes[reference.index]
        else:
            node = self.env[self.piece.inputs[reference.index]]
        inside = next((depth for depth, function in enumerate(self.functions, 1) if node.graph is function.graph), 0)
        for function in self.functions[inside:]:
            node = function.reach(node)
        return node

    def _enter(self, event: Enter) -> None:
        function = Function()
        for reference in event.operands:
            self.values.append(function.argument(f"argument_{len(self.values)}"))
            self.fakes.append(self._fake(reference))
        self.functions.append(function)

    def _leave(self, event: Leave) -> None:
        results = tuple(self._referred(result) for result in event.results)
        self.functions[-1].results = results[0] if event.is_single else results
        self.finished.append(self.functions.pop())

    def _apply(self, event: Apply, step: Step) -> None:
        """Call an operator that takes functions. No gradient goes through it, and it need not prepare for one."""
        functions = self.finished[-event.count :]
        del self.finished[-event.count :]
        used = list(dict.fromkeys(node for function in functions for node in function.around))
        names = []
        for function in functions:
            names.append(f"function_{len(self.modules)}")
            inner = {str(node.target) for node in function.graph.nodes if node.op == "get_attr"}
            self.modules[names[-1]] = function.finished(used, {name: self.modules[name] for name in inner})
        taken = [self.writing.get_attr(name) for name in names]
        groups = [tuple(self._referred(reference) for reference in group) for group in event.groups]
        groups[-1] += tuple(used)
        grad = self._grad_around(step) and not self.functions
        if grad:
            self._mark(self.writing.call_function(torch._C._set_grad_enabled, (False,)), step)
        node = self.writing.call_function(event.operator, (*taken, *groups))
        self._mark(node, step)
        if grad:
            self._mark(self.writing.call_function(torch._C._set_grad_enabled, (True,)), step)
        assert step.outcome is not None
        self.fakes += step.outcome.fakes
        for number in range(len(step.outcome.fakes)):
            self.values.append(self.writing.call_function(operator.getitem, (node, number)))
            self._mark(self.values[-1], step)

    def _grad_around(self, step: Step) -> bool:
        """Return the grad mode of the model where ``step`` happens."""
        switched = self._switched(self.graph.taps[step.position].node).grad
        return self.grad if switched is None else switched

    def _add_call(self, call: Call, step: Step) -> None:
        args = tuple(self._argument(argument) for argument in call.args)
        kwargs = {name: self._argument(argument) for name, argument in call.kwargs}
        around = self._grad_around(step)
        grad = around if self.functions else self.grad if call.grad is None else call.grad
        if grad != around:
            self._mark(self.writing.call_function(torch._C._set_grad_enabled, (grad,)), step)
        if getattr(call.function, "__name__", "") in ("__getitem__", "__setitem__"):
            selected, rest = select_numbers(call.args[1], self._fake)
            for dimension, number in selected:
                view = self.writing.call_method("select", (args[0], dimension, self.numbers[number]))
                self._mark(view, step)
                args = (view, Ellipsis if rest is None else self._argument(rest), *args[2:])
        node = _emit(self.writing, call.function, args, kwargs)
        self._mark(node, step)
        if grad != around:
            self._mark(self.writing.call_function(torch._C._set_grad_enabled, (around,)), step)
        assert step.outcome is not None
        node.meta[REQUIRES_GRAD] = step.outcome.is_differentiated
        self.fakes += step.outcome.fakes
        paths = step.outcome.paths
        for leaf, path in zip(step.outcome.leaves, paths, strict=True):
            if isinstance(leaf, int) and leaf == len(self.values):
                value: Any = node
                for key in path:
                    value = self.writing.call_function(getattr if isinstance(key, str) else operator.getitem, (value, key))
                    self._mark(value, step)
                self.values.append(value)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, (Value, Input, External)):
            return self._referred(argument)
        if isinstance(argument, Number):
            return self.numbers[argument]
        if isinstance(argument, Constant):
            return argument.value
        if isinstance(argument, Nest):
            return argument.build([self._argument(item) for item in argument.items])
        return argument

    def _fake(self, reference: Reference) -> Any:
        """Return a tensor with the type and the dimensions of what ``reference`` stands for."""
        if isinstance(reference, Value):
            return self.fakes[reference.index]
        if isinstance(reference, External):
            declared = self.declared[reference.index]
            return torch.empty([1] * len(declared.shape), dtype=declared.dtype, device="meta")
        return self.piece.inputs[reference.index].meta["example_value"]

    def _mark(self, node: torch.fx.Node, step: Step) -> None:
        node.stack_trace = step.stack_trace
        found = re.search(r'File "([^"]*)", line (\d+)', step.stack_trace)
        self.marks[node.name] = f"{found.group(1).rsplit('/', 1)[-1]}:{found.group(2)}" if found else "block"


def _appended_to(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return what was stored before ``node``.

    That is what ``node`` concatenates with new entries (perhaps it is a part or another layout of that); or, if a cache that the model
    was given holds it, what it moves to a device or adds to. What was stored before comes from outside, or has no entries yet. Any
    other concatenation is the module's own.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "cat" and node.args and isinstance(node.args[0], (list, tuple)) and isinstance(node.args[0][0], torch.fx.Node):
        first = node.args[0][0]
        example = first.meta.get("example_value")
        is_empty = isinstance(example, torch.Tensor) and 0 in [size for size in example.shape if isinstance(size, int)]
        return first if first.op == "placeholder" or is_empty else None
    source = node.args[0] if node.args else None
    if not isinstance(source, torch.fx.Node):
        return None
    if name in ("to", "add", "iadd") and source.op == "placeholder" and is_held_by_argument(source):
        return source
    return source if _passes_on(node) and _appended_to(source) is not None else None


def _passes_on(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a part of its first argument, or the same in another place or layout."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.target is operator.getitem or name in ("contiguous", "clone", "to", "detach")


#: What makes the same as functions that take the sizes from another tensor.
_LIKE: dict[str, Callable[..., Any]] = {"zeros_like": torch.zeros, "ones_like": torch.ones, "empty_like": torch.zeros}


def _tensors_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [item for item in node.all_input_nodes if isinstance(item.meta.get("example_value"), torch.Tensor)]


def _is_made_of_sizes(node: torch.fx.Node) -> bool:
    """Whether a tensor is made of numbers alone, or is one that is, in another place or layout."""
    tensors = _tensors_of(node)
    if tensors:
        return _passes_on(node) and all(map(_is_made_of_sizes, tensors))
    return node.op == "call_function" and kind_of(node) is Kind.NEW


def edited_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor that ``node`` changes in place and returns, if it does."""
    if isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None  # ``+=`` of a number makes another one
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    operates = node.op == "call_function" and name in _IN_PLACE and getattr(operator, name) is node.target
    if operates or (node.op == "call_method" and name.endswith("_") and not name.endswith("__")):
        return node.args[0] if isinstance(node.args[0], torch.fx.Node) else None
    return None


#: Operators that change their first argument.
_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split())


def references(event: Any) -> list[Reference]:
    """Return the tensors an event uses."""
    if isinstance(event, Write):
        return [event.source]
    if isinstance(event, Skip):
        return [source for _, source in event.sources]
    if isinstance(event, (Enter, Apply)):
        return list(event.operands)
    if isinstance(event, Leave):
        return list(event.results)
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


def numbers(event: Any) -> list[Number]:
    """Return the numbers of a program that an event uses."""
    found: list[Number] = []
    pending: list[Any] = []
    if isinstance(event, Declare):
        pending = [*event.shape, *(event.stride or ())]
    elif isinstance(event, Call):
        pending = [*event.args, *(value for _, value in event.kwargs)]
    while pending:
        item = pending.pop()
        if isinstance(item, Number):
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
