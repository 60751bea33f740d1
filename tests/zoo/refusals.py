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
        error: Name of the type of the error; ``Failure`` where there is none, and the cell does otherwise than the hooks.
        says: A part of its message.
        reason: Why it cannot work, for the table.
    """

    error: str
    says: str
    reason: str
    models: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()

    @property
    def outcome(self) -> str:
        """What the table says."""
        return self.reason if self.error == "Failure" else f"refused: {self.error}: {self.reason}"

    def covers(self, model: str, feature: str, mode: str) -> bool:
        """Say whether the cell is to be refused so."""
        pairs = ((self.models, model), (self.features, feature), (self.modes, mode))
        return all(not names or name in names for names, name in pairs)

    def explains(self, error: BaseException) -> bool:
        """Say whether ``error`` is this refusal."""
        return type(error).__name__ == self.error and self.says in str(error)


_COMPILED = frozenset({"aot_eager", "inductor", "whole"})

REFUSALS: list[Refusal] = [
    Refusal(
        error="ValueError",
        says="cannot be skipped in this compiled trace",
        reason="the skipped layer assigns its convolution state to an attribute of a module; `compile=False` skips it",
        models=frozenset({"recurrent-gemma"}),
        features=frozenset({"skip-result", "generate-skip"}),
        modes=_COMPILED,
    ),
    *(
        Refusal(
            error=error,
            says="a function of yours" if error == "ValueError" else "another method of the model is Python of yours",
            reason="the wrapper of this model has no `generate`, and a call of the `generate` of its module cannot be a program",
            models=frozenset({"whisper", "llava"}),
            features=frozenset({"generation", "generate-skip"}),
            modes=modes,
        )
        for error, modes in (("ValueError", frozenset({"program"})), ("NotExpressibleError", frozenset({"file", "bound"})))
    ),
    Refusal(
        error="InvalidProgramError",
        says="a list in the value there has another length than in the recording",
        reason="the model returns a list with an entry for each image, and a program takes the number of images of its recording",
        models=frozenset({"llava"}),
        features=frozenset({"everything"}),
        modes=frozenset({"bound"}),
    ),
    Refusal(
        error="Failure",
        says="modified by an inplace operation",
        reason="uncompiled, with a warning: torch cannot differentiate this model with its cache on",
        models=frozenset({"rwkv"}),
        features=frozenset({"batch", "skip-result", "bfloat16"}),
        modes=_COMPILED,
    ),
    Refusal(
        error="Failure",
        says="modified by an inplace operation",
        reason="uncompiled, with a warning: torch cannot differentiate this model with its cache on",
        models=frozenset({"rwkv"}),
        features=frozenset({"forward"}),
        modes=frozenset({"bound"}),
    ),
    Refusal(
        error="Failure",
        says="instead of",
        reason="differs: the model assigns to a field of a saved output, and in a compiled trace the field keeps its former value",
        models=frozenset({"clip", "llava"}),
        features=frozenset({"everything"}),
        modes=_COMPILED,
    ),
]


def refusal_of(model: str, feature: str, mode: str) -> Refusal | None:
    """Return why a cell is refused; None if it is to work."""
    return next((one for one in REFUSALS if one.covers(model, feature, mode)), None)
