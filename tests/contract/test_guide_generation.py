"""The user guide and the design document on generation: steps, loops, results; against ``generate`` with plain hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel

from .guide import PARIS, ROME, WIDTH, both, close, demo_model, encoded, ids, language_model, new_tower, same, tower

GREEDY = {"do_sample": False}
NEW = 4


def reference(
    path: str, edit: Callable[[int, torch.Tensor], torch.Tensor | None] | None = None, tokens: int = NEW
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what ``generate`` writes, and every output of the module at ``path``, which ``edit`` may replace."""
    module, seen = language_model()._module, []

    def hook(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        output = output.clone()
        replaced = None if edit is None else edit(len(seen), output)
        output = output if replaced is None else replaced
        seen.append(output.clone())
        return output

    handle = module.get_submodule(path).register_forward_hook(hook)
    try:
        return module.generate(**encoded(PARIS), max_new_tokens=tokens, **GREEDY), seen
    finally:
        handle.remove()


def zero(step: int, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value)


# -- results ----------------------------------------------------------------------------------------------------------


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
def test_a_plain_call_generates(lm: LanguageModel, compile: bool) -> None:
    same(lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY), reference("transformer.h.2")[0])


@both
def test_the_result_of_a_trace(lm: LanguageModel, compile: bool) -> None:
    tower_model = tower()
    with tower_model.trace(ids(), compile=compile) as tracer:
        hidden = tower_model.layers[0].output[0].save()
        result = tracer.result.save()
    same(result, tower_model._module(ids()))
    assert hidden.shape == (1, 5, WIDTH)
    with lm.trace(PARIS, compile=compile) as tracer:
        logits = tracer.result().logits.save()
    same(logits, lm._module(**encoded(PARIS)).logits)


def test_a_known_fact_is_written() -> None:
    model = demo_model()
    with model.generate(PARIS, max_new_tokens=2, compile=False, **GREEDY) as tracer:
        text = tracer.result.save()
    assert model.tokenizer.decode(text[0]).startswith(PARIS + " Paris")


# -- choosing steps ---------------------------------------------------------------------------------------------------

CHOICES = [
    (slice(None), [0, 1, 2, 3]),
    (slice(1, 3), [1, 2]),
    (slice(None, 3), [0, 1, 2]),
    (slice(None, None, 2), [0, 2]),
    (2, [2]),
    ([0, 2, 3], [0, 2, 3]),
]
choices = pytest.mark.parametrize(("steps", "numbers"), CHOICES, ids=[str(steps) for steps, _ in CHOICES])


def open_ended(steps: Any) -> bool:
    return isinstance(steps, slice) and steps.stop is None


def ends_early() -> Any:
    """Expect the warning about a loop that waits for a step that does not come."""
    return pytest.warns(UserWarning, match="The loop ended at .* the code after the loop were not run")


def expecting_a_warning(steps: Any) -> Any:
    return ends_early() if open_ended(steps) else contextlib.nullcontext()


@both
@choices
def test_a_loop_reads_the_chosen_steps(lm: LanguageModel, compile: bool, steps: Any, numbers: list[int]) -> None:
    _, seen = reference("lm_head")
    with expecting_a_warning(steps), lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        logits = []
        logits = nnsight.save(logits)
        counted = nnsight.save([])
        for step in tracer.iter[steps]:
            logits.append(lm.lm_head.output)
            counted.append(step)
    same(logits, [seen[number] for number in numbers])
    assert counted == numbers


@both
@choices
def test_a_with_block_reads_the_chosen_steps(lm: LanguageModel, compile: bool, steps: Any, numbers: list[int]) -> None:
    _, seen = reference("lm_head")
    with expecting_a_warning(steps), lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        logits = nnsight.save([])
        counted = nnsight.save([])
        with tracer.iter[steps] as step:
            logits.append(lm.lm_head.output)
            counted.append(step)
    same(logits, [seen[number] for number in numbers])
    assert counted == numbers


@both
def test_tokens_are_collected_step_by_step(lm: LanguageModel, compile: bool) -> None:
    expected, _ = reference("lm_head")
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        tokens = [].save()
        for _ in tracer.iter[:NEW]:
            tokens.append(lm.lm_head.output[0][-1].argmax(dim=-1))
    assert [int(token) for token in tokens] == expected[0, -NEW:].tolist()


