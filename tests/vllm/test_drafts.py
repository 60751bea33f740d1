"""Speculative decoding in engines with tables: drafts are looked up in the tokens of the request, and checked by the steered model.

On one device and on two, in this process and in a server. vLLM's model runner V2 is refused with it (``test_v2.py``).
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nnsight import LanguageModel
from nnsight.vllm import VLLM

from .llama import GREEDY, OPTIONS, PROMPTS, adding, generated, tokens
from .test_serving import serving

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


#: vLLM looks drafts up with numba, which warns of how it is called.
with_numba = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")


@pytest.fixture(scope="module", params=[1, 2], ids=["one device", "two devices"])
def drafting(folder: Path, request: pytest.FixtureRequest) -> Iterator[VLLM]:
    """An engine with tables, that looks drafts up in the tokens of the request. With two devices it has the process for itself."""
    gc.collect()
    yield VLLM(folder, **OPTIONS, edits=["model.layers.*"], speculative_config=DRAFTS, tensor_parallel_size=request.param)
    gc.collect()


@with_numba
def test_drafts_of_steered_requests_are_steered(
    drafting: VLLM, reference: LanguageModel, vector: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start, and from a position on that lies among the generated tokens, where a step may have rows on both sides of it."""
    count, prompts = 48, [[40, 41, 42, 40, 41, 42, 40, 41], [300, 301], [7, 8, 7, 8, 7, 8, 7]]
    asked = [(0.0, 0), (1.0, 0), *[(1.0, len(prompts[0]) + late) for late in range(3, 11)], (-2.0, 4)]
    scheduler = drafting.engine.llm_engine.engine_core.engine_core.scheduler
    runner, schedule, drafted = drafting._engine._runner, scheduler.schedule, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        sizes = scheduled.num_scheduled_tokens
        drafted.extend(sizes[name] for name in runner.bookkeeping.slots if name in sizes)
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", noted)
    cases = [(prompt, coefficient, start) for prompt in prompts for coefficient, start in asked]
    with drafting.trace(temperature=0.0, max_tokens=count, ignore_eos=True) as tracer:
        results = {}.save()
        for number, (prompt, coefficient, start) in enumerate(cases):
            with tracer.invoke(prompt):
                if coefficient:
                    drafting.model.layers[2].steer(add=coefficient * vector, start=start)
                results[number] = tracer.result  # they end in another order
    expected = [generated(reference, prompt, {2: adding(coefficient * vector, start)}, count) for prompt, coefficient, start in cases]
    assert [tokens(results[number]) for number in range(len(cases))] == expected
    assert len({tuple(found) for found in expected}) > len(asked)
    steered = len(prompts) * (len(asked) - 1)
    assert drafted.count(4) > steered and len(drafted) < steered * count  # drafts of three were made, and kept
    assert not runner.bookkeeping.slots and not drafting._engine.entries.in_use


@with_numba
def test_blocks_that_meet_the_model_are_refused_where_there_are_drafts(drafting: VLLM) -> None:
    results = []
    with pytest.raises(ValueError, match="this engine decodes speculatively.* without `speculative_config`") as caught:
        with drafting.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                drafting.logits.output  # noqa: B018
            with tracer.invoke(PROMPTS[1]):
                results.append(tracer.result)
    assert "logits.output" in str(caught.traceback[-1].statement)
    assert len(tokens(results[0])) == 6
    with pytest.raises(ValueError, match="this engine decodes speculatively"):
        with drafting.trace(PROMPTS[0], **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                pass


@pytest.mark.parametrize("dispatch", [False, True])
def test_drafts_that_only_the_device_knows_are_refused(folder: Path, dispatch: bool) -> None:
    options = {**OPTIONS, "edits": ["model.layers.*"], "speculative_config": {**DRAFTS, "method": "ngram_gpu"}}
    with pytest.raises(NotImplementedError, match="method 'ngram_gpu' .* only the device would know.* 'ngram' is available"):
        VLLM(folder, **options, dispatch=dispatch)


@with_numba
@pytest.mark.parametrize("devices", [1, 2])
def test_a_server_that_drafts(folder: Path, reference: LanguageModel, vector: torch.Tensor, tmp_path: Path, devices: int) -> None:
    """Steered and plain answers, from the start and from a position among the generated tokens on."""
    file = tmp_path / "vector.safetensors"
    save_file({"layer.2": vector}, file)
    options = ["--vectors", f"happy={file}", "--tensor-parallel-size", devices, "--speculative-config", json.dumps(DRAFTS)]
    ids, count = [40, 41, 42, 40, 41, 42, 40, 41], 48
    with serving(folder, tmp_path / "log.txt", *options) as server:
        for factor, start in ((0.0, 0), (1.0, 0), (1.0, len(ids) + 9), (-2.0, 4)):
            asked = {"nnsight_vector": "happy", "nnsight_scale": factor, "nnsight_start": start} if factor else None
            assert server.tokens(ids, asked, max_tokens=count) == generated(reference, ids, {2: adding(factor * vector, start)}, count)
        _, metrics = server.ask("GET", "/metrics")
    [accepted] = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total{")]
    assert float(accepted.split()[-1]) > 0
