"""Visits: a recorded block gets the value at a location, and leaves a value there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Visit:
    """A visit of ``block`` to the location ``site``, at occurrence ``at``."""

    block: int | None
    site: str
    at: int
    loop: bool  # whether the block waits in a loop over occurrences
    structure: Any  # the nesting of the value
    places: list[tuple[int, int | None]]  # number of each leaf, and number inside it if the leaf is a cache
    leaves: list[Any]
    reads: dict[int, int] = field(default_factory=dict)  # the `read` node of each leaf
    keys: list[tuple[str, int]] = field(default_factory=list)  # for each leaf of a dict: its key, and the number of the first leaf there
    lists: dict[str | None, list[int]] = field(default_factory=dict)  # lengths of the lists in the value, by key if it is a dict
    edited: set[int] = field(default_factory=set)  # `read` nodes of leaves that were edited in place

    def place(self, number: int) -> dict[str, Any]:
        """Return the content of a node that names the leaf in ``places[number]``."""
        leaf, inside = self.places[number]
        said: dict[str, Any] = {"site": self.site, "at": self.at, "leaf": leaf}
        key: str | None = None
        if self.keys:
            key, first = self.keys[leaf]
            said |= {"key": key, "leaf": leaf - first}
        if key in self.lists:
            said["lists"] = self.lists[key]
        if inside is not None:
            said["inside"] = inside
        return {**said, "loop": True} if self.loop else said
