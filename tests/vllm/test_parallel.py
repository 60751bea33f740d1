"""Traces on an engine with two devices, against the transformers model and against an engine with one.

Such an engine has the process for itself, so it is made when those of other tests are gone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel
from nnsight.vllm import VLLM

from .llama import GREEDY, HIDDEN, OPTIONS, PROMPTS, adding, close, generated, plain, states, tokens
from .test_graph_functions import autoencoder, features
from .test_graph_programs import hooked, recorded

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

COMPILED = {
    "taps": [
        *("model.layers.*", "model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"),
        "model.layers.1.mlp.down_proj.input",
    ],
    "captures": ["model.layers.1.self_attn.o_proj.input", "model.layers.1.self_attn.o_proj", "model.layers.3.self_attn.qkv_proj"],
    "edits": {"modules": ["model.layers.2"], "slots": 3, "rank": 2, "functions": {"autoencoder": autoencoder}},
}


#: Steps have room for a part of a long prompt only.
CHUNKED = {
    "captures": ["model.layers.*", "model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn.o_proj.input"],
    "edits": ["model.layers.0"],
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
}


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, torch.Tensor]:
    """What an engine with one device has at many places."""
    return everything(VLLM(folder, **OPTIONS))


@pytest.fixture(scope="module", params=[{}, COMPILED], ids=["everywhere", "compiled"])
def model(
    folder: Path, alone: dict[str, torch.Tensor], reference: LanguageModel, request: pytest.FixtureRequest
) -> Iterator[VLLM]:
    """An engine with two devices, which stops everywhere; and compiled ones, with taps and tables, and with captures of split prompts."""
    gc.collect()
    programs = {name: recorded(reference, name) for name in ("gated", "features")} if request.param is COMPILED else None
    yield VLLM(folder, **OPTIONS, **request.param, programs=programs, tensor_parallel_size=2)
    gc.collect()


everywhere = pytest.mark.parametrize("model", [{}], ids=["everywhere"], indirect=True)
compiled = pytest.mark.parametrize("model", [COMPILED], ids=["compiled"], indirect=True)


chunked = pytest.mark.parametrize("model", [CHUNKED], ids=["chunked"], indirect=True)


def everything(model: VLLM) -> dict[str, torch.Tensor]:
    """Return values from all over the model."""
    layer = model.model.layers[1]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        qkv = layer.self_attn.qkv_proj.output[0].save()
        attention_input = list(layer.self_attn.attn.inputs[0][:3]).save()
        attended = layer.self_attn.o_proj.input.save()
        projected = layer.self_attn.o_proj.output[0].save()
        gate_up = layer.mlp.gate_up_proj.output[0].save()
        activated = layer.mlp.act_fn.output.save()
        down = layer.mlp.down_proj.input.save()
        hidden = layer.residual.save()
        logits = model.logits.output.save()
        result = tracer.result.save()
    query, key, value = attention_input
    return {
        "qkv": qkv, "query": query, "key": key, "value": value, "attended": attended, "projected": projected,
        "gate_up": gate_up, "activated": activated, "down": down, "hidden": hidden, "logits": logits,
        "tokens": torch.tensor([tokens(result)]),
    }  # fmt: skip


# -- reads ------------------------------------------------------------------------------------------------------------


@everywhere
def test_values_are_those_of_one_device_and_of_transformers(
    model: VLLM, alone: dict[str, torch.Tensor], reference: LanguageModel
) -> None:
    found = everything(model)
    assert found.keys() == alone.keys()
    for name, value in found.items():
        close(value, alone[name])
    with torch.no_grad(), reference.trace([model.tokenizer(PROMPTS[0])["input_ids"]]):
        layer = reference.model.layers[1]
        query = layer.self_attn.q_proj.output[0].save()
        key = layer.self_attn.k_proj.output[0].save()
        value = layer.self_attn.v_proj.output[0].save()
        attended = layer.self_attn.o_proj.input[0].save()
        gate, up = layer.mlp.gate_proj.output[0].save(), layer.mlp.up_proj.output[0].save()
        down = layer.mlp.down_proj.input[0].save()
        hidden = layer.output[0].save()
        logits = reference.lm_head.output[0, -1:].save()
    expected = {
        "qkv": torch.cat([query, key, value], -1), "value": value, "attended": attended, "gate_up": torch.cat([gate, up], -1),
        "activated": down, "down": down, "hidden": hidden, "logits": logits,
    }  # fmt: skip
    for name, hidden in expected.items():
        close(found[name], hidden)


@compiled
def test_taps_have_whole_values(model: VLLM, alone: dict[str, torch.Tensor]) -> None:
    layer = model.model.layers[1]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        qkv = layer.self_attn.qkv_proj.output[0].save()
        gate_up = layer.mlp.gate_up_proj.output[0].save()
        down = layer.mlp.down_proj.input.save()
        hidden = layer.residual.save()
        logits = model.logits.output.save()
        result = tracer.result.save()
    for name, value in {"qkv": qkv, "gate_up": gate_up, "down": down, "hidden": hidden, "logits": logits}.items():
        close(value, alone[name])
    assert tokens(result) == alone["tokens"][0].tolist()


# -- edits ------------------------------------------------------------------------------------------------------------


def normed(value: torch.Tensor) -> torch.Tensor:
    """Return rows of the same length: what no part of a row can say for itself."""
    return value * 3 / value.norm(dim=-1, keepdim=True)


@everywhere
@pytest.mark.parametrize("form", ["in place", "replaced", "both"])
@pytest.mark.parametrize(
    ("path", "side"),
    [("self_attn.o_proj", "input"), ("mlp.down_proj", "input"), ("self_attn.o_proj", "output"), ("mlp", "output")],
)
def test_edits_of_whole_values_equal_transformers(model: VLLM, reference: LanguageModel, path: str, side: str, form: str) -> None:
    module = model.model.layers[1].get(path)
    pair = path == "self_attn.o_proj" and side == "output"
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:6]:
            value = module.input if side == "input" else module.output
            value = value[0] if pair else value
            new = normed(value)
            if form != "replaced":
                value[:] = new
            if form == "both":
                new = value * 1.0
            if form != "in place":
                if side == "input":
                    module.input = new
                else:
                    module.output = (new, module.output[1]) if pair else new
        result = tracer.result.save()
    edits = {f"model.layers.1.{path}" + (".input" if side == "input" else ""): normed}
    expected = generated(reference, result.prompt_token_ids, edits)
    assert tokens(result) == expected != plain(model, [PROMPTS[0]])[0]


@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "up"])
def test_parts_of_merged_layers_equal_transformers(model: VLLM, reference: LanguageModel, name: str) -> None:
    layer, start, size = {
        "q": ("self_attn.qkv_proj", 0, 128),
        "k": ("self_attn.qkv_proj", 128, 64),
        "v": ("self_attn.qkv_proj", 192, 64),
        "gate": ("mlp.gate_up_proj", 0, 256),
        "up": ("mlp.gate_up_proj", 256, 256),
    }[name]
    factors = torch.linspace(-3, 3, size)
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:6]:
            model.model.layers[1].get(layer).output[0][:, start : start + size] *= factors
        result = tracer.result.save()
    path = f"model.layers.1.{layer.partition('.')[0]}.{name}_proj"
    expected = generated(reference, result.prompt_token_ids, {path: lambda value: value * factors})
    assert tokens(result) == expected != plain(model, [PROMPTS[0]])[0]


def test_tokens_are_the_same_on_all_devices(model: VLLM, reference: LanguageModel) -> None:
    """Tokens that are written, and tokens that are drawn while the block draws random numbers in the process of one device."""
    torch.manual_seed(5)
    with model.trace(PROMPTS[0], temperature=2.0, max_tokens=20, ignore_eos=True) as tracer:
        hidden = [].save()
        for step in tracer.iter[:20]:
            torch.rand(3)
            hidden.append(model.model.layers[3].residual)
            if step == 1:
                model.logits.output[:, 77] = 1e9
            if step == 2:
                model.samples.output = torch.tensor([[78]])
        result = tracer.result.save()
    assert tokens(result)[1:3] == [77, 78] and len(set(tokens(result))) > 10
    close(torch.cat(hidden), states(reference, [*result.prompt_token_ids, *tokens(result)[:-1]])[3])


# -- several requests -------------------------------------------------------------------------------------------------


def test_a_mixed_batch_with_an_error(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Steered, reading, failing and plain requests of different lengths, in the same steps."""
    expected = plain(model, PROMPTS, max_tokens=5)
    lines = []
    with pytest.raises(ZeroDivisionError), model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for _ in tracer.iter[:6]:
                model.model.layers[2].residual += vector
            steered = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            model.model.layers[1].output  # noqa: B018
            lines.append("once")
            1 / 0  # noqa: B018
        with tracer.invoke(PROMPTS[1], max_tokens=5):
            unread = tracer.result.save()
        with tracer.invoke(PROMPTS[2], max_tokens=5):
            for _ in tracer.iter[:5]:
                model.model.layers[3].residual  # noqa: B018
            read = tracer.result.save()
    ids = steered.prompt_token_ids
    assert tokens(steered) == generated(reference, ids, {2: adding(vector)})
    assert [tokens(unread), tokens(read)] == expected[1:]
    assert lines == ["once"]


