"""The entries of an engine's tables: which requests use them, and whether their parameters are written.

Requests that are steered alike share an entry. An unused entry keeps its parameters until its place is needed, so a vector that is asked
for again and again is written once. A request holds its entry by a :class:`Lease`, until it ends. A lease without references is given back,
too, because a server may drop a request before it has begun.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

#: Key of a request's entry and first steered position in ``SamplingParams.extra_args``.
ENTRY = "nnsight-entry"


@dataclass(eq=False)
class _Entry:
    """One entry of the tables: its number, the number of requests that use it, and whether its parameters are there."""

    slot: int
    users: int = 0
    written: bool = False


class Lease:
    """The right of a request to an entry, until it is released. Whoever writes parameters to the tables sets ``entry.written``."""

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        entry.users += 1
        self.release = weakref.finalize(self, _give_back, entry)
        self.release.atexit = False


def _give_back(entry: _Entry) -> None:
    entry.users -= 1


class Entries:
    """The ``count`` entries of an engine's tables; ``full`` is the message of the error if all are in use."""

    def __init__(self, count: int, full: str) -> None:
        self.count = count
        self._full = full
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._free = list(range(count, 0, -1))

    @property
    def in_use(self) -> int:
        """The number of entries that requests use."""
        return sum(entry.users > 0 for entry in self._entries.values())

    def take(self, salt: str) -> Lease:
        """Return a lease of the entry for the edits with this salt; raise ``ValueError`` if other edits have all entries."""
        entry = self._entries.pop(salt, None) or self._unused()
        self._entries[salt] = entry
        return Lease(entry)

    def _unused(self) -> _Entry:
        if self._free:
            return _Entry(self._free.pop())
        for salt, entry in self._entries.items():
            if not entry.users:
                del self._entries[salt]
                return _Entry(entry.slot)
        raise ValueError(self._full)
