"""Every way of generating, with a block that edits and reads each call of the model: eager and compiled traces against plain hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation.streamers import BaseStreamer

import nnsight
from nnsight import LanguageModel

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "several samples": {"do_sample": True, "num_return_sequences": 2},
    "beam search": {"num_beams": 3},
    "several beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams, static cache": {"num_beams": 2, "cache_implementation": "static"},
    "repetition penalty": {"repetition_penalty": 1.3},
    "assisted": {"assistant_model": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "streamed": {"streamer": True},
    "static cache": {"cache_implementation": "static"},
    "static cache, sampling": {"cache_implementation": "static", "do_sample": True},
    "no cache": {"use_cache": False},
    "least number": {"min_new_tokens": 4},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
}

DIRECTION = 2 * torch.randn(32, generator=torch.Generator().manual_seed(2))


class Streamer(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[list[int] | None] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.got.append(None)


def gpt2(seed: int) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=97, bos_token_id=0, eos_token_id=5, pad_token_id=0, initializer_range=0.5
    )
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def net() -> Any:
    return gpt2(0)


@pytest.fixture(scope="module")
def models(net: Any) -> dict[bool, LanguageModel]:
    return {False: LanguageModel(net), True: LanguageModel(net, compile={"backend": "aot_eager"})}


def options_of(mode: str) -> tuple[dict[str, Any], Streamer | None]:
    """Return the options of ``generate``, and the streamer among them."""
    options = {"max_new_tokens": 6, "do_sample": False, **MODES[mode]}
    if options.get("assistant_model"):
        options["assistant_model"] = gpt2(1)
    streamer = Streamer() if options.get("streamer") else None
    return options | ({} if streamer is None else {"streamer": streamer}), streamer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [1, 2])
def test_each_step_is_edited_and_read(net: Any, models: dict[bool, LanguageModel], mode: str, compile: bool, batch: int) -> None:
    if batch == 2 and mode in ("assisted", "prompt lookup", "streamed"):  # of transformers, for one row only
        batch = 1
    ids, step = torch.randint(6, 97, (batch, 8 - batch), generator=torch.Generator().manual_seed(batch)), -1

    def count(*_: Any) -> None:
        nonlocal step
        step += 1

    def steer(module: Any, args: Any, output: torch.Tensor) -> None:
        output[:, -1] += DIRECTION * (0.1 * min(step, 3))

    handles = [net.register_forward_pre_hook(count), net.transformer.h[1].register_forward_hook(steer)]
    options, due_stream = options_of(mode)
    torch.manual_seed(7)
    due = net.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for handle in handles:
        handle.remove()

    model, (options, stream) = models[compile], options_of(mode)
    torch.manual_seed(7)
    with model.generate(ids, **options) as tracer:
        kept = nnsight.save([])
        for number in tracer.iter[: step + 1]:
            model.transformer.h[1].output[:, -1] += DIRECTION * (0.1 * min(number, 3))
            kept.append(model.lm_head.output[:, -1].argmax(-1))
        found = tracer.result.save()
    assert len(kept) == step + 1
    assert tracer.report.mode == ("compiled" if compile else "eager")
    assert not tracer.report.breaks
    if stream is not None and due_stream is not None:
        assert stream.got == due_stream.got
    if isinstance(due, torch.Tensor):
        assert torch.equal(found, due)
        return
    assert torch.equal(found.sequences, due.sequences)
    for one, other in zip(found.scores or (), due.scores or (), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
