"""The values at the locations of a model on fakes are computed once for each kind of input, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from nnsight import LanguageModel, NNsight
from nnsight.program.counts import counts
from nnsight.remote import decode, execute_payload, validate

from ..conftest import same
from .remoting import Catch

PROMPT = "The Eiffel Tower is in the city of"


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2.0


def runs(block: Callable[..., Any], *arguments: Any) -> int:
    """Run a block here and as data, compare, and return how often the model ran on fakes."""
    expected = block(*arguments)
    before = counts["fake_runs"], counts["recordings"]
    same(block(*arguments, remote="local"), expected)
    assert counts["recordings"] == before[1] + 1
    return counts["fake_runs"] - before[0]


def reading(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(prompt, **where):
        first = mine(model.transformer.h[0].attn.input).save()
        given = mine(model.transformer.h[1].input).save()
        model.transformer.h[2].output[:, -1] += mine(given[:, -1])
        out = model.output.logits.save()
    return first, given, out


def replacing(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(prompt, **where):
        earlier = model.transformer.h[0].output
        model.transformer.h[1].mlp.output = mine(earlier)
        later = model.transformer.h[2].output.save()
        out = (model.lm_head.output + 0).save()
    return later, out


def replacing_by_the_same_size(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(prompt, **where):
        earlier = model.transformer.h[0].output
        model.transformer.h[1].output = mine(earlier)
        given = model.transformer.h[2].ln_1.output + 0
        model.transformer.h[2].mlp.output = given + earlier
        later = model.transformer.h[2].output.save()
        out = (model.lm_head.output + 0).save()
    return later, out


def reading_what_was_replaced(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(prompt, **where):
        replaced = mine(model.transformer.h[1].output)
        model.transformer.h[1].output = replaced
        given = model.transformer.h[2].input
        given += 1
        both = (replaced + given).save()
        out = (model.lm_head.output + 0).save()
    return both, out


def replacing_rows(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        with tracer.invoke(prompt):
            model.transformer.h[1].output = mine(model.transformer.h[1].output)
            one = model.lm_head.output.save()
        with tracer.invoke(prompt):
            two = model.lm_head.output.save()
    return one, two


def skipping(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(prompt, **where):
        given = mine(model.transformer.h[2].mlp.input)
        model.transformer.h[2].mlp.skip(given)
        out = model.lm_head.output.save()
    return out


def invoking(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        with tracer.invoke(prompt):
            one = mine(model.transformer.h[1].output).save()
        with tracer.invoke(prompt + " the"):
            model.transformer.h[1].output[:] = mine(model.transformer.h[1].output)
            two = model.lm_head.output.save()
    return one, two


def stopping(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(prompt, **where) as tracer:
        found = mine(model.transformer.h[1].output).save()
        tracer.stop()
    return found


def operations(model: Any, prompt: str, **where: Any) -> Any:
    with model.trace(prompt, **where):
        found = mine(model.transformer.h[1].attn.source.self_c_proj_0.output).save()
    return found


def test_a_model_runs_once_on_fakes_for_a_kind_of_input(model: Any) -> None:
    runs(reading, model, PROMPT)
    assert runs(reading, model, PROMPT) == 0
    assert runs(reading, model, "The Colosseum is in the town of") == 0
    assert runs(reading, model, f"{PROMPT} {PROMPT}") > 0  # a length that no other test has
    runs(operations, model, PROMPT)
    assert runs(operations, model, PROMPT) == 0


def test_a_block_that_changes_what_follows_gets_what_follows(model: Any) -> None:
    runs(reading, model, PROMPT)
    for block in (replacing, skipping, invoking, stopping):
        runs(block, model, PROMPT)
        assert runs(reading, model, PROMPT) == 0


@pytest.mark.parametrize("block", [replacing_by_the_same_size, reading_what_was_replaced, replacing_rows])
def test_replacements_of_the_same_size_need_no_run(model: Any, block: Callable[..., Any]) -> None:
    """At the second time the model runs once more without blocks, and then no more."""
    counted = [runs(block, model, f"{PROMPT} {block.__name__}") for _ in range(4)]  # a length that no other test has
    again = 1 if block is reading_what_was_replaced else 0  # the model may pass on the replacement or the earlier tensor
    assert counted[2:] == [again, again]


class Parallel(torch.nn.Module):
    """One tensor is the input of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.one(hidden) + self.two(hidden)


