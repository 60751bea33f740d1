"""Fields: arguments of transformers models with one row for each prompt, and the rules by which invokes are joined.

All tensors are ``[batch, sequence]`` or ``[batch]``; embeddings, and ids of several choices, have further dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

#: Label that the losses of PyTorch ignore.
IGNORED_LABEL = -100

#: As a filler, stands for the id of the pad token.
PAD_TOKEN = None


@dataclass(frozen=True)
class Field:
    """How an argument is batched."""

    filler: float | None = 0  # the value that pads shorter rows
    is_of_decoder: bool = False  # whether the decoder of an encoder-decoder reads it; padding is then always on the right
    is_one_per_row: bool = False  # whether each row is one number
    #: Makes rows for an invoke without this argument: from its other arguments, the rows of other invokes, and whether the field has a
    #: length of its own. None: all invokes need it.
    default: Callable[[Mapping[str, Any], torch.Tensor, bool], torch.Tensor | None] | None = None


def _tokens(part: Mapping[str, Any]) -> torch.Tensor:
    """Return the ids, or else the embeddings, whose first two dimensions are ``[batch, sequence]``."""
    return part["inputs_embeds"] if part.get("input_ids") is None else part["input_ids"]


def _zeros(part: Mapping[str, Any], like: torch.Tensor, own_length: bool) -> torch.Tensor:
    return like.new_zeros(*_tokens(part).shape[:2], *like.shape[2:])


def _counted(part: Mapping[str, Any], like: torch.Tensor, own_length: bool) -> torch.Tensor:
    return positions(part["attention_mask"]).to(like)


def _ignored(part: Mapping[str, Any], like: torch.Tensor, own_length: bool) -> torch.Tensor | None:
    """Return labels that no loss counts; ``None`` for regressions, which have no such label."""
    if like.is_floating_point():
        return None
    rows, tokens = _tokens(part).shape[:2]
    shape = (rows, *like.shape[1:]) if own_length or like.ndim == 1 else (rows, tokens, *like.shape[2:])
    return like.new_full(shape, IGNORED_LABEL)


FIELDS: dict[str, Field] = {
    "input_ids": Field(PAD_TOKEN),
    "inputs_embeds": Field(),
    "attention_mask": Field(),
    "global_attention_mask": Field(),
    "token_type_ids": Field(default=_zeros),
    "position_ids": Field(default=_counted),
    "special_tokens_mask": Field(1),
    "labels": Field(IGNORED_LABEL, is_of_decoder=True, default=_ignored),
    "decoder_input_ids": Field(PAD_TOKEN, is_of_decoder=True),
    "decoder_inputs_embeds": Field(is_of_decoder=True),
    "decoder_attention_mask": Field(is_of_decoder=True),
    "decoder_position_ids": Field(is_of_decoder=True),
    "start_positions": Field(is_one_per_row=True),
    "end_positions": Field(is_one_per_row=True),
    "next_sentence_label": Field(is_one_per_row=True),
}

#: Tensors without a field that were made from an input and have a row for each of its items, so that they can be joined.
made_rows = WeakIdKeyDictionary()

#: Tensors of inputs that cannot be batched, with the reason.
unbatchable = WeakIdKeyDictionary()


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return positions that count the tokens after the padding; in a row whose mask has gaps, they count every entry."""
    real = mask.bool()
    is_padded_first = (real[:, 1:] >= real[:, :-1]).all(-1, keepdim=True)
    every = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(is_padded_first, real.cumsum(-1) - 1, every).clamp(min=0)


def stack(above: torch.Tensor, below: torch.Tensor, filler: float = 0, side: str = "right") -> torch.Tensor:
    """Return the rows of both tensors; in all other dimensions, the smaller one is padded with ``filler`` on one ``side``."""
    sizes = [max(pair) for pair in zip(above.shape[1:], below.shape[1:], strict=True)]
    padded = []
    for part in (above, below):
        missing = [size - there for size, there in zip(sizes, part.shape[1:], strict=True)]
        lengths = [length for size in reversed(missing) for length in ((size, 0) if side == "left" else (0, size))]
        padded.append(torch.nn.functional.pad(part, lengths, value=filler) if any(lengths) else part)
    return torch.cat(padded)


def refuse_to_share(part: tuple[tuple[Any, ...], Mapping[str, Any]]) -> None:
    """Check that the arguments of an invoke can be batched.

    Raises:
        NotImplementedError: If they are positional, have a tensor that is neither a field nor in ``made_rows``, or one in ``unbatchable``.
    """
    args, kwargs = part
    reason = f"positional arguments ({', '.join(type(value).__name__ for value in args)})" if args else None
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and reason is None:
            reason = unbatchable.get(value)
            if reason is None and name not in FIELDS and value not in made_rows:
                reason = f"`{name}`, which goes to the model as it is"
    if reason is not None:
        raise NotImplementedError(
            f"One of the invokes has {reason}: such an input does not support batching, so it has to be the only invoke with input. "
            "Any number of invokes without input can follow it."
        )
