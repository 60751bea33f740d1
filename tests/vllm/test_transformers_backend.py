"""Models that vLLM runs with its Transformers backend, whose values are `[1, tokens, hidden]`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nnsight import LanguageModel
from nnsight.vllm import VLLM
from nnsight.vllm.worker.request_rows import RequestRows, RowView

from .llama import GREEDY, HIDDEN, LAYERS, OPTIONS, PROMPTS, adding, close, generated, states, tokens

# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "mine"),
    [
        ((1, 6, 4), (2, 4)),
        ((1, 6), (2,)),
        ((6, 4), (2, 4)),
        ((1, 6, 3, 4), (2, 3, 4)),
        ((1, 3, 6, 4), (2, 3, 4)),
        ((1, 5, 4), None),
        ((1, 4, 6), None),
        ((5,), None),
    ],
)
def test_rows_are_found_in_a_batch_of_one_sequence(shape: tuple[int, ...], mine: tuple[int, ...] | None) -> None:
    rows, whole = RequestRows(1, 2, 6, True), torch.randn(shape)
    view = RowView(rows, "x", whole)
    assert tuple(view.value.shape) == (shape if mine is None else mine)
    if mine is None:
        return
    axis = shape.index(6)
    expected = whole.clone()
    expected.narrow(axis, 1, 2).add_(1)
    view.value.add_(1)
    assert view.put_back(view.value) is whole
    assert torch.equal(whole, expected)
    left = RowView(rows, "x", whole).put_back(torch.zeros(mine))
    assert left is not whole and not left.narrow(axis, 1, 2).any() and left.shape == whole.shape
    assert torch.equal(left.narrow(axis, 3, 3), expected.narrow(axis, 3, 3))


def test_rows_among_as_many_heads_are_refused() -> None:
    whole = torch.randn(1, 3, 3, 4)
    with pytest.raises(ValueError, match="as many heads as the step has tokens"):
        RowView(RequestRows(0, 1, 3, True), "x", whole)
    assert RowView(RequestRows(0, 3, 3, True), "x", whole).value.shape == (3, 3, 4)


# -- engines ----------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "everywhere": {},
    "tapped": {"taps": ["model.layers.*"], "edits": ["model.layers.*"]},
    "captured": {"captures": ["model.layers.*", "model.embed_tokens.input"]},
}


@pytest.fixture(scope="module")
def qwen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2, because vLLM changes the class of such a model, and other tests use that of the Llama."""
    made = tmp_path_factory.mktemp("qwen2")
    for file in folder.glob("*token*"):
        shutil.copy(file, made)
    sizes = {"vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 256, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, **heads, initializer_range=0.15, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    Qwen2ForCausalLM(config).float().save_pretrained(made)
    return made


@pytest.fixture(scope="module", params=KINDS)
def backend(qwen: Path, known: LanguageModel, request: pytest.FixtureRequest) -> VLLM:
    return VLLM(qwen, **OPTIONS, model_impl="transformers", **KINDS[request.param], dispatch=True)


editable = pytest.mark.parametrize("backend", ["everywhere", "tapped"], indirect=True)


@pytest.fixture(scope="module")
def known(qwen: Path) -> LanguageModel:
    """The same in transformers, loaded before vLLM changes its class: `do_not_compile` is then read in its calls."""
    model = LanguageModel(qwen, dtype="float32", dispatch=True)
    for module in model._module.modules():
        module.do_not_compile = True  # type: ignore[assignment]
    return model


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_environment")
def test_requests_see_their_own_tokens(backend: VLLM, known: LanguageModel) -> None:
    ids = [backend.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    with backend.trace(**GREEDY) as tracer:
        found = {}.save()
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                hidden = [layer.residual for layer in backend.model.layers]
                found[number] = [*hidden, backend.logits.output]
                later = found[number, "later"] = []
                for _ in tracer.iter[1:3]:
                    later.append(backend.model.layers[1].output)  # noqa: PERF401 - a step is a visit of the block
    for number, prompt in enumerate(ids):
        *expected, logits = states(known, prompt)
        assert len(expected) == LAYERS
        for mine, theirs in zip(found[number], [*expected, logits[-1:]], strict=True):
            close(mine, theirs)
        assert [tuple(hidden.shape) for hidden in found[number, "later"]] == [(1, HIDDEN)] * 2


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_environment")
@editable
def test_edits_reach_their_own_request(backend: VLLM, known: LanguageModel) -> None:
    ids = [backend.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0))
    layer = backend.model.layers[1]
    with backend.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for _ in tracer.iter[:6]:
                layer.residual += vector
            in_place = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            for _ in tracer.iter[:6]:
                layer.output = layer.output + vector
            replaced = tracer.result.save()
        with tracer.invoke(PROMPTS[2]):
            layer.steer(add=vector, scale=0.5)
            steered = tracer.result.save()
        with tracer.invoke(PROMPTS[0]):
            untouched = tracer.result.save()
    expected = [generated(known, ids[number], {1: adding(vector)}) for number in (0, 1)]
    expected += [generated(known, ids[2], {1: lambda hidden: hidden * 0.5 + vector}), generated(known, ids[0])]
    assert [tokens(result) for result in (in_place, replaced, steered, untouched)] == expected
