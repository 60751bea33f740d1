"""Direct calls of generated code, past the wrappers around it.

A backend returns generated code inside of several wrappers, which switch dynamo off, keep statistics, and prepare inputs and outputs for
autograd. For a graph that computes no gradients, writes to no input and returns no view of one, they do nothing, but take about 90 µs in
the middle of a model. A model in regions pays that for each layer. They also keep inputs alive that are no longer needed.

The first call goes through the wrappers and is watched. If the generated code got exactly the inputs, if its results came back unchanged,
and if modes, versions of tensors and their attributes stayed as they were, later calls go to the generated code. They pass their inputs in
a list, which the code empties, so memory is free as early as in an uncut graph.

Under a profiler all calls go through the wrappers, because Inductor names its ranges there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...runtime.switching.modes import thread_state
from ..torch_compat import generated_code_in

#: Takes its inputs in a list.
Boxed = Callable[[list[Any]], Sequence[Any]]


class Direct:
    """A lowered graph, called with a list of its inputs.

    Args:
        function: A backend's result, which takes the inputs one by one.

    Attributes:
        call: Calls the generated code if the wrappers do nothing, else ``function``; ``None`` until :meth:`first` has found out.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._generated = generated_code_in(function)
        self._lock = threading.Lock()
        self.call: Boxed | None = self.whole if self._generated is None else None

    def whole(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the graph with its wrappers."""
        result: Sequence[Any] = self._function(*inputs)
        return result

    def first(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the graph with its wrappers, and find out what they do."""
        if not self._lock.acquire(blocking=False):  # the code may wait for another thread
            return self.whole(inputs)
        try:
            return self._watched(inputs)
        finally:
            self._lock.release()

    def _watched(self, inputs: list[Any]) -> Sequence[Any]:
        holder, calls = self._generated, []
        generated = holder.current_callable

        def watch(handed: list[Any]) -> Sequence[Any]:
            given, state = list(handed), thread_state()
            made = generated(handed)
            calls.append((given, list(made), state))
            return made

        given, before = list(inputs), (thread_state(), _versions(inputs))
        holder.current_callable = watch
        try:
            results = self.whole(inputs)
        finally:
            holder.current_callable = generated
        changes_nothing = (
            len(calls) == 1
            and _are_same(calls[0][0], given)
            and _are_same(calls[0][1], results)
            and calls[0][2] == before[0]
            and (thread_state(), _versions(given)) == before
            and not any(isinstance(result, torch.Tensor) and vars(result) for result in results)
        )
        self.call = generated if changes_nothing else self.whole
        return results


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))


def _versions(inputs: Sequence[Any]) -> list[int | None]:
    """Return how often each tensor has been written to; tensors of inference mode do not count that."""
    return [tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else None for tensor in inputs]
