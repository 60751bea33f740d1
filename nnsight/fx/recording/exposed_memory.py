"""Memory of tensors that is seen outside of torch: a NumPy array, a storage.

``array = hidden.numpy()`` cuts the graph, and from there on the array shows each edit of that memory. An edit that waits for a graph to
run would be seen too late. So while such an array is alive, calls that edit the memory are made at once, and so is the
model's part up to the next location, if it edits anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

#: Methods whose result shows the memory of the tensor.
_SHOWING = frozenset("numpy __array__ storage untyped_storage __dlpack__ to_dlpack".split())


class Shown:
    """What shows memory of tensors in one run."""

    def __init__(self) -> None:
        self._shown: list[tuple[Callable[[], Any], int]] = []

    def note(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note a call that has been made on real tensors."""
        if getattr(function, "__name__", "") in _SHOWING:
            with torch._C.DisableTorchFunction():
                self._shown.append((_reference(result), args[0].untyped_storage()._cdata))

    def storages(self) -> frozenset[int]:
        """Return which memory is shown by something that is still alive."""
        if not self._shown:
            return frozenset()
        self._shown = [(shows, storage) for shows, storage in self._shown if shows() is not None]
        return frozenset(storage for _, storage in self._shown)


def _reference(item: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(item)
    except TypeError:
        return lambda: item  # such as a capsule, whose memory somebody else takes
