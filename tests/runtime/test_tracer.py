"""The tracer of a run: early stop, the result, and what it keeps afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.envoy.envoy import Envoy
from nnsight.runtime import OutOfOrderError

from ..conftest import Hooks, agree, assert_no_instrumentation, both, same


class Counted(torch.nn.Module):
    """Two layers; the second one is counted in Python when it runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"out": self.second(torch.tanh(self.first(x))) * scale}


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Counted(), compile={"backend": "eager"})


# -- stop -------------------------------------------------------------------------------------------------------------


def test_stop_keeps_what_was_saved(model: NNsight, x: torch.Tensor) -> None:
    after: list[str] = []

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(x, compile=compile) as tracer:
            hidden = model.first.output.save()
            doubled = (hidden * 2.0).save()
            tracer.stop()
            after.append("never")
            out = model.output.save()
        assert "out" not in locals()
        return (hidden, doubled), tracer

    hidden = model._module.first(x)
    for compile in (False, True, True):
        found, _ = run(compile)
        same(found, (hidden, hidden * 2.0))
        assert type(found[0]) is torch.Tensor
    assert not after
    assert_no_instrumentation(model._module)


@both
def test_stop_before_the_model_starts(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    calls: list[int] = []
    handle = model._module.register_forward_hook(lambda *_: calls.append(1))
    with model.trace(x, compile=compile) as tracer:
        kept = [1].save()
        tracer.stop()
        kept.append(2)
    handle.remove()
    assert kept == [1] and not calls


@both
def test_a_stop_on_a_condition(model: NNsight, compile: bool) -> None:
    for sign in (1.0, -1.0):
        x = torch.full((2, 3), sign)
        reached: list[str] = []
        with model.trace(x, compile=compile) as tracer:
            if model.input.sum() > 0:
                tracer.stop()
            reached.append("on")
            model.output["out"].save()
        assert reached == ([] if sign > 0 else ["on"])


@both
def test_a_stop_is_no_error_that_code_could_catch_by_accident(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    finished: list[str] = []
    with model.trace(x, compile=compile) as tracer:
        try:
            model.first.output.save()
            tracer.stop()
        finally:
            finished.append("clean-up ran")
    assert finished == ["clean-up ran"]
    with model.trace(x, compile=compile):
        out = model.output.save()
    same(out, model._module(x))


# -- result -----------------------------------------------------------------------------------------------------------


def test_the_result_is_what_the_call_returned(model: NNsight, x: torch.Tensor) -> None:
    expected = Hooks(model._module).output("first", lambda h: h * 0.5)(x)

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(x, compile=compile) as tracer:
            model.first.output = model.first.output * 0.5
            result = tracer.result.save()
            out = result["out"].save()
        return (result, out), tracer

    agree(run, (expected, expected["out"]))


@both
def test_the_result_may_be_called(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with model.trace(x, compile=compile) as tracer:
        result = tracer.result().save()
    same(result, model._module(x))


@both
def test_the_result_in_invokes(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(x):
            model.first.output[:] = 0.0
        with tracer.invoke():
            result = tracer.result.save()
    same(result, Hooks(model._module).output("first", torch.zeros_like)(x))


@both
def test_nothing_comes_after_the_result(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with pytest.raises(OutOfOrderError, match=r"The block last stopped at `result\.i0`"):
        with model.trace(x, compile=compile) as tracer:
            tracer.result.save()
            model.first.output.save()
    with pytest.raises(ValueError, match="outside of interleaving"):
        tracer.result  # noqa: B018


# -- arguments of the call ----------------------------------------------------------------------------------------------


@both
def test_arguments_by_name_reach_the_model(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with model.trace(x=x, scale=3.0, compile=compile):
        one = model.output["out"].save()
    with model.trace(scale=3.0, compile=compile) as tracer:
        with tracer.invoke(x):
            two = model.output["out"].save()
    expected = model._module(x, 3.0)["out"]
    same((one, two), (expected, expected))


@both
def test_a_trace_asks_the_model_for_nothing_it_lacks(
    model: NNsight, x: torch.Tensor, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the error, names like the missing one are looked for, and that takes longer than all the rest of a trace."""
    missed: list[str] = []
    look_up = Envoy.__getattr__

    def noted(envoy: Envoy, name: str) -> Any:
        try:
            return look_up(envoy, name)
        except AttributeError:
            missed.extend([name] * (not name.startswith("__")))  # Python itself asks for those
            raise

    monkeypatch.setattr(Envoy, "__getattr__", noted)
    for _ in range(2):
        with model.trace(x, compile=compile):
            model.output.save()
    assert missed == []
    assert not hasattr(model, "misspelt") and missed == ["misspelt"]
