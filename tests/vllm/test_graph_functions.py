"""Functions of users in the graph of a compiled engine: those of plain hooks on transformers, request by request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.vllm import VLLM
from nnsight.vllm.steering.graph_functions import EditFunction

from .llama import GREEDY, HIDDEN, OPTIONS, PROMPTS, computed, generated, tokens

FEATURES = 32
ENCODER = torch.randn(HIDDEN, FEATURES, generator=torch.Generator().manual_seed(3)) / 4
NO_FEATURES = torch.zeros(FEATURES)
DECODER = torch.randn(FEATURES, HIDDEN, generator=torch.Generator().manual_seed(4))


def clamp(hidden: torch.Tensor, limit: float = 1.0) -> torch.Tensor:
    """Keeps each channel within limits."""
    return hidden.clamp(min=-limit, max=limit)


def autoencoder(hidden: torch.Tensor, *, features: torch.Tensor = NO_FEATURES, gain: float = 1.0) -> torch.Tensor:
    """Adds what an autoencoder decodes of some of its features."""
    return hidden + (torch.relu(hidden @ ENCODER) * features * gain) @ DECODER


def rescaled(hidden: torch.Tensor) -> torch.Tensor:
    """Edits in place what it is given."""
    hidden /= hidden.norm(dim=-1, keepdim=True) / 20.0
    return hidden


FUNCTIONS = {"clamp": clamp, "autoencoder": autoencoder, "rescaled": rescaled}


def features(*numbers: int) -> torch.Tensor:
    found = torch.zeros(FEATURES)
    found[list(numbers)] = 1.0
    return found


# -- without vLLM -----------------------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    """A module as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
        return self.linear(hidden) * factor


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), Scaled(), torch.relu, lambda hidden: hidden @ torch.eye(HIDDEN)])
def test_a_trace_does_what_the_function_does(function: Callable[..., Any]) -> None:
    traced = EditFunction.of("mine", function, HIDDEN, torch.float32)
    part = traced.part(torch.float32)
    for rows in (1, 2, 9):
        hidden = torch.randn(rows, HIDDEN)
        before = hidden.clone()
        torch.testing.assert_close(computed(part, hidden, traced.parameters({})), function(before.clone()))
        assert torch.equal(hidden, before)


def test_parameters_are_those_of_the_request() -> None:
    traced = EditFunction.of("mine", autoencoder, HIDDEN, torch.float32)
    part = traced.part(torch.float32)
    hidden = torch.randn(3, HIDDEN)
    given = traced.parameters({"features": features(1, 5), "gain": 3})
    torch.testing.assert_close(computed(part, hidden, given), autoencoder(hidden, features=features(1, 5), gain=3.0))
    everything = computed(part, hidden, traced.parameters({"features": 1.0}))
    torch.testing.assert_close(everything, autoencoder(hidden, features=torch.ones(FEATURES)))
    for wrong, error, message in [
        ({"feature": 1.0}, ValueError, "no parameter 'feature'. Its parameters: features, gain"),
        ({"features": torch.ones(3)}, ValueError, r"shape \(3,\); it is a number or \[32\]"),
        ({"gain": float("nan")}, ValueError, "not finite"),
        ({"gain": "much"}, TypeError, "is a number or a tensor, not"),
    ]:
        with pytest.raises(error, match=message):
            traced.parameters(wrong)


def test_digests_are_those_of_what_is_computed() -> None:
    def of(function: Callable[..., Any], name: str = "mine") -> str:
        return EditFunction.of(name, function, HIDDEN, torch.float32).digest

    one, same, other = torch.ones(HIDDEN), torch.ones(HIDDEN), torch.zeros(HIDDEN)
    assert of(lambda hidden: hidden + one) == of(lambda state: state + same)
    found = [of(lambda hidden: hidden + one), of(lambda hidden: hidden + other), of(lambda hidden: hidden - one), of(clamp), of(clamp, "b")]
    assert len(set(found)) == len(found)


