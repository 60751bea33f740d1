"""Hooks and methods that come or go after a model was captured: compiled traces do what eager ones and plain calls do."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as for_all_modules

from nnsight import NNsight, fx
from nnsight.runtime.modules.hook_state import HookState

from ..conftest import both, same


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x))


class Whole(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = Part()
        self.two = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def thrice(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    return output * 3 if isinstance(module, Part) else None


def thrice_what_goes_in(module: torch.nn.Module, inputs: Any) -> Any:
    return tuple(value * 3 for value in inputs)


HOOKS: dict[str, Callable[[Whole], Any]] = {
    "forward": lambda net: net.one.register_forward_hook(thrice),
    "forward of a leaf": lambda net: net.one.lin.register_forward_hook(lambda *_: _[2] * 3),
    "forward, before": lambda net: net.two.register_forward_pre_hook(thrice_what_goes_in),
    "for all modules": lambda net: for_all_modules.register_module_forward_hook(thrice),
}


def results(model: NNsight, x: torch.Tensor, compile: bool) -> list[torch.Tensor]:
    with model.trace(x, compile=compile):
        found = [model.one.output, model.two.input, model.output].save()
    return list(found)


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_each_hook_is_seen_when_it_comes_and_when_it_goes(register: Callable[[Whole], Any]) -> None:
    net, x = Whole(), torch.randn(3, 4)
    model = NNsight(net, compile={"backend": "eager"})
    for _ in range(2):
        before = results(model, x, True)
        handle = register(net)
        try:
            expected = net(x)
            hooked = results(model, x, True)
            same(hooked, results(model, x, False))
            same(hooked[-1], expected)
            same(model(x), expected)
            assert not torch.equal(hooked[-1], before[-1])
        finally:
            handle.remove()
        same(results(model, x, True), before)
        same(model(x), net(x))


def test_what_stays_costs_no_capture() -> None:
    net, x = Whole(), torch.randn(3, 4)
    net.one.register_forward_hook(thrice)
    model = NNsight(net, compile={"backend": "eager"})
    results(model, x, True)
    fx.counters.reset()
    torch.ones(2, requires_grad=True).register_hook(
        lambda gradient: gradient
    )  # a handle that has nothing to do with modules
    other = Part()
    other.register_forward_hook(thrice)
    results(model, x, True)
    assert (fx.counters.captures, fx.counters.recordings) == (0, 0)


def test_a_method_that_was_replaced() -> None:
    class Own(Part):
        pass

    net, x = Whole(), torch.randn(3, 4)
    net.one = Own()
    model = NNsight(net, compile={"backend": "eager"})
    before = results(model, x, True)
    Own.forward = lambda self, x: self.lin(x) * 9  # type: ignore[method-assign]
    same(results(model, x, True), results(model, x, False))
    same(results(model, x, True)[-1], net(x))
    del Own.forward  # type: ignore[misc] # back to that of its base
    same(results(model, x, True), before)
    net.one.forward = types.MethodType(lambda self, x: self.lin(x) * 2, net.one)  # type: ignore[method-assign]
    same(results(model, x, True), results(model, x, False))


def test_edits_and_replays_see_hooks() -> None:
    net, x = Whole(), torch.randn(3, 4)
    model = NNsight(net, compile={"backend": "eager"})
    with model.edit(inplace=True):
        model.one.output[:] *= 2
    for _ in range(3):  # recorded, then replayed
        results(model, x, True)
    with net.one.register_forward_hook(thrice):
        same(results(model, x, True), results(model, x, False))
    same(results(model, x, True), results(model, x, False))


def test_hooks_are_not_kept() -> None:
    net = Whole()
    attached = HookState(net.modules())
    assert not attached.changed()
    handle = net.one.register_forward_hook(thrice)
    assert attached.changed()
    assert not attached.changed()
    handle.remove()
    handle = net.one.register_forward_hook(thrice)  # the same function again is another hook
    assert attached.changed()
    handle.remove()
    assert attached.changed()
    assert not attached.changed()


def thrice_back(module: torch.nn.Module, into: Any, out: Any) -> Any:
    return tuple(gradient * 3 for gradient in into)


@both
@pytest.mark.parametrize("compile_backend", ["eager", "aot_eager"])
def test_a_hook_on_the_way_back(compile: bool, compile_backend: str) -> None:
    """Such a hook breaks the model's graph; then torch applies an autograd function between the graphs."""
    net, x = Whole(), torch.randn(3, 4)
    model = NNsight(net, compile={"backend": compile_backend})

    def gradient(traced: bool) -> torch.Tensor:
        net.zero_grad()
        out = results(model, x, compile)[-1] if traced else net(x)
        out.sum().backward()
        assert net.one.lin.weight.grad is not None
        return net.one.lin.weight.grad.clone()

    before = gradient(traced=True)
    same(before, gradient(traced=False))
    with net.two.register_full_backward_hook(thrice_back):
        hooked = gradient(traced=True)
        same(hooked, gradient(traced=False))
    assert not torch.equal(hooked, before)
    same(gradient(traced=True), before)


def test_autograd_functions_between_graphs_of_somebody_else() -> None:
    """What watches autograd functions is not compiled with the code of others."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 2

    captured: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        captured.append(graph)
        return graph

    @torch.compile(backend=backend)
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(torch._dynamo.disable(Double.apply)(y))  # type: ignore[no-any-return]

    x = torch.ones(3, requires_grad=True)
    same(function(x), torch.cos(torch.sin(x) * 2))
    assert not any("watch" in str(graph.code) for graph in captured)
    net = Whole()
    net.two.register_full_backward_hook(thrice_back)
    same(torch.compile(net, backend="eager")(x.new_ones(2, 4)), net(x.new_ones(2, 4)))
