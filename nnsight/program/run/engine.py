"""The interface between a server and an engine, which runs programs on one model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

#: A function that receives each line that a program prints.
Log = Callable[[str], None]

#: The result of a payload, or its error.
Outcome = bytes | Exception


def in_this_loop(log: Log) -> Log:
    """Return a function for other threads that calls ``log`` in the running event loop, unless the loop has ended."""
    loop = asyncio.get_running_loop()

    def tell(line: str) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(log, line)

    return tell


class EngineLostError(RuntimeError):
    """The engine died while it ran a job."""


class TimeLimitError(RuntimeError):
    """A job ran out of time."""


class Engine(Protocol):
    """Runs programs on one model."""

    width: int  # number of calls of `execute` that can run at the same time

    def kind_of(self, payload: bytes) -> Hashable | None:
        """Return a key that is equal for payloads that can run as one batch; ``None`` for a payload that has to run alone."""

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        """Run payloads of one kind and return the outcome of each. ``logs[i]`` gets the lines of payload ``i`` in the caller's event loop.

        Raises:
            EngineLostError: If the engine died.
            TimeLimitError: If the run took longer than ``seconds``.
        """

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        """Make the run of this list of payloads (compared by identity) fail soon."""

    @property
    def healthy(self) -> bool:
        """Whether the engine can run programs."""

    def close(self) -> None:
        """Free the resources of the engine, which cannot run programs afterwards."""
