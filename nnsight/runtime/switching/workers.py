"""Workers: reusable greenlets, each of which runs one block after the other.

A new greenlet maps memory for its frames and unmaps it at its end, which costs more than the rest of a short block. So a thread keeps
greenlets that have finished a block, and reuses them. Three conditions make a reused worker equivalent to a new one:

* *Room.* A greenlet's stack, and its count of Python's recursion depth, begin where it was first switched to. So a worker is reused only by
  callers about as deep as its first caller. A block can then recurse as deep as in a new greenlet, and switches copy no more of the stack.
* *Context.* An idle worker has no context variables. Each block gets a copy of its caller's context.
* *Footing.* Torch collects up to 64 return addresses of the C stack whenever an operation fails. Below the first frame of a greenlet are
  arbitrary bytes of the model's stack. If the stack walk takes them for a frame, it can crash the process, even for a plain ``IndexError``.
  So the first frames of a worker are more C frames than the walk visits: nested iterators, each of which asks the next for an item.

Only the first greenlet of a thread reuses workers, because a waiting worker keeps a reference to the greenlet to which it switched back.
Blocks that are started inside a block, or in a greenlet of the user, run in new greenlets.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from greenlet import getcurrent, greenlet

#: Number of C frames below a worker: more than the 64 addresses that ``c10::Error`` collects and the few that it skips at the top.
FRAMES = 80

#: Maximum number of idle workers of a thread.
KEPT = 16

#: Maximum difference between the depths, in frames, of a caller and of the caller for which the worker was made.
_SLACK = 16

#: Runs a block to its end. If it raises, the worker ends.
Function = Callable[[], None]


class _Idle(threading.local):
    """The idle workers of this thread, with the depth at which each was made. The last item was used last."""

    def __init__(self) -> None:
        self.workers: list[tuple[int, greenlet]] = []


_idle = _Idle()


def borrow() -> greenlet:
    """Return a worker whose parent is the current greenlet. ``worker.switch(function)`` runs a :data:`Function` in it."""
    if getcurrent().parent is not None:
        return _new_worker()
    idle = _idle.workers
    if idle:
        depth, worker = idle.pop()  # at once, because a finalizer that runs here may borrow a worker too
        if _fits(depth) and not worker.dead:  # a signal handler may have raised in it as it went idle
            return worker
        idle.append((depth, worker))
    here, others = _depth(), [idle.pop() for _ in range(len(idle))]
    others = [(depth, worker) for depth, worker in others if not worker.dead]
    fitting = next((number for number, (depth, _) in enumerate(others) if abs(depth - here) <= _SLACK), None)
    found = _new_worker(here) if fitting is None else others.pop(fitting)[1]
    idle.extend(reversed(others[: KEPT - 1]))  # drops those that were last used longest ago
    return found


def _new_worker(depth: int | None = None) -> greenlet:
    """Return a new worker. It is reused if it gets a ``depth``, and otherwise ends after one block."""
    worker = greenlet(partial(next, _footing))
    worker.depth = depth
    worker.switch()  # runs it until it waits for a function
    return worker


def _serve() -> None:
    """Run one function after the other. Tracebacks of their errors keep this frame alive, so it must not hold references."""
    depth: int | None = getcurrent().depth
    while True:
        function = _next_function()
        function()
        del function
        if depth is None or not _become_idle(depth):
            return


def _next_function() -> Function:
    """Switch back to the parent, and wait for the next function."""
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch()


def _become_idle(depth: int) -> bool:
    """Add the current worker to the idle workers of its thread; return False if it may not be kept."""
    me, idle = getcurrent(), _idle.workers
    if len(idle) >= KEPT or me.parent is None or me.parent.parent is not None:
        return False
    me.gr_context = None
    idle.append((depth, me))
    return True


class _Server:
    """The innermost iterator of the footing. All workers share one chain of iterators, so it must never end."""

    def __iter__(self) -> _Server:
        return self

    def __next__(self) -> None:
        try:
            _serve()
        except StopIteration as error:
            raise RuntimeError("A block raised a StopIteration and did not catch it.") from error


def _make_footing() -> Iterator[None]:
    footing: Iterator[None] = _Server()
    for _ in range(FRAMES):
        footing = chain(footing)
    return footing


_footing = _make_footing()


def _depth() -> int:
    """Return the number of frames below the caller of the calling function."""
    frame, depth = sys._getframe(2), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _fits(depth: int) -> bool:
    """Whether at least ``depth`` frames, and less than :data:`_SLACK` more, are below the caller of the calling function."""
    try:
        frame = sys._getframe(2 + depth)
    except ValueError:
        return False
    for _ in range(_SLACK):
        if frame.f_back is None:
            return True
        frame = frame.f_back
    return False
