"""Configurations of vLLM that blocks and tables cannot run with, refused as a model is made.

vLLM has two model runners, the part of a worker that knows which rows of a step belong to which request. This package reads that
from the first, V1; the second keeps it elsewhere, and on the device. On most GPUs vLLM chooses V2 by itself, so V1 is asked for; who
asks for V2, or for something that only V2 can do, is told.
"""

from __future__ import annotations

import os
from typing import Any

#: vLLM reads this whenever it asks which runner an engine has.
_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"

_WHY = (
    "blocks and tables of edits run on vLLM's model runner V1 only. V2 says elsewhere which rows of a step belong to which "
    "request, so edits would reach other rows, or none."
)
#: Why drafts of several tokens, some of which are thrown away, cannot be had.
SPECULATIVE = (
    "a step would have tokens that are thrown away again, so a block would meet tokens that the "
    "request does not have, in steps that `tracer.iter` cannot count"
)


def ask_for_v1() -> None:
    """Ask vLLM for the model runner V1, for this process from now on.

    Raises:
        NotImplementedError: If the environment asks for V2.
    """
    if os.environ.get(_CHOICE, "0").strip().lower() not in ("0", "false", ""):
        raise NotImplementedError(f"{_CHOICE}={os.environ[_CHOICE]} is set, and {_WHY} Unset it, or set it to 0.")
    os.environ[_CHOICE] = "0"


def check(config: Any) -> None:
    """Raise for a configuration of vLLM that blocks cannot run with, whatever made it so: options, or the model itself.

    Args:
        config: vLLM's whole configuration.

    Raises:
        NotImplementedError: With the reason, and what to leave out.
    """
    if config.use_v2_model_runner:
        raise NotImplementedError(
            f"These options make vLLM use its model runner V2 (`watermark_config` and HiSparse attention do), and {_WHY} Leave them out."
        )
    if config.speculative_config is not None:
        raise NotImplementedError(
            f"Speculative decoding (method {config.speculative_config.method!r}) is not implemented: {SPECULATIVE}. Leave out "
            "`speculative_config`, or load the model that the drafts are made for."
        )
