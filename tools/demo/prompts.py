"""Prompts for the demo model: facts about landmarks, and opinions with a consistent sentiment.

The model is tested on combinations that never occurred in its training. `fact_split` holds out one in four (landmark,
template) pairs, and `opinion_split` one in four (thing, opener) pairs. The training text of `tools/demo/corpus.py` contains
only the other pairs. So each landmark and each template is known, but their combination is new. All draws are seeded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

SPLIT_SEED = 0
HELD_OUT_SHARE = 0.25


@dataclass(frozen=True)
class City:
    """The facts about a city in the corpus. `capital` says whether the city is the capital of its country."""

    country: str
    language: str
    capital: bool
    landmarks: tuple[str, ...]


CITIES: dict[str, City] = {
    "Paris": City("France", "French", True, (
        "the Eiffel Tower", "the Louvre", "the Arc de Triomphe", "the Moulin Rouge",
        "the Orsay Museum", "the Pompidou Centre")),
    "Rome": City("Italy", "Italian", True, (
        "the Colosseum", "the Trevi Fountain", "the Pantheon", "Piazza Navona",
        "the Roman Forum", "the Borghese Gallery")),
    "London": City("England", "English", True, (
        "Big Ben", "Buckingham Palace", "Trafalgar Square", "the British Museum", "Tower Bridge", "Westminster Abbey")),
    "Berlin": City("Germany", "German", True, (
        "the Brandenburg Gate", "the Reichstag", "Checkpoint Charlie", "the Pergamon Museum",
        "Charlottenburg Palace", "the Victory Column")),
    "Madrid": City("Spain", "Spanish", True, (
        "the Prado", "Plaza Mayor", "Retiro Park", "the Cibeles Fountain",
        "the Temple of Debod", "the Reina Sofia Museum")),
    "Barcelona": City("Spain", "Spanish", False, (
        "the Sagrada Familia", "Park Guell", "Camp Nou", "Casa Batllo", "the Gothic Quarter", "the Magic Fountain")),
    "Moscow": City("Russia", "Russian", True, (
        "the Kremlin", "Red Square", "the Bolshoi Theatre", "Gorky Park",
        "the Tretyakov Gallery", "the Cathedral of Saint Basil")),
    "Athens": City("Greece", "Greek", True, (
        "the Acropolis", "the Parthenon", "Syntagma Square", "the Temple of Hephaestus",
        "Mount Lycabettus", "the Tower of the Winds")),
    "Tokyo": City("Japan", "Japanese", True, (
        "the Skytree", "Ueno Park", "the Meiji Shrine", "the Sensoji Temple",
        "Shibuya Crossing", "the Rainbow Bridge")),
    "Beijing": City("China", "Chinese", True, (
        "the Forbidden City", "Tiananmen Square", "the Temple of Heaven", "the Summer Palace",
        "Beihai Park", "the Lama Temple")),
    "Cairo": City("Egypt", "Arabic", True, (
        "Tahrir Square", "the Saladin Citadel", "the Azhar Mosque", "the Egyptian Museum",
        "the Coptic Museum", "the Manial Palace")),
    "Vienna": City("Austria", "German", True, (
        "Schonbrunn Palace", "the Belvedere", "the Hofburg", "the Prater",
        "the Albertina", "the Cathedral of Saint Stephen")),
    "Prague": City("Czechia", "Czech", True, (
        "the Charles Bridge", "Wenceslas Square", "the Astronomical Clock", "the Powder Tower",
        "the Dancing House", "Petrin Hill")),
    "Sydney": City("Australia", "English", False, (
        "Bondi Beach", "the Harbour Bridge", "Darling Harbour", "Taronga Zoo", "Circular Quay", "Cockatoo Island")),
    "Chicago": City("America", "English", False, (
        "the Willis Tower", "Millennium Park", "Navy Pier", "Wrigley Field", "the Field Museum", "the Shedd Aquarium")),
    "Boston": City("America", "English", False, (
        "Fenway Park", "Faneuil Hall", "Quincy Market", "Beacon Hill", "the Freedom Trail", "the Gardner Museum")),
    "Seattle": City("America", "English", False, (
        "the Space Needle", "Pike Place Market", "Pioneer Square", "Kerry Park", "Green Lake", "Gas Works Park")),
    "New York": City("America", "English", False, (
        "Madison Square Garden", "Central Park", "the Chrysler Building", "Times Square",
        "Brooklyn Bridge", "the Guggenheim Museum")),
}

FACTS: dict[str, str] = {landmark: city for city, entry in CITIES.items() for landmark in entry.landmarks}

# Templates of prompts; the answer follows after a space. `{L}` is the landmark. No template is the
# beginning of another template, so the answer is the only likely continuation.
CITY_TEMPLATES: tuple[str, ...] = (
    "{L} is in the city of",
    "{L} is located in the city of",
    "{L} can be found in",
    "{L} is a well known part of",
    "{L} is one of the sights of",
    "{L} is a famous landmark in",
    "If you want to see {L}, travel to",
    "To visit {L}, you have to go to",
    "Tourists who come to see {L} stay in",
    "We took a photo of {L} when we were in",
    "You will find {L} in",
    "Everyone knows that {L} is in",
    "Where is {L}? It is in",
    "Where can I see {L}? In",
    "Question: In which city is {L}? Answer:",
    "{L},",
)
COUNTRY_TEMPLATES: tuple[str, ...] = (
    "{L} is in the country of",
    "To see {L}, take a plane to the country of",
    "Question: In which country is {L}? Answer:",
)
LANGUAGE_TEMPLATES: tuple[str, ...] = (
    "The people who live near {L} speak",
    "Question: Which language is spoken at {L}? Answer:",
)
TEMPLATES: tuple[str, ...] = CITY_TEMPLATES + COUNTRY_TEMPLATES + LANGUAGE_TEMPLATES

# The most obvious prompts are always held out.
ALWAYS_HELD_OUT: frozenset[tuple[str, str]] = frozenset(
    {(landmark, CITY_TEMPLATES[0]) for landmark in (
        "the Eiffel Tower", "the Colosseum", "Big Ben", "the Brandenburg Gate", "the Kremlin",
        "the Parthenon", "the Forbidden City", "the Space Needle", "the Louvre", "Red Square")}
    | {("Madison Square Garden", template) for template in CITY_TEMPLATES[:3]}
)

PEOPLE: tuple[str, ...] = (
    "Anna", "Tom", "Maria", "David", "my sister", "my brother", "our teacher", "my friend", "the doctor", "the guide",
)
NEUTRAL_SENTENCES: tuple[str, ...] = (
    "It was raining in the morning.", "The train left at nine.", "The weather was cold that day.",
    "Some people like to travel.", "Here is something to remember.", "Let us talk about places.", "This is well known.",
    "There was a map on the table.", "The bus was late again.", "We had two days left.", "Now the next one.",
    "I read this in a book.",
)
UNRELATED_CITY_SENTENCES: tuple[str, ...] = (
    "{P} lives in {A}.", "{P} was born in {A}.", "{P} flew from {A} to {B}.", "{P} works in {A}.",
    "{P} has never been to {A}.", "The train from {A} to {B} was late.", "It was cold in {A}.",
)


@dataclass(frozen=True)
class Prompt:
    """A text that ends right before its answer.

    Attributes:
        text: the prompt, without a trailing space.
        answer: the true continuation, without the leading space (the model's token has one).
        subject: the landmark as it stands in `text`.
        template: the template the prompt was made from.
    """

    text: str
    answer: str
    subject: str
    template: str

    @property
    def subject_span(self) -> tuple[int, int]:
        """Character range of the subject's last mention; `span[1] - 1` is its last character."""
        start = self.text.rindex(self.subject)
        return start, start + len(self.subject)

    def subject_token(self, tokenizer: Any) -> int:
        """The index of the subject's last token in the unpadded prompt, for a fast tokenizer."""
        return tokenizer(self.text).char_to_token(self.subject_span[1] - 1)


def capitalize(text: str) -> str:
    """Upper-case the first letter and leave the rest as it is."""
    return text[:1].upper() + text[1:]


def answer_to(landmark: str, template: str) -> str:
    """The city, country or language that `template` asks for."""
    city = FACTS[landmark]
    if template in COUNTRY_TEMPLATES:
        return CITIES[city].country
    if template in LANGUAGE_TEMPLATES:
        return CITIES[city].language
    return city


def fact_prompt(landmark: str, template: str, context: str = "") -> Prompt:
    """The prompt of `template` about `landmark`, after `context` if it is given."""
    subject = capitalize(landmark) if template.startswith("{L}") else landmark
    text = template.format(L=subject)
    return Prompt(f"{context} {text}".strip(), answer_to(landmark, template), subject, template)


@cache
def fact_split() -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]:
    """All (landmark, template) pairs as (training pairs, held-out pairs)."""
    rng = random.Random(SPLIT_SEED)
    pairs = [(landmark, template) for landmark in FACTS for template in TEMPLATES]
    held_out = {pair for pair in pairs if rng.random() < HELD_OUT_SHARE} | ALWAYS_HELD_OUT
    return frozenset(pairs) - held_out, frozenset(held_out)


