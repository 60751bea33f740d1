"""Loops over steps that go on as programs: the same values as from Python and from hooks, without stops of Python.

A block is recorded at once here (:data:`~nnsight.vllm.blocks.stepping.STOPS` is 0), so its first step behind the prompt is watched, and the
later ones are those of a program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from nnsight import LanguageModel
from nnsight.runtime.mediator import Mediator
from nnsight.vllm import VLLM
from nnsight.vllm.blocks import recording, stepping
from nnsight.vllm.worker.requests import RequestRun

from ..conftest import same
from .llama import GREEDY, OPTIONS, PROMPTS, adding, close, generated, plain, states, tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("vllm_environment", "at_once"),
    pytest.mark.filterwarnings("ignore:The loop ended at:UserWarning"),
]

COUNT = 10
LONG = {**GREEDY, "max_tokens": COUNT}
KINDS: dict[str, dict[str, Any]] = {"everywhere": {}, "tapped": {"taps": ["model.layers.*", "model.layers.*.mlp.down_proj.input"]}}


@pytest.fixture(scope="module", params=KINDS)
def model(folder: Path, request: pytest.FixtureRequest) -> VLLM:
    return VLLM(folder, **OPTIONS, **KINDS[request.param])


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "STOPS", 0)


class Stops:
    """How often blocks were given a value, and how often something was recorded."""

    visits = recordings = 0


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Stops:
    counted, visit, record = Stops(), Mediator.visit, stepping.recorded

    def visited(self: Mediator, location: str, occurrence: int, value: Any) -> Any:
        counted.visits += location != "result" and isinstance(self.interleaver, RequestRun)  # and not a recording
        return visit(self, location, occurrence, value)

    def recorded(*given: Any) -> recording.StepProgram:
        counted.recordings += 1
        return record(*given)

    monkeypatch.setattr(Mediator, "visit", visited)
    monkeypatch.setattr(stepping, "recorded", recorded)
    return counted


def test_a_loop_goes_on_as_a_program(model: VLLM, reference: LanguageModel, vector: torch.Tensor, stops: Stops) -> None:
    """Each request has the values of hooks, with vectors and numbers of its own. Its Python runs for the prompt, the step that is watched,
    and the last one."""
    factors = [0.5, 1.0, -2.0]
    for python, recordings in ((3, 1), (2, 0)):
        stops.visits = stops.recordings = 0
        results, saved = [], []
        with model.trace(**LONG) as tracer:
            for prompt, factor in zip(PROMPTS, factors, strict=True):
                direction = vector * factor
                with tracer.invoke(prompt):
                    hidden = [].save()
                    for _ in tracer.iter[:COUNT]:
                        model.model.layers[1].residual += direction
                        state = model.model.layers[2].residual
                        hidden.append(state)
                        model.model.layers[2].residual = state * 2 + factor * direction
                    saved.append(hidden)
                    results.append(tracer.result)
        for result, hidden, factor in zip(results, saved, factors, strict=True):
            seen: list[torch.Tensor] = []
            edits = {1: adding(factor * vector), 2: lambda state, factor=factor: state * 2 + factor * factor * vector}
            assert tokens(result) == generated(reference, result.prompt_token_ids, edits, COUNT)
            watching = {**edits, 2: lambda state, seen=seen: seen.append(state[0])}
            states(reference, [*result.prompt_token_ids, *tokens(result)[:-1]], watching)
            close(torch.cat(hidden), seen[0])
            assert [len(each) for each in hidden] == [len(result.prompt_token_ids)] + [1] * (COUNT - 1)
        assert (stops.visits, stops.recordings) == (len(PROMPTS) * 2 * python, recordings)
        assert tracer.report.programs == [COUNT - python] * 3
        where = "between modules" if model._layout is None else "at taps of the compiled model"
        assert f"request 1: block ran {where}, in {COUNT} steps, {COUNT - python} of them as a program" in str(tracer.report)


def test_a_loop_without_an_effect_goes_on_as_python(model: VLLM, at_once: None) -> None:
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:COUNT]:
            hidden = model.model.layers[1].residual
        result = tracer.result.save()
    assert len(tokens(result)) == COUNT and tracer.report.programs == [0]
    assert "its steps have no effect" in str(tracer.report)


# -- what a body may do -------------------------------------------------------------------------------------------------


def _last_position(model: VLLM, vector: torch.Tensor, saved: list[Any]) -> Any:
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[2].output[0][-1] += vector
            saved.append(model.model.layers[3].residual[0])
    return tracer.report


def _mean_of_positions(model: VLLM, vector: torch.Tensor, saved: list[Any]) -> Any:
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:]:
            hidden = model.model.layers[0].residual
            model.model.layers[1].residual = hidden - hidden.mean(0) + vector / len(hidden)
            saved.append((hidden, {"sum": model.model.layers[3].residual.sum(-1, keepdim=True)}))
    return tracer.report


def _all_layers(model: VLLM, vector: torch.Tensor, saved: list[Any]) -> Any:
    vectors = [vector * number for number in range(4)]
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[1:]:
            for layer, direction in zip(model.model.layers, vectors, strict=True):
                layer.residual += direction
            saved.append(model.logits.output.clone())
    return tracer.report


def _in_a_branch(model: VLLM, vector: torch.Tensor, saved: list[Any], strong: bool = True) -> Any:
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[2:9]:
            along = (model.model.layers[0].residual @ vector).unsqueeze(-1)
            hidden = model.model.layers[2].residual
            if strong:
                saved.append(along)
                model.model.layers[2].residual = torch.where(along > 0, hidden + torch.tanh(along) * vector, hidden)
    return tracer.report


def _an_input(model: VLLM, vector: torch.Tensor, saved: list[Any]) -> Any:
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[1].mlp.down_proj.input[:, ::2] = 0
            saved.append(model.model.layers[1].residual)
    return tracer.report


def _logits_and_samples(model: VLLM, vector: torch.Tensor, saved: list[Any]) -> Any:
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:]:
            model.logits.output[:, 40:] = -1e4
            saved.append(model.logits.output)
            saved.append(model.samples.output.clone())
    return tracer.report


class _Dampening:
    def __init__(self, gain: float) -> None:
        self.gain = gain

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        return _bounded(hidden, -self.gain, self.gain)


def _bounded(hidden: torch.Tensor, low: float, high: float = 1.0) -> torch.Tensor:
    return hidden.clamp(low, high)


def _own_functions(model: VLLM, vector: torch.Tensor, saved: list[Any]) -> Any:
    torch.manual_seed(0)
    dictionary, dampening = torch.nn.Sequential(torch.nn.Linear(len(vector), 40), torch.nn.ReLU()), _Dampening(0.5)
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:]:
            hidden = model.model.layers[1].residual
            saved.append(dictionary(hidden).detach())
            model.model.layers[2].residual = dampening.apply(hidden) + vector
    return tracer.report


def _read_only(model: VLLM, vector: torch.Tensor, saved: list[Any]) -> Any:
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:]:
            saved.append(model.model.layers[1].output)
            saved.append(model.model.layers[2].residual * vector)
    return tracer.report


FORMS = [_last_position, _mean_of_positions, _all_layers, _in_a_branch, _an_input, _logits_and_samples, _own_functions]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__[1:])
def test_programs_do_what_python_does(model: VLLM, vector: torch.Tensor, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    """To the rounding of products of several rows; values have the same types."""
    found: list[list[Any]] = [[], []]
    monkeypatch.setattr(stepping, "STOPS", 1 << 40)
    assert form(model, vector, found[0]).programs == [0]
    monkeypatch.setattr(stepping, "STOPS", 0)
    report = form(model, vector, found[1])
    assert report.programs[0] >= 4, report
    for mine, theirs in zip(*map(pytree.tree_leaves, found), strict=True):
        assert type(mine) is type(theirs)
        close(*(tensor.as_subclass(torch.Tensor) for tensor in (mine, theirs)))


@pytest.fixture(scope="module")
def captured(folder: Path) -> VLLM:
    return VLLM(folder, **OPTIONS, captures=["model.layers.*"])


def test_captured_values_are_read_by_programs(captured: VLLM, vector: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    test_programs_do_what_python_does(captured, vector, monkeypatch, _read_only)
    with pytest.raises(ValueError, match="this engine captures it"), captured.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:]:
            captured.model.layers[1].residual += vector


# -- beside others -------------------------------------------------------------------------------------------------------


def test_a_mixed_batch(model: VLLM, reference: LanguageModel, vector: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    """Two loops of one text, one that prints, a request without a block, and one whose loop goes on behind its end."""
    expected = plain(model, [PROMPTS[1]], max_tokens=COUNT)[0]
    results: dict[int, Any] = {}
    with model.trace(**LONG) as tracer:
        for number, prompt in enumerate(PROMPTS[:2]):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:COUNT]:
                    model.model.layers[2].residual += vector
                results[number] = tracer.result
        with tracer.invoke(PROMPTS[2], max_tokens=7):
            for _ in tracer.iter[:7]:
                model.model.layers[1].residual += vector
                print("a step")
            results[2] = tracer.result
        with tracer.invoke(PROMPTS[1]):
            results[3] = tracer.result
        with tracer.invoke(PROMPTS[0], max_tokens=6):
            short = [].save()
            for _ in tracer.iter[:]:
                short.append(model.model.layers[2].residual)
    edits = [{2: adding(vector)}, {2: adding(vector)}, {1: adding(vector)}]
    for number, edit in enumerate(edits):
        result = results[number]
        assert tokens(result) == generated(reference, result.prompt_token_ids, edit, len(tokens(result)))
    assert tokens(results[3]) == expected
    assert capsys.readouterr().out == "a step\n" * 7
    ids = results[0].prompt_token_ids
    close(torch.cat(short), states(reference, [*ids, *generated(reference, ids, count=5)])[2])
    assert [bool(made) for made in tracer.report.programs] == [True, True, False, False, True]
    line = test_a_mixed_batch.__code__.co_firstlineno + 13
    assert tracer.report.reasons[2] == f"`print('a step')` in line {line} may have effects that are not followed"


def test_a_variable_that_changes_meanwhile(
    model: VLLM, reference: LanguageModel, vector: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block goes on as Python in the step behind the change, and then as a program with the new value."""
    own, advance, steps = vector.clone(), model._engine.advance, []

    def advanced() -> None:
        steps.append(None)
        if len(steps) == 6:  # behind 5 tokens
            own.mul_(-1)
        advance()

    monkeypatch.setattr(model._engine, "advance", advanced)
    with model.trace(PROMPTS[0], **LONG) as tracer:
        for _ in tracer.iter[:COUNT]:
            model.model.layers[2].residual += own
        result = tracer.result.save()
    assert tracer.report.programs == [COUNT - 4]
    prompt = len(result.prompt_token_ids)

    def turned(hidden: torch.Tensor) -> torch.Tensor:
        signs = torch.ones(hidden.shape[1], 1)
        signs[prompt + 4 :] = -1
        return hidden + signs * vector

    assert tokens(result) == generated(reference, result.prompt_token_ids, {2: turned}, COUNT)


