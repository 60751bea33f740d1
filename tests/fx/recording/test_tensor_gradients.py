"""Functions of torch about the gradient of one tensor: a compiled trace gives what an eager one does, in each of its runs."""

from __future__ import annotations

import copy
import random
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
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.Linear(4, 2))  # a Linear saves its input


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


# -- random blocks -----------------------------------------------------------------------------------------------------

LAYERS = 3
PLACES = ["embed", *(f"layers.{layer}{part}" for layer in range(LAYERS) for part in (".0", ".2", "")), "head"]


class Residual(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Stacked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11)
        parts = [(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 6)) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList([Residual(*each) for each in parts])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def random_block(model: Any, seed: int, ids: torch.Tensor, compile: bool) -> Any:
    """Read and edit values at some locations, and then ask for gradients in several ways. The seed chooses all of it."""
    draw, found = random.Random(seed), []
    places = sorted(draw.sample(range(len(PLACES)), draw.randint(2, 5)))
    edits = draw.choices(["none", "scale", "replace", "in place", "require"], k=len(places))
    asked = [(draw.choice(["grad", "retain", "hook", "backward", "rows"]), draw.randrange(len(places))) for _ in range(3)]
    with model.trace(ids, compile=compile):
        values: list[torch.Tensor] = []
        for place, edit in zip(places, edits, strict=True):
            module = model.get(PLACES[place])
            value = module.output
            if edit == "scale":
                value = module.output = value * 1.5
            elif edit == "replace":
                module.output = torch.tanh(value) + (values[-1].mean() if values else 0)
            elif edit == "in place":
                value[:, 0] = value[:, 0] * 0.5
            elif edit == "require":
                value.requires_grad_()
            values.append(value)
        last = values[-1]
        for how, number in asked:
            value = values[number]
            if how == "retain":
                value.retain_grad()
            elif how == "hook":
                value.register_hook(found.append)
            elif how == "backward":
                last.pow(2).sum().backward(retain_graph=True)
            else:
                for target in (last.pow(2).sum(),) if how == "grad" else last.flatten()[:2]:
                    found += torch.autograd.grad(target, value, retain_graph=True, allow_unused=True)
        last.pow(2).sum().backward(retain_graph=True)
        found += [value.grad for value in values if value.retains_grad]
        found = nnsight.save(found)
    return [*found, *(parameter.grad for parameter in model._module.parameters())]


def gradients_of(module: torch.nn.Module, run: Callable[[], Any]) -> Any:
    module.zero_grad()
    return [torch.zeros(()) if gradient is None else gradient.clone() for gradient in run()]


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 30), marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_blocks(seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        module, ids = Stacked(), torch.randint(0, 11, (2, 4))
        model = NNsight(module, compile={"backend": "aot_eager"})
        expected, *others = (
            gradients_of(module, lambda model=model, compile=compile: random_block(model, seed, ids, compile))  # noqa: B023
            for compile in (False, True, True)
        )
        for other in others:
            close(other, expected)


def _unedited(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return part


def _edited(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    value.mul_(2.0)
    return part


def _edited_in_part(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    part.add_(1.0)
    return value.sum(-1, keepdim=True) * part


def _edited_without_gradients(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        part.mul_(2.0)
    return part


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("edit", [_unedited, _edited, _edited_in_part, _edited_without_gradients])
@pytest.mark.filterwarnings("ignore:In this compiled trace the graph up to `model.output` ran operation by operation")  # with an edit
def test_a_view_from_before_a_cut_is_used_behind_it(edit: Any, backend: str) -> None:
    module = net()

    def run(compile: Any) -> list[torch.Tensor]:
        model = NNsight(module, compile=compile)
        with model.trace(X):
            value = model[1].input
            part = value[:, :2]
            if value.sum() > 1e6:
                part = part * 2
            used = edit(value, part)
            loss = (model.output - part).pow(2).sum() + used.sum()
            with loss.backward():
                found = [loss.detach(), part.grad.clone()].save()
        return found

    close(run({"backend": backend}), run(False))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("same", [torch.Tensor.float, torch.Tensor.contiguous, torch.Tensor.cpu, lambda x: x.to(x.dtype), lambda x: x.real])
def test_an_input_that_a_call_returns_itself_has_the_gradient_of_both_names(same: Any, backend: str) -> None:
    def run(compile: Any) -> list[Any]:
        model = NNsight(net().requires_grad_(False), compile=compile)
        with model.trace(X):
            value = model[0].input
            other = same(value)
            value.requires_grad_()
            loss = other.pow(2).sum() + model.output.sum()
            with loss.backward():
                found = [value.grad.clone(), other.requires_grad].save()
        return found

    close(run({"backend": backend}), run(False))
