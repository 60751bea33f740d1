"""What a user passes to a trace, as vLLM takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..modeling.forms import describe


def prompt_of(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the prompt of one request, as vLLM takes it.

    Args:
        args: One prompt: a text, token ids as a list or an integer tensor ``[sequence]`` or ``[1, sequence]``, or a dict as vLLM
            takes it.

    Raises:
        ValueError: If there are several prompts, or one without tokens.
        TypeError: If the prompt has none of these forms.
    """
    if len(args) != 1:
        raise ValueError(_SEVERAL.format(count=len(args)))
    prompt = args[0]
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("The prompt is empty: it has no tokens, and the model needs at least one.")
        return {"prompt": prompt}
    if hasattr(prompt, "tolist"):
        prompt = torch.as_tensor(prompt).tolist()
    if isinstance(prompt, (list, tuple)):
        if len(prompt) == 1 and isinstance(prompt[0], (str, list, tuple)):
            return prompt_of((prompt[0],))
        if prompt and all(isinstance(item, (str, list, tuple)) for item in prompt):
            raise ValueError(_SEVERAL.format(count=len(prompt)))
        if not prompt:
            raise ValueError("The prompt is empty: it has no tokens, and the model needs at least one.")
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return {"prompt_token_ids": list(prompt)}
    raise TypeError(f"A prompt is a text or token ids, not {describe(prompt)}.")


def sampling_of(options: Mapping[str, Any]) -> Any:
    """Return vLLM's sampling parameters.

    Args:
        options: Those of ``vllm.SamplingParams``; also ``max_new_tokens`` for ``max_tokens``.

    Raises:
        ValueError: If one is not known, or vLLM refuses them.
    """
    from vllm import SamplingParams

    given = dict(options)
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    known = set(SamplingParams.__struct_fields__)
    unknown = sorted(name for name in given if name not in known or name.startswith("_"))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no sampling parameters of vLLM, which are {', '.join(sorted(n for n in known if n[0] != '_'))}."
        )
    with refusals():
        return SamplingParams(**given)


@contextmanager
def refusals() -> Iterator[None]:
    """Let what vLLM says about a user's request be a ``ValueError``."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except VLLMClientError as error:
        raise ValueError(f"vLLM refuses the request: {error}") from error


_SEVERAL = (
    "{count} prompts for one block: on an engine a block is written against one request. Open an invoke for each, as in "
    "`for prompt in prompts:` `with tracer.invoke(prompt):`."
)
