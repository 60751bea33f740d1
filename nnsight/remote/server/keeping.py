"""Jobs on their way to the disk: many at a time, and beside what else happens to them.

A job is written before it can run (:meth:`Keeper.admit`), and again when it has ended (:meth:`Keeper.note`). That it would survive a power
failure takes the disk several milliseconds more (:meth:`Keeper.settle`), for which nobody waits who need not know (:meth:`Keeper.secured`).
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Sequence
from typing import IO

from .batches import Batches
from .jobs import ServerJob
from .spool import SHORT, Spool

_log = logging.getLogger("nnsight.remote.server")


class Keeper:
    """Writes jobs to a spool, in threads.

    Args:
        spool: Where they are kept.
        read: Called, in a thread, with each job that is written and its payload.
    """

    def __init__(self, spool: Spool, read: Callable[[ServerJob, IO[bytes]], None]) -> None:
        self._spool, self._read = spool, read
        self._settling: dict[ServerJob, asyncio.Future[None]] = {}
        self._admits = Batches(self._admit)
        self._settles = Batches(self._settle)
        self._notes = Batches(self._note)

    async def admit(self, job: ServerJob, payload: IO[bytes]) -> None:
        """Write a new job.

        Raises:
            OSError: If it cannot be written, which leaves nothing of it; a :class:`~.spool.StorageFullError` if there is no room.
        """
        if job.size < SHORT:
            payload.seek(0)  # and read now: the upload is closed when its client goes away, which is no matter of the other jobs
            admitting = self._admits.add((job, io.BytesIO(payload.read())))
        else:  # it would hold up the others
            admitting = Batches(self._admit).add((job, payload))
        try:
            await asyncio.shield(admitting)
        except asyncio.CancelledError:
            admitting.add_done_callback(lambda _: self._spool.remove([job]))
            raise

    def settle(self, job: ServerJob, drop: Callable[[], bool]) -> None:
        """Have a job survive a power failure. If the disk does not keep it, ``drop`` takes it back, unless it runs already."""

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
        """Return when a job survives a power failure, or was dropped; where somebody has ``listened`` to it, it may have ended instead.

        The disk takes longer than a short job. What became of it is told through the WebSocket then, and there is nothing left to lose.
        """
        settling = self._settling.get(job)
        if settling is not None:
            awaited = [settling, job.ending()] if listened else [settling]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)

    def note(self, job: ServerJob) -> None:
        """Write down where a job that has ended stands."""
        self._notes.add(job)

    async def idle(self) -> None:
        """Return when nothing is left to write."""
        for batches in (self._admits, self._settles, self._notes):
            await batches.idle()

    def _admit(self, items: Sequence[tuple[ServerJob, IO[bytes]]]) -> Sequence[OSError | None]:
        errors = self._spool.admit(items)
        for (job, payload), error in zip(items, errors, strict=True):
            if error is None:
                self._read(job, payload)
        return errors

    def _settle(self, jobs: Sequence[ServerJob]) -> Sequence[None]:
        self._spool.settle(jobs)
        return [None] * len(jobs)

    def _note(self, jobs: Sequence[ServerJob]) -> Sequence[None]:
        self._spool.note(jobs)
        for job in jobs:
            job.result = None
        return [None] * len(jobs)
