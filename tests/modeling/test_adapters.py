"""Adapters of the package `peft`, compared with models that peft itself has adapted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

from nnsight import TransformersModel

from .tiny_tasks import TINY, WORDS, tokenizer

peft = pytest.importorskip("peft")

#: What peft asks models of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[2, 5, 6, 7]])


def adapted(folder: Path, seed: int, *targets: str) -> torch.Tensor:
    """Write an adapter, and return what the model with it gives."""
    torch.manual_seed(seed)
    options = {"init_lora_weights": False, "lora_dropout": 0.5, "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base(), peft.LoraConfig(r=2 + seed, target_modules=list(targets), **options)).eval()
    model.save_pretrained(folder)
    logits: torch.Tensor = model(IDS).logits
    return logits


def base() -> torch.nn.Module:
    return TINY["text-generation"].module()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str | None, torch.Tensor]]:
    """Return a folder with a model and two adapters, and the logits with each of these and with none."""
    folder = tmp_path_factory.mktemp("adapters")
    base().save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    found: dict[str | None, torch.Tensor] = {None: base()(IDS).logits}
    found["one"] = adapted(folder / "one", 1, "c_attn", "c_fc")
    found["two"] = adapted(folder / "two", 2, "c_proj")
    return folder, found


def check(model: TransformersModel, expected: torch.Tensor) -> None:
    with model.trace(IDS):
        logits = model.lm_head.output.save()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["module", "lazy", pytest.param("compiled", marks=pytest.mark.slow)])
def test_adapters_come_change_and_go(kind: str, made: tuple[Path, dict[str | None, torch.Tensor]]) -> None:
    folder, expected = made
    wrapped: Any = folder / "base" if kind == "lazy" else base()
    compile: Any = {"backend": "eager"} if kind == "compiled" else False
    model = TransformersModel(wrapped, tokenizer=tokenizer(), peft=folder / "one", compile=compile)
    inner = model.transformer.h[0].attn.c_attn
    assert inner.path == "model.transformer.h.0.attn.c_attn" and inner.base_layer.path == f"{inner.path}.base_layer"
    for name in ("one", "two", None, "one"):
        model.load_adapter(None if name is None else folder / name)
        check(model, expected[name])
        assert model.transformer.h[0].attn.c_attn is inner
    assert all(weight.requires_grad for path, weight in model.named_parameters() if "lora" not in path)


def test_before_loading_and_beside_other_changes(made: tuple[Path, dict[str | None, torch.Tensor]]) -> None:
    folder, expected = made
    model = TransformersModel(folder / "base")
    model.transformer.h[1].mlp.extra = torch.nn.Identity()
    for name in ("two", "one"):
        model.load_adapter(folder / name)
    assert not model.dispatched and model.transformer.h[0].attn.c_attn.base_layer.weight.is_meta
    check(model, expected["one"])
    assert model.dispatched and isinstance(model._module.transformer.h[1].mlp.extra, torch.nn.Identity)

    other = TransformersModel(folder / "base", peft=folder / "two")
    other.load_adapter(None)
    check(other, expected[None])
    assert not [path for path, _ in other._module.named_modules() if "lora" in path]


def test_adapters_that_do_not_fit(made: tuple[Path, dict[str | None, torch.Tensor]], tmp_path: Path) -> None:
    folder, expected = made
    tokens = {"vocab_size": len(WORDS), "bos_token_id": 2, "eos_token_id": 3, "n_head": 2}
    for sizes, message in (({"n_embd": 32, "n_layer": 2}, r"\(2, 16\)|\(3, 16\)"), ({"n_embd": 16, "n_layer": 3}, "do not match")):
        model = TransformersModel(t.GPT2LMHeadModel(t.GPT2Config(**tokens, **sizes)))
        with pytest.raises(ValueError, match=f"does not fit this GPT2LMHeadModel.*({message})"):
            model.load_adapter(folder / "one")
        assert not [path for path, _ in model._module.named_modules() if "lora" in path]
    with pytest.raises(ValueError, match=r"does not fit this BertForMaskedLM: Target modules"):
        TransformersModel(TINY["fill-mask"].module(), peft=folder / "one")
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    peft.get_peft_model(base(), prompts).save_pretrained(tmp_path)
    model = TransformersModel(folder / "base", peft=folder / "one")
    with pytest.raises(ValueError, match=r"changes prompts and no modules"):
        model.load_adapter(tmp_path)
    check(model, expected[None])
