"""CUDA graphs write their results to the same memory at each call; what a user has kept stays. Here code for the CPU is made to do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import nnsight
from nnsight import NNsight, fx
from nnsight.fx.lowering import backends
from nnsight.fx.lowering.lowering import InOwnMemory
from nnsight.fx.lowering.symbols import with_strides
from nnsight.fx.torch_compat import generated_code_in


def _in_one_memory(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return generated code that writes its results to the same memory at each call."""
    memory: dict[int, torch.Tensor] = {}

    def replay(handed: list[Any]) -> list[Any]:
        results = list(call(handed))
        for position, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                kept = memory.setdefault(position, torch.empty_like(result))
                results[position] = kept.copy_(result).view(result.shape)
        return results

    return replay


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Inductor make code that is like a CUDA graph."""
    lower = backends._lower

    def recorded(*args: Any) -> Any:
        made = lower(*args)
        generated_code = generated_code_in(made)
        assert generated_code is not None
        generated_code.current_callable = _in_one_memory(generated_code.current_callable)
        return made

    monkeypatch.setattr(backends, "_lower", recorded)


@torch.no_grad()
@pytest.mark.parametrize(("mode", "stays"), [("reduce-overhead", True), ("default", False)])
def test_values_of_earlier_calls_stay_what_they_are(replayed: None, mode: str, stays: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    model = NNsight(net, compile={"mode": mode, "regions": False})

    def trace(x: torch.Tensor, compile: bool) -> list[torch.Tensor]:
        with model.trace(x, compile=compile):
            kept = nnsight.save([])
            kept.append(model[0].output)
            kept.append(model.output[:, 1:])
        return [*kept, model(x) if compile else net(x)]

    calls = [torch.full((3, 4), float(number)) for number in range(4)]
    found = [trace(x, True) for x in calls]
    expected = [trace(x, False) for x in calls]
    same = [all(map(torch.allclose, one, other)) for one, other in zip(found, expected, strict=True)]
    assert all(same) if stays else not any(same[:-1])
    assert fx.counters.captures == 1


def test_results_that_share_memory_stay_as_they_are() -> None:
    given = torch.zeros(3)

    def computed(x: torch.Tensor) -> Sequence[Any]:
        base = torch.ones(2, 2)
        return [x, x[1:], base, base[0], 3, torch.arange(4.0), torch.ones(3, 1).expand(3, 2)]

    function = InOwnMemory(computed)
    for _ in range(2):
        same, part, base, row, number, alone, wide = function(given)
        assert same is given and part._base is given and row._base is base and number == 3
        assert torch.equal(alone, torch.arange(4.0)) and wide.stride() == (1, 0)


def test_a_copy_with_the_strides_of_an_expanded_tensor_is_one() -> None:
    base = torch.arange(3.0).view(3, 1).requires_grad_()
    found = with_strides(base.expand(3, 2) * 1.0, (1, 0))
    assert found.stride() == (1, 0) and torch.equal(found, base.expand(3, 2))
    (found * torch.tensor([1.0, 2.0])).sum().backward()
    assert torch.equal(base.grad, torch.full((3, 1), 3.0))
