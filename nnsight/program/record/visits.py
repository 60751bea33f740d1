"""A stop of a block at a location, while it is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stop:
    """A stop of a ``block`` at occurrence ``at`` of a location."""

    block: int | None
    site: str
    at: int
    loop: bool  # whether the block waits in a loop
    structure: Any  # of the value, with the places and leaves in it
    places: list[tuple[int, int | None]]
    leaves: list[Any]
    reads: dict[int, int] = field(default_factory=dict)  # the node of each leaf
    keys: list[tuple[str, int]] = field(default_factory=list)  # of each leaf of a dict: its key, and the first leaf there
    lists: dict[str | None, list[int]] = field(default_factory=dict)  # lengths of the lists in it, by key if it has keys
    edited: set[int] = field(default_factory=set)  # nodes of leaves that were edited in place

    def place(self, number: int) -> dict[str, Any]:
        """Return the keys of a node that name a leaf."""
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
