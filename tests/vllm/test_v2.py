"""What is about vLLM's model runner V2 alone; the files that test both runners are run on V2, too.

V2 has Triton kernels, which are interpreted here (``tests/triton_on_cpu``); so this file has a run of its own, with the environment
that `make test-vllm-v2` gives it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.vllm import VLLM

from .llama import GREEDY, OPTIONS, PROMPTS, close, plain, states, tokens
from .test_drafts import DRAFTS

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("second_runner")]

KINDS: dict[str, dict[str, Any]] = {
    "everywhere": {},
    "tapped": {"taps": ["model.layers.*"]},
    "compiled": {"edits": ["model.layers.*"], "captures": ["model.layers.*"]},
}


@pytest.fixture(scope="module")
def second_runner(vllm_environment: None) -> None:
    """Say so where the environment is another one: then all of this would be run on V1."""
    from vllm.triton_utils import HAS_TRITON

    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and HAS_TRITON, "run `make test-vllm-v2`"


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_logits_are_read_and_written(folder: Path, kind: str, reference: LanguageModel) -> None:
    """The request goes on with the values that a block leaves."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    model = VLLM(folder, **OPTIONS, **KINDS[kind])
    assert len(tokens(model(PROMPTS[0], **GREEDY))) == 6
    assert isinstance(model._engine._runner, GPUModelRunner)
    with model.trace(**{**GREEDY, "max_tokens": 3}) as tracer:
        with tracer.invoke(PROMPTS[0]):
            logits = [].save()
            for step in tracer.iter[:3]:
                logits.append(model.logits.output.clone())
                if step == 0:
                    model.samples.output[:] = 77
                if step == 1:
                    model.samples.output = torch.full_like(model.samples.output, 78)
            written = tracer.result.save()
        with tracer.invoke(PROMPTS[0]):
            model.logits.output[0, 99] = 1e4
            forced = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            drawn = [model.samples.output for _ in tracer.iter[:3]].save()
            read = tracer.result.save()
    assert tokens(written)[:2] == [77, 78] and tokens(forced)[0] == 99
    close(torch.cat(logits), states(reference, [*written.prompt_token_ids, 77, 78])[-1][-3:])
    assert [int(sample) for sample in drawn] == tokens(read) == plain(model, [PROMPTS[1]], max_tokens=3)[0]
    assert {(sample.dtype, tuple(sample.shape)) for sample in drawn} == {(torch.int64, (1, 1))}


# -- what V2 has, or vLLM has on it, and blocks cannot run with --------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"watermark_config": {"key": 1}}, "a watermark"),
        ({"enable_prompt_embeds": True}, "embeddings in place of a prompt"),
        ({"edits": ["model.layers.*"], "speculative_config": {**DRAFTS}}, "speculative decoding"),
        ({"enable_trace_replay": True}, "replayed tokens"),
    ],
)
@pytest.mark.parametrize("dispatch", [False, True])
def test_what_has_not_been_seen_to_be_right_is_refused(folder: Path, options: dict[str, Any], message: str, dispatch: bool) -> None:
    with pytest.raises(NotImplementedError, match=f"model runner V2 with .*{message}.*unset VLLM_USE_V2_MODEL_RUNNER"):
        print(VLLM(folder, **OPTIONS, **options, dispatch=dispatch))