def test_edits_as_parameters(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """More edits than the tables have room for, one batch after the other, beside requests without."""
    plane = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))
    projector = torch.eye(HIDDEN) - plane.T @ torch.linalg.inv(plane @ plane.T) @ plane
    unsteered = plain(model, [PROMPTS[0]])[0]
    for sign in (1.0, -1.0):
        results: list[Any] = []
        with model.trace(**GREEDY) as tracer:
            for coefficient in (0.0, sign, 2 * sign, sign):
                with tracer.invoke(PROMPTS[0]):
                    if coefficient:
                        model.model.layers[2].steer(add=coefficient * vector, scale=0.5, remove=plane)
                    results.append(tracer.result)
        ids = results[0].prompt_token_ids
        once, twice = (
            generated(reference, ids, {2: lambda hidden, c=c: hidden @ projector * 0.5 + c * vector})
            for c in (sign, 2 * sign)
        )
        assert [tokens(result) for result in results] == [unsteered, once, twice, once]
        assert len({tuple(unsteered), tuple(once), tuple(twice)}) == 3
    place = "between modules" if model._layout is None else "in the compiled model, as parameters"
    assert tracer.report.tiers == ["beside", place, place, place]


def check_programs(model: VLLM, reference: LanguageModel, asked_by: Callable[[str], Any]) -> None:
    """Compare requests with programs with hooks; ``asked_by`` returns what ``steer`` gets for the name of a program."""
    results = []
    asked: list[tuple[str, dict[str, Any]]] = [("gated", {}), ("features", {"gain": 3.0}), ("gated", {"alpha": 1.5})]
    with model.trace(**GREEDY) as tracer:
        for name, given in asked:
            with tracer.invoke(PROMPTS[0]):
                model.steer(asked_by(name), **given)
                results.append(tracer.result)
    for (name, given), result in zip(asked, results, strict=True):
        assert tokens(result) == generated(reference, result.prompt_token_ids, hooked(name, **given))


