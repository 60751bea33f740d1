"""The user guide and the design document on gradients, against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .guide import Tower, both, close, hooked, ids, same, tower


class Parts:
    """The same model by hand, from a hidden state after each layer on."""

    def __init__(self, module: Tower) -> None:
        self.module = module
        with torch.no_grad():
            self.hidden = hooked(tower(), ids())[1]["layers.1"][0].detach()
        self.hidden.requires_grad_(True)
        self.last = self.module.layers[2](self.hidden)[0]
        self.last.retain_grad()
        self.logits = self.module.head(self.module.norm(self.last))


@pytest.fixture
def parts() -> Parts:
    return Parts(tower()._module)


@both
def test_the_gradient_of_a_hidden_state(model: Any, parts: Parts, compile: bool) -> None:
    parts.logits.sum().backward()
    with model.trace(ids(), compile=compile):
        hidden = model.layers[1].output[0]
        hidden.requires_grad_(True)
        loss = model.head.output.sum()
        with loss.backward():
            gradient = hidden.grad.save()
    close(gradient, parts.hidden.grad)
    assert gradient.abs().max() > 0


@both
def test_gradients_come_in_reverse_order(model: Any, parts: Parts, compile: bool) -> None:
    parts.logits.square().sum().backward()
    with model.trace(ids(), compile=compile):
        early = model.layers[1].output[0]
        early.requires_grad_(True)
        late = model.layers[2].output[0]
        late.requires_grad_(True)
        loss = model.head.output.square().sum()
        with loss.backward():
            of_late = late.grad.save()
            of_early = early.grad.save()
    close((of_late, of_early), (parts.last.grad, parts.hidden.grad))


@both
def test_gradients_in_forward_order_are_an_error(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match="was not provided"):
        with model.trace(ids(), compile=compile):
            early = model.layers[1].output[0]
            early.requires_grad_(True)
            late = model.layers[2].output[0]
            late.requires_grad_(True)
            with model.head.output.sum().backward():
                early.grad.save()
                late.grad.save()


@both
@pytest.mark.parametrize("way", ["in place", "assigned"])
def test_a_changed_gradient_flows_on(model: Any, parts: Parts, compile: bool, way: str) -> None:
    with model.trace(ids(), compile=compile):
        early = model.layers[1].output[0]
        early.requires_grad_(True)
        late = model.layers[2].output[0]
        late.requires_grad_(True)
        with model.head.output.square().sum().backward():
            before = late.grad.clone().save()
            if way == "in place":
                late.grad[:] = 0
            else:
                late.grad = late.grad * 2
            flowed = early.grad.save()
    parts.logits.square().sum().backward()
    close(before, parts.last.grad)
    close(flowed, parts.hidden.grad * (0 if way == "in place" else 2))


@both
def test_two_passes_over_one_graph(model: Any, parts: Parts, compile: bool) -> None:
    parts.logits.sum().backward()
    with model.trace(ids(), compile=compile):
        hidden = model.layers[1].output[0]
        hidden.requires_grad_(True)
        logits = model.head.output
        with logits.sum().backward(retain_graph=True):
            first = hidden.grad.save()
        doubled = logits * 2
        with doubled.sum().backward():
            second = hidden.grad.save()
    close(first, parts.hidden.grad)
    close(second, parts.hidden.grad * 2)


@both
def test_a_backward_pass_after_the_trace(model: Any, parts: Parts, compile: bool) -> None:
    parts.logits.sum().backward()
    with model.trace(ids(), compile=compile):
        hidden = model.layers[1].output[0]
        hidden.requires_grad_(True)
        hidden = hidden.save()
        logits = model.head.output.save()
    loss = logits.sum()
    with loss.backward():
        gradient = hidden.grad.save()
    close(gradient, parts.hidden.grad)


def test_a_backward_pass_without_any_trace() -> None:
    tower()  # tensors have such blocks from the first wrapped model on
    x = torch.rand(3, requires_grad=True)
    middle = x * 3
    with (middle**2).sum().backward():
        gradient = middle.grad.save()
        middle.grad = torch.ones(3)
    same(gradient, 2 * middle.detach())
    same(x.grad, torch.full((3,), 3.0))


def test_a_bare_backward_is_that_of_torch() -> None:
    x = torch.rand(3, requires_grad=True)
    assert (x**2).sum().backward() is None
    same(x.grad, 2 * x.detach())


@both
def test_the_forward_trace_goes_on_after_a_backward_pass(model: Any, parts: Parts, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        hidden = model.layers[1].output[0]
        hidden.requires_grad_(True)
        last = model.layers[2].output[0]
        with last.sum().backward(retain_graph=True):
            gradient = hidden.grad.save()
        logits = model.head.output.save()
    parts.last.sum().backward()
    close(gradient, parts.hidden.grad)
    close(logits.detach(), parts.logits.detach())


@both
def test_an_activation_is_read_before_the_backward_pass_not_in_it(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match="Cannot request `model.head.output` in a backwards tracer"):
        with model.trace(ids(), compile=compile):
            hidden = model.layers[1].output[0]
            hidden.requires_grad_(True)
            loss = model.head.output.sum()
            with loss.backward():
                hidden.grad.save()
                model.head.output.save()


def test_a_missed_gradient_is_named_by_its_tensor_not_by_a_module(model: Any) -> None:
    with pytest.raises(ValueError, match=r"`[^`]*\.grad\.i0` was not provided") as caught:
        with model.trace(ids()):
            early = model.layers[1].output[0]
            early.requires_grad_(True)
            late = model.layers[2].output[0]
            late.requires_grad_(True)
            with model.head.output.sum().backward():
                early.grad.save()
                late.grad.save()
    assert "model.layers" not in str(caught.value)


@both
def test_gradient_times_activation_attributes_layers(model: Any, compile: bool) -> None:
    """Attribution patching: one forward and one backward pass, gradients of every layer at once."""
    with model.trace(ids(), compile=compile):
        states = []
        for layer in model.layers:
            state = layer.output[0]
            state.requires_grad_(True)
            states.append(state)
        logits = model.head.output
        scores = [].save()
        with logits[:, -1, 3].sum().backward():
            for state in reversed(states):
                scores.append((state.grad * state).sum())

    hidden = model._module.embed(ids())
    kept = []
    for layer in model._module.layers:
        hidden = layer(hidden)[0]
        hidden.retain_grad()
        kept.append(hidden)
    model._module.head(model._module.norm(hidden))[:, -1, 3].sum().backward()
    expected = [(state.grad * state).sum().detach() for state in reversed(kept)]
    model._module.zero_grad()
    close([score.detach() for score in scores], expected)
