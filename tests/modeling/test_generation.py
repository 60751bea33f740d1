"""Generation: blocks that run along while a model writes text, against ``generate`` of transformers with hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import nnsight
from nnsight import LanguageModel, NNsight, fx
from nnsight.runtime import OutOfOrderError

from ..conftest import CACHE, both, same

LONG = "The Colosseum is in the city of"
SHORT = "The Eiffel Tower is in the"
NEW = 4
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """A random model with the tokenizer of the demo; it never ends a text."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=1024, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval()
    return LanguageModel(module, nnsight.demo_model().tokenizer, compile={"backend": "eager"})


def ids_of(model: LanguageModel, *prompts: str) -> dict[str, torch.Tensor]:
    rows = [model.tokenizer(prompt)["input_ids"] for prompt in prompts]
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


class Hooked:
    """``generate`` of transformers with one plain hook: what it returned, and each output of the hooked module."""

    def __init__(self, model: LanguageModel, path: str, edit: Callable[[int, Any], Any] | None = None) -> None:
        self.module, self.path, self.edit = model._module, path, edit
        self.seen: list[torch.Tensor] = []

    def __call__(self, **kwargs: Any) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
            if self.edit is not None:
                output = self.edit(len(self.seen), output)
            self.seen.append(output.clone())
            return output

        handle = self.module.get_submodule(self.path).register_forward_hook(hook)
        try:
            return self.module.generate(**{**GREEDY, **kwargs})
        finally:
            handle.remove()


def steady(run: Callable[[bool], tuple[Any, Any]], expected: Any) -> None:
    """Assert that ``run(compile)`` gives ``expected``, in whole graphs, the second compiled time without new work."""
    for compile in (False, True, True):
        fx.counters.reset()
        found, tracer = run(compile)
        same(found, expected)
        assert tracer.report.mode == ("compiled" if compile else "eager")
        assert not tracer.report.breaks
        assert (tracer.report.graphs > 0) == compile
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == fx.counters.breaks == 0


# -- what is generated ------------------------------------------------------------------------------------------------


