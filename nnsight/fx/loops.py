"""Loops in a graph: ``torch.while_loop`` and ``torch.scan``.

Their functions become graphs of their own (:mod:`~nnsight.fx.subgraphs`), which torch's operator calls as often as values say. Torch asks
more of such a function than Python does. It may edit what it has made, and nothing else. What it returns shares no memory with
anything, for which copies are made here. And each round of a loop carries on tensors of the same kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import control
from .program import Apply, Enter, Leave, Reference, Value

if TYPE_CHECKING:
    from .calls import CallRecorder


def while_loop(
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
            raise control.StaysOutside("what decides whether it goes on is no tensor of one truth value")
        return found

    def body(*arguments: Any) -> list[Any]:
        return _of_kinds(list(step(*arguments)), kinds)

    _function(recorder, operands, fakes, condition)
    _function(recorder, operands, fakes, body)
    return _apply(recorder, Apply(operator, 2, groups), kinds)


def scan(
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
        raise control.StaysOutside("it is given numbers")
    found = tuple(tuple(recorder.refer(item) for item in group) for group in groups)
    references = [reference for group in found for reference in group]
    if torch.is_grad_enabled() and any(recorder.wants_grad(reference) for reference in references):
        raise control.StaysOutside("gradients go through it")
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
    recorder.inside = control.Inside(len(recorder.fakes), is_graph=True)
    results = function(*arguments)
    is_single = isinstance(results, torch.Tensor)
    results = [results] if is_single else results
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise control.StaysOutside("one of its functions returns something else than tensors")
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
        raise control.StaysOutside("a tensor of one of its functions is kept outside of it")
    return found


def _of_kinds(found: list[Any], kinds: Sequence[torch.Tensor]) -> list[Any]:
    """Return what a round carries on, if it is like what it was given."""
    described = [(item.shape, item.stride(), item.dtype, item.device) for item in kinds]
    if [(item.shape, item.stride(), item.dtype, item.device) for item in found] != described:
        raise control.StaysOutside("a round carries on tensors of other shapes, strides, dtypes or devices than it was given")
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
