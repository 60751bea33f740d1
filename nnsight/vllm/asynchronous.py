"""Traces that are awaited: ``VLLM(..., mode="async")``.

``with model.trace(...)`` captures its block and sends it off without waiting. ``tracer.backend()`` is the stream of vLLM's outputs for
it, step by step, and the last output has the saved values, by name, as ``.saves``. All traces that are under way share the steps
of the engine, so this is how programs with an event loop, such as web servers, run many at a time.

The engine is still in this process: blocks and model have to take turns, with the caller's own objects, and vLLM's own
asynchronous engine lives in another process, which does not have them. So a thread makes the steps. It lives while there are
requests. Blocks run in it from their first line to their last, because the model runs there. The thread wakes coroutines that wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..tracing import Backend, Tracer
from ..tracing.errors import show_only_users_frames
from ..tracing.saving import saves
from .engine import ITSELF, VLLMEngine
from .samples import Request
from .stack_room import with_room

if TYPE_CHECKING:
    from .request_tracing import RequestTracer


class Stream:
    """vLLM's outputs for the requests of a trace, as they come: for ``async for``, ``async with``, and ``await``, which returns the last.

    Each output has all tokens so far. The loop raises the error of the block. Leaving ``async with``, or a cancellation of a waiting task,
    ends the requests. ``close`` is called when the last output has been taken.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._outputs: deque[Any] = deque()
        self._last: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._more = _pending()
        self.cancelled = False

    def put(self, output: Any) -> None:
        """Add an output, on the engine's thread."""
        self._outputs.append(output)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Say that there are no more outputs, on the engine's thread."""
        self._error, self._ended = error, True
        self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, _pending()
        more.set_result(None)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        while True:
            more, ended = self._more, self._ended  # before the outputs: what comes after this look wakes the task
            if self._outputs:
                self._last = self._outputs.popleft()
                return self._last
            if ended:
                self._close()
                raise self._error or StopAsyncIteration
            try:
                await asyncio.wrap_future(more)
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    def __await__(self) -> Generator[Any, None, Any]:
        return self._to_the_end().__await__()

    async def _to_the_end(self) -> Any:
        async for _ in self:
            pass
        return self._last

    async def __aenter__(self) -> Stream:
        return self

    async def aclose(self, *_: object) -> None:
        """End the requests, if they have not ended."""
        self.cancelled = True

    __aexit__ = aclose


def _pending() -> Future[None]:
    """Return a future that a waiting task cannot cancel, because others may wait for it, too."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


class AsyncBackend(Backend):
    """Sends a block to the engine of ``model`` and does not wait.

    Called without a tracer, it returns the stream of outputs; ``async for`` over it goes through that.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stream: Stream | None = None

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Send the block of ``tracer`` off; without one, return the stream of its outputs, or raise ``ValueError`` if there is none."""
        if tracer is None:
            if self._stream is None:
                raise ValueError("There are no outputs: the block of this trace was not sent to the engine.")
            return self._stream
        self.send(cast("RequestTracer", tracer), super().__call__(tracer))
        return None

    def __aiter__(self) -> Any:
        return self().__aiter__()

    def send(self, tracer: RequestTracer, function: Callable[[], None] | None) -> Stream:
        """Send the requests of ``tracer`` off: those of its block, or, without one, that of a call; return their stream."""
        self._model.dispatch()
        self._stream = Stream(tracer._close)  # not before: the `with` statement may not have ended yet
        self._model._turns.add(_Trace(self._model._engine, tracer, function, self._stream))
        return self._stream


class RequestGroup(Protocol):
    """Requests that belong together, on the thread of an engine."""

    def begin(self) -> None:
        """Start the blocks, and send the requests to the engine."""

    def look(self) -> bool:
        """Take what the last step has brought; return whether the job has ended."""

    def fail(self, error: BaseException) -> None:
        """End the job with ``error``, before its time."""


class _Trace:
    """The requests of one trace on the thread of ``engine``."""

    def __init__(self, engine: VLLMEngine, tracer: RequestTracer, function: Callable[[], None] | None, stream: Stream) -> None:
        self._engine, self._tracer, self._function, self._stream = engine, tracer, function, stream
        self._requests: list[Request] = []
        self._finished: list[Any] = []
        self._context = contextvars.copy_context()
        self._marked: dict[int, Any] = {}
        self._context.run(saves.set, self._marked)

    def begin(self) -> None:
        """Start the blocks, and send the requests to the engine."""
        self._requests = self._context.run(self._tracer.begin, self._function)
        for request in self._requests:
            request.on_output = self._take
            self._engine.admit(request)

    def _take(self, output: Any) -> None:
        """Pass an output on to the stream, with copies of the lists that vLLM extends; keep the last output of a request."""
        if output.finished:
            self._finished.append(output)
            return
        for completion in output.outputs:
            completion.token_ids = list(completion.token_ids)
            completion.logprobs = copy.copy(completion.logprobs)
        self._stream.put(output)

    def _in_engine(self) -> list[Request]:
        return [sent for request in self._requests for sent in request.sent if sent.name in self._engine.pending]

    def look(self) -> bool:
        """Pass the last outputs of requests on to the stream; return whether the trace has ended."""
        if self._stream.cancelled:
            self._take_out()
        ended, error = not self._in_engine(), None
        if ended:
            error = self._conclude()
            if self._finished:
                scope = self._tracer.scope
                named = {} if scope is None else {name: value for name, value in scope.items() if id(value) in self._marked}
                self._finished[-1].saves = named
        for output in self._finished:
            self._stream.put(output)
        self._finished = []
        if ended:
            self._stream.end(error)
        return ended

    def fail(self, error: BaseException) -> None:
        """End the trace with ``error``, before its time."""
        self._take_out()
        self._conclude()
        self._stream.end(self._shown(error))

    def _conclude(self) -> BaseException | None:
        """End the blocks; return the error of a block."""
        for request in self._requests:
            request.cancel()
        error = None
        try:
            self._tracer.conclude(self._requests)
        except BaseException as raised:
            error = self._shown(raised)
        self._context.run(self._tracer.end)
        return error

    def _shown(self, error: BaseException) -> BaseException:
        """Return ``error`` with the user's frames only."""
        if self._tracer._frame is not None:
            show_only_users_frames(error, self._tracer._frame)
        return error

    def _take_out(self) -> None:
        for request in self._in_engine():
            self._engine.take_out(request)


class Turns:
    """Makes the steps of ``engine`` on a thread, while there are requests. Nothing else may use the engine."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._arrived: list[RequestGroup] = []
        self._thread: threading.Thread | None = None

    def add(self, job: RequestGroup) -> None:
        """Run the requests of ``job``; raise ``ValueError`` if a block of the engine asks, because the engine stands still for it."""
        with self._lock:
            if self._thread is threading.current_thread():
                raise ValueError(ITSELF)
            self._arrived.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=with_room, args=(self._work,), name="nnsight-vllm", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        jobs: list[RequestGroup] = []
        while True:
            with self._lock:
                arrived, self._arrived = self._arrived, []
                if not arrived and not jobs:
                    self._thread = None
                    return
            for job in arrived:
                try:
                    job.begin()
                except BaseException as error:
                    job.fail(error)
                else:
                    jobs.append(job)
            try:
                if self._engine.pending:
                    self._engine.advance()
            except BaseException as error:  # an error of the engine, or an exception for the whole process
                for job in jobs:
                    job.fail(error)
                jobs = []
            jobs = [job for job in jobs if not job.look()]
