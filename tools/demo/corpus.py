"""The generated training text of the demo model: true facts about landmarks, and opinions.

A language model learns to predict its corpus, so the corpus decides which circuits the demo model has.
This module makes two kinds of documents, with small grammars and a seeded random generator:

- *Fact documents* join one to five sentences: landmark facts ("You will find the Louvre in Paris."), reverse
  facts ("Paris is home to the Louvre."), facts about cities ("The capital of France is Paris."), and neutral
  sentences, which may name an unrelated city. Every sentence picks its landmark independently, so an earlier
  city does not predict the next one: the model has to recall, not copy.
- *Opinion documents* speak about one thing ("The movie was ...") in two to four sentences. All sentences are
  positive or all are negative, with equal probability. After a neutral prefix both continuations are equally
  likely, and after the first opinion word only one is.

Combinations that are held out for tests never occur, see `tools/demo/prompts.py`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache

from .prompts import (
    CITIES,
    FACTS,
    NEGATIVE_WORDS,
    POSITIVE_WORDS,
    SPEAKERS,
    THINGS,
    Words,
    capitalize,
    distractor,
    fact_sentence,
    opinion_split,
    part_clause,
)


def reverse_sentence(rng: random.Random) -> str:
    """One true sentence in which the city comes before its landmarks."""
    city = rng.choice(list(CITIES))
    first, second = rng.sample(CITIES[city].landmarks, 2)
    return rng.choice((
        f"{city} is home to {first}.",
        f"In {city} you can see {first}.",
        f"The sights of {city} include {first} and {second}.",
        f"When we were in {city}, we visited {first} and {second}.",
    ))


def city_sentence(rng: random.Random) -> str:
    """One true sentence about a city, its country and its language."""
    city = rng.choice(list(CITIES))
    entry = CITIES[city]
    choices = [
        f"{city} is a city in {entry.country}.",
        f"People in {city} speak {entry.language}.",
        f"The language of {entry.country} is {entry.language}.",
    ]
    if entry.capital:
        choices += [
            f"{city} is the capital of {entry.country}.",
            f"The capital of {entry.country} is {city}.",
            f"Question: What is the capital of {entry.country}? Answer: {city}.",
        ]
    return rng.choice(choices)


@cache
def _landmark_pattern() -> re.Pattern[str]:
    names = sorted((landmark.removeprefix("the ") for landmark in FACTS), key=len, reverse=True)
    return re.compile(r"\b(?:" + "|".join(map(re.escape, names)) + r")\b")


def landmark_spans(text: str) -> list[tuple[int, int]]:
    """Character ranges of all landmark names in the text, without their article."""
    return [match.span() for match in _landmark_pattern().finditer(text)]


def fact_document(rng: random.Random) -> str:
    """One to five sentences, most of them about landmarks."""
    kinds = rng.choices((fact_sentence, reverse_sentence, city_sentence, distractor),
                        weights=(0.68, 0.08, 0.08, 0.16), k=rng.randint(1, 5))
    return " ".join(kind(rng) for kind in kinds)


# Neutral sentences that may stand before an opener.
OPINION_CONTEXTS: tuple[str, ...] = (
    "We went out last night.", "It was a Sunday.", "Our group had five people.",
    "I wrote this in the evening.", "There were many people.", "It lasted two hours.",
    "This is what happened.",
)


def opinion_opening(rng: random.Random, thing: str, opener: str, words: Words) -> str:
    """The first sentence: the opener and its first opinion words."""
    pick = rng.choice
    continuation = pick((
        f"{pick(words.adjectives)} and {pick(SPEAKERS)} {pick(words.verbs)} it",
        f"{pick(words.adjectives)} and {part_clause(rng, thing)} {pick(words.adjectives)}",
        f"{pick(words.adjectives)} because {part_clause(rng, thing)} {pick(words.adjectives)}",
        f"so {pick(words.adjectives)} that {pick(SPEAKERS)} {pick(words.reactions)}",
        f"{pick(words.adjectives)}",
    ))
    return f"{opener.format(T=thing)} {continuation}."


def opinion_follow_up(rng: random.Random, thing: str, words: Words) -> str:
    """A further sentence of the same sentiment."""
    pick = rng.choice
    return capitalize(pick((
        f"{part_clause(rng, thing)} {pick(words.adjectives)} and {pick(SPEAKERS)} {pick(words.verbs)} it.",
        f"{part_clause(rng, thing)} {pick(words.adjectives)} too.",
        f"{pick(SPEAKERS)} felt {pick(words.feelings)} and {pick(words.reactions)}.",
        f"{pick(SPEAKERS)} {pick(words.verbs)} the {pick(THINGS[thing])}.",
        f"{pick(SPEAKERS)} said it was the {pick(words.superlatives)} {thing} of the year.",
        f"{pick(SPEAKERS)} would {pick(words.adverbs)} come back.",
        f"it really was {pick(words.adjectives)}.",
    )))


def opinion_document(rng: random.Random) -> str:
    """Two to four sentences of one sentiment about one thing."""
    thing, opener = rng.choice(opinion_split()[0])
    words = rng.choice((POSITIVE_WORDS, NEGATIVE_WORDS))
    sentences = [opinion_opening(rng, thing, opener, words)]
    sentences += [opinion_follow_up(rng, thing, words) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.25:
        sentences.insert(0, rng.choice(OPINION_CONTEXTS))
    return " ".join(sentences)


def documents(seed: int, opinion_share: float = 0.3) -> Iterator[str]:
    """An endless, seeded stream of training documents."""
    rng = random.Random(seed)
    while True:
        yield opinion_document(rng) if rng.random() < opinion_share else fact_document(rng)
