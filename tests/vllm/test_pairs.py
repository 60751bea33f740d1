"""Layers that return two tensors: whether the hidden state is their sum, or the first one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, StableLmConfig

from nnsight import LanguageModel
from nnsight.vllm import VLLM
from nnsight.vllm.steering.graph_parts import add_part, edited, write
from nnsight.vllm.steering.pairs import SUM, UNKNOWN, WHOLE, find_forms, form_of
from nnsight.vllm.steering.tables import Steering, tables_part

from .llama import GREEDY, HIDDEN, OPTIONS, close, tokens

# -- plain modules ----------------------------------------------------------------------------------------------------


class Adding(torch.nn.Module):
    """A layer that adds the residual stream first, in place, as the fused norms of vLLM do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden if residual is None else residual.add_(hidden)
        return self.inner(torch.nn.functional.rms_norm(residual, (4,))), residual


class Whole(Adding):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return hidden + self.inner(hidden), hidden


class Mixing(Adding):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return self.inner(hidden), hidden if residual is None else 2 * residual + hidden


class Single(Adding):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return self.inner(hidden)


class Norm(torch.nn.Module):
    def __init__(self, ignores: bool) -> None:
        super().__init__()
        self.ignores = ignores

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        whole = hidden if residual is None or self.ignores else hidden + residual
        return torch.nn.functional.rms_norm(whole, (4,)), residual


class Attention(torch.nn.Identity):
    """Attention without a cache: its output was never written to."""

    def get_kv_cache_spec(self) -> None: ...

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.randn(hidden.shape) * 1e30


class Attending(Adding):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden, residual = super().forward(hidden, residual)
        return hidden + self.attention(hidden), residual


class Model(torch.nn.Module):
    do_not_compile = False

    def __init__(self, kind: Any, ignores: bool = False, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(kind() for _ in range(count))
        self.norm = Norm(ignores)
        self.do_not_compile = False

    def forward(self, hidden: torch.Tensor) -> Any:
        assert self.do_not_compile
        residual = None
        for layer in self.layers:
            made = layer(hidden, residual)
            hidden, residual = made if isinstance(made, tuple) else (made, None)
        return self.norm(hidden, residual)


def forms(model: Any) -> list[str]:
    find_forms(model, lambda: model(torch.randn(5, 4)))
    assert not model.do_not_compile
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    return [layer.nnsight_pair for layer in model.layers]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(Adding), [SUM] * 3),
        (Model(Adding, count=1), [SUM]),
        (Model(Attending), [SUM] * 3),
        (Model(Whole, ignores=True), [WHOLE] * 3),
        (Model(Whole, ignores=True, count=1), [WHOLE]),
        (Model(Mixing), [UNKNOWN, UNKNOWN, SUM]),
        (Model(Single), [SUM] * 3),
    ],
)
def test_the_next_module_shows_the_form(model: Any, expected: list[str]) -> None:
    assert forms(model) == expected


def test_a_value_that_is_changed_between_layers_has_the_form_of_its_class() -> None:
    model: Any = Model(Adding)
    model.layers[0].register_forward_hook(lambda module, args, made: made)

    def run() -> None:
        hidden, residual = model.layers[0](torch.randn(5, 4), None)
        hidden, residual = model.layers[1](hidden + 1, residual)
        model.norm(*model.layers[2](hidden, residual))

    find_forms(model, run)
    assert [layer.nnsight_pair for layer in model.layers] == [SUM] * 3


def test_an_unknown_form_is_an_error() -> None:
    model: Any = Model(Mixing)
    forms(model)
    with pytest.raises(ValueError, match=r"`model.layers.0.output` is a pair, .* Use `.output`"):
        form_of(model.layers[0], "model.layers.0.output")


def test_the_layers_of_a_model_that_fails_are_taken_to_return_sums(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Model(Adding)
    find_forms(model, lambda: model(torch.randn(5, 3)))
    assert {layer.nnsight_pair for layer in model.layers} == {SUM}
    assert "failed on a few tokens" in caplog.text


@pytest.mark.parametrize("batched", [False, True])
def test_tables_edit_a_whole_hidden_state(batched: bool) -> None:
    hidden, residual = torch.randn(5, 4), torch.randn(5, 4)
    module: Any = torch.nn.Identity()
    module.nnsight_rows, module.nnsight_calls, module.nnsight_parts = torch.tensor([0, 1, 1, 0, 1, 0, 0]), [], []
    module.nnsight_returns_parts, module.nnsight_batched = False, batched
    add_part(module, tables_part(1, 4, torch.float32), 1, {})
    write(module, 1, Steering.of(4, None, 0.5, None, 0).parts)
    found, kept = edited(module, (hidden[None] if batched else hidden, residual))
    assert kept is residual and found.dim() == 2 + batched
    torch.testing.assert_close(found.reshape(5, 4), torch.where(module.nnsight_rows[:5, None] == 1, hidden / 2, hidden))


# -- an engine --------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_environment")
def test_a_model_whose_layers_return_the_whole_hidden_state(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("token*"):
        shutil.copy(file, tmp_path / file.name)
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = StableLmConfig(vocab_size=512, max_position_embeddings=512, initializer_range=0.15, bos_token_id=0, eos_token_id=1, **sizes)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    reference = LanguageModel(str(tmp_path), dtype="float32", dispatch=True)
    model = VLLM(tmp_path, **OPTIONS)
    ids, vector = [5, 6, 7, 8, 20], torch.randn(HIDDEN)

    def expected(edit: Any) -> torch.Tensor:
        with torch.no_grad(), reference.trace([ids]):
            hidden = reference.model.layers[1].output
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            hidden[:] = edit(hidden)
            logits = reference.lm_head.output[0, -1:].save()
        return logits

    with model.trace(ids, **GREEDY):
        found = [layer.residual for layer in model.model.layers].save()
    with torch.no_grad(), reference.trace([ids]):
        outputs = [layer.output for layer in reference.model.layers].save()
    for mine, theirs in zip(found, outputs, strict=True):
        close(mine, (theirs[0] if isinstance(theirs, tuple) else theirs)[0])
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(ids):
            model.model.layers[1].residual[:] *= 0.5
            in_place = model.logits.output.save()
        with tracer.invoke(ids):
            model.model.layers[1].residual = model.model.layers[1].residual + vector
            replaced = model.logits.output.save()
        with tracer.invoke(ids):
            model.model.layers[1].steer(scale=0.5, add=vector)
            steered, result = model.logits.output.save(), tracer.result.save()
    close(in_place, expected(lambda hidden: hidden * 0.5))
    close(replaced, expected(lambda hidden: hidden + vector))
    close(steered, expected(lambda hidden: hidden * 0.5 + vector))
    assert len(tokens(result)) == GREEDY["max_tokens"]
