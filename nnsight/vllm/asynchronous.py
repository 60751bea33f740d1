"""Traces that are awaited: ``VLLM(..., mode="async")``.

``with model.trace(...)`` captures its block and sends it off; nothing waits. ``tracer.backend()`` is the stream of what vLLM returns for
it, step by step, and the last output has the saved values, by name, as ``.saves``. All traces that are under way share the steps
of the engine, so this is how programs with an event loop, such as web servers, run many at a time.

The engine is still in this process: blocks and model have to take turns, with the caller's own objects, and vLLM's own
asynchronous engine lives in another process, where they are not. So a thread makes the steps. It lives while there are
requests; blocks run in it from their first line to their last, since that is where the model runs. A coroutine that waits is
woken from there.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, cast

from ..tracing import Backend, Tracer
from ..tracing.errors import show_only_users_frames
from ..tracing.saving import saves
from .engine import VLLMEngine
from .samples import Request
from .stack_room import with_room

if TYPE_CHECKING:
    from .request_tracing import RequestTracer


class Stream:
    """What vLLM returns for the requests of a trace, as it comes: for ``async for``, ``async with`` and ``await``.

    Outputs are vLLM's, each with all tokens so far. The last one has an attribute ``saves``, with the values that the block saved by their
    names; ``await`` gives this one. The loop raises what the block raised. Leaving ``async with``, or being cancelled while it
    waits, ends the requests.

    Args:
        close: Called when the last output has been taken.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._lock = threading.Lock()
        self._outputs: deque[Any] = deque()
        self._last: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self.cancelled = False

    # -- the engine's side ------------------------------------------------------------------------------------------

    def put(self, output: Any) -> None:
        """Add an output."""
        with self._lock:
            self._outputs.append(output)
            self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """Say that there are no more."""
        with self._lock:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, future)

    # -- the user's side --------------------------------------------------------------------------------------------

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        while True:
            with self._lock:
                if self._outputs:
                    self._last = self._outputs.popleft()
                    return self._last
                if self._ended:
                    self._close()
                    if self._error is not None:
                        raise self._error
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, future))
            try:
                await future
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

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the requests, if they have not ended."""
        self.cancelled = True


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncBackend(Backend):
    """Sends a block to an engine and does not wait. Called without a tracer, it returns the stream of outputs.

    Args:
        model: The model of the trace.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stream: Stream | None = None

    def __call__(self, tracer: Tracer | None = None) -> Any:
        """Send the block of ``tracer`` off; without one, return the stream of its outputs.

        Raises:
            ValueError: If there is no stream, because no trace was sent off.
        """
        if tracer is None:
            if self._stream is None:
                raise ValueError("There are no outputs: the block of this trace was not sent to the engine.")
            return self._stream
        self.send(cast("RequestTracer", tracer), super().__call__(tracer))
        return None

    def send(self, tracer: RequestTracer, function: Callable[[], None] | None) -> Stream:
        """Send the requests of ``tracer`` off: those of its block, or without one that of a call; return their stream."""
        self._model.dispatch()
        self._stream = Stream(tracer._close)  # not before: the `with` statement may not have ended yet
        self._model._turns.add(_Job(tracer, function, self._stream))
        return self._stream


class _Job:
    """The requests of one trace on the engine's thread."""

    def __init__(self, tracer: RequestTracer, function: Callable[[], None] | None, stream: Stream) -> None:
        self.tracer, self.function, self.stream = tracer, function, stream
        self.requests: list[Request] = []
        self.names: dict[str, Request] = {}
        self._context = contextvars.copy_context()
        self._marked: dict[int, Any] = {}
        self._told: set[int] = set()
        self._context.run(saves.set, self._marked)

    def begin(self, engine: VLLMEngine, pending: dict[str, Request]) -> None:
        """Let the blocks begin, and send the requests to the engine."""
        self.requests = self._context.run(self.tracer.begin, self.function)
        self.tracer.note_tiers(self.requests)
        for request in self.requests:
            request.on_output = self._tell
            before = set(pending)
            engine.admit(request, pending)
            self.names |= {name: pending[name] for name in pending.keys() - before}

    def _tell(self, output: Any) -> None:
        """Tell the stream an output of a request that goes on, as it is now: vLLM extends the same lists with each step."""
        for completion in output.outputs:
            completion.token_ids = list(completion.token_ids)
            completion.logprobs = copy.copy(completion.logprobs)
        self.stream.put(output)

    def look(self, engine: VLLMEngine, pending: dict[str, Request]) -> bool:
        """Tell the stream what has finished; return whether the trace has ended."""
        if self.stream.cancelled:
            self._take_out(engine, pending)
        self.names = {name: request for name, request in self.names.items() if name in pending}
        finished = [request for request in self.requests if request.output is not None and id(request) not in self._told]
        self._told |= set(map(id, finished))
        if self.names:
            for request in finished:
                self.stream.put(request.output)
            return False
        values, error = self._conclude()
        if finished:
            finished[-1].output.saves = values
        for request in finished:
            self.stream.put(request.output)
        self.stream.end(error)
        return True

    def _conclude(self) -> tuple[dict[str, Any], BaseException | None]:
        """End the blocks; return what was saved, and what a block raised."""
        tracer, scope, frame = self.tracer, self.tracer.scope, self.tracer._frame
        for request in self.requests:
            request.cancel()
        error = None
        try:
            tracer.conclude(self.requests)
        except BaseException as raised:
            error = raised
            if frame is not None:
                show_only_users_frames(error, frame)
        self._context.run(tracer.end)
        values = {} if scope is None else {name: value for name, value in scope.items() if id(value) in self._marked}
        return values, error

    def fail(self, error: BaseException, engine: VLLMEngine, pending: dict[str, Request]) -> None:
        """End the trace with ``error``, before its time."""
        if self.tracer._frame is not None:
            show_only_users_frames(error, self.tracer._frame)
        self._take_out(engine, pending)
        for request in self.requests:
            request.cancel()
        self._context.run(self.tracer.end)
        self.stream.end(error)

    def _take_out(self, engine: VLLMEngine, pending: dict[str, Request]) -> None:
        for name in self.names:
            request = pending.pop(name, None)
            if request is not None:
                request.run.cancel()
                engine.take_out(request)
        self.names = {}


class Turns:
    """Makes the steps of an engine on a thread, while there are requests.

    Args:
        engine: The engine. Nothing else may use it.
    """

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._arrived: list[_Job] = []
        self._thread: threading.Thread | None = None

    def add(self, job: _Job) -> None:
        """Have ``job`` run.

        Raises:
            ValueError: If a block of the engine asks for it, which stands still while the block runs.
        """
        with self._lock:
            if self._thread is threading.current_thread():
                raise ValueError(
                    "A block cannot run its own engine: the engine stands still while the block runs. Trace before, or in an "
                    "invoke of its own."
                )
            self._arrived.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=with_room, args=(self._work,), name="nnsight-vllm", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        jobs: list[_Job] = []
        pending: dict[str, Request] = {}
        while True:
            with self._lock:
                arrived, self._arrived = self._arrived, []
                if not arrived and not jobs:
                    self._thread = None
                    return
            for job in arrived:
                try:
                    job.begin(self._engine, pending)
                except BaseException as error:
                    job.fail(error, self._engine, pending)
                else:
                    jobs.append(job)
            try:
                if pending:
                    self._engine.advance(pending)
            except BaseException as error:  # the engine's own, or one that a block means for the whole process
                for job in jobs:
                    job.fail(error, self._engine, pending)
                jobs = []
            jobs = [job for job in jobs if not job.look(self._engine, pending)]
