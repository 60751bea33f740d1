"""The gateway: accepts jobs, runs them on engines, and keeps their results.

A job is written to disk and *queued*. The loop of its model takes it from the queue, alone or with jobs of the same kind, and *runs* it.
Then its result is written to disk and the job is *completed*, or it ends with an *error*. Each step is a message of the job. The gateway
never waits for a client.

An accepted job is on disk, so a gateway that starts on the same folder continues it. A job that was running when the process ended runs
once more. The number of attempts is limited, because the job itself may have ended the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import IO, Any

from prometheus_client import generate_latest

from ...program.format.errors import ExecutionFailedError, InvalidProgramError
from ...program.run.engine import Engine, EngineLostError, Outcome, TimeLimitError
from ..protocol import JobStatus, ModelKey
from .envelopes import RefusedError
from .jobs import ServerJob
from .keys import Account
from .queues import JobGroup, ModelQueue
from .settings import Settings
from .spool import SHORT, Spool, StorageFullError
from .telemetry import Metrics
from .writer import JobWriter

_log = logging.getLogger("nnsight.remote.server")


class JobCancelledError(Exception):
    """The owner of a job has cancelled it."""


class Gateway:
    """Accepts, runs and keeps all jobs of a server. ``engines`` are the served models."""

    def __init__(self, engines: Mapping[ModelKey, Engine], spool: Spool, settings: Settings | None = None) -> None:
        #: The served models, by their keys as text.
        self.served = {str(key): ModelQueue(key, engine, str(key)) for key, engine in engines.items()}
        self.spool = spool
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.jobs: dict[str, ServerJob] = {}  # by id
        self.draining = False  # whether the server is about to stop
        self._active: set[ServerJob] = set()  # unfinished jobs
        self._uploads: Counter[str] = Counter()
        self._by_nonce: dict[tuple[str, str], asyncio.Future[ServerJob]] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._writer = JobWriter(spool, self._find_kind)

    # -- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Continue the jobs on disk, and start the loops that run jobs."""
        for job in await asyncio.to_thread(self.spool.recover):
            self._continue(job)
        self._loops = [asyncio.create_task(loop) for loop in (self._sweep(), *map(self._work, self.served.values()))]

    def _continue(self, job: ServerJob) -> None:
        """Continue a job of an earlier process."""
        self.jobs[job.id] = job
        if job.nonce:
            known: asyncio.Future[ServerJob] = asyncio.get_running_loop().create_future()
            known.set_result(job)
            self._by_nonce[job.owner, job.nonce] = known
        if job.status.finished:
            return
        served = self.served.get(job.model)
        if served is None:
            self._fail(job, RuntimeError(f"The server was restarted and no longer serves {job.model}."))
        elif job.status is JobStatus.RUNNING and job.attempts >= self.settings.attempts:
            reason = f"The server ended {job.attempts} times while this job ran. The job is not tried again."
            self._fail(job, EngineLostError(reason))
        else:
            self._active.add(job)
            if not job.attempts:  # a job that was running may have ended the process, so it runs alone
                self._find_kind(job)
            job.tell(JobStatus.QUEUED, "The server was restarted; the job waits again.")
            served.put(job)

    async def drain(self) -> None:
        """Accept no more jobs, and let running jobs end, for some time. Waiting jobs stay on disk for the next start."""
        self.draining = True
        _log.info("draining", extra={"waiting": sum(len(served.queue) for served in self.served.values())})
        deadline = time.monotonic() + self.settings.drain
        while any(served.groups for served in self.served.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Stop at once. Running jobs run again after the next start."""
        self.draining = True
        runs = [run for served in self.served.values() for run in served.groups.values()]
        for task in (*self._loops, *runs):
            task.cancel()
        await asyncio.gather(*self._loops, *runs, return_exceptions=True)
        await self._writer.idle()
        for served in self.served.values():
            served.engine.close()
        self.spool.close()

    @property
    def problems(self) -> list[str]:
        """The reasons why the server cannot run jobs, for ``/health``."""
        stuck = [f"the engine of {key} cannot run jobs" for key, served in self.served.items() if not served.engine.healthy]
        ended = [f"a loop has ended: {loop!r}" for loop in self._loops if loop.done()]
        return [*(["the server is about to stop"] if self.draining else []), *stuck, *ended]

    # -- accepting jobs ----------------------------------------------------------------------------------------------

    def model(self, text: str) -> ModelQueue:
        """Return the model of a key. Raises a :class:`RefusedError` if the key is malformed, or the model is not served here."""
        try:
            wanted = ModelKey.parse(text)
        except ValueError as error:
            raise RefusedError(400, "model_key", str(error)) from None
        for served in self.served.values():
            if served.key.matches(wanted):
                return served
        there = ", ".join(f"{served.key.repo_id} ({served.key.revision})" for served in self.served.values())
        message = f"{wanted.repo_id} ({wanted.revision}) is not served here. Served models: {there or 'none'}."
        raise RefusedError(404, "model", message)

    @contextlib.asynccontextmanager
    async def uploading(self, account: Account) -> AsyncIterator[None]:
        """Count an upload while the context is open. Raises a :class:`RefusedError` if the account has too many at a time."""
        if self._uploads[account.name] >= account.queue:
            message = f"This key has {account.queue} uploads in progress, which is its limit. Wait for some of them to end."
            raise RefusedError(429, "uploads", message)
        self._uploads[account.name] += 1
        try:
            yield
        finally:
            self._uploads[account.name] -= 1

    async def submit(self, account: Account, model_key: str, nonce: str, payload: IO[bytes], size: int) -> ServerJob:
        """Accept a job; it may run at once. The same nonce with the same payload and model returns the same job.

        Raises:
            RefusedError: If the job cannot be accepted.
        """
        if self.draining:
            message = "The server is about to stop and accepts no more jobs. Try again in a minute."
            raise RefusedError(503, "draining", message)
        served = self.model(model_key)
        digest = _digest(payload) if size < SHORT else await asyncio.to_thread(_digest, payload)
        known = self._by_nonce.get((account.name, nonce)) if nonce else None
        if known is not None:
            job = await asyncio.shield(known)
            if (job.digest, job.model) != (digest, served.text):
                message = "This nonce was used for another job. Each job needs a new nonce."
                raise RefusedError(409, "nonce", message)
            return job
        own = sum(job.owner == account.name for job in self._active)
        if own >= account.queue:
            message = f"{own} jobs of this key wait or run, and its limit is {account.queue}. Wait for some of them to end."
            raise RefusedError(429, "queue", message)
        if len(self._active) >= self.settings.jobs:
            raise RefusedError(503, "busy", "The server has reached its maximum number of jobs. Try again later.")
        job = ServerJob(account.name, served.text, nonce, digest, size, account.seconds)
        job.tell(JobStatus.RECEIVED, "The job has been received.")
        self.jobs[job.id] = job
        self._active.add(job)
        coming: asyncio.Future[ServerJob] = asyncio.get_running_loop().create_future()
        if nonce:
            self._by_nonce[account.name, nonce] = coming
        try:
            await self._writer.admit(job, payload)
        except BaseException as error:
            self._forget(job)
            if isinstance(error, StorageFullError):
                _log.error("storage is full", extra={"job": job.id, "error": str(error)})
                error = _no_room(error.strerror or str(error))
            known_error = error if isinstance(error, Exception) else RefusedError(503, "cancelled", "Try again.")
            coming.set_exception(known_error)
            coming.exception()  # marks it as retrieved, so that asyncio does not log it
            raise error from None
        job.tell(JobStatus.QUEUED, f"Waits behind {len(served.queue) + bool(served.groups)} jobs or groups of jobs.")
        coming.set_result(job)
        served.put(job)
        self.metrics.received.inc(size)
        _log.info("received", extra={"job": job.id, "account": account.name, "model": job.model, "bytes": size})
        self._writer.settle(job, functools.partial(self._drop, served, job))
        return job

    def _drop(self, served: ModelQueue, job: ServerJob) -> bool:
        """Forget a job if it waits in the queue. Returns whether it did."""
        waited = served.queue.remove(job)
        if waited:
            self._forget(job)
        return waited

    async def secure(self, job: ServerJob, listened: bool) -> None:
        """Wait until a job is safe, see :meth:`.JobWriter.secured`. Raises a :class:`RefusedError` if the job was dropped."""
        await self._writer.secured(job, listened)
        if job.dropped:
            raise _no_room(job.dropped)

    def cancel(self, job: ServerJob) -> None:
        """End a job that waits or runs, and drop its results. A finished job does not change."""
        if job.status.finished:
            return
        served = self.served[job.model]
        if not served.queue.remove(job):
            for group in served.groups:
                if group.jobs == [job]:
                    served.engine.interrupt(group.payloads)
        self._fail(job, JobCancelledError("The job was cancelled."))

    def _find_kind(self, job: ServerJob, payload: IO[bytes] | None = None) -> None:
        """Set the kind of a job, so that jobs of one kind run as a group. A job without a kind runs alone."""
        if self.settings.together > 1:
            try:
                if payload is not None:
                    payload.seek(0)
                engine = self.served[job.model].engine
                job.kind = engine.kind_of(self.spool.payload(job) if payload is None else payload.read())
            except InvalidProgramError:  # the run will report it
                return
            except Exception as error:
                _log.error("the kind of a job could not be found", exc_info=error, extra={"job": job.id})

    def find(self, job_id: str, account: Account) -> ServerJob | None:
        """Return a job of an account; ``None`` if it does not exist or belongs to another account."""
        job = self.jobs.get(job_id)
        return job if job is not None and job.owner == account.name else None

    # -- running jobs ------------------------------------------------------------------------------------------------

    async def _work(self, served: ModelQueue) -> None:
        """Run the jobs of a model forever, as many groups at a time as its engine can run."""
        while True:
            await served.wake.wait()
            if self.draining or not served.engine.healthy:
                await asyncio.sleep(0.2)
                continue
            jobs = served.queue.take(self.settings.together) if len(served.groups) < served.engine.width else []
            if not jobs:
                served.wake.clear()
                continue
            group = JobGroup(jobs)
            served.groups[group] = asyncio.create_task(self._run_group(served, group))

    async def _run_group(self, served: ModelQueue, group: JobGroup) -> None:
        """Run a group. An unexpected error ends its jobs, but not the loop of the model."""
        jobs = list(group.jobs)
        try:
            await self._run(served, group)
        except Exception as error:
            _log.exception("a run failed")
            for job in jobs:
                self._fail(job, error)
        finally:
            del served.groups[group]
            served.wake.set()

    async def _run(self, served: ModelQueue, group: JobGroup) -> None:
        """Run the jobs of a group. If the group fails as a whole, its jobs run one by one."""
        started, jobs = time.time(), group.jobs
        for job in jobs:
            job.attempts += 1
            job.tell(JobStatus.DISPATCHED, "The job was passed to the engine.")
            self.metrics.waited.labels(job.model).observe(started - job.created)
            job.tell(JobStatus.RUNNING, "The job runs.", together=len(jobs), model=getattr(served.engine, "facts", {}))
        self.metrics.together.labels(served.text).observe(len(jobs))
        try:
            group.payloads = await asyncio.to_thread(self.spool.begin, jobs)  # fails if a job is cancelled now, and its payload removed
            if all(job.status.finished for job in jobs):
                return
            logs = [functools.partial(job.tell, JobStatus.LOG) for job in jobs]
            seconds = max(job.seconds for job in jobs)
            outcomes: list[Outcome] = await served.engine.execute(group.payloads, seconds, logs)
        except Exception as error:
            if len(jobs) > 1:
                _log.warning("a group of jobs failed", extra={"jobs": [job.id for job in jobs], "error": repr(error)})
                for job in jobs:
                    job.attempts -= 1
                    if not job.status.finished:
                        group.jobs = [job]
                        await self._run(served, group)
                return
            outcomes = [error]
        runtime = time.time() - started
        self.metrics.runtime.labels(served.text).observe(runtime)
        results: list[tuple[ServerJob, bytes]] = []
        figures = {job: {"runtime": runtime, "waited": started - job.created, "together": len(jobs)} for job in jobs}
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.status.finished:  # it was cancelled during the run
                continue
            if isinstance(outcome, EngineLostError) and job.attempts < self.settings.attempts:
                self.metrics.retried.labels(job.model).inc()
                job.tell(JobStatus.QUEUED, "The engine died while the job ran. The job is tried again.")
                served.put(job, first=True)
            elif isinstance(outcome, Exception):
                self._fail(job, outcome, **figures[job])
            else:
                results.append((job, outcome))
        lengths = await asyncio.to_thread(self.spool.keep_results, results) if results else []
        for (job, result), kept in zip(results, lengths, strict=True):
            if isinstance(kept, OSError):
                self._fail(job, kept, **figures[job])
            elif not job.status.finished:
                job.result = result if kept < SHORT else None
                job.complete(kept, **figures[job])
                self.metrics.results.inc(kept)
                self._end(job, "completed", **figures[job])

    def _fail(self, job: ServerJob, error: Exception, **figures: Any) -> None:
        """End a job with an error. The owner gets the message only if the error is about the job, not about the server."""
        about_job = (InvalidProgramError, ExecutionFailedError, TimeLimitError, EngineLostError, JobCancelledError)
        known = next((kind.__name__ for kind in about_job if isinstance(error, kind)), None)
        if known is not None:
            description = str(error)
        elif isinstance(error, StorageFullError):
            known, description = "StorageFullError", f"The result could not be stored: {error.strerror}. Try again later."
        else:
            known = "InternalError"
            description = f"The server failed to run this job. The operator finds the cause in the server's log, under {job.id}."
            _log.error("a job failed because of the server", exc_info=error, extra={"job": job.id})
        job.tell(JobStatus.ERROR, description, {"error": known}, **figures)
        self._end(job, known, **figures)

    def _end(self, job: ServerJob, outcome: str, **figures: Any) -> None:
        self._active.discard(job)
        self._writer.note(job)
        self.metrics.jobs.labels(job.model, outcome).inc()
        about = {"job": job.id, "account": job.owner, "model": job.model, "outcome": outcome, **figures}
        _log.info("finished", extra=about)

    # -- housekeeping ------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Remove finished jobs once their time to be kept is over."""
        while True:
            await asyncio.sleep(min(30.0, self.settings.keep / 4))
            horizon = time.time() - self.settings.keep
            old = [job for job in self.jobs.values() if job.ended is not None and job.ended < horizon]
            for job in old:
                self._remove_from_tables(job)
            await asyncio.to_thread(self.spool.remove, old)

    def _remove_from_tables(self, job: ServerJob) -> None:
        self.jobs.pop(job.id, None)
        self._active.discard(job)
        self._by_nonce.pop((job.owner, job.nonce), None)

    def _forget(self, job: ServerJob) -> None:
        """Remove a job that is not accepted."""
        self._remove_from_tables(job)
        self.spool.remove([job])

    def figures(self) -> bytes:
        """Return the current metrics in the text format of Prometheus."""
        for key, served in self.served.items():
            self.metrics.healthy.labels(key).set(served.engine.healthy)
            self.metrics.queued.labels(key).set(len(served.queue))
            self.metrics.running.labels(key).set(sum(len(group.jobs) for group in served.groups))
        self.metrics.spooled.set(self.spool.used)
        return generate_latest(self.metrics.registry)


def _no_room(reason: str) -> RefusedError:
    return RefusedError(507, "storage", f"The job was not accepted: {reason}. Try again later.")


def _digest(payload: IO[bytes]) -> str:
    payload.seek(0)
    return hashlib.file_digest(payload, "sha256").hexdigest()  # type: ignore[arg-type]
