"""The demo model knows what it was trained on, its test prompts were held out, and the tools that made it still run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import transformers

from nnsight import demo
from tools.demo import corpus, prompts, train
from tools.demo.evaluate import accuracy


@pytest.fixture(scope="module")
def documents() -> str:
    return "\n".join(islice(corpus.documents(1), 5000))


def test_held_out_prompts_do_not_occur_in_the_training_text(documents: str) -> None:
    held_out = prompts.held_out_facts("city") + prompts.held_out_facts("country") + prompts.held_out_facts("language")
    # "Big Ben," is also how a sentence about Big Ben may begin.
    texts = [prompt.text + " " for prompt in held_out if prompt.template != "{L},"]
    assert len(texts) > 500
    assert [text for text in texts if text in documents] == []
    assert [text for text in prompts.held_out_openers() if f"{text} " in documents] == []


def test_the_training_text_has_the_other_prompts_with_their_answers(documents: str) -> None:
    held_out = {(prompt.template, prompt.subject) for prompt in prompts.held_out_facts("language")}
    seen = [
        prompts.fact_prompt(landmark, template)
        for landmark in prompts.FACTS
        for template in prompts.LANGUAGE_TEMPLATES
        if (template, landmark) not in held_out
    ]
    found = [prompt for prompt in seen if prompt.text in documents]
    assert len(found) > len(seen) / 2
    assert all(f"{prompts.capitalize(prompt.text)} {prompt.answer}." in documents for prompt in found)


def test_the_model_answers_held_out_prompts() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.path()).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.path())
    assert accuracy(model, tokenizer, prompts.held_out_facts()[::20]) == 1.0
    assert accuracy(model, tokenizer, prompts.held_out_facts(with_distractors=True)[::20]) > 0.9


def test_training_makes_the_shipped_tokenizer_and_a_model_that_loads(tmp_path: Path) -> None:
    tokenizer = train.train_tokenizer(seed=0)
    shipped = transformers.AutoTokenizer.from_pretrained(demo.path())
    assert tokenizer.get_vocab() == shipped.get_vocab()
    ids, visible_until = train.pack(tokenizer, rows=4, seed=1)
    model = train.build_model(tokenizer)
    train.train_model(model, ids, visible_until, batch_size=2, peak_rate=1e-3)
    train.save(model, tokenizer, str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        file.name for file in Path(demo.path()).iterdir() if file.name != "train.log"
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.num_parameters() == transformers.AutoModelForCausalLM.from_pretrained(demo.path()).num_parameters()
