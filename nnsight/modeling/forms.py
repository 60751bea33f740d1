"""Forms of prompts: text, token ids, chats, and encodings as tokenizers return them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

#: Arguments that can replace ``input_ids``.
_INSTEAD_OF_IDS = {"inputs_embeds", "encoder_outputs", "decoder_input_ids", "decoder_inputs_embeds"}

#: Argument names of the key-value cache or recurrent state that a call continues, in several releases of transformers.
CACHES = {"cache", "past_key_values", "cache_params"}

#: All forms of prompts, for error messages.
FORMS = (
    "a string, a list of strings, token ids (a list, a list of lists, or an integer tensor or array with one "
    "or two dimensions), a dict or BatchEncoding with `input_ids`, a chat (a list of {'role': ..., "
    "'content': ...}) or a list of chats"
)


def by_name(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trace by name; raise an error if there is no input."""
    if len(inputs) > 1:
        raise TypeError(f"A trace takes one input, not {len(inputs)}. Pass several prompts as a list.")
    named: dict[str, Any] = {}
    if inputs:
        named = dict(inputs[0]) if isinstance(inputs[0], Mapping) else {"input_ids": inputs[0]}
        if named.get("input_ids") is not None and kwargs.get("input_ids") is not None:
            raise TypeError("`input_ids` is given twice: in the input and by name.")
    given = {**named, **kwargs}
    if all(given.get(name) is None for name in ("input_ids", *_INSTEAD_OF_IDS)):
        if inputs:
            raise TypeError(f"The input is {describe(inputs[0])} without `input_ids`. Pass {FORMS}.")
        raise ValueError(f"The model did not execute: it was given no input, and a trace needs an input. Pass {FORMS}.")
    return given


def id_tensor(ids: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
    """Return ``ids`` as an int64 tensor ``[batch, sequence]``, or ``[batch, choices, sequence]`` if there are choices."""
    if isinstance(ids, np.ndarray):
        ids = torch.tensor(ids.astype(np.int64) if ids.dtype.kind in "iu" else ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"Token ids are integers, not {ids.dtype}. Pass embeddings as `inputs_embeds=`.")
    if ids.ndim == 0:
        raise ValueError(f"Token ids are [sequence] or [batch, sequence]; the shape is {tuple(ids.shape)}.")
    if ids.numel() == 0:
        raise ValueError(f"There are no token ids in the input; its shape is {tuple(ids.shape)}.")
    return ids.long() if ids.ndim > 1 else ids.long().unsqueeze(0)


def id_rows(prompts: Sequence[Any]) -> list[list[int]]:
    """Return token ids as a list of rows; ``prompts`` is one row or a list of rows."""
    if all_integers(prompts):
        return [[int(item) for item in prompts]]
    rows = []
    for row in prompts:
        if isinstance(row, (torch.Tensor, np.ndarray)) and row.ndim == 1:
            rows.append(id_tensor(row)[0].tolist() if len(row) else [])
        elif isinstance(row, (list, tuple)) and all_integers(row):
            rows.append([int(item) for item in row])
        else:
            raise TypeError(f"The list of prompts or token ids contains {describe(row)}. Pass {FORMS}.")
    return rows


def all_are(values: Sequence[Any], kind: type | tuple[type, ...]) -> bool:
    """Whether all ``values`` are instances of ``kind``."""
    return all(isinstance(value, kind) for value in values)


def all_integers(values: Sequence[Any]) -> bool:
    """Whether all ``values`` are integers; ``bool`` does not count."""
    return all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)


def describe(value: Any) -> str:
    """Return the type of ``value`` with its article, for messages."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