@compiled
def test_programs_in_the_graph(model: VLLM, reference: LanguageModel) -> None:
    check_programs(model, reference, str)


@everywhere
def test_programs_of_requests(model: VLLM, reference: LanguageModel) -> None:
    check_programs(model, reference, lambda name: recorded(reference, name))


@compiled
def test_functions_in_the_graph(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Both devices have the function, its tensors, and the parameters of each request."""
    results: list[Any] = []
    for gain in (0.0, 20.0):
        with model.trace(PROMPTS[0], **GREEDY) as tracer:
            model.model.layers[2].steer(add=vector, use="autoencoder", features=features(2, 7), gain=gain)
            results.append(tracer.result)
    ids, chosen = results[0].prompt_token_ids, features(2, 7)
    expected = [
        generated(reference, ids, {2: lambda hidden, g=g: autoencoder(hidden + vector, features=chosen, gain=g)})
        for g in (0.0, 20.0)
    ]
    assert [tokens(result) for result in results] == expected and expected[0] != expected[1]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_trace_leaves_the_engine_usable(model: VLLM) -> None:
    before = plain(model, PROMPTS)
    with pytest.raises(KeyboardInterrupt), model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.model.layers[1].output  # noqa: B018
            raise KeyboardInterrupt
        with tracer.invoke(PROMPTS[1]):
            model.model.layers[2].output  # noqa: B018
    with pytest.raises(KeyboardInterrupt), model.trace(PROMPTS[0], **GREEDY):
        model.samples.output  # noqa: B018
        raise KeyboardInterrupt
    assert not model.engine.llm_engine.has_unfinished_requests()
    assert plain(model, PROMPTS) == before
    with model.trace(PROMPTS[0], **GREEDY):
        hidden = model.model.layers[1].residual.save()
    assert hidden.shape[1] == HIDDEN


@everywhere
def test_parts_are_not_taken_for_the_whole(model: VLLM) -> None:
    results = []
    with pytest.raises(ValueError, match=r"split_0.output` is not the same on all 2 devices") as caught:
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                model.model.layers[1].self_attn.source.qkv_split_0.output  # noqa: B018
            with tracer.invoke(PROMPTS[1]):
                results.append(tracer.result)
    assert "qkv_split_0" in str(caught.traceback[-1].statement)
    assert tokens(results[0]) == plain(model, [PROMPTS[1]])[0]


def test_blocks_call_modules_on_all_devices(model: VLLM, reference: LanguageModel) -> None:
    """A head whose rows are spread, an MLP, and layers that take or make a part of the channels."""
    layer = model.model.layers[1]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        hidden = layer.residual
        lens = model.lm_head(model.model.norm(hidden)).save()
        mlp = layer.mlp(hidden).save()
        gate_up = layer.mlp.gate_up_proj(hidden)[0].save()
        down = layer.mlp.down_proj(gate_up[:, gate_up.shape[1] // 2 :])[0].save()
        later = []
        later.append(model.lm_head(hidden[-1:] + 0 * model.logits.sum()))  # where only the first device stops
        later.save()
        result = tracer.result.save()
    inner = reference.model.layers[1].mlp
    with reference.trace(torch.tensor([result.prompt_token_ids])):
        hidden = reference.model.layers[1].output[0]
        expected = reference.lm_head(reference.model.norm(hidden)).save()
        expected_later = reference.lm_head(hidden[-1:]).save()
        expected_mlp, up = inner(hidden).save(), inner.up_proj(hidden)
        expected_gate_up = torch.cat([inner.gate_proj(hidden), up], -1).save()
        expected_down = inner.down_proj(up).save()
    close(lens, expected)
    close(mlp, expected_mlp)
    close(gate_up, expected_gate_up)
    close(down, expected_down)
    close(later[0], expected_later)
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]


@everywhere
def test_errors_of_calls_leave_the_engine_usable(model: VLLM) -> None:
    with pytest.raises(NotImplementedError, match="weights are spread over 2 devices here"), model.trace(PROMPTS[0], **GREEDY):
        model.lm_head(torch.zeros(1, HIDDEN))
    with pytest.raises(RuntimeError, match="invalid for input of size"), model.trace(PROMPTS[0], **GREEDY):
        model.lm_head(model.model.layers[1].residual[:, :-1])
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]


def test_no_other_engine_beside_it(model: VLLM, folder: Path) -> None:
    for size in (1, 2):
        with pytest.raises(ValueError, match="has the process for itself"):
            VLLM(folder, **OPTIONS, tensor_parallel_size=size, dispatch=True)
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]


@compiled
def test_captures_show_whole_values(
    model: VLLM, alone: dict[str, torch.Tensor], reference: LanguageModel, vector: torch.Tensor
) -> None:
    attention = model.model.layers[1].self_attn
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            found = {"attended": attention.o_proj.input, "projected": attention.o_proj.output[0]}.save()
            result = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            model.model.layers[2].steer(add=vector)
            qkv = torch.cat([model.model.layers[3].self_attn.qkv_proj.output[0] for _ in tracer.iter[:6]]).save()
            other = tracer.result.save()
    for name, value in found.items():
        close(value, alone[name])
    assert tokens(result) == alone["tokens"][0].tolist()
    with torch.no_grad(), reference.trace([[*other.prompt_token_ids, *tokens(other)[:-1]]]):
        reference.model.layers[2].output[:] += vector
        expected = [getattr(reference.model.layers[3].self_attn, name).output[0] for name in ("q_proj", "k_proj", "v_proj")].save()
    close(qkv, torch.cat(expected, dim=-1))
    assert "captured" in str(tracer.report)


@chunked
def test_captures_of_split_prompts_equal_transformers(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Whole values of whole prompts, beside a steered request and one that ends its steps as others begin."""
    prompts = [list(range(10, 88)), [7, 8, 9], list(range(20, 90)), list(range(10, 88))]
    sizes = _sizes_of_steps(model)
    attention = model.model.layers[1].self_attn
    with model.trace(**GREEDY) as tracer:
        found, results = {}.save(), {}.save()
        for number, prompt in enumerate(prompts):
            with tracer.invoke(prompt, max_tokens=3 + number):
                if number == 2:
                    model.model.layers[0].steer(add=vector)
                found[number] = [
                    (attention.qkv_proj.output[0], attention.o_proj.input, model.model.layers[3].residual)
                    for _ in tracer.iter[: 3 + number]
                ]
                results[number] = tracer.result
    assert max(sizes) == 32 < len(prompts[0])  # it was split
    for number, result in results.items():
        assert [len(rows) for rows, *_ in found[number]] == [len(prompts[number]), *[1] * (2 + number)]
        with torch.no_grad(), reference.trace([[*prompts[number], *tokens(result)[:-1]]]):
            if number == 2:
                reference.model.layers[0].output[:] += vector
            layer = reference.model.layers[1].self_attn
            parts = [getattr(layer, name).output[0] for name in ("q_proj", "k_proj", "v_proj")].save()
            attended = layer.o_proj.input[0].save()
            hidden = reference.model.layers[3].output[0].save()
        for mine, expected in zip(zip(*found[number], strict=True), (torch.cat(parts, dim=-1), attended, hidden), strict=True):
            close(torch.cat(mine), expected)
    assert not model._engine._runner.bookkeeping.runs


def _sizes_of_steps(model: VLLM) -> list[int]:
    """Return a list of how many tokens each step of the engine has from here on."""
    scheduler = model.engine.llm_engine.engine_core.engine_core.scheduler
    schedule, sizes = scheduler.schedule, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        sizes.append(scheduled.total_num_scheduled_tokens)
        return scheduled

    scheduler.schedule = noted
    return sizes
