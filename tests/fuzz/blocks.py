"""Random blocks: for each of a few occurrences of a model, in order, some statements about the value there.

A block is kept as data: actors (the invokes of a trace, or the edit before it), each
with segments, each with an occurrence and its statements. Statements are Python text in which three words are open, because the
program and the reference write them differently: ``AT`` is the value at the occurrence, ``SKIP`` skips the module there, and
``EARLY`` is a location that has gone by.

Statements are drawn from the templates of :mod:`~tests.fuzz.statements`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from .occurrences import Occurrence, Place, put
from .statements import (
    AROUND,
    AROUND_MISTAKES,
    AROUND_TRIES,
    CUTS,
    EDITS,
    EXPRESSIONS,
    MISTAKES,
    PARTS,
    PLAIN_AROUND,
    PLAIN_EDITS,
    PLAIN_EXPRESSIONS,
    READS,
    TRIES,
    VALUE_TRIES,
)

Draw = Callable[[Any], Any]



@dataclass(frozen=True)
class Segment:
    """What an actor does at an occurrence.

    Attributes:
        occurrence: Where.
        name: What the value is called.
        inputs: Whether all arguments are read, rather than the first.
        statements: What is done.
        early: An occurrence that has gone by, if a statement asks for one.
    """

    occurrence: Occurrence
    name: str
    inputs: bool
    statements: tuple[str, ...]
    early: Occurrence | None = None


@dataclass(frozen=True)
class Actor:
    """One invoke of a trace, or the edit before it.

    Attributes:
        kind: ``trace`` for a trace with its input, ``invoke``, ``all`` for an invoke without input, ``edit``.
        segments: What it does, in the order of the occurrences.
    """

    kind: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class BlockPlan:
    """A block as data.

    Attributes:
        actors: The edit, if any, then the invokes.
        stops: Whether the trace is stopped at the end of the last segment.
        caches: Whether a cache is kept.
        gradients: Names of tensors whose gradient is read in a backward pass at the end, in forward order.
        scales: Whether these gradients are doubled on the way.
        cuts: Whether a statement may need a value.
        plain: Whether it is straight code on values of the model and variables, so that it can be replayed.
    """

    actors: tuple[Actor, ...]
    stops: bool = False
    caches: bool = False
    gradients: tuple[str, ...] = ()
    scales: bool = False
    cuts: bool = False
    plain: bool = False

    @property
    def saved(self) -> list[str]:
        """Names that are saved."""
        statements = [line for actor in self.actors for segment in actor.segments for line in segment.statements]
        return [line.split(" = ")[0] for line in statements if line.endswith(".save()")]

    @property
    def rows(self) -> int:
        """Number of inputs it takes."""
        return sum(actor.kind in ("trace", "invoke") for actor in self.actors)


class _Author:
    """Draws the statements of one actor."""

    def __init__(self, draw: Draw, prefix: str, cutting: bool, noise: bool, may_save: bool, plain: bool) -> None:
        self.may_save, self.plain = may_save, plain
        self.draw, self.prefix, self.cutting = draw, prefix, cutting
        self.full: list[str] = ["w.noise"] if noise else []
        self.parts: list[str] = []
        self.count = 0
        self.cuts = False

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.prefix}{self.count}"

    def fill(self, template: str, here: str, new: str = "") -> str:
        """Put names into a template."""
        found = template
        if re.search(r"\bP\b", template):
            part = self.draw(st.sampled_from(self.parts)) if self.parts else f"{here}[:, 1:]"
            found = re.sub(r"\bP\b", part, found)
        if re.search(r"\bV\b", template):
            found = re.sub(r"\bV\b", self.draw(st.sampled_from([here, *self.full])), found)
        if re.search(r"\bT\b", template):
            target = self.draw(st.sampled_from([here, here, *self.full[-3:]]))
            found = re.sub(r"(?<!\.)\bT\b", target, found)
        return re.sub(r"\bN\b", new, found)

    def expression(self, here: str) -> str:
        return self.fill(self.draw(st.sampled_from(PLAIN_EXPRESSIONS if self.plain else EXPRESSIONS)), here)

    def statement(self, here: str, place: Place, value: str) -> list[str]:
        lines = self._statement(here, place, value)
        around = PLAIN_AROUND if self.plain else [*AROUND, *AROUND_TRIES] if self.cutting else AROUND
        if any(".save()" in line for line in lines) or self.draw(st.integers(0, 7)):
            return lines
        template = self.draw(st.sampled_from(around))
        self.cuts = self.cuts or template in AROUND_TRIES
        return [surrounded(re.sub(r"\bN\b", self.fresh("i"), template), lines)]

    def _statement(self, here: str, place: Place, value: str) -> list[str]:
        kinds = ["read", "edit", "write", "new", "part", "fill"]
        kinds += [] if self.plain else ["try"]
        kinds += ["cut", "value"] if self.cutting else []
        kind = self.draw(st.sampled_from(kinds))
        if kind == "read" and self.plain:
            return [self.fill(self.draw(st.sampled_from(["N = T.save()", "N = (T * 2.0).save()"])), here, self.fresh("s"))]
        if kind == "read":
            line = self.fill(self.draw(st.sampled_from(READS)), here, self.fresh("s"))
            return [line if self.may_save else line.removesuffix(".save()")]
        if kind == "edit":
            template = self.draw(st.sampled_from(PLAIN_EDITS if self.plain else EDITS))
            if template.startswith("P ") and not self.parts:  # `h[:, 1:] += 1` would assign to an item of `h`
                template = "T += 1.0"
            return [self.fill(template, here)]
        if kind in ("write", "fill"):
            if kind == "fill" and "{**H" in place.rebuild and place.access.count("[") == 1 and ".input" not in value:
                return [f"{place.access.replace('H', value)} = {self.expression(here)}"]
            made = self.fresh("n")
            again = [f"w.kept.append({place.access.replace('H', 'AT')})"] if kind == "fill" and not self.plain else []
            filled = put(place.rebuild, made).replace("H", value)
            lines = [f"{made} = {self.expression(here)}", f"AT = {filled}", *again]
            self.full.append(made)
            return lines
        if kind == "new":
            made = self.fresh("v")
            lines = [f"{made} = {self.expression(here)}"]
            self.full.append(made)
            return lines
        if kind == "part":
            made = self.fresh("p")
            lines = [f"{made} = {self.fill(self.draw(st.sampled_from(PARTS)), here)}"]
            self.parts.append(made)
            return lines
        self.cuts = self.cuts or kind != "try"
        made = self.fresh("c")
        template = self.draw(st.sampled_from({"try": TRIES, "value": VALUE_TRIES}.get(kind, CUTS)))
        if re.search(r"\bN = ", template):
            self.full.append(made)
        return [self.fill(template, here, made)]


def surrounded(around: str, lines: list[str]) -> str:
    """Return a template with ``lines`` in the place of its body."""
    body = re.search(r"^( *)BODY$", around, re.MULTILINE)
    assert body is not None
    text = "\n".join(lines).replace("\n", f"\n{body.group(1)}")
    return around[: body.end(1)] + text + around[body.end() :]


def _segment(author: _Author, occurrence: Occurrence, number: int, mark: bool) -> tuple[Segment, str]:
    """Draw what happens at an occurrence; return it and the name of the tensor there."""
    draw = author.draw
    inputs = occurrence.key == "input" and draw(st.booleans())
    places = occurrence.first if occurrence.key == "input" and not inputs else occurrence.places
    value = f"h{author.prefix}{number}"
    place = draw(st.sampled_from(places))
    tensor = value
    statements: list[str] = []
    if place.access != "H":
        tensor = f"t{author.prefix}{number}"
        statements.append(f"{tensor} = {place.access.replace('H', value)}")
    if not place.floating:
        noted = [f"w.kept.append({tensor})", f"w.log.append(tuple({tensor}.shape))"]
        statements.append(f"{author.fresh('s')} = {tensor}.clone().save()" if author.plain else draw(st.sampled_from(noted)))
        if draw(st.booleans()):
            filled = put(place.rebuild, f"{tensor}.flip(1)").replace("H", value)
            statements.append(f"AT = {filled}")
        return Segment(occurrence, value, inputs, tuple(statements)), ""
    if mark:
        statements.append(f"{tensor}.requires_grad_()")
        author.cuts = True
    for _ in range(draw(st.integers(1, 3))):
        statements += author.statement(tensor, place, value)
    author.full.append(tensor)
    return Segment(occurrence, value, inputs, tuple(statements)), tensor


@st.composite
def blocks(draw: Draw, occurrences: tuple[Occurrence, ...], grad: bool, backward: bool = False) -> BlockPlan:
    """Draw a block for a model with these occurrences; with ``backward`` it has a backward pass."""
    form = "trace" if backward else draw(st.sampled_from(["trace", "trace", "trace", "invokes", "edit", "plain"]))
    plain = form == "plain"
    cutting = draw(st.sampled_from([False, False, True])) and not plain
    if form == "invokes":
        kinds = draw(
            st.sampled_from([["invoke"], ["invoke", "invoke"], ["invoke", "all"], ["invoke", "all", "invoke"]])
        )
    else:
        kinds = ["edit", "trace"] if form == "edit" else ["trace"]
    ends = ["", "", "", "", "stop", "skip", "mistake", "gradient" if grad else ""]
    end = "" if plain else draw(st.sampled_from(["gradient"] if backward else ends))
    actors, cuts, gradients, marked = [], False, [], False
    for position, kind in enumerate(kinds):
        author = _Author(draw, "abc"[position], cutting and kind != "edit", kind == "trace", kind != "edit", plain)
        able = [
            number
            for number, occurrence in enumerate(occurrences)
            if (occurrence.first if occurrence.key == "input" else occurrence.places)
            and (not (plain or kind == "edit") or occurrence.number == 0)
        ]
        chosen = sorted(draw(st.lists(st.sampled_from(able), min_size=kind == "trace", max_size=4, unique=True)))
        segments: list[Segment] = []
        last = position == len(kinds) - 1
        for order, number in enumerate(chosen):
            occurrence = occurrences[number]
            mark = end == "gradient" and kinds == ["trace"]
            segment, tensor = _segment(author, occurrence, order, mark)
            segments.append(segment)
            if mark and tensor:
                marked = True
                gradients.append(tensor)
            if end == "skip" and kinds == ["trace"] and tensor and _can_skip(occurrences, number):
                segments[-1], after = _skipping(author, occurrences, number, segment, tensor)
                segments += [
                    _segment(author, occurrences[later], order + 1 + more, False)[0]
                    for more, later in enumerate(later for later in chosen if later in after)
                ]
                break
        if end == "mistake" and last and segments:
            segments[-1] = _mistaken(author, occurrences, chosen, segments[-1])
        actors.append(Actor(kind, tuple(segments)))
        cuts = cuts or author.cuts
    return BlockPlan(
        tuple(actors),
        stops=end == "stop" and kinds == ["trace"],
        caches=kinds == ["trace"] and end == "" and not plain and draw(st.sampled_from([False, False, False, True])),
        gradients=tuple(gradients),
        scales=marked and draw(st.booleans()) and bool(gradients),
        cuts=cuts or marked,
        plain=plain,
    )


def _can_skip(occurrences: tuple[Occurrence, ...], number: int) -> bool:
    occurrence = occurrences[number]
    if occurrence.key != "input" or ".source." in occurrence.path:
        return False
    output = occurrences[_end_of(occurrences, number)]
    usable = sum(place.floating for place in output.places)
    return usable == len(re.findall(r"\bE\b", output.whole)) and bool(output.whole)  # all of the shape that expressions have


def _end_of(occurrences: tuple[Occurrence, ...], number: int) -> int:
    """Return the number of the output that belongs to an input."""
    here = occurrences[number]
    return next(
        later
        for later in range(number, len(occurrences))
        if (occurrences[later].path, occurrences[later].key, occurrences[later].number)
        == (here.path, "output", here.number)
    )


def _skipping(
    author: _Author, occurrences: tuple[Occurrence, ...], number: int, segment: Segment, tensor: str
) -> tuple[Segment, set[int]]:
    """Let the module at occurrence ``number`` be skipped; return the segment, and the occurrences that keep their numbers."""
    until = _end_of(occurrences, number)
    inside = {occurrence.path for occurrence in occurrences[number + 1 : until]}
    after = {later for later in range(until, len(occurrences)) if occurrences[later].path not in inside}
    value = put(occurrences[until].whole, "made")
    made = author.fresh("n")
    lines = (f"{made} = {author.expression(tensor)}", f"SKIP({value.replace('made', made)})")
    return Segment(segment.occurrence, segment.name, segment.inputs, (*segment.statements, *lines)), after


def _mistaken(author: _Author, occurrences: tuple[Occurrence, ...], chosen: list[int], segment: Segment) -> Segment:
    template = author.draw(st.sampled_from(MISTAKES))
    early = None
    if template == "EARLY":
        if not chosen[-1]:
            template = "1 / 0"
        else:
            early = occurrences[author.draw(st.integers(0, chosen[-1] - 1))]
            # In a loop over occurrences it would be the next one that is waited for.
            if segment.occurrence.number or early.number or (early.path, early.key) == (segment.occurrence.path, segment.occurrence.key):
                template, early = "1 / 0", None
    here = author.full[-1] if author.full else segment.name
    around = author.draw(st.sampled_from(AROUND_MISTAKES))
    wrong = surrounded(around, [re.sub(r"\bT\b", here, template)])
    return Segment(segment.occurrence, segment.name, segment.inputs, (*segment.statements, wrong), early)