@both
def test_a_plain_call_is_generate_of_transformers(model: LanguageModel, compile: bool) -> None:
    expected = model._module.generate(**ids_of(model, LONG), **GREEDY)
    found = model.generate(LONG, **GREEDY, compile=compile)
    same(found, expected)
    assert found.shape[1] == len(model.tokenizer(LONG)["input_ids"]) + NEW
    with model.generate(LONG, **GREEDY, compile=compile) as tracer:
        output = model.generator.output.save()
        result = tracer.result.save()
    same((output, result), (expected, expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", [{}, {"cache_implementation": "static"}], ids=["growing", "static"]
)
def test_a_plain_call_of_a_compiled_model_is_compiled(model: LanguageModel, cache: dict[str, Any]) -> None:
    """Prompts of known kinds capture nothing anew; ``compile=False`` captures nothing at all."""
    for prompt in (SHORT, LONG, [SHORT, LONG], [LONG, SHORT, SHORT]):
        prompts = [prompt] if isinstance(prompt, str) else prompt
        expected = model._module.generate(**ids_of(model, *prompts), **GREEDY, **cache)
        for compile in (None, None, False):
            fx.counters.reset()
            same(model.generate(prompt, **GREEDY, **cache, compile=compile), expected)
    assert (fx.counters.captures, fx.counters.compiles) == (0, 0)
    other = LanguageModel(model._module, model.tokenizer, compile={"backend": "eager"})
    fx.counters.reset()
    same(other.generate([LONG, SHORT, SHORT], **GREEDY, **cache, compile=False), expected)
    assert fx.counters.captures == 0
    same(other.generate([LONG, SHORT, SHORT], **GREEDY, **cache), expected)
    assert fx.counters.captures > 0
    with pytest.raises(TypeError, match="is True, False or 'background', not 3"):
        other.generate(LONG, **GREEDY, compile=3)


@both
def test_transformers_compiles_no_traced_generation(model: LanguageModel, compile: bool) -> None:
    """With a static cache it would, on a GPU, and the locations would not occur; here it is told to do so on the CPU."""
    settings = transformers.CompileConfig(backend="eager", mode=None)
    settings._compile_all_devices = True
    static = {**GREEDY, "cache_implementation": "static", "compile_config": settings}
    hooked = Hooked(model, "transformer.h.0", lambda step, output: output * 1.5)
    expected = hooked(**ids_of(model, LONG), cache_implementation="static")
    for _ in range(2):
        with model.generate(LONG, **static, compile=compile) as tracer:
            for _ in tracer.iter[:NEW]:
                model.transformer.h[0].output *= 1.5
            found = tracer.result.save()
        same(found, expected)
        assert not tracer.report.breaks
    assert not hasattr(model._module, "_compiled_call")


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_beams_are_searched(model: LanguageModel, compile: bool) -> None:
    beams = model._module.generate(**ids_of(model, LONG), **GREEDY, num_beams=2)
    config = transformers.GenerationConfig(num_beams=2, **GREEDY, pad_token_id=model._pad_id())
    with model.generate(LONG, generation_config=config, compile=compile) as tracer:
        by_config = tracer.result.save()
    assert torch.equal(by_config, beams)
    with model.generate(LONG, **GREEDY, num_beams=2, compile=compile) as tracer:
        found = tracer.result.save()
    same(found, beams)


@both
def test_sampling_draws_what_transformers_draws(model: LanguageModel, compile: bool) -> None:
    torch.manual_seed(7)
    expected = model._module.generate(**ids_of(model, LONG), max_new_tokens=NEW, do_sample=True)
    torch.manual_seed(7)
    with model.generate(LONG, max_new_tokens=NEW, do_sample=True, compile=compile) as tracer:
        found = tracer.result.save()
    same(found, expected)
    assert not torch.equal(found, model._module.generate(**ids_of(model, LONG), **GREEDY))


@both
def test_prompts_of_several_lengths_go_on_as_they_do_alone(model: LanguageModel, compile: bool) -> None:
    with model.generate([LONG, SHORT], **GREEDY, compile=compile) as tracer:
        both_rows = tracer.result.save()
    for row, prompt in zip(both_rows, (LONG, SHORT), strict=True):
        alone = model._module.generate(**ids_of(model, prompt), **GREEDY)
        same(row[-NEW:], alone[0, -NEW:])


@both
def test_the_streamer_shows_tokens_as_they_come(model: LanguageModel, compile: bool) -> None:
    arguments = ids_of(model, LONG)
    expected = model._module.generate(**arguments, **GREEDY)
    with model.generate(LONG, **GREEDY, compile=compile) as tracer:
        pieces = [].save()
        for _ in tracer.iter[: NEW + 1]:
            pieces.append(model.generator.streamer.output)
    same(pieces[0], arguments["input_ids"])
    same(torch.cat(pieces[1:]), expected[0, -NEW:])


def test_a_streamer_of_the_user_gets_what_the_block_leaves(model: LanguageModel) -> None:
    class Pieces:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, piece: torch.Tensor) -> None:
            self.got.append(piece.clone())

        def end(self) -> None:
            self.got.append("end")

    plain, traced, edited = Pieces(), Pieces(), Pieces()
    model._module.generate(**ids_of(model, LONG), **GREEDY, streamer=plain)
    with model.generate(LONG, **GREEDY, streamer=traced, scan=True) as tracer:
        seen = [].save()
        for _ in tracer.iter[: NEW + 1]:
            seen.append(model.generator.streamer.output)
    same((traced.got, seen), (plain.got, plain.got[:-1]))
    with model.generate(LONG, **GREEDY, streamer=edited):
        model.generator.streamer.output = torch.zeros(1, 1)
    same(edited.got[0], torch.zeros(1, 1))
    same(edited.got[1:], plain.got[1:])


@pytest.mark.slow
def test_runs_on_fake_tensors_leave_out_stop_strings(model: LanguageModel) -> None:
    """Transformers keeps tensors for them in a global cache."""
    options = {**GREEDY, "stop_strings": [" Rome"], "tokenizer": model.tokenizer}
    with model.generate(**options) as tracer:
        with tracer.invoke(LONG):
            first = tracer.result.save()
        with tracer.invoke(SHORT):
            second = tracer.result.save()
    expected = model._module.generate(**ids_of(model, LONG, SHORT), **options)
    same(torch.cat([first, second]), expected)
    config = transformers.GenerationConfig(**GREEDY, stop_strings=[" Paris"])
    with model.generate(LONG, generation_config=config, tokenizer=model.tokenizer, scan=True) as tracer:
        scanned = tracer.result.save()
    same(scanned, model._module.generate(**ids_of(model, LONG), generation_config=config, tokenizer=model.tokenizer))
    assert config.stop_strings == [" Paris"]