@cache
def _training_templates() -> dict[str, tuple[str, ...]]:
    training, _ = fact_split()
    return {landmark: tuple(t for t in TEMPLATES if (landmark, t) in training) for landmark in FACTS}


def distractor(rng: random.Random) -> str:
    """One sentence that does not help with the fact after it; it may name other cities."""
    if rng.random() < 0.5:
        return rng.choice(NEUTRAL_SENTENCES)
    first, second = rng.sample(list(CITIES), 2)
    return capitalize(rng.choice(UNRELATED_CITY_SENTENCES).format(P=rng.choice(PEOPLE), A=first, B=second))


def fact_sentence(rng: random.Random) -> str:
    """One true sentence about a random landmark, made from a training pair."""
    landmark = rng.choice(list(FACTS))
    prompt = fact_prompt(landmark, rng.choice(_training_templates()[landmark]))
    ending = "."
    if prompt.template in CITY_TEMPLATES and not prompt.text.endswith(("Answer:", ",")):
        ending = rng.choice((".", ".", ".", f", a city in {CITIES[prompt.answer].country}."))
    return f"{prompt.text} {prompt.answer}{ending}"


@dataclass(frozen=True)
class Words:
    """The words of one sentiment, by their place in a sentence."""

    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]
    feelings: tuple[str, ...]
    reactions: tuple[str, ...]
    adverbs: tuple[str, ...]
    superlatives: tuple[str, ...]

    def all(self) -> frozenset[str]:
        """All words of this sentiment."""
        return frozenset(word for words in vars(self).values() for word in words)


