"""Writes jobs to the disk: many at a time, beside the event loop.

A change of threads costs a short job more than the work there, and so does a transaction. So the jobs that arrive while the thread is
busy are written together (:class:`Batches`).
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Sequence
from typing import IO, Generic, TypeVar

from .jobs import ServerJob
from .spool import SHORT, Spool

_log = logging.getLogger("nnsight.remote.server")

Item = TypeVar("Item")


class Batches(Generic[Item]):
    """Calls ``function`` in a thread, each time with the items that arrived during the call before.

    It returns the error of each item, or ``None`` if there are none; an exception is the error of all items.
    """

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Exception | None] | None]) -> None:
        self._function = function
        self._waiting: list[tuple[Item, asyncio.Future[None]]] = []
        self._working: asyncio.Task[None] | None = None

    def add(self, item: Item) -> asyncio.Future[None]:
        """Return a future that is done when the item is. The item is processed even if nothing waits for it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return future

    async def idle(self) -> None:
        """Return when no items are left."""
        while self._working is not None:
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    errors = await asyncio.to_thread(self._function, [item for item, _ in batch]) or [None] * len(batch)
                except Exception as failure:
                    errors = [failure] * len(batch)
                for (_, future), error in zip(batch, errors, strict=True):
                    if future.done():  # cancelled
                        continue
                    if error is None:
                        future.set_result(None)
                    else:
                        future.set_exception(error)
                        future.exception()  # retrieved, so that asyncio does not log it
        finally:
            self._working = None


class Keeper:
    """Writes jobs to a spool, in threads; ``read`` is called there with each job that was written, and its payload."""

    def __init__(self, spool: Spool, read: Callable[[ServerJob, IO[bytes]], None]) -> None:
        self._spool, self._read = spool, read
        self._settling: dict[ServerJob, asyncio.Future[None]] = {}
        self._admits = Batches(self._admit)
        self._settles = Batches(self._settle)
        self._notes = Batches(self._note)

    async def admit(self, job: ServerJob, payload: IO[bytes]) -> None:
        """Write a new job; raise an :class:`OSError` if it cannot be written, a :class:`~.spool.StorageFullError` if there is no room."""
        if job.size < SHORT:
            payload.seek(0)  # read now: the upload may be closed before the batch is written
            admitting = self._admits.add((job, io.BytesIO(payload.read())))
        else:  # a long payload would delay the others
            admitting = Batches(self._admit).add((job, payload))
        try:
            await asyncio.shield(admitting)
        except asyncio.CancelledError:
            admitting.add_done_callback(lambda _: self._spool.remove([job]))
            raise

    def settle(self, job: ServerJob, drop: Callable[[], bool]) -> None:
        """Sync a job. If the disk fails, ``drop`` removes the job, unless it runs already."""

        def settled(settling: asyncio.Future[None]) -> None:
            del self._settling[job]
            error = settling.exception()
            if error is not None:
                _log.error("a job could not be secured", extra={"job": job.id, "error": str(error)})
                if drop():
                    job.dropped = getattr(error, "strerror", None) or "it could not be written"

        settling = self._settling[job] = self._settles.add(job)
        settling.add_done_callback(settled)

    async def secured(self, job: ServerJob, listened: bool) -> None:
        """Return when a job is synced or dropped. A job with a client that has ``listened`` may have ended instead: a short job is faster
        than the disk, its client knows the result, and nothing can be lost.
        """
        settling = self._settling.get(job)
        if settling is not None:
            awaited = [settling, job.ending()] if listened else [settling]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)

    def note(self, job: ServerJob) -> None:
        """Write the state of a job that has ended."""
        self._notes.add(job)

    async def idle(self) -> None:
        """Return when everything is written."""
        for batches in (self._admits, self._settles, self._notes):
            await batches.idle()

    def _admit(self, items: Sequence[tuple[ServerJob, IO[bytes]]]) -> Sequence[OSError | None]:
        errors = self._spool.admit(items)
        for (job, payload), error in zip(items, errors, strict=True):
            if error is None:
                self._read(job, payload)
        return errors

    def _settle(self, jobs: Sequence[ServerJob]) -> None:
        self._spool.settle(jobs)

    def _note(self, jobs: Sequence[ServerJob]) -> None:
        self._spool.note(jobs)
        for job in jobs:
            job.result = None
