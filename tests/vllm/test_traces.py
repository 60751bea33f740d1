"""Traces on a real vLLM engine, against the same traces on the transformers model, and against the engine without blocks."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nnsight import LanguageModel, fx, save
from nnsight.runtime.errors import OutOfOrderError, ReplacementShapeError
from nnsight.tracing import ExecutionBackend
from nnsight.vllm import VLLM

from ..serving import until
from .llama import GREEDY, HIDDEN, OPTIONS, PROMPTS, adding, close, generated, plain, states, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment")]

INSIDE = [
    *("model.layers.*", "model.layers.*.mlp", "model.layers.*.self_attn.qkv_proj"),
    *("model.layers.*.self_attn.o_proj.input", "model.layers.*.mlp.down_proj.input", "model.layers.2.input_layernorm.inputs"),
]
KINDS: dict[str, dict[str, Any]] = {"everywhere": {}, "tapped": {"taps": INSIDE}, "captured": {"captures": INSIDE}}


@pytest.fixture(scope="module", params=["everywhere", "tapped"])
def model(folder: Path, request: pytest.FixtureRequest) -> VLLM:
    """An engine that stops between all modules; a compiled one, that stops where it is tapped; and one whose values can be read only."""
    return VLLM(folder, **OPTIONS, **KINDS[request.param])


everywhere = pytest.mark.parametrize("model", ["everywhere"], indirect=True)
tapped = pytest.mark.parametrize("model", ["tapped"], indirect=True)
readable = pytest.mark.parametrize("model", KINDS, indirect=True)


# -- the modules ------------------------------------------------------------------------------------------------------


def test_modules_are_there_before_the_engine(folder: Path) -> None:
    lazy = VLLM(folder, **OPTIONS)
    assert not lazy.dispatched
    layer = lazy.model.layers[1]
    assert layer.mlp.down_proj.weight.is_meta
    shown = repr(lazy)
    assert "LlamaDecoderLayer" in shown and "(residual): hidden state after the layer" in shown
    assert lazy.tokenizer.decode(lazy.tokenizer(PROMPTS[0])["input_ids"]) == PROMPTS[0]
    lazy.dispatch()
    assert lazy.dispatched and lazy.model.layers[1] is layer
    assert layer.mlp.down_proj.weight.device.type == "cpu"
    with lazy.trace(PROMPTS[0], **GREEDY) as tracer:
        hidden = layer.residual.save()
        result = tracer.result.save()
    assert hidden.shape == (len(result.prompt_token_ids), HIDDEN)


# -- reads ------------------------------------------------------------------------------------------------------------


@readable
def test_hidden_states_are_those_of_transformers(model: VLLM, reference: LanguageModel) -> None:
    """Of every layer at every token: each step is an occurrence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(PROMPTS[0], **GREEDY) as tracer:
            hidden, logits, samples = [[] for _ in model.model.layers].save(), [].save(), [].save()
            for _ in tracer.iter[:]:
                for found, layer in zip(hidden, model.model.layers, strict=True):
                    found.append(layer.residual)
                logits.append(model.logits.output)
                samples.append(model.samples.output.item())
    assert sum("The loop ended" in str(warning.message) for warning in caught) == 1
    result = model(PROMPTS[0], **GREEDY)
    assert samples == tokens(result) == plain(model, [PROMPTS[0]])[0]
    *expected, expected_logits = states(reference, [*result.prompt_token_ids, *samples[:-1]])
    for found, wanted in zip(hidden, expected, strict=True):
        assert [len(rows) for rows in found] == [len(result.prompt_token_ids), 1, 1, 1, 1, 1]
        close(torch.cat(found), wanted)
    close(torch.cat(logits), expected_logits[-6:])


