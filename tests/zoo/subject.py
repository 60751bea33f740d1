"""A feature, and what it is run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from nnsight import NNsight

from .reference import Hooks
from .specimen import Specimen


@dataclass(frozen=True)
class Situation:
    """What changes from one cell of a notebook to the next: the sizes of the prompt, and whether gradients are on."""

    length: int
    batch: int
    grad: bool = True
    seed: int = 0

    def __str__(self) -> str:
        more = ", no grad" * (not self.grad) + ", again" * bool(self.seed)
        return f"length {self.length}, batch {self.batch}{more}"


@dataclass
class Subject:
    """One model in one situation, wrapped or plain.

    Attributes:
        specimen: What is known of the model.
        module: The module that runs; hooks may be put on it, if this is the reference.
        model: The wrapped model, if it is not.
        arguments: Those of the call.
        others: Those of a second call.
        order: ``("input", "output" or "operation", path)`` of what a call runs, in order.
        recorded: Whether the block becomes a program, whose backward passes leave no gradients in weights.
    """

    specimen: Specimen
    module: Any
    model: Any
    arguments: dict[str, Any]
    others: dict[str, Any]
    order: list[tuple[str, str]] = field(default_factory=list)
    recorded: bool = False

    @property
    def hooks(self) -> Hooks:
        return Hooks(self.module)

    @cached_property
    def places(self) -> dict[str, str]:
        """Paths by kind of module, in the order in which their outputs come."""
        rank = {path: index for index, (kind, path) in enumerate(self.order) if kind == "output"}
        places = {kind: path for kind, path in self.specimen.places.items() if path in rank}
        return dict(sorted(places.items(), key=lambda item: rank[item[1]]))

    def envoy(self, path: str) -> Any:
        """Return the envoy of the module at ``path``."""
        return self.model.get(path) if path else self.model


Run = Callable[[Subject], dict[str, Any]]


@dataclass(frozen=True)
class Feature:
    """Something a block can do.

    Attributes:
        name: Name in the table.
        traced: Does it in a trace.
        hooked: Does the same by hand.
        needs: Whether a model has it.
        grad: Whether it is about gradients, so that they have to be enabled.
        variant: Which build of the model it is about: "", "bfloat16" or "train".
    """

    name: str
    traced: Run
    hooked: Run
    needs: Callable[[Specimen], bool] = lambda specimen: True
    grad: bool = False
    variant: str = ""

    def fits(self, specimen: Specimen) -> bool:
        """Say whether the model has what this is about."""
        return self.needs(specimen) and (specimen.differentiates or not self.grad or self.variant == "train")


def output(envoy: Any) -> Any:
    """Return ``envoy.output``, also of a module with a child of that name."""
    return envoy.nns_output if "output" in envoy._module._modules else envoy.output


def set_output(envoy: Any, value: Any) -> None:
    """Assign to it."""
    setattr(envoy, "nns_output" if "output" in envoy._module._modules else "output", value)


class Rows(NNsight):
    """Joins the arguments of several invokes along their first dimension."""

    def _batch(self, batched: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        rows = next(value.shape[0] for value in kwargs.values() if isinstance(value, torch.Tensor))
        if batched is None:
            return (args, kwargs), rows
        return ((), {name: torch.cat([batched[1][name], value]) for name, value in kwargs.items()}), rows
