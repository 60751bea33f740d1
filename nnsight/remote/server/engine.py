"""An engine that runs programs in a thread of its own.

One thread runs at a time, so programs of one model take turns, and the event loop stays free for clients. There are four kinds of errors:

* The program is refused or fails (``InvalidProgramError``, ``ExecutionFailedError``). The owner gets the message.
* The program runs out of time. The thread is interrupted at the next bytecode. If it hangs in a C function, it is abandoned, and a new
  thread replaces it. With several abandoned threads, the engine is not healthy.
* The thread dies (:class:`EngineLostError`). The job may be tried once more.
* Any other error is a fault of the server. It is logged in full, and the owner is only told that the server failed.
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

#: How long an interrupted thread may take to end its run, in seconds.
_PATIENCE = 2.0

#: Number of hanging threads from which on an engine is not healthy.
_MAX_STUCK = 2


class _Interrupt(BaseException):
    """Raised in a thread whose job is out of time."""


class _Worker:
    """A thread that runs one call after the other and can be interrupted."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = self._interrupted = False
        self._died = False  # set by the thread itself, because `is_alive` remains true for a moment
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._interrupted = False
        self._calls.put((function, future))
        return asyncio.wrap_future(future)

    def interrupt(self) -> None:
        """Raise an exception in the thread, if a call is running there. A call that was submitted and has not begun does not begin."""
        with self._lock:
            known, self._interrupted = self._interrupted, True
            if self._running and not known:
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
            except BaseException as failure:  # `SystemExit` and others that are no `Exception` end this thread
                self._died = True
                future.set_exception(EngineLostError(f"The engine died: {type(failure).__name__}."))
                return
            future.set_result(result) if error is None else future.set_exception(error)
            del call, function, future, result, error  # frees the tensors of the job while the thread waits

    def _run(self, function: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return the result of ``function``, and its error or None.

        An interrupt may arrive after the end of the call. It must not hit the next call, and it cannot be cancelled: Python 3.11 would keep
        a flag that makes a traced function wait forever. So this method waits for a requested interrupt, inside of ``try``.
        """
        result: Any = None
        error: Exception | None = None
        try:
            with self._lock:
                if self._interrupted:
                    raise _Interrupt
                self._running = True
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

    Args:
        run: Runs payloads of one kind, and returns their outcomes. Its second argument has a function for each payload, to be called with
            the lines that the payload prints.
        name: Name of the threads.
        kind_of: Returns the kind of a payload; None if the payload must run alone.
        facts_of_model: Returns the :func:`.facts_of` the model, which clients compare with those of their own.
    """

    width = 1

    def __init__(
        self,
        run: Callable[[Sequence[bytes], Sequence[Log]], list[Outcome]],
        name: str = "nnsight-engine",
        kind_of: Callable[[bytes], Hashable | None] = lambda payload: None,
        facts_of_model: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._run, self._name, self.kind_of, self._facts_of_model = run, name, kind_of, facts_of_model
        self._stuck: list[_Worker] = []
        self._worker = _Worker(name)

    @property
    def facts(self) -> dict[str, str]:
        """The facts of the model. Engines of models in other processes do not have this attribute."""
        return self._facts_of_model()

    @property
    def healthy(self) -> bool:
        """Whether fewer than two of its threads hang."""
        self._stuck = [worker for worker in self._stuck if worker.alive]
        return len(self._stuck) < _MAX_STUCK

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
            future.exception()  # marks it as retrieved, so that asyncio does not log it
        raise TimeLimitError(f"The job ran longer than its limit of {seconds:g} seconds.")

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        self._worker.interrupt()

    def close(self) -> None:
        """End the thread once it is idle."""
        self._worker.close()
