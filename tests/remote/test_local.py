"""Blocks that are sent as data do what they do in an ordinary trace; what cannot be sent is refused at its line."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nnsight
from nnsight import NNsight
from nnsight.remote import (
    ExecutionFailedError,
    InvalidProgramError,
    Limits,
    LocalBackend,
    NotExpressibleError,
    ProgramBackend,
    decode,
    encode,
    execute_payload,
    validate,
)
from nnsight.runtime.errors import OutOfOrderError

from ..conftest import same
from .remoting import Catch

PROMPT = "The Eiffel Tower is in the city of"
OTHER = "The Colosseum is in the city of"

REMOTE = {"remote": "local"}


# The remote examples of the documents, and what else a block can do. Each is run here and as data.


def tokens_of_every_step(model: Any, **where: Any) -> Any:
    with model.generate(PROMPT, max_new_tokens=4, **where) as tracer:
        tokens = nnsight.save([])
        for _ in tracer.iter[:]:
            tokens.append(model.lm_head.output[0][-1].argmax(dim=-1))
    return tokens


def steering_of_some_steps(model: Any, **where: Any) -> Any:
    with model.generate(PROMPT, max_new_tokens=5, **where) as tracer:
        tokens = nnsight.save([])
        for _ in tracer.iter[1:3]:
            model.transformer.h[0].output[:] *= 1.5
            tokens.append(model.lm_head.output[0][-1].argmax(dim=-1))
        text = model.generator.output.save()
    return tokens, text


def beams_at_every_step(model: Any, **where: Any) -> Any:
    with model.generate(PROMPT, max_new_tokens=4, num_beams=3, num_return_sequences=2, **where) as tracer:
        tokens = nnsight.save([])
        for _ in tracer.iter[:4]:
            model.transformer.h[0].output[:] *= 1.5
            tokens.append(model.lm_head.output[:, -1].argmax(dim=-1))
        ids = tracer.result.save()
    return tokens, ids


def lists_made_in_the_block_and_outside(model: Any, **where: Any) -> Any:
    kept: list[Any] = []
    by_name: dict[str, Any] = {}
    with model.trace(PROMPT, **where):
        inside = nnsight.save([])
        kept.append(model.transformer.h[0].output)
        by_name["last"] = [model.transformer.h[1].output]
        inside.append(model.lm_head.output[0][-1].argmax(dim=-1).detach().cpu())
        inside.append(model.output)
    return kept, by_name, inside[0], inside[1].logits


def a_replaced_tuple(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        output = model.transformer.h[1].attn.output
        model.transformer.h[1].attn.output = (output[0] * 0, *output[1:])
        logits = model.lm_head.output.save()
    return logits


def an_edit_of_a_part_of_a_tuple(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        before = model.transformer.h[1].attn.output[0].clone().save()
        model.transformer.h[1].attn.output[0][:, 2:] = 0
        after = model.transformer.h[1].attn.output[0].save()
        logits = model.lm_head.output.save()
    return before, after, logits


def random_noise(model: Any, **where: Any) -> Any:
    torch.manual_seed(0)
    with model.trace(PROMPT, **where):
        embedded = model.transformer.wte.output
        model.transformer.wte.output = embedded + 0.1 * torch.randn_like(embedded)
        logits = model.lm_head.output.save()
    return logits


def patching_between_invokes(model: Any, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            clean = model.transformer.h[1].output[:, -1, :]
            barrier()
            first = model.lm_head.output.save()
        with tracer.invoke(OTHER):
            barrier()
            model.transformer.h[1].output[:, -1, :] = clean
            patched = model.lm_head.output.save()
        with tracer.invoke():
            both = model.lm_head.output.save()
    return first, patched, both


def a_replacement_in_one_invoke(model: Any, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        with tracer.invoke(PROMPT):
            model.transformer.h[0].output = model.transformer.h[0].output * 2
            first = model.lm_head.output.save()
        with tracer.invoke([OTHER, PROMPT]):
            second = model.lm_head.output.save()
    return first, second


def a_cache(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where) as tracer:
        cache = tracer.cache(include_inputs=True)
        model.transformer.h[0].output[:] = 0
    kept = ("model.transformer.h.0", "model.transformer.h.1", "model.lm_head")
    return {path: (cache[path].output, cache[path].input) for path in kept}


def inputs_of_modules(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        hidden = model.transformer.h[1].input.save()
        (normed,), kwargs = model.transformer.h[1].mlp.inputs
        normed = nnsight.save(normed)
        model.transformer.h[2].input = model.transformer.h[2].input * 2
        logits = model.lm_head.output.save()
    return hidden, normed, logits


def a_logit_lens(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        tokens = nnsight.save([])
        for layer in model.transformer.h:
            tokens.append(model.lm_head(model.transformer.ln_f(layer.output)).argmax(dim=-1))
    return tokens


def weights_in_the_block(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        difference = model.lm_head.weight[5] - model.lm_head.weight[6]
        scores = (model.transformer.h[1].output @ difference).save()
        length = difference.norm().save()
    return scores, length


def an_edited_model(model: Any, **where: Any) -> Any:
    with model.edit() as edited:
        model.transformer.h[0].output[:] *= 2
    with edited.trace(PROMPT, **where):
        logits = edited.lm_head.output.save()
    return logits


def sizes_and_numbers(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        shape = model.transformer.h[0].output.shape.save()
        width = nnsight.save(shape[-1] * 2)
        described = nnsight.save({"shape": tuple(shape), "mean": model.transformer.h[1].output.mean()})
    return shape, width, described


def many_operations(model: Any, **where: Any) -> Any:
    direction = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(1))
    with model.trace(PROMPT, **where):
        hidden = model.transformer.h[1].output
        found = [
            torch.softmax(hidden, -1).topk(5).values,
            (hidden @ direction)[..., None] * direction / direction.norm() ** 2,
            hidden[:, [0, 2]],
            hidden[:, torch.tensor([1, 0])],
            hidden[..., ::3],
            torch.einsum("bsd,d->bs", hidden, direction),
            nn.functional.layer_norm(hidden, (hidden.shape[-1],)),
            nn.functional.gelu(hidden, approximate="tanh"),
            nn.functional.cross_entropy(hidden[0], torch.arange(hidden.shape[1])),
            hidden.var(-1),
            hidden.std(),
            torch.where(hidden > 0, hidden, float("-inf")),
            hidden.masked_fill(hidden < 0, 0.0),
            nn.functional.scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None], is_causal=True),
            torch.cat([hidden, hidden * 2], dim=1),
            hidden.sort(dim=-1, descending=True).indices,
            hidden.half().float().norm(dim=-1, keepdim=True),
            torch.stack(list(hidden[0].unbind(0)[:2])),
            hidden.clone().mul_(3).add_(1).clamp_(min=0),
            nn.functional.cosine_similarity(hidden[:, 0], hidden[:, 1]),
            hidden.float().cumsum(1).roll(1, 0).flip(-1).tril(),
            hidden.mean((0, 1), keepdim=True).expand(2, -1, -1).reshape(2, -1),
            hidden.argmax(-1).eq(0).any(),
        ]
        nnsight.save(found)
    return found


def sums_in_tensors_of_its_own(model: Any, **where: Any) -> Any:
    with model.session(remote=where.get("remote", False)):
        with model.trace(PROMPT):
            width = model.config.n_embd
            total, rows = torch.ones(width), torch.zeros(2, width)
            held = {"total": [total]}
            for number, layer in enumerate(model.transformer.h[:2]):
                layer.output[:] *= total.clamp(-2, 2)  # first a constant, then a value of the program
                total += layer.output.mean((0, 1))
                rows[number] = rows[number] + layer.output[0, -1]
            half = total[: width // 2]
            half *= 2
            held["total"][0].relu_()
            out = (model.lm_head.output, rows, held, total.sum()).save()
        with model.trace(PROMPT):
            model.transformer.h[0].output[:] += total
            after = model.lm_head.output.save()
    return out, after


EXAMPLES = [
    tokens_of_every_step, steering_of_some_steps, beams_at_every_step, lists_made_in_the_block_and_outside,
    a_replaced_tuple, an_edit_of_a_part_of_a_tuple, random_noise, patching_between_invokes,
    a_replacement_in_one_invoke, a_cache, inputs_of_modules, a_logit_lens,
    weights_in_the_block, an_edited_model, sizes_and_numbers, many_operations, sums_in_tensors_of_its_own,
]  # fmt: skip


def quietly(example: Callable[..., Any], model: Any, **where: Any) -> Any:
    """Run an example; an open loop warns that it has ended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The loop ended")
        return example(model, **where)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_an_example_gives_the_same_as_data(model: Any, example: Callable[..., Any]) -> None:
    same(quietly(example, model, **REMOTE), quietly(example, model))


