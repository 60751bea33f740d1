"""The compiled driver: what is compiled when, what is reused, and what errors look like."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nnsight import NNsight, UncompiledWarning, fx
from nnsight.fx.capturing.dynamo import kept_guards

from ..conftest import Hooks, assert_no_instrumentation, same

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.second = torch.nn.Linear(6, 6)
        self.third = torch.nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def make(**options: Any) -> NNsight:
    torch.manual_seed(0)
    return NNsight(Net(), compile={"backend": "eager", **options})


@pytest.fixture
def model() -> NNsight:
    return make()


# -- unedited models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_unedited_model_is_bit_identical_to_the_compiled_one(backend: str) -> None:
    module = Net()
    wrapped = NNsight(module, compile={"backend": backend})
    with torch.no_grad():
        expected = torch.compile(module, backend=backend)(X)
        assert torch.equal(wrapped(X), expected)
        with wrapped.trace(X) as tracer:
            result = tracer.result.save()
        assert torch.equal(result, expected)
    assert_no_instrumentation(module)


def test_a_compiled_module_is_recognised() -> None:
    module = Net()
    model = NNsight(torch.compile(module, backend="eager", fullgraph=True, dynamic=False))
    assert model._module is module
    assert model._compiled is not None and model._compiled.fullgraph
    assert model._compiled.options["dynamic"] is False
    with model.trace(X) as tracer:
        value = model.first.output.save()
    assert tracer.report.mode == "compiled"
    assert torch.equal(value, module.first(X))


def test_compile_may_be_chosen_for_each_trace() -> None:
    module = Net()
    plain = NNsight(module)
    module.compile(backend="eager")
    compiled, later = NNsight(module), NNsight(Net())
    later.compile(backend="eager")
    for wrapped, argument, mode in (
        (compiled, None, "compiled"),
        (compiled, True, "compiled"),
        (compiled, False, "eager"),
        (plain, None, "eager"),
        (plain, False, "eager"),
        (later, None, "compiled"),
    ):
        with wrapped.trace(X, compile=argument) as tracer:
            wrapped.first.output[:] = 0
            out = wrapped.output.save()
        assert tracer.report.mode == mode
        net = wrapped._module
        assert torch.equal(out, net.third(torch.relu(net.second(torch.zeros(2, 6)))))


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match=r"unknown options \['backnd'\]"):
        NNsight(Net(), compile={"backnd": "eager"})
    with pytest.raises(TypeError, match="`regions` must be True or False, not 'yes'"):
        NNsight(Net(), compile={"regions": "yes"})
    with pytest.raises(Exception, match="nonsense"):
        with NNsight(Net(), compile={"backend": "nonsense"}).trace(X):
            pass


# -- counts -----------------------------------------------------------------------------------------------------------


def test_the_same_block_is_neither_recorded_nor_compiled_again(model: NNsight) -> None:
    def run(scale: float, vector: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with model.trace(x) as tracer:
            hidden = model.second.output
            hidden[:, -2:] += scale * vector
            out = model.output.save()
        return out, tracer.report

    _, first = run(1.0, torch.ones(2), X)
    assert (first.recordings, first.compiles) == (1, 1)
    fx.counters.reset()
    for scale in (2.0, 3.0):
        vector = torch.randn(2)
        out, report = run(scale, vector, X * scale)
        expected = Hooks(model._module).output("second", lambda h: _steer(h, scale * vector))(X * scale)  # noqa: B023
        assert torch.equal(out, expected)
        assert (report.recordings, report.compiles) == (0, 0)
    assert fx.counters.recordings == fx.counters.compiles == fx.counters.splices == fx.counters.captures == 0


def _steer(hidden: torch.Tensor, vector: torch.Tensor) -> None:
    hidden[:, -2:] += vector


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_shape_error_is_raised_at_the_users_line(model: NNsight) -> None:
    with model.trace(X):
        model.output  # noqa: B018
    before = model._module.calls.item()
    with pytest.raises(RuntimeError, match="99") as raised:
        with model.trace(X):
            hidden = model.second.output
            hidden + torch.ones(99)  # the line
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, "hidden + torch.ones(99)  # the line")
    assert model._module.calls.item() == before + 1, "the model ran up to the mistake, as it does eagerly"
    assert_no_instrumentation(model._module)
    with model.trace(X):
        out = model.output.save()
    assert torch.equal(out, model._module(X))


def test_a_replacement_of_another_shape(model: NNsight) -> None:
    for replacement in (torch.ones(2, 7), torch.ones(3, 6), torch.ones(6), torch.ones(1, 6)):
        with pytest.raises(ValueError, match=r"`model\.second\.output` has shape .*the model has \(2, 6\)"):
            with model.trace(X):
                model.second.output = replacement
    with pytest.raises(TypeError, match="int where the model has a tensor"):
        with model.trace(X):
            model.second.output = 5


def test_an_error_in_the_model_is_its_own(model: NNsight) -> None:
    for compile in (False, True):
        with pytest.raises(Exception, match="mat1 and mat2|size mismatch|reduction dim|shapes cannot be multiplied"):
            with model.trace(torch.ones(2, 99), compile=compile):
                model.output.save()
    assert_no_instrumentation(model._module)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_after_a_trace(backend: str) -> None:
    model, vector = make(backend=backend), torch.linspace(0, 1, 6, requires_grad=True)
    with model.trace(X):
        hidden = model.first.output
        hidden[:, 1:] *= 2.0
        model.second.output = model.second.output + vector * hidden.mean()
        kept = model.second.output.save()
        out = model.output.save()
    (out.pow(2).sum() + kept.sum()).backward()
    module, given = make()._module, torch.linspace(0, 1, 6, requires_grad=True)
    hidden = module.first(X) * torch.tensor([1.0, 2, 2, 2, 2, 2])
    second = module.second(torch.relu(hidden)) + given * hidden.mean()
    (module.third(torch.relu(second)).pow(2).sum() + second.sum()).backward()
    assert bool((given.grad != 0).any())
    torch.testing.assert_close(vector.grad, given.grad)
    for found, parameter in zip(model._module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad)


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_report_and_its_code(model: NNsight) -> None:
    with model.trace(X) as tracer:
        hidden = model.second.output
        hidden[:, 0] += 5.0
        model.third.input = torch.tanh(model.third.input)
        out = model.third.output.save()
    report = tracer.report
    assert (report.mode, report.graphs, report.recordings, report.compiles) == ("compiled", 1, 1, 1)
    assert report.spliced == ["model.second.output", "model.third.input", "model.third.output"]
    assert report.breaks == []
    text = str(report)
    assert text.startswith("trace: compiled, 1 graph, 0 breaks, 1 recorded, 1 compiled")
    assert "model.second.output" in text
    source = Path(__file__).read_text().splitlines()
    marked = [line for line in report.code.splitlines() if "# <-- test_driver.py:" in line]
    lines = {source[int(line.rsplit(":", 1)[1]) - 1].strip() for line in marked}
    assert lines == {"hidden[:, 0] += 5.0", "model.third.input = torch.tanh(model.third.input)"}
    assert any("torch.tanh" in line for line in marked)
    assert "tap" not in report.code
    compile(report.code, "report", "exec")


def test_two_models_of_one_class_do_not_mix() -> None:
    one, other = make(), NNsight(Net(), compile={"backend": "eager"})
    for _ in range(2):
        for model in (one, other):
            with model.trace(X):
                model.first.output[:] *= 2
                out = model.output.save()
            module = model._module
            expected = module.third(torch.relu(module.second(torch.relu(module.first(X) * 2))))
            assert torch.equal(out, expected)


def test_a_backend_that_fails_changes_no_result() -> None:
    def broken(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise RuntimeError("no kernel for this\nand more")

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model = NNsight(net, compile={"backend": broken})
    x = torch.ones(2, 4)
    with pytest.warns(UncompiledWarning, match="the graph up to the end ran .*RuntimeError: no kernel for this") as said:
        for _ in range(3):
            with model.trace(x) as tracer:
                model[0].output[:] += 1.0
                out = model.output.save()
            assert torch.equal(out, torch.relu(net[0](x) + 1.0))
            assert len(tracer.report.notes) == 1
    assert {(warning.filename, warning.lineno) for warning in said} == {(__file__, int(tracer.report.where.rpartition(":")[2]))}
    assert tracer.report.replayed
    other = NNsight(net, compile={"backend": broken})
    with pytest.warns(UncompiledWarning, match="In this compiled call the graph up to the end ran") as said:
        for _ in range(2):
            assert torch.equal(other(x), net(x))
    assert [warning.filename for warning in said] == [__file__]


class UndroppedDropout(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


@pytest.mark.parametrize(
    "dropout",
    [
        torch.nn.Dropout(0.5).eval(),
        torch.nn.Dropout(0.0),
        UndroppedDropout(lambda x: torch.dropout(x, 0.5, False)),
        UndroppedDropout(lambda x: torch.dropout(x, p=0.0, train=True)),
    ],
)
def test_an_edit_behind_a_dropout_reaches_what_the_dropout_was_given(dropout: torch.nn.Module) -> None:
    """A dropout that drops nothing returns its input itself, so the edit is in both, compiled too."""

    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = dropout

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = x * 2
            return hidden + self.dropout(hidden)

    net = Residual()
    x = torch.ones(2, 4)
    for backend in ("eager", "aot_eager"):
        model = NNsight(net, compile={"backend": backend})
        with model.trace(x) as tracer:
            model.dropout.output[0] += 1.0
            out = model.output.save()
        assert tracer.report.mode == "compiled"
        assert torch.equal(out, torch.tensor([[6.0] * 4, [4.0] * 4])), backend


@pytest.mark.parametrize("values", [[0.0, 1.0, 2.0, 3.0], [2.0], [float("nan")]], ids=["several", "one", "nan"])
def test_a_model_that_takes_a_numpy_array_is_captured(values: list[float]) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: Any) -> torch.Tensor:
            return self.first(x) * torch.from_numpy(scale)

    net = Scaled()
    model = NNsight(net, compile={"backend": "eager"})
    for factor in (1.0, 2.0):
        scale = factor * np.array(values, dtype=np.float32)
        with model.trace(X, scale) as tracer:
            model.first.output[:] += 1.0
            out = model.output.save()
        assert tracer.report.mode == "compiled"
        assert torch.allclose(out, (net.first(X) + 1.0) * torch.from_numpy(scale), equal_nan=True)
    assert not tracer.report.captures


def test_guards_of_dynamo_are_those_of_the_model_only() -> None:
    offered: list[Any] = []

    def keep_all(guards: Any) -> list[bool]:
        offered.extend(guards)
        return [True] * len(guards)

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model = NNsight(net, compile={"backend": "eager", "options": {"guard_filter_fn": keep_all}})
    x = torch.ones(2, 3)
    with model.trace(x):
        out = model[0].output.save()
    same(out, net[0](x))
    assert offered
    left = [guard.name for guard, kept in zip(offered, kept_guards(None, offered), strict=True) if kept]
    assert 0 < len(left) < len(offered)
    assert not [name for name in left if "nnsight" in name or "_call_impl.__" in name]

    # What the guards were about is noticed all the same: another path, another call in the way.
    torch.nn.Module.add_module(net, "2", torch.nn.Linear(3, 3))
    with model.trace(x):
        out = model[2].output.save()
    same(out, net(x))
