"""A vLLM engine that runs the programs of remote clients.

It is an :class:`~nnsight.program.run.engine.Engine` for the server of this package. Programs of all clients run in one continuous
batch: each row of a program's input is a request. If the engine cannot run a program, it refuses it before the run, with the reason and
the line of the block. With :class:`FallbackEngine`, such a program goes to another engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from ...modeling.base import NNsight
from ...program.format.errors import ExecutionFailedError, InvalidProgramError
from ...program.format.formats import limited
from ...program.format.limits import Limits
from ...program.format.payload import Job, decode_known
from ...program.run.draws import generator_of
from ...program.run.engine import Engine, EngineLostError, Log, Outcome, TimeLimitError, in_this_loop
from ...program.run.execution import results_of
from ...program.run.validation import validate
from ..asynchronous import EngineThread
from ..engine import VLLMEngine
from .batch import Batch
from .places import Places
from .room import Room
from .run import EngineInterpreter, JobRun


class JobEngine:
    """Runs programs in the engine of ``model``, a :class:`~nnsight.vllm.model.VLLM`.

    ``structure`` is the same model in transformers, without weights; programs are recorded on it. ``limits`` are the limits of one job.

    Raises:
        ValueError: If the engine has ``captures=``: a program may edit the values that it reads.
    """

    width = 256

    def __init__(self, model: Any, structure: NNsight, limits: Limits | None = None) -> None:
        model.dispatch()
        self._structure, self._limits = structure, limits or Limits()
        engine: VLLMEngine = model._engine
        if engine.limits.captured:
            raise ValueError("An engine with `captures=` cannot run programs of remote clients: they may edit what they read. Use `taps=`.")
        modules = {path: module for module, path in model._tree.paths.items()}
        self._places = Places(structure, modules, engine.limits.locations)
        self._model = model  # keeps its engine alive
        self._room, self._engine_thread, self._engine = Room(engine.llm.llm_engine), EngineThread(engine), engine
        self._checks = concurrent.futures.ThreadPoolExecutor(1, "nnsight-vllm-check")
        self._running: dict[int, _EngineJob] = {}
        self.healthy = True

    def refusal(self, payload: bytes) -> str:
        """Return why this engine cannot run a program, or an empty text if it can.

        Raises:
            InvalidProgramError: If the payload is malformed.
        """
        job = decode_known(payload, self._limits)
        try:
            self._batches(job)
        except InvalidProgramError as error:
            return str(error)
        return ""

    def _batches(self, job: Job) -> list[Batch]:
        """Return the batches of a job. Raise ``InvalidProgramError`` if the engine cannot run it."""
        self._places.check(job)
        batches = [Batch.of(job, number, self._structure._module) for number in range(len(job.runs))]
        for batch in batches:
            self._room.check(batch)
        return batches

    def kind_of(self, payload: bytes) -> Hashable | None:
        """Return ``None``: the server need not group programs, because all of them share the steps of the engine."""
        return None

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._execute(payloads, *each, seconds) for each in zip(payloads, logs, strict=True))))

    async def _execute(self, payloads: Sequence[bytes], payload: bytes, log: Log, seconds: float) -> Outcome:
        running = self._running[id(payloads)] = _EngineJob(self, in_this_loop(log), time.monotonic() + seconds)
        try:
            running.job, running.batches = await asyncio.get_running_loop().run_in_executor(self._checks, self._checked, payload)
            self._engine_thread.add(running)
            return await asyncio.wrap_future(running.outcome)
        except InvalidProgramError as error:
            return error
        except EngineLostError:
            self.healthy = False
            raise
        finally:
            running.cancelled = True
            self._running.pop(id(payloads), None)

    def _checked(self, payload: bytes) -> tuple[Job, list[Batch]]:
        job = decode_known(payload, self._limits)
        batches = self._batches(job)
        validate(job, self._structure, self._limits)
        return job, batches

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        running = self._running.get(id(payloads))
        if running is not None:
            running.cancelled = True

    def close(self) -> None:
        """Accept no more programs."""
        self.healthy = False
        self._checks.shutdown(wait=False)

    def interpreter(self, job: Job, log: Log) -> EngineInterpreter:
        """Return an interpreter of a checked job."""
        device = next(iter(self._engine._runner.get_model().parameters())).device
        interpreter = EngineInterpreter(self._structure, job, self._limits, self._places, device)
        interpreter.generator = generator_of(job.seed, device)
        interpreter.on_log = limited(log, self._limits.log_characters)
        interpreter.place_constants()
        return interpreter


class _EngineJob:
    """A job on the thread of the engine. ``end`` is its deadline. ``job`` and ``batches`` are set after the check of the program."""

    job: Job
    batches: list[Batch]

    def __init__(self, owner: JobEngine, log: Log, end: float) -> None:
        self._owner, self._log, self._end = owner, log, end
        self.outcome: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        self.cancelled = False
        self._number, self._inside = 0, False
        self._run: JobRun | None = None
        self._requests: list[Any] = []

    def begin(self) -> None:
        """Start the blocks of the first run."""
        with self._faults():
            self._check_time()
            self._interpreter = self._owner.interpreter(self.job, self._log)
            self._start()

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """If this context raises an error, end the job with it. Other jobs go on."""
        try:
            yield
        except Exception as error:
            self._end_with(error)

    def _start(self) -> None:
        limits = self._owner._engine.limits
        self._run = JobRun(self._interpreter, self._number, self.batches[self._number], limits)
        self._run.start()
        self._inside = False
        self._enter(self._run)

    def _enter(self, run: JobRun) -> None:
        """Send the requests of the rows to the engine, if there is room."""
        self._inside = run.error is None and self._owner._room.ask(run)
        if self._inside:
            self._requests = run.requests()
            for request in self._requests:
                self._owner._engine.admit(request)

    def _check_time(self) -> None:
        if self.cancelled or time.monotonic() > self._end:
            raise TimeLimitError("The job was cancelled, or ran out of time.")

    def poll(self) -> bool:
        with self._faults():
            self._go_on()
        return self.outcome.done()

    def _go_on(self) -> None:
        """Start the next run if the present one has ended, or send it to the engine once there is room."""
        run = self._run
        if run is None or self.outcome.done():
            return
        self._check_time()
        if run.failed is not None:
            raise run.failed
        if not run.finished and run.error is None:
            if not self._inside:
                self._enter(run)
            return
        self._leave()
        self._number += 1
        if self._number < len(self.batches):
            self._start()
        else:
            self.outcome.set_result(results_of(self._interpreter))

    def _leave(self) -> None:
        """Remove the run from the engine, and give up its room."""
        engine = self._owner._engine
        for request in self._requests:
            if request.name in engine.pending:
                engine.abort(request)
        self._requests = []
        if self._run is not None:
            self._run.cancel()
            self._owner._room.leave(self._run)

    def fail(self, error: BaseException) -> None:
        self._end_with(EngineLostError(f"The engine failed: {type(error).__name__}: {error}"))

    def _end_with(self, error: Exception) -> None:
        """End the job with ``error``, an error of the program or of the server."""
        self._leave()
        if not self.outcome.done():
            self.outcome.set_exception(ExecutionFailedError(str(error)) if isinstance(error, InvalidProgramError) else error)


class FallbackEngine:
    """Two engines of one model. Programs that ``first`` refuses run on ``second``."""

    def __init__(self, first: JobEngine, second: Engine) -> None:
        self._first, self._second = first, second
        self.width = first.width + second.width
        self._free = asyncio.Semaphore(second.width)
        self._waiting: dict[int, bool] = {}  # for payloads that wait for the second engine: whether they were cancelled

    def _engine_of(self, payload: bytes) -> Engine:
        try:
            return self._second if self._first.refusal(payload) else self._first
        except InvalidProgramError:
            return self._first

    def kind_of(self, payload: bytes) -> Hashable | None:
        return self._engine_of(payload).kind_of(payload)

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        if self._engine_of(payloads[0]) is self._first:
            return await self._first.execute(payloads, seconds, logs)
        self._waiting[id(payloads)] = False
        try:
            await self._free.acquire()
        finally:
            ended = self._waiting.pop(id(payloads))
        try:
            if ended:
                raise TimeLimitError("The job was cancelled.")
            return await self._second.execute(payloads, seconds, logs)
        finally:
            self._free.release()

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        if id(payloads) in self._waiting:  # the second engine would interrupt another job
            self._waiting[id(payloads)] = True
        else:
            self._engine_of(payloads[0]).interrupt(payloads)

    @property
    def healthy(self) -> bool:
        return self._first.healthy and self._second.healthy

    def close(self) -> None:
        self._first.close()
        self._second.close()
