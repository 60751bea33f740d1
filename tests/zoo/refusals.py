"""What is refused on purpose: cells that cannot work, the error that says so, and why.

A cell that fails in another way, or is refused without being listed here, is a failure of the zoo.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Cells that are refused.

    Attributes:
        models: Names of models; empty for all.
        features: Names of features; empty for all.
        modes: Names of modes; empty for all.
        error: Name of the type of the error.
        says: A part of its message.
        reason: Why it cannot work, for the table.
    """

    error: str
    says: str
    reason: str
    models: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()

    def covers(self, model: str, feature: str, mode: str, error: BaseException) -> bool:
        """Say whether this is why the cell ended with ``error``."""
        return (
            (not self.models or model in self.models)
            and (not self.features or feature in self.features)
            and (not self.modes or mode in self.modes)
            and type(error).__name__ == self.error
            and self.says in str(error)
        )


REFUSALS: list[Refusal] = []
