"""Greenlets that run one block after the other.

A new greenlet takes a stack of its own from the operating system and gives it back at its end, which costs more than all
else that a short block does. So a thread keeps a few greenlets that have finished their block, and lends them to the next ones.

Only a greenlet whose block returned is kept. One that ended by an error or from outside goes away with what it held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from greenlet import getcurrent, greenlet

#: Idle greenlets that a thread keeps.
_KEPT = 8


class _Idle(threading.local):
    def __init__(self) -> None:
        self.workers: list[greenlet] = []


_idle = _Idle()


def borrow() -> greenlet:
    """Return a greenlet whose parent is the current one; its first switch takes a function, which it runs.

    The function returns whether the greenlet may be kept. When it has returned, the greenlet switches to its parent.
    """
    workers = _idle.workers
    if not workers:
        return greenlet(_serve)
    worker = workers.pop()
    worker.parent = getcurrent()
    return worker


def _serve(function: Callable[[], bool]) -> None:
    while function():
        del function
        workers, me = _idle.workers, getcurrent()
        parent = me.parent
        # The turn is given back by a call, which keeps the parent alive: only the one that lives as long as the thread.
        if len(workers) >= _KEPT or parent is None or parent.parent is not None:
            return
        me.gr_context = None
        workers.append(me)
        del workers, me
        function = parent.switch()
