"""Edits at each step of a generation: as programs where every step is the same, as Python otherwise; against plain hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from nnsight import LanguageModel, UncompiledWarning, fx

from ..conftest import Hooks

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=97, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    return GPT2LMHeadModel(config).eval()


def hooked(net: Any, ids: torch.Tensor, edit: Callable[[torch.Tensor, int], torch.Tensor | None]) -> torch.Tensor:
    """Return the scores of a generation in which ``edit(output, step)`` replaces what layer 1 returns."""
    step = -1

    def replace(output: torch.Tensor) -> torch.Tensor | None:
        nonlocal step
        step += 1
        return edit(output, step)

    with Hooks(net).output("transformer.h.1", replace).installed():
        return torch.stack(net.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY).scores)


def scores(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.stack(model.generate(ids, **{**GREEDY, **options}).scores)


@pytest.mark.parametrize("cache", [None, pytest.param("static", marks=pytest.mark.slow)])
def test_an_edit_that_is_the_same_at_each_step_runs_no_python_of_it(net: Any, cache: str | None) -> None:
    ids, direction, alpha, calls = torch.randint(1, 97, (2, 6)), 5 * torch.randn(32), 1.0, []

    def counted(value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return value

    with LanguageModel(net).edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            hidden = edited.transformer.h[1].output
            hidden[:, -1] += alpha * counted(direction)
    due = hooked(net, ids, lambda output, step: torch.cat([output[:, :-1], output[:, -1:] + direction], 1))
    torch.testing.assert_close(scores(edited, ids), due)
    assert len(calls) == 5
    edited.compile(backend="aot_eager")
    options = {} if cache is None else {"cache_implementation": cache}
    for _ in range(2):
        torch.testing.assert_close(scores(edited, ids, **options), due, atol=1e-4, rtol=1e-4)
    calls.clear()
    fx.counters.reset()
    for factor in (1.0, 2.0, -1.0):
        edited.params["alpha"] = factor
        due = hooked(net, ids, lambda output, step, f=factor: torch.cat([output[:, :-1], output[:, -1:] + f * direction], 1))  # type: ignore[misc]
        torch.testing.assert_close(scores(edited, ids, **options), due, atol=1e-4, rtol=1e-4)
    assert (len(calls), fx.counters.recordings, fx.counters.compiles) == (0, 0, 0)
    torch.testing.assert_close(scores(edited, ids, compile=False), due)


@pytest.mark.slow
def test_an_edit_that_tells_steps_apart_does(net: Any) -> None:
    ids, direction = torch.randint(1, 97, (2, 6)), 5 * torch.randn(32)
    with LanguageModel(net).edit() as (tracer, edited):
        for step in tracer.iter[:]:
            edited.transformer.h[1].output[:] += direction / (1 + step)
    due = hooked(net, ids, lambda output, step: output + direction / (1 + step))
    torch.testing.assert_close(scores(edited, ids), due)
    edited.compile(backend="aot_eager")
    torch.testing.assert_close(scores(edited, ids), due, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_edit_without_a_loop_is_for_the_prompt(net: Any) -> None:
    ids, direction = torch.randint(1, 97, (2, 6)), 5 * torch.randn(32)
    with LanguageModel(net).edit() as edited:
        edited.transformer.h[1].output[:] += direction
    due = hooked(net, ids, lambda output, step: None if step else output + direction)
    torch.testing.assert_close(scores(edited, ids), due)
    edited.compile(backend="aot_eager")
    torch.testing.assert_close(scores(edited, ids), due, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_two_edits_of_which_one_is_for_the_prompt(net: Any) -> None:
    ids, direction = torch.randint(1, 97, (2, 6)), 5 * torch.randn(32)
    with LanguageModel(net).edit() as (tracer, first):
        for _ in tracer.iter[:]:
            first.transformer.h[1].output[:] += direction
    with first.edit() as both:
        both.transformer.h[1].output[:] *= 0.5
    due = hooked(net, ids, lambda output, step: (output + direction) * (1.0 if step else 0.5))
    torch.testing.assert_close(scores(both, ids), due)
    both.compile(backend="aot_eager")
    torch.testing.assert_close(scores(both, ids), due, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_edit_that_needs_values_runs_as_python_at_each_step(net: Any) -> None:
    ids, direction = torch.randint(1, 97, (2, 6)), 5 * torch.randn(32)
    with LanguageModel(net).edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            hidden = edited.transformer.h[1].output
            if hidden.sum() > 0:
                hidden += direction
            else:
                hidden -= direction
    due = hooked(net, ids, lambda output, step: output + direction if output.sum() > 0 else output - direction)
    torch.testing.assert_close(scores(edited, ids), due)
    edited.compile(backend="aot_eager")
    with pytest.warns(UncompiledWarning, match="run as Python in each call"):
        torch.testing.assert_close(scores(edited, ids), due, atol=1e-4, rtol=1e-4)


def test_a_loop_that_is_all_of_an_edit_ends_with_the_model(net: Any) -> None:
    ids = torch.randint(1, 97, (2, 6))
    with LanguageModel(net).edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            edited.transformer.h[1].output[:] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        edited(ids)
        edited.generate(ids, **GREEDY)
        with edited.trace(ids):
            logits = edited.lm_head.output.save()
    assert logits.shape == (2, 6, 97)
    with LanguageModel(net).edit() as (tracer, late):
        for _ in tracer.iter[3:]:
            late.transformer.h[1].output[:] = 0.0
    with pytest.warns(UserWarning, match="loop ended"):  # it has done nothing at all
        late(ids)
