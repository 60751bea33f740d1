"""Values that a compiled engine copies out of its graph: those of transformers, for every request, and read-only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.runtime.errors import OutOfOrderError
from nnsight.vllm import VLLM

from .llama import GREEDY, OPTIONS, PROMPTS, adding, close, generated, plain, states, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

@pytest.fixture(scope="module")
def model(folder: Path) -> VLLM:
    """An engine that captures. Reading from such engines is tested in `test_traces.py`, too."""
    return VLLM(folder, **OPTIONS, captures=["model.layers.*"])


@pytest.fixture(scope="module")
def mixed(folder: Path) -> VLLM:
    """An engine with everything in its graph: an edit after layer 0, a tap after layer 1, captures of all layers."""
    return VLLM(folder, **OPTIONS, captures=["model.layers.*"], taps=["model.layers.1"], edits=["model.layers.0"])


#: Prints what vLLM's own compiled engine generates: tokens, and the logprobs of each. It has its process for itself.
PLAIN_ENGINE = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
folder, options, sampling, prompts = json.loads(sys.argv[1])
outputs = LLM(model=folder, **options).generate(prompts, SamplingParams(**sampling), use_tqdm=False)
found = [output.outputs[0] for output in outputs]
print(json.dumps([[list(one.token_ids), [{key: value.logprob for key, value in step.items()} for step in one.logprobs]] for one in found]))
"""


def equals_a_plain_engine(model: VLLM, folder: Path, **options: Any) -> None:
    """Assert that requests without blocks have the tokens and logprobs, bit by bit, of vLLM's own engine with ``options``."""
    from vllm import SamplingParams

    sampling = {**GREEDY, "logprobs": 3}
    given = json.dumps([str(folder), {**OPTIONS, **options}, sampling, PROMPTS])
    done = subprocess.run([sys.executable, "-c", PLAIN_ENGINE, given], capture_output=True, text=True, timeout=400, check=False)
    assert not done.returncode, done.stderr[-4000:]
    expected = json.loads(done.stdout.splitlines()[-1])
    outputs = model.engine.generate(PROMPTS, SamplingParams(**sampling), use_tqdm=False)
    for mine, (ids, logprobs) in zip([output.outputs[0] for output in outputs], expected, strict=True):
        assert list(mine.token_ids) == ids
        assert [{str(key): value.logprob for key, value in step.items()} for step in mine.logprobs] == logprobs


def test_requests_without_blocks_are_those_of_a_plain_compiled_engine(model: VLLM, folder: Path) -> None:
    equals_a_plain_engine(model, folder)


@pytest.mark.parametrize("form", ["in place", "part in place", "assigned", "residual", "residual assigned"])
def test_edits_are_errors_and_other_requests_go_on(model: VLLM, vector: torch.Tensor, form: str) -> None:
    layer = model.model.layers[2]
    expected = plain(model, [PROMPTS[1]])[0]
    message = r"layers\.2\.output` was edited, and this engine captures it.*taps=\[\.\.\., 'model\.layers\.2'"
    with pytest.raises(ValueError, match=message) as raised, model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            if form == "in place":
                layer.output[0].add_(vector)
            elif form == "part in place":
                layer.output[0][:, 0] = 0.0
            elif form == "assigned":
                layer.output = (layer.output[0] + vector, layer.output[1])
            elif form == "residual":
                layer.residual += vector
            else:
                layer.residual = layer.residual + vector
            logits = model.logits.output.save()
        with tracer.invoke(PROMPTS[1]):
            other = tracer.result.save()
    assert Path(__file__).name in "".join(str(entry.path) for entry in raised.traceback)
    assert tokens(other) == expected


def test_what_is_not_captured_is_refused(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match=r"is not tapped.*layers\.0\.output"), model.trace(PROMPTS[0], **GREEDY):
        model.model.norm.output.save()


