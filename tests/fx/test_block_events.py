"""Programs: data that compares by what it does, and splices that can be read."""

from __future__ import annotations

from typing import Any

import torch

from nnsight.fx.block_events import (
    BlockEvents,
    Call,
    Constant,
    Declare,
    External,
    Input,
    Nest,
    Step,
    ValueNumber,
    Visit,
    Write,
)
from nnsight.fx.capturing.graph import CapturedGraph
from nnsight.fx.capturing.taps import tapped
from nnsight.fx.lowering.backends import resolve_backend
from nnsight.fx.lowering.lowering import lower_prepared, prepare
from nnsight.fx.splicing.pieces import Piece
from nnsight.fx.splicing.splice import splice

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)


def captured(dynamic: bool | None = None, *inputs: torch.Tensor) -> tuple[CapturedGraph, list[Any]]:
    """Capture a function with two locations, without any envoy."""
    found: list[Any] = []

    def backend(graph_module: torch.fx.GraphModule, example: list[Any]) -> Any:
        found.append(CapturedGraph(graph_module, resolve_backend("eager")))
        return lambda *args: found.append(list(args)) or [args[-1]]

    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = tapped("a.output", torch.relu(x))
        return tapped("b.output", hidden * 3)

    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    for given in inputs or (X,):
        compiled(given)
    return found[0], found[1]


def steps(scale: float) -> tuple[Step, ...]:
    call = Call(torch.Tensor.mul, (ValueNumber(0), Constant(float, scale)), (), None)
    outcome = _outcome()
    return (
        Step(0, Visit(0, (0,)), None, ""),
        Step(0, call, outcome, '  File "mine.py", line 7, in block\n'),
        Step(0, Write(0, 0, ValueNumber(1)), None, ""),
    )


def _outcome() -> Any:
    from torch.utils import _pytree as pytree

    from nnsight.fx.block_events import Outcome

    fake = torch.empty(2, 3)
    return Outcome(pytree.tree_structure(fake), (1,), ((),), (fake,), (False,))


def test_references_constants_and_nests() -> None:
    assert len({ValueNumber(0), Input(0), External(0)}) == 3
    assert len({Constant(int, 1), Constant(float, 1.0), Constant(bool, True), Constant(int, 1)}) == 3
    assert Nest("list", (1, 2)).build([1, 2]) == [1, 2]
    assert Nest("tuple", (1, 2)).build([1, 2]) == (1, 2)
    assert Nest("slice", (1, 2, None)).build([1, 2, None]) == slice(1, 2)


def test_programs_compare_by_what_they_do() -> None:
    one, same, other = BlockEvents(steps(2.0)), BlockEvents(steps(2.0)), BlockEvents(steps(3.0))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    moved = BlockEvents(tuple(step._replace(stack_trace='  File "other.py", line 1, in block\n') for step in steps(2.0)))
    assert moved == one
    assert hash(moved) == hash(one)
    assert one != "program"


def test_programs_print() -> None:
    declare = Step(0, Declare((3,), (1,), torch.float32, torch.device("cpu"), False, torch.Tensor), None, "")
    text = str(BlockEvents((*steps(2.0), declare)))
    assert text.splitlines()[0] == "@0 visit"
    assert "@0 call mul(%0, 2.0)" in text
    assert "write leaf 0 = %1" in text
    assert "external torch.float32 [3] cpu" in text


def run(graph: CapturedGraph, program: BlockEvents, inputs: list[Any]) -> tuple[list[torch.Tensor], Any]:
    spliced = splice(graph, Piece.of(graph, 0), program, len(graph.nodes) - 1, [ValueNumber(0), *graph.outputs])
    symbols = [symbol for _, symbol in graph.symbols]
    lowered = lower_prepared(prepare(spliced.graph_module, inputs, symbols, graph.binding(tuple(inputs))), graph.backend)
    return list(lowered.function(*inputs)), spliced


def test_splicing_by_hand() -> None:
    graph, inputs = captured()
    (hidden, out), spliced = run(graph, BlockEvents(steps(2.0)), inputs)
    assert torch.equal(hidden, torch.relu(X))
    assert torch.equal(out, torch.relu(X) * 2 * 3)
    code = spliced.code()
    assert "# <-- mine.py:7" in code
    assert "tap" not in code
    compile(code, "spliced", "exec")


def test_splicing_leaves_the_captured_graph_alone() -> None:
    graph, inputs = captured()
    before = str(graph.graph_module.graph)
    spliced = splice(graph, Piece.of(graph, 0), BlockEvents(()), len(graph.nodes) - 1, list(graph.outputs))
    assert torch.equal(spliced.graph_module(*inputs)[0], torch.relu(X) * 3)
    assert not spliced.marks
    for factor in (2.0, 5.0):
        (_, out), _ = run(graph, BlockEvents(steps(factor)), inputs)
        assert torch.equal(out, torch.relu(X) * factor * 3)
    assert str(graph.graph_module.graph) == before


def test_a_piece_takes_what_it_needs() -> None:
    graph, inputs = captured()
    stop = graph.order[graph.taps[0].node]
    behind = Piece.of(graph, stop)
    assert len(behind.inputs) == 2
    first = splice(graph, Piece.of(graph, 0), BlockEvents(()), stop, list(behind.inputs[1:]))
    carried = first.graph_module(*inputs)
    rest = splice(graph, behind, BlockEvents(()), len(graph.nodes) - 1, list(graph.outputs))
    assert rest.inputs == (1,)
    assert torch.equal(rest.graph_module(*carried)[0], torch.relu(X) * 3)


def test_symbolic_sizes_bind_to_numbers() -> None:
    graph, inputs = captured(True)
    assert len(graph.symbols) >= 1
    binding = graph.binding(tuple(inputs))
    assert set(binding) <= {2, 3}
    fake = graph.fake(graph.taps[0].leaves[0], binding)
    assert tuple(fake.shape) == (2, 3)
    assert all(type(size) is int for size in fake.shape)
    (hidden, out), _ = run(graph, BlockEvents(steps(2.0)), inputs)
    assert torch.equal(hidden, torch.relu(X))
    assert torch.equal(out, torch.relu(X) * 6)
