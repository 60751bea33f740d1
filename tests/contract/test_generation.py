"""Generation: steps, loops and results, compared with ``generate`` of transformers under plain hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel

from ..conftest import Hooks, both, same
from .guide import PARIS, encoded, language_model

GREEDY = {"do_sample": False}
NEW = 4


def reference(
    path: str, edit: Callable[[int, torch.Tensor], torch.Tensor | None] | None = None, tokens: int = NEW
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what ``generate`` writes, and every output of the module at ``path``, which ``edit`` may replace."""
    module, seen = language_model()._module, []

    def hook(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        replaced = None if edit is None else edit(len(seen), output)
        output = output if replaced is None else replaced
        seen.append(output.clone())
        return output

    with Hooks(module).output(path, hook).installed():
        return module.generate(**encoded(PARIS), max_new_tokens=tokens, **GREEDY), seen


def zero(step: int, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value)


def ends_early() -> Any:
    """Expect the warning about a loop that waits for a step that does not come."""
    return pytest.warns(UserWarning, match="The loop ended at .* the code after the loop were not run")


@both
def test_the_text_comes_from_the_generator_and_from_the_result(lm: LanguageModel, compile: bool) -> None:
    expected, seen = reference("transformer.h.2")
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY):
        hidden = lm.transformer.h[-1].output.save()
        text = lm.generator.output.save()
    same(text, expected)
    same(hidden, seen[0])
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        result = tracer.result.save()
    same(result, expected)
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        called = tracer.result().save()
    same(called, expected)
    assert lm.tokenizer.decode(text[0]).startswith(PARIS)


@both
@pytest.mark.parametrize(
    ("steps", "numbers"), [(slice(None), [0, 1, 2, 3]), (slice(1, 3), [1, 2]), (2, [2]), ([0, 2, 3], [0, 2, 3])], ids=str
)
def test_a_loop_reads_the_chosen_steps(lm: LanguageModel, compile: bool, steps: Any, numbers: list[int]) -> None:
    _, seen = reference("lm_head")
    warning = ends_early() if steps == slice(None) else contextlib.nullcontext()
    with warning, lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        logits = nnsight.save([])
        counted = nnsight.save([])
        for step in tracer.iter[steps]:
            logits.append(lm.lm_head.output)
            counted.append(step)
    same(logits, [seen[number] for number in numbers])
    assert counted == numbers


@both
def test_a_condition_on_the_step(lm: LanguageModel, compile: bool) -> None:
    def edit(step: int, value: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(value) if step == 2 else None

    expected, seen = reference("transformer.h.0", edit)
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        outputs = [].save()
        for step in tracer.iter[:NEW]:
            if step == 2:
                lm.transformer.h[0].output[:] = 0
            outputs.append(lm.transformer.h[0].output)
    same(outputs, seen)
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        with tracer.iter[:NEW] as step:
            if step == 2:
                lm.transformer.h[0].output[:] = 0
        text = tracer.result.save()
    same(text, expected)
    assert not torch.equal(expected, reference("transformer.h.0")[0])


@both
def test_all_steps_are_edited(lm: LanguageModel, compile: bool) -> None:
    expected, _ = reference("transformer.h.0", zero)
    with ends_early():
        with lm.generate(max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
            with tracer.invoke(PARIS):
                hidden = [].save()
                for _ in tracer.all():
                    lm.transformer.h[0].output[:] = 0
                    hidden.append(lm.transformer.h[-1].output)
            with tracer.invoke():
                text = tracer.result.save()
    same(text, expected)
    assert len(hidden) == NEW
    with ends_early():
        with lm.generate(max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
            with tracer.invoke(PARIS):
                with tracer.all():
                    lm.transformer.h[0].output[:] = 0
            with tracer.invoke():
                again = tracer.result.save()
    same(again, expected)


@both
def test_steering_while_generating(lm: LanguageModel, compile: bool) -> None:
    direction = torch.randn(16, generator=torch.Generator().manual_seed(1)) * 8
    expected, _ = reference("transformer.h.1", lambda step, value: value + direction)
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        for _ in tracer.iter[:NEW]:
            lm.transformer.h[1].output += direction
        text = tracer.result.save()
    same(text, expected)
    assert not torch.equal(text, reference("transformer.h.1")[0])
