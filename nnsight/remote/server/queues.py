"""The queue of one model: fair among accounts, and able to hand out jobs that can share a run.

Each account has a line of its own, and the lines take turns. Somebody who submits a thousand jobs waits for a thousand runs; who
submits one after them waits for one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..protocol import ModelKey
from .engine import Engine
from .jobs import ServerJob


class FairQueue:
    """Jobs that wait for one model."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[ServerJob]] = OrderedDict()

    def put(self, job: ServerJob) -> None:
        """Add a job at the end of the line of its owner."""
        self._lines.setdefault(job.owner, deque()).append(job)

    def put_back(self, job: ServerJob) -> None:
        """Add a job that was taken out before, at the head of the first line."""
        self._lines.setdefault(job.owner, deque()).appendleft(job)
        self._lines.move_to_end(job.owner, last=False)

    def remove(self, job: ServerJob) -> bool:
        """Take out a job that nobody needs any more; whether it was there."""
        line = self._lines.get(job.owner)
        if line is None or job not in line:
            return False
        line.remove(job)
        if not line:
            del self._lines[job.owner]
        return True

    def take(self, most: int = 1) -> list[ServerJob]:
        """Take out the job whose turn it is, and up to ``most`` in all that can be run together with it."""
        if not self._lines:
            return []
        owner, line = next(iter(self._lines.items()))
        taken = [line.popleft()]
        self._lines.move_to_end(owner)
        if taken[0].kind is not None and most > 1:
            for job in self._alike(taken[0], most - 1):
                self._lines[job.owner].remove(job)
                taken.append(job)
        for name in [name for name, rest in self._lines.items() if not rest]:
            del self._lines[name]
        return taken

    def _alike(self, first: ServerJob, most: int) -> list[ServerJob]:
        """Return waiting jobs of the kind of ``first``, from all lines in turn."""
        lines = [[job for job in line if job.kind == first.kind] for line in self._lines.values()]
        found: list[ServerJob] = []
        for rank in range(max(map(len, lines), default=0)):
            found += [line[rank] for line in lines if rank < len(line)]
            if len(found) >= most:
                break
        return found[:most]

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[ServerJob]:
        for line in self._lines.values():
            yield from line


@dataclass(eq=False)
class JobGroup:
    """Jobs of one kind that run together.

    Attributes:
        jobs: The jobs; those of a group that fails follow each other.
        payloads: What the engine has of them.
    """

    jobs: list[ServerJob]
    payloads: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class Served:
    """A model that is served.

    Attributes:
        key: Its name.
        text: That as text.
        engine: What runs it.
        queue: The jobs that wait for it.
        groups: Those that run, with the task in which they do.
    """

    key: ModelKey
    engine: Engine
    queue: FairQueue = field(default_factory=FairQueue)
    groups: dict[JobGroup, asyncio.Task[None]] = field(default_factory=dict)
    text: str = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.text = str(self.key)

    @property
    def running(self) -> list[ServerJob]:
        """The jobs that run."""
        return [job for group in self.groups for job in group.jobs]
