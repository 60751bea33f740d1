"""vLLM's model runner V2: tables, captures and traces against transformers, and against vLLM's own engine with this runner.

V2 has Triton kernels, which are interpreted here (``tests/triton_on_cpu``); so this file has a run of its own, with the environment
that `make test-vllm-v2` gives it. The files that test the same things on V1 are run there, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.vllm import VLLM

from .llama import GREEDY, OPTIONS, PROMPTS, close, tokens
from .test_drafts import DRAFTS
from .test_kept_values import PLAIN_ENGINE, states
from .test_overlapping import added_from
from .test_traces import generated_by_hand, hidden_states, plain

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("second_runner")]

EVERYTHING = {"edits": {"modules": ["model.layers.*"], "slots": 4, "rank": 1}, "captures": ["model.layers.*"]}


@pytest.fixture(scope="module")
def second_runner(vllm_environment: None) -> None:
    """Say so where the environment is another one: then all of this would be run on V1."""
    from vllm.triton_utils import HAS_TRITON

    assert os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and HAS_TRITON, "run `make test-vllm-v2`"


@pytest.fixture(scope="module")
def everywhere(folder: Path, second_runner: None) -> VLLM:
    return VLLM(folder, **OPTIONS)


@pytest.fixture(scope="module")
def compiled(folder: Path, second_runner: None) -> VLLM:
    """With tables and captures in its graph, and steps of up to 48 tokens."""
    return VLLM(folder, **OPTIONS, **EVERYTHING, max_num_batched_tokens=48, max_num_seqs=8)


@pytest.fixture(scope="module")
def tapped(folder: Path, second_runner: None) -> VLLM:
    return VLLM(folder, **OPTIONS, taps=["model.layers.*"])


def test_it_is_the_second_runner(compiled: VLLM, everywhere: VLLM) -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    for model in (compiled, everywhere):
        assert len(tokens(model(PROMPTS[0], **GREEDY))) == 6
        assert isinstance(model._engine._runner, GPUModelRunner)


# -- tables -----------------------------------------------------------------------------------------------------------


def test_steered_logits_equal_transformers_and_the_engine_that_compiles_nothing(
    compiled: VLLM, everywhere: VLLM, reference: LanguageModel, vector: torch.Tensor
) -> None:
    found = {}
    for model in (compiled, everywhere):
        with model.trace(PROMPTS[0], **GREEDY) as tracer:
            model.model.layers[2].steer(add=vector)
            logits = [].save()
            for _ in tracer.iter[:6]:
                logits.append(model.logits.output)
            result = tracer.result.save()
        found[model] = torch.cat(logits)
    ids = [*result.prompt_token_ids, *tokens(result)[:-1]]
    close(found[compiled], found[everywhere])
    close(found[compiled], hidden_states(reference, ids, vector=vector)[2][-6:])


def test_requests_without_blocks_are_those_of_a_plain_engine_bit_by_bit(compiled: VLLM, folder: Path) -> None:
    """In an engine with tables and captures in its graph, beside one of vLLM's own."""
    from vllm import SamplingParams

    sampling = {**GREEDY, "logprobs": 3}
    options = {**OPTIONS, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    given = json.dumps([str(folder), options, sampling, PROMPTS])
    done = subprocess.run([sys.executable, "-c", PLAIN_ENGINE, given], capture_output=True, text=True, timeout=400, check=False)
    assert not done.returncode, done.stderr[-4000:]
    expected = json.loads(done.stdout.splitlines()[-1])
    outputs = compiled.engine.generate(PROMPTS, SamplingParams(**sampling), use_tqdm=False)
    for mine, (ids, logprobs) in zip([output.outputs[0] for output in outputs], expected, strict=True):
        assert list(mine.token_ids) == ids
        assert [{str(key): value.logprob for key, value in step.items()} for step in mine.logprobs] == logprobs


def test_different_edits_in_one_batch_of_split_prompts(compiled: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Long and short prompts, so that a step has a part of one and tokens of others, in another order than they came in."""
    long = [7 + number % 400 for number in range(100)]
    asked = [(long, 1.0, 0), ([5, 6, 7], 0.0, 0), ([8, 9], 2.0, 0), (long, 0.0, 0), ([8, 9], 2.0, 0), (long, 1.0, 60)]
    results: dict[int, Any] = {}
    with compiled.trace(**GREEDY) as tracer:
        for number, (prompt, coefficient, start) in enumerate(asked):
            with tracer.invoke(prompt):
                if coefficient:
                    compiled.model.layers[2].steer(add=coefficient * vector, start=start)
                results[number] = tracer.result
    for number, (prompt, coefficient, start) in enumerate(asked):
        edit = added_from(start, coefficient * vector)
        assert tokens(results[number]) == generated_by_hand(reference, prompt, edit, 6), asked[number]
    assert not compiled._engine._slots._users


# -- captures ---------------------------------------------------------------------------------------------------------


def test_captured_states_equal_transformers(compiled: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Of prompts that are split, beside others, and of a steered request."""
    prompts = [[7 + number % 400 for number in range(100)], [5, 6, 7], [8, 9], [8, 9]]
    with compiled.trace(**GREEDY) as tracer:
        found, results = {}.save(), {}.save()
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                if number == 3:
                    compiled.model.layers[1].steer(add=vector)
                found[number] = [[layer.residual for layer in compiled.model.layers] for _ in tracer.iter[:6]]
                results[number] = tracer.result
    for number, result in results.items():
        assert [len(step[0]) for step in found[number]] == [len(prompts[number]), 1, 1, 1, 1, 1]
        expected = states(reference, [*prompts[number], *tokens(result)[:-1]], {1: vector} if number == 3 else None)
        for layer, hidden in enumerate(expected):
            close(torch.cat([step[layer] for step in found[number]]), hidden)


def test_requests_that_are_computed_anew(folder: Path, reference: LanguageModel, vector: torch.Tensor) -> None:
    """The cache has room for three blocks of 128 tokens, and both requests come to need a second one. V2 takes one in again as new."""
    small = VLLM(
        folder, **OPTIONS | {"kv_cache_memory_bytes": 3 * 128 * 2048}, **EVERYTHING, block_size=128, enable_prefix_caching=False
    )  # fmt: skip
    prompts = [[7 + number for number in range(120)], [9 + number for number in range(122)]]
    scheduler = small.engine.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []
    scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(args), preempt(*args, **kwargs))[1]
    with small.trace(**{**GREEDY, "max_tokens": 16}) as tracer:
        found, results = {}.save(), {}.save()
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                small.model.layers[1].steer(add=vector)
                found[number] = [small.model.layers[2].residual for _ in tracer.iter[:16]]
                results[number] = tracer.result
    assert preempted
    for number, result in results.items():
        assert tokens(result) == generated_by_hand(reference, prompts[number], lambda hidden: hidden + vector, 16, layer=1)
        assert [len(rows) for rows in found[number]] == [len(prompts[number]), *[1] * 15]
        close(torch.cat(found[number]), states(reference, [*prompts[number], *tokens(result)[:-1]], {1: vector})[2])


# -- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["everywhere", "tapped", "compiled"])
def test_samples_and_logits_are_read_and_written(request: pytest.FixtureRequest, kind: str, reference: LanguageModel) -> None:
    """What a block makes of them is what the request goes on with."""
    model: VLLM = request.getfixturevalue(kind)
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
    close(torch.cat(logits), hidden_states(reference, [*written.prompt_token_ids, 77, 78])[2][-3:])
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
