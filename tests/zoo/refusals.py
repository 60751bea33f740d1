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

    def covers(self, model: str, feature: str, mode: str) -> bool:
        """Say whether the cell is to be refused so."""
        pairs = ((self.models, model), (self.features, feature), (self.modes, mode))
        return all(not names or name in names for names, name in pairs)

    def explains(self, error: BaseException) -> bool:
        """Say whether ``error`` is this refusal."""
        return type(error).__name__ == self.error and self.says in str(error)


REFUSALS: list[Refusal] = []


def refusal_of(model: str, feature: str, mode: str) -> Refusal | None:
    """Return why a cell is refused; None if it is to work."""
    return next((one for one in REFUSALS if one.covers(model, feature, mode)), None)
