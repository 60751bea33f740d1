"""The entries of an engine's tables, and which edits are in them.

Requests that are steered alike share an entry. One that nobody uses any more keeps its parameters until its place is needed, so a
vector that is asked for again and again is written once. A request holds its entry by a :class:`Lease`. It ends with the request, and also
if the request is dropped before it has begun: a lease that nobody refers to any more is given back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ..steering.tables import Steering

Edits = Mapping[str, Steering]


@dataclass(eq=False)
class _Entry:
    """One entry of the tables: its number, how many requests use it, and whether its parameters are there."""

    slot: int
    users: int = 0
    written: bool = False


class Lease:
    """The right of a request to an entry, until it is released.

    Attributes:
        slot: Number of the entry, from 1.
        edits: The parameters.
    """

    def __init__(self, entry: _Entry, edits: Edits) -> None:
        self.slot, self.edits = entry.slot, edits
        self._entry = entry
        entry.users += 1
        self.release = weakref.finalize(self, _give_back, entry)
        self.release.atexit = False


def _give_back(entry: _Entry) -> None:
    entry.users -= 1


class Entries:
    """Who has which entry.

    Args:
        count: How many entries there are.
        write: Writes parameters to an entry of the engine's tables. Calls of one event loop must reach the engine in order, and behind
            what that loop has said of requests before.
    """

    def __init__(self, count: int, write: Callable[[int, Edits], Awaitable[None]]) -> None:
        self.count = count
        self._write = write
        self._entries: dict[str, _Entry] = {}  # the one that was used longest ago comes first
        self._free = list(range(count, 0, -1))
        self._writing = asyncio.Lock()

    @property
    def in_use(self) -> int:
        """How many entries requests use."""
        return sum(entry.users > 0 for entry in self._entries.values())

    def take(self, salt: str, edits: Edits) -> Lease:
        """Return a lease of the entry for ``edits``, which are told apart by ``salt``.

        Raises:
            ValueError: If all entries are in use by requests with other edits.
        """
        entry = self._entries.pop(salt, None) or self._unused()
        self._entries[salt] = entry
        return Lease(entry, edits)

    def _unused(self) -> _Entry:
        if self._free:
            return _Entry(self._free.pop())
        for salt, entry in self._entries.items():
            if not entry.users:
                del self._entries[salt]
                return _Entry(entry.slot)
        raise ValueError(
            f"All {self.count} entries for different edits are in use by other requests. Ask again when one of them has ended, or "
            "start the server with more --slots."
        )

    async def ready(self, lease: Lease) -> None:
        """Return when the parameters of ``lease`` are in the engine's tables."""
        async with self._writing:
            if not lease._entry.written:
                await self._write(lease.slot, lease.edits)
                lease._entry.written = True
