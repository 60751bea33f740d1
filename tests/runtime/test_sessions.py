"""Sessions: traces in one block, which share its variables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnsight
from nnsight import NNsight, fx

from ..conftest import Hooks, assert_no_instrumentation, both, same


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    return NNsight(net, compile={"backend": "eager"})


@both
def test_a_trace_uses_what_an_earlier_one_did_not_save(
    model: NNsight, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    hooked = Hooks(model._module)
    hooked.output("0", hooked.keep("hidden"))
    hooked(a)
    expected = Hooks(model._module).output("0", lambda _: hooked.seen["hidden"] * 2.0)(b)

    def run() -> tuple[Any, set[str]]:
        with model.session():
            with model.trace(a, compile=compile):
                hidden = model[0].output
            with model.trace(b, compile=compile):
                model[0].output = hidden * 2.0
                out = model.output.save()
        return out, set(locals())

    for _ in range(2):
        fx.counters.reset()
        out, names = run()
        same(out, expected)
        assert "hidden" not in names, "only what is saved comes back"
    assert fx.counters.recordings == fx.counters.compiles == 0


@both
def test_saved_values_of_every_trace_come_back(model: NNsight, a: torch.Tensor, b: torch.Tensor, compile: bool) -> None:
    with model.session() as session:
        with model.trace(a, compile=compile) as first:
            one = model.output.save()
        number = nnsight.save(one.shape[0])
        with model.trace(b, compile=compile) as second:
            two = model[0].output.save()
        total = (one + two).save()
    same((one, two, number), (model._module(a), model._module[0](b), 2))
    same(total, model._module(a) + model._module[0](b))
    assert session is not None
    assert isinstance(one, torch.Tensor) and type(total) is torch.Tensor


@both
def test_traces_in_loops_and_under_conditions(model: NNsight, compile: bool) -> None:
    inputs = [torch.full((1, 4), float(sign)) for sign in (1, -1, 1)]
    with model.session():
        outs = [].save()
        for x in inputs:
            with model.trace(x, compile=compile):
                hidden = model[0].output
                outs.append(model.output)
            if x.sum() < 0:
                with model.trace(x, compile=compile):
                    model[0].output = hidden * 0.0
                    outs.append(model.output)
    zero = model._module[2](torch.zeros(1, 4))
    plain = [model._module(x) for x in inputs]
    same(outs, [plain[0], plain[1], zero, plain[2]])


@both
def test_a_session_over_two_models(a: torch.Tensor, compile: bool) -> None:
    torch.manual_seed(0)
    one = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4)), compile={"backend": "eager"})
    other = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), compile={"backend": "eager"})
    with one.session():
        with one.trace(a, compile=compile):
            hidden = one[0].output
        with other.trace(a, compile=compile):
            other[0].output = hidden
            out = other.output.save()
    same(out, torch.tanh(one._module(a)))


@both
def test_an_edit_inside_a_session_binds_its_name(model: NNsight, a: torch.Tensor, compile: bool) -> None:
    with model.session():
        with model.trace(a, compile=compile):
            hidden = model[0].output
        with model.edit() as edited:
            model[0].output = hidden * 2.0
        with edited.trace(a, compile=compile):
            out = edited.output.save()
    net = model._module
    same(out, net[1:](net[0](a) * 2.0))


@both
def test_an_error_ends_the_session_at_its_line(model: NNsight, a: torch.Tensor, compile: bool) -> None:
    ran: list[str] = []
    with pytest.raises(KeyError, match="mistake") as caught:
        with model.session():
            with model.trace(a, compile=compile):
                kept = model.output.save()
            with model.trace(a, compile=compile):
                model[0].output  # noqa: B018
                raise KeyError("mistake")
            ran.append("never")
    assert "raise KeyError" in str(caught.traceback[-1].statement)
    assert not ran
    same(kept, model._module(a))
    assert_no_instrumentation(model._module)


