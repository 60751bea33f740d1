"""What a server asks of an engine: it runs programs on one model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

#: Takes a line that a program prints.
Log = Callable[[str], None]

#: The result of a payload, or its error.
Outcome = bytes | Exception


def in_this_loop(log: Log) -> Log:
    """Return a function for other threads that calls ``log`` in the running loop, unless that has ended."""
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

    width: int  # number of groups of payloads that it runs at a time

    def kind_of(self, payload: bytes) -> Hashable | None:
        """Return a key of the programs that can run as one batch; ``None`` for one that runs alone."""

    async def execute(self, payloads: Sequence[bytes], seconds: float, logs: Sequence[Log]) -> list[Outcome]:
        """Run payloads of one kind and return the outcome of each; ``logs`` get the lines that each prints, in the loop of the caller.

        Raises:
            EngineLostError: If the engine died.
            TimeLimitError: If it took longer than ``seconds``.
        """

    def interrupt(self, payloads: Sequence[bytes]) -> None:
        """End the run of this very list of payloads soon; it fails."""

    @property
    def healthy(self) -> bool:
        """Whether it can run anything."""

    def close(self) -> None:
        """Free its resources; it runs nothing any more."""
