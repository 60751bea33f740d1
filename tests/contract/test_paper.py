"""The examples of the paper: neurons that change an answer, patching between prompts, training in a session."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel, NNsight

from .guide import PARIS, ROME, WIDTH, Hooks, both, close, encoded, hooked, ids, new_tower, same, tower


@both
def test_some_neurons_are_set_and_the_prediction_read(lm: LanguageModel, compile: bool) -> None:
    neurons = [3, 17, 40]
    project = lm.transformer.h[1].mlp.c_proj
    with lm.trace(PARIS, compile=compile):
        project.input[:, :, neurons] = 5
        logits = lm.output["logits"].save()

    def fire(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = args[0].clone()
        changed[:, :, neurons] = 5
        return (changed,), kwargs

    expected = Hooks(lm._module).input("transformer.h.1.mlp.c_proj", fire)(**encoded(PARIS)).logits
    same(logits, expected)
    assert not torch.equal(logits, lm._module(**encoded(PARIS)).logits)
    assert lm.tokenizer.decode(logits[:, -1].argmax()) == lm.tokenizer.decode(expected[:, -1].argmax())


@both
def test_neurons_through_all_inputs(lm: LanguageModel, compile: bool) -> None:
    """The first element of the positional arguments is the tensor that ``input`` is."""
    with lm.trace(PARIS, compile=compile):
        lm.transformer.h[1].mlp.c_proj.inputs[0][0][:, :, 0] = 7
        logits = lm.output.logits.save()

    def fire(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = args[0].clone()
        changed[:, :, 0] = 7
        return (changed,), kwargs

    same(logits, Hooks(lm._module).input("transformer.h.1.mlp.c_proj", fire)(**encoded(PARIS)).logits)


@both
def test_input_of_any_type(compile: bool) -> None:
    class Sized(torch.nn.Module):
        def forward(self, options: dict[str, Any], times: int = 1) -> torch.Tensor:
            return options["x"] * times

    model = NNsight(Sized(), compile={"backend": "eager"})
    with model.trace({"x": torch.ones(2)}, times=3, compile=compile):
        out = model.output.save()
    same(out, torch.full((2,), 3.0))


@both
def test_a_subject_goes_from_one_prompt_to_another(lm: LanguageModel, compile: bool) -> None:
    """Two prompts in one forward pass; a place of the one is put to another place of the other."""
    layer = lm.transformer.h[1]
    with lm.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ROME):
            hidden = layer.output[:, -5, :]
            barrier()
        with tracer.invoke(PARIS):
            barrier()
            layer.output[:, -6, :] = hidden
            logits = lm.output.logits.save()
    source = hooked(lm, ROME)[1]["transformer.h.1"][:, -5]

    def patch(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, -6] = source
        return value

    close(logits[:, -1], hooked(lm, PARIS, transformer__h__1=patch)[0].logits[:, -1])
    assert (logits[:, -1] - lm._module(**encoded(PARIS)).logits[:, -1]).abs().max() > 0.01


def test_sizes_before_any_computation(lm: LanguageModel) -> None:
    with lm.scan(PARIS):
        sizes = nnsight.save([tuple(layer.output.shape) for layer in lm.transformer.h])
    assert sizes == [(1, encoded(PARIS)["input_ids"].shape[1], 16)] * 3


@both
def test_gradients_of_a_prediction(compile: bool) -> None:
    model = tower()
    with model.trace(ids(), compile=compile):
        hidden = model.layers[1].output[0]
        hidden.requires_grad_(True)
        loss = model.output[0, -1, 2]
        with loss.backward():
            gradient = hidden.grad.save()
    module = model._module
    state = hooked(model, ids())[1]["layers.1"][0].detach().requires_grad_(True)
    module.head(module.norm(module.layers[2](state)[0]))[0, -1, 2].backward()
    close(gradient, state.grad)


@both
def test_training_in_a_session(compile: bool) -> None:
    """Several forward and backward passes; what a trace leaves is there for the next."""
    model = new_tower()
    model._module.requires_grad_(False)
    target = torch.full((5,), 4)

    def by_hand(steps: int) -> list[float]:
        vector, losses = torch.zeros(WIDTH, requires_grad=True), []
        for _ in range(steps):
            out, _ = hooked(model, ids(), layers__1=lambda value: (value[0] + vector, value[1]))  # noqa: B023
            loss = torch.nn.functional.cross_entropy(out[0], target)
            (gradient,) = torch.autograd.grad(loss, vector)
            vector = (vector - 0.5 * gradient).detach().requires_grad_(True)
            losses.append(loss.item())
        return losses

    with model.session():
        losses = [].save()
        vector = torch.zeros(WIDTH, requires_grad=True)
        for _ in range(3):
            with model.trace(ids(), compile=compile):
                model.layers[1].output = (model.layers[1].output[0] + vector, model.layers[1].output[1])
                loss = torch.nn.functional.cross_entropy(model.output[0], target)
            loss.backward()
            losses.append(loss.item())
            vector = (vector - 0.5 * vector.grad).detach().requires_grad_(True)
    expected = by_hand(3)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[0] > losses[1] > losses[2]
