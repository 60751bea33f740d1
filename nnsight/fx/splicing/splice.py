"""Splicing: a program is written into a copy of a captured graph.

Captured nodes are copied in order. Each tap is replaced by the program's calls at that tap, and uses of a replaced tensor are redirected to
its replacement. In-place edits need no special treatment: they are calls on the value that the model uses, and lowering functionalizes
them like the model's own edits. Then :mod:`~nnsight.fx.splicing.passes` simplify the graph.

The inputs of the new graph are those of the captured graph, values from earlier pieces (if the graph was cut), the program's externals, and
its numbers. A float is passed as a scalar tensor, and the graph calls its ``item``, as in dynamo's graphs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch

from ..block_events import (
    BlockEvents,
    Call,
    Declare,
    External,
    Input,
    Number,
    Reference,
    Skip,
    Step,
    ValueNumber,
    Visit,
    Write,
    given,
)
from ..capturing.graph import CapturedGraph, SwitchedModes
from ..effects import edited
from .passes import run_passes
from .pieces import (
    Piece,
    Result,
    SplicedGraph,
    appended_to,
    emit,
    is_made_of_sizes,
    is_of_numbers,
    numbers,
    references,
    select_numbers,
)

#: Functions that create an initial state from another tensor, and the functions that create it from sizes.
_MADE_LIKE = {"zeros_like": torch.zeros, "ones_like": torch.ones, "empty_like": torch.zeros}


def splice(graph: CapturedGraph, piece: Piece, program: BlockEvents, stop: int, results: Sequence[Result]) -> SplicedGraph:
    """Return a new graph: the nodes ``piece.start`` to ``stop`` of ``graph`` with ``program`` in them. It returns ``results``."""
    return _Splicer(graph, piece, program, stop).run(results)


class _Splicer:
    """Builds one spliced graph; see :func:`splice`."""

    def __init__(self, graph: CapturedGraph, piece: Piece, program: BlockEvents, stop: int) -> None:
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
        self.passive = self.graph.tapped.keys() | self.graph.identities.keys()
        self.skip_to: torch.fx.Node | None = None
        self.skipped: dict[torch.fx.Node, torch.fx.Node] = {}  # skipped nodes, each with the tap at which its skip ends
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
            if node in self.graph.tap_number:
                self._at_tap(self.graph.tap_number[node])
            elif node.op not in ("placeholder", "output") and node not in self.passive:
                self.env[node] = self.new.node_copy(node, self._captured)
        stopped_at = self.graph.tap_number.get(last)
        if stopped_at is not None:  # the program has calls at the tap where the graph is cut
            self._at_tap(stopped_at)
            self._switched(last).leave(self.new, self.env, self.grad)
        returned = [
            self.values[result.index] if isinstance(result, ValueNumber) else self._captured(self._stored(result)) for result in results
        ]
        self.new.output(tuple(returned))
        self.new.lint()
        module = torch.fx.GraphModule(self.graph.graph_module, self.new, class_name="Spliced")
        module, passes = run_passes(module)
        return SplicedGraph(module, tuple(self.used_inputs), len(self.external_nodes), self.marks, passes)

    def _add_inputs(self, results: Sequence[Result]) -> None:
        needed = self._needed_inputs(results)
        for index, node in enumerate(self.piece.inputs):
            if index in needed:
                placeholder = self.new.placeholder(node.name)
                placeholder.meta = dict(node.meta)
                self.env[node] = placeholder
                self.used_inputs.append(index)
        for node, index in self.piece.input_index.items():  # several nodes may be one input
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
        """Return the positions of the inputs to take: all inputs of an uncut graph, or the used inputs after a cut."""
        index = self.piece.input_index
        if self.piece.start == 0:
            return set(range(len(self.piece.inputs)))
        used = {result for result in results if isinstance(result, torch.fx.Node)}
        for node in (*self.piece.repeated, *self.graph.nodes[self.piece.start : self.stop]):
            used.update(node.all_input_nodes)
        needed = {index[node] for node in used if node in index}
        for steps in self.steps.values():
            for step in steps:
                needed.update(reference.index for reference in references(step.event) if isinstance(reference, Input))
        return needed

    def _switched(self, node: torch.fx.Node) -> SwitchedModes:
        """Return the modes that the captured graph has switched before ``node``, a tap."""
        return self.graph.switched.get(node, SwitchedModes())

    def _captured(self, node: torch.fx.Node) -> Any:
        """Return the new node for a captured node."""
        while node not in self.env:
            if is_of_numbers(node):  # of an earlier piece, or of a skipped module
                self.env[node] = self.new.node_copy(node, self._captured)
                break
            source = self.graph.identities.get(node) or edited(node)  # a skipped module edits no buffer
            if source is not None:
                node = source
                continue
            if node not in self.graph.tapped:
                raise ValueError(
                    f"{self._skipped_module(node)} cannot be skipped in this compiled trace: the model uses a value from inside it "
                    f"({node.name}) that is not its output, such as a state for the next step. Use `trace(..., compile=False)`, or "
                    "`use_cache=False` if the value is stored in a cache."
                )
            tap, leaf = self.graph.tapped[node]
            node = self.graph.taps[tap].leaves[leaf]
        return self.env[node]

    def _skipped_module(self, node: torch.fx.Node) -> str:
        """Return the name of the skipped module that computes ``node``, for a message."""
        number = self.graph.tap_number.get(self.skipped.get(node, node))
        return "A module" if number is None else f"`{self.graph.taps[number].location.removesuffix('.output')}`"

    def _stored(self, node: torch.fx.Node) -> torch.fx.Node:
        """Return the captured node to use for ``node``, a value that the model stores or returns, such as the keys of a cache.

        A skipped module stores nothing, so the former value stays: the keys to which the module would have appended its own. If nothing was
        stored yet, it is the initial value that the module would have created.
        """
        while node in self.skipped and node not in self.env:
            if not all(user.op == "output" or user in self.skipped for user in node.users):
                return node  # the rest of the model computes with this value
            former = edited(node) or appended_to(node)
            if former is None:
                self._add_initial(node)
                return node
            node = former
        return node

    def _add_initial(self, node: torch.fx.Node) -> None:
        """Compute ``node`` if a skipped module creates it from sizes alone, such as the zeros of an initial state."""
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor):
            return
        if is_made_of_sizes(node):
            for made_of in node.all_input_nodes:
                if made_of in self.skipped and made_of not in self.env:
                    self._add_initial(made_of)
            self.env[node] = self.new.node_copy(node, self._captured)
            return
        make = _MADE_LIKE.get(getattr(node.target, "__name__", ""))
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
            elif isinstance(event, Skip):
                until = self.graph.taps[event.until]
                self.skip_to = until.node
                self.env.update({until.leaves[leaf]: self._referred(source) for leaf, source in event.sources})
            elif isinstance(event, Write):
                for node in tap.outputs.get(event.leaf, ()):
                    self.env[node] = self._referred(event.source)

    def _referred(self, reference: Reference | Number) -> Any:
        if isinstance(reference, Number):
            return self.numbers[reference]
        if isinstance(reference, ValueNumber):
            return self.values[reference.index]
        if isinstance(reference, External):
            return self.external_nodes[reference.index]
        return self.env[self.piece.inputs[reference.index]]

    def _grad_around(self, step: Step) -> bool:
        """Return the grad mode of the model where ``step`` happens."""
        switched = self._switched(self.graph.taps[step.position].node).grad
        return self.grad if switched is None else switched

    def _add_call(self, call: Call, step: Step) -> None:
        args, kwargs = call.arguments(self._referred)
        around = self._grad_around(step)
        grad = self.grad if call.grad is None else call.grad
        if grad != around:
            self._mark(self.new.call_function(torch._C._set_grad_enabled, (grad,)), step)
        if getattr(call.function, "__name__", "") in ("__getitem__", "__setitem__"):
            selected, rest = select_numbers(call.args[1], self._fake)
            for dimension, number in selected:
                view = self.new.call_method("select", (args[0], dimension, self.numbers[number]))
                self._mark(view, step)
                args = (view, Ellipsis if rest is None else given(rest, self._referred), *args[2:])
        node = emit(self.new, call.function, args, kwargs)
        self._mark(node, step)
        if grad != around:
            self._mark(self.new.call_function(torch._C._set_grad_enabled, (around,)), step)
        assert step.outcome is not None
        self.fakes += step.outcome.fakes
        paths = step.outcome.paths
        for leaf, path in zip(step.outcome.leaves, paths, strict=True):
            if isinstance(leaf, int) and leaf == len(self.values):
                value: Any = node
                for key in path:
                    value = self.new.call_function(getattr if isinstance(key, str) else operator.getitem, (value, key))
                    self._mark(value, step)
                self.values.append(value)

    def _fake(self, reference: Reference) -> Any:
        """Return a tensor with the dtype and the number of dimensions of ``reference``."""
        if isinstance(reference, ValueNumber):
            return self.fakes[reference.index]
        if isinstance(reference, External):
            declared = self.declared[reference.index]
            return torch.empty([1] * len(declared.shape), dtype=declared.dtype, device="meta")
        return self.piece.inputs[reference.index].meta["example_value"]

    def _mark(self, node: torch.fx.Node, step: Step) -> None:
        node.stack_trace = step.stack_trace
        found = re.search(r'File "([^"]*)", line (\d+)', step.stack_trace)
        self.marks[node.name] = f"{found.group(1).rsplit('/', 1)[-1]}:{found.group(2)}" if found else "block"


