"""What the tests of documented examples share: a model whose blocks return tuples, the demo model, and references."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils import _pytree as pytree

import nnsight
from nnsight import LanguageModel, demo

from ..conftest import Hooks, Rows

ROME = "The Colosseum is in the city of"
PARIS = "The Eiffel Tower is in the city of"
LAYERS = 3
WIDTH = 8
HEADS = 2


class Attention(torch.nn.Module):
    """Mixes the places of a sequence; returns a tuple, as attention modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.query = torch.nn.Linear(WIDTH, WIDTH)
        self.project = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(self.query(x) @ x.transpose(1, 2), dim=-1)
        return self.project(weights @ x), weights


class Block(torch.nn.Module):
    """One layer; returns ``(hidden, weights)`` as layers of older transformers versions do."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, weights = self.attn(x)
        x = x + mixed
        return x + self.mlp(x), weights


class Tower(torch.nn.Module):
    """A language model in small: ids ``[batch, sequence]`` to logits ``[batch, sequence, 11]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return self.head(self.norm(hidden))


def new_tower() -> Rows:
    """Return a new small model that joins the inputs of invokes and can run compiled."""
    torch.manual_seed(0)
    return Rows(Tower().eval(), compile={"backend": "eager"})


@functools.cache
def tower() -> Rows:
    """Return one such model for all tests that leave it as it is, so that its graphs are captured once."""
    return new_tower()


def ids(seed: int = 0, batch: int = 1, length: int = 5) -> torch.Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(seed))


def new_language_model(**options: Any) -> LanguageModel:
    """Return a small random model with the tokenizer of the demo; it never ends a text."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=16, n_head=HEADS, n_positions=64, vocab_size=1024, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.path())
    return LanguageModel(
        transformers.GPT2LMHeadModel(config).eval(), tokenizer, compile={"backend": "eager"}, **options
    )


@functools.cache
def language_model() -> LanguageModel:
    """Return one such model for all tests that leave it as it is, so that its graphs are captured once."""
    return new_language_model()


@functools.cache
def demo_model() -> LanguageModel:
    """Return the demo model, which knows some facts."""
    return nnsight.demo_model(compile={"backend": "eager"})


def encoded(prompt: str) -> dict[str, torch.Tensor]:
    return dict(language_model().tokenizer(prompt, return_tensors="pt"))


def hooked(model: Any, *given: Any, **edits: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """Run the module behind ``model`` with plain hooks.

    Args:
        model: A wrapped model.
        *given: The prompt for a language model, else the arguments of the module.
        **edits: Function for the output of a module, by its path with ``__`` for dots.

    Returns:
        What the module returned, and the output of every module by its path, after the edits.
    """
    hooks, seen = Hooks(model._module), {}
    for path, edit in edits.items():
        hooks.output(path.replace("__", "."), edit)
    for path, module in model._module.named_modules():
        if path and not isinstance(module, torch.nn.ModuleList):
            hooks.output(path, functools.partial(_note, seen, path))
    if given and isinstance(given[0], str):
        return hooks(**encoded(given[0])), seen
    return hooks(*given), seen


def _note(seen: dict[str, Any], path: str, value: Any) -> None:
    seen[path] = pytree.tree_map_only(torch.Tensor, torch.clone, value)


def zero_hidden(value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Edit for :func:`hooked`: the hidden state of a block becomes zero."""
    return torch.zeros_like(value[0]), value[1]
