"""Several samples of one prompt (``n=``): each is what the same request gives alone; blocks that samples cannot share are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.vllm import VLLM

from .llama import OPTIONS, PROMPTS, adding, generated, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

#: Of which each sample is another one; and of which all are the most probable.
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 11}
LIKELIEST: dict[str, Any] = {**DRAWN, "top_k": 1}


LAYOUTS = {
    "everywhere": {},
    "compiled": {"taps": ["model.layers.3"], "edits": {"modules": ["model.layers.2"], "slots": 2}},
    "captured": {"captures": ["model.layers.3"], "edits": ["model.layers.2"]},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def model(folder: Path, request: pytest.FixtureRequest) -> VLLM:
    """An engine that stops between all modules; and compiled ones, with a tap or a capture behind the layer with tables."""
    return VLLM(folder, **OPTIONS, **LAYOUTS[request.param])


def all_tokens(result: Any) -> list[list[int]]:
    assert [sample.index for sample in result.outputs] == list(range(len(result.outputs)))
    assert result.finished
    return [list(sample.token_ids) for sample in result.outputs]


def nothing_is_left(model: VLLM) -> None:
    """Assert that the engine has forgotten all requests."""
    engine = model._engine
    assert engine is not None
    assert not engine._runner.bookkeeping.runs and not engine._runner.bookkeeping.slots
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert not engine.entries.in_use


def test_plain_samples_are_those_of_vllm(model: VLLM) -> None:
    from vllm import SamplingParams

    [expected] = model.engine.generate(PROMPTS[:1], SamplingParams(n=3, **DRAWN), use_tqdm=False)
    with model.trace(**DRAWN) as tracer:
        with tracer.invoke(PROMPTS[0], n=3):
            result = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            other = tracer.result.save()
    assert all_tokens(result) == all_tokens(expected) == all_tokens(model(PROMPTS[0], n=3, **DRAWN))
    assert len({tuple(sample) for sample in all_tokens(result)}) == 3
    assert result.prompt == expected.prompt and result.prompt_token_ids == expected.prompt_token_ids
    assert [sample.text for sample in result.outputs] == [sample.text for sample in expected.outputs]
    assert all_tokens(other) == all_tokens(model(PROMPTS[1], **DRAWN))
    assert tracer.report.tiers == ["beside", "beside"]
    nothing_is_left(model)


def test_steered_samples_are_those_of_as_many_requests_and_of_transformers(
    model: VLLM, reference: LanguageModel, vector: torch.Tensor
) -> None:
    singles = []
    with model.trace(**DRAWN) as tracer:
        with tracer.invoke(PROMPTS[0], n=3):
            model.model.layers[2].steer(add=vector)
            drawn = tracer.result.save()
        with tracer.invoke(PROMPTS[0], n=2, top_k=1):
            model.model.layers[2].steer(add=-vector)
            likeliest = tracer.result.save()
        with tracer.invoke(PROMPTS[1], n=2):
            unsteered = tracer.result.save()
        for number in range(3):
            with tracer.invoke(PROMPTS[0], seed=DRAWN["seed"] + number):
                model.model.layers[2].steer(add=vector)
                singles.append(tracer.result)
    assert all_tokens(drawn) == [tokens(result) for result in singles]
    assert len({tuple(sample) for sample in all_tokens(drawn)}) == 3
    assert all_tokens(likeliest) == [generated(reference, likeliest.prompt_token_ids, {2: adding(-vector)})] * 2
    assert all_tokens(unsteered) == all_tokens(model(PROMPTS[1], n=2, **DRAWN))
    if model._layout is None:
        assert tracer.report.tiers[0] == "between modules" and tracer.report.steps[0] == 6
    else:
        assert tracer.report.tiers[0] == "in the compiled model, as parameters"
    nothing_is_left(model)


def test_edits_of_the_model_run_in_each_sample(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Each sample has its own passages, and is edited as a request alone would be."""
    steps: list[tuple[int, int]] = []
    only_read = model._layout is not None and bool(model._layout.captures)
    with model.edit() as (tracer, edited):
        for step in tracer.iter[:6]:
            hidden = model.model.layers[3].residual
            steps.append((step, len(hidden)))
            if not only_read:
                hidden += vector
    edits = {} if only_read else {3: adding(vector)}
    with edited.trace(PROMPTS[0], n=3, **LIKELIEST) as tracer:
        edited.model.layers[2].steer(add=vector)
        result = tracer.result.save()
    ids = result.prompt_token_ids
    assert all_tokens(result) == [generated(reference, ids, {2: adding(vector), **edits})] * 3
    assert sorted(steps) == sorted([(0, len(ids)), *[(step, 1) for step in range(1, 6)]] * 3)
    assert tracer.report.steps == [6]
    assert all_tokens(edited(PROMPTS[0], n=2, **LIKELIEST)) == [generated(reference, ids, edits)] * 2
    nothing_is_left(model)


