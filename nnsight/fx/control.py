"""Control flow of torch in a block: ``torch.cond``, ``torch.while_loop`` and other operators that take Python functions.

``torch.cond`` stays in the graph. Both of its functions run once, as they do when dynamo traces them, what they compute is
recorded like any other calls, and ``torch.where`` chooses between their results. That is the same as running one of them
as long as the other has no effect and cannot fail, and no gradient is to go through it (an infinite value that was not
chosen makes it NaN). Where that does not hold, and for all other operators, the graph is cut: the operator then runs as
Python on real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .effects import FAILING
from .functions import RANDOM, edits_in_place
from .program import Call, Outcome, Value

if TYPE_CHECKING:
    from .calls import CallRecorder

#: The types of such operators.
ControlOperator = torch._ops.HigherOrderOperator


class BothWaysImpossible(BaseException):
    """The functions of a ``torch.cond`` cannot both be computed; the message says why. It is none of the user's to catch."""


def run(recorder: CallRecorder, operator: ControlOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record ``torch.cond`` both ways, or run it, or another operator like it, as Python."""
    reason = f"`torch.{operator.name()}` runs Python that depends on a value"
    if operator.name() == "cond" and not kwargs:
        before, outer = recorder.tables(), recorder.both_ways
        recorder.both_ways = len(recorder.fakes) if outer is None else outer
        if recorder.journal is not None:
            recorder.journal.spoil("torch.cond")
        try:
            with recorder:  # which torch has left, to call this
                return _both(*args)
        except BothWaysImpossible as error:
            if outer is not None:
                raise
            reason = f"`torch.cond` cannot be computed both ways: {error}"
        finally:
            recorder.both_ways = outer
        recorder.go_back(before)
    return recorder.demand(_as_python(operator), args, kwargs, reason)


def check(values: int, event: Call, outcome: Outcome) -> None:
    """Check a call that is made in a function of ``torch.cond`` whether or not that is chosen.

    Args:
        values: How many values there were before.
        event: The call.
        outcome: What it returns.

    Raises:
        BothWaysImpossible: If it must be made only if the function is chosen.
    """
    edited = event.args[0] if event.args else None
    own = isinstance(edited, Value) and edited.index >= values
    name = check_outside(event.function, own)
    if name in FAILING or "linalg" in name:
        raise BothWaysImpossible(f"`{name}` may fail because of values")
    if any(outcome.requires_grad) or outcome.gains_grad is not None:
        raise BothWaysImpossible("gradients go through it")


def check_outside(function: Callable[..., Any], own: bool = False) -> str:
    """Check a call as :func:`check` does; ``own`` is whether it would edit what the function of ``torch.cond`` has made.

    Returns:
        The name of what is called.
    """
    name = getattr(function, "__name__", "").partition(".")[0]
    if edits_in_place(function) and not own:
        raise BothWaysImpossible("one of its functions edits a tensor in place")
    if name in RANDOM:
        raise BothWaysImpossible("one of its functions draws random numbers")
    return name


def _both(condition: Any, when_true: Callable[..., Any], when_false: Callable[..., Any], operands: Any) -> Any:
    """Call both functions of ``torch.cond`` and choose between their results.

    Raises:
        BothWaysImpossible: If that might not be the same.
    """
    found = [pytree.tree_flatten(function(*operands)) for function in (when_true, when_false)]
    (first, structure), (second, other) = found
    if structure != other:
        raise BothWaysImpossible("its functions return different structures")
    condition = condition.reshape(()).bool()
    chosen = []
    for one, another in zip(first, second, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(another, torch.Tensor):
            if (one.shape, one.dtype, one.device) != (another.shape, another.dtype, another.device):
                raise BothWaysImpossible("its functions return tensors of different kinds")
            chosen.append(torch.where(condition, one, another))
        elif type(one) is type(another) and one == another:
            chosen.append(one)
        else:
            raise BothWaysImpossible("its functions return different values that are no tensors")
    return pytree.tree_unflatten(chosen, structure)


def _as_python(operator: ControlOperator) -> Callable[..., Any]:
    """Return a function that does on real tensors what ``operator`` does."""
    name = operator.name()
    if name == "cond":
        return _cond
    if name == "while_loop":
        return _while_loop
    return functools.partial(_compiled, operator)


def _cond(condition: Any, when_true: Callable[..., Any], when_false: Callable[..., Any], operands: Any = ()) -> Any:
    return (when_true if condition else when_false)(*operands)


def _while_loop(goes_on: Callable[..., Any], step: Callable[..., Any], carried: Any, additional: Any = ()) -> Any:
    while goes_on(*carried, *additional):
        carried = step(*carried, *additional)
    return tuple(item.clone() if isinstance(item, torch.Tensor) else item for item in carried)


def _compiled(operator: ControlOperator, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as torch does: compiled, so that tensors its functions have from around them are arguments, too."""
    return torch.compile(lambda *args: operator(*args, **kwargs), backend="eager", fullgraph=True)(*args)
