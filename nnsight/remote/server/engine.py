"""An engine that runs programs in a thread of its own.

One thread runs at a time, so programs of one model take turns, and the event loop stays free for clients. There are four kinds of errors:

* the program is refused or fails (``InvalidProgramError``, ``ExecutionFailedError``): the owner gets the message;
* it runs out of time: the thread is interrupted at the next bytecode. A thread that hangs in a call into C is abandoned and a new one
  replaces it, up to a limit, after which the engine is not healthy;
* the thread dies (:class:`EngineLostError`): the job may be tried once more;
* everything else is a fault of the server: it is logged in full, and the owner learns only that it happened.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ...program.run.engine import EngineLostError, Log, Outcome, TimeLimitError, in_this_loop

#: Time for an interrupted thread to end its run, in seconds.
_PATIENCE = 2.0

#: How many threads may hang.
_MOST_STUCK = 2


class _Interrupt(BaseException):
    """Raised in a thread whose job is out of time."""


class _Worker:
    """A thread that runs one call after the other and can be interrupted."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._running = self._interrupted = False
        self._died = False  # a thread that has died runs for a moment longer
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((function, future))
        return asyncio.wrap_future(future)

    def interrupt(self) -> None:
        """Raise in the thread, if it is running something."""
        with self._lock:
            if self._running and not self._interrupted:
                self._interrupted = True
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Interrupt))

    def close(self) -> None:
        self._calls.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._died

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result, error = self._run(function)
            except BaseException as failure:  # SystemExit and the like end this thread
                self._died = True
                future.set_exception(EngineLostError(f"The engine died: {type(failure).__name__}."))
                return
            future.set_result(result) if error is None else future.set_exception(error)
            del call, function, future, result, error  # tensors of a job go with it

    def _run(self, function: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return the result of ``function``, and its error.

        A late interrupt must not hit the next call, and cannot be cancelled: Python 3.11 would keep a flag that makes a traced
        function wait for ever. So this waits for it, within ``try``.
        """
        result: Any = None
        error: Exception | None = None
        try:
            with self._lock:
                self._running, self._interrupted = True, False
            try:
                result = function()
            except Exception as failure:
                error = failure
            with self._lock:
                self._running = False
            for _ in range(100 * self._interrupted):
                time.sleep(0.001)
        except _Interrupt:
            self._running = False
            return None, TimeLimitError("The job ran out of time.")
        return result, error


class ThreadEngine:
    """The engine of a model in this process.

    ``run`` returns the outcomes of payloads of one kind, and calls a function of its second argument with each line that a payload prints;
    ``kind_of`` finds the kind of a payload. An engine with several abandoned threads is not healthy.
    """

    width = 1

    def __init__(
        self,
        run: Callable[[Sequence[bytes], Sequence[Log]], list[Outcome]],
        name: str = "nnsight-engine",
        kind_of: Callable[[bytes], Hashable | None] = lambda payload: None,
    ) -> None:
        self._run, self._name, self.kind_of = run, name, kind_of
        self._stuck: list[_Worker] = []
        self._worker = _Worker(name)

    @property
    def healthy(self) -> bool:
        """Whether not too many of its threads hang."""
        self._stuck = [worker for worker in self._stuck if worker.alive]
        return len(self._stuck) < _MOST_STUCK

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        if not self._worker.alive:
            self._worker = _Worker(self._name)
        told = [in_this_loop(log) for log in logs]
        future = self._worker.submit(lambda: self._run(payloads, told))
        try:
            return await asyncio.wait_for(asyncio.shield(future), seconds)
        except TimeoutError:
            self._worker.interrupt()
        done, _ = await asyncio.wait([future], timeout=_PATIENCE)
        if not done:
            self._worker.close()
            self._stuck.append(self._worker)
            self._worker = _Worker(self._name)
        else:
            future.exception()  # retrieved, so that asyncio does not log it
        raise TimeLimitError(f"The job ran longer than its {seconds:g} seconds.")

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        self._worker.interrupt()

    def close(self) -> None:
        """End the thread once it is idle."""
        self._worker.close()
