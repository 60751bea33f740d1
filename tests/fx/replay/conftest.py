"""A model that is captured once, and the comparison of runs and replays with a plain hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, fx
from nnsight.fx.replay.replay import Replays

from ...conftest import Hooks, same

VECTOR = torch.tensor([0.5, -1.0, 2.0, 0.25])


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.fixture(scope="session")
def captured() -> Any:
    torch.manual_seed(0)
    return NNsight(Net().eval(), compile={"backend": "eager"})


@pytest.fixture
def model(captured: Any) -> Any:
    """A captured model that has seen no block; a test must leave its modules as they are."""
    captured._compiled.replays = Replays()
    return captured


@pytest.fixture
def fresh() -> Any:
    """A model of its own."""
    return NNsight(Net().eval(), compile={"backend": "eager"})


def x(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4, dtype=torch.float32).view(rows, 4)


def applied(model: Any, function: Callable[..., Any], *more: Any, compile: bool = True) -> Any:
    """Replace what the second layer returns by what ``function`` makes of it; return the model's result."""
    with model.trace(x(), compile=compile):
        model.layers[1].output = function(model.layers[1].output, *more)
        out = model.output.save()
    return out


def by_hand(model: Any, function: Callable[..., Any], *more: Any) -> Any:
    """The same with a plain hook."""
    return Hooks(model._module).output("layers.1", lambda h: function(h, *more))(x())


def check(model: Any, function: Callable[..., Any], *more: Any, times: int = 3) -> int:
    """Compare runs and replays with a plain hook, see that they have an effect; return how many were replays."""
    before = fx.counters.replays
    for _ in range(times):
        expected = by_hand(model, function, *more)
        same(applied(model, function, *more), expected)
        assert not torch.allclose(expected, model._module(x()))
    return fx.counters.replays - before
