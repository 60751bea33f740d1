"""Stops of a block at a location, while it is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stop:
    """A stop at a location.

    Attributes:
        site: The location.
        at: Its passage.
        block: The block that has stopped there.
        loop: Whether the block waited for it in a loop.
        structure: How the value is built.
        places: Where its leaves are.
        leaves: Its leaves.
        reads: The node of each tensor among them.
        edited: The reads that were edited in place.
    """

    site: str
    at: int
    block: int
    loop: bool
    structure: Any
    places: list[tuple[int, int | None]]
    leaves: list[Any]
    reads: dict[int, int] = field(default_factory=dict)
    edited: set[int] = field(default_factory=set)

    def place(self, number: int) -> dict[str, Any]:
        """Return what a node says of the place of a leaf."""
        leaf, inside = self.places[number]
        said = {"site": self.site, "at": self.at, "leaf": leaf}
        if inside is not None:
            said["inside"] = inside
        return {**said, "loop": True} if self.loop else said
