"""Common patterns: patching, lens, ablation, steering, attribution, training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel, NNsight

from ..conftest import Hooks, both, close, same
from .guide import LAYERS, PARIS, WIDTH, encoded, hooked, ids, new_language_model, new_tower


@both
def test_activation_patching_in_one_trace(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ids(1)):
            clean = model.layers[1].output[0][:, -1]
            barrier()
        with tracer.invoke(ids(2)):
            barrier()
            model.layers[1].output[0][:, -1] = clean
            patched = model.output.save()
    source = hooked(model, ids(1))[1]["layers.1"][0][:, -1]

    def patch(value: Any) -> Any:
        hidden = value[0].clone()
        hidden[:, -1] = source
        return hidden, value[1]

    close(patched, hooked(model, ids(2), layers__1=patch)[0])
    assert (patched - model._module(ids(2))).abs().max() > 1e-3


@both
def test_the_logit_lens(lm: LanguageModel, compile: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with lm.trace(PARIS, compile=compile):
        lens = [].save()
        for layer in lm.transformer.h:
            logits = lm.lm_head(lm.transformer.ln_f(layer.output))
            lens.append(logits.argmax(dim=-1))
        final = lm.lm_head.output.argmax(dim=-1).save()
        print("prediction:", lm.tokenizer.decode(final[0][-1]))
    module, seen = lm._module, hooked(lm, PARIS)[1]
    expected = [
        module.lm_head(module.transformer.ln_f(seen[f"transformer.h.{index}"])).argmax(dim=-1)
        for index in range(LAYERS)
    ]
    same(lens, expected)
    same(lens[-1], final)
    assert capsys.readouterr().out == f"prediction: {lm.tokenizer.decode(final[0][-1])}\n"


class LowRank(torch.nn.Module):
    """A low-rank addition to a module."""

    def __init__(self, module: torch.nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self.module = module
        self.down = torch.nn.Parameter(torch.randn(width, rank))
        self.up = torch.nn.Parameter(torch.randn(rank, width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y + x @ self.down @ self.up


@both
def test_a_low_rank_adapter_learns(compile: bool) -> None:
    """Parameters of a module that a block applies get gradients; the model's stay as they are."""
    model = new_tower()
    model._module.requires_grad_(False)
    torch.manual_seed(1)
    model.lora = LowRank(torch.nn.Identity(), WIDTH, 2)
    losses = []
    optimizer = torch.optim.SGD([model.lora._module.down, model.lora._module.up], lr=0.01)
    for _ in range(3):
        with model.trace(ids(), compile=compile):
            mlp = model.layers[1].mlp
            mlp.output = model.lora(mlp.input, mlp.output, hook=True)
            loss = torch.nn.functional.cross_entropy(model.head.output[0], torch.zeros(5, dtype=torch.long)).save()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]


@both
def test_steering_adds_a_direction(lm: LanguageModel, compile: bool) -> None:
    direction = torch.randn(16, generator=torch.Generator().manual_seed(2))
    for strength in (0.5, 4.0):
        with lm.trace(PARIS, compile=compile):
            device = lm.transformer.h[1].output.device
            lm.transformer.h[1].output[:, -1, :] += direction.to(device) * strength
            logits = lm.lm_head.output.save()

        def steer(value: torch.Tensor, strength: float = strength) -> torch.Tensor:
            value = value.clone()
            value[:, -1] += direction * strength
            return value

        same(logits, hooked(lm, PARIS, transformer__h__1=steer)[0].logits)


@both
def test_a_probe_is_trained_on_saved_states(model: Any, compile: bool) -> None:
    states = []
    for seed in range(4):
        with model.trace(ids(seed), compile=compile):
            states.append(model.layers[1].output[0][0].save())
    same(states, [hooked(model, ids(seed))[1]["layers.1"][0][0] for seed in range(4)])
    features, target = torch.cat(states), torch.cat([ids(seed)[0] for seed in range(4)]).float()
    weights = torch.linalg.lstsq(features, target[:, None]).solution
    assert (features @ weights).shape == (20, 1)
    with model.trace(ids(7), compile=compile):
        predicted = (model.layers[1].output[0] @ weights).save()
    same(predicted, hooked(model, ids(7))[1]["layers.1"][0] @ weights)


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
def test_input_of_any_type(compile: bool) -> None:
    class Sized(torch.nn.Module):
        def forward(self, options: dict[str, Any], times: int = 1) -> torch.Tensor:
            return options["x"] * times

    model = NNsight(Sized(), compile={"backend": "eager"})
    with model.trace({"x": torch.ones(2)}, times=3, compile=compile):
        out = model.output.save()
    same(out, torch.full((2,), 3.0))


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


def test_one_program_for_two_architectures() -> None:
    """The use of further names: code written once for models whose parts are called differently."""
    one = new_language_model(rename={"transformer.h": "layers", "transformer.ln_f": "final_norm", ".lm_head": ".top"})
    two = nnsight.NNsight(new_tower()._module, rename={"norm": "final_norm", "head": "top"})
    for own, given in ((one, PARIS), (two, ids())):
        with own.trace(given, compile=False):
            hidden = own.layers[LAYERS - 1].output
            hidden = nnsight.save(hidden[0] if isinstance(hidden, tuple) else hidden)
            normed = own.final_norm.output.save()
            top = own.top.output.save()
        same(top, own.top._module(own.final_norm._module(hidden)))
