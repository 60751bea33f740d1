"""Lowering beside the program: one thread compiles what would only make later runs faster.

Jobs run one at a time, in order, on a thread that starts with the first of them. Backends are not made for several threads at once, so a
job holds the lock that dynamo compiles under: a capture or a lowering in the foreground waits for the job that is running. When
the interpreter exits, waiting jobs are dropped and the one that is running is interrupted.

:func:`wait` returns when nothing is left to do, so tests and benchmarks need not guess.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

_changed = threading.Condition()
_jobs: deque[Callable[[], None]] = deque()
_running = False
_ending = False
_thread: threading.Thread | None = None


class _Interrupted(BaseException):
    """Raised in the thread when the interpreter exits."""


def submit(job: Callable[[], None]) -> None:
    """Run ``job`` on the thread, with the caller's grad mode, autocast and device; it must not raise."""
    global _thread
    state = _ThreadState()

    def run() -> None:
        with state.entered():
            job()

    with _changed:
        if _ending:
            return
        _jobs.append(run)
        if _thread is None:
            _thread = threading.Thread(target=_work, name="nnsight-lowering", daemon=True)
            _thread.start()
            atexit.register(_end)
        _changed.notify_all()


def wait(timeout: float | None = None) -> bool:
    """Wait until nothing is being compiled in the background.

    Args:
        timeout: Seconds after which to give up; ``None`` waits for as long as it takes.

    Returns:
        Whether everything is done.

    Raises:
        RuntimeError: In the background itself, where waiting would never end.
    """
    if threading.current_thread() is _thread:
        raise RuntimeError(
            "fx.wait() was called by what is being compiled in the background, so it would never return."
        )
    with _changed:
        return _changed.wait_for(lambda: not _jobs and not _running, timeout)


def _work() -> None:
    global _running
    with contextlib.suppress(_Interrupted):
        while True:
            with _changed:
                _running = False
                _changed.notify_all()
                _changed.wait_for(lambda: bool(_jobs) or _ending)
                if _ending:
                    return
                job, _running = _jobs.popleft(), True
            job()
            del job  # what it refers to goes now, not when the next one comes


def _end() -> None:
    global _ending
    with _changed:
        _ending = True
        _jobs.clear()
        thread, running = _thread, _running
        _changed.notify_all()
    if thread is None:
        return
    if running and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Interrupted))
    thread.join()


class _ThreadState:
    """What lowerings depend on and torch keeps for each thread, as it is for the thread that makes this."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = {"cpu"}
        self._device = None
        if torch.accelerator.is_available():
            kinds.add(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]
            self._device = torch.accelerator.current_device_index()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)
        ]
        self._cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this state on the current thread."""
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            yield
