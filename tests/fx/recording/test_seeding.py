"""Numbers that a block draws and numbers that the graph draws come in the order of an eager trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nnsight import NNsight
from nnsight.fx.recording.execution import GraphBreakError


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
    return NNsight(net.train(), compile={"backend": "eager"})


def _forked(hidden: torch.Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.randn(2)
    return noise, torch.randn(2)


def _seeded(hidden: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return torch.randn(2), F.dropout(hidden, 0.5)


def _restored(hidden: torch.Tensor) -> Any:
    state = torch.get_rng_state()
    first = torch.randn(2)
    torch.set_rng_state(state)
    return first, torch.randn(2)


#: Blocks that draw after the dropout of the model, each with the number of cuts.
DRAWS: list[tuple[Callable[[torch.Tensor], Any], int]] = [
    (lambda hidden: torch.randn(2, 3), 0),
    (lambda hidden: torch.randn_like(hidden) + torch.rand(hidden.shape), 0),
    (lambda hidden: torch.binomial(torch.full((9,), 5.0), torch.full((9,), 0.5)), 0),
    (lambda hidden: torch.distributions.Gamma(torch.ones(2), torch.ones(2)).sample(), 0),
    (lambda hidden: torch.nn.Linear(2, 2).weight.detach() * 1.0, 0),
    (lambda hidden: torch.randn(3, generator=torch.Generator().manual_seed(1)), 0),
    (lambda hidden: torch.randn(3, requires_grad=True).requires_grad, 1),
    (_seeded, 1),
    (_restored, 1),
    (_forked, 1),
]


@pytest.mark.parametrize("location", [0, 1])
@pytest.mark.parametrize(("draw", "cuts"), DRAWS, ids=range(len(DRAWS)))
def test_numbers_are_drawn_in_order(model: Any, draw: Callable[..., Any], cuts: int, location: int) -> None:
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)

    def run(compile: bool) -> Any:
        torch.manual_seed(1)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            with model.trace(x, compile=compile) as tracer:
                hidden = model[location].output
                drawn = draw(hidden)
                kept = [drawn, hidden].save()
                out = model.output.save()
        return torch.utils._pytree.tree_leaves((kept, out, torch.rand(1))), tracer

    (expected, _), *actual = run(False), run(True), run(True)
    for found, tracer in actual:
        assert all(map(torch.equal, map(torch.as_tensor, found), map(torch.as_tensor, expected)))
        assert len(tracer.report.breaks) == cuts * location  # before its dropout the model has drawn nothing


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_are_on_the_default_device(model: Any, device: str) -> None:
    def run(compile: bool) -> Any:
        with torch.device(device), model.trace(torch.ones(2, 4, device="cpu"), compile=compile):
            first = torch.randn(2, 3).save()
            hidden = model[1].output
            later = [torch.randn(2, 3), torch.randperm(4), torch.rand(2, device="cpu"), torch.randn_like(hidden)].save()
        return [(value.device.type, value.dtype, value.shape) for value in (first, *later)]

    assert run(True) == run(False) == run(True)
    assert run(True)[1][0] == device


def test_with_one_graph_a_seed_after_a_draw_is_refused(model: Any) -> None:
    model = NNsight(model._module, compile={"backend": "eager", "fullgraph": True})
    with pytest.raises(GraphBreakError, match="`manual_seed` of the generator .* use a seed before the trace"):
        with model.trace(torch.ones(2, 4)):
            model[1].output.mul_(2.0)
            torch.manual_seed(3)


def test_the_generator_is_torchs_own_after_a_trace(model: Any) -> None:
    before = torch.random.default_generator
    with model.trace(torch.ones(2, 4)):
        model[1].output.save()
    assert torch.random.default_generator is before is torch.default_generator
