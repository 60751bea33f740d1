"""Writes jobs to disk: in threads beside the event loop, and many jobs at a time.

For a short job, the switch to another thread costs more than the work there, and so does a transaction. So the jobs that arrive while the
thread is busy are written together (:class:`Batches`).
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
    """Calls ``function`` in a thread, each time with the items that arrived during the previous call.

    The function returns a list with the error of each item or ``None``, or just ``None`` if no item failed. An exception counts as the
    error of all items.
    """

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Exception | None] | None]) -> None:
        self._function = function
        self._waiting: list[tuple[Item, asyncio.Future[None]]] = []
        self._working: asyncio.Task[None] | None = None

    def add(self, item: Item) -> asyncio.Future[None]:
        """Add an item. Returns a future that is done when the item is processed, which also happens if nothing waits for it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return future

    async def idle(self) -> None:
        """Wait until no items are left."""
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
                    if future.done():  # it was cancelled
                        continue
                    if error is None:
                        future.set_result(None)
                    else:
                        future.set_exception(error)
                        future.exception()  # marks it as retrieved, so that asyncio does not log it
        finally:
            self._working = None


class JobWriter:
    """Writes jobs to a spool, in threads. There, ``read`` is called with each new job and its payload, once they are written."""

    def __init__(self, spool: Spool, read: Callable[[ServerJob, IO[bytes]], None]) -> None:
        self._spool, self._read = spool, read
        self._settling: dict[ServerJob, asyncio.Future[None]] = {}
        self._admits = Batches(self._admit)
        self._settles = Batches(self._settle)
        self._notes = Batches(self._note)

    async def admit(self, job: ServerJob, payload: IO[bytes]) -> None:
        """Write a new job. Raises an :class:`OSError` if that fails, such as a :class:`~.spool.StorageFullError`."""
        if job.size < SHORT:
            payload.seek(0)  # read now: the upload may be closed before the batch is written
            admitting = self._admits.add((job, io.BytesIO(payload.read())))
        else:  # alone, because it would delay the short payloads of a batch
            admitting = Batches(self._admit).add((job, payload))
        try:
            await asyncio.shield(admitting)
        except asyncio.CancelledError:
            admitting.add_done_callback(lambda _: self._spool.remove([job]))
            raise

    def settle(self, job: ServerJob, drop: Callable[[], bool]) -> None:
        """Begin to sync a job. If that fails, ``drop`` removes the job and returns True, unless the job runs already."""

        def settled(settling: asyncio.Future[None]) -> None:
            del self._settling[job]
            error = settling.exception()
            if error is not None:
                _log.error("a job could not be synced", extra={"job": job.id, "error": str(error)})
                if drop():
                    job.dropped = getattr(error, "strerror", None) or "it could not be written"

        settling = self._settling[job] = self._settles.add(job)
        settling.add_done_callback(settled)

    async def secured(self, job: ServerJob, listened: bool) -> None:
        """Wait until a job is synced or dropped.

        If ``listened``, a client gets the messages of the job, and the end of the job suffices: a short job is faster than the disk, and
        once its client has the result, nothing can be lost.
        """
        settling = self._settling.get(job)
        if settling is not None:
            awaited = [settling, job.ending()] if listened else [settling]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)

    def note(self, job: ServerJob) -> None:
        """Begin to write the state of a job that has ended."""
        self._notes.add(job)

    async def idle(self) -> None:
        """Wait until everything is written."""
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