@both
def test_one_step_saves_a_name(lm: LanguageModel, compile: bool) -> None:
    _, seen = reference("lm_head")
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        for _ in tracer.iter[1]:
            second = lm.lm_head.output.save()
    same(second, seen[1])


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
def test_without_a_loop_the_first_step_is_meant(lm: LanguageModel, compile: bool) -> None:
    expected, seen = reference("transformer.h.0", lambda step, value: zero(step, value) if step == 0 else None)
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        lm.transformer.h[0].output[:] = 0
        text = tracer.result.save()
    same(text, expected)


@both
def test_next_of_a_module(lm: LanguageModel, compile: bool) -> None:
    _, seen = reference("transformer.h.2")
    with lm.generate(PARIS, max_new_tokens=3, compile=compile, **GREEDY):
        one = lm.transformer.h[-1].output.save()
        two = lm.transformer.h[-1].next().output.save()
        three = lm.transformer.h[-1].next().output.save()
    same([one, two, three], seen[:3])


@both
def test_next_of_a_tracer_also_over_several_steps(lm: LanguageModel, compile: bool) -> None:
    _, seen = reference("lm_head")
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        first = lm.lm_head.output.save()
        tracer.next()
        second = lm.lm_head.output.save()
        tracer.next(2)
        fourth = lm.lm_head.output.save()
    same([first, second, fourth], [seen[0], seen[1], seen[3]])


@both
def test_code_after_an_open_loop_is_skipped_with_a_warning(lm: LanguageModel, compile: bool) -> None:
    with ends_early():
        with lm.generate(PARIS, max_new_tokens=3, compile=compile, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                hidden = lm.transformer.h[-1].output.save()
            final = lm.output.save()
    _, seen = reference("transformer.h.2")
    same(hidden, seen[2])
    with pytest.raises(NameError):
        final  # noqa: B018


@both
def test_what_follows_an_open_loop_goes_into_an_invoke_of_its_own(lm: LanguageModel, compile: bool) -> None:
    _, seen = reference("lm_head")
    with ends_early():
        with lm.generate(max_new_tokens=3, compile=compile, **GREEDY) as tracer:
            with tracer.invoke(PARIS):
                for _ in tracer.iter[:]:
                    hidden = lm.transformer.h[-1].output.save()
            with tracer.invoke():
                logits = lm.output.logits.save()
    same(logits, seen[0])
    same(hidden, reference("transformer.h.2")[1][2])


@both
def test_code_after_a_bounded_loop_runs(lm: LanguageModel, compile: bool) -> None:
    expected, seen = reference("transformer.h.2", tokens=3)
    with lm.generate(PARIS, max_new_tokens=3, compile=compile, **GREEDY) as tracer:
        for _ in tracer.iter[:3]:
            hidden = lm.transformer.h[-1].output.save()
        text = tracer.result.save()
    same(hidden, seen[2])
    same(text, expected)


@both
def test_a_bounded_loop_that_is_too_long_warns_and_keeps_what_it_has(lm: LanguageModel, compile: bool) -> None:
    _, seen = reference("lm_head", tokens=2)
    with ends_early():
        with lm.generate(PARIS, max_new_tokens=2, compile=compile, **GREEDY) as tracer:
            logits = [].save()
            for _ in tracer.iter[:5]:
                logits.append(lm.lm_head.output)
    same(logits, seen[:2])


@both
def test_a_barrier_between_prompts_that_generate(lm: LanguageModel, compile: bool) -> None:
    blank = torch.full_like(encoded(PARIS)["input_ids"], 63)
    with lm.generate(max_new_tokens=3, compile=compile, **GREEDY) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PARIS):
            embeddings = lm.transformer.wte.output
            barrier()
            source = lm.generator.output.save()
        with tracer.invoke(blank):
            barrier()
            lm.transformer.wte.output = embeddings
            patched = lm.generator.output.save()
    expected, _ = reference("lm_head", tokens=3)
    same(source, expected)
    assert patched.shape == expected.shape
    # From the embeddings of the prompt on, the first new token is that of the prompt.
    assert patched[0, -3] == expected[0, -3]
    same(patched[:, :-3], blank)


