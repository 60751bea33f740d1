"""Directions from contrast prompts: what they are, beside the formulas written out; padding; compiled models; and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import demo_model
from nnsight.steering import contrast

POSITIVE = [f"The {place} is in the city of Paris" for place in ("Eiffel Tower", "Louvre", "Pantheon", "Opera", "Bastille", "Sorbonne")]
NEGATIVE = [f"The {place} is in the city of Rome" for place in ("Colosseum", "Forum", "Vatican", "Trevi fountain", "Opera", "Senate")]


@pytest.fixture(scope="module")
def model() -> Any:
    return demo_model()


def states(model: Any, prompts: list[str], layer: int, position: int | str = -1) -> torch.Tensor:
    """Return the hidden states of prompts, one call for each, so without padding."""
    seen: list[torch.Tensor] = []
    handle = model._module.transformer.h[layer].register_forward_hook(lambda module, args, output: seen.append(output[0]))
    with torch.no_grad():
        for prompt in prompts:
            model._module(model.tokenizer(prompt, return_tensors="pt")["input_ids"])
    handle.remove()
    return torch.stack([hidden.mean(0) if position == "mean" else hidden[position] for hidden in seen])


@pytest.mark.parametrize("position", [-1, -2, 1, "mean"])
@pytest.mark.parametrize("batch_size", [1, 5, 32])
def test_the_difference_of_means_is_that_of_each_prompt_by_itself(model: Any, position: int | str, batch_size: int) -> None:
    vector = contrast(model, POSITIVE, NEGATIVE, position=position, batch_size=batch_size, layers=[1, 3], progress=False)
    assert list(vector) == [1, 3]
    for layer in vector:
        due = states(model, POSITIVE, layer, position).mean(0) - states(model, NEGATIVE, layer, position).mean(0)
        torch.testing.assert_close(vector[layer], due, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", ["mean", "pca", "probe"])
def test_each_method_finds_a_direction_that_tells_the_prompts_apart(model: Any, method: Any) -> None:
    vector = contrast(model, POSITIVE, NEGATIVE, method=method, progress=False)
    assert (len(vector), vector.at) == (6, "transformer.h")
    assert vector.effects[vector.best_layer] == max(vector.effects.values()) > 3
    for layer, direction in vector.items():
        ours, theirs = states(model, POSITIVE, layer), states(model, NEGATIVE, layer)
        assert (ours @ direction).mean() > (theirs @ direction).mean()
        unit = direction / direction.norm()
        torch.testing.assert_close(direction.norm(), (ours.mean(0) - theirs.mean(0)) @ unit, atol=1e-2, rtol=1e-2)
        if method == "pca":
            first = torch.linalg.eigh((ours - theirs).double().T @ (ours - theirs).double()).eigenvectors[:, -1].float()
            assert abs(float(first @ unit)) > 0.999


@torch.inference_mode()
def test_each_method_works_in_inference_mode(model: Any) -> None:
    for method in ("mean", "pca", "probe"):
        options: dict[str, Any] = {"method": method, "layers": 3, "progress": False}
        found = contrast(model, POSITIVE, NEGATIVE, **options)
        with torch.inference_mode(False):
            assert found == contrast(model, POSITIVE, NEGATIVE, **options)


def test_a_mean_over_tokens_in_float16_does_not_overflow() -> None:
    model: Any = demo_model(dtype=torch.float16)
    with model.edit() as edited:
        model.transformer.h[3].output[:] = 30000.0
    vector = contrast(edited, POSITIVE, NEGATIVE, position="mean", layers=3, progress=False)
    assert not vector[3].any()


def test_prompts_that_do_not_differ_have_no_effect(model: Any) -> None:
    mixed = [prompt for pair in zip(POSITIVE, NEGATIVE, strict=True) for prompt in pair]
    vector = contrast(model, mixed[::2] + mixed[1::2], mixed[1::2] + mixed[::2], progress=False)
    assert all(abs(effect) < 1 for effect in vector.effects.values())


def test_too_few_prompts_have_no_effects(model: Any) -> None:
    assert not contrast(model, POSITIVE[:2], NEGATIVE[:3], layers=2, progress=False).effects


@pytest.mark.slow
def test_a_compiled_model_gives_the_same(model: Any) -> None:
    compiled = demo_model()
    compiled.compile()
    due = contrast(model, POSITIVE, NEGATIVE, progress=False)
    found = contrast(compiled, POSITIVE, NEGATIVE, batch_size=4, progress=False)
    for layer in due:
        torch.testing.assert_close(found[layer], due[layer], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "magic"}, "the methods are 'mean', 'pca', 'probe'"),
        ({"layers": [6]}, "the model has layers 0 to 5 at `transformer.h`"),
        ({"layers": -1}, "the model has layers 0 to 5"),
        ({"at": "blocks"}, "no list of layers at 'blocks'"),
        ({"position": 50}, "position=50: a prompt has only"),
        ({"position": -50}, "position=-50: a prompt has only"),
    ],
)
def test_bad_arguments(model: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        contrast(model, POSITIVE, NEGATIVE, progress=False, **options)


def test_numbers_of_prompts(model: Any) -> None:
    with pytest.raises(ValueError, match="at least two of each"):
        contrast(model, POSITIVE, NEGATIVE[:1], progress=False)
    with pytest.raises(ValueError, match="needs pairs, and there are 6 positive prompts and 5"):
        contrast(model, POSITIVE, NEGATIVE[:5], method="pca", progress=False)
