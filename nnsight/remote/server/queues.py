"""The queue of one model: fair among accounts, with groups of jobs that can share a run.

Each account has a line of its own, and the lines take turns. An account with a thousand jobs delays the next account by one run only.
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
        """Add a job at the end of the line of its owner; ``first`` puts one that was taken out before in front of all others."""
        line = self._lines.setdefault(job.owner, deque())
        if first:
            line.appendleft(job)
            self._lines.move_to_end(job.owner, last=False)
        else:
            line.append(job)

    def remove(self, job: ServerJob) -> bool:
        """Remove a job; return whether it was there."""
        line = self._lines.get(job.owner)
        if line is None or job not in line:
            return False
        line.remove(job)
        if not line:
            del self._lines[job.owner]
        return True

    def take(self, most: int = 1) -> list[ServerJob]:
        """Take out the next job, and jobs that can run together with it, from all lines in turn, up to ``most`` in all."""
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

    jobs: list[ServerJob]  # after a failure of the group, the one that runs
    payloads: list[bytes] = field(default_factory=list)  # as the engine got them


@dataclass(eq=False)
class ModelQueue:
    """A served model, with its waiting jobs and running groups; ``wake`` is set when a job or the engine may be ready."""

    key: ModelKey
    engine: Engine
    text: str  # of the key
    queue: FairQueue = field(default_factory=FairQueue)
    groups: dict[JobGroup, asyncio.Task[None]] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, job: ServerJob, first: bool = False) -> None:
        self.queue.put(job, first)
        self.wake.set()
