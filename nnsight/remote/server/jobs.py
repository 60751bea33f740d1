"""Jobs with their messages.

A job keeps all its messages, with numbers. A reader is a position in that list (:meth:`ServerJob.follow`). So a slow reader delays nothing
and needs no buffer, and a reader that was disconnected continues where it stopped. Numbers are distinct times in microseconds, so they
increase even across restarts of the server.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ..protocol import JobStatus, Message

#: Maximum number of ``LOG`` messages of a job, and of characters in a message.
_MAX_LOGS, _MAX_CHARACTERS = 1000, 16_384


@dataclass(eq=False)
class ServerJob:
    """One submitted program. Times are in seconds since the epoch."""

    owner: str  # name of the account
    model: str  # key of the model
    nonce: str  # id that the client chose for the submission; may be empty
    digest: str  # SHA-256 of the payload
    size: int  # bytes of the payload
    seconds: float  # time limit of a run
    id: str = field(default_factory=lambda: str(uuid.uuid4()))  # cannot be guessed
    created: float = field(default_factory=time.time)
    ended: float | None = None
    attempts: int = 0  # how often it was started
    result_size: int | None = None  # bytes of the result
    result: bytes | None = None  # a short result until its job is written to disk: most clients get it before that
    kind: Any = None  # equal for jobs that can run as one group; None if the job runs alone
    dropped: str = ""  # the reason why an accepted job was removed, if its sync to disk failed
    messages: list[Message] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ending: asyncio.Future[None] | None = None
    _logs: int = 0
    status: JobStatus = JobStatus.RECEIVED

    @property
    def latest(self) -> Message:
        """The latest status message."""
        return next(message for message in reversed(self.messages) if message["status"] != JobStatus.LOG.value)

    def tell(self, status: JobStatus, description: str = "", data: Any = None, **meta: Any) -> None:
        """Add a message. Messages after the end of the job are ignored."""
        if self.messages and self.status.finished:
            return
        if status is JobStatus.LOG:
            self._logs += 1
            if self._logs > _MAX_LOGS:
                return
            if self._logs == _MAX_LOGS:
                description = "Further lines of this job are dropped: the server keeps no more."
        else:
            self.status = status
        if status.finished:
            self.ended = time.time()
        last = self.messages[-1]["number"] if self.messages else 0
        number = max(last + 1, time.time_ns() // 1000)
        description = description[:_MAX_CHARACTERS].encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent
        self.messages.append(Message(id=self.id, status=status.value, description=description, data=data, meta=meta, number=number))
        self._changed.set()
        self._changed = asyncio.Event()
        if status.finished and self._ending is not None:
            self._ending.set_result(None)

    def complete(self, size: int, **figures: Any) -> None:
        """Finish the job with a result of ``size`` bytes. ``figures`` are measurements for the message."""
        self.result_size = size
        self.tell(JobStatus.COMPLETED, "The result is ready.", {"size": size, "result": f"/result/{self.id}"}, **figures)

    async def follow(self, after: int = 0) -> AsyncIterator[list[Message]]:
        """Yield lists of messages with numbers above ``after``, up to the message that finishes the job."""
        position = 0
        while True:
            changed = self._changed
            new = [message for message in self.messages[position:] if message["number"] > after]
            position = len(self.messages)
            if new:
                yield new
            if changed is not self._changed:  # new messages came meanwhile
                continue
            if self.status.finished:
                return
            await changed.wait()

    def ending(self) -> asyncio.Future[None]:
        """Return a future that is done when the job is finished."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_future()
            if self.status.finished:
                self._ending.set_result(None)
        return self._ending

    def record(self) -> dict[str, Any]:
        """Return the job as JSON data for the disk, with the latest message only."""
        names = "owner model nonce digest size seconds id created ended attempts result_size".split()
        return {**{name: getattr(self, name) for name in names}, "latest": self.latest}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ServerJob:
        """Return the job of a :meth:`record`."""
        fields = dict(record)
        latest: Message = fields.pop("latest")
        return cls(**fields, messages=[latest], status=JobStatus(latest["status"]))
