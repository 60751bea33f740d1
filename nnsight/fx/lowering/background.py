"""Lowering in the background: a thread compiles graphs that only make later runs faster.

Jobs run one at a time, in order, on a thread that starts with the first job. Backends are not thread-safe, so a job holds dynamo's compile
lock, and a capture or a lowering in the foreground waits for it. When the interpreter exits, waiting jobs are dropped and the running job
is interrupted. :func:`wait` returns when no job is left.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from ...runtime.switching.modes import Modes

logger = logging.getLogger("nnsight.fx")


class _Interrupted(BaseException):
    """Raised in the background thread when the interpreter exits."""


class _Worker:
    """The background thread and its queue of jobs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = False
        self._ending = False
        self.thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        with self._changed:
            if self._ending:
                return
            self._jobs.append(job)
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="nnsight-lowering", daemon=True)
                self.thread.start()
                atexit.register(self._end)
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout)

    def _work(self) -> None:
        with contextlib.suppress(_Interrupted):
            while True:
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: bool(self._jobs) or self._ending)
                    if self._ending:
                        return
                    job, self._running = self._jobs.popleft(), True
                try:
                    job()
                except Exception:
                    logger.exception("a job in the background failed")
                del job  # free the tensors that it refers to before the wait for the next job

    def _end(self) -> None:
        """Interrupt the thread: a daemon thread that still runs during the shutdown of the interpreter can crash it."""
        with self._changed:
            self._ending = True
            self._jobs.clear()
            self._changed.notify_all()
        if self.thread is not None and self.thread.ident is not None:
            if self._running:
                thread = ctypes.c_ulong(self.thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Interrupted))
            self.thread.join()


_worker = _Worker()


def submit(job: Callable[[], None]) -> None:
    """Run ``job`` on the background thread, with the grad mode, autocast and device of the caller."""
    modes = Modes.now()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        with modes.entered():
            job()

    _worker.submit(run)


def wait(timeout: float | None = None) -> bool:
    """Wait until all graphs that are lowered in the background are ready.

    Args:
        timeout: Seconds after which to give up; ``None`` waits without a limit.

    Returns:
        Whether all of them are ready.

    Raises:
        RuntimeError: If it is called by a job in the background, which would wait for itself.
    """
    if threading.current_thread() is _worker.thread:
        raise RuntimeError("fx.wait() was called by a job in the background, so it would never return.")
    return _worker.wait(timeout)
