"""The greenlets in which blocks run, each one block after the other.

A new greenlet maps memory for its frames and unmaps it at its end, which costs more than the rest of a short block. So a thread keeps
greenlets that have finished a block, and reuses them. Three conditions make a reused worker like a new one:

* *Room.* A greenlet's stack, and its count of Python's recursion depth, begin where it was first switched to. So a worker is reused by
  callers about as deep as its first one. A block can then recurse as deep as in a new greenlet, and switches copy no more of the stack.
* *Context.* Between blocks a worker has no context variables; each block gets a copy of its caller's.
* *Footing.* torch collects up to 64 return addresses of the C stack whenever an operation fails. Below the first frame of a greenlet are
  arbitrary bytes of the model's stack, and a walk that takes them for a frame can crash the process, on a plain ``IndexError``. So a
  worker stands on more C frames than such a walk visits: nested iterators, each of which asks the one inside it for its next item.

Only the first greenlet of a thread reuses workers, because a waiting worker keeps a reference to the greenlet it gave the turn back to.
Blocks that are started in a block, or in a greenlet of the user, run in new ones.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from greenlet import getcurrent, greenlet

#: More than the 64 addresses that ``c10::Error`` collects, and the few that it leaves out at the top.
FRAMES = 80

#: Idle workers that a thread keeps.
KEPT = 16

#: Frames by which a caller may be deeper, or less deep, than the one for which a worker was made.
_SLACK = 16

#: Runs a block to its end. What it raises ends the worker.
Function = Callable[[], None]


class _Idle(threading.local):
    """The workers of this thread that run no block right now, and at which depth each was made; the last used come last."""

    def __init__(self) -> None:
        self.workers: list[tuple[int, greenlet]] = []


_idle = _Idle()


def borrow() -> greenlet:
    """Return a worker whose parent is the current greenlet: it runs the :data:`Function` that it is switched to with."""
    if getcurrent().parent is not None:
        return _made()
    idle = _idle.workers
    if idle:
        depth, worker = idle.pop()  # before anything else: a finalizer may run here, and borrow too
        if _fits(depth) and not worker.dead:  # a signal may have come as it went idle
            return worker
        idle.append((depth, worker))
    here, others = _depth(), [idle.pop() for _ in range(len(idle))]
    others = [(depth, worker) for depth, worker in others if not worker.dead]
    fitting = next((number for number, (depth, _) in enumerate(others) if abs(depth - here) <= _SLACK), None)
    found = _made(here) if fitting is None else others.pop(fitting)[1]
    idle.extend(reversed(others[: KEPT - 1]))  # without those that were last used long ago
    return found


def _made(depth: int | None = None) -> greenlet:
    """Return a new worker, which is kept between blocks if it is told its depth."""
    worker = greenlet(partial(next, _footing))
    worker.depth = depth
    worker.switch()  # up to where it waits for a function
    return worker


def _serve() -> None:
    """Run one function after the other. The tracebacks of their errors lead to this frame, so it holds nothing."""
    depth: int | None = getcurrent().depth
    while True:
        function = _next_function()
        function()
        del function
        if depth is None or not _goes_idle(depth):
            return


def _next_function() -> Function:
    """Give the turn back and wait for a function."""
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch()


def _goes_idle(depth: int) -> bool:
    """Put the worker that is running among the idle ones of its thread, if it may be kept."""
    me, idle = getcurrent(), _idle.workers
    if len(idle) >= KEPT or me.parent is None or me.parent.parent is not None:
        return False
    me.gr_context = None
    idle.append((depth, me))
    return True


class _Server:
    """The innermost of the iterators. One chain of them does for all workers, as long as it does not end."""

    def __iter__(self) -> _Server:
        return self

    def __next__(self) -> None:
        try:
            _serve()
        except StopIteration as error:
            raise RuntimeError("A block let a StopIteration out.") from error


def _made_footing() -> Iterator[None]:
    footing: Iterator[None] = _Server()
    for _ in range(FRAMES):
        footing = chain(footing)
    return footing


_footing = _made_footing()


def _depth() -> int:
    """Return how many frames are below the caller of the function that calls this one."""
    frame, depth = sys._getframe(2), 0
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _fits(depth: int) -> bool:
    """Whether about ``depth`` frames are below the caller of the function that calls this one; as a rule they are as many."""
    try:
        frame = sys._getframe(2 + depth)
    except ValueError:
        return False
    for _ in range(_SLACK):
        if frame.f_back is None:
            return True
        frame = frame.f_back
    return False
