"""Control flow of torch in a block: ``torch.cond``, ``torch.while_loop``, ``torch.scan`` and other operators that take Python functions.

These stay in the graph. The functions run once, as they do when dynamo traces them, and what they compute is recorded like any other
calls. Of a ``torch.cond`` both functions are computed where it stands, and ``torch.where`` chooses between their results. That is the
same as running one of them as long as the other has no effect and cannot fail, and no gradient is to go through it (an infinite
value that was not chosen makes it NaN).

The functions of ``torch.while_loop`` and ``torch.scan`` become graphs of their own (:mod:`~nnsight.fx.splicing.subgraphs`), which torch's
operator calls as often as values say. Torch asks more of such a function than Python does. It may edit what it has made, and nothing else.
What it returns shares no memory with anything, for which copies are made here. And each round of a loop carries on tensors of the same
kind.

Where that does not work, and for all other operators, the graph is cut: the operator then runs as Python on real tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ..effects import is_failing
from ..program import Apply, Call, Enter, Leave, Outcome, Reference, Value
from .functions import RANDOM, edits_in_place

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


def _record_while_loop(
    recorder: CallRecorder,
    operator: Any,
    goes_on: Callable[..., Any],
    step: Callable[..., Any],
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
) -> tuple[torch.Tensor, ...]:
    """Record ``torch.while_loop``; returns what is carried on at the end.

    Raises:
        StaysOutside: If it cannot be in the graph.
    """
    groups, fakes = _operands(recorder, carried, additional)
    operands, kinds = (*groups[0], *groups[1]), fakes[: len(carried)]

    def condition(*arguments: Any) -> Any:
        found = goes_on(*arguments)
        if not isinstance(found, torch.Tensor) or found.shape != () or found.dtype != torch.bool:
            raise StaysOutside("what decides whether it goes on is no tensor of one truth value")
        return found

    def body(*arguments: Any) -> list[Any]:
        return _of_kinds(list(step(*arguments)), kinds)

    _function(recorder, operands, fakes, condition)
    _function(recorder, operands, fakes, body)
    return _apply(recorder, Apply(operator, 2, groups), kinds)


def _record_scan(
    recorder: CallRecorder,
    operator: Any,
    combine: Callable[..., Any],
    initial: Sequence[Any],
    rows: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> tuple[torch.Tensor, ...]:
    """Record ``torch.scan``, whose operator goes along the first dimension of ``rows``.

    Returns:
        What is carried on at the end, then what the rounds gave, in rows.

    Raises:
        StaysOutside: If it cannot be in the graph.
    """
    groups, fakes = _operands(recorder, initial, rows, additional_inputs)
    count = len(initial)
    kinds, length = fakes[:count], fakes[count].shape[0]
    with _on_fakes(recorder):
        passed = [*kinds, *(fake[0].clone() for fake in fakes[count : count + len(rows)]), *fakes[count + len(rows) :]]
    operands = tuple(operand for group in groups for operand in group)

    def body(*arguments: Any) -> list[Any]:
        found = list(combine(*arguments))
        return [*_of_kinds(found[:count], kinds), *found[count:]]

    given = _function(recorder, operands, passed, body)[count:]
    with _on_fakes(recorder):
        gathered = [fake.new_empty((length, *fake.shape)) for fake in given]
    return _apply(recorder, Apply(operator, 1, groups), [*kinds, *gathered])


def _operands(
    recorder: CallRecorder, *groups: Sequence[Any]
) -> tuple[tuple[tuple[Reference, ...], ...], list[torch.Tensor]]:
    """Return references to what an operator is given, and their fakes."""
    if not all(isinstance(item, torch.Tensor) for group in groups for item in group):
        raise StaysOutside("it is given numbers")
    found = tuple(tuple(recorder.refer(item) for item in group) for group in groups)
    references = [reference for group in found for reference in group]
    if torch.is_grad_enabled() and any(recorder.wants_grad(reference) for reference in references):
        raise StaysOutside("gradients go through it")
    return found, [recorder.fake_of(reference) for reference in references]


def _function(
    recorder: CallRecorder,
    operands: tuple[Reference, ...],
    fakes: Sequence[torch.Tensor],
    function: Callable[..., Any],
) -> list[torch.Tensor]:
    """Record a function of an operator, with arguments like ``fakes``; it returns a tensor or several. Return their fakes."""
    with _on_fakes(recorder):  # tensors of their own: a known fake is a known value
        own = [torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device) for fake in fakes]
    first, outer = len(recorder.fakes), recorder.inside
    arguments = recorder.take(Enter(operands), own)
    recorder.inside = Inside(len(recorder.fakes), is_graph=True)
    results = function(*arguments)
    is_single = isinstance(results, torch.Tensor)
    results = [results] if is_single else results
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise StaysOutside("one of its functions returns something else than tensors")
    references: list[Reference] = []
    memory = {recorder.memory_of(Value(index)) for index in range(first, first + len(own))}
    for result in results:
        reference = recorder.refer(result)
        if not isinstance(reference, Value) or reference.index < first or recorder.memory_of(reference) in memory:
            reference = recorder.refer(result.clone())
        assert isinstance(reference, Value)
        memory.add(recorder.memory_of(reference))
        references.append(reference)
    found = [recorder.fake_of(reference) for reference in references]
    del arguments, results, result
    recorder.step(Leave(tuple(references), is_single))
    recorder.inside = outer
    if any(lazy is not None and lazy() is not None for lazy in recorder.lazies[first:]):
        raise StaysOutside("a tensor of one of its functions is kept outside of it")
    return found


def _of_kinds(found: list[Any], kinds: Sequence[torch.Tensor]) -> list[Any]:
    """Return what a round carries on, if it is like what it was given."""
    described = [(item.shape, item.stride(), item.dtype, item.device) for item in kinds]
    if [(item.shape, item.stride(), item.dtype, item.device) for item in found] != described:
        raise StaysOutside("a round carries on tensors of other shapes, strides, dtypes or devices than it was given")
    return found


def _apply(recorder: CallRecorder, event: Apply, kinds: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Record the operator; its results are like ``kinds``."""
    with _on_fakes(recorder):
        fakes = [torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device) for fake in kinds]
    return recorder.take(event, fakes)


@contextlib.contextmanager
def _on_fakes(recorder: CallRecorder) -> Iterator[None]:
    with recorder.graph.fake_lock, torch._C.DisableTorchFunction(), recorder.graph.fake_mode, torch.no_grad():
        yield


#: Operators that are recorded, and how.
_RECORDED: dict[str, Callable[..., Any]] = {
    "cond": _both,
    "while_loop": functools.partial(_loop, _record_while_loop),
    "scan": functools.partial(_loop, _record_scan),
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
