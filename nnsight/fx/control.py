"""Control flow of torch in a block: ``torch.cond``, ``torch.while_loop``, ``torch.scan`` and other operators that take Python functions.

These stay in the graph. The functions run once, as they do when dynamo traces them, and what they compute is recorded like any other
calls. Of a ``torch.cond`` both functions are computed where it stands, and ``torch.where`` chooses between their results. That is the
same as running one of them as long as the other has no effect and cannot fail, and no gradient is to go through it (an infinite
value that was not chosen makes it NaN). The functions of a loop become graphs of their own, see :mod:`~nnsight.fx.loops`.

Where that does not work, and for all other operators, the graph is cut: the operator then runs as Python on real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from . import loops
from .effects import is_failing
from .functions import RANDOM, edits_in_place
from .program import Call, Outcome, Value

if TYPE_CHECKING:
    from .calls import CallRecorder

#: The types of such operators.
ControlOperator = torch._ops.HigherOrderOperator


class StaysOutside(BaseException):
    """An operator cannot be in the graph; the message says why. It is none of the user's to catch."""


@dataclass(frozen=True)
class Inside:
    """What is known of the calls in a function of an operator while it is recorded.

    Attributes:
        values: How many values there were before: those behind are the function's own.
        computed: Whether they are made even if the function is not chosen.
        is_graph: Whether they become a graph of their own.
    """

    values: int
    computed: bool = False
    is_graph: bool = False


def run(recorder: CallRecorder, operator: ControlOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record an operator, or run it as Python."""
    name = operator.name()
    reason = f"`torch.{name}` runs Python that depends on a value"
    record = _RECORDED.get(name)
    if record is not None:
        before, outer = recorder.tables(), recorder.inside
        if recorder.journal is not None:
            recorder.journal.spoil(f"torch.{name}")
        try:
            with recorder:  # which torch has left, to call this
                return record(recorder, operator, *args, **kwargs)
        except StaysOutside as error:
            if outer is not None:
                raise
            reason = f"`torch.{name}` cannot be in the graph: {error}"
        finally:
            recorder.inside = outer
        recorder.go_back(before)
    return recorder.demand(_as_python(operator), args, kwargs, reason)


def check(inside: Inside, event: Call, outcome: Outcome) -> None:
    """Check a call that is made in a function of an operator.

    Args:
        inside: The function.
        event: The call.
        outcome: What it returns.

    Raises:
        StaysOutside: If it must be made when, and only if, the function is called.
    """
    edited = event.args[0] if event.args else None
    own = isinstance(edited, Value) and edited.index >= inside.values
    name = check_outside(event.function, own)
    if inside.computed and is_failing(name):
        raise StaysOutside(f"`{name}` may fail because of values")
    if outcome.is_differentiated:
        raise StaysOutside("gradients go through it")


def check_outside(function: Callable[..., Any], own: bool = False) -> str:
    """Check a call as :func:`check` does; ``own`` is whether it would edit what the function itself has made.

    Returns:
        The name of what is called.
    """
    name = getattr(function, "__name__", "").partition(".")[0]
    if edits_in_place(function) and not own:
        raise StaysOutside("one of its functions edits a tensor in place")
    if name in RANDOM:
        raise StaysOutside("one of its functions draws random numbers")
    return name


def _both(
    recorder: CallRecorder,
    operator: ControlOperator,
    condition: Any,
    when_true: Callable[..., Any],
    when_false: Callable[..., Any],
    operands: Any = (),
) -> Any:
    """Call both functions of ``torch.cond`` and choose between their results.

    Raises:
        StaysOutside: If that might not be the same.
    """
    outer = recorder.inside
    if outer is None or not outer.computed:
        values = len(recorder.fakes) if outer is None else outer.values
        recorder.inside = Inside(values, computed=True, is_graph=outer is not None and outer.is_graph)
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


def _loop(record: Callable[..., Any], recorder: CallRecorder, operator: ControlOperator, *args: Any, **kwargs: Any) -> Any:
    if recorder.inside is not None and recorder.inside.computed:
        raise StaysOutside("a loop in one of its functions might never end")
    return record(recorder, operator, *args, **kwargs)


#: Operators that are recorded, and how.
_RECORDED: dict[str, Callable[..., Any]] = {
    "cond": _both,
    "while_loop": functools.partial(_loop, loops.while_loop),
    "scan": functools.partial(_loop, loops.scan),
}


def _as_python(operator: ControlOperator) -> Callable[..., Any]:
    """Return a function that does on real tensors what ``operator`` does."""
    name = operator.name()
    if name == "cond":
        return _cond
    if name == "while_loop":
        return _while_loop
    if name == "scan":
        return _scan
    if name == "flex_attention":  # whose arguments dynamo knows in another form
        return operator
    return functools.partial(_compiled, operator)


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
    """Call an operator as torch does: compiled, so that tensors its functions have from around them are arguments, too."""
    return torch.compile(lambda *args: operator(*args, **kwargs), backend="eager", fullgraph=True)(*args)
