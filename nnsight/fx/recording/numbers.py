"""Numbers of a program: how runs with different Python numbers share one program.

A Python number in a call (``h[:, i]``, ``clamp(h, max=m)``) is a constant of the program when it is first seen: most numbers never
change, and constants give the best code. If a later run makes the same call with another number, the number is *lifted*: it becomes a
:class:`~nnsight.fx.block_events.Number`, an input of the spliced graph. The sizes of a tensor from outside are treated in the same way.

Calls that differ only in numbers form a :class:`Family`. The state after a lifted call refers to its *twin*, the state after the call
with the constant, and reuses the families of the twin. So a loop that changes several numbers at once lifts all of them in one trace.

The assumptions of a backend about a number (its sign, that an index is in range, its value where it is a dimension) become guards of the
lowering, see :mod:`~nnsight.fx.lowering.lowering`. If the structure of a result depends on a number, as for ``chunk(n)``, the call
keeps its constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..block_events import Call, Constant, Declare, Event, Family, Nest, Number, Outcome, State

#: Functions in which a float may determine a shape. Results are looked up by integers, so these floats stay constants.
_SHAPED_BY_FLOATS = frozenset("interpolate upsample upsample_bilinear upsample_nearest arange range".split())


class Hole(NamedTuple):
    """The placeholder for a number of type ``kind`` in the form that all calls of a family share."""

    kind: type
    tag: str = "hole"


class Lifted(NamedTuple):
    """An event after its varying constants have been lifted.

    Attributes:
        event: The event, with a ``Number`` in place of each constant that varies.
        values: The values of these numbers in this run.
        like: The first event of its family, with all its constants.
    """

    event: Event
    values: tuple[int | float, ...]
    like: Event


def lift(state: State, event: Event, count: int) -> Lifted:
    """Lift the varying constants of ``event``, which follows ``state`` in a program with ``count`` numbers so far."""
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
    """Never lift numbers in calls of this form at ``state``: the structure of their results depends on the numbers."""
    form = _replaced(event, lambda kind, value: Hole(kind))
    state.families[form].varying = None


def twin_of(state: State, event: Event, like: Event) -> State | None:
    """Return the state that an earlier run reached by ``like``, the form of ``event`` with constants; ``None`` if there is none."""
    found = None if like is event else state.edges.get(like)
    if found is None and state.twin is not None:
        found = state.twin.edges.get(like)
    return found


def same_structure(one: Outcome, other: Outcome) -> bool:
    """Whether two results of a call have the same tensors in the same places, so that one program serves both."""
    names = ("structure", "leaves", "paths", "requires_grad", "gains_grad")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _replaced(event: Event, replace: Callable[[type, Any], Any]) -> Any:
    """Return ``event`` with ``replace(kind, value)`` in place of each of its numbers, called in order."""

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


def floats_as_tensors(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    as_tensor: Callable[[float, torch.dtype], Any],
    plain: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the torch function ``name``, with floats replaced by ``as_tensor(float, dtype)`` if the result is the same.

    ``plain`` returns, for a tensor argument, a tensor whose dtype and dimensions can be read.
    """
    given = (*args, *kwargs.values())
    if not any(isinstance(argument, float) for argument in given):
        return args, kwargs
    tensors = [plain(argument) for argument in given if isinstance(argument, torch.Tensor)]
    if name == "where":
        tensors = [tensor for tensor in tensors if tensor.dtype != torch.bool]  # the condition takes no part in promotion
    dtypes = {tensor.dtype for tensor in tensors if name[:11] != "masked_fill" or tensor.dtype != torch.bool}
    if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
        return args, kwargs
    if name == "__setitem__":
        if not isinstance(args[2], float):
            return args, kwargs
        return (args[0], args[1], as_tensor(args[2], next(iter(dtypes)))), kwargs
    if all(tensor.dim() == 0 for tensor in tensors):
        return args, kwargs  # a zero-dimensional tensor would take part in type promotion
    if name.startswith(("clamp", "clip")) and any(isinstance(argument, int) for argument in given):
        return args, kwargs  # it takes two numbers or two tensors

    def made(argument: Any) -> Any:
        return as_tensor(argument, torch.float64) if isinstance(argument, float) else argument

    return (
        tuple(made(argument) for argument in args),
        {key: argument if key == "alpha" else made(argument) for key, argument in kwargs.items()},
    )
