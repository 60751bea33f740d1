"""Inductor lowers the backward pass of a compiled graph when it first runs, with symbolic sizes, too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx

import nnsight


class Block(torch.nn.Module):
    """A residual block whose sizes matter to its backward pass: reductions over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each graph that Inductor lowers is a backward pass."""
    found: list[bool] = []
    inner = compile_fx.compile_fx_inner

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(bool(kwargs.get("is_backward")))
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", counted)
    return found


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return found


def test_a_backward_pass_of_symbolic_sizes_is_lowered_when_it_runs(lowered: list[bool]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 3))
    plain, model = copy.deepcopy(net), nnsight.NNsight(net, compile=True)

    def run(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length))
        with model.trace(given):
            hidden = model[0].output.save()
            result = model.output.save()
        torch.testing.assert_close(hidden, plain[0](given))
        return result, plain(given)

    for length in (5, 7, 9):
        run(length)
    assert lowered and not any(lowered)

    # The last length is more than Inductor assumes when it lowers the pass for another one.
    for length in (9, 4, 2500):
        result, expected = run(length)
        result.square().mean().backward()
        expected.square().mean().backward()
        torch.testing.assert_close(gradients(net), gradients(plain))
        backward = lowered.count(True)
    assert backward == lowered.count(True) > 0


def test_no_warning_of_a_pass_that_was_put_off(caplog: pytest.LogCaptureFixture) -> None:
    model = nnsight.NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), compile={"dynamic": True})
    with model.trace(torch.ones(3, 4)):
        result = model.output.save()
    result.sum().backward()
    assert not [record for record in caplog.records if "backward" in record.getMessage()]