@pytest.mark.slow
def test_options_of_a_generation_are_kept(model: LanguageModel) -> None:
    """The pad token of a ``generation_config``, positions in an encoding, and the mask beside a cache."""
    ids = ids_of(model, LONG, SHORT)
    first = int(model._module.generate(**ids_of(model, "Rome"), **GREEDY)[0, -NEW])
    config = transformers.GenerationConfig(**GREEDY, eos_token_id=first, pad_token_id=7)
    own, model._module.generation_config.pad_token_id = model._module.generation_config.pad_token_id, None
    try:
        expected = model._module.generate(**ids_of(model, LONG, "Rome"), generation_config=config)
        assert expected[1, -1] == 7
        same(model.generate([LONG, "Rome"], generation_config=config), expected)
    finally:
        model._module.generation_config.pad_token_id = own
    scores = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    moved = {**ids, "position_ids": (ids["attention_mask"].cumsum(1) - 1).clamp(min=0) + 5}
    same(model.generate(moved, **scores).logits, model._module.generate(**moved, **scores).logits)
    expected = model._module.generate(**ids, **scores)
    found = model.generate([LONG, SHORT], **scores, **{CACHE: transformers.DynamicCache(config=model._module.config)})
    same(found.logits, expected.logits)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_every_step_is_read(model: LanguageModel) -> None:
    hooked = Hooked(model, "lm_head")
    expected = hooked(**ids_of(model, LONG))
    assert len(hooked.seen) == NEW

    def run(compile: bool) -> tuple[Any, Any]:
        with model.generate(LONG, **GREEDY, compile=compile) as tracer:
            steps, logits = [].save(), [].save()
            for step in tracer.iter[:NEW]:
                steps.append(step)
                logits.append(model.lm_head.output)
            result = tracer.result.save()
        return (steps, logits, result), tracer

    steady(run, (list(range(NEW)), hooked.seen, expected))


@pytest.mark.parametrize("chosen", [[2], [1, 3], [0, 1, 2, 3]], ids=str)
def test_chosen_steps_are_edited(model: LanguageModel, chosen: list[int]) -> None:
    arguments = ids_of(model, LONG)
    hooked = Hooked(model, "transformer.h.0", lambda step, h: -h if step in chosen else h)
    expected = hooked(**arguments)
    assert not torch.equal(expected, model._module.generate(**arguments, **GREEDY)), "the edit changes the text"

    def run(compile: bool) -> tuple[Any, Any]:
        with model.generate(LONG, **GREEDY, compile=compile) as tracer:
            for _ in tracer.iter[chosen]:
                model.transformer.h[0].output = -model.transformer.h[0].output
            result = tracer.result.save()
        return result, tracer

    steady(run, expected)


@both
def test_next_goes_from_token_to_token(model: LanguageModel, compile: bool) -> None:
    """Without a loop and without ``next``, a location is its first call."""
    hooked = Hooked(model, "lm_head", lambda step, out: -out if step == 0 else out)
    expected = hooked(**ids_of(model, LONG))
    with model.generate(LONG, **GREEDY, compile=compile) as tracer:
        model.lm_head.output = -model.lm_head.output
        first = model.lm_head.output.save()
        second = model.lm_head.next().output.save()
        third = model.lm_head.next().output.save()
        result = tracer.result.save()
    same(([first, second, third], result), (hooked.seen[:3], expected))


# -- invokes ----------------------------------------------------------------------------------------------------------


@both
def test_an_edit_of_one_prompt_leaves_the_other_text(model: LanguageModel, compile: bool) -> None:
    edited = Hooked(model, "transformer.h.0", lambda _, h: -h)(**ids_of(model, SHORT))
    plain = model._module.generate(**ids_of(model, LONG), **GREEDY)
    with model.generate(**GREEDY, compile=compile) as tracer:
        with tracer.invoke(LONG):
            tokens = [].save()
            for _ in tracer.iter[:NEW]:
                tokens.append(model.lm_head.output[0, -1].argmax())
        with tracer.invoke(SHORT):
            for _ in tracer.iter[:NEW]:
                model.transformer.h[0].output = -model.transformer.h[0].output
            mine = model.generator.output.save()
        with tracer.invoke():
            whole = model.generator.output.save()
    same(torch.stack(tokens), plain[0, -NEW:])
    same(mine[0, -NEW:], edited[0, -NEW:])
    same(whole[:, -NEW:], torch.cat([plain[:, -NEW:], edited[:, -NEW:]]))
    assert not torch.equal(edited, model._module.generate(**ids_of(model, SHORT), **GREEDY))