def test_examples_are_recorded_without_weights_and_run_elsewhere(demo: Any) -> None:
    """The client's model is lazy: it has no weights, before and after."""
    client = nnsight.LanguageModel("nnsight/demo")

    class Elsewhere(ProgramBackend):
        def send(self, payload: bytes) -> bytes:
            return execute_payload(demo, payload)

    same(weights_in_the_block(client, backend=Elsewhere()), weights_in_the_block(demo))
    assert not client.dispatched


def test_the_first_remote_use_of_a_lazy_model_can_be_a_session(demo: Any) -> None:
    """The copy of the model for recordings is then made between the traces of the session."""
    client = nnsight.LanguageModel("nnsight/demo")

    def two_traces(model: Any, **where: Any) -> Any:
        with model.session(**where):
            with model.trace(PROMPT):
                hidden = model.transformer.h[0].output
            with model.trace(OTHER):
                model.transformer.h[0].output[:, -1] = hidden[:, -1]
                logits = model.lm_head.output.save()
        return logits

    same(two_traces(client, backend=LocalBackend(demo)), two_traces(demo))
    assert not client.dispatched


def edits_of_own_tensors(model: Any, **where: Any) -> Any:
    added = torch.ones(model.config.n_embd)
    with model.trace(PROMPT, **where):
        model.transformer.h[0].output += added
        added *= 2
        model.transformer.h[0].output += added
        added[1:].add_(1)
        model.transformer.h[1].output[:, -1] = added
        logits = model.lm_head.output.save()
    return logits, added


