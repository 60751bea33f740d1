"""The running batch: answers that join and leave at any step are those of transformers' ``generate`` under plain hooks, for many models."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from nnsight import LanguageModel, fx
from nnsight.remote.openai import joined
from nnsight.remote.openai.batches import Generator
from nnsight.remote.openai.completions import Completion
from nnsight.remote.openai.requests import Body
from nnsight.steering.choices import Addition, orthonormal
from nnsight.steering.layers import layers_path

from ...conftest import Hooks
from ...serving import until

VOCABULARY = 97


class Ids:
    """A tokenizer whose texts are the ids."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


@dataclass
class Case:
    """What an answer is asked for, and at which call of the model it is submitted."""

    prompt: list[int]
    tokens: int
    at: int = 0
    additions: dict[int, Addition] = field(default_factory=dict)
    start: int = 0
    temperature: float = 0.0
    tell: Callable[[], None] = lambda: None

    def answer(self) -> Completion:
        sampling = Body(model="", max_tokens=self.tokens, temperature=self.temperature)
        return Completion(self.prompt, sampling, self.additions, Ids(), self.tell, 5, self.start)


def served(
    module: Any, cases: Sequence[Case], most: int = 4, longest: int = 128, calls: list[int] | None = None, **options: Any
) -> list[Completion]:
    """Return the answers to ``cases``; ``calls`` gets the number of rows of each call of the model."""
    model = LanguageModel(module, **options)
    generator = Generator(model, layers_path(model), most, longest)
    answers = [case.answer() for case in cases]
    waiting, counted = sorted(range(len(cases)), key=lambda number: cases[number].at), [] if calls is None else calls

    def submit(called: int) -> None:
        while waiting and cases[waiting[0]].at <= called:
            generator.submit(answers[waiting.pop(0)])

    call = generator._call

    def counting(model: Any, ids: Any, *args: Any) -> Any:
        counted.append(len(ids))
        submit(len(counted))
        return call(model, ids, *args)

    generator._call = counting  # type: ignore[method-assign]
    while waiting:  # if all are over before the next call, the next one begins anew
        submit(cases[waiting[0]].at)
        until(lambda: all(answer.is_over for number, answer in enumerate(answers) if number not in waiting), 240)
    until(lambda: generator._joined is None, 240)
    return answers


def steering(module: Any, case: Case) -> AbstractContextManager[None]:
    """Steer by hooks as ``case`` says, in one generation."""
    hooks = Hooks(module)
    for number, addition in case.additions.items():
        seen = [0]

        def edited(output: Any, addition: Addition = addition, seen: list[int] = seen) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            changed = hidden
            if addition.remove is not None:
                changed = changed - (changed @ addition.remove.T) @ addition.remove
            if addition.add is not None:
                changed = changed + addition.add
            first = seen[0] if hidden.shape[-2] == 1 else 0  # some models compute all positions again
            positions = torch.arange(first, first + hidden.shape[-2])
            seen[0] = first + hidden.shape[-2]
            changed = torch.where((positions >= case.start)[:, None], changed, hidden)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        hooks.output(f"{layers_path(LanguageModel(module))}.{number}", edited)
    return hooks.installed()


def due(module: Any, case: Case) -> list[int]:
    """Return the tokens that ``generate`` makes, greedily."""
    ids = torch.tensor([case.prompt])
    with steering(module, case):
        made = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    tokens: list[int] = made[0, len(case.prompt) :].tolist()
    return tokens


def random_cases(seed: int, count: int, hidden: int, longest: int = 20, layers: int = 2) -> list[Case]:
    """Return cases that are steered or not, and join while others run."""
    draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    cases = []
    for number in range(count):
        additions = {}
        if draw.random() < 0.6:
            add = 3 * torch.randn(hidden, generator=noise) if draw.random() < 0.7 else None
            remove = orthonormal(torch.randn(2, hidden, generator=noise)) if add is None or draw.random() < 0.5 else None
            additions = {draw.randrange(layers): Addition(add, remove)}
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, longest))]
        cases.append(Case(prompt, draw.randint(1, 16), 3 * number, additions, draw.choice([0, 0, 3, len(prompt) + 2])))
    return cases


SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
WIDE: dict[str, Any] = {
    **SIZES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GROUPED, sliding_window=6, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "neox": lambda: transformers.GPTNeoXConfig(**WIDE),
    "bloom": lambda: transformers.BloomConfig(**SIZES, hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: transformers.FalconConfig(**WIDE, alibi=True, new_decoder_architecture=False, multi_query=False),
    "opt": lambda: transformers.OPTConfig(
        **{**SIZES, "init_std": 0.4}, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        word_embed_proj_dim=32,
    ),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        **SIZES, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=128, window_size=6,
        attention_types=[[["global", "local"], 1]],
    ),
    "lfm2": lambda: transformers.Lfm2Config(**WIDE, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
    "mamba": lambda: transformers.MambaConfig(**SIZES, hidden_size=32, num_hidden_layers=2, state_size=8),
    "mpt": lambda: transformers.MptConfig(**SIZES, d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
}  # fmt: skip


#: Those with different kinds of caches and positions; the others are with the slow tests.
USUAL = ("gpt2", "llama", "mistral", "gemma3", "bloom", "lfm2")


def made(name: str) -> Any:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()


@pytest.mark.parametrize("name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_answers_that_join_and_leave_are_those_of_generate(name: str) -> None:
    module = made(name)
    for seed in range(2):
        cases = random_cases(seed, 9, 32)
        assert [answer.tokens for answer in served(module, cases)] == [due(module, case) for case in cases]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.FalconH1Config(**GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8), "of type Linear"),
        (transformers.RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2), "not a decoder that generates with a cache"),
    ],
    ids=["falcon-h1", "rwkv"],
)
def test_a_model_whose_cache_cannot_be_joined_is_refused_at_the_start(config: Any, says: str) -> None:
    model = LanguageModel(transformers.AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(ValueError, match=rf"cannot be served with --openai: .*{says}"):
        Generator(model, layers_path(model), 4, 128)


def test_an_encoder_with_a_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = LanguageModel(transformers.T5ForConditionalGeneration(config).eval())
    with pytest.raises(ValueError, match="not a decoder that generates with a cache"):
        Generator(model, "decoder.block", 4, 128)


def test_rows_are_laid_out_anew_as_they_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the right for a longer prompt, to the left where all are padded, in more slots, in more rows and in fewer."""
    monkeypatch.setattr(joined, "LEAST", 8)
    seen: set[str] = set()
    lay = joined.JoinedCache._lay

    def watched(self: Any, rows: int, length: int) -> None:
        end, size = self.end, tuple(self.mask.shape)
        lay(self, rows, length)
        after = tuple(self.mask.shape)
        seen.update(["right"] if end and self.end > end else ["left"] if self.end < end else [])
        seen.update(["more slots"] if 0 < size[1] < after[1] else ["fewer slots"] if size[1] > after[1] else [])
        seen.update(["more rows"] if 0 < size[0] < after[0] else ["fewer rows"] if size[0] > after[0] else [])
        assert after[0] <= 8 and after[1] <= 48

    monkeypatch.setattr(joined.JoinedCache, "_lay", watched)
    module = made("llama")
    cases = [Case([7] * 9, 20), *(Case([number + 1] * 3, 4 + number, 2 + number) for number in range(8)), Case([5] * 3, 45, 20)]
    cases += [Case([9] * 14, 6, 24), Case([11] * 30, 2, 44)]
    assert [answer.tokens for answer in served(module, cases, most=8, longest=48)] == [due(module, case) for case in cases]
    assert seen == {"right", "left", "more slots", "fewer slots", "more rows", "fewer rows"}


def test_an_answer_starts_while_another_runs_and_both_share_calls() -> None:
    calls: list[int] = []
    running, coming = Case([3, 4], 20), Case([5], 8, at=6)
    answers = served(made("llama"), [running, coming], calls=calls)
    assert [len(answer.tokens) for answer in answers] == [20, 8]
    assert len(calls) == 2 + 19  # two prompts, and the steps of the first answer, of which the other one shares 7


def test_one_prompt_at_most_comes_between_two_steps() -> None:
    calls: list[int] = []
    served(made("llama"), [Case([3], 6), *(Case([4 + number], 3, at=2) for number in range(3))], calls=calls)
    assert calls[:8] == [1, 1, 1, 2, 1, 4, 1, 4]


def test_draws_are_the_same_alone_and_among_others() -> None:
    module = made("gpt2")
    cases = [Case([number + 1] * (number + 1), 12, 2 * number, temperature=1.0) for number in range(6)]
    alone = [served(module, [Case(case.prompt, case.tokens, temperature=1.0)])[0].tokens for case in cases]
    assert [answer.tokens for answer in served(module, cases)] == alone
    assert len({tuple(tokens[:4]) for tokens in alone}) == 6


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": [0, 5, 90]},
        {"eos_token_id": [3, 88], "min_new_tokens": 4},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_the_generation_configuration_asks_for_is_done_for_each_answer(asked: dict[str, Any]) -> None:
    module = made("llama")
    cases = random_cases(7, 6, 32)
    for case in cases:
        case.tokens += 6
    plain = [due(module, case) for case in cases]
    for name, value in asked.items():
        setattr(module.generation_config, name, value)
    expected = []
    for case in cases:
        ids = torch.tensor([case.prompt])
        with steering(module, case):
            whole = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.tokens, do_sample=False, pad_token_id=0)
        tokens = whole[0, len(case.prompt) :].tolist()
        expected.append(tokens[:-1] if tokens[-1] in asked.get("eos_token_id", ()) else tokens)
    assert expected != plain
    assert [answer.tokens for answer in served(module, cases)] == expected


def test_a_row_that_was_left_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("llama")
    cases = [Case([number + 1, 3], 30, number) for number in range(9)]
    answers: list[Completion] = []
    lost = {0: Addition(torch.full((32,), torch.inf), None)}
    for number in range(6):  # these are cancelled at their third token, and leave keys that are no numbers
        cases[number].additions = lost
        cases[number].tell = lambda number=number: answers[number].cancel() if len(answers[number].tokens) > 2 else None  # type: ignore[misc]
    make = Case.answer
    monkeypatch.setattr(Case, "answer", lambda case: answers.append(make(case)) or answers[-1])
    rows: list[int] = []
    served(module, cases, most=2, calls=rows)
    assert [answer.reason for answer in answers] == ["cancelled"] * 6 + ["length"] * 3
    assert [answer.tokens for answer in answers[6:]] == [due(module, case) for case in cases[6:]]
    assert max(rows) == 2


def test_an_answer_that_fails_at_its_prompt_fails_alone() -> None:
    module = made("llama")
    bad = {1: Addition(torch.ones(33), None)}  # another size than that of the hidden state
    good = {1: Addition(torch.ones(32), None)}
    cases = [Case([3, 4], 16), Case([5, 6], 8, 3, bad), Case([7], 8, 5, good)]
    answers = served(module, cases)
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert [answers[number].tokens for number in (0, 2)] == [due(module, cases[number]) for number in (0, 2)]


def test_an_error_in_a_step_fails_its_answers_and_the_next_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("llama")
    advance = joined.JoinedCache.advance

    def failing(self: Any) -> None:
        advance(self)
        if self.end == 6:
            raise RuntimeError("the device is lost")

    monkeypatch.setattr(joined.JoinedCache, "advance", failing)
    answers = served(module, [Case([1, 2], 9), Case([3], 9, 2), Case([7, 8, 9], 2, 20)])
    assert [str(answer.error) for answer in answers] == ["the device is lost"] * 2 + ["None"]


def test_an_edit_is_for_each_step_or_for_the_prompt_and_may_not_count_steps() -> None:
    module = made("llama")
    model = LanguageModel(module)
    direction = 2 * torch.randn(32, generator=torch.Generator().manual_seed(5))
    case = Case([3, 4, 5], 8)
    with model.edit() as (tracer, each):
        for _ in tracer.iter[:]:
            each.model.layers[1].output[:] += direction
    with model.edit() as first:
        first.model.layers[1].output[:] += direction
    with model.edit() as (tracer, counting):
        for step in tracer.iter[:]:
            counting.model.layers[1].output[:] += step * direction
    ids = torch.tensor([case.prompt])
    found = []
    for edited in (each, first):
        generator = Generator(edited, "model.layers", 2, 128)
        answers = [case.answer(), Case([9], 4).answer()]
        for answer in answers:
            generator.submit(answer)
        until(lambda answers=answers: all(answer.is_over for answer in answers), 240)  # type: ignore[misc]
        found.append(answers[0].tokens)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert answers[0].tokens == edited.generate(ids, **options)[0, 3:].tolist()
    assert found[0] != found[1]
    with pytest.raises(ValueError, match=r"test_batches.py:\d+ distinguishes the steps of a generation"):
        Generator(counting, "model.layers", 2, 128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_a_compiled_model_is_captured_a_few_times(name: str) -> None:
    module = made(name)
    draw, noise = random.Random(3), torch.Generator().manual_seed(3)
    additions = {1: Addition(3 * torch.randn(32, generator=noise), None)}
    cases = []
    for number in range(16):
        prompt = [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(2, 60))]
        cases.append(Case(prompt, draw.randint(1, 40), 3 * number, additions if number % 2 else {}, draw.choice([0, 4, 70])))
    fx.counters.reset()
    answers = served(module, cases, compile={"backend": "aot_eager"})
    assert fx.counters.captures <= 12
    assert [answer.tokens for answer in answers] == [due(module, case) for case in cases]
