"""Numbers of a program: what makes a changed number the same program.

A Python number in a call (``h[:, i]``, ``clamp(h, max=m)``) is a constant of the program when it is first seen: most never change,
and a constant gives the best code. When the same call comes with another number at the same place, the number
becomes a :class:`~nnsight.fx.program.Number`, an input of the spliced graph, and from there on every value follows one program.
The sizes of a tensor from outside are treated alike, so a mask whose length follows the prompt is one program, too.

Calls that differ in numbers alone form a :class:`Family`. A loop that changes several numbers at once should not learn them one
trace at a time. So the state that a number led to knows its *twin*, the state that the constant led to, and what the twin's
families hold counts as seen.

Nothing relies on a number being free: what a backend assumes about it (its sign, that an index is in range, or all of its value, where it
is a dimension) becomes a condition of the lowering, see :mod:`~nnsight.fx.lowering.lowering`. A call whose result has another structure
under another number, such as ``chunk(n)``, keeps its constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..program import Call, Constant, Declare, Event, Family, Nest, Number, Outcome, State

#: Functions in which a float decides about a shape, which is looked up by integers alone.
_SHAPED_BY_FLOATS = frozenset("interpolate upsample upsample_bilinear upsample_nearest arange range".split())


class Hole(NamedTuple):
    """Stands for any number of a kind, in the form that the calls of a family share."""

    kind: type
    tag: str = "hole"


class Lifted(NamedTuple):
    """An event as a program has it.

    Attributes:
        event: The event, with a ``Number`` in place of each constant that varies.
        values: What those numbers are now.
        like: The event of its family that was seen first, with all its constants.
    """

    event: Event
    values: tuple[int | float, ...]
    like: Event


def lift(state: State, event: Event, count: int) -> Lifted:
    """Return ``event`` as the program at ``state`` has it.

    Args:
        state: Where the event happens.
        event: The event with all its constants.
        count: How many numbers the program has so far.
    """
    constant = Lifted(event, (), event)
    if event in state.edges:
        return constant
    values: list[int | float] = []

    def hole(kind: type, value: Any) -> Hole:
        values.append(value)
        return Hole(kind)

    form = _replaced(event, hole)
    if not values:
        return constant
    family = state.families.get(form)
    if family is None:
        seen = None if state.twin is None else state.twin.families.get(form)
        made = Family(event, tuple(values)) if seen is None else Family(seen.event, seen.values, seen.varying)
        family = state.families.setdefault(form, made)
    if family.varying is None:
        return constant
    varying = family.varying | {n for n, (old, new) in enumerate(zip(family.values, values, strict=True)) if old != new}
    family.varying = varying
    if not varying:
        return constant
    place, lifted = -1, []

    def number(kind: type, value: Any) -> Any:
        nonlocal place
        place += 1
        if place not in varying:
            return Constant(kind, value) if isinstance(event, Call) else value
        lifted.append(value)
        return Number(count + len(lifted) - 1, kind)

    return Lifted(_replaced(event, number), tuple(lifted), family.event)


def keep_constant(state: State, event: Event) -> None:
    """Let calls of this form at ``state`` keep their constants: their numbers decide what the program is."""
    form = _replaced(event, lambda kind, value: Hole(kind))
    state.families[form].varying = None


def twin_of(state: State, event: Event, like: Event) -> State | None:
    """Return the state that an earlier run reached from ``state`` by the same event with constants."""
    found = None if like is event else state.edges.get(like)
    if found is None and state.twin is not None:
        found = state.twin.edges.get(like)
    return found


def same_structure(one: Outcome, other: Outcome) -> bool:
    """Whether two results of a call are the same to a program: as many tensors, in the same places."""
    return (
        one.structure == other.structure
        and one.leaves == other.leaves
        and one.paths == other.paths
        and one.requires_grad == other.requires_grad
        and one.gains_grad == other.gains_grad
    )


def _replaced(event: Event, replace: Callable[[type, Any], Any]) -> Any:
    """Return ``event`` with ``replace(kind, value)`` in place of each number in it, in order."""

    def inside(item: Any) -> Any:
        if isinstance(item, Constant):
            return replace(item.kind, item.value) if item.kind in kinds else item
        if isinstance(item, Nest):
            return Nest(item.kind, tuple(inside(part) for part in item.items))
        return item

    def sizes(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(int, item) if type(item) is int else item for item in items)

    if isinstance(event, Declare):
        stride = None if event.stride is None else sizes(event.stride)
        return event._replace(shape=sizes(event.shape), stride=stride)
    if not isinstance(event, Call):
        return event
    kinds = (int,) if getattr(event.function, "__name__", "") in _SHAPED_BY_FLOATS else (int, float)
    args = tuple(inside(argument) for argument in event.args)
    return event._replace(args=args, kwargs=tuple((key, inside(value)) for key, value in event.kwargs))