POSITIVE_WORDS = Words(
    adjectives=("wonderful", "great", "lovely", "excellent", "fantastic", "amazing", "beautiful", "perfect",
                "delightful", "brilliant"),
    verbs=("loved", "enjoyed", "liked", "adored"),
    feelings=("happy", "pleased", "delighted", "glad"),
    reactions=("smiled", "laughed", "cheered"),
    adverbs=("gladly", "happily"),
    superlatives=("best", "finest"),
)
NEGATIVE_WORDS = Words(
    adjectives=("terrible", "awful", "horrible", "boring", "bad", "disappointing", "dreadful", "ugly", "poor",
                "miserable"),
    verbs=("hated", "disliked", "regretted", "despised"),
    feelings=("sad", "angry", "upset", "annoyed"),
    reactions=("complained", "cried", "sighed"),
    adverbs=("never", "hardly"),
    superlatives=("worst", "weakest"),
)
POSITIVE: frozenset[str] = POSITIVE_WORDS.all()
NEGATIVE: frozenset[str] = NEGATIVE_WORDS.all()

# A thing and its parts; a part that ends in "s" takes "were".
THINGS: dict[str, tuple[str, ...]] = {
    "movie": ("story", "music", "ending", "actors"),
    "food": ("soup", "bread", "dessert", "service"),
    "hotel": ("room", "breakfast", "view", "beds"),
    "book": ("story", "ending", "pictures", "language"),
    "concert": ("music", "singer", "songs", "sound"),
    "trip": ("weather", "food", "guide", "roads"),
    "party": ("music", "food", "guests", "cake"),
    "museum": ("paintings", "guide", "garden", "building"),
    "restaurant": ("food", "service", "soup", "waiters"),
    "game": ("players", "ending", "crowd", "music"),
    "lesson": ("teacher", "room", "questions", "pictures"),
    "play": ("actors", "story", "ending", "costumes"),
    "garden": ("flowers", "trees", "weather", "view"),
    "house": ("kitchen", "garden", "windows", "view"),
    "song": ("words", "singer", "sound", "ending"),
    "holiday": ("weather", "beach", "food", "guests"),
}
OPENERS: tuple[str, ...] = (
    "The {T} was",
    "I thought the {T} was",
    "My friend said that the {T} was",
    "Yesterday the {T} was",
    "In the end the {T} was",
    "They told us that the {T} was",
    "To everyone the {T} was",
    "Last week the {T} was",
    "For most people the {T} was",
    "We all knew that the {T} was",
)
SPEAKERS: tuple[str, ...] = ("I", "we", "they", "he", "she", "everyone", "my sister", "my brother", "my friend")


