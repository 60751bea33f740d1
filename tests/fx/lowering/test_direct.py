"""Generated code is called directly where, and only where, nothing is around it that does something."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, fx
from nnsight.fx.lowering.backends import resolve_backend
from nnsight.fx.lowering.lowering import Direct

from .test_regions import Stack, X, close


def lowered(function: Callable[..., Any], *inputs: Any) -> Direct:
    """Return what inductor makes of ``function``, after a first call of it."""
    made: list[Direct] = []

    def backend(graph_module: torch.fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
        made.append(Direct(resolve_backend("inductor")(graph_module, fakes)))
        return lambda *actual: (made[0].call or made[0].first)(list(actual))

    torch.compile(function, backend=backend, dynamic=False)(*inputs)
    return made[0]


def is_direct(call: Direct) -> bool:
    return call.call is not None and call.call != call.whole


@pytest.mark.slow
def test_code_that_only_computes_is_called_directly_and_lets_go_of_its_inputs() -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x) @ y, x - 1

    with torch.no_grad():
        call = lowered(compute, X, X.T)
        assert is_direct(call)
        other = X * 3
        gone, given = weakref.ref(other), [other, X.T]
        del other
        for found, expected in zip(call.call(given), compute(X * 3, X.T), strict=True):  # type: ignore[misc]
            close(found, expected)
    assert given == []
    assert gone() is None


def look(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[1:], x * 2


def switch(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.set_grad_enabled(True)
    return y


@pytest.mark.slow
@pytest.mark.parametrize("function", [look, switch])
def test_code_around_which_something_happens_is_not(function: Callable[..., Any]) -> None:
    with torch.no_grad():
        assert not is_direct(lowered(function, X.clone()))


@pytest.mark.slow
def test_code_that_writes_to_inputs_is_called_directly_and_the_writes_are_counted() -> None:
    def write(cache: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        cache.mul_(y)
        return cache.sum() + x

    with torch.no_grad():
        x, y, cache = X.clone(), 2 * X, X.clone()
        call = lowered(write, cache, x, y)
        assert is_direct(call)
        wanted = ((X + X) * y + X) * y
        (result,) = call.call([cache, x, y])  # type: ignore[misc]
        close(cache, wanted)
        close(result, wanted.sum() + X)
        assert [tensor._version for tensor in (cache, x, y)] == [2, 0, 0]
    weight = torch.ones(X.shape, requires_grad=True)
    loss = (weight * cache).sum()
    with torch.no_grad():
        call.call([cache, x, y])  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_regions_are_called_directly_and_a_profile_shows_them() -> None:
    net = Stack()
    model = NNsight(net, compile={"regions": True})
    with torch.no_grad():
        close(model(X), net(X))
        regions = model._compiled._regions._lowered  # type: ignore[union-attr]
        assert len(regions) == 3
        assert all(is_direct(known.direct) for (known,) in regions.values())
        close(model(2 * X), net(2 * X))
        with torch.profiler.profile() as profile:
            close(model(X), net(X))
        around = [event.name for event in profile.events() or () if "CompiledFxGraph" in event.name]
    assert len(around) == 7
    assert fx.counters.compiles + fx.counters.loads == 3
