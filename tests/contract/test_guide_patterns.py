"""The user guide's common patterns: patching, lens, ablation, steering, modules of one's own inside a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel, demo

from .guide import (
    HEADS,
    LAYERS,
    PARIS,
    ROME,
    WIDTH,
    Hooks,
    both,
    close,
    demo_model,
    encoded,
    hooked,
    ids,
    new_tower,
    same,
)

# -- activation patching ----------------------------------------------------------------------------------------------


@both
def test_activation_patching_in_one_trace(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ROME):
            clean = lm.transformer.h[1].output[:, -1, :]
            barrier()
        with tracer.invoke(PARIS):
            barrier()
            lm.transformer.h[1].output[:, -1, :] = clean
            patched = lm.lm_head.output[:, -1].save()
    source = hooked(lm, ROME)[1]["transformer.h.1"][:, -1]

    def patch(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, -1] = source
        return value

    close(patched, hooked(lm, PARIS, transformer__h__1=patch)[0].logits[:, -1])
    assert (patched - lm._module(**encoded(PARIS)).logits[:, -1]).abs().max() > 0.01


def test_patching_moves_a_fact() -> None:
    model = demo_model()
    layer = model.transformer.h[demo.PATCH_LAST_LAYER]
    with model.trace(compile=False) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ROME):
            rome = layer.output[:, -1, :]
            barrier()
        with tracer.invoke(PARIS):
            barrier()
            layer.output[:, -1, :] = rome
            answer = model.lm_head.output[0, -1].argmax().save()
    assert model.tokenizer.decode(answer) == " Rome"


# -- modules applied to the block's own values ------------------------------------------------------------------------


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


@both
def test_a_module_called_in_a_block_passes_no_location_and_no_hook(model: Any, compile: bool) -> None:
    own = new_tower() if compile else model
    calls: list[int] = []
    handle = own._module.head.register_forward_hook(lambda *_: calls.append(1))
    with own.trace(ids(), compile=False):
        early = own.head(own.norm(own.layers[0].output[0])).save()
        assert not calls
        out = own.head.output.save()
    handle.remove()
    assert len(calls) == 1
    same(out, own._module(ids()))
    with own.trace(ids(), compile=compile):
        again = own.head(own.norm(own.layers[0].output[0])).save()
        out = own.head.output.save()
    same(again, early)
    same(out, own._module(ids()))


class Autoencoder(torch.nn.Module):
    """A small sparse autoencoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(width, 2 * width)
        self.decoder = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(x)))


@both
def test_an_autoencoder_with_locations_of_its_own(compile: bool) -> None:
    model = new_tower()
    model.sae = Autoencoder(WIDTH)
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids()):
            hidden = model.layers[1].output[0]
            reconstructed = model.sae(hidden, hook=True)
            model.layers[1].output = (reconstructed, *model.layers[1].output[1:])
            out = model.output.save()
        with tracer.invoke():
            given = model.sae.input.save()
            activations = model.sae.output.save()
    module = model._module
    hidden = hooked(model, ids())[1]["layers.1"][0]
    same((given, activations), (hidden, module.sae(hidden)))
    same(out, hooked(model, ids(), layers__1=lambda value: (module.sae(value[0]), value[1]))[0])


@both
def test_without_a_hook_an_added_module_has_no_locations(compile: bool) -> None:
    model = new_tower()
    model.sae = Autoencoder(WIDTH)
    with pytest.raises(ValueError, match="was not provided"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(ids()):
                model.layers[1].output = (model.sae(model.layers[1].output[0]), *model.layers[1].output[1:])
            with tracer.invoke():
                model.sae.output.save()


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


# -- ablation, steering, attention --------------------------------------------------------------------------------------


@both
def test_an_ablation_next_to_the_baseline(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids()):
            baseline = model.head.output[:, -1].save()
        with tracer.invoke(ids()):
            model.layers[1].mlp.output[:] = 0
            ablated = model.head.output[:, -1].save()
    close(baseline, model._module(ids())[:, -1])
    close(ablated, hooked(model, ids(), layers__1__mlp=torch.zeros_like)[0][:, -1])
    assert (baseline - ablated).abs().mean() > 1e-3


@both
def test_steering_adds_a_direction(lm: LanguageModel, compile: bool) -> None:
    direction = torch.randn(16, generator=torch.Generator().manual_seed(2))
    for strength in (0.5, 4.0):
        with lm.trace(PARIS, compile=compile):
            lm.transformer.h[1].output[:, -1, :] += direction * strength
            logits = lm.lm_head.output.save()

        def steer(value: torch.Tensor, strength: float = strength) -> torch.Tensor:
            value = value.clone()
            value[:, -1] += direction * strength
            return value

        same(logits, hooked(lm, PARIS, transformer__h__1=steer)[0].logits)


@both
def test_new_vectors_and_strengths_compile_nothing(lm: LanguageModel, compile: bool) -> None:
    from nnsight import fx

    def run(seed: int) -> torch.Tensor:
        direction = torch.randn(16, generator=torch.Generator().manual_seed(seed))
        with lm.trace(PARIS, compile=compile):
            lm.transformer.h[0].output[:, -1, :] += direction
            logits = lm.lm_head.output.save()
        return logits

    first = run(1)
    fx.counters.reset()
    second = run(2)
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0
    assert not torch.equal(first, second)


@both
def test_attention_patterns_of_a_module_that_returns_them(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        weights = model.layers[1].attn.output[1].save()
    same(weights, hooked(model, ids())[1]["layers.1.attn"][1])
    close(weights.sum(-1), torch.ones(1, 5))


@both
def test_one_head_is_ablated(model: Any, compile: bool) -> None:
    size = WIDTH // HEADS
    with model.trace(ids(), compile=compile):
        mixed = model.layers[0].attn.project.input
        mixed[..., size:] = 0
        out = model.output.save()

    def zero_head(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = args[0].clone()
        changed[..., size:] = 0
        return (changed,), kwargs

    same(out, Hooks(model._module).input("layers.0.attn.project", zero_head)(ids()))


@both
def test_noise_and_restoring_traces_a_cause(model: Any, compile: bool) -> None:
    """Causal tracing: corrupt the embeddings, put back one clean state, and see what that restores."""
    noise = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(3))
    with model.session():
        with model.trace(ids(), compile=compile):
            clean = model.layers[1].output[0].clone()
            right = model.head.output[0, -1].save()
        with model.trace(ids(), compile=compile):
            model.embed.output += noise
            wrong = model.head.output[0, -1].save()
        with model.trace(ids(), compile=compile):
            model.embed.output += noise
            model.layers[1].output[0][:] = clean
            restored = model.head.output[0, -1].save()
    same(right, model._module(ids())[0, -1])
    same(wrong, hooked(model, ids(), embed=lambda value: value + noise)[0][0, -1])
    same(restored, right)
    assert not torch.equal(wrong, right)


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
def test_the_means_of_many_prompts_make_a_direction(lm: LanguageModel, compile: bool) -> None:
    def mean_of(prompts: list[str]) -> torch.Tensor:
        with lm.session():
            total = nnsight.save([])
            for prompt in prompts:
                with lm.trace(prompt, compile=compile):
                    total.append(lm.transformer.h[1].output[0, -1])
        return torch.stack(total).mean(0)

    found = mean_of([PARIS, ROME])
    expected = torch.stack([hooked(lm, prompt)[1]["transformer.h.1"][0, -1] for prompt in (PARIS, ROME)]).mean(0)
    same(found, expected)
