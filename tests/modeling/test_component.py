"""A module of a model traced by itself, compared with the module called by plain torch."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from nnsight import LanguageModel, NNsight, fx
from nnsight.modeling.mixins import MetaMixin
from nnsight.runtime.errors import OutOfOrderError

from ..conftest import Hooks, both, same
from ..contract.guide import new_language_model


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))) * scale


class Whole(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Part()
        self.two = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4)


def make(compile: bool) -> NNsight:
    torch.manual_seed(0)
    return NNsight(Whole(), compile={"backend": "eager"} if compile else False)


@both
def test_only_the_module_runs_and_its_locations_keep_their_paths(x: torch.Tensor, compile: bool) -> None:
    model = make(compile)
    part = model._module.two
    hooks = Hooks(part)
    hooks.output("first", lambda out: out * 2.0)
    hooks.output("last", hooks.keep("last"))
    expected = hooks(x, scale=3.0)
    for known in (False, True, True):
        fx.counters.reset()
        with model.two.trace(x, scale=3.0) as tracer:
            model.two.first.output *= 2.0
            last = model.two.last.output.save()
            out = model.two.output.save()
            result = tracer.result.save()
        same((last, out, result), (hooks.seen["last"], expected, expected))
        assert tracer.report.mode == ("compiled" if compile else "eager")
        assert tracer.report.graphs == int(compile)
        if compile:
            assert "model.two.last.output" in tracer.report.spliced
            assert fx.counters.captures == (0 if known else 1)
    same(model(x), model._module(x))


@both
def test_a_module_outside_of_it_never_occurs(x: torch.Tensor, compile: bool) -> None:
    model = make(compile)
    with pytest.raises(OutOfOrderError, match=r"`model\.one\.output\.i0` was not provided"):
        with model.two.trace(x):
            model.one.output.save()


@both
def test_gradients_steps_source_and_skips(x: torch.Tensor, compile: bool) -> None:
    model = make(compile)
    part = model._module.two
    with model.two.trace(x) as tracer:
        for _step in tracer.iter[:1]:
            hidden = model.two.source.torch_relu_0.output
        hidden.retain_grad()
        loss = model.two.output.sum()
        with loss.backward():
            found = hidden.grad.save()
    hidden = torch.relu(part.first(x))
    same(found, torch.autograd.grad(part.last(hidden).sum(), hidden)[0])
    with model.two.trace(x):
        model.two.first.skip(x)
        out = model.two.output.save()
    same(out, part.last(torch.relu(x)))


@both
def test_a_scan_runs_it_alone(x: torch.Tensor, compile: bool) -> None:
    model = make(compile)
    with model.two.scan(x) as tracer:
        shape = model.two.first.output.shape.save()
    assert tuple(shape) == (3, 4) and tracer.report.mode == "scan"
    assert tuple(model.two.last._fake_output.shape) == (3, 4)
    assert model.one._fake_output is None
    with model.trace(x):
        model.two.output.save()


@both
def test_an_edit_is_made_where_the_module_runs_by_itself(x: torch.Tensor, compile: bool) -> None:
    model = make(compile)
    part, whole = model._module.two, model._module(x)
    plain, cleared = part(x), part.last(torch.zeros(3, 4))

    def of(envoy: Any) -> torch.Tensor:
        with envoy.trace(x):
            out = model.two.output.save()
        return out

    with model.two.edit() as edited:
        model.two.first.output[:] = -1.0
    same((of(edited), edited(x), of(model.two), model.two(x)), (cleared, cleared, plain, plain))
    with model.two.edit(inplace=True):
        model.two.first.output[:] = -1.0
    same((of(model.two), model.two(x)), (cleared, cleared))
    with model.trace(x):
        inside = model.output.save()
    same((inside, model(x)), (whole, whole))
    model.clear_edits()
    same(of(model.two), cleared)
    model.two.clear_edits()
    same(of(model.two), plain)


def test_it_follows_what_the_model_is_compiled_with(x: torch.Tensor) -> None:
    model = make(False)

    def mode(**options: Any) -> str:
        with model.two.trace(x, **options) as tracer:
            model.two.first.output.save()
        return tracer.report.mode

    assert mode() == "eager"
    assert mode(compile=True) == "compiled"
    model.compile(backend="eager")
    assert mode() == "compiled"
    assert mode(compile=False) == "eager"


@pytest.mark.slow
def test_layers_are_lowered_once_for_the_model_and_a_part_of_it() -> None:
    model = LanguageModel(new_language_model()._module, compile=True)
    ids = torch.tensor([[3, 4, 5, 6]])
    with model.trace(ids):
        expected = model.transformer.h[2].output.save()
    fx.counters.reset()
    with model.transformer.trace(ids):
        found = model.transformer.h[2].output.save()
    torch.testing.assert_close(found, expected)
    assert fx.counters.reuses > 0


def test_weights_are_loaded_and_the_module_may_be_replaced(x: torch.Tensor) -> None:
    class Lazy(MetaMixin):
        def _load_meta(self) -> torch.nn.Module:
            return Whole()

        def _load(self) -> torch.nn.Module:
            torch.manual_seed(3)
            return Whole()

    for compile in (False, {"backend": "eager"}):
        model = Lazy(compile=compile)
        part = model.two
        with part.edit() as edited:
            part.first.output[:] = 0.0
        with part.scan(x):
            shape = part.first.output.shape.save()
        assert tuple(shape) == (3, 4) and not model.dispatched
        with part.trace(x):
            first = part.first.output.save()
        assert model.dispatched
        same(first, model._module.two.first(x))
        with edited.trace(x):
            out = part.output.save()
        same(out, model._module.two.last(torch.zeros(3, 4)))
        model._module.two = other = Part()
        with model.two.trace(x):
            out = model.two.output.save()
        same(out, other(x))


def test_it_keeps_no_model_alive(x: torch.Tensor, no_gc: None) -> None:
    model = make(False)
    with model.two.trace(x):
        model.two.first.output.save()
    with model.two.edit() as edited:
        pass
    gone = weakref.ref(model), weakref.ref(model._module)
    del model, edited
    assert [reference() for reference in gone] == [None, None]
    gc.collect()


def test_what_a_part_cannot_do_is_refused(x: torch.Tensor) -> None:
    model = make(False)
    with pytest.raises(ValueError, match=r"trace the model remotely"):
        model.two.trace(x, remote="local")
    with pytest.raises(ValueError, match="trace\\(\\) was given no input"):
        with model.two.trace():
            model.two.output.save()
    removed = model.two
    del model._module.two
    with pytest.raises(ValueError, match=r"The model has no module at `model\.two`"):
        with removed.trace(x):
            removed.output.save()
