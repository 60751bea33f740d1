"""A footing of C frames under every block, for those who walk the C stack.

torch collects up to 64 return addresses of the C stack whenever an operation fails, even if nobody ever asks for them.
The stack of a greenlet has no end to stop at: below its first frame lies whatever the model's side has there at that moment.
A walk that gets there takes those bytes for a frame, and now and then crashes the process, on a plain
``IndexError`` in a block. So a block runs on top of more C frames than such a walk visits: iterators, each of which asks
the one inside it for its next item.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain

#: More than the 64 addresses that ``c10::Error`` collects, and the few that it leaves out at the top.
FRAMES = 80


class _Footing:
    """Nested iterators whose innermost is this object, which calls :attr:`function` when it is asked for an item."""

    __slots__ = ("function", "outermost")

    def __init__(self) -> None:
        self.function: Callable[[], None] | None = None
        self.outermost: Iterator[None] = self
        for _ in range(FRAMES):
            self.outermost = chain(self.outermost)

    def __iter__(self) -> _Footing:
        return self

    def __next__(self) -> None:
        function, self.function = self.function, None
        assert function is not None
        function()


class _Idle(threading.local):
    """Those that no block of this thread stands on right now."""

    def __init__(self) -> None:
        self.footings: list[_Footing] = []


_idle = _Idle()


def on_footing(function: Callable[[], None]) -> None:
    """Call ``function`` on top of :data:`FRAMES` frames of the C stack."""
    idle = _idle.footings
    footing = idle.pop() if idle else _Footing()
    footing.function = function
    next(footing.outermost)
    idle.append(footing)  # not after an error: a StopIteration would have used it up
