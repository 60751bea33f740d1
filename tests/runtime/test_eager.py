"""The eager driver: it calls the model as plain PyTorch would."""

from __future__ import annotations

import torch

from nnsight import NNsight, fx


def test_it_captures_and_compiles_nothing() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    with model.trace(x) as tracer:
        out = model.output.save()
    assert torch.equal(out, model._module(x))
    assert tracer.report.mode == "eager"
    assert str(tracer.report) == "trace: eager"
    assert tracer.report.code == ""
    assert fx.counters == type(fx.counters)()


def test_python_side_effects_of_the_model_happen_once() -> None:
    calls: list[int] = []

    class Counts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x + 1

    model = NNsight(Counts())
    with model.trace(torch.ones(1)):
        out = model.output.save()
    assert calls == [1]
    assert out.item() == 2.0


def test_a_block_that_asks_for_nothing_still_runs_the_model() -> None:
    calls: list[int] = []

    class Counts(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x

    model = NNsight(Counts())
    with model.trace(torch.ones(1)):
        value = (1 + 1).save()
    assert (calls, value) == ([1], 2)


def test_a_replacement_of_another_shape_flows_through_if_the_model_takes_it() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()))
    with model.trace(torch.ones(1, 2)):
        model[0].output = torch.ones(3, 5)
        out = model.output.save()
    assert out.shape == (3, 5)