def replacing_one_of_two(model: Any, x: torch.Tensor, **where: Any) -> Any:
    with model.trace(x, **where):
        replaced = model.one.input * 2
        model.one.input = replaced
        other = model.two.input
        other += 1
        both = (replaced - other).save()
        out = (model.output + 0).save()
    return both, out


def test_a_replaced_tensor_that_the_model_also_passes_on() -> None:
    model, x = NNsight(Parallel()), torch.randn(2, 4)
    for _ in range(4):
        runs(replacing_one_of_two, model, x)


def replacing_in_each_step(model: Any, prompt: str, **where: Any) -> Any:
    found = []
    with model.generate(prompt, max_new_tokens=8, **where) as tracer:
        for _ in tracer.iter[:8]:
            model.transformer.h[1].output = mine(model.transformer.h[1].output)
            found.append(model.lm_head.output[:, -1])
        ids = tracer.result.save()
    return found, ids


def test_a_generation_that_replaces_values_in_each_step_runs_few_steps(model: Any) -> None:
    before = counts["fake_steps"]
    runs(replacing_in_each_step, model, PROMPT)
    assert counts["fake_steps"] - before == 2 * 5  # the first three, and two of them without blocks; for the client, and for the server


def test_lists_that_wait_for_several_results_get_each_its_own(model: Any) -> None:
    together: list[torch.Tensor] = []
    alone: list[list[torch.Tensor]] = []
    pending = []
    prompts = [PROMPT, "The Colosseum is in the town of", PROMPT]  # of one length
    for prompt in prompts:
        own: list[torch.Tensor] = []
        with model.trace(prompt, backend=Catch()) as tracer:
            together.append(model.lm_head.output)
            own.append(mine(model.lm_head.output))
        pending.append(tracer.backend.recorded)
        alone.append(own)
    for recorded in reversed(pending):
        recorded.bind(execute_payload(model, recorded.payload()))
    expected = [model._module(**model.tokenizer(prompt, return_tensors="pt")).logits for prompt in prompts]
    same(together, expected)
    same(alone, [[2.0 * logits] for logits in expected])


def payload(model: Any, layer: int, strength: float) -> bytes:
    with model.trace(PROMPT, backend=Catch()) as tracer:
        model.transformer.h[layer].output[:, -1] *= strength
        out = model.lm_head.output.save()
    return tracer.backend.payload


def test_programs_are_checked_on_one_run_on_fakes_and_once(model: Any) -> None:
    first, second = (payload(model, layer, 2.0) for layer in (0, 1))
    checked = [validate(decode(first), model)]
    before = dict(counts)
    checked.append(validate(decode(second), model))
    assert counts["fake_runs"] == before["fake_runs"]
    assert counts["rehearsals"] == before["rehearsals"] + 1
    assert checked[0].flops == checked[1].flops > 1e5
    same(
        execute_payload(model, payload(model, 1, 3.5)) != execute_payload(model, second), True
    )  # the same program with another number has another result, and is not checked again
    assert counts["rehearsals"] == before["rehearsals"] + 1
    execute_payload(model, payload(model, 1, 3))  # an integer
    assert counts["rehearsals"] == before["rehearsals"] + 2


def test_a_model_that_marks_itself_is_copied_for_each_run() -> None:
    class Marks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x[:, : self.calls] * 1.0

    model = NNsight(Marks())
    x = torch.randn(2, 4)
    for number in range(1, 4):
        with model.trace(x, remote="local"):
            width = model.output.shape[1]
            out = (mine(model.output) + width).save()
        same(out, mine(x[:, :number]) + number)
        assert model._module.calls == number


# -- generations -------------------------------------------------------------------------------------------------------

TOKENS = 9


def steered(model: Any, prompt: Any, **where: Any) -> Any:
    with model.generate(prompt, max_new_tokens=TOKENS, **where) as tracer:
        seen = list().save()  # noqa: C408 - documented
        for step in tracer.iter[:TOKENS]:
            hidden = model.transformer.h[1].output
            hidden[:, -1] += 0.1 * step
            seen.append(model.lm_head.output[:, -1].argmax(-1) + model.output.logits[:, -1].argmax(-1))
        ids = tracer.result.save()
    return list(seen), ids


