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
from collections.abc import Sequence
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
from .indexing import select_numbers
from .nodes import LIKE_FUNCTIONS, appended_to, edited_by, emit, is_made_of_sizes, numbers, references
from .passes import run_passes
from .pieces import Piece, Result, SplicedGraph
from .subgraphs import Function


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
            edited, former = edited_by(node), appended_to(node)
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
        if is_made_of_sizes(node):
            for made_of in node.all_input_nodes:
                if made_of in self.skipped and made_of not in self.env:
                    self._begin_with(made_of)
            self.env[node] = self.new.node_copy(node, self._captured)
            return
        if node.op != "call_function" or kind_of(node) is not Kind.NEW:
            return
        make = LIKE_FUNCTIONS.get(getattr(node.target, "__name__", ""))
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
        node = emit(self.writing, call.function, args, kwargs)
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


