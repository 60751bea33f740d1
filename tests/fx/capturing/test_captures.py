"""Calls in which nobody waits do without interception where one captured graph is all that runs, and only there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight import NNsight, UncompiledWarning, fx
from nnsight.fx.capturing.dynamo import NotCompiled, caller_of_compiled
from nnsight.runtime.modules.interception import Instrumentation

from ...conftest import Hooks, same

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


@pytest.fixture
def interceptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that modules were intercepted."""
    entered: list[int] = []
    enter = Instrumentation.__enter__

    def counted(self: Instrumentation) -> Instrumentation:
        entered.append(1)
        return enter(self)

    monkeypatch.setattr(Instrumentation, "__enter__", counted)
    return entered


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()


def traced(model: Any, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    with model.trace(x):
        model[0].output *= factor
        out = model.output.save()
    return out


def by_hand(module: torch.nn.Module, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return Hooks(module).output("0", lambda value: value * factor)(x)


def test_known_calls_are_not_intercepted_and_others_are_captured_with_their_taps(interceptions: list[int]) -> None:
    module = net()
    model = NNsight(module, compile={"backend": "eager", "dynamic": False})
    before = fx.counters.replays
    for rows in (3, 5):
        x = torch.ones(rows, 4)
        same(model(x), module(x))
        assert interceptions
        for _ in range(2):
            same(traced(model, x), by_hand(module, x))
        interceptions.clear()
        for number in range(1, 3):
            same(model(x + number), module(x + number))
            same(traced(model, x + number), by_hand(module, x + number))
        assert interceptions == []
    assert fx.counters.replays >= before + 4
    assert fx.counters.captures == 2


def test_errors_and_changed_trees_are_captured_anew() -> None:
    module = net()
    model = NNsight(module, compile={"backend": "eager"})
    for _ in range(3):
        traced(model, X)
    with pytest.raises(RuntimeError) as failure:
        model(torch.ones(3, 5))
    contexts, error = [], failure.value.__context__
    while error is not None:
        contexts.append(type(error).__name__)
        error = error.__context__
    assert "NotCompiled" not in contexts, "the error is the only one"
    same(traced(model, X), by_hand(module, X))
    module[0] = torch.nn.Linear(4, 4, bias=False)
    for _ in range(2):
        same(traced(model, X), by_hand(module, X))
        same(model(X), module(X))


class Broken(torch.nn.Module):
    """Breaks the graph, and counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.count()
        return self.second(h)

    @torch.compiler.disable
    def count(self) -> None:
        self.calls += 1


def test_a_model_of_several_graphs_is_intercepted_each_time(interceptions: list[int]) -> None:
    module = Broken()
    model = NNsight(module, compile={"backend": "eager"})
    for number in range(1, 4):
        interceptions.clear()
        with model.trace(X):
            model.first.output[:] += 1
            out = model.output.save()
        assert module.calls == 2 * number - 1
        same(out, Hooks(module).output("first", lambda value: value + 1)(X))
        assert len(interceptions) == 1


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_a_stance_of_torch_holds(stance: str) -> None:
    module = net()
    model = NNsight(module, compile={"backend": "eager", "dynamic": False})
    for _ in range(3):
        same(traced(model, X), by_hand(module, X))
    x = torch.ones(7, 4)
    with torch.compiler.set_stance(stance):
        for _ in range(2):
            same(traced(model, X), by_hand(module, X))
            same(traced(model, x), by_hand(module, x))
            same(model(x), module(x))
    assert fx.counters.captures == 1
    same(traced(model, x), by_hand(module, x))
    assert fx.counters.captures == 2


class Watching(TorchDispatchMode):
    """Sees each operator, as modes that count operations do."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("around", "before", "reason"),
    [
        (Watching, 0, "dispatch mode `Watching`"),
        (Watching, 2, "dispatch mode `Watching`"),
        (lambda: torch._dynamo.config.patch(disable=True), 0, "config.disable"),
        (lambda: torch.compiler.set_stance("aot_eager_then_compile"), 0, "aot_eager_then_compile"),
        (lambda: torch.compiler.set_stance("aot_eager_then_compile"), 2, "aot_eager_then_compile"),
        (lambda: torch.compiler.set_stance("eager_then_compile"), 0, "eager_then_compile"),
        (lambda: torch.compiler.set_stance("default", force_backend="aot_eager"), 0, "force_backend"),
    ],
)
def test_what_torch_compiles_nothing_under_is_reported_and_later_calls_are_compiled(
    around: Callable[[], Any], before: int, reason: str
) -> None:
    module = net()
    model = NNsight(module, compile={"backend": "eager"})
    for _ in range(before):
        same(traced(model, X), by_hand(module, X))
    with around(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UncompiledWarning)
        with model.trace(X) as tracer:
            model[0].output *= 2
            out = model.output.save()
        same(model(X), module(X))
    same(out, by_hand(module, X))
    (found,) = tracer.report.breaks
    assert found.reason.startswith("the model runs uncompiled") and reason in found.reason
    same(traced(model, X), by_hand(module, X))
    assert fx.counters.captures == 1


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev])
def test_a_call_inside_a_transform_of_torch_runs_as_python_and_later_calls_are_compiled(transform: Any) -> None:
    module = net()
    model = NNsight(module, compile={"backend": "eager"})
    with pytest.warns(UncompiledWarning, match="inside a transform of `torch.func`"), model.trace(X, fn=transform(module)) as tracer:
        out = tracer.result.save()
    same(out, transform(module)(X))
    with model.trace(X) as tracer:
        model[0].output *= 2
        out = model.output.save()
    same(out, by_hand(module, X))
    assert tracer.report.graphs == fx.counters.captures == 1 and not tracer.report.breaks


