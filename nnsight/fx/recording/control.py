"""Control flow of torch in a block: ``torch.cond`` and other operators that take Python functions.

Such an operator cuts the graph and runs as Python on real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: The types of such operators.
ControlOperator = torch._ops.HigherOrderOperator


def as_python(operator: ControlOperator) -> Callable[..., Any]:
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
