"""Allocation of the entries of an engine's tables.

Requests with the same edits share an entry. An unused entry keeps its parameters until another edit needs its slot, so a vector that many
requests ask for is written once. A request holds its entry by a :class:`Lease` until it ends. The garbage collector also releases a lease,
because a server may drop a request before it has begun.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

#: Key of a request's entry and first steered position in ``SamplingParams.extra_args``.
ENTRY = "nnsight-entry"


@dataclass(eq=False)
class _Entry:
    """An entry of the tables: its slot, the number of requests that use it, and whether the tables have its parameters."""

    slot: int
    users: int = 0
    written: bool = False


class Lease:
    """A request's hold on an entry, until ``release`` is called. The code that writes parameters to the tables sets ``entry.written``."""

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        entry.users += 1
        self.release = weakref.finalize(self, _give_back, entry)
        self.release.atexit = False


def _give_back(entry: _Entry) -> None:
    entry.users -= 1


class Entries:
    """The ``count`` entries of an engine's tables. ``full`` is the error message for when all are in use."""

    def __init__(self, count: int, full: str) -> None:
        self.count = count
        self._full = full
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._free = list(range(count, 0, -1))

    @property
    def in_use(self) -> int:
        """The number of entries that requests currently use."""
        return sum(entry.users > 0 for entry in self._entries.values())

    def take(self, salt: str) -> Lease:
        """Return a lease of the entry for the edits with this salt. Raise ``ValueError`` if other edits use all entries."""
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