def values_of_an_earlier_trace(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        hidden = model.transformer.h[0].output[:, -1].save()
    hidden = hidden * 2
    with model.trace(OTHER, **where):
        model.transformer.h[1].output[:, -1] = hidden
        with torch.inference_mode():
            logits = model.lm_head.output.softmax(-1).save()
    return logits


@pytest.mark.parametrize("where", [REMOTE, {"program": True}], ids=str)
@pytest.mark.parametrize(
    "example", [tokens_of_every_step, edits_of_own_tensors, values_of_an_earlier_trace], ids=lambda example: example.__name__
)
def test_blocks_are_recorded_under_inference_mode(model: Any, example: Callable[..., Any], where: Any) -> None:
    """Inference tensors count no edits, so the values of the user's own ones are compared."""
    with torch.inference_mode():
        same(quietly(example, model, **where), quietly(example, model))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": torch.bfloat16}, r"dtype=torch.float32 \(here torch.bfloat16\)"),
        ({"attn_implementation": "eager"}, r"attn_implementation=sdpa \(here eager\)"),
    ],
)
def test_a_client_that_has_the_model_otherwise_gets_a_warning(demo: Any, options: dict[str, Any], told: str) -> None:
    """The block is recorded with the client's model, so its dtypes, and which values there are, come from there."""
    client = nnsight.LanguageModel("nnsight/demo", **options)
    with pytest.warns(UserWarning, match=told) as found:
        with client.trace(PROMPT, backend=LocalBackend(demo)):
            client.lm_head.output.save()
    assert [warning.filename for warning in found] == [__file__]


def test_the_device_of_a_lazy_model_is_that_of_its_values(demo: Any) -> None:
    """Until its weights are loaded, ``model.device`` is the meta device, on which tensors have no values."""
    client, added = nnsight.LanguageModel("nnsight/demo"), torch.arange(128.0)

    def on_its_device(model: Any, **where: Any) -> Any:
        with model.trace(PROMPT, **where):
            ones = torch.ones(128, device=model.device)
            hidden = model.transformer.h[0].output
            hidden[:, -1] += ones * torch.tensor(2.0, device=model.device) + added.to(model.device)
            hidden[:, 0] += torch.zeros_like(hidden[:, 0], device=model.device)
            logits = model.lm_head.output.to(model.device).save()
        return logits

    same(on_its_device(client, backend=LocalBackend(demo)), on_its_device(demo))
    outside = torch.ones(128, device=client.device)
    with pytest.raises(NotExpressibleError, match="Make it on the CPU"):
        with client.trace(PROMPT, backend=LocalBackend(demo)):
            client.transformer.h[0].output += outside


def test_operations_of_functions_that_operations_call_are_opened_elsewhere(demo: Any) -> None:
    """The first function is known only while the model runs. The model that runs the program has not opened any of them."""
    client, here = nnsight.LanguageModel("nnsight/demo"), nnsight.demo_model()

    def without_a_head(model: Any, **where: Any) -> Any:
        with model.trace(PROMPT, **where):
            attention = model.transformer.h[1].attn.source.attention_interface_0.source
            mask = model.transformer.source.create_causal_mask_0.source._preprocess_mask_arguments_0.output
            attention.torch_nn_functional_scaled_dot_product_attention_0.output[:, 0] = 0
            heads = attention.torch_nn_functional_scaled_dot_product_attention_0.output.save()
            logits = model.lm_head.output.save()
            length = nnsight.save(mask[3])
        return heads, logits, length

    same(without_a_head(client, backend=LocalBackend(nnsight.demo_model())), without_a_head(here))


