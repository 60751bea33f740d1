"""The running batch: answers that join and leave at any step are those of transformers' ``generate`` under plain hooks, for many models."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from nnsight import LanguageModel
from nnsight.remote.openai import joined
from nnsight.remote.openai.answers import Answer
from nnsight.remote.openai.batches import Generator
from nnsight.remote.openai.requests import Sampling
from nnsight.steering.choices import Addition, orthonormal
from nnsight.steering.layers import layers_path

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

    def answer(self) -> Answer:
        sampling = Sampling(self.tokens, self.temperature, 1.0, 0, None, ())
        return Answer(tuple(self.prompt), sampling, self.additions, Ids(), self.tell, 5, self.start)


def served(module: Any, cases: Sequence[Case], most: int = 4, longest: int = 128, calls: list[int] | None = None, **options: Any) -> list[Answer]:
    """Return the answers to ``cases``; ``calls`` gets the number of rows of each call of the model."""
    model = LanguageModel(module, **options)
    generator = Generator(model, layers_path(model), most, longest)
    answers = [case.answer() for case in cases]
    waiting, counted = sorted(range(len(cases)), key=lambda number: cases[number].at), [] if calls is None else calls

    def submit(called: int) -> None:
        while waiting and cases[waiting[0]].at <= called:
            generator.submit(answers[waiting.pop(0)])

    def call(module: Any, args: Any, kwargs: Any) -> None:
        counted.append(kwargs["input_ids"].shape[0])
        submit(len(counted))

    hook = module.register_forward_pre_hook(call, with_kwargs=True)
    try:
        while waiting:  # if all are over before the next call, the next one begins anew
            submit(cases[waiting[0]].at)
            wait(lambda: all(answer.is_over for number, answer in enumerate(answers) if number not in waiting))
        wait(lambda: generator._joined is None)
    finally:
        hook.remove()
    return answers


def wait(until: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def steering(module: Any, case: Case) -> Iterator[None]:
    """Steer by hooks as ``case`` says, in one generation."""
    layers = module.get_submodule(layers_path(LanguageModel(module)))
    handles = []
    for number, addition in case.additions.items():
        seen = [0]

        def hook(module: Any, args: Any, output: Any, addition: Addition = addition, seen: list[int] = seen) -> Any:
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

        handles.append(layers[number].register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    "mpt": lambda: transformers.MptConfig(**SIZES, d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
}  # fmt: skip


def made(name: str) -> Any:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()


@pytest.mark.parametrize("name", MODELS)
def test_answers_that_join_and_leave_are_those_of_generate(name: str) -> None:
    module = made(name)
    for seed in range(3):
        cases = random_cases(seed, 9, 32)
        assert [answer.tokens for answer in served(module, cases)] == [due(module, case) for case in cases]