def replacing_once(model: Any, prompt: Any, **where: Any) -> Any:
    with model.generate(prompt, max_new_tokens=TOKENS, **where) as tracer:
        for step in tracer.iter[:TOKENS]:
            if step == 5:
                model.transformer.h[1].mlp.output = model.transformer.h[1].mlp.output * 3.0
            last = model.transformer.h[2].output[:, -1].save()
        ids = tracer.result.save()
    return last, ids


def skipping_twice(model: Any, prompt: Any, **where: Any) -> Any:
    with model.generate(prompt, max_new_tokens=TOKENS, **where) as tracer:
        for step in tracer.iter[:TOKENS]:
            if step in (4, 7):
                model.transformer.h[1].mlp.skip(model.transformer.h[1].mlp.input * 0.0)
            last = model.transformer.h[2].output.save()
        ids = tracer.result.save()
    return last, ids


def reading_what_grows(model: Any, prompt: Any, **where: Any) -> Any:
    with model.generate(prompt, max_new_tokens=TOKENS, **where) as tracer:
        seen = list().save()  # noqa: C408
        for step in tracer.iter[:TOKENS]:
            if step in (6, 7):
                seen.append(model.transformer.h[0].attn.output[1].sum(-1))
                seen.append(model.transformer.h[0].attn.output[1][..., -1])
            seen.append(model.transformer.h[1].output[:, -1])
        ids = tracer.result.save()
    return list(seen), ids


def in_two_rows(model: Any, prompt: Any, **where: Any) -> Any:
    with model.generate(max_new_tokens=TOKENS, **where) as tracer:
        with tracer.invoke(prompt):
            for _ in tracer.iter[:4]:
                model.transformer.h[0].output[:] *= 1.5
        with tracer.invoke("A"):
            first = model.transformer.h[2].output.save()
        with tracer.invoke():
            ids = tracer.result.save()
    return first, ids


def editing_inputs_of_one_row(model: Any, prompt: Any, **where: Any) -> Any:
    """The input of a layer has a mask and a cache, which the block does not use."""
    found = []
    with model.generate(max_new_tokens=3, **where) as tracer:
        with tracer.invoke(prompt):
            for _ in tracer.iter[:3]:
                model.transformer.h[1].input[:, -1] *= 1.2
                model.lm_head.output = model.lm_head.output * 1.5
                found.append(model.output.logits[:, -1].clone())
        with tracer.invoke(prompt):
            model.lm_head.output.sum()
        with tracer.invoke():
            ids = tracer.result.save()
    return found, ids


GENERATIONS = {steered: 3, replacing_once: 3, skipping_twice: 5, reading_what_grows: 5, in_two_rows: 3, editing_inputs_of_one_row: 5}


@pytest.mark.parametrize("block", GENERATIONS, ids=lambda block: block.__name__)
def test_most_steps_of_a_generation_do_not_run_on_fakes(block: Callable[..., Any], model: Any) -> None:
    """Those that run are the prompt, two that are compared, and those in which a block changes sizes or asks for what grows."""
    attention = {"attn_implementation": "eager"} if block is reading_what_grows else {}
    model = LanguageModel("nnsight/demo", dispatch=True, **attention) if attention else model
    expected, before = block(model, PROMPT), counts["fake_steps"]
    same(block(model, PROMPT, remote="local"), expected)
    ran = counts["fake_steps"] - before
    assert ran in (GENERATIONS[block], 2 * GENERATIONS[block]), ran  # in the recording, and in the check of the server if there is one


@pytest.mark.parametrize("kind", ["Gemma2", "Mamba"])
def test_each_step_runs_where_it_is_not_known_how_a_cache_grows(kind: str) -> None:
    small = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}
    more = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6}
    config = getattr(transformers, f"{kind}Config")(**small, **(more if kind == "Gemma2" else {"state_size": 8}))
    net = LanguageModel(getattr(transformers, f"{kind}ForCausalLM")(config).eval())
    layers = "model" if kind == "Gemma2" else "backbone"

    def block(**where: Any) -> Any:
        with net.generate(torch.arange(1, 6)[None], max_new_tokens=6, **where) as tracer:
            for _ in tracer.iter[:6]:
                net.get(f"{layers}.layers.0").output[:] *= 1.1
            ids = tracer.result.save()
        return ids

    before = counts["fake_steps"]
    same(block(remote="local"), block())
    assert (counts["fake_steps"] - before) % 6 == 0