@both
def test_a_value_goes_from_prompt_to_prompt_by_a_barrier(model: LanguageModel, compile: bool) -> None:
    def patch(step: int, h: torch.Tensor) -> torch.Tensor:
        return torch.cat([h[:1], -h[:1]]) if step == 0 else h

    hooked = Hooked(model, "transformer.h.0", patch)
    expected = hooked(**ids_of(model, LONG, SHORT))
    assert not torch.equal(expected, model._module.generate(**ids_of(model, LONG, SHORT), **GREEDY))
    with model.generate(**GREEDY, compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(LONG):
            hidden = model.transformer.h[0].output
            barrier()
            one = tracer.result.save()
        with tracer.invoke(SHORT):
            barrier()
            model.transformer.h[0].output = -hidden
            two = tracer.result.save()
    same(torch.cat([one, two]), expected)


# -- mistakes, and what is left ----------------------------------------------------------------------------------------


def test_results_exist_in_generations_only(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="outside of interleaving"):
        model.generator.output  # noqa: B018
    for compile in (False, True):
        with pytest.raises(OutOfOrderError, match=r"model\.generator\.output\.i0"):
            with model.trace(LONG, compile=compile):
                model.generator.output.save()
    with pytest.raises(AttributeError, match="has no attribute `generate`"):
        NNsight(torch.nn.Linear(2, 2)).generate(torch.ones(1, 2))


@both
def test_other_texts_of_known_lengths_need_no_new_work(model: LanguageModel, compile: bool) -> None:
    def run(prompt: str, vector: torch.Tensor) -> torch.Tensor:
        with model.generate(prompt, **GREEDY, compile=compile) as tracer:
            for _ in tracer.iter[:NEW]:
                model.transformer.h[0].output = model.transformer.h[0].output + vector
            result = tracer.result.save()
        return result

    for prompt in (LONG, SHORT, LONG):
        run(prompt, torch.randn(32))
    fx.counters.reset()
    for prompt in (LONG, SHORT):
        vector = torch.randn(32)
        expected = Hooked(model, "transformer.h.0", lambda _, h, vector=vector: h + vector)(**ids_of(model, prompt))
        same(run(prompt, vector), expected)
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0


# -- scans ---------------------------------------------------------------------------------------------------------------


@both
def test_a_generation_is_scanned_before_it_runs(model: LanguageModel, compile: bool) -> None:
    """Each step has the sizes of a real one; the fakes that are kept are those of the last."""
    hooked = Hooked(model, "transformer.h.1")
    expected = hooked(**ids_of(model, LONG, SHORT))
    with model.generate([LONG, SHORT], **GREEDY, validate=True, compile=compile) as tracer:
        shapes = nnsight.save([])
        for _ in tracer.iter[:NEW]:
            shapes.append(model.transformer.h[1].output.shape)
        ids = model.generator.output.save()
        made = tracer.result.save()
    assert shapes == [seen.shape for seen in hooked.seen]
    assert torch.equal(made, expected)
    assert torch.equal(ids, expected)
    assert model.transformer.h[1]._fake_output.shape == hooked.seen[-1].shape
    model._tree.fakes = {}
    ran: list[int] = []
    with model.generate(LONG, **GREEDY, scan=True, compile=compile) as tracer:
        ran.append(1)
        made = tracer.result.save()
    assert ran == [1]
    assert torch.equal(made, Hooked(model, "lm_head")(**ids_of(model, LONG)))
    assert model.lm_head._fake_output.shape == (1, 1, 1024)


@both
def test_a_mistake_in_a_later_step_is_found_before_the_model_runs(model: LanguageModel, compile: bool) -> None:
    calls: list[int] = []
    counting = model._module.register_forward_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(IndexError), model.generate(LONG, **GREEDY, validate=True, compile=compile) as tracer:
            for step in tracer.iter[:NEW]:
                hidden = model.transformer.h[0].output[:, 0 if step < 2 else 1]
    finally:
        counting.remove()
    assert calls == []


def test_a_scanned_generation_of_several_invokes_has_rows_for_each(model: LanguageModel) -> None:
    with model.generate(**GREEDY, validate=True) as tracer:
        with tracer.invoke(LONG):
            one = tracer.result.save()
        with tracer.invoke([LONG, SHORT]):
            two = tracer.result.save()
    assert torch.equal(one, Hooked(model, "lm_head")(**ids_of(model, LONG)))
    assert torch.equal(two, Hooked(model, "lm_head")(**ids_of(model, LONG, SHORT)))


def test_a_scan_makes_as_many_tokens_as_there_may_be(model: LanguageModel) -> None:
    seen = SimpleNamespace(sizes=[])  # not a container, of which a rehearsal would use a copy
    length = ids_of(model, SHORT)["input_ids"].shape[1]
    for options in ({"max_length": length + 3}, {"max_new_tokens": 3, "num_return_sequences": 2, "do_sample": True}):
        with model.generate(SHORT, **{"do_sample": False, **options}, validate=True) as tracer:
            for _ in tracer.iter[:3]:
                hidden = model.lm_head.output
            seen.sizes.append(tuple(tracer.result.shape))
    assert seen.sizes == [(1, length + 3)] * 2 + [(2, length + 3)] * 2


def test_generations_that_are_not_scanned(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="num_beams"), model.generate(LONG, max_new_tokens=2, num_beams=2, validate=True):
        never = model.lm_head.output
    with pytest.raises(ValueError, match="needs a block"):
        model.generate(LONG, max_new_tokens=2, scan=True)