@pytest.mark.parametrize("model", ["everywhere"], indirect=True)
@pytest.mark.filterwarnings("ignore:The loop ended")
def test_samples_of_different_lengths(model: VLLM) -> None:
    """The result comes when the last has finished."""
    with model.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            model.samples.output  # noqa: B018
    with edited.trace(PROMPTS[0], n=3, **DRAWN) as tracer:
        whole = tracer.result.save()
    first = all_tokens(whole)[1][2]
    with edited.trace(PROMPTS[0], n=3, stop_token_ids=[first], **{**DRAWN, "min_tokens": 1}) as tracer:
        cut = tracer.result.save()
    found = all_tokens(cut)
    assert len(found[1]) <= 3 and max(map(len, found)) > len(found[1])
    assert all(short == long[: len(short)] for short, long in zip(found, all_tokens(whole), strict=True))
    assert tracer.report.steps == [max(map(len, found))]


def test_blocks_that_samples_cannot_share_are_refused_at_their_line(model: VLLM) -> None:
    message = r"n=2: the block waits at `model.model.layers.3.output`.*`with tracer.invoke\(prompt, seed=seed\):`"
    results = []
    with pytest.raises(ValueError, match=message) as caught, model.trace(**DRAWN) as tracer:
        with tracer.invoke(PROMPTS[0], n=2):
            model.model.layers[3].output  # noqa: B018
        with tracer.invoke(PROMPTS[1]):
            results.append(tracer.result)
    assert "layers[3].output" in str(caught.traceback[-1].statement)
    assert tokens(results[0]) == tokens(model(PROMPTS[1], **DRAWN))
    for wanted in ("logits", "samples"):
        with pytest.raises(ValueError, match=f"n=2: the block waits at `model.{wanted}.output`"):
            with model.trace(PROMPTS[0], n=2, **DRAWN) as tracer:
                for _ in tracer.iter[:]:
                    getattr(model, wanted).output  # noqa: B018
    with pytest.raises(ValueError, match="n=2: the block has a cache"), model.trace(PROMPTS[0], n=2, **DRAWN) as tracer:
        tracer.cache([model.model.layers[3]])
    nothing_is_left(model)


@pytest.mark.parametrize("model", ["everywhere", "compiled"], indirect=True)
def test_an_error_in_one_sample_ends_its_request_only(model: VLLM) -> None:
    calls: list[int] = []
    with model.edit() as (tracer, edited):
        for step in tracer.iter[:6]:
            model.model.layers[3].output  # noqa: B018
            calls.append(step)
            if len(calls) == 7:
                raise ArithmeticError("the seventh")
    results = []
    with pytest.raises(ArithmeticError, match="the seventh") as caught, edited.trace(PROMPTS[0], n=3, **DRAWN) as tracer:
        results.append(tracer.result)
    assert "This was sample 0 of 3." in caught.value.__notes__
    assert not results
    nothing_is_left(model)
    assert len(all_tokens(model(PROMPTS[0], n=3, **DRAWN))) == 3


def test_samples_that_are_awaited(folder: Path, vector: torch.Tensor) -> None:
    """Outputs have all samples so far; the last one has all of each."""
    awaited = VLLM(folder, **OPTIONS, mode="async", edits=["model.layers.*"])

    async def main() -> Any:
        with awaited.trace(PROMPTS[0], n=3, **DRAWN) as tracer:
            awaited.model.layers[2].steer(add=vector)
            result = tracer.result.save()
        found = [output async for output in tracer.backend()]
        singles = []
        for number in range(3):
            with awaited.trace(PROMPTS[0], **{**DRAWN, "seed": DRAWN["seed"] + number}) as tracer:
                awaited.model.layers[2].steer(add=vector)
            singles.append(tokens(await tracer.backend()))
        async with awaited(PROMPTS[0], n=3, **{**DRAWN, "max_tokens": 200}) as stream:
            async for output in stream:
                if len(tokens(output)) >= 3:
                    break
        plain = await awaited(PROMPTS[0], n=2, **DRAWN)
        return found, singles, plain

    outputs, singles, plain = asyncio.run(main())
    last = outputs[-1]
    assert all_tokens(last) == singles and last.saves["result"] is last
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert [[len(sample.token_ids) for sample in output.outputs] for output in outputs] == [[step] * 3 for step in range(1, 7)]
    assert len(all_tokens(plain)) == 2
    nothing_is_left(awaited)
