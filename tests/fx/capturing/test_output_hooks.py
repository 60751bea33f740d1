"""Models of transformers that return hidden states and attentions are one graph from the first call on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from nnsight import NNsight

from ...conftest import same

TOKENS = torch.arange(14).reshape(2, 7) + 3


def llama(**options: Any) -> torch.nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=60, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options)).eval()


def gpt2(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **options)).eval()


def layer_of(model: Any) -> Any:
    return model.model.layers[0] if hasattr(model, "model") else model.transformer.h[0]


def edited_by_hand(module: torch.nn.Module, run: Callable[[], Any]) -> Any:
    """Run with the first layer's output doubled in place, before the hooks of transformers or after them."""

    def double(module: torch.nn.Module, args: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).mul_(2)

    with torch.no_grad(), layer_of(module).register_forward_hook(double):
        return run()


@pytest.mark.parametrize("make", [llama, pytest.param(gpt2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("asked", ["argument", "configuration"])
def test_hidden_states_are_returned_by_one_graph(make: Callable[..., torch.nn.Module], asked: str) -> None:
    arguments, options = ({"output_hidden_states": True}, {}) if asked == "argument" else ({}, {"output_hidden_states": True})
    module = make(**options)
    model = NNsight(module, compile={"backend": "aot_eager", "fullgraph": True})
    for number, tokens in enumerate((TOKENS, TOKENS + 1)):
        with torch.no_grad(), model.trace(tokens, **arguments) as tracer:
            layer_of(model).output[:] *= 2
            output = model.output.save()
        assert [reason.kind for reason in tracer.report.captures] == ["first"][number:]
        expected = edited_by_hand(module, lambda tokens=tokens: module(tokens, **arguments))
        same(list(output.hidden_states), list(expected.hidden_states))
        same(output.logits, expected.logits)


@pytest.mark.slow
def test_a_generation_returns_hidden_states() -> None:
    module = llama()
    options: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3, "do_sample": False}
    model = NNsight(module, compile={"backend": "aot_eager", "fullgraph": True})
    with model.trace(TOKENS, fn=module.generate, **options) as tracer:
        for _ in tracer.iter[:3]:
            layer_of(model).output[:] *= 2
        result = tracer.result.save()
    assert not tracer.report.breaks
    expected = edited_by_hand(module, lambda: module.generate(TOKENS, **options))
    assert torch.equal(result.sequences, expected.sequences)
    for here, there in zip(result.hidden_states, expected.hidden_states, strict=True):
        same(list(here), list(there))


@pytest.mark.parametrize("compile", [False, {"backend": "eager"}, {"backend": "aot_eager"}], ids=str)
@pytest.mark.parametrize("make", [llama, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_what_takes_the_place_of_an_output_is_recorded(make: Callable[..., torch.nn.Module], compile: Any) -> None:
    """The hooks of transformers run inside of the module's call, before a block gets the output; a skipped module has no call."""
    value = torch.linspace(-1, 1, 2 * 7 * 32).reshape(2, 7, 32)
    model = NNsight(make(), compile=compile)
    given = {"output_hidden_states": True, "use_cache": False}

    def replaced() -> Any:
        with model.trace(TOKENS, **given):
            layer_of(model).output = value
            states = model.output.hidden_states.save()
        return states

    def skipped() -> Any:
        with model.trace(TOKENS, **given):
            layer_of(model).skip(value)
            states = model.output.hidden_states.save()
        return states

    with torch.no_grad():
        plain = model._module(TOKENS, **given).hidden_states
        with model.edit() as edited:
            layer_of(edited).output = value
        for states in (replaced(), skipped(), replaced(), edited(TOKENS, **given).hidden_states):
            assert len(states) == 3
            same([states[0], states[1]], [plain[0], value])
            assert not torch.equal(states[2], plain[2])
        same(list(model._module(TOKENS, **given).hidden_states), list(plain))
