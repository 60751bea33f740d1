"""Models quantised with bitsandbytes: scanned, read, edited and generated with, against plain hooks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nnsight import TransformersModel

from ..conftest import Hooks, both
from .tiny_tasks import WORDS, tokenizer

NAMES = ["nf4", "fp4", "int8"]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # those of bitsandbytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def quantised(folder: Path, name: str, compile: Any) -> Any:
    return TransformersModel(folder, task="text-generation", dtype=name, compile=compile)


@both
@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_model_is_scanned_read_edited_and_generated_with(folder: Path, name: str, compile: bool) -> None:
    model = quantised(folder, name, compile)
    layer = model.model.layers[0].mlp
    with model.scan("the cat"):
        shape = layer.output.shape.save()
    assert shape == (1, 4, 64) and not model.dispatched
    with model.trace("the cat sat") as tracer:
        hidden = layer.output.clone().save()
        layer.output = layer.output * 0
        logits = model.lm_head.output.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    plain = model._module
    assert type(plain.model.layers[0].mlp.up_proj).__name__ == ("Linear8bitLt" if name == "int8" else "Linear4bit")
    hooks = Hooks(plain)
    hooks.output("model.layers.0.mlp", hooks.keep("hidden")).output("model.layers.0.mlp", torch.zeros_like)
    with hooks.installed():  # without gradients bitsandbytes repacks the weights, and rounds in another way
        expected = plain(**model.tokenizer("the cat sat", return_tensors="pt")).logits
    torch.testing.assert_close(hidden, hooks.seen["hidden"], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-3)

    # The first call without gradients has to be a plain one: torch.compile does not follow it as bitsandbytes repacks the weights.
    ids = plain.generate(**model.tokenizer("the cat", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert torch.equal(model.generate("the cat", max_new_tokens=2, do_sample=False), ids)


@both
@pytest.mark.parametrize("name", NAMES)
def test_gradients_pass_through_quantised_layers(folder: Path, name: str, compile: bool) -> None:
    model = quantised(folder, name, compile)
    with model.trace("the cat sat") as tracer:
        hidden = model.model.layers[0].mlp.output
        with model.lm_head.output.sum().backward():
            gradient = hidden.grad.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    hooks = Hooks(model._module)
    hooks.output("model.layers.0.mlp", lambda output: hooks.seen.update(hidden=output))
    with hooks.installed():
        loss = model._module(**model.tokenizer("the cat sat", return_tensors="pt")).logits.sum()
    (expected,) = torch.autograd.grad(loss, hooks.seen["hidden"])
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-3)


def test_a_backward_pass_that_the_block_runs(folder: Path) -> None:
    """The parameters are a subclass of tensors that sees calls, which dynamo hides while a graph with them runs."""
    model = quantised(folder, "nf4", True)
    with model.trace("the cat sat") as tracer:
        model.lm_head.output.sum().backward()
    assert tracer.report.mode == "compiled"
    found = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    model._module(**model.tokenizer("the cat sat", return_tensors="pt")).logits.sum().backward()
    torch.testing.assert_close(found, model.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-4)


def test_the_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="bitsandbytes"):
        quantised(folder, "nf4", False)