@readable
def test_inside_of_layers_is_that_of_transformers(model: VLLM, reference: LanguageModel) -> None:
    """Inputs and outputs; pairs with nothing in the second place, and several arguments."""
    layer, other = model.model.layers[2], reference.model.layers[2]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        given = layer.input_layernorm.inputs.save()
        projected = layer.self_attn.qkv_proj.output.save()
        attended = layer.self_attn.o_proj.input.save()
        gated = layer.mlp.down_proj.input.save()
        inner = layer.mlp.output.save()
        pair = layer.output.save()
        result = tracer.result.save()
    ((hidden, residual), keywords), (qkv, bias) = given, projected
    assert keywords == {} and bias is None and not hidden.is_inference()
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        expected = [other.input[0], other.self_attn.q_proj.output[0], other.self_attn.o_proj.input[0], other.mlp.down_proj.input[0]].save()
        expected += [other.mlp.output[0], other.output[0]]
    for mine, theirs in zip([hidden + residual, qkv[:, :HIDDEN], attended, gated, inner, sum(pair)], expected, strict=True):
        close(mine, theirs)


@everywhere
def test_operations_inside_a_forward_can_be_read(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        hidden = model.model.layers[1].source.self_mlp_0.output.save()
        result = tracer.result.save()
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        expected = reference.model.layers[1].mlp.output[0].save()
    close(hidden, expected)


@readable
def test_a_cache_keeps_what_modules_return(model: VLLM, reference: LanguageModel) -> None:
    with model.trace(PROMPTS[0], **GREEDY, logprobs=1) as tracer:
        cache = tracer.cache([layer.mlp for layer in model.model.layers])
        result = tracer.result.save()
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        expected = [layer.mlp.output[0] for layer in reference.model.layers].save()
    for number, value in enumerate(expected):
        outputs = cache[f"model.model.layers.{number}.mlp"].output
        assert len(outputs) == 6
        close(outputs[0], value)


# -- edits ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("form", ["in place", "augmented", "assigned", "pair", "pair in place"])
def test_all_forms_of_an_edit_equal_transformers(model: VLLM, reference: LanguageModel, vector: torch.Tensor, form: str) -> None:
    layer = model.model.layers[2]
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        after, last = [].save(), [].save()
        for _ in tracer.iter[:6]:
            if form == "in place":
                hidden = layer.residual
                hidden += vector
            elif form == "augmented":
                layer.residual += vector
            elif form == "assigned":
                layer.residual = layer.residual + vector
            elif form == "pair":
                layer.output = (layer.output[0] + vector, layer.output[1])
            else:
                layer.output[0][:] += vector
            after.append(layer.residual)
            last.append(model.model.layers[3].residual)
        result = tracer.result.save()
    ids = result.prompt_token_ids
    assert tokens(result) == generated(reference, ids, {2: adding(vector)}) != plain(model, [PROMPTS[0]])[0]
    expected = states(reference, [*ids, *tokens(result)[:-1]], {2: adding(vector)})
    close(torch.cat(after), expected[2])
    close(torch.cat(last), expected[3])


@pytest.mark.parametrize("form", ["in place", "replaced"])
@pytest.mark.parametrize("path", ["self_attn.o_proj", "mlp.down_proj"])
def test_inputs_can_be_edited(model: VLLM, reference: LanguageModel, path: str, form: str) -> None:
    module = model.model.layers[1].get(path)
    factors = torch.tensor([-3.0, 1.0])
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[:6]:
            if form == "in place":
                module.input[:, ::2] *= -3
            else:
                module.input = module.input * factors.repeat(module.input.shape[1] // 2)
        result = tracer.result.save()
    edits = {f"model.layers.1.{path}.input": lambda given: given * factors.repeat(given.shape[-1] // 2)}
    assert tokens(result) == generated(reference, result.prompt_token_ids, edits) != plain(model, [PROMPTS[0]])[0]


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
    assert tokens(result)[4:5] == generated(reference, ids, count=1)


@everywhere
def test_logits_and_samples_are_values(model: VLLM) -> None:
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        rows, doubled, likely = [].save(), [].save(), [].save()
        kept = {"logits": []}.save()
        for _ in tracer.iter[:2]:
            kept["logits"].append(model.logits)
            rows.append(model.logits[-1:, :].clone())
            doubled.append(2 * model.logits + model.logits)
            likely.append(torch.softmax(model.logits, dim=-1).sum().item() > 0.99 and model.logits.shape[0] == len(model.logits) == 1)
        for _ in tracer.iter[2:3]:
            model.logits[:, 77] = 1e9
            model.logits += 1.0
            edited = model.logits.save()
            drawn = save(model.samples.item())
            model.samples = model.samples + 1
        result = tracer.result.save()
    assert all(torch.equal(*pair) for pair in zip(kept["logits"], rows, strict=True)) and "EngineTensor" not in repr(kept)
    assert type(copy.deepcopy(edited)) is type(pickle.loads(pickle.dumps(edited))) is type(edited + 1) is torch.Tensor
    assert likely == [True, True] and torch.equal(doubled[0], 3 * rows[0]) and not torch.equal(rows[0], rows[1])
    assert edited[0, 77] == 1e9 + 1 and drawn == 77 and tokens(result)[2] == 78
    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        model.logits = torch.nn.functional.one_hot(torch.tensor([5]), model.logits.shape[1]).float()
        model.samples = model.samples
        result = tracer.result.save()
    assert tokens(result)[0] == 5
    assert repr(model.logits) == "<model.logits.output, a value of each step of the engine>"
    with pytest.raises(ValueError, match=r"model\.logits\.output"):
        model.logits.output  # noqa: B018


@readable
def test_a_logit_lens_is_that_of_transformers(model: VLLM, reference: LanguageModel) -> None:
    """Modules are called on values of the block, the head too, which vLLM has in its sampler only."""

    def lens(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        return model.lm_head(model.model.norm(hidden))

    with model.trace(PROMPTS[0], **GREEDY) as tracer:
        again = model.model.layers[3].mlp(model.model.layers[0].residual).save()
        seen = [lens(model, layer.residual) for layer in model.model.layers[1:]].save()
        result = tracer.result.save()
    with reference.trace(torch.tensor([result.prompt_token_ids])):
        expected_again = reference.model.layers[3].mlp(reference.model.layers[0].output)[0].save()
        expected = [lens(reference, layer.output)[0] for layer in reference.model.layers[1:]].save()
    for got, wanted in zip(seen, expected, strict=True):
        close(got, wanted)
    close(again, expected_again)


def test_edits_that_stay_run_in_every_request(model: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    with model.edit() as (tracer, edited):
        for _ in tracer.iter[:]:
            model.model.layers[2].residual += vector
    result = edited(PROMPTS[0], **GREEDY)
    assert tokens(result) == generated(reference, result.prompt_token_ids, {2: adding(vector)})
    with edited.trace(PROMPTS[0], **GREEDY):
        seen = edited.model.layers[2].residual.save()
    close(seen, states(reference, result.prompt_token_ids, {2: adding(vector)})[2])
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
            hidden = [].save()
            for _ in tracer.iter[:5]:
                hidden.append(model.model.layers[1].residual)
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[0], max_tokens=5):
            results.append(tracer.result)
    assert tokens(steered) == generated(reference, steered.prompt_token_ids, {2: adding(vector)})
    assert [tokens(result) for result in results] == [expected[1], expected[2], expected[0]]
    close(torch.cat(hidden), states(reference, [*results[1].prompt_token_ids, *tokens(results[1])[:-1]])[1])
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
    close(patched[-1:], states(reference, ids)[1][-1:])
    with torch.no_grad(), reference.trace([result.prompt_token_ids]):
        reference.model.layers[2].output[0, -1] = patched[-1]
        expected = reference.lm_head.output[0, -1:].save()
    close(logits, expected)


# -- prefix caching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["plain steered plain", "steered plain steered", "steered steered plain"])
def test_cached_prefixes_do_not_cross_requests(model: VLLM, reference: LanguageModel, vector: torch.Tensor, order: str) -> None:
    first = sum(map(ord, order)) % 100
    prompt = [7 + number % 400 for number in range(first, first + 160)]
    expected = {"plain": generated(reference, prompt, count=3), "steered": generated(reference, prompt, {2: adding(vector)}, 3)}
    assert expected["plain"] != expected["steered"]
    for kind in order.split():
        if kind == "plain":
            assert plain(model, [{"prompt_token_ids": prompt}], max_tokens=3)[0] == expected[kind]
            continue
        with model.trace(prompt, **{**GREEDY, "max_tokens": 3}) as tracer:
            rows = [].save()
            for _ in tracer.iter[:3]:
                hidden = model.model.layers[2].residual
                rows.append(len(hidden))
                hidden += vector
            result = tracer.result.save()
        assert tokens(result) == expected[kind]
        assert rows == [len(prompt), 1, 1]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_ends_its_request_only(model: VLLM) -> None:
    results = []
    with pytest.raises(ZeroDivisionError) as caught, model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.model.layers[1].output  # noqa: B018
            1 / 0  # noqa: B018
        with tracer.invoke(PROMPTS[1]):
            hidden = [].save()
            for _ in tracer.iter[:6]:
                hidden.append(model.model.layers[2].residual)
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[2]):
            results.append(tracer.result)
        with tracer.invoke(PROMPTS[1]):
            {}["missing"]
    last = caught.traceback[-1]
    assert str(last.path) == __file__ and "1 / 0" in str(last.statement)
    assert "invoke 3: KeyError: 'missing'" in caught.value.__notes__[0]
    assert [tokens(result) for result in results] == plain(model, PROMPTS[1:])
    assert len(hidden) == 6
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


@everywhere
def test_locations_out_of_order_and_never_reached(model: VLLM) -> None:
    with pytest.raises(OutOfOrderError, match=r"model.model.layers.1.output.i0"), model.trace(PROMPTS[0], **GREEDY):
        model.model.layers[2].output  # noqa: B018
        model.model.layers[1].output  # noqa: B018
    with pytest.raises(OutOfOrderError, match="occurred only 6 times"), model.trace(PROMPTS[0], **GREEDY) as tracer:
        for _ in tracer.iter[6:7]:
            pass
        model.model.layers[1].next(9).output  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute `q_proj`"), model.trace(PROMPTS[0], **GREEDY):
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
def test_blocks_that_no_request_can_run(model: VLLM) -> None:
    with pytest.raises(NotImplementedError, match="cannot be skipped"), model.trace(PROMPTS[0], **GREEDY):
        model.model.layers[1].mlp.skip(torch.zeros(1))
    with pytest.raises(ValueError, match="cannot run its own engine"), model.trace(PROMPTS[0], **GREEDY):
        model.model.layers[1].output  # noqa: B018
        model(PROMPTS[1], **GREEDY)
    with pytest.raises(ValueError, match="without a prompt"), model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.logits.output  # noqa: B018
        with tracer.invoke():
            model.logits.output  # noqa: B018
    assert tokens(model(PROMPTS[0], **GREEDY)) == plain(model, [PROMPTS[0]])[0]


@everywhere
def test_prompts_that_are_tokenized_already(model: VLLM) -> None:
    """As a tokenizer gives them, with padding; `generate` is `trace`."""
    expected = plain(model, [PROMPTS[0]])[0]
    encoded = model.tokenizer(PROMPTS[0], return_tensors="pt")
    ids = encoded["input_ids"]
    padded = {"input_ids": torch.cat([ids[:, :1], ids], 1), "attention_mask": torch.tensor([[0] + [1] * ids.shape[1]])}
    for prompt in (dict(encoded), encoded, {"input_ids": ids[0].tolist(), "attention_mask": [1] * ids.shape[1]}, padded, ids):
        with model.generate(prompt, temperature=0.0, max_new_tokens=6) as tracer:
            result = tracer.result.save()
        assert tokens(result) == expected


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
        ([{"input_ids": [1], "labels": [1]}], {}, TypeError, "no 'labels'"),
        ([{"input_ids": [1], "attention_mask": [1, 1]}], {}, ValueError, "they have to be equal"),
        ([{"input_ids": [[1], [2]]}], {}, ValueError, "2 prompts for one block"),
        (["a"], {"temprature": 0}, ValueError, "temprature: no sampling parameters"),
        (["a"], {"temperature": -1}, ValueError, "vLLM refuses the request"),
        (["a"], {"n": 2}, ValueError, "n=2: the block waits at `model.logits.output`"),
        (["a"], {"compile": True}, NotImplementedError, "compile"),
        (["a"], {"scan": True}, NotImplementedError, "scan"),
        ([[1] * 300], {}, ValueError, "256"),
    ],
)
def test_mistakes(model: VLLM, args: list[Any], kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), model.trace(*args, **kwargs):
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


def test_an_interrupted_trace_leaves_the_engine_usable(model: VLLM) -> None:
    with pytest.raises(KeyboardInterrupt), model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.model.layers[1].output  # noqa: B018
            raise KeyboardInterrupt
        with tracer.invoke(PROMPTS[1]):
            model.model.layers[2].output  # noqa: B018
    assert str(tracer.report).startswith("trace: engine, 2 requests\n  request 0: block ran ")
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
    expected = [generated(reference, prompt, {2: adding(vector)}, 16) for prompt in prompts]
    steps: list[list[Any]] = [[], []]
    results = []
    with pytest.raises(RuntimeError, match="ran out of key-value cache"), model.trace(**sampling) as tracer:
        for index, prompt in enumerate(prompts):
            with tracer.invoke(prompt):
                for _ in tracer.iter[:16]:
                    model.model.layers[2].residual += vector
                    steps[index].append(None)
                results.append((index, tracer.result))
    ((index, result),) = results
    assert tokens(result) == expected[index]
    assert len(steps[index]) == 16 and 0 < len(steps[1 - index]) < 16

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
    with pytest.raises(ValueError, match="enable_chunked_prefill=False"), chunked.trace(**GREEDY) as tracer:
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
    with pytest.raises(OutOfOrderError, match=refused), model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.model.layers[1].self_attn.output  # noqa: B018
        with tracer.invoke(PROMPTS[1]):
            results.append(tracer.result)
    assert tokens(results[0]) == plain(model, [PROMPTS[1]])[0]
    for place, remedy in (("input", "'model.layers.1.input'"), ("self_attn.source.self_o_proj_0.output", "operations cannot be tapped")):
        with pytest.raises(OutOfOrderError, match=remedy), model.trace(PROMPTS[0], **GREEDY):
            if place == "input":
                model.model.layers[1].input  # noqa: B018
            else:
                model.model.layers[1].self_attn.source.self_o_proj_0.output  # noqa: B018


@tapped
def test_taps_are_no_tables(model: VLLM) -> None:
    with pytest.raises(ValueError, match="has no table for edits: this engine is compiled"):
        with model.trace(PROMPTS[0], **GREEDY):
            model.model.layers[2].steer(add=1.0)


@tapped
def test_taps_leave_the_tokens_of_a_compiled_model_as_they_are(model: VLLM, folder: Path) -> None:
    from vllm.config import CompilationMode

    assert model.engine.llm_engine.vllm_config.compilation_config.mode != CompilationMode.NONE
    assert plain(model, PROMPTS, max_tokens=8) == plain(VLLM(folder, **OPTIONS), PROMPTS, max_tokens=8)


def test_engines_with_other_taps_do_not_take_each_others_graphs(folder: Path, reference: LanguageModel) -> None:
    """Both find the same cache of compiled graphs."""
    for layer in (0, 3):
        tapped = VLLM(folder, **OPTIONS, taps=[f"model.layers.{layer}"])
        with tapped.trace(PROMPTS[0], **GREEDY) as tracer:
            hidden = tapped.model.layers[layer].residual.save()
            result = tracer.result.save()
        close(hidden, states(reference, result.prompt_token_ids)[layer])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"taps": ["model.layers.9"]}, ValueError, "no module 'model.layers.9'"),
        ({"taps": ["layers.*"]}, ValueError, "no module"),
        ({"taps": "model.layers.1"}, TypeError, "list of paths"),
        ({"captures": ["model.layers.9"]}, ValueError, "no module 'model.layers.9'"),
        ({"captures": "model.layers.*"}, TypeError, "captures= is a list of paths"),
        ({"edits": ["model.layers.9"]}, ValueError, "no module 'model.layers.9'"),
        ({"edits": {"slots": 3}}, TypeError, "a dict with 'modules'"),
        ({"edits": {"modules": ["model.layers.1"], "slots": 0}}, ValueError, "a number from 1"),
        ({"enforce_eager": False}, ValueError, "needs taps"),
        ({"mode": "fast"}, ValueError, "'sync' or 'async'"),
    ],
)
def test_wrong_options(folder: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VLLM(folder, **OPTIONS, **options)


def test_an_engine_is_not_copied(folder: Path) -> None:
    lazy = VLLM(folder, **OPTIONS)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(lazy)


# -- steering without a stop ------------------------------------------------------------------------------------------

EDITS = {"modules": ["model.layers.*"], "slots": 3, "rank": 2}


@pytest.fixture(scope="module", params=[None, EDITS], ids=["everywhere", "tables"])
def steerable(folder: Path, request: pytest.FixtureRequest) -> VLLM:
    """An engine that stops between all modules; and a compiled one, with tables of parameters in its graph."""
    return VLLM(folder, **OPTIONS, edits=request.param)


tables = pytest.mark.parametrize("steerable", [EDITS], ids=["tables"], indirect=True)


def without(hidden: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Return ``hidden`` without its part in the plane of ``directions``."""
    return hidden - hidden @ directions.T @ torch.linalg.inv(directions @ directions.T) @ directions


@pytest.mark.parametrize("kind", ["add", "scale", "remove", "all", "from a position"])
def test_steering_equals_transformers(steerable: VLLM, reference: LanguageModel, vector: torch.Tensor, kind: str) -> None:
    plane = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))
    factor = torch.linspace(0.5, 1.5, HIDDEN)
    state = states(reference, steerable.tokenizer(PROMPTS[0])["input_ids"])[2][-1:]
    options, edit = {
        "add": ({"add": vector}, adding(vector)),
        "scale": ({"scale": factor}, lambda hidden: hidden * factor),
        "remove": ({"remove": state[0]}, lambda hidden: without(hidden, state)),
        "all": ({"add": vector, "scale": factor, "remove": plane}, lambda hidden: without(hidden, plane) * factor + vector),
        "from a position": ({"add": vector, "start": 5}, adding(vector, 5)),
    }[kind]
    with steerable.trace(PROMPTS[0], **GREEDY) as tracer:
        steerable.model.layers[2].steer(**options)
        result = tracer.result.save()
    assert tokens(result) == generated(reference, result.prompt_token_ids, {2: edit}) != plain(steerable, [PROMPTS[0]])[0]
    expected = "between modules, in 6 steps" if steerable._layout is None else "in the compiled model, as parameters"
    assert f"request 0: block ran {expected}" in str(tracer.report)


def test_logits_of_a_steered_request_equal_transformers(steerable: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
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
    close(torch.cat(logits), states(reference, ids, {2: adding(vector)})[-1][-6:])
    close(unsteered, states(reference, first.prompt_token_ids)[-1][-1:])


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
        once, twice = (generated(reference, ids, {2: adding(c * sign * vector)}) for c in (1, 2))
        unsteered = plain(steerable, [PROMPTS[0]])[0]
        assert found == [unsteered, once, twice, once, unsteered, twice]
        assert once not in (twice, unsteered)


def test_chunks_and_cached_prefixes_of_steered_requests(folder: Path, reference: LanguageModel, vector: torch.Tensor) -> None:
    """A long prompt in pieces; once it is in the cache, requests with the same edit use it, and no others."""
    model = VLLM(folder, **OPTIONS, edits=EDITS, max_num_batched_tokens=48, max_num_seqs=4)
    prompt = [7 + number % 400 for number in range(200)]
    expected = {c: generated(reference, prompt, {2: adding(c * vector)}, 3) for c in (0.0, 1.0, 2.0)}
    cached = []
    for coefficient in (1.0, 0.0, 1.0, 2.0, 0.0):
        with model.trace(prompt, **{**GREEDY, "max_tokens": 3}) as tracer:
            if coefficient:
                model.model.layers[2].steer(add=coefficient * vector)
            result = tracer.result.save()
        assert tokens(result) == expected[coefficient]
        cached.append(result.num_cached_tokens > 0)
    assert cached == [False, False, True, False, True]


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
        assert tokens(first) == generated(reference, ids, {2: adding(vector)})
        assert tokens(second) == generated(reference, ids, {1: adding(-2 * vector), 2: adding(2 * vector)})
        removed = generated(reference, ids, {2: lambda hidden: without(hidden, vector[None])})
        assert tokens(third) == tokens(fourth) == removed
        for wrong, message in (
            (lambda: steerable.model.layers[2].steer(add="moood"), "no vector 'moood'. Registered: mood, other"),
            (lambda: steerable.model.layers[3].steer(add="mood"), "'mood' has no direction for layer 3"),
            (lambda: steerable.steer("other", layers="7"), "Layer 7 cannot be steered"),
        ):
            with pytest.raises(ValueError, match=message), steerable.trace(PROMPTS[0], **GREEDY):
                wrong()
        with pytest.raises(ValueError, match="a direction has 3 channels, and the model's hidden state has 128"):
            steerable.vectors.add("short", torch.ones(3))
    finally:
        for name in names:
            steerable.vectors.remove(name)


@tables
def test_a_table_that_is_full_fails_the_request(steerable: VLLM, reference: LanguageModel, vector: torch.Tensor) -> None:
    results = []
    with pytest.raises(ValueError, match="room for 3 different edits at a time"), steerable.trace(**GREEDY) as tracer:
        for coefficient in (1, 2, 3, 4):
            with tracer.invoke(PROMPTS[0]):
                steerable.model.layers[2].steer(add=coefficient * vector)
                results.append(tracer.result)
    ids = results[0].prompt_token_ids
    expected = [generated(reference, ids, {2: adding(coefficient * vector)}) for coefficient in (1, 2, 3, 4)]
    assert [tokens(result) for result in results] == expected[:3]
    with steerable.trace(PROMPTS[0], **GREEDY) as tracer:
        steerable.model.layers[2].steer(add=4 * vector)
        result = tracer.result.save()
    assert tokens(result) == expected[3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "nothing to do"),
        ({"add": torch.zeros(3)}, ValueError, r"shape \(3,\); it is a number or \[128\]"),
        ({"add": "x"}, ValueError, "no vector 'x'"),
        ({"add": [1.0]}, TypeError, "a number or a tensor"),
        ({"scale": float("nan")}, ValueError, "not finite"),
        ({"remove": torch.zeros(HIDDEN)}, ValueError, "or one that is zero"),
        ({"remove": torch.ones(2, HIDDEN)}, ValueError, "depend on each other"),
        ({"remove": torch.ones(2, 3)}, ValueError, r"it is \[128\] or \[directions, 128\]"),
        ({"add": 1.0, "start": -1}, ValueError, "counted from the start"),
        ({"add": 1.0, "start": 0.5}, TypeError, "an int"),
    ],
)
def test_wrong_steering(steerable: VLLM, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), steerable.trace(PROMPTS[0], **GREEDY):
        steerable.model.layers[2].steer(**options)


def test_steering_stands_at_the_top(steerable: VLLM, vector: torch.Tensor) -> None:
    layer = steerable.model.layers[2]
    with pytest.raises(ValueError, match="stands at the top of the block"), steerable.trace(PROMPTS[0], **GREEDY):
        steerable.logits.output  # noqa: B018
        layer.steer(add=vector)
    with pytest.raises(ValueError, match="called twice for one layer"), steerable.trace(PROMPTS[0], **GREEDY):
        layer.steer(add=vector)
        layer.steer(scale=2.0)


@tables
def test_tables_have_a_rank(steerable: VLLM) -> None:
    with pytest.raises(ValueError, match="3 directions, and this compiled engine has room for 2"):
        with steerable.trace(PROMPTS[0], **GREEDY):
            steerable.model.layers[2].steer(remove=torch.eye(HIDDEN)[:3])


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
        found = [output async for output in tracer.backend]
        return found, await tracer.backend()

    outputs, last = asyncio.run(main())
    assert [len(tokens(output)) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert last is outputs[-1] and not hasattr(outputs[0], "saves")
    ids = last.prompt_token_ids
    assert tokens(last) == generated(reference, ids, {2: adding(vector)})
    close(torch.cat(last.saves["logits"]), states(reference, [*ids, *tokens(last)[:-1]], {2: adding(vector)})[-1][-6:])


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
        return [output async for output in tracer.backend()]

    async def main() -> Any:
        calls = [steered(1.0), steered(-1.0), failing(), invokes(), _awaiting(awaited(PROMPTS[2], **GREEDY))]
        return await asyncio.gather(*calls)

    first, second, caught, joined, call = asyncio.run(main())
    ids = first.prompt_token_ids
    assert tokens(first) == generated(reference, ids, {2: adding(vector)})
    assert tokens(second) == generated(reference, ids, {2: adding(-vector)})
    assert "1 / 0" in str(caught.traceback[-1].statement)
    plainly = generated(reference, call.prompt_token_ids, count=9)
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
    until(lambda: awaited._engine_thread._thread is None)  # nothing is left to do
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