def test_nothing_of_the_client_is_sent_but_what_is_needed(model: Any) -> None:
    kept, steering = Catch(), torch.ones(model.config.n_embd)
    with model.trace(PROMPT, backend=kept):
        model.transformer.h[1].output[:, -1] += steering
        unused = model.transformer.h[2].output * 3
        logits = model.lm_head.output.save()
    assert b"pickle" not in kept.payload and b"transformer" in kept.payload and len(kept.payload) < 4000
    assert [node["do"] for node in decode(kept.payload).nodes].count("read") == 2  # what nobody needs is left out


# -- models of one's own ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.relu(self.first(x))) * scale


@pytest.fixture
def net() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Net())


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))


def test_a_compiled_model_compiles_programs() -> None:
    torch.manual_seed(0)
    net = Net()

    def run(model: Any, factor: float, **where: Any) -> Any:
        with model.trace(X, scale=2.0, **where):
            model.first.output[:, 1:] *= factor
            first = model.first.output.save()
            applied = model.last(model.first.output).save()
            result = model.output.save()
        return first, applied, result

    compiled, before = NNsight(net, compile={"backend": "eager"}), nnsight.fx.counters.recordings
    for factor in (-3.0, 2.0):
        same(run(compiled, factor, **REMOTE), run(NNsight(net), factor))
    assert nnsight.fx.counters.recordings > before


def test_a_constant_is_sent_as_it_was_when_it_was_used(net: NNsight) -> None:
    shift = torch.ones(4)
    with net.trace(X, remote="local"):
        one = (net.first.output * 0 + shift).save()
        shift += 1
        two = (net.first.output * 0 + shift).save()
    assert one.eq(1).all() and two.eq(2).all() and shift.eq(2).all()


# -- what cannot be sent ---------------------------------------------------------------------------------------------


def deciding(model: Any) -> None:
    if model.transformer.h[0].output.sum() > 0:
        model.transformer.h[1].output[:] = 0


def writing_to_weights(model: Any) -> None:
    model.lm_head.weight[:] = model.transformer.h[0].output.sum()


def editing_late(model: Any) -> None:
    hidden = model.transformer.h[0].output
    later = model.transformer.h[1].output
    hidden[:] = 0


OUTER = torch.zeros(4)


def a_part_of_ones_own(model: Any) -> None:
    rows = torch.zeros(2, 4)
    rows[0] += model.transformer.h[0].output[0, 0, :4]


def memory_of_an_array(model: Any) -> None:
    torch.from_numpy(np.zeros(4, np.float32)).add_(model.transformer.h[0].output[0, 0, :4])


def another_structure(model: Any) -> None:
    model.transformer.h[0].attn.output = (model.transformer.h[0].attn.output[0],) * 3


REFUSED: dict[Callable[[Any], Any], str] = {
    deciding: "A condition on a tensor",
    writing_to_weights: "edits a weight in place",
    editing_late: "after the model has gone on",
    another_structure: "another structure",
    a_part_of_ones_own: "that has views, in place.*write `t",
    memory_of_an_array: "that has views, in place",
    lambda model: OUTER.add_(model.transformer.h[0].output[0, 0, :4]): "from outside, or that",
    lambda model: model.lm_head.weight.data.zero_(): "edits a weight in place",
    lambda model: model.transformer.h[0].output.mean().item(): "`item` needs values",
    lambda model: model.transformer.h[0].output.numpy(): "`numpy` needs values",
    lambda model: model.transformer.wte.weight[model.lm_head.output[0, -1].argmax()]: "needs values",
    lambda model: len((hidden := model.transformer.h[0].output)[hidden > 0]): "depends on values",
    lambda model: torch.bernoulli(model.transformer.h[0].output.sigmoid(), generator=torch.Generator()): "A generator of your own cannot",
    lambda model: torch.linalg.svd(model.transformer.h[0].output): "no operator",
    lambda model: model.transformer.h[0].output.register_hook(print): "`register_hook` cannot be sent",
}


