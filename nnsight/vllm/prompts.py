"""Conversion of a user's prompt, sampling parameters and engine options to vLLM's forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..modeling.forms import describe


def prompt_of(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the prompt of one request in vLLM's form. Raise ``ValueError`` unless there is one, not empty; ``TypeError`` for other types.

    A prompt is a text, token ids (a list, or an integer tensor ``[sequence]`` or ``[1, sequence]``), or a dict: of vLLM's form, or the
    output of a tokenizer (``input_ids``, with or without ``attention_mask``).
    """
    if len(args) != 1:
        raise ValueError(
            f"{len(args)} prompts for one block: on an engine a block is written against one request. Open an invoke for each, as in "
            "`for prompt in prompts:` `with tracer.invoke(prompt):`."
        )
    prompt = args[0]
    if isinstance(prompt, Mapping):
        return _tokens_of(prompt) if "input_ids" in prompt else dict(prompt)
    if hasattr(prompt, "tolist"):
        prompt = torch.as_tensor(prompt).tolist()
    if isinstance(prompt, (str, list, tuple)) and not prompt:
        raise ValueError("The prompt is empty: it has zero tokens, and the model needs at least one.")
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, (list, tuple)):
        if all(isinstance(item, (str, list, tuple)) for item in prompt):
            return prompt_of(tuple(prompt))
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return {"prompt_token_ids": list(prompt)}
    raise TypeError(f"A prompt is a text or token ids, not {describe(prompt)}.")


def _tokens_of(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt in the output of a tokenizer, without padding."""
    unknown = sorted(encoded.keys() - {"input_ids", "attention_mask", "token_type_ids"})
    if unknown:
        raise TypeError(f"A prompt with `input_ids` has no {unknown[0]!r}: only `attention_mask` goes with them.")
    ids, mask = (None if encoded.get(name) is None else torch.as_tensor(encoded[name]) for name in ("input_ids", "attention_mask"))
    assert ids is not None
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"`attention_mask` has shape {tuple(mask.shape)}, and `input_ids` has {tuple(ids.shape)}: they have to be equal.")
    if ids.dim() == 2 and len(ids) == 1:
        ids, mask = ids[0], None if mask is None else mask[0]
    if mask is not None and ids.dim() == 1:
        ids = ids[mask.bool()]
    return prompt_of((ids,))


def sampling_of(options: Mapping[str, Any]) -> Any:
    """Return vLLM's sampling parameters. ``max_new_tokens`` stands for ``max_tokens``. Unknown or invalid options raise ``ValueError``."""
    from vllm import SamplingParams

    given = dict(options)
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    known = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no sampling parameters of vLLM. The parameters are: {', '.join(sorted(known))}.")
    with refusals():
        return SamplingParams(**given)


def config_of(repo: str, options: Mapping[str, Any]) -> Any:
    """Return vLLM's configuration of an engine of ``repo`` with ``options``, on a single rank."""
    from vllm.engine.arg_utils import EngineArgs

    with torch.device("cpu"):  # the caller may have set the meta device as default
        return EngineArgs(model=repo, **{**options, "tensor_parallel_size": 1}).create_engine_config()


@contextmanager
def refusals() -> Iterator[None]:
    """Turn vLLM's errors about a user's request into ``ValueError``."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except VLLMClientError as error:
        raise ValueError(f"vLLM refuses the request: {error}") from error
