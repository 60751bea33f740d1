"""The engine of one model: runs programs on it, in a thread of its own.

One thread runs at a time, so programs of one model take turns, and the event loop stays free for clients. What can go wrong there
falls into four kinds, each an exception that the queue acts upon:

* the program is refused or fails (:class:`~nnsight.remote.wire.errors.InvalidProgramError`,
  :class:`~nnsight.remote.wire.errors.ExecutionFailedError`): its owner is told;
* it runs out of time: the thread is interrupted, which Python does at the next bytecode, so it does not end a call into C that hangs.
  A thread that does not come back is given up and a fresh one takes over, up to a limit, after which the engine is not healthy;
* the thread dies (:class:`EngineLostError`): the job may be tried once more;
* anything else is a fault of the server: it is logged in full, and the owner learns that it happened, not where.

``execute`` takes several payloads, which run as one batch if the engine was given a function for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

#: How long an interrupted thread has to come back, in seconds.
_PATIENCE = 2.0

#: Takes a line that a program prints.
Log = Callable[[str], None]

#: What came of a payload: its result, or what went wrong with it alone.
Outcome = bytes | Exception


class EngineLostError(RuntimeError):
    """The engine died while it ran a job."""


class TimeLimitError(RuntimeError):
    """A job ran out of time."""


class Engine(Protocol):
    """Runs programs on one model.

    Attributes:
        width: How many groups of payloads it takes at a time.
    """

    width: int

    def kind_of(self, payload: bytes) -> Hashable | None:
        """Return what programs have in common that can run as one batch; ``None`` for one that runs alone."""

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        """Run payloads of one kind and return what came of each; ``logs`` are told what each prints, in the loop of the caller.

        Raises:
            EngineLostError: If the engine died.
            TimeLimitError: If it took longer than ``seconds``.
        """

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        """End the run that was given this very list of payloads, soon; it fails."""

    @property
    def healthy(self) -> bool:
        """Whether it can run anything."""

    def close(self) -> None:
        """Let its resources go; it runs nothing any more."""


class _Interrupt(BaseException):
    """Raised in a thread whose job is out of time."""


class _Call:
    """A function that a thread is to run, and the future that waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def settle(self, result: Any, error: BaseException | None) -> None:
        def tell() -> None:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

        try:
            self.loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop has ended: nobody waits any more
            return


class _Worker:
    """A thread that runs one call after the other and can be interrupted."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = self._interrupted = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        call = _Call(function)
        self._calls.put(call)
        return call.future

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
        return self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                result, error = self._run(call.function)
            except BaseException as failure:  # SystemExit and the like end this thread
                call.settle(None, EngineLostError(f"The engine died: {type(failure).__name__}."))
                return
            call.settle(result, error)
            del call, result, error

    def _run(self, function: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return what ``function`` returns, or raises.

        An interrupt that comes too late must not hit what this thread does next, and cannot be taken back: Python 3.11 is
        left with a flag that makes a traced function wait for ever. So it is waited for, within ``try``.
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

    Args:
        run: Turns a payload into a result, and calls its second argument with each line that is printed; raises what is wrong
            with the payload.
        name: Of the thread, for debuggers.
        run_together: Turns payloads of one kind into what came of each; likewise, with a function for each.
        kind_of: See :meth:`Engine.kind_of`; by default no two programs run together.
        most_stuck: How many threads may be given up before the engine is not healthy any more.
    """

    width = 1

    def __init__(
        self,
        run: Callable[[bytes, Log], bytes],
        name: str = "nnsight-engine",
        run_together: Callable[[Sequence[bytes], Sequence[Log]], list[Outcome]] | None = None,
        kind_of: Callable[[bytes], Hashable | None] | None = None,
        most_stuck: int = 2,
    ) -> None:
        self._run = run
        self._name = name
        self._run_together = run_together
        self._kind_of = kind_of
        self._most_stuck = most_stuck
        self._stuck: list[_Worker] = []
        self._worker = _Worker(name)

    def kind_of(self, payload: bytes) -> Hashable | None:
        """Return what programs have in common that can run as one batch; ``None`` for one that runs alone."""
        return self._kind_of(payload) if self._kind_of is not None and self._run_together is not None else None

    @property
    def healthy(self) -> bool:
        """Whether it can run anything: not too many of its threads hang."""
        self._stuck = [worker for worker in self._stuck if worker.alive]
        return len(self._stuck) < self._most_stuck

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        """Run payloads of one kind and return what came of each; see :meth:`Engine.execute`."""
        if not self._worker.alive:
            self._worker = _Worker(self._name)
        told = [_in_loop(log) for log in logs]
        future = self._worker.submit(lambda: self._outcomes(payloads, told))
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
            future.exception()  # seen
        raise TimeLimitError(f"The job ran longer than its {seconds:g} seconds.")

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        """End what runs now, at the next bytecode of Python; there is one run at a time."""
        self._worker.interrupt()

    def close(self) -> None:
        """End the thread once it is idle."""
        self._worker.close()

    def _outcomes(self, payloads: Sequence[bytes], logs: Sequence[Log]) -> list[Outcome]:
        if len(payloads) > 1 and self._run_together is not None:
            return self._run_together(payloads, logs)
        outcomes: list[Outcome] = []
        for payload, log in zip(payloads, logs, strict=True):
            try:
                outcomes.append(self._run(payload, log))
            except Exception as error:
                outcomes.append(error)
        return outcomes


def _in_loop(log: Log) -> Log:
    """Return a function for other threads that has ``log`` called in the loop of this one."""
    loop = asyncio.get_running_loop()

    def tell(line: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(log, line)

    return tell