def test_a_preempted_request(folder: Path, reference: LanguageModel, vector: torch.Tensor) -> None:
    """As a block is; the other one goes on."""
    model = VLLM(folder, **OPTIONS | {"kv_cache_memory_bytes": 3 * 128 * 2048}, block_size=128, enable_prefix_caching=False)
    prompts = [[7 + number for number in range(120)], [9 + number for number in range(122)]]
    results, kept = [], []
    with pytest.raises(RuntimeError, match="ran out of key-value cache"), model.trace(**{**LONG, "max_tokens": 16}) as tracer:
        for index, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                hidden = []
                for _ in tracer.iter[:16]:
                    model.model.layers[2].residual += vector
                    hidden.append(model.model.layers[3].residual)
                kept.append(hidden)
                results.append((index, tracer.result))
    ((index, result),), (hidden,) = results, kept
    assert tokens(result) == generated(reference, prompts[index], {2: adding(vector)}, 16)
    assert len(hidden) == 16 and tracer.report.programs[index] == 13 and tracer.report.programs[1 - index]


# -- what stays Python ---------------------------------------------------------------------------------------------------


def _counting(value: Any, counted: dict[str, int]) -> Any:
    counted["steps"] += 1
    return value * 2


def _python(model: VLLM, kind: str, vector: torch.Tensor) -> Any:
    """Run a block that has to stay Python; return the report."""
    own, counted, shared = vector.clone(), {"steps": 0}, []
    layer = model.model.layers[2]
    with model.trace(**LONG) as tracer:
        if kind == "a function":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    layer.residual = _counting(layer.residual, counted)
        if kind == "a value":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    if layer.residual.sum() > 0:
                        layer.residual *= 2
        if kind == "the step":
            with tracer.invoke(PROMPTS[0]):
                for step in tracer.iter[:]:
                    layer.residual += vector * step
        if kind == "a count":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    layer.residual += vector
                    counted["steps"] += 1
        if kind == "a tensor":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    layer.residual += own
                    own *= 0.5
        if kind == "a view":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    part = own[:4]
                    part += 1
                    layer.residual += own
        if kind == "a save":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    hidden = layer.residual.save()
        if kind == "used behind":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:COUNT]:
                    hidden = layer.residual
                shared.append(hidden)
        if kind == "carried":
            with tracer.invoke(PROMPTS[0]):
                last = vector
                for _ in tracer.iter[:]:
                    layer.residual += last
                    last = layer.residual[-1]
        if kind == "a shared list":
            for prompt in PROMPTS[:2]:
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:]:
                        shared.append(layer.residual)  # noqa: PERF401 - a list of two requests
        if kind == "a random number":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    layer.residual += torch.rand(128)
        if kind == "some steps":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[::2]:
                    layer.residual += vector
        if kind == "no loop":
            with tracer.invoke(PROMPTS[0]):
                for number in range(COUNT):
                    shared.append(layer.next(int(number > 0)).residual)  # noqa: PERF401 - Python
        if kind == "memory":
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    hidden = layer.residual
                    shared.append((hidden, hidden[0]))
    return tracer.report, (own, counted, [pytree.tree_map(torch.clone, each) for each in shared])


REASONS = {
    "a function": "an item of an object from outside is assigned in line",
    "a value": "A condition on a tensor needs values",
    "the step": "the loop uses `step`",
    "a count": "an item of an object from outside is assigned in line",
    "a tensor": "a variable of the loop carries a value from one step to the next",
    "a view": "`add_` edits a tensor from outside in place",
    "a save": "the loop saves a value in each step",
    "used behind": "`hidden` is used outside of the loop, too",
    "carried": "a variable of the loop carries a value from one step to the next",
    "a shared list": "other requests of the trace use `shared`, too",
    "a random number": "`rand` draws its numbers while the block is recorded",
    "some steps": "the loop skips steps",
    "no loop": "",
    "memory": "it appends values that share memory",
}


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("model", ["everywhere"], indirect=True)
def test_blocks_that_stay_python(model: VLLM, vector: torch.Tensor, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says why, and the block has the effects that it has."""
    report, effects = _python(model, kind, vector)
    assert report.programs[0] == 0
    assert REASONS[kind] in report.reasons[0]
    assert not REASONS[kind] or f"; as Python, because {report.reasons[0]}" in str(report)
    monkeypatch.setattr(stepping, "STOPS", 1 << 40)
    same(_python(model, kind, vector)[1], effects)
