"""Calling generated code without what is around it.

What a backend returns is generated code inside of several functions: dynamo is switched off, statistics are kept, and ahead-of-time
autograd prepares inputs and outputs. For a graph that computes no gradients, writes to no input and returns no view of one, all
this does nothing, and yet it takes about 90 µs in the middle of a model, whose weights have taken its place in the processor's
caches. A model in regions pays that for each layer. It also holds on to inputs that nobody needs any more.

That it does nothing is not concluded but watched. The first call goes through everything. If the generated code was handed
the very inputs, in their order, if its very results came back, and if modes, versions of tensors and their attributes were left
alone, later calls go to the generated code at once. They pass their inputs in a list, which the code empties, so memory is
free again as early as in a graph that is not cut.

While a profiler listens, calls go through everything, because inductor names its ranges there.
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
    """A lowered graph that is called with a list of its inputs.

    Args:
        function: What a backend returned, which takes the inputs one by one.

    Attributes:
        whole: Calls ``function``.
        call: Calls the generated code if nothing else has to happen, and ``function`` if it has; ``None`` until one call of
            :meth:`first` has shown which.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._generated = generated_code_in(function)
        self._lock = threading.Lock()
        self.call: Boxed | None = self.whole if self._generated is None else None

    def whole(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the graph as the backend wants it."""
        result: Sequence[Any] = self._function(*inputs)
        return result

    def first(self, inputs: list[Any]) -> Sequence[Any]:
        """Call the graph as the backend wants it, and look at what that does besides calling the generated code."""
        if not self._lock.acquire(blocking=False):  # the code may be anything, and wait for another thread
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
    """How often each tensor has been written to; tensors of inference mode do not count that."""
    return [tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else None for tensor in inputs]
