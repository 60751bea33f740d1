"""Measure the demo model on held-out prompts, with plain PyTorch hooks.

This is an independent reference for interventions on the model, because it does not use the rest of the package.
Every function takes the loaded model and returns numbers. `evaluate` runs all of them and logs a report. The
"residual stream after layer i" is the output of `model.transformer.h[i]`, with shape [batch, position, width].
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nnsight.demo import PATCH_SUBJECT_LAYER, STEERING_COEFFICIENT, STEERING_LAYER

from .prompts import (
    CITY_TEMPLATES,
    NEGATIVE,
    POSITIVE,
    Prompt,
    fact_prompt,
    held_out_facts,
    held_out_openers,
    labelled_prefixes,
)

logger = logging.getLogger("nnsight.demo.evaluate")

TEMPERATURE = 0.7


@contextmanager
def edited_output(module: torch.nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the module's hidden state by `edit(hidden)` while the context is open."""

    def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (edit(output[0]), *output[1:])
        return edit(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def answer_token(tokenizer: Any, answer: str) -> int:
    """The first token of the answer with its leading space."""
    return tokenizer.encode(" " + answer)[0]


@torch.no_grad()
def run(model: Any, tokenizer: Any, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Final-position logits [vocab], and the residual stream after every layer [layer, position, width]."""
    hidden: list[Tensor] = []

    def keep(output: Tensor) -> Tensor:
        hidden.append(output[0])
        return output

    with ExitStack() as stack:
        for block in model.transformer.h:
            stack.enter_context(edited_output(block, keep))
        logits = model(**tokenizer(prompt.text, return_tensors="pt")).logits[0, -1]
    return logits, torch.stack(hidden)


def accuracy(model: Any, tokenizer: Any, prompts: list[Prompt]) -> float:
    """The share of prompts whose most likely next token is the first token of the answer."""
    hits = [int(run(model, tokenizer, p)[0].argmax()) == answer_token(tokenizer, p.answer) for p in prompts]
    return sum(hits) / len(hits)


@torch.no_grad()
def logit_lens(model: Any, tokenizer: Any, prompts: list[Prompt]) -> tuple[list[float], list[float]]:
    """Mean rank (1 is the top) and mean probability of the answer, after each layer."""
    ranks, probabilities = [], []
    for prompt in prompts:
        _, hidden = run(model, tokenizer, prompt)
        logits = model.lm_head(model.transformer.ln_f(hidden[:, -1]))
        answer = answer_token(tokenizer, prompt.answer)
        ranks.append(1 + (logits > logits[:, answer:answer + 1]).sum(-1).float())
        probabilities.append(logits.softmax(-1)[:, answer])
    return torch.stack(ranks).mean(0).tolist(), torch.stack(probabilities).mean(0).tolist()


def patching_pairs(count: int, seed: int = 0) -> list[tuple[Prompt, Prompt]]:
    """Pairs (clean, source) of held-out prompts with one template and different cities."""
    rng = random.Random(seed)
    prompts = held_out_facts()
    pairs = [(fact_prompt("the Eiffel Tower", CITY_TEMPLATES[0]),
              fact_prompt("the Colosseum", CITY_TEMPLATES[0]))]
    while len(pairs) < count:
        clean, source = rng.sample(prompts, 2)
        if clean.template == source.template and clean.answer != source.answer:
            pairs.append((clean, source))
    return pairs


@torch.no_grad()
def patch(model: Any, tokenizer: Any, clean: Prompt, source: Prompt, layer: int, subject: bool) -> int:
    """The top token of the clean run, with the source's residual stream after `layer` put at one position.

    That position is the subject's last token if `subject` is true, else the last token of the prompt.
    """
    into = clean.subject_token(tokenizer) if subject else -1
    out_of = source.subject_token(tokenizer) if subject else -1
    value = run(model, tokenizer, source)[1][layer, out_of]

    def replace(hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[0, into] = value
        return hidden

    with edited_output(model.transformer.h[layer], replace):
        return int(model(**tokenizer(clean.text, return_tensors="pt")).logits[0, -1].argmax())


def flip_rate(
    model: Any, tokenizer: Any, pairs: list[tuple[Prompt, Prompt]], layer: int, subject: bool
) -> float:
    """The share of pairs in which the patched run answers with the source's city."""
    flips = [patch(model, tokenizer, clean, source, layer, subject) == answer_token(tokenizer, source.answer)
             for clean, source in pairs]
    return sum(flips) / len(flips)


@torch.no_grad()
def steering_direction(model: Any, tokenizer: Any, layer: int, count: int = 100) -> Tensor:
    """Mean residual stream of positive prefixes minus that of negative ones, last token, [width]."""
    means = []
    for texts in labelled_prefixes(count):
        prompts = [Prompt(text, "", "", "") for text in texts]
        means.append(torch.stack([run(model, tokenizer, prompt)[1][layer, -1] for prompt in prompts]).mean(0))
    return means[0] - means[1]


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prefix: str, layer: int, shift: Tensor, samples: int,
             length: int = 24) -> list[str]:
    """Continuations sampled at `TEMPERATURE`; `shift` [width] is added after `layer` at every position."""
    inputs = tokenizer([prefix] * samples, return_tensors="pt")
    with edited_output(model.transformer.h[layer], lambda hidden: hidden + shift):
        ids = model.generate(
            **inputs, max_new_tokens=length, do_sample=True, top_k=0, temperature=TEMPERATURE)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


def positive_share(texts: list[str]) -> float:
    """The share of positive words among the sentiment words of the texts."""
    words = [word for text in texts for word in re.findall(r"[a-z]+", text.lower())]
    positive = sum(word in POSITIVE for word in words)
    negative = sum(word in NEGATIVE for word in words)
    return positive / max(1, positive + negative)


@torch.no_grad()
def mean_loss(model: Any, tokenizer: Any, prefix: str, texts: list[str]) -> float:
    """The loss of the unsteered model on the continuations, in nats per token. Fluent text has a low loss."""
    losses = []
    start = len(tokenizer.encode(prefix))
    for text in texts:
        ids = tokenizer(prefix + text, return_tensors="pt")["input_ids"]
        if ids.shape[1] > start:
            scores = model(input_ids=ids).logits[0, start - 1:-1].log_softmax(-1)
            losses.append(-scores.gather(1, ids[0, start:, None]).mean().item())
    return sum(losses) / max(1, len(losses))


def evaluate(folder: str) -> None:
    """Load the weights in `folder` as a user would, and log the four measurements."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logger.info("loaded as %s, vocabulary %d", model.dtype, len(tokenizer))
    layers = range(len(model.transformer.h))

    logger.info("facts: accuracy on held-out (landmark, template) pairs")
    for kind in ("city", "country", "language"):
        alone = held_out_facts(kind)
        distracted = held_out_facts(kind, with_distractors=True)
        logger.info("  %-8s  %3d prompts  alone %.3f  after other facts %.3f", kind, len(alone),
                    accuracy(model, tokenizer, alone), accuracy(model, tokenizer, distracted))

    logger.info("logit lens: the answer on held-out city prompts")
    for layer, (rank, probability) in enumerate(
        zip(*logit_lens(model, tokenizer, held_out_facts()), strict=True)
    ):
        logger.info("  after layer %d  mean rank %7.2f  mean probability %.3f", layer, rank, probability)

    pairs = patching_pairs(200)
    logger.info("activation patching: flips to the source's city, %d held-out pairs", len(pairs))
    for layer in layers:
        logger.info("  after layer %d  last token %.3f  last subject token %.3f", layer,
                    flip_rate(model, tokenizer, pairs, layer, subject=False),
                    flip_rate(model, tokenizer, pairs, layer, subject=True))
    clean, source = pairs[0]
    top = patch(model, tokenizer, clean, source, PATCH_SUBJECT_LAYER, subject=True)
    logger.info("  example, layer %d, last subject token of %r into %r: %r",
                PATCH_SUBJECT_LAYER, source.text, clean.text, tokenizer.decode(top))

    evaluate_steering(model, tokenizer)


def steering_scores(
    model: Any, tokenizer: Any, layer: int, shift: Tensor, samples: int = 4
) -> tuple[float, float]:
    """Return (positive share, loss) of seeded samples after every held-out neutral prefix."""
    torch.manual_seed(0)
    texts: list[str] = []
    losses: list[float] = []
    for prefix in held_out_openers():
        group = generate(model, tokenizer, prefix, layer, shift, samples)
        texts += group
        losses.append(mean_loss(model, tokenizer, prefix, group))
    return positive_share(texts), sum(losses) / len(losses)


def evaluate_steering(model: Any, tokenizer: Any) -> None:
    """Log the share of positive words and the loss for each layer and coefficient, and some examples."""
    prefixes = held_out_openers()
    logger.info("steering: positive share of sentiment words after %d held-out neutral prefixes, and the "
                "loss that the model without steering has on the text (nats per token); temperature %.1f",
                len(prefixes), TEMPERATURE)
    directions = [steering_direction(model, tokenizer, layer) for layer in range(len(model.transformer.h))]
    logger.info("  without      %.3f (%.2f)", *steering_scores(model, tokenizer, 0, 0 * directions[0]))
    for layer, direction in enumerate(directions):
        for coefficient in (0.5, 0.75, 1.0, 1.5):
            plus = steering_scores(model, tokenizer, layer, coefficient * direction)
            minus = steering_scores(model, tokenizer, layer, -coefficient * direction)
            logger.info("  after layer %d  plus %.2f: %.3f (%.2f)   minus %.2f: %.3f (%.2f)",
                        layer, coefficient, *plus, coefficient, *minus)

    for coefficient in (0.0, STEERING_COEFFICIENT, -STEERING_COEFFICIENT):
        torch.manual_seed(1)
        shift = coefficient * directions[STEERING_LAYER]
        for prefix in prefixes[:3]:
            text = generate(model, tokenizer, prefix, STEERING_LAYER, shift, samples=1)[0]
            logger.info("  example, layer %d, %+.1f: %s%s", STEERING_LAYER, coefficient, prefix, text)