@both
def test_invokes_edit_their_own_generations(lm: LanguageModel, compile: bool) -> None:
    expected, _ = reference("transformer.h.0", zero)
    plain, _ = reference("transformer.h.0")
    with lm.generate(max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        with tracer.invoke(PARIS):
            for _ in tracer.iter[:NEW]:
                lm.transformer.h[0].output[:] = 0
            edited = tracer.result.save()
        with tracer.invoke(PARIS):
            untouched = tracer.result.save()
    same(edited, expected)
    same(untouched, plain)


@both
def test_a_module_called_several_times_in_one_forward_pass(compile: bool) -> None:
    """Steps count calls of a location; nothing about them is special to generation."""

    class Repeat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.step(x)
            return x

    torch.manual_seed(0)
    model = nnsight.NNsight(Repeat(), compile={"backend": "eager"})
    x = torch.rand(2, 4)
    with model.trace(x, compile=compile) as tracer:
        found = [].save()
        for number in tracer.iter[:3]:
            if number == 1:
                model.step.output *= 2
            found.append(model.step.output)
    step = model._module.step
    one = step(x)
    two = step(one) * 2
    same(found, [one, two, step(two)])


@both
@pytest.mark.parametrize("steps", [-1, slice(-2, None), [0, -1]], ids=str)
def test_steps_do_not_count_from_the_end(compile: bool, steps: Any) -> None:
    model = tower()
    with pytest.raises(ValueError, match="cannot count from the end"):
        with model.trace(ids(), compile=compile) as tracer:
            for _ in tracer.iter[steps]:
                model.output.save()


@both
def test_an_open_loop_that_touches_no_module_ends(compile: bool) -> None:
    model = tower()
    seen: list[int] = []
    with pytest.warns(UserWarning, match="asked nothing of the model"):
        with model.trace(ids(), compile=compile) as tracer:
            for step in tracer.iter[:]:
                seen.append(step)  # noqa: PERF402
            out = model.output.save()
    assert seen == [0]
    same(out, model._module(ids()))


@both
@pytest.mark.parametrize("chosen", [(2,), (0, 3)], ids=str)
def test_an_edit_in_some_steps_of_an_open_loop(lm: LanguageModel, compile: bool, chosen: tuple[int, ...]) -> None:
    """The other steps ask nothing of the model, and the loop goes on."""
    plain, _ = reference("transformer.h.1")
    expected, seen = reference("transformer.h.1", lambda step, h: -4.0 * h if step in chosen else None)
    assert not torch.equal(plain, expected)
    with pytest.warns(UserWarning, match="model had finished"):
        with lm.generate(max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
            with tracer.invoke(PARIS):
                edited = [].save()
                for step in tracer.iter[:]:
                    if step in chosen:
                        lm.transformer.h[1].output *= -4.0
                        edited.append(lm.transformer.h[1].output)
            with tracer.invoke():
                text = tracer.result.save()
    same(text, expected)
    same(edited, [seen[step] for step in chosen])


@both
def test_a_step_is_pinned_for_its_first_read_only(lm: LanguageModel, compile: bool) -> None:
    """A module that runs in every step and one that runs less often can be read in one step of the loop."""
    _, seen = reference("lm_head")
    with lm.generate(PARIS, max_new_tokens=NEW, compile=compile, **GREEDY) as tracer:
        hidden, logits = [].save(), [].save()
        for _ in tracer.iter[1:3]:
            hidden.append(lm.transformer.h[0].output)
            logits.append(lm.lm_head.output)
    same(logits, seen[1:3])
    same(hidden, reference("transformer.h.0")[1][1:3])


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


def test_rows_of_a_padded_generation_are_what_they_are_alone(lm: LanguageModel) -> None:
    with lm.generate(max_new_tokens=3, **GREEDY) as tracer:
        with tracer.invoke(PARIS):
            one = tracer.result.save()
        with tracer.invoke(ROME):
            two = tracer.result.save()
    for text, prompt in ((one, PARIS), (two, ROME)):
        alone = lm._module.generate(**encoded(prompt), max_new_tokens=3, **GREEDY)
        assert text[0, -3:].tolist() == alone[0, -3:].tolist()


def test_steps_of_a_model_that_was_never_compiled() -> None:
    """Nothing about a loop needs the compiled path to have run before."""
    model = new_tower()
    with ends_early():
        with model.trace(ids(), compile=False) as tracer:
            for _ in tracer.iter[:]:
                kept = model.layers[0].output[0].save()
    close(kept, model._module.layers[0](model._module.embed(ids()))[0])
