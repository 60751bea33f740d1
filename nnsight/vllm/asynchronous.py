"""Traces that are awaited: ``VLLM(..., mode="async")``.

``with model.trace(...)`` sends its block to the engine without waiting. ``tracer.backend()`` is the stream of vLLM's outputs, step by step.
The last output has the saved values, by name, as ``.saves``. All traces in progress share the steps of the engine, so programs with an
event loop, such as web servers, can run many traces at a time.

vLLM's own asynchronous engine lives in another process, where the objects of a block are not available. So here the engine stays in this
process, and a thread makes its steps. The thread lives while there are requests. A block takes turns with the model, so it runs in this
thread from its first line to its last. The thread wakes the coroutines that wait for outputs.
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
from .engine import OWN_ENGINE, VLLMEngine
from .samples import Request
from .stack_room import with_room

if TYPE_CHECKING:
    from .request_tracing import RequestTracer


class Stream:
    """The stream of vLLM's outputs for the requests of a trace. Use ``async for``, ``async with``, or ``await`` for the last output.

    Each output has all tokens so far. The loop raises the error of the block. Leaving ``async with``, or cancelling a waiting task, ends
    the requests. The stream calls ``close`` when the last output has been taken.
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
        """Add an output. Called on the engine's thread."""
        self._outputs.append(output)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream, with an error if there is one. Called on the engine's thread."""
        self._error, self._ended = error, True
        self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, _pending()
        more.set_result(None)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        while True:
            more, ended = self._more, self._ended  # read before the outputs, so that a later output wakes the task
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
        return self._last_output().__await__()

    async def _last_output(self) -> Any:
        async for _ in self:
            pass
        return self._last

    async def __aenter__(self) -> Stream:
        return self

    async def aclose(self, *_: object) -> None:
        """End the requests that have not finished."""
        self.cancelled = True

    __aexit__ = aclose


def _pending() -> Future[None]:
    """Return a future that a waiting task cannot cancel: other tasks may wait for it, too."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


class AsyncBackend(Backend):
    """Sends a block to the engine of ``model`` and does not wait.

    A call without arguments returns the stream of outputs. ``async for`` also works on the backend itself.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stream: Stream | None = None

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Send the block of ``tracer`` to the engine. Without a tracer, return the stream, or raise ``ValueError`` if no block was sent."""
        if tracer is None:
            if self._stream is None:
                raise ValueError("There are no outputs: the block of this trace was not sent to the engine.")
            return self._stream
        self.send(cast("RequestTracer", tracer), super().__call__(tracer))
        return None

    def __aiter__(self) -> Any:
        return self().__aiter__()

    def send(self, tracer: RequestTracer, function: Callable[[], None] | None) -> Stream:
        """Send the requests of ``tracer`` to the engine, and return their stream. ``function`` is its block; a call has none."""
        self._model.dispatch()
        self._stream = Stream(tracer._close)  # closes the tracer at its end: the `with` statement may still run now
        self._model._engine_thread.add(_Trace(self._model._engine, tracer, function, self._stream))
        return self._stream


class RequestGroup(Protocol):
    """A job on the thread of an engine: requests that belong together, such as those of a trace."""

    def begin(self) -> None:
        """Start the blocks, and send the requests to the engine."""

    def poll(self) -> bool:
        """Process the outputs of the last step. Return whether the job has ended."""

    def fail(self, error: BaseException) -> None:
        """End the job early, with ``error``."""


class _Trace:
    """The requests of one trace on the thread of ``engine``."""

    def __init__(self, engine: VLLMEngine, tracer: RequestTracer, function: Callable[[], None] | None, stream: Stream) -> None:
        self._engine, self._tracer, self._function, self._stream = engine, tracer, function, stream
        self._requests: list[Request] = []
        self._finished: list[Any] = []
        self._context = contextvars.copy_context()
        self._saved: dict[int, Any] = {}
        self._context.run(saves.set, self._saved)

    def begin(self) -> None:
        """Start the blocks, and send the requests to the engine."""
        self._requests = self._context.run(self._tracer.begin, self._function)
        for request in self._requests:
            request.on_output = self._take
            self._engine.admit(request)

    def _take(self, output: Any) -> None:
        """Put an output into the stream, with copies of the lists that vLLM extends. Keep the last output of a request for later."""
        if output.finished:
            self._finished.append(output)
            return
        for completion in output.outputs:
            completion.token_ids = list(completion.token_ids)
            completion.logprobs = copy.copy(completion.logprobs)
        self._stream.put(output)

    def _in_engine(self) -> list[Request]:
        return [sent for request in self._requests for sent in request.sent if sent.name in self._engine.pending]

    def poll(self) -> bool:
        """Put the last outputs of finished requests into the stream. Return whether the trace has ended."""
        if self._stream.cancelled:
            self._abort()
        ended, error = not self._in_engine(), None
        if ended:
            error = self._conclude()
            if self._finished:
                scope = self._tracer.scope
                named = {} if scope is None else {name: value for name, value in scope.items() if id(value) in self._saved}
                self._finished[-1].saves = named
        for output in self._finished:
            self._stream.put(output)
        self._finished = []
        if ended:
            self._stream.end(error)
        return ended

    def fail(self, error: BaseException) -> None:
        """End the trace early, with ``error``."""
        self._abort()
        self._conclude()
        self._stream.end(self._with_users_frames(error))

    def _conclude(self) -> BaseException | None:
        """End the blocks. Return the error of a block, if there is one."""
        for request in self._requests:
            request.cancel()
        error = None
        try:
            self._tracer.conclude(self._requests)
        except BaseException as raised:
            error = self._with_users_frames(raised)
        self._context.run(self._tracer.end)
        return error

    def _with_users_frames(self, error: BaseException) -> BaseException:
        """Return ``error`` with only the user's frames in its traceback."""
        if self._tracer._frame is not None:
            show_only_users_frames(error, self._tracer._frame)
        return error

    def _abort(self) -> None:
        for request in self._in_engine():
            self._engine.abort(request)


class EngineThread:
    """A thread that makes the steps of ``engine`` while there are requests. No other thread may use the engine."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._arrived: list[RequestGroup] = []
        self._thread: threading.Thread | None = None

    def add(self, job: RequestGroup) -> None:
        """Run the requests of ``job``. Raise ``ValueError`` if a block calls this on the thread: the engine waits for this block."""
        with self._lock:
            if self._thread is threading.current_thread():
                raise ValueError(OWN_ENGINE)
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
            except BaseException as error:  # an error of the engine, or an exception such as SystemExit
                for job in jobs:
                    job.fail(error)
                jobs = []
            jobs = [job for job in jobs if not job.poll()]
