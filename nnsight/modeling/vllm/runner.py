"""Configurations of vLLM that blocks and tables cannot run with, refused as a model is made.

vLLM has two model runners, the part of a worker that knows which rows of a step belong to which request. This package reads that
from the first, V1; the second keeps it elsewhere, and on the device. On most GPUs vLLM chooses V2 by itself, so V1 is asked for; who
asks for V2, or for something that only V2 can do, is told.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

#: vLLM reads this whenever it asks which runner an engine has.
_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"

_WHY = (
    "blocks and tables of edits run on vLLM's model runner V1 only. V2 says elsewhere which rows of a step belong to which "
    "request, so edits would reach other rows, or none."
)
#: Why blocks that meet the model cannot have drafts of several tokens, some of which are thrown away again.
SPECULATIVE = (
    "a step would have tokens that are thrown away again, so a block would meet tokens that the request does not have, in steps "
    "that `tracer.iter` cannot count"
)
#: Where drafts are looked up in the tokens of a request.
_METHOD = "ngram"
_WITH_TABLES = "With `edits=` alone, on one device, `speculative_config={'method': 'ngram', ...}` can be had"
_ON_THE_DEVICE = (
    "Speculative decoding with the method {method!r} is not implemented: the draft model would not be steered, or which positions the "
    "rows of a step have would be known on the device only. With `edits=` alone, the method 'ngram' can be had, with "
    "`async_scheduling=False`."
)


def ask_for_v1() -> None:
    """Ask vLLM for the model runner V1, for this process from now on.

    Raises:
        NotImplementedError: If the environment asks for V2.
    """
    if os.environ.get(_CHOICE, "0").strip().lower() not in ("0", "false", ""):
        raise NotImplementedError(f"{_CHOICE}={os.environ[_CHOICE]} is set, and {_WHY} Unset it, or set it to 0.")
    os.environ[_CHOICE] = "0"


def check(config: Any, tables: bool) -> None:
    """Raise for a configuration of vLLM that blocks cannot run with, whatever made it so: options, or the model itself.

    With tables of edits alone, drafts that are looked up in the tokens of the request (``ngram``) do no harm: an edit belongs to positions
    of a request, and what a rejected token has left in the cache is written over. Drafts of a model would be those of one
    that is not steered, and with them, or with asynchronous scheduling, positions are known on the device only.

    Args:
        config: vLLM's whole configuration.
        tables: Whether the engine has tables for edits, and nothing else.

    Raises:
        NotImplementedError: With the reason, and what to leave out.
    """
    if config.use_v2_model_runner:
        raise NotImplementedError(
            f"These options make vLLM use its model runner V2 (`watermark_config` and HiSparse attention do), and {_WHY} Leave them out."
        )
    drafts = config.speculative_config
    if drafts is None:
        return
    if not tables or config.parallel_config.world_size > 1:
        raise NotImplementedError(
            f"Speculative decoding (method {drafts.method!r}) is not implemented: {SPECULATIVE}. Leave out `speculative_config`, or "
            f"load the model that the drafts are made for. {_WITH_TABLES}."
        )
    if drafts.method != _METHOD or config.scheduler_config.async_scheduling:
        raise NotImplementedError(_ON_THE_DEVICE.format(method=drafts.method))


def check_drafts(options: Mapping[str, Any], tables: bool) -> None:
    """Raise for options that ask for speculative decoding where :func:`check` would, before vLLM looks at them.

    Raises:
        NotImplementedError: With the reason.
    """
    for name in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if options.get(name) and not tables:
            raise NotImplementedError(f"VLLM({name}=...) is not implemented: {SPECULATIVE}. Leave it out. {_WITH_TABLES}.")
    drafts = options.get("speculative_config")
    method = options.get("spec_method") or (drafts.get("method") if isinstance(drafts, Mapping) else None)
    if method not in (None, _METHOD):
        raise NotImplementedError(_ON_THE_DEVICE.format(method=method))
