"""Temporary changes of settings and functions that all threads share.

Runs may overlap, nested or in several threads. The first run makes a change and the last one undoes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute ``name`` of a module or class to ``value`` in this context. Contexts of one attribute may only overlap nested."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class SharedChange:
    """A change that lasts while any thread is inside this context. ``make`` returns the former state, and ``undo`` restores it."""

    def __init__(self, make: Callable[[], Any], undo: Callable[[Any], object]) -> None:
        self._make, self._undo = make, undo
        self._before: Any = None
        self._users = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = self._make()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._undo(self._before)