@pytest.mark.parametrize("block", REFUSED, ids=lambda block: block.__name__)
def test_what_cannot_be_sent_is_refused_at_its_line(model: Any, block: Callable[[Any], None]) -> None:
    before = model.lm_head.weight.clone()
    with pytest.raises(NotExpressibleError, match=REFUSED[block]) as raised, model.trace(PROMPT, backend=LocalBackend(model, cuts=0)):
        block(model)
    assert f"{__file__}:" in str(raised.value)
    assert torch.equal(model.lm_head.weight, before)


def test_objects_with_tensors_in_them_are_refused(model: Any) -> None:
    class Holder:
        pass

    with pytest.raises(NotExpressibleError, match="holds a Holder that contains tensors"):
        with model.trace(PROMPT, remote="local"):
            holder = nnsight.save(Holder())
            holder.hidden = model.transformer.h[0].output


def test_functions_of_ones_own_are_refused(model: Any) -> None:
    with pytest.raises(NotExpressibleError, match="can be sent"):
        with model.trace(PROMPT, fn=model._module, remote="local"):
            logits = model.lm_head.output.save()


def test_a_module_that_writes_to_its_input_is_refused(net: NNsight) -> None:
    with pytest.raises(NotExpressibleError, match="writes to its arguments"):
        with net.trace(X, remote="local"):
            result = net.relu(net.first.output * 1).save()


def test_mistakes_of_a_block_are_raised_as_in_any_trace(model: Any) -> None:
    with pytest.raises(IndexError, match="999"), model.trace(PROMPT, remote="local"):
        entry = model.transformer.h[0].output[0, 999].save()
    with pytest.raises(OutOfOrderError), model.trace(PROMPT, remote="local"):
        later = model.transformer.h[1].output
        earlier = model.transformer.h[0].output


def test_a_failure_of_the_server_has_the_users_line(net: NNsight) -> None:
    with pytest.raises(ExecutionFailedError, match=r"index_select.*line \d+.*points outside"):
        with net.trace(X, remote="local"):
            place = net.first.output.argmax().unsqueeze(0) + 1000
            row = net.first.output.index_select(0, place).save()


# -- generations -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generating(model: Any) -> Any:
    catch = Catch()
    with model.generate(PROMPT, max_new_tokens=5, backend=catch) as tracer:
        ids = tracer.result.save()
    return catch.recorded.job


def generation(job: Any, **options: Any) -> Any:
    """Return the job of a generation with other options."""
    kwargs = {**dict(job.runs[0]["kwargs"]["dict"]), **options}
    return dataclasses.replace(job, runs=[{**job.runs[0], "kwargs": {"dict": [list(item) for item in kwargs.items()]}}])


def test_tokens_that_nobody_looks_at_are_counted(model: Any, generating: Any) -> None:
    few, many = (validate(generation(generating, max_new_tokens=tokens), model).flops for tokens in (5, 500))
    assert many > 5 * few
    with pytest.raises(InvalidProgramError, match="floating point"):
        validate(generation(generating, max_new_tokens=500), model, Limits(flops=2 * few))


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 10**9},
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"max_new_tokens": 1.5},
        {"max_length": -1},
        {"num_return_sequences": 10**7},
        {"num_beams": 10**7},
        {"do_sample": {"str": "yes"}},
        {"custom_generate": {"str": "somebody/repository"}},
        {"cache_implementation": {"str": "static"}},
        {"assistant_model": 1},
        {"streamer": 1},
        {"stopping_criteria": {"list": []}},
        {"generation_config": {"dict": []}},
        {"trust_remote_code": True},
    ],
    ids=str,
)
def test_options_of_a_generation_are_those_of_a_list(model: Any, generating: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidProgramError, match="generation"):
        execute_payload(model, encode(generation(generating, **options)))


def test_a_weight_that_is_only_saved_is_that_of_the_server(model: Any) -> None:
    with model.trace(PROMPT, remote="local"):
        saved = nnsight.save({"weight": model.lm_head.weight, "bias": model.transformer.h[0].mlp.c_fc.bias})
        hidden = model.transformer.h[0].output.save()
    assert torch.equal(saved["weight"], model._module.lm_head.weight)
    assert torch.equal(saved["bias"], model._module.transformer.h[0].mlp.c_fc.bias)
    assert hidden.shape[-1] == 32


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_a_tensor_is_multiplied_by_a_number_that_is_not_finite(model: Any, number: float) -> None:
    found = []
    for options in ({}, {"remote": "local"}):
        with model.trace(PROMPT, **options):
            hidden = model.transformer.h[0].output
            product, moved = (hidden * number).save(), (hidden + number).save()
        found.append((product, moved))
    for eager, remote in zip(*found, strict=True):
        torch.testing.assert_close(remote, eager, equal_nan=True)