def test_a_model_of_which_torch_captures_nothing_is_reported() -> None:
    class Sparse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("adjacency", torch.eye(2).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.adjacency, self.linear(x))

    module = Sparse()
    model = NNsight(module, compile={"backend": "eager"})
    x = torch.randn(2, 4)
    with pytest.warns(UncompiledWarning, match="runs uncompiled: .*sparse"), model.trace(x) as tracer:
        model.linear.output *= 2
        out = model.output.save()
    same(out, Hooks(module).output("linear", lambda value: value * 2)(x))
    assert [str(found.location) for found in tracer.report.breaks] == ["model"] and tracer.report.graphs == 0
    with model.trace(x) as tracer:  # the warning appears once, and the report says it each time
        out = model.output.save()
    assert "sparse" in tracer.report.breaks[0].reason


@pytest.mark.parametrize("setting", ["compiled_autograd", "caching_precompile"])
def test_settings_of_dynamo_that_change_how_functions_are_compiled(setting: str) -> None:
    module = net()
    with torch._dynamo.config.patch({setting: True}):
        model = NNsight(module, compile={"backend": "aot_eager"})
        for _ in range(2):
            same(traced(model, X), by_hand(module, X))
            with model.trace(X) as tracer:
                hidden = model[0].output
                with model.output.sum().backward():
                    grad = hidden.grad.save()
            assert tracer.report.graphs == 1
            expected = module[0](X)
            same(grad, torch.autograd.grad(module[1:](expected).sum(), expected)[0])


def test_a_compiled_function_inside_is_compiled_as_always() -> None:
    """A call that may not compile the model lets functions compile that run meanwhile."""
    compiled: list[int] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(1)
        return graph_module.forward

    inner = torch.compile(lambda x: x * 3, backend=backend)
    seen: list[torch.Tensor] = []
    name = "nnsight_tests::calls_compiled"

    @torch.library.custom_op(name, mutates_args=())
    def calls_compiled(x: torch.Tensor) -> torch.Tensor:
        if seen:
            return inner(x)
        return x * 3

    calls_compiled.register_fake(torch.empty_like)

    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return calls_compiled(x) + 1

    model = NNsight(Calls(), compile={"backend": "eager"})
    model(X)
    seen.append(X)
    same(model(X), X * 3 + 1)
    assert fx.counters.captures == 1


class Looks(torch.nn.Module):
    """Looks ids up inside of regions that change the state of the thread."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)
        self.kind = kind

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = self.last(self.table(ids))
            return found.float()
        return torch.vmap(lambda row: self.last(self.table(row)))(ids)


@pytest.mark.parametrize("kind", ["autocast", "vmap"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_known_call_that_fails_in_such_a_region_leaves_it(kind: str, fullgraph: bool) -> None:
    torch.manual_seed(0)
    module = Looks(kind).eval()
    model = NNsight(module, compile={"backend": "eager", "dynamic": False, "fullgraph": fullgraph})
    ids, beyond = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [2, 9]])

    def looked_up(ids: torch.Tensor) -> torch.Tensor:
        with model.trace(ids):
            out = model.output.save()
        return out

    for _ in range(3):
        same(looked_up(ids), module(ids))
        same(model(ids), module(ids))
    captures, replays = fx.counters.captures, fx.counters.replays
    for call in (looked_up, model):
        with pytest.raises(IndexError):
            call(beyond)
        assert not torch.is_autocast_enabled("cpu")
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
        same(torch.ones(2, 4) @ torch.ones(4, 2), torch.full((2, 2), 4.0))
    same(looked_up(ids), module(ids))
    assert (fx.counters.captures, fx.counters.replays) == (captures, replays + 1)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_is_called_compiled_or_not_at_all(fullgraph: bool) -> None:
    torch.compiler.reset()  # the other half of this test has the same code
    ran: list[int] = []

    def plain(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            ran.append(1)
        return x + 1

    compiled = torch.compile(plain, backend="eager", fullgraph=fullgraph)
    call = caller_of_compiled(compiled, plain.__code__)
    assert call is not None
    with pytest.raises(NotCompiled):
        call(X)
    compiled(X)
    same(call(X), X + 1)
    with pytest.raises(NotCompiled):
        call(X.double())
    assert not ran
    assert caller_of_compiled(plain, plain.__code__) is None, "no wrapper"
