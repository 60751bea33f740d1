"""What the zoo knows of a model: how to make it, what it takes, and where its parts are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 96

#: Makes the arguments of a call from a length, a number of rows and a source of random numbers.
Inputs = Callable[[int, int, torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class Operation:
    """An operation of ``.source``, and how to get at the same value without nnsight.

    Attributes:
        module: Path of the module in whose ``forward`` it is.
        name: Its name.
        called: Path of the submodule that the operation calls. None for ``attention_interface``: the function that
            transformers has registered for the model's attention.
    """

    module: str
    name: str
    called: str | None = None


@dataclass(frozen=True)
class Specimen:
    """A tiny model.

    Attributes:
        name: Name in the table.
        kind: What it is, in a few words, for the table.
        make: Makes the module with random weights.
        inputs: Makes its arguments.
        layers: Paths of two repeated modules, the first one first.
        parts: Paths of modules in the first layer (or elsewhere), by kind: attention, mlp, norm, linear.
        operation: An operation of ``.source``, if there is one.
        head: Path of the module that returns logits, in models that generate.
        generates: Whether ``generate`` works.
        language: Whether it is wrapped as a language model; otherwise inputs are joined along their first dimension.
        skips: Whether the second layer can be skipped with what the first one returned.
        batches: Whether rows are independent of each other, so that several invokes can share a batch.
        differentiates: Whether plain torch can run backward through the model in ``eval()``.
    """

    name: str
    kind: str
    make: Callable[[], torch.nn.Module]
    inputs: Inputs
    layers: tuple[str, str]
    parts: dict[str, str]
    operation: Operation | None = None
    head: str | None = None
    generates: bool = False
    language: bool = False
    skips: bool = True
    batches: bool = True
    differentiates: bool = True

    @property
    def places(self) -> dict[str, str]:
        """Paths of modules by kind, the layers among them."""
        return {**self.parts, "layer": self.layers[0], "next": self.layers[1]}

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32, train: bool = False) -> torch.nn.Module:
        """Make the module: each time the same weights, no dropout."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = self.make()
        for child in module.modules():
            for name, value in vars(child).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(child, name, 0.0)
            if isinstance(child, torch.nn.Dropout):
                child.p = 0.0
        return module.to(device, dtype).train(train)

    def arguments(
        self, length: int, batch: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """Make the arguments of a call."""
        generator = torch.Generator().manual_seed(1000 * seed + 10 * length + batch)

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)

        return {name: moved(value) for name, value in self.inputs(length, batch, generator).items()}


def ids(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make token ids, without an attention mask, as a first script does."""
    return {"input_ids": torch.randint(3, VOCABULARY - 2, (batch, length), generator=generator)}


def masked(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make token ids and their attention mask, as a tokenizer does."""
    tokens = ids(length, batch, generator)["input_ids"]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def translated(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make token ids for an encoder and fewer for a decoder."""
    given = masked(length, batch, generator)
    return {**given, "decoder_input_ids": given["input_ids"][:, : length // 2 + 1].clone()}
