"""The queue of one model: fair between accounts, and aware of jobs that can share a run.

Each account has a line of its own, and the lines take turns. An account with a thousand jobs delays the next account by only one run.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from ...program.run.engine import Engine
from ..protocol import ModelKey
from .jobs import ServerJob


class FairQueue:
    """Jobs that wait for one model."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[ServerJob]] = OrderedDict()

    def put(self, job: ServerJob, first: bool = False) -> None:
        """Add a job at the end of its owner's line. With ``first``, put it in front of all jobs; for jobs that were taken before."""
        line = self._lines.setdefault(job.owner, deque())
        if first:
            line.appendleft(job)
            self._lines.move_to_end(job.owner, last=False)
        else:
            line.append(job)

    def remove(self, job: ServerJob) -> bool:
        """Remove a job. Returns whether it was in the queue."""
        line = self._lines.get(job.owner)
        if line is None or job not in line:
            return False
        line.remove(job)
        if not line:
            del self._lines[job.owner]
        return True

    def take(self, most: int = 1) -> list[ServerJob]:
        """Take the next job, and jobs of the same kind from all lines in turn. Returns at most ``most`` jobs."""
        if not self._lines:
            return []
        owner, line = next(iter(self._lines.items()))
        taken = [line.popleft()]
        self._lines.move_to_end(owner)
        if taken[0].kind is not None and most > 1:
            lines = [[job for job in line if job.kind == taken[0].kind] for line in self._lines.values()]
            turns = chain.from_iterable(zip_longest(*lines))
            for job in islice((job for job in turns if job is not None), most - 1):
                self._lines[job.owner].remove(job)
                taken.append(job)
        for name in [name for name, rest in self._lines.items() if not rest]:
            del self._lines[name]
        return taken

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))


@dataclass(eq=False)
class JobGroup:
    """Jobs of one kind that run together."""

    jobs: list[ServerJob]  # after a failure of the group: only the job that runs now
    payloads: list[bytes] = field(default_factory=list)  # the list that was passed to the engine


@dataclass(eq=False)
class ModelQueue:
    """A served model, with its waiting jobs and running groups."""

    key: ModelKey
    engine: Engine
    text: str  # the key as text
    queue: FairQueue = field(default_factory=FairQueue)
    groups: dict[JobGroup, asyncio.Task[None]] = field(default_factory=dict)  # running groups
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set when the loop of the model may find a job to run

    def put(self, job: ServerJob, first: bool = False) -> None:
        self.queue.put(job, first)
        self.wake.set()
