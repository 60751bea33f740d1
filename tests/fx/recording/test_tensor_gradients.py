"""Functions of torch about the gradient of one tensor: a compiled trace gives what an eager one does, in each of its runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnsight
from nnsight import NNsight

from ...conftest import close

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def grad_twice(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile):
        hidden, later = model[0].output, model[2].output
        one = torch.autograd.grad(later[0, 0], hidden, retain_graph=True)[0]
        two = torch.autograd.grad(later[0, 1], [hidden], retain_graph=True)[0]
        found = nnsight.save([one, two])
    return found


def grad_materialized(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile):
        hidden, later = model[1].output, model[3].output
        found = nnsight.save([])
        for column in range(2):
            found += torch.autograd.grad(later[:, column].sum(), hidden, retain_graph=True, materialize_grads=True)
    return found


def retained_late(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile):
        hidden, later = model[0].output, model[2].output
        hidden.retain_grad()
        later.pow(2).sum().backward(retain_graph=True)
        found = nnsight.save([hidden.grad])
    return found


def retained_for_the_time_after(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile):
        hidden, out = model[1].output.save(), model.output.save()
        hidden.retain_grad()
    out.pow(2).sum().backward()
    return [hidden.grad, *torch.autograd.grad(model._module[2](hidden).sum(), hidden)]


def backward_with_inputs(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile):
        hidden, later = model[0].output, model[2].output
        torch.autograd.grad(later.sum(), hidden, retain_graph=True)
        hidden.retain_grad()
        torch.autograd.backward(later.sum(), inputs=[hidden], retain_graph=True)
        found = nnsight.save([hidden.grad])
    return found


def hooks_late(model: Any, compile: bool) -> Any:
    found: list[torch.Tensor] = []
    with model.trace(X, compile=compile):
        hidden, later = model[0].output, model[2].output
        hidden.register_hook(found.append)
        later.sum().backward(retain_graph=True)
    return found


def hook_of_a_tensor_read_again(model: Any, compile: bool) -> Any:
    """The second read is another object, which the compiled graph does not know."""
    found: list[torch.Tensor] = []
    with model.trace(X, compile=compile):
        first = model[0].output
        first.requires_grad_()
        again = model[1].input
        again.register_hook(found.append)
        again.retain_grad()
        model[2].output.sum().backward(retain_graph=True)
        found.append(nnsight.save(again.grad))
    return found


def required_late(model: Any, compile: bool) -> Any:
    with model.trace(X, compile=compile):
        hidden, out = model[0].output.save(), model.output.save()
        hidden.requires_grad_()
    return torch.autograd.grad(out.sum(), hidden)


BLOCKS = [
    grad_twice, grad_materialized, retained_late, retained_for_the_time_after, backward_with_inputs, hooks_late,
    hook_of_a_tensor_read_again, required_late,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_gradients_are_those_of_an_eager_trace(block: Callable[..., Any], backend: str) -> None:
    module = net()
    expected = block(NNsight(copy.deepcopy(module)), False)
    assert any(gradient.abs().sum() > 0 for gradient in expected)
    model = NNsight(module, compile={"backend": backend})
    for _ in range(3):
        close(list(block(model, True)), list(expected))


@pytest.mark.parametrize("before", [True, False])
def test_tensors_that_the_model_edits_in_place(before: bool) -> None:
    """The hook is on a tensor that the model edits later, so that its graph cannot be cut there, or on the result of an edit."""

    class Editing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            total = hidden.sum(-1, keepdim=True)
            hidden += 1
            return total + self.second(hidden)

    def block(model: Any, compile: bool) -> Any:
        found: list[torch.Tensor] = []
        with model.trace(X, compile=compile):
            hidden, out = (model.first if before else model[1]).output, model.output
            hidden.register_hook(found.append)
            out.sum().backward(retain_graph=True)
        return found

    torch.manual_seed(0)
    module = Editing() if before else torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2))
    expected = block(NNsight(copy.deepcopy(module)), False)
    model = NNsight(module, compile={"backend": "aot_eager"})
    for _ in range(2):
        close(block(model, True), expected)


def test_warnings_of_torch_about_values_of_the_model_are_not_shown() -> None:
    """For its fakes, torch reads the ``.grad`` of tensors that are not leaves. Under ``-W error`` the graph would not be lowered."""
    model = NNsight(net(), compile={"backend": "aot_eager"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(X) as tracer:
            model[0].output = model[0].output * 2
            model.output.sum().backward()
    assert not tracer.report.notes