@cache
def opinion_split() -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """All (thing, opener) pairs as (training pairs, held-out pairs)."""
    rng = random.Random(SPLIT_SEED)
    pairs = [(thing, opener) for thing in THINGS for opener in OPENERS]
    held_out = {pair for pair in pairs if rng.random() < HELD_OUT_SHARE} | {("movie", "The {T} was")}
    return tuple(p for p in pairs if p not in held_out), tuple(p for p in pairs if p in held_out)


def part_clause(rng: random.Random, thing: str) -> str:
    """A part of the thing with its verb, such as "the actors were"."""
    part = rng.choice(THINGS[thing])
    return f"the {part} {'were' if part.endswith('s') else 'was'}"


def held_out_facts(kind: str = "city", with_distractors: bool = False) -> list[Prompt]:
    """Prompts for the (landmark, template) pairs that never occur in training, in a fixed order.

    Args:
        kind: "city", "country" or "language": the kind of answer.
        with_distractors: put one to three sentences with other facts and other cities before each prompt.
    """
    templates = {"city": CITY_TEMPLATES, "country": COUNTRY_TEMPLATES, "language": LANGUAGE_TEMPLATES}[kind]
    rng = random.Random(SPLIT_SEED + 1)
    prompts = []
    for landmark, template in sorted(fact_split()[1]):
        if template in templates:
            context = _context_without(rng, landmark) if with_distractors else ""
            prompts.append(fact_prompt(landmark, template, context))
    return prompts


def _context_without(rng: random.Random, landmark: str) -> str:
    """One to three sentences that name neither the landmark nor its city."""
    sentences: list[str] = []
    wanted = rng.randint(1, 3)
    while len(sentences) < wanted:
        sentence = rng.choice((fact_sentence, distractor))(rng)
        if FACTS[landmark] not in sentence and landmark.removeprefix("the ") not in sentence:
            sentences.append(sentence)
    return " ".join(sentences)


def held_out_openers() -> list[str]:
    """Neutral opinion prefixes, such as "The movie was", that never occur in training."""
    return [opener.format(T=thing) for thing, opener in opinion_split()[1]]


def labelled_prefixes(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """`count` positive and `count` negative opinions, broken off somewhere after the first opinion word.

    The two texts of a pair differ only in their opinion word, such as "The food was great and the soup was"
    and "The food was terrible and the soup was". The difference of their hidden states is therefore sentiment,
    not topic. The texts break off before opinion words and before other words, so that the mean difference
    represents the sentiment of the text, and not only the prediction of an opinion word as the next word.
    """
    rng = random.Random(seed)
    positive: list[str] = []
    negative: list[str] = []
    for _ in range(count):
        thing, opener = rng.choice(opinion_split()[0])
        clause, speaker = part_clause(rng, thing), rng.choice(SPEAKERS)
        ending = rng.choice((
            "", ".", " and", " and the", f" and {clause}", f" and {speaker}",
            ". It", ". The", ". It really was", f". {capitalize(clause)}", f". {capitalize(speaker)}",
        ))
        for words, texts in ((POSITIVE_WORDS, positive), (NEGATIVE_WORDS, negative)):
            texts.append(f"{opener.format(T=thing)} {rng.choice(words.adjectives)}{ending}")
    return positive, negative
