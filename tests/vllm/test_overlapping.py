"""Steps that begin before the one before has ended (asynchronous scheduling): with edits by tables, not with blocks; on both runners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.vllm import VLLM

from .llama import GREEDY, OPTIONS, adding, generated, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment", "overlapping")]


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step begin before the one before has ended, as on GPUs. vLLM does not do so on CPUs, though it can."""
    from vllm.platforms.cpu import CpuPlatform

    known = CpuPlatform.check_and_update_config.__func__

    def kept(cls: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        known(cls, config)
        config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(kept))


def test_steps_of_steered_requests_that_overlap(folder: Path, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Edits from a position on, in requests of different lengths that come and go."""
    model = VLLM(folder, **OPTIONS, edits=["model.layers.*"], async_scheduling=True, max_num_batched_tokens=48, max_num_seqs=4)
    assert model.engine.llm_engine.engine_core.engine_core.batch_queue_size == 2
    long = [7 + number % 400 for number in range(100)]
    asked = [(long, 1.0, 0), ([5, 6, 7], 0.0, 0), ([8, 9], 2.0, 0), (long, 0.0, 0), ([8, 9], 2.0, 5), (long, 1.0, 60), ([8, 9], -2.0, 0)]
    results: dict[int, Any] = {}
    with model.trace(**GREEDY) as tracer:
        for number, (prompt, coefficient, start) in enumerate(asked):
            with tracer.invoke(prompt, max_tokens=4 + number):
                if coefficient:
                    model.model.layers[2].steer(add=coefficient * vector, start=start)
                results[number] = tracer.result
    for number, (prompt, coefficient, start) in enumerate(asked):
        edits = {2: adding(coefficient * vector, start)}
        assert tokens(results[number]) == generated(reference, prompt, edits, 4 + number), asked[number]
    assert not model._engine.entries.in_use and not model._engine._runner.bookkeeping.slots


@pytest.mark.parametrize("options", [{"taps": ["model.layers.1"]}, {"captures": ["model.layers.1"]}, {}])
def test_steps_of_blocks_do_not_overlap(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="Asynchronous scheduling .*tokens that the request does not have.*`edits=` alone"):
        print(VLLM(folder, **OPTIONS, **options, async_scheduling=True))
