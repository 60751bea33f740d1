"""Traces on a real vLLM engine, against the same traces on the transformers model, and against the engine without blocks."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nnsight import LanguageModel, fx
from nnsight.runtime.errors import OutOfOrderError, ReplacementShapeError
from nnsight.tracing import ExecutionBackend
from nnsight.vllm import VLLM

from .llama import GREEDY, HIDDEN, OPTIONS, PROMPTS, close, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]



TAPS = [
    *("model.layers.*", "model.layers.*.mlp", "model.layers.*.self_attn.qkv_proj"),
    *("model.layers.*.self_attn.o_proj.input", "model.layers.*.mlp.down_proj.input", "model.layers.2.input_layernorm.inputs"),
]


@pytest.fixture(scope="module", params=[None, TAPS], ids=["everywhere", "tapped"])
def model(folder: Path, request: pytest.FixtureRequest) -> VLLM:
    """An engine that stops between all modules; and a compiled one, that stops where it is tapped."""
    return VLLM(folder, **OPTIONS, taps=request.param)


everywhere = pytest.mark.parametrize("model", [None], ids=["everywhere"], indirect=True)
tapped = pytest.mark.parametrize("model", [TAPS], ids=["tapped"], indirect=True)


def plain(model: VLLM, prompts: list[Any], **sampling: Any) -> list[list[int]]:
    """Return what the engine generates by itself."""
    from vllm import SamplingParams

    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling})
    outputs = model.engine.generate(prompts, given, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def hidden_states(
    reference: LanguageModel, ids: list[int], layer: int = 1, vector: Any = None, steer: int = 2
) -> list[Any]:
    """Return hidden states after ``layer``, those after layer ``steer`` with ``vector`` added, and the logits; by plain hooks."""
    seen: dict[str, torch.Tensor] = {}
    layers = reference._module.model.layers

    def keep(module: Any, args: Any, output: Any) -> None:
        seen["layer"] = output[0]

    def add(module: Any, args: Any, output: Any) -> Any:
        output = output if vector is None else output + vector
        seen["steered"] = output[0]
        return output

    handles = [layers[layer].register_forward_hook(keep), layers[steer].register_forward_hook(add)]
    with torch.no_grad():
        logits = reference._module(torch.tensor([ids]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return [seen["layer"], seen["steered"], logits]


# -- the modules ------------------------------------------------------------------------------------------------------


def test_modules_are_there_before_the_engine(folder: Path) -> None:
    lazy = VLLM(folder, **OPTIONS)
    assert not lazy.dispatched
    layer = lazy.model.layers[1]
    assert layer.mlp.down_proj.weight.is_meta
    shown = repr(lazy)
    assert "LlamaDecoderLayer" in shown and ".residual: hidden state after the layer" in shown
    assert lazy.tokenizer.decode(lazy.tokenizer(PROMPTS[0])["input_ids"]) == PROMPTS[0]
    lazy.dispatch()
    assert lazy.dispatched and lazy.model.layers[1] is layer
    assert layer.mlp.down_proj.weight.device.type == "cpu"
    with lazy.trace(PROMPTS[0], **GREEDY) as tracer:
        hidden = layer.residual.save()
        result = tracer.result.save()
    assert hidden.shape == (len(result.prompt_token_ids), HIDDEN)


# -- reads ------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_those_of_transformers(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        hidden = model.model.layers[1].residual.save()
        pair = model.model.layers[3].output.save()
        logits = model.logits.output.save()
        result = tracer.result.save()
    expected, _, expected_logits = hidden_states(reference, result.prompt_token_ids)
    close(hidden, expected)
    close(sum(pair), hidden_states(reference, result.prompt_token_ids, layer=3)[0])
    close(logits, expected_logits[-1:])
    assert not hidden.is_inference()


def test_each_step_is_an_occurrence(model: VLLM, reference: LanguageModel) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(PROMPTS[0], **GREEDY) as tracer:
            hidden, logits, samples = [].save(), [].save(), [].save()
            for _ in tracer.iter[:]:
                hidden.append(model.model.layers[1].residual)
                logits.append(model.logits.output)
                samples.append(model.samples.output.item())
    assert sum("The loop ended" in str(warning.message) for warning in caught) == 1
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        result = tracer.result.save()
    assert samples == tokens(result) == plain(model, [PROMPTS[0]])[0]
    ids = [*result.prompt_token_ids, *samples]
    expected, _, expected_logits = hidden_states(reference, ids[:-1])
    close(torch.cat(hidden), expected)
    close(torch.cat(logits), expected_logits[-6:])
    assert [len(rows) for rows in hidden] == [len(result.prompt_token_ids), 1, 1, 1, 1, 1]


def test_inside_of_layers_is_that_of_transformers(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        attended = model.model.layers[2].self_attn.o_proj.input.save()
        gated = model.model.layers[2].mlp.down_proj.input.save()
        result = tracer.result.save()
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        expected_attended = reference.model.layers[2].self_attn.o_proj.input[0].save()
        expected_gated = reference.model.layers[2].mlp.down_proj.input[0].save()
    close(attended, expected_attended)
    close(gated, expected_gated)


def test_values_that_were_saved_do_not_change_later(model: VLLM) -> None:
    with model.trace(PROMPTS[0], **GREEDY):
        hidden, residual = model.model.layers[1].output
        hidden.save()
        residual.save()
        before = [hidden.clone(), residual.clone()].save()
    assert torch.equal(hidden, before[0]) and torch.equal(residual, before[1])
    weight = torch.nn.Parameter(torch.ones(HIDDEN))
    (hidden * weight).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


@everywhere
def test_operations_inside_a_forward_can_be_read(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        hidden = model.model.layers[1].source.self_mlp_0.output.save()
        result = tracer.result.save()
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        expected = reference.model.layers[1].mlp.output[0].save()
    close(hidden, expected)


def test_a_cache_keeps_what_modules_return(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY, logprobs=1) as tracer:
        cache = tracer.cache([model.model.layers[1].mlp])
        result = tracer.result.save()
    outputs = cache["model.model.layers.1.mlp"].output
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        expected = reference.model.layers[1].mlp.output[0].save()
    close(outputs[0], expected)
    assert len(outputs) == 6


# -- edits ------------------------------------------------------------------------------------------------------------


def steered_by_hand(reference: LanguageModel, ids: list[int], vector: torch.Tensor, count: int) -> list[int]:
    """Return the tokens that follow ``ids`` greedily when ``vector`` is added to layer 2 at every token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(hidden_states(reference, ids, vector=vector)[2][-1].argmax()))
    return ids[-count:]


