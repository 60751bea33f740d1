"""Calls that fail leave captures as they were: later ones are captured graphs still, and a report says where one was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, UncompiledWarning, fx
from nnsight.fx import driver

from ...conftest import same


class Choosy(torch.nn.Module):
    """Takes tensors of one width, and no others; says so in its own words."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x: Any, loud: bool = False) -> torch.Tensor:
        if isinstance(x, dict):
            raise KeyError("no dicts")
        h = self.first(x)
        if loud:
            print("loud")
        return torch.tanh(self.second(h))


@pytest.fixture
def model() -> NNsight:
    return NNsight(Choosy(), compile={"backend": "eager"})


def trace(model: NNsight, x: Any, **kwargs: Any) -> Any:
    """Trace a call that has to agree with the module's hooks; return the report."""
    with model.trace(x, **kwargs) as tracer:
        hidden = model.second.input.save()
    same(hidden, model._module.first(x))
    return tracer.report


def gives_text(model: NNsight) -> None:
    trace(model, "text")


def gives_a_dict(model: NNsight) -> None:
    trace(model, {"x": torch.ones(2, 4)})


def gives_the_wrong_width(model: NNsight) -> None:
    trace(model, torch.ones(2, 3))


def calls_with_text(model: NNsight) -> None:
    model("text")


def gives_an_unknown_argument(model: NNsight) -> None:
    trace(model, torch.ones(2, 4), unknown=1)


def has_a_hook_that_raises(model: NNsight) -> None:
    def hook(*_: Any) -> None:
        raise KeyError("hook")

    handle = model._module.second.register_forward_hook(hook)
    try:
        trace(model, torch.ones(2, 4))
    finally:
        handle.remove()


def fails_in_another_model(model: NNsight) -> None:
    has_a_hook_that_raises(NNsight(Choosy(), compile={"backend": "eager"}))


def fails_in_a_block(model: NNsight) -> None:
    with model.trace(torch.ones(2, 4)):
        model.first.output @ torch.ones(3)


FAILURES = [
    gives_text,
    gives_a_dict,
    gives_the_wrong_width,
    calls_with_text,
    gives_an_unknown_argument,
    has_a_hook_that_raises,
    fails_in_another_model,
    fails_in_a_block,
]


@pytest.mark.parametrize("fail", FAILURES)
def test_a_call_that_fails_leaves_captures_alone(model: NNsight, fail: Callable[[NNsight], None]) -> None:
    """As the first call, and between calls that succeed."""
    x = torch.randn(2, 4)
    for number in range(3):
        with pytest.raises(Exception, match=r"."):
            fail(model)
        fx.counters.reset()
        report = trace(model, x)
        assert (report.graphs, report.breaks) == (1, [])
        if number and fail is not has_a_hook_that_raises:  # for that and without it the model is captured anew
            assert (fx.counters.captures, fx.counters.compiles) == (0, 0)


@pytest.mark.slow
def test_many_failures_do_not_use_up_the_limit_of_captures(model: NNsight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MANY_FORGOTTEN", 16)
    trace(model, torch.randn(2, 4))
    for size in range(3, 14):
        with pytest.raises(TypeError):
            gives_text(model)
        report = trace(model, torch.randn(size, 4))
        assert (report.graphs, report.breaks) == (1, [])
    assert fx.counters.captures <= 4  # plain and symbolic sizes, and both once more when the model is captured anew


def test_errors_of_blocks_cost_no_capture_of_a_model_that_breaks(
    model: NNsight, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(2, 4)
    trace(model, x, loud=True)
    trace(model, x, loud=True)
    fx.counters.reset()
    for _ in range(3):
        with pytest.raises(RuntimeError), model.trace(x, loud=True):
            model.second.input @ torch.ones(3)
        assert trace(model, x, loud=True).breaks
    assert fx.counters.captures == 0
    assert capsys.readouterr().out.count("loud") == 8


def test_what_runs_as_python_is_in_the_report(model: NNsight) -> None:
    model.compile(backend="eager", max_captures=1)
    trace(model, torch.ones(2, 4))
    with pytest.warns(UncompiledWarning):
        report = trace(model, torch.ones(2, 4).requires_grad_())
    (found,) = report.breaks
    assert found.location == "model"
    assert "the model runs uncompiled" in found.reason
    assert found.filename == __file__
