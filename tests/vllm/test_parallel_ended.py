"""An engine with two devices that loses one of them.

It has the process for itself, and so have those of other tests, which stay until the last test of their file.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from nnsight.vllm import VLLM

from .llama import GREEDY, OPTIONS, PROMPTS, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]


def test_an_engine_whose_process_was_ended_says_so(folder: Path) -> None:
    gc.collect()
    model = VLLM(folder, **OPTIONS, tensor_parallel_size=2)
    before = tokens(model(PROMPTS[0], **GREEDY))
    [process] = model.engine.llm_engine.model_executor._followers._processes
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match="a process of another device has ended"):
        model(PROMPTS[0], **GREEDY)
    with pytest.raises(RuntimeError, match="This engine has ended"):
        model(PROMPTS[0], **GREEDY)
    del model
    gc.collect()
    assert tokens(VLLM(folder, **OPTIONS)(PROMPTS[0], **GREEDY)) == before
