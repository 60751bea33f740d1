"""Programs: data that compares by what it does, and splices that can be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight.fx.capturing.graph import CapturedGraph
from nnsight.fx.capturing.taps import tapped
from nnsight.fx.lowering.backends import resolve_backend
from nnsight.fx.lowering.lowering import lower
from nnsight.fx.program import Call, Constant, Declare, External, Input, Nest, Program, State, Step, Value, Visit, Write
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
    call = Call(torch.Tensor.mul, (Value(0), Constant(float, scale)), (), None)
    outcome = _outcome()
    return (
        Step(0, Visit(0, (0,)), None, ""),
        Step(0, call, outcome, '  File "mine.py", line 7, in block\n'),
        Step(0, Write(0, 0, Value(1)), None, ""),
    )


def _outcome() -> Any:
    from torch.utils import _pytree as pytree

    from nnsight.fx.program import Outcome

    fake = torch.empty(2, 3)
    return Outcome(pytree.tree_structure(fake), (1,), ((),), (fake,), (False,))


def test_the_three_references_are_different() -> None:
    assert len({Value(0), Input(0), External(0)}) == 3


def test_constants_differ_by_type() -> None:
    assert Constant(int, 1) != Constant(float, 1.0)
    assert Constant(int, 1) != Constant(bool, True)
    assert Constant(int, 1) == Constant(int, 1)


def test_nests_build_containers() -> None:
    assert Nest("list", (1, 2)).build([1, 2]) == [1, 2]
    assert Nest("tuple", (1, 2)).build([1, 2]) == (1, 2)
    assert Nest("slice", (1, 2, None)).build([1, 2, None]) == slice(1, 2)


def test_programs_compare_by_what_they_do() -> None:
    one, same, other = Program(steps(2.0)), Program(steps(2.0)), Program(steps(3.0))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    moved = Program(tuple(step._replace(stack_trace='  File "other.py", line 1, in block\n') for step in steps(2.0)))
    assert moved == one
    assert hash(moved) == hash(one)
    assert one != "program"


def test_programs_print() -> None:
    declare = Step(0, Declare((3,), (1,), torch.float32, torch.device("cpu"), False, torch.Tensor), None, "")
    text = str(Program((*steps(2.0), declare)))
    assert text.splitlines()[0] == "@0 visit"
    assert "@0 call mul(%0, 2.0)" in text
    assert "write leaf 0 = %1" in text
    assert "external torch.float32 [3] cpu" in text


def test_states_remember_the_way() -> None:
    start = State()
    visit = Visit(0, (0,))
    first = start.edges.setdefault(visit, State(start, visit, 0))
    second = first.edges.setdefault(Write(0, 0, External(0)), State(first, Write(0, 0, External(0)), 0))
    assert start.program() == Program(())
    assert [type(step.event) for step in second.program().steps] == [Visit, Write]


def test_a_captured_graph_knows_its_taps() -> None:
    graph, _ = captured()
    assert [tap.location for tap in graph.taps] == ["a.output", "b.output"]
    assert [tap.index for tap in graph.taps] == [0, 1]
    assert graph.taps[0].is_tensor(graph.taps[0].leaves[0])
    assert len(graph.placeholders) == 1


def run(graph: CapturedGraph, program: Program, inputs: list[Any]) -> tuple[list[torch.Tensor], Any]:
    spliced = splice(graph, Piece.of(graph, 0), program, len(graph.nodes) - 1, [Value(0), *graph.outputs])
    symbols = [symbol for _, symbol in graph.symbols]
    lowered = lower(spliced.graph_module, inputs, symbols, graph.binding(tuple(inputs)), graph.backend)
    return list(lowered.function(*inputs)), spliced


def test_splicing_by_hand() -> None:
    graph, inputs = captured()
    (hidden, out), spliced = run(graph, Program(steps(2.0)), inputs)
    assert torch.equal(hidden, torch.relu(X))
    assert torch.equal(out, torch.relu(X) * 2 * 3)
    code = spliced.code()
    assert "# <-- mine.py:7" in code
    assert "tap" not in code
    compile(code, "spliced", "exec")


def test_splicing_nothing_gives_the_plain_graph() -> None:
    graph, inputs = captured()
    spliced = splice(graph, Piece.of(graph, 0), Program(()), len(graph.nodes) - 1, list(graph.outputs))
    assert [node.target for node in spliced.graph_module.graph.nodes if node.op == "call_function"] != []
    assert torch.equal(spliced.graph_module(*inputs)[0], torch.relu(X) * 3)
    assert not spliced.marks


def test_splicing_leaves_the_captured_graph_alone() -> None:
    graph, inputs = captured()
    before = str(graph.graph_module.graph)
    run(graph, Program(steps(2.0)), inputs)
    assert str(graph.graph_module.graph) == before
    (_, out), _ = run(graph, Program(steps(5.0)), inputs)
    assert torch.equal(out, torch.relu(X) * 5 * 3)


def test_a_piece_takes_what_it_needs() -> None:
    graph, inputs = captured()
    stop = graph.order[graph.taps[0].node]
    behind = Piece.of(graph, stop)
    assert len(behind.inputs) == 2
    first = splice(graph, Piece.of(graph, 0), Program(()), stop, list(behind.inputs[1:]))
    carried = first.graph_module(*inputs)
    rest = splice(graph, behind, Program(()), len(graph.nodes) - 1, list(graph.outputs))
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
    (hidden, out), _ = run(graph, Program(steps(2.0)), inputs)
    assert torch.equal(hidden, torch.relu(X))
    assert torch.equal(out, torch.relu(X) * 6)


def test_equal_symbols_need_not_be_one_object() -> None:
    """Sympy makes a symbol anew once its cache has let the old one go, so that only comparison by value is sound."""
    from sympy.core.cache import clear_cache

    found: list[Any] = []

    class Node:
        """A symbolic size as dynamo keeps it, of a symbol made after sympy's cache was cleared."""

        def __init__(self, node: Any) -> None:
            self._node = node
            clear_cache()
            self.expr = node.expr.func(node.expr.name, **node.expr._assumptions_orig)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._node, name)

    def backend(graph_module: torch.fx.GraphModule, example: list[Any]) -> Any:
        sizes = [
            node
            for node in graph_module.graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("example_value"), torch.SymInt)
        ]
        first, last = (node.meta["example_value"].node for node in (sizes[0], sizes[-1]))
        again = Node(last)
        assert again.expr == first.expr and again.expr is not first.expr
        sizes[-1].meta["example_value"] = torch.SymInt(again)
        found.append(CapturedGraph(graph_module, resolve_backend("eager")))
        return lambda *args: found.append(args) or [args[-1]]

    def function(x: torch.Tensor, rows: int) -> torch.Tensor:
        torch._check(rows == x.shape[0])
        return tapped("a.output", torch.relu(x)) * rows

    torch.compile(function, backend=backend, dynamic=True)(torch.ones(5, 3), 5)
    graph, inputs = found
    positions = [position for position, _ in graph.symbols]
    assert len(positions) == len({inputs[position] for position in positions}) == len(set(graph.binding(inputs)))
    assert 5 in graph.binding(inputs)
    assert graph.fake(graph.taps[0].leaves[0], graph.binding(inputs)).shape == (5, 3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backends_by_name_and_by_callable(backend: str) -> None:
    graph_module = torch.fx.symbolic_trace(lambda x: (torch.relu(x) * 2,))
    for chosen in (backend, lambda graph, inputs: graph.forward):
        lowered = lower(graph_module, [X], [], (), resolve_backend(chosen))
        assert torch.equal(lowered.function(X)[0], torch.relu(X) * 2)
        assert lowered.accepts(())