def test_captures_show_edits_of_tables_and_taps(mixed: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """What is computed in the graph before a capture is in it, and a tap is no capture: its value can be edited."""
    with mixed.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            mixed.model.layers[0].steer(add=vector)
            mixed.model.layers[1].residual += 2 * vector
            last = mixed.model.layers[3].residual.save()
            result = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            clean = [mixed.model.layers[0].residual, mixed.model.layers[3].residual].save()
            other = tracer.result.save()
    expected = states(reference, result.prompt_token_ids, {0: adding(vector), 1: adding(2 * vector)})
    close(last, expected[3])
    plain_states = states(reference, other.prompt_token_ids)
    close(clean[0], plain_states[0])
    close(clean[1], plain_states[3])


def test_a_tap_comes_before_all_captures_of_a_step(mixed: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match=r"layers\.1\.output"), mixed.trace(PROMPTS[0], **{**GREEDY, "max_tokens": 1}):
        first = mixed.model.layers[0].residual.save()
        tapped = mixed.model.layers[1].residual.save()


def test_prompts_that_are_split_and_prefixes_that_are_cached(folder: Path, reference: LanguageModel) -> None:
    """A block gets all tokens of its prompt at once, in whatever portions the engine computed them, and none from a cache."""
    chunked = VLLM(folder, **OPTIONS, captures=["model.layers.*"], max_num_batched_tokens=32, max_num_seqs=4)
    shared = list(range(10, 58))
    prompts = [[*shared, *range(60, 90)], [*shared, 99], [7, 8, 9], [*shared, *range(60, 90)]]
    plain(chunked, [{"prompt_token_ids": prompt} for prompt in prompts])
    for _ in range(2):
        with chunked.trace(**GREEDY) as tracer:
            found, results, logits = {}.save(), {}.save(), {}.save()
            for number, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    kept, last = [], []
                    for _ in tracer.iter[:6]:
                        kept.append([chunked.model.layers[1].residual, chunked.model.layers[3].residual])
                        last.append(chunked.logits.output)
                    found[number], logits[number], results[number] = kept, last, tracer.result
        for number, result in results.items():
            assert [len(rows) for rows, _ in found[number]] == [len(prompts[number]), 1, 1, 1, 1, 1]
            expected = states(reference, [*prompts[number], *tokens(result)[:-1]])
            close(torch.cat([rows for rows, _ in found[number]]), expected[1])
            close(torch.cat([rows for _, rows in found[number]]), expected[3])
            assert torch.cat(logits[number]).argmax(-1).tolist() == tokens(result)
        assert [tokens(result) for result in results.values()] == plain(chunked, [{"prompt_token_ids": prompt} for prompt in prompts])
    scheduler = chunked.engine.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.max_num_scheduled_tokens == 32 < len(prompts[0])  # else nothing was split
    assert not chunked._engine._runner.bookkeeping.runs


def test_a_request_that_is_computed_anew_is_read_once(
    folder: Path, reference: LanguageModel, vector: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has room for three blocks of 128 tokens; both requests come to need a second one. V2 takes one in again as new."""
    small = VLLM(
        folder, **OPTIONS | {"kv_cache_memory_bytes": 3 * 128 * 2048}, block_size=128, enable_prefix_caching=False,
        captures=["model.layers.*"], edits=["model.layers.1"],
    )  # fmt: skip
    prompts = [[7 + number for number in range(120)], [9 + number for number in range(122)]]
    scheduler = small.engine.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *args, **kwargs: (preempted.append(args), preempt(*args, **kwargs))[1])
    with small.trace(**{**GREEDY, "max_tokens": 16}) as tracer:
        found, results = {}.save(), {}.save()
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                small.model.layers[1].steer(add=vector)
                kept = []
                for _ in tracer.iter[:16]:
                    kept.append(small.model.layers[2].residual)
                    small.logits.output  # noqa: B018 - one more location at each step
                found[number], results[number] = kept, tracer.result
    assert preempted
    for number, result in results.items():
        assert tokens(result) == generated(reference, prompts[number], {1: adding(vector)}, 16)
        assert [len(rows) for rows in found[number]] == [len(prompts[number]), *[1] * 15]
        close(torch.cat(found[number]), states(reference, [*prompts[number], *tokens(result)[:-1]], {1: adding(vector)})[2])
