"""A job: what was submitted, by whom, and everything that has been said about it.

Messages are kept with the job, numbered, and never taken away while the job is there. A reader is then a position in that list and a
wait for more, see :meth:`ServerJob.follow`: however slow it is, it holds up nobody and costs no memory, and one that was away goes on
where it stopped. Numbers are the time in microseconds, made distinct, so that they go on growing when the server restarts.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ..protocol import JobStatus, Message

#: How many remarks of a run are kept. A program cannot make the server keep more.
_MOST_LOGS = 1000
_LONGEST_DESCRIPTION = 16_384


@dataclass(eq=False)
class ServerJob:
    """One program to run.

    Attributes:
        owner: Name of the account it belongs to.
        model: Key of the model.
        nonce: What the client calls the attempt to submit it; empty if it calls it nothing.
        digest: SHA-256 of the payload.
        size: Its length.
        seconds: How long it may run.
        id: Its name; not to be guessed.
        created: When it came, as seconds since the epoch.
        ended: When it was finished, likewise.
        attempts: How often it has been started.
        result_size: How long the result is.
        result: The result itself, as long as it is new and if it is short: most clients hear of it at once.
        kind: What it can be run together with; ``None`` if it runs alone.
        dropped: Why it was not taken after all; empty otherwise.
        messages: What has been said about it.
        status: Where it stands.
    """

    owner: str
    model: str
    nonce: str
    digest: str
    size: int
    seconds: float
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    created: float = field(default_factory=time.time)
    ended: float | None = None
    attempts: int = 0
    result_size: int | None = None
    result: bytes | None = None
    kind: Any = None
    dropped: str = ""
    messages: list[Message] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ending: asyncio.Future[None] | None = None
    _logs: int = 0
    status: JobStatus = JobStatus.RECEIVED

    @property
    def latest(self) -> Message:
        """The message that says where the job stands."""
        return next(message for message in reversed(self.messages) if message["status"] != JobStatus.LOG.value)

    def tell(self, status: JobStatus, description: str = "", data: Any = None, **meta: Any) -> None:
        """Add a message; those who follow the job get it. Nothing is said about a job that is finished."""
        if self.messages and self.status.finished:
            return
        if status is JobStatus.LOG:
            self._logs += 1
            if self._logs > _MOST_LOGS:
                return
            if self._logs == _MOST_LOGS:
                description = "There were more remarks than the server keeps."
        else:
            self.status = status
        if status.finished:
            self.ended = time.time()
        last = self.messages[-1]["number"] if self.messages else 0
        number = max(last + 1, time.time_ns() // 1000)
        description = description[:_LONGEST_DESCRIPTION]
        self.messages.append(
            Message(id=self.id, status=status.value, description=description, data=data, meta=meta, number=number)
        )
        self._changed.set()
        self._changed = asyncio.Event()
        if status.finished and self._ending is not None:
            self._ending.set_result(None)

    def complete(self, size: int, **figures: Any) -> None:
        """Say that the job has a result of this size."""
        self.result_size = size
        self.tell(
            JobStatus.COMPLETED, "The result is ready.", {"size": size, "result": f"/result/{self.id}"}, **figures
        )

    async def follow(self, after: int = 0) -> AsyncIterator[list[Message]]:
        """Yield the messages with a number above ``after``, up to the one that finishes the job: all that are ready, each time."""
        position = 0
        while True:
            changed = self._changed
            new = [message for message in self.messages[position:] if message["number"] > after]
            position = len(self.messages)
            if new:
                yield new
            if changed is not self._changed:  # there is more by now
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
        """Return what is kept on disk."""
        names = "owner model nonce digest size seconds id created ended attempts result_size".split()
        return {**{name: getattr(self, name) for name in names}, "latest": self.latest}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ServerJob:
        """Return the job of a :meth:`record`, with its latest message."""
        fields = dict(record)
        latest: Message = fields.pop("latest")
        return cls(**fields, messages=[latest], status=JobStatus(latest["status"]))
