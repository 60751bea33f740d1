"""Control flow of torch in a block: ``torch.cond`` and other operators that take Python functions.

``torch.cond`` stays in the graph. Its functions run once each, as they do when dynamo traces them; both are computed where it stands, and
``torch.where`` chooses between their results. That is the same as running one of them as long as the other has no effect and cannot
fail, and no gradient is to go through it (an infinite value that was not chosen makes it NaN).

Where that does not hold, and for all other operators, the graph is cut: the operator then runs as Python on real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..effects import is_failing
from ..program import Call, Outcome, Value
from .functions import RANDOM, edits_in_place

if TYPE_CHECKING:
    from .calls import CallRecorder

#: The types of such operators.
ControlOperator = torch._ops.HigherOrderOperator


class StaysOutside(BaseException):
    """An operator cannot be in the graph; the message says why. It is none of the user's to catch."""


def run(recorder: CallRecorder, operator: ControlOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an operator, or run it as Python."""
    name = operator.name()
    reason = f"`torch.{name}` runs Python that depends on a value"
    if name == "cond":
        before, outer = recorder.tables(), recorder.inside
        if recorder.journal is not None:
            recorder.journal.spoil(f"torch.{name}")
        try:
            with recorder:  # which torch has left, to call this
                return _both(recorder, *args, **kwargs)
        except StaysOutside as error:
            if outer is not None:
                raise
            reason = f"`torch.{name}` cannot be in the graph: {error}"
        finally:
            recorder.inside = outer
        recorder.__dict__.update(before)
    return recorder.demand(_as_python(operator), args, kwargs, reason)


def check(values: int, event: Call, outcome: Outcome) -> None:
    """Check a call in a function of ``torch.cond``, before which there were that many ``values``: later ones are the function's own.

    Raises:
        StaysOutside: If it must be made when, and only if, the function is called.
    """
    edited = event.args[0] if event.args else None
    name = check_outside(event.function, isinstance(edited, Value) and edited.index >= values)
    if is_failing(name):
        raise StaysOutside(f"`{name}` may fail because of values")
    if outcome.is_differentiated:
        raise StaysOutside("gradients go through it")


def check_outside(function: Callable[..., Any], own: bool = False) -> str:
    """Check a call, and return its name; ``own`` is whether it would edit what the function itself has made."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if edits_in_place(function) and not own:
        raise StaysOutside("one of its functions edits a tensor in place")
    if name in RANDOM:
        raise StaysOutside("one of its functions draws random numbers")
    return name


def _both(
    recorder: CallRecorder, condition: Any, when_true: Callable[..., Any], when_false: Callable[..., Any], operands: Any = ()
) -> Any:
    """Call both functions of ``torch.cond`` and choose between their results.

    Raises:
        StaysOutside: If that might not be the same.
    """
    if recorder.inside is None:
        recorder.inside = len(recorder.fakes)
    found = [pytree.tree_flatten(function(*operands)) for function in (when_true, when_false)]
    (first, structure), (second, other) = found
    if structure != other:
        raise StaysOutside("its functions return different structures")
    condition = condition.reshape(()).bool()
    chosen = []
    for one, another in zip(first, second, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(another, torch.Tensor):
            if (one.shape, one.dtype, one.device) != (another.shape, another.dtype, another.device):
                raise StaysOutside("its functions return tensors of different kinds")
            chosen.append(torch.where(condition, one, another))
        elif type(one) is type(another) and one == another:
            chosen.append(one)
        else:
            raise StaysOutside("its functions return different values that are no tensors")
    return pytree.tree_unflatten(chosen, structure)


def _as_python(operator: ControlOperator) -> Callable[..., Any]:
    """Return a function that does on real tensors what ``operator`` does."""
    if operator.name() == "flex_attention":  # whose arguments dynamo knows in another form
        return operator
    known: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan}
    return known.get(operator.name(), functools.partial(_compiled, operator))


def _cond(condition: Any, when_true: Callable[..., Any], when_false: Callable[..., Any], operands: Any = ()) -> Any:
    return (when_true if condition else when_false)(*operands)


def _while_loop(goes_on: Callable[..., Any], step: Callable[..., Any], carried: Any, additional: Any = ()) -> Any:
    while goes_on(*carried, *additional):
        carried = step(*carried, *additional)
    return tuple(item.clone() if isinstance(item, torch.Tensor) else item for item in carried)


def _scan(
    combine: Callable[..., Any], initial: Sequence[Any], rows: Sequence[Any], additional_inputs: Any = ()
) -> tuple[Any, ...]:
    carried, given = tuple(initial), []
    for row in zip(*rows, strict=True):
        found = tuple(combine(*carried, *row, *additional_inputs))
        carried = found[: len(carried)]
        given.append(found[len(carried) :])
    return (*carried, *(torch.stack(items) for items in zip(*given, strict=True)))


def _compiled(operator: ControlOperator, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as torch does: compiled, so that tensors in closures of its functions are arguments, too."""
    return torch.compile(lambda *args: operator(*args, **kwargs), backend="eager", fullgraph=True)(*args)
