"""Changes of what belongs to the whole process, for as long as somebody needs them.

Some settings and functions of torch exist once for all threads. A run that needs another one changes it for its own duration, and
several runs may overlap, one inside another or in several threads. The first of them makes the change and the last one undoes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have ``value`` as the attribute ``name`` of a module or class, in this context.

    Contexts of one attribute may lie inside one another, but must not overlap otherwise.
    """
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
    """A change that holds while at least one user is in this context.

    Args:
        make: Makes the change, and returns what was before.
        undo: Undoes it, given that.
    """

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