def test_steering_in_place_equals_transformers(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        states = [].save()
        for _ in tracer.iter[:6]:
            hidden = model.model.layers[2].residual
            hidden += vector
            states.append(model.model.layers[3].residual)
        result = tracer.result.save()
    ids = result.prompt_token_ids
    assert tokens(result) == steered_by_hand(reference, ids, vector, 6)
    assert tokens(result) != plain(model, [PROMPTS[0]])[0]
    expected = hidden_states(reference, [*ids, *tokens(result)[:-1]], layer=3, vector=vector)[0]
    close(torch.cat(states), expected)


def test_an_edit_in_some_steps_of_an_open_loop(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Steps in which the block reads nothing are steps, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loop has no end
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                steps, states = [].save(), [].save()
                for step in tracer.iter[:]:
                    steps.append(step)
                    if step in (2, 3):
                        model.model.layers[2].residual += vector
                        states.append(model.model.layers[3].residual)
            with tracer.invoke(PROMPTS[1]):
                other = tracer.result.save()
    with torch.no_grad(), reference.generate(PROMPTS[0], max_new_tokens=6, do_sample=False, eos_token_id=-1) as tracer:
        expected = [].save()
        for step in tracer.iter[:6]:
            if step in (2, 3):
                reference.model.layers[2].output[:] += vector
                expected.append(reference.model.layers[3].output[0])
    assert steps[:6] == [0, 1, 2, 3, 4, 5] and len(states) == len(expected) == 2
    for mine, theirs in zip(states, expected, strict=True):
        close(mine, theirs)
    assert tokens(other) == plain(model, [PROMPTS[1]])[0]


@pytest.mark.parametrize("form", ["augmented", "assigned", "pair", "pair in place"])
def test_all_forms_of_an_edit_do_the_same(
    model: VLLM, reference: LanguageModel, vector: torch.Tensor, form: str
) -> None:
    layer = model.model.layers[2]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for step in tracer.iter[:6]:
            if form == "augmented":
                layer.residual += vector
            elif form == "assigned":
                layer.residual = layer.residual + vector
            elif form == "pair":
                layer.output = (layer.output[0] + vector, layer.output[1])
            else:
                layer.output[0][:] += vector
            if step == 0:
                after = layer.residual.save()
        result = tracer.result.save()
    assert tokens(result) == steered_by_hand(reference, result.prompt_token_ids, vector, 6)
    close(after, hidden_states(reference, result.prompt_token_ids, vector=vector)[1])


@pytest.mark.parametrize("form", ["in place", "replaced"])
@pytest.mark.parametrize("path", ["self_attn.o_proj", "mlp.down_proj"])
def test_inputs_can_be_edited(model: VLLM, reference: LanguageModel, path: str, form: str) -> None:
    module, other = model.model.layers[1].get(path), reference._module.get_submodule(f"model.layers.1.{path}")
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:6]:
            if form == "in place":
                module.input[:, ::2] *= -3
            else:
                module.input = module.input * torch.tensor([-3.0, 1.0]).repeat(module.input.shape[1] // 2)
        result = tracer.result.save()
    ids = list(result.prompt_token_ids)

    def replace(module: Any, args: Any) -> Any:
        return (args[0] * torch.tensor([-3.0, 1.0]).repeat(args[0].shape[-1] // 2),)

    handle = other.register_forward_pre_hook(replace)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(reference._module(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    handle.remove()
    assert tokens(result) == ids[-6:] != plain(model, [PROMPTS[0]])[0]


def test_all_that_a_module_is_given_or_returns(model: VLLM, reference: LanguageModel) -> None:
    """Pairs with nothing in the second place, and several arguments."""
    layer = model.model.layers[2]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        given = layer.input_layernorm.inputs.save()
        returned = layer.self_attn.qkv_proj.output.save()
        result = tracer.result.save()
    ((hidden, residual), keywords), (qkv, bias) = given, returned
    close(hidden + residual, hidden_states(reference, result.prompt_token_ids)[0])
    assert keywords == {} and bias is None
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        expected = reference.model.layers[2].self_attn.q_proj.output[0].save()
    close(qkv[:, :HIDDEN], expected)


def test_an_edit_of_the_residual_wins_over_an_earlier_one_at_the_same_place(model: VLLM, vector: torch.Tensor) -> None:
    layer = model.model.layers[2]
    with model.trace(PROMPTS[0], **GREEDY):
        hidden = layer.residual
        hidden += vector
        layer.residual = hidden * 2
        after = layer.residual.save()
    with model.trace(PROMPTS[0], **GREEDY):
        before = layer.residual.save()
    close(after, (before + vector) * 2)


def test_reading_the_residual_leaves_the_run_as_it_is(model: VLLM) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:6]:
            for layer in model.model.layers:
                layer.residual  # noqa: B018 - reading is the test
            logits = model.logits.output.save()
        result = tracer.result.save()
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:6]:
            expected = model.logits.output.save()
    assert torch.equal(logits, expected)
    assert tokens(result) == plain(model, [PROMPTS[0]])[0]


def test_a_zeroed_module_equals_transformers(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:  # the guide's example
        model.model.layers[-2].mlp.output = torch.zeros_like(model.model.layers[-2].mlp.output)
        logits = model.logits.output.save()
        result = tracer.result.save()
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        reference.model.layers[-2].mlp.output = torch.zeros_like(reference.model.layers[-2].mlp.output)
        expected = reference.lm_head.output[0, -1:].save()
    close(logits, expected)


def test_logits_and_samples_can_be_written(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:2]:
            model.logits.output[:, 77] = 1e9
        for _ in tracer.iter[2:4]:
            model.samples.output = torch.tensor([[78]])
        result = tracer.result.save()
    assert tokens(result)[:4] == [77, 77, 78, 78]
    ids = [*result.prompt_token_ids, 77, 77, 78, 78]
    assert tokens(result)[4] == int(hidden_states(reference, ids)[2][-1].argmax())


def test_edits_that_stay_run_in_every_request(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    with model.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            model.model.layers[2].residual += vector
    with pytest.warns(UserWarning, match="The loop ended"):
        result = edited(PROMPTS[0], **GREEDY)
    assert tokens(result) == steered_by_hand(reference, result.prompt_token_ids, vector, 6)
    with pytest.warns(UserWarning, match="The loop ended"), edited.trace(PROMPTS[0], **GREEDY):
        seen = edited.model.layers[2].residual.save()
    close(seen, hidden_states(reference, result.prompt_token_ids, vector=vector)[1])
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]


# -- several requests -------------------------------------------------------------------------------------------------


def test_a_mixed_batch(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Steered and unsteered requests of different lengths, in the same steps."""
    expected = plain(model, PROMPTS, max_tokens=5)
    results = []
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for _ in tracer.iter[:6]:
                model.model.layers[2].residual += vector
            steered = tracer.result.save()
        with tracer.invoke(PROMPTS[1], max_tokens=5):
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[2], max_tokens=5):
            states = [].save()
            for _ in tracer.iter[:5]:
                states.append(model.model.layers[2].residual)
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[0], max_tokens=5):
            results.append(tracer.result)
    assert tokens(steered) == steered_by_hand(reference, steered.prompt_token_ids, vector, 6)
    assert [tokens(result) for result in results] == [expected[1], expected[2], expected[0]]
    close(torch.cat(states), hidden_states(reference, [*results[1].prompt_token_ids, *tokens(results[1])[:-1]])[1])
    place = "between modules" if model._layout is None else "at taps of the compiled model"
    assert tracer.report.tiers == [place, "beside", place, "beside"]
    assert f"request 0: block ran {place}, in 6 steps" in str(tracer.report)
    assert str(tracer.report) in str(fx.explain(tracer))
    assert tracer.report.steps == [6, 0, 5, 0]


def test_requests_have_their_own_sampling_parameters(model: VLLM) -> None:
    with model.trace(max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPTS[0], temperature=0.8, top_p=0.95, seed=1):
            samples = [].save()
            for _ in tracer.iter[:3]:
                samples.append(model.samples.output.item())
        with tracer.invoke(PROMPTS[0], max_tokens=5):
            greedy = tracer.result.save()
    assert len(samples) == 3
    assert samples == plain(model, [PROMPTS[0]], temperature=0.8, top_p=0.95, seed=1, max_tokens=3)[0]
    assert tokens(greedy) == plain(model, [PROMPTS[0]], max_tokens=5)[0]


def test_invokes_share_values(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(**GREEDY) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPTS[0]):
            hidden = model.model.layers[1].residual[-1]
            barrier()
        with tracer.invoke(PROMPTS[1]):
            barrier()
            model.model.layers[2].residual[-1] = hidden
            patched = model.model.layers[2].residual.save()
            logits = model.logits.output.save()
            result = tracer.result.save()
    ids = model.tokenizer(PROMPTS[0])["input_ids"]
    close(patched[-1:], hidden_states(reference, ids)[0][-1:])
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        reference.model.layers[2].output[0, -1] = patched[-1]
        expected = reference.lm_head.output[0, -1:].save()
    close(logits, expected)


# -- prefix caching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["plain steered plain", "steered plain steered", "steered steered plain"])
def test_cached_prefixes_do_not_cross_requests(
    model: VLLM, reference: LanguageModel, vector: torch.Tensor, order: str
) -> None:
    first = sum(map(ord, order)) % 100
    prompt = [7 + number % 400 for number in range(first, first + 160)]
    expected = {
        "plain": steered_by_hand(reference, prompt, torch.zeros(HIDDEN), 3),
        "steered": steered_by_hand(reference, prompt, vector, 3),
    }
    assert expected["plain"] != expected["steered"]
    for kind in order.split():
        if kind == "plain":
            assert plain(model, [{"prompt_token_ids": prompt}], max_tokens=3)[0] == expected[kind]
            continue
        with model.trace(prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            for step in tracer.iter[:3]:
                hidden = model.model.layers[2].residual
                if step == 0:
                    rows = len(hidden).save()
                hidden += vector
            result = tracer.result.save()
        assert tokens(result) == expected[kind]
        assert rows == len(prompt)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_ends_its_request_only(model: VLLM, vector: torch.Tensor) -> None:
    results = []
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                model.model.layers[1].output  # noqa: B018
                1 / 0  # noqa: B018
            with tracer.invoke(PROMPTS[1]):
                states = [].save()
                for _ in tracer.iter[:6]:
                    states.append(model.model.layers[2].residual)
                results.append(tracer.result)
            with tracer.invoke(PROMPTS[2]):
                results.append(tracer.result)
    last = caught.traceback[-1]
    assert str(last.path) == __file__ and "1 / 0" in str(last.statement)
    assert [tokens(result) for result in results] == plain(model, PROMPTS[1:])
    assert len(states) == 6
    assert not model.engine.llm_engine.has_unfinished_requests()


def test_a_replacement_of_another_shape_is_refused_at_its_line(model: VLLM) -> None:
    results = []
    with pytest.raises(ReplacementShapeError, match=r"`model.model.layers.1.mlp.output` has \(1, 3, 128\)") as caught:
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                model.model.layers[1].mlp.output = torch.zeros(1, 3, HIDDEN)
            with tracer.invoke(PROMPTS[1]):
                results.append(tracer.result)
    assert "torch.zeros(1, 3, HIDDEN)" in str(caught.traceback[-1].statement)
    assert tokens(results[0]) == plain(model, [PROMPTS[1]])[0]


def test_all_failures_are_told(model: VLLM) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                model.model.layers[1].output  # noqa: B018
                1 / 0  # noqa: B018
            with tracer.invoke(PROMPTS[1]):
                {}["missing"]
    assert "invoke 1: KeyError: 'missing'" in caught.value.__notes__[0]


@everywhere
def test_locations_out_of_order_and_never_reached(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match=r"model.model.layers.1.output.i0"):
        with model.trace(PROMPTS[0], **GREEDY):
            model.model.layers[2].output  # noqa: B018
            model.model.layers[1].output  # noqa: B018
    with pytest.raises(OutOfOrderError, match="occurred only 6 times"):
        with model.trace(PROMPTS[0], **GREEDY) as tracer:
            for _ in tracer.iter[6:7]:
                pass
            model.model.layers[1].next(9).output  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute `q_proj`"):
        with model.trace(PROMPTS[0], **GREEDY):
            model.model.layers[1].self_attn.q_proj.output  # noqa: B018
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]


def test_stop_ends_the_request(model: VLLM) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            hidden = model.model.layers[1].residual.save()
            tracer.stop()
        with tracer.invoke(PROMPTS[1]):
            result = tracer.result.save()
    assert hidden.shape[1] == HIDDEN
    assert tokens(result) == plain(model, [PROMPTS[1]])[0]


@everywhere
def test_what_is_shared_cannot_be_changed(model: VLLM) -> None:
    with pytest.raises(NotImplementedError, match="cannot be skipped"):
        with model.trace(PROMPTS[0], **GREEDY):
            model.model.layers[1].mlp.skip(torch.zeros(1))
    with pytest.raises(ValueError, match="cannot run its own engine"):
        with model.trace(PROMPTS[0], **GREEDY):
            model.model.layers[1].output  # noqa: B018
            model(PROMPTS[1], **GREEDY)
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]


@everywhere
@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ([], {}, ValueError, "did not execute"),
        ([""], {}, ValueError, "empty"),
        ([[]], {}, ValueError, "empty"),
        ([["a", "b"]], {}, ValueError, "2 prompts for one block"),
        (["a", "b"], {}, ValueError, "2 prompts for one block"),
        ([3.5], {}, TypeError, "text or token ids"),
        (["a"], {"temprature": 0}, ValueError, "temprature: no sampling parameters"),
        (["a"], {"temperature": -1}, ValueError, "vLLM refuses the request"),
        (["a"], {"n": 2}, ValueError, "n=2: the block waits at `model.logits.output`"),
        (["a"], {"compile": True}, NotImplementedError, "compile"),
        (["a"], {"scan": True}, NotImplementedError, "scan"),
        ([[1] * 300], {}, ValueError, "256"),
    ],
)
def test_mistakes(model: VLLM, args: list[Any], kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        with model.trace(*args, **kwargs):
            model.logits.output  # noqa: B018
    assert not model.engine.llm_engine.has_unfinished_requests()


def test_engines_of_one_process_end_one_by_one(folder: Path) -> None:
    first, second = VLLM(folder, **OPTIONS), VLLM(folder, **OPTIONS, dispatch=True)
    expected = tokens(first(PROMPTS[0], **GREEDY))
    second(PROMPTS[0], **GREEDY)
    core = weakref.ref(second.engine.llm_engine.engine_core.engine_core)
    del second
    gc.collect()
    assert core() is None
    assert tokens(first(PROMPTS[0], **GREEDY)) == expected


@everywhere
def test_invokes_have_a_prompt_each(model: VLLM) -> None:
    with pytest.raises(ValueError, match="without a prompt"):
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                model.logits.output  # noqa: B018
            with tracer.invoke():
                model.logits.output  # noqa: B018
    assert not model.engine.llm_engine.has_unfinished_requests()


def test_an_interrupted_trace_leaves_the_engine_usable(model: VLLM) -> None:
    with pytest.raises(KeyboardInterrupt):
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                model.model.layers[1].output  # noqa: B018
                raise KeyboardInterrupt
            with tracer.invoke(PROMPTS[1]):
                model.model.layers[2].output  # noqa: B018
    assert not model.engine.llm_engine.has_unfinished_requests()
    assert plain(model, PROMPTS) == [tokens(model(prompt, **GREEDY)) for prompt in PROMPTS]
    with model.trace(PROMPTS[0], **GREEDY):
        hidden = model.model.layers[1].residual.save()
    assert hidden.shape[1] == HIDDEN


def test_a_preempted_request(folder: Path, reference: LanguageModel, vector: torch.Tensor) -> None:
    """The cache has room for three blocks of 128 tokens; both requests come to need a second one."""
    model = VLLM(
        folder, **OPTIONS | {"kv_cache_memory_bytes": 3 * 128 * 2048}, block_size=128, enable_prefix_caching=False
    )
    prompts = [[7 + number for number in range(120)], [9 + number for number in range(122)]]
    sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    expected = [steered_by_hand(reference, prompt, vector, 16) for prompt in prompts]
    states: list[list[Any]] = [[], []]
    results = []
    with pytest.raises(RuntimeError, match="ran out of key-value cache"):
        with model.trace(**sampling) as tracer:
            for index, prompt in enumerate(prompts):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:16]:
                        model.model.layers[2].residual += vector
                        states[index].append(None)
                    results.append((index, tracer.result))
    ((index, result),) = results
    assert tokens(result) == expected[index]
    assert len(states[index]) == 16 and 0 < len(states[1 - index]) < 16

    results = []
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                model.model.layers[2].steer(add=vector)
                results.append(tracer.result)
    assert [tokens(result) for result in results] == expected  # computed anew, and steered again


def test_a_split_prompt_is_an_error(folder: Path) -> None:
    chunked = VLLM(
        folder,
        **OPTIONS,
        enable_chunked_prefill=True,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    prompt = list(range(10, 90))
    results = []
    with pytest.raises(ValueError, match="enable_chunked_prefill=False"):
        with chunked.trace(**GREEDY) as tracer:
            with tracer.invoke(prompt):
                chunked.model.layers[1].output  # noqa: B018
            with tracer.invoke(prompt):
                results.append(tracer.result)
    assert tokens(results[0]) == plain(chunked, [{"prompt_token_ids": prompt}])[0]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "async", "tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"enable_expert_parallel": True},
        {"speculative_config": {"method": "ngram"}},
        {"compile": True},
    ],
)
def test_what_is_not_there_says_so(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        VLLM(folder, **options)


# -- taps -------------------------------------------------------------------------------------------------------------


@tapped
def test_other_locations_than_taps_are_refused(model: VLLM) -> None:
    results = []
    refused = r"`model.model.layers.1.self_attn.output` is not tapped: .* with `taps=\[..., 'model.layers.1.self_attn'\]"
    with pytest.raises(OutOfOrderError, match=refused):
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                model.model.layers[1].self_attn.output  # noqa: B018
            with tracer.invoke(PROMPTS[1]):
                results.append(tracer.result)
    assert tokens(results[0]) == plain(model, [PROMPTS[1]])[0]
    for place, remedy in (("input", "'model.layers.1.input'"), ("self_attn.source.self_o_proj_0.output", "these cannot be tapped")):
        with pytest.raises(OutOfOrderError, match=remedy):
            with model.trace(PROMPTS[0], **GREEDY):
                if place == "input":
                    model.model.layers[1].input  # noqa: B018
                else:
                    model.model.layers[1].self_attn.source.self_o_proj_0.output  # noqa: B018


@tapped
def test_the_model_is_compiled(model: VLLM) -> None:
    from vllm.config import CompilationMode

    assert model.engine.llm_engine.vllm_config.compilation_config.mode != CompilationMode.NONE


@tapped
def test_taps_leave_the_tokens_as_they_are(model: VLLM, folder: Path) -> None:
    untouched = VLLM(folder, **OPTIONS)
    assert plain(model, PROMPTS, max_tokens=8) == plain(untouched, PROMPTS, max_tokens=8)


def test_engines_with_other_taps_do_not_take_each_others_graphs(folder: Path, reference: LanguageModel) -> None:
    """Both find the same cache of compiled graphs."""
    for layer in (0, 3):
        tapped = VLLM(folder, **OPTIONS, taps=[f"model.layers.{layer}"])
        with tapped.trace(PROMPTS[0], **GREEDY) as tracer:
            hidden = tapped.model.layers[layer].residual.save()
            result = tracer.result.save()
        close(hidden, hidden_states(reference, result.prompt_token_ids, layer=layer)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"taps": ["model.layers.9"]}, ValueError, "no module 'model.layers.9'"),
        ({"taps": ["layers.*"]}, ValueError, "no module"),
        ({"taps": "model.layers.1"}, TypeError, "list of paths"),
        ({"edits": ["model.layers.9"]}, ValueError, "no module 'model.layers.9'"),
        ({"edits": {"slots": 3}}, TypeError, "a dict with 'modules'"),
        ({"edits": {"modules": ["model.layers.1"], "slots": 0}}, ValueError, "a number from 1"),
        ({"enforce_eager": False}, ValueError, "needs taps"),
    ],
)
def test_wrong_taps(folder: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VLLM(folder, **OPTIONS, **options)


def test_an_engine_is_not_copied(folder: Path) -> None:
    lazy = VLLM(folder, **OPTIONS)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(lazy)


def test_a_mode_that_is_none(folder: Path) -> None:
    with pytest.raises(ValueError, match="'sync' or 'async'"):
        VLLM(folder, mode="fast")


# -- steering without a stop ------------------------------------------------------------------------------------------

EDITS = {"modules": ["model.layers.*"], "slots": 3, "rank": 2}


@pytest.fixture(scope="module", params=[None, EDITS], ids=["everywhere", "tables"])
def steerable(folder: Path, request: pytest.FixtureRequest) -> VLLM:
    """An engine that stops between all modules; and a compiled one, with tables of parameters in its graph."""
    return VLLM(folder, **OPTIONS, edits=request.param)


tables = pytest.mark.parametrize("steerable", [EDITS], ids=["tables"], indirect=True)


def generated_by_hand(reference: LanguageModel, ids: list[int], edit: Any, count: int, layer: int = 2) -> list[int]:
    """Return the tokens that follow greedily when ``edit`` is applied to the hidden states after a layer."""

    def replace(module: Any, args: Any, output: Any) -> Any:
        return edit(output)

    handle = reference._module.model.layers[layer].register_forward_hook(replace)
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(reference._module(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    handle.remove()
    return ids[-count:]


def without(hidden: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Return ``hidden`` without its part in the plane of ``directions``."""
    return hidden - hidden @ directions.T @ torch.linalg.inv(directions @ directions.T) @ directions


@pytest.mark.parametrize("kind", ["add", "scale", "remove", "all", "from a position"])
def test_steering_equals_transformers(
    steerable: VLLM, reference: LanguageModel, vector: torch.Tensor, kind: str
) -> None:
    plane = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))
    factor = torch.linspace(0.5, 1.5, HIDDEN)
    state = hidden_states(reference, steerable.tokenizer(PROMPTS[0])["input_ids"])[1][-1:]

    def late(hidden: torch.Tensor) -> torch.Tensor:
        edited = hidden.clone()
        edited[:, 5:] += vector
        return edited

    options, edit = {
        "add": ({"add": vector}, lambda hidden: hidden + vector),
        "scale": ({"scale": factor}, lambda hidden: hidden * factor),
        "remove": ({"remove": state[0]}, lambda hidden: without(hidden, state)),
        "all": (
            {"add": vector, "scale": factor, "remove": plane},
            lambda hidden: without(hidden, plane) * factor + vector,
        ),
        "from a position": ({"add": vector, "start": 5}, late),
    }[kind]
    with steerable.trace(PROMPTS[0], **GREEDY) as tracer:
        steerable.model.layers[2].steer(**options)
        result = tracer.result.save()
    assert tokens(result) == generated_by_hand(reference, result.prompt_token_ids, edit, 6)
    assert tokens(result) != plain(steerable, [PROMPTS[0]])[0]
    expected = "between modules, in 6 steps" if steerable._layout is None else "in the compiled model, as parameters"
    assert f"request 0: block ran {expected}" in str(tracer.report)


def test_logits_of_a_steered_request_equal_transformers(
    steerable: VLLM, reference: LanguageModel, vector: torch.Tensor
) -> None:
    with steerable.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[1]):
            unsteered = steerable.logits.output.save()
            first = tracer.result.save()
        with tracer.invoke(PROMPTS[0]):
            steerable.model.layers[2].steer(add=vector)
            logits = [].save()
            for _ in tracer.iter[:6]:
                logits.append(steerable.logits.output)
            result = tracer.result.save()
    ids = [*result.prompt_token_ids, *tokens(result)[:-1]]
    close(torch.cat(logits), hidden_states(reference, ids, vector=vector)[2][-6:])
    close(unsteered, hidden_states(reference, first.prompt_token_ids)[2][-1:])


def test_different_edits_share_steps(steerable: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Two edits, both twice, and requests without, in one batch; then others in the same entries of the tables."""
    for sign in (1.0, -1.0):
        results: list[Any] = []
        with steerable.trace(**GREEDY) as tracer:
            for coefficient in (0.0, sign, 2 * sign, sign, 0.0, 2 * sign):
                with tracer.invoke(PROMPTS[0]):
                    if coefficient:
                        steerable.model.layers[2].steer(add=coefficient * vector)
                    results.append(tracer.result)
        ids = results[0].prompt_token_ids
        found = [tokens(result) for result in results]
        once = steered_by_hand(reference, ids, sign * vector, 6)
        twice = steered_by_hand(reference, ids, 2 * sign * vector, 6)
        unsteered = plain(steerable, [PROMPTS[0]])[0]
        assert found == [unsteered, once, twice, once, unsteered, twice]
        assert once not in (twice, unsteered)


def test_several_layers_and_edits_that_stay(steerable: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    with steerable.edit() as edited:
        steerable.model.layers[1].steer(add=vector)
        steerable.model.layers[2].steer(add=vector)
    with edited.trace(PROMPTS[0], **GREEDY) as tracer:
        edited.model.layers[2].steer(add=vector)
        result = tracer.result.save()

    def first(module: Any, args: Any, output: Any) -> Any:
        return output + vector

    handle = reference._module.model.layers[1].register_forward_hook(first)
    expected = generated_by_hand(reference, result.prompt_token_ids, lambda hidden: hidden + 2 * vector, 6)
    handle.remove()
    assert tokens(result) == expected
    assert tokens(edited(PROMPTS[0], **GREEDY)) != expected


def test_chunks_and_cached_prefixes_of_steered_requests(
    folder: Path, reference: LanguageModel, vector: torch.Tensor
) -> None:
    """A long prompt in pieces; once it is in the cache, requests with the same edit use it, and no others."""
    model = VLLM(folder, **OPTIONS, edits=EDITS, max_num_batched_tokens=48, max_num_seqs=4)
    prompt = [7 + number % 400 for number in range(200)]
    expected = {
        0.0: steered_by_hand(reference, prompt, 0 * vector, 3),
        1.0: steered_by_hand(reference, prompt, vector, 3),
        2.0: steered_by_hand(reference, prompt, 2 * vector, 3),
    }
    cached = []
    for coefficient in (1.0, 0.0, 1.0, 2.0, 0.0):
        with model.trace(prompt, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
            if coefficient:
                model.model.layers[2].steer(add=coefficient * vector)
            result = tracer.result.save()
        assert tokens(result) == expected[coefficient]
        cached.append(result.num_cached_tokens > 0)
    assert cached == [False, False, True, False, True]


@tables
def test_unsteered_requests_beside_steered_ones(steerable: VLLM, vector: torch.Tensor) -> None:
    with steerable.trace(PROMPTS[1], **GREEDY) as tracer:
        alone = [].save()
        for _ in tracer.iter[:6]:
            alone.append(steerable.logits.output)
    with steerable.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[1]):
            beside = [].save()
            for _ in tracer.iter[:6]:
                beside.append(steerable.logits.output)
        for coefficient in (1, 2, 3):
            with tracer.invoke(PROMPTS[1]):
                steerable.model.layers[2].steer(add=coefficient * vector)
    assert len(alone) == 6
    close(torch.cat(beside), torch.cat(alone))  # more rows are summed in another order
    assert [int(row.argmax()) for row in beside] == [int(row.argmax()) for row in alone]


def test_steering_by_name(steerable: VLLM, reference: LanguageModel, vector: torch.Tensor, tmp_path: Path) -> None:
    save_file({"mood.1": -vector, "mood.2": vector, "other": vector.clone()}, tmp_path / "moods.safetensors")
    names = [steerable.vectors.load(tmp_path / "moods.safetensors", name) for name in ("mood", "other")]
    try:
        with steerable.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                steerable.model.layers[2].steer(add="mood")
                first = tracer.result.save()
            with tracer.invoke(PROMPTS[0]):
                steerable.steer("mood", scale=2.0)
                second = tracer.result.save()
            with tracer.invoke(PROMPTS[0]):
                steerable.steer(remove="other", layers="2")
                third = tracer.result.save()
            with tracer.invoke(PROMPTS[0]):
                steerable.model.layers[2].steer(remove="other")
                fourth = tracer.result.save()
        ids = first.prompt_token_ids
        assert tokens(first) == steered_by_hand(reference, ids, vector, 6)
        handle = reference._module.model.layers[1].register_forward_hook(lambda module, args, output: output - 2 * vector)
        expected = steered_by_hand(reference, ids, 2 * vector, 6)
        handle.remove()
        assert tokens(second) == expected
        removed = generated_by_hand(reference, ids, lambda hidden: without(hidden, vector[None]), 6)
        assert tokens(third) == tokens(fourth) == removed
        for wrong, message in (
            (lambda: steerable.model.layers[2].steer(add="moood"), "no vector 'moood'. Registered: mood, other"),
            (lambda: steerable.model.layers[3].steer(add="mood"), "'mood' has no direction for layer 3"),
            (lambda: steerable.steer("mood", layers="3"), "'mood' has no direction for layer 3"),
            (lambda: steerable.steer("other", layers="7"), "Layer 7 cannot be steered"),
            (lambda: steerable.steer("other"), "layers is missing"),
        ):
            with pytest.raises(ValueError, match=message):
                with steerable.trace(PROMPTS[0], **GREEDY):
                    wrong()
        with pytest.raises(ValueError, match="a direction has 3 channels, and the model's hidden state has 128"):
            steerable.vectors.add("short", torch.ones(3))
    finally:
        for name in names:
            steerable.vectors.remove(name)


@tables
def test_a_table_that_is_full_fails_the_request(
    steerable: VLLM, reference: LanguageModel, vector: torch.Tensor
) -> None:
    results = []
    with pytest.raises(ValueError, match="room for 3 different edits at a time"):
        with steerable.trace(**GREEDY) as tracer:
            for coefficient in (1, 2, 3, 4):
                with tracer.invoke(PROMPTS[0]):
                    steerable.model.layers[2].steer(add=coefficient * vector)
                    results.append(tracer.result)
    ids = results[0].prompt_token_ids
    expected = [steered_by_hand(reference, ids, coefficient * vector, 6) for coefficient in (1, 2, 3)]
    assert [tokens(result) for result in results] == expected
    with steerable.trace(PROMPTS[0], **GREEDY) as tracer:
        steerable.model.layers[2].steer(add=4 * vector)
        result = tracer.result.save()
    assert tokens(result) == steered_by_hand(reference, ids, 4 * vector, 6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "nothing to do"),
        ({"add": torch.zeros(3)}, ValueError, r"shape \(3,\); it is a number or \[128\]"),
        ({"add": "x"}, ValueError, "no vector 'x'"),
        ({"add": [1.0]}, TypeError, "a number or a tensor"),
        ({"scale": float("nan")}, ValueError, "not finite"),
        ({"remove": torch.zeros(HIDDEN)}, ValueError, "or a zero"),
        ({"remove": torch.ones(2, HIDDEN)}, ValueError, "depend on each other"),
        ({"remove": torch.ones(2, 3)}, ValueError, r"it is \[128\] or \[directions, 128\]"),
        ({"add": 1.0, "start": -1}, ValueError, "counted from the start"),
        ({"add": 1.0, "start": 0.5}, TypeError, "an int"),
    ],
)
def test_wrong_steering(steerable: VLLM, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        with steerable.trace(PROMPTS[0], **GREEDY):
            steerable.model.layers[2].steer(**options)


def test_steering_stands_at_the_top(steerable: VLLM, vector: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="stands at the top of the block"):
        with steerable.trace(PROMPTS[0], **GREEDY):
            steerable.logits.output  # noqa: B018
            steerable.model.layers[2].steer(add=vector)
    with pytest.raises(ValueError, match="called twice for one layer"):
        with steerable.trace(PROMPTS[0], **GREEDY):
            steerable.model.layers[2].steer(add=vector)
            steerable.model.layers[2].steer(scale=2.0)


@tables
def test_tables_have_a_rank(steerable: VLLM) -> None:
    with pytest.raises(ValueError, match="3 directions, and this compiled engine has room for 2"):
        with steerable.trace(PROMPTS[0], **GREEDY):
            steerable.model.layers[2].steer(remove=torch.eye(HIDDEN)[:3])


@tapped
def test_taps_are_no_tables(model: VLLM) -> None:
    with pytest.raises(ValueError, match="has no table for edits: this engine is compiled"):
        with model.trace(PROMPTS[0], **GREEDY):
            model.model.layers[2].steer(add=1.0)


def test_tables_and_taps_at_one_layer(folder: Path, reference: LanguageModel, vector: torch.Tensor) -> None:
    model = VLLM(folder, **OPTIONS, taps=["model.layers.2"], edits=["model.layers.2"])
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        model.model.layers[2].steer(add=vector)
        hidden = model.model.layers[2].residual.save()
        result = tracer.result.save()
    close(hidden, hidden_states(reference, result.prompt_token_ids, vector=vector)[1])
    assert tokens(result) == steered_by_hand(reference, result.prompt_token_ids, vector, 6)


# -- traces that are awaited ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[None, EDITS], ids=["everywhere", "tables"])
def awaited(folder: Path, request: pytest.FixtureRequest) -> VLLM:
    return VLLM(folder, **OPTIONS, mode="async", edits=request.param, dispatch=True)


only_stops = pytest.mark.parametrize("awaited", [None], ids=["everywhere"], indirect=True)


def test_a_stream_has_each_step_and_the_saves(awaited: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    async def main() -> tuple[list[Any], Any]:
        with awaited.trace(PROMPTS[0], **GREEDY) as tracer:
            awaited.model.layers[2].steer(add=vector)
            logits = [].save()
            for _ in tracer.iter[:6]:
                logits.append(awaited.logits.output)
        found = [output async for output in tracer.backend()]
        return found, await tracer.backend()

    outputs, last = asyncio.run(main())
    assert [len(tokens(output)) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert last is outputs[-1] and not hasattr(outputs[0], "saves")
    ids = last.prompt_token_ids
    assert tokens(last) == steered_by_hand(reference, ids, vector, 6)
    expected = hidden_states(reference, [*ids, *tokens(last)[:-1]], vector=vector)[2]
    close(torch.cat(last.saves["logits"]), expected[-6:])


def test_traces_that_are_under_way_share_steps(awaited: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    """Traces, calls and an error, at a time; each gets what it would get alone."""

    async def steered(coefficient: float) -> Any:
        with awaited.trace(PROMPTS[0], **GREEDY) as tracer:
            awaited.model.layers[2].steer(add=coefficient * vector)
        return await tracer.backend()

    async def failing() -> Any:
        with awaited.trace(PROMPTS[1], **GREEDY) as tracer:
            first = awaited.logits.output.save()
            1 / 0  # noqa: B018
        with pytest.raises(ZeroDivisionError) as caught:
            await tracer.backend()
        return caught

    async def invokes() -> Any:
        with awaited.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPTS[1]):
                short = awaited.logits.output.save()
            with tracer.invoke(PROMPTS[2], max_tokens=9):
                long = tracer.result.save()
        outputs = [output async for output in tracer.backend()]
        return outputs

    async def main() -> Any:
        calls = [steered(1.0), steered(-1.0), failing(), invokes(), _awaiting(awaited(PROMPTS[2], **GREEDY))]
        return await asyncio.gather(*calls)

    first, second, caught, joined, call = asyncio.run(main())
    ids = first.prompt_token_ids
    assert tokens(first) == steered_by_hand(reference, ids, vector, 6)
    assert tokens(second) == steered_by_hand(reference, ids, -vector, 6)
    assert "1 / 0" in str(caught.traceback[-1].statement)
    plainly = steered_by_hand(reference, call.prompt_token_ids, 0 * vector, 9)
    assert tokens(call) == plainly[:6]
    saved = joined[-1].saves
    assert tokens(saved["long"]) == plainly and len(saved["short"]) == 1
    assert sum(output.finished for output in joined) == 2 and len(tokens(joined[-1])) == 9


async def _awaiting(stream: Any) -> Any:
    return await stream


def test_a_stream_that_is_left_ends_its_request(awaited: VLLM) -> None:
    async def main() -> Any:
        with awaited.trace(PROMPTS[0], **{**GREEDY, "max_tokens": 200}) as tracer:
            steps = [].save()
            for _ in tracer.iter[:]:
                steps.append(awaited.logits.output)
        async with tracer.backend() as stream:
            async for output in stream:
                if len(tokens(output)) >= 3:
                    break
        left = [output async for output in stream]
        with awaited.trace(PROMPTS[0], **{**GREEDY, "max_tokens": 200}) as tracer:
            awaited.logits.output  # noqa: B018
        waiting = asyncio.ensure_future(_awaiting(tracer.backend()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return left, await awaited(PROMPTS[0], **GREEDY)

    left, result = asyncio.run(main())
    assert all(len(tokens(output)) < 200 for output in left)
    assert len(tokens(result)) == 6
    for _ in range(100):
        if awaited._turns._thread is None:
            break
        time.sleep(0.1)
    assert awaited._turns._thread is None  # nothing is left to do
    assert not awaited._engine.llm.llm_engine.has_unfinished_requests()


@only_stops
def test_mistakes_with_traces_that_are_awaited(awaited: VLLM) -> None:
    async def main() -> None:
        with awaited.trace([1] * 300, **GREEDY) as tracer:
            awaited.logits.output  # noqa: B018
        with pytest.raises(ValueError, match="vLLM refuses the request"):
            await tracer.backend()
        with awaited.trace(PROMPTS[0], **GREEDY) as tracer:
            awaited.logits.output  # noqa: B018
            awaited(PROMPTS[1], **GREEDY)
        with pytest.raises(ValueError, match="cannot run its own engine"):
            await tracer.backend()
        with awaited.trace(**GREEDY) as tracer:
            pass
        with pytest.raises(ValueError, match="did not execute"):
            await tracer.backend()

    asyncio.run(main())
    with pytest.raises(ValueError, match="used by a thread of its own"):
        awaited.engine  # noqa: B018
    with pytest.raises(ValueError, match="backend"):
        awaited.trace(PROMPTS[0], backend=ExecutionBackend())