def draws(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.randn_like(hidden)


def mixes(hidden: torch.Tensor) -> torch.Tensor:
    return hidden - hidden.mean(0)


def branches(hidden: torch.Tensor, limit: float = 1.0) -> torch.Tensor:
    return hidden * 2 if limit > 0 else hidden


def as_a_number(hidden: torch.Tensor, count: int = 2) -> torch.Tensor:
    return sum([hidden] * count)  # type: ignore[return-value]


def shorter(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[:, 1:]


def fails(hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (draws, ValueError, "something else each time"),
        (mixes, ValueError, "mixes rows"),
        (branches, ValueError, "cannot be traced|failed on a hidden state"),
        (as_a_number, ValueError, "failed on a hidden state"),
        (shorter, ValueError, r"returns \[7, 127\] of torch.float32"),
        (fails, ValueError, "failed on a hidden state"),
        (lambda: 1, TypeError, "does not take a hidden state"),
        (lambda hidden, limit: hidden, TypeError, "needs a default"),
        (lambda hidden, scale=1.0: hidden, TypeError, "a name that is none of"),
        (lambda hidden, **names: hidden, TypeError, "needs a default"),
        (3, TypeError, "dict of functions by name"),
    ],
)
def test_what_cannot_be_in_a_graph_is_refused_by_name_and_place(function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        EditFunction.of("mine", function, HIDDEN, torch.float32)
    assert "'mine'" in str(caught.value)
    assert not callable(function) or __file__ in str(caught.value)


# -- on an engine -----------------------------------------------------------------------------------------------------

EDITS = {"modules": ["model.layers.*"], "functions": FUNCTIONS}


@pytest.fixture(scope="module", params=["compiled", "eager"])
def model(request: pytest.FixtureRequest, folder: Path) -> VLLM:
    return VLLM(folder, **OPTIONS, edits=EDITS, enforce_eager=request.param == "eager")


def from_position(start: int, edit: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that edits hidden states from a position on."""
    return lambda hidden: torch.cat([hidden[:, :start], edit(hidden[:, start:].clone())], 1)


@pytest.mark.vllm
def test_requests_with_functions_of_their_own_share_steps(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Each with its own parameters, together with other edits, from a position on, two at a layer, and none."""
    results: list[Any] = []
    layers = model.model.layers
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[0]):
            layers[1].steer(use="clamp", limit=0.5)
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[0]):
            layers[1].steer(use="clamp")
            layers[2].steer(add=vector, use="autoencoder", features=features(2, 7), gain=2.0)
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[2]):
            layers[0].steer(use="rescaled", start=3)
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[2]):
            layers[2].steer(use="rescaled")
            layers[2].steer(use="clamp", limit=1.5)
            results.append(tracer.result)
    wanted: list[dict[int, Callable[[torch.Tensor], torch.Tensor]]] = [
        {},
        {1: lambda hidden: clamp(hidden, 0.5)},
        {1: clamp, 2: lambda hidden: autoencoder(hidden + vector, features=features(2, 7), gain=2.0)},
        {0: from_position(3, rescaled)},
        {2: lambda hidden: rescaled(clamp(hidden, 1.5))},
    ]
    expected = [generated(reference, result.prompt_token_ids, edits) for result, edits in zip(results, wanted, strict=True)]
    assert [tokens(result) for result in results] == expected
    assert len({tuple(found) for found in expected[:3]}) == 3 and expected[3] != expected[4]
    place = "between modules" if model._engine._runner.tapped is None else "in the compiled model, as parameters"  # type: ignore[union-attr]
    assert tracer.report.tiers == ["beside", *[place] * 4]


@pytest.mark.vllm
def test_other_parameters_compile_nothing(model: VLLM) -> None:
    results, found = [], []
    for limit in (0.5, 0.25, 2.0):
        with model.trace(PROMPTS[1], **GREEDY) as tracer:
            model.model.layers[1].steer(use="clamp", limit=limit)
            results.append(tracer.result)
        found.append(dict(torch._dynamo.utils.counters["stats"]))
    assert len({tuple(tokens(result)) for result in results}) == 3
    assert all(counts == found[0] for counts in found)


@pytest.mark.vllm
def test_a_block_is_explained_before_it_runs(model: VLLM) -> None:
    compiled = model._engine is not None and model._engine._runner.tapped is not None
    begun = []
    with model.explain(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.model.layers[1].steer(use="clamp")
        with tracer.invoke(PROMPTS[0]):
            begun.append("second")
            result = tracer.result.save()
            begun.append("never")
    assert begun == ["second"] and "result" not in locals()
    place = "in the compiled model, as parameters" if compiled else "between modules"
    assert tracer.report.tiers == [place, "beside"] and tracer.report.steps == [0, 0]
    assert f"request 0: block would run {place}" in str(tracer.report)
    with pytest.raises(ValueError, match="'clamp', 'autoencoder', 'rescaled'"), model.explain(PROMPTS[0]):
        model.model.layers[1].steer(use="nothing")
    assert not model._engine._runner.bookkeeping.runs and not model._engine._runner.bookkeeping.slots  # type: ignore[union-attr]


@pytest.mark.vllm
def test_unknown_functions_and_parameters_end_their_request_only(model: VLLM, reference: LanguageModel) -> None:
    results: list[Any] = []
    for steer, error, message in [
        (lambda: model.model.layers[1].steer(use="clmp"), ValueError, "'clamp', 'autoencoder', 'rescaled'"),
        (lambda: model.model.layers[1].steer(use="clamp", limits=2.0), ValueError, "no parameter 'limits'"),
        (lambda: model.model.layers[1].steer(limit=2.0), TypeError, "no parameter 'limit'"),
    ]:
        with pytest.raises(error, match=message), model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                steer()
            with tracer.invoke(PROMPTS[0]):
                model.model.layers[1].steer(use="clamp", limit=0.5)
                results.append(tracer.result)
    expected = generated(reference, results[0].prompt_token_ids, {1: lambda hidden: clamp(hidden, 0.5)})
    assert [tokens(result) for result in results] == [expected] * 3


@pytest.mark.vllm
def test_an_engine_with_a_function_that_cannot_be_traced_says_so(folder: Path) -> None:
    with pytest.raises(ValueError, match="'mine'.*`mixes` at .*mixes rows"):
        VLLM(folder, **OPTIONS, edits={"modules": ["model.layers.1"], "functions": {"mine": mixes}}, dispatch=True)
