"""Random numbers of a job come from its seed: the same alone and among others, sent again, and without moving the server's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nnsight
from nnsight import NNsight
from nnsight.remote import (
    InvalidProgramError,
    Job,
    NotExpressibleError,
    decode,
    decode_results,
    encode,
    execute_payload,
)
from nnsight.remote.together import execute_payloads, kind_of

from .remoting import Catch
from .test_hostile import LIMITS, MODEL, job, op, read, ref

PROMPT = "The Eiffel Tower is in the city of"


def drawing(model: Any, prompt: str = PROMPT, **where: Any) -> Any:
    with model.trace(prompt, **where):
        hidden = model.transformer.h[0].output
        mask = torch.bernoulli(torch.full_like(hidden, 0.25)).save()
        dropped = nn.functional.dropout(hidden, 0.5).save()
        fused = torch.native_dropout(hidden, 0.5, True)[0].save()  # the operator of `dropout` on CUDA
        noise = torch.empty_like(hidden).normal_(1.0, 2.0).save()
        picked = torch.multinomial(hidden[0].softmax(-1), 3).save()
        model.transformer.h[1].output[:] += 0.1 * noise
        logits = model.lm_head.output.save()
    return hidden_of(model, prompt), mask, dropped, fused, noise, picked, logits


def hidden_of(model: Any, prompt: str) -> torch.Tensor:
    with torch.no_grad(), model.trace(prompt):
        hidden = model.transformer.h[0].output.clone().save()
    return hidden


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def payload(model: Any, prompt: str = PROMPT) -> bytes:
    kept = Catch()
    with model.trace(prompt, backend=kept):
        hidden = model.transformer.h[0].output
        mask = torch.bernoulli(hidden.sigmoid()).save()
        model.transformer.h[1].output[:] *= mask
        logits = model.lm_head.output.save()
    return kept.payload


def sampled(model: Any, **where: Any) -> Any:
    with model.generate(PROMPT, max_new_tokens=3, do_sample=True, temperature=3.0, **where) as tracer:
        ids = tracer.result.save()
    return [ids]


@pytest.mark.parametrize("draw", [drawing, sampled])
def test_a_seed_before_the_trace_makes_it_repeatable(model: Any, draw: Any) -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(draw(model, remote="local"))
    assert equal(found[0], found[1]) and not equal(found[0], found[2])
    assert not equal(found[2], draw(model, remote="local"))


def test_what_is_drawn_is_what_the_functions_say(model: Any) -> None:
    hidden, mask, *both, noise, picked, _ = drawing(model, remote="local")
    assert set(mask.unique().tolist()) == {0.0, 1.0} and mask.mean().item() == pytest.approx(0.25, abs=0.05)
    for dropped in both:
        torch.testing.assert_close(dropped, torch.where(dropped == 0, 0.0, 2 * hidden))
        assert (dropped == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert noise.mean().item() == pytest.approx(1.0, abs=0.2) and noise.std().item() == pytest.approx(2.0, abs=0.2)
    assert picked.shape == (hidden.shape[1], 3) and all(len(set(row)) == 3 for row in picked.tolist())


def test_the_numbers_are_those_of_a_generator_with_the_seed(model: Any) -> None:
    sent = payload(model)
    generator = torch.Generator().manual_seed(decode(sent).seed or 0)
    expected = torch.bernoulli(hidden_of(model, PROMPT).sigmoid(), generator=generator)
    assert torch.equal(decode_results(execute_payload(model, sent))["mask"], expected)


def test_no_generator_of_the_server_moves(model: Any) -> None:
    kept = Catch()
    with model.generate(PROMPT, max_new_tokens=2, do_sample=True, backend=kept) as tracer:
        ids = tracer.result.save()
    for sent in (payload(model), kept.payload):
        state = torch.get_rng_state()
        first, second = execute_payload(model, sent), execute_payload(model, sent)
        assert first == second and torch.equal(state, torch.get_rng_state())


def test_a_job_draws_the_same_alone_and_among_others(model: Any) -> None:
    payloads = [payload(model) for _ in range(3)]
    alone = [decode_results(execute_payload(model, sent)) for sent in payloads]
    (kind,) = {kind_of(model, sent) for sent in payloads}
    together = [decode_results(result) for result in execute_payloads(model, payloads)]  # type: ignore[arg-type]
    assert kind is not None
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"])
        assert torch.equal(one["mask"], other["mask"])
    assert not torch.equal(alone[0]["mask"], alone[2]["mask"])


def test_blocks_that_draw_nothing_move_no_generator_of_the_client(model: Any) -> None:
    before = torch.get_rng_state()
    with model.trace(PROMPT, remote="local"):
        logits = model.lm_head.output.save()
    assert torch.equal(before, torch.get_rng_state())


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 64), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.first(x)) + 0 * torch.rand_like(x[..., :1])


def test_a_model_in_training_mode_draws_from_the_job() -> None:
    torch.manual_seed(0)
    net = NNsight(Dropping())
    x, found = torch.randn(2, 4), []
    state = torch.get_rng_state()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with net.trace(x, remote="local"):
            found.append(net.output.save())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    kept = Catch()
    with net.trace(x, backend=kept):
        output = net.output.save()
    torch.set_rng_state(state)
    execute_payload(net, kept.payload)
    assert torch.equal(state, torch.get_rng_state()) and kind_of(net, kept.payload) is None
    net._module.eval()
    with net.trace(x, remote="local"):
        kept_all = net.output.save()
    torch.testing.assert_close(kept_all, net._module.first(x).detach())


def test_attention_with_dropout_is_refused(model: Any) -> None:
    with pytest.raises(NotExpressibleError, match="Attention with dropout"), model.trace(PROMPT, remote="local"):
        hidden = model.transformer.h[0].output
        nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.5)


# -- payloads that mean harm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 2**63, 2**100, 1.5, "1", None, True, [1], {"float": "nan"}])
def test_a_seed_is_a_natural_number(seed: Any) -> None:
    content = {**job(read()).content(), "seed": seed}

    class Odd(Job):
        def content(self) -> dict[str, Any]:
            return content

    made = job(read())
    with pytest.raises(InvalidProgramError):
        decode(encode(Odd(made.runs, made.nodes, made.saves, made.tensors)))


@pytest.mark.parametrize("generator", [{"str": "x"}, 1, ref(0), {"device": "model"}, [1]])
def test_a_program_names_no_generator(generator: Any) -> None:
    payload = encode(job(read(), op("aten.bernoulli.default", ref(0), generator=generator)))
    with pytest.raises(InvalidProgramError):
        execute_payload(MODEL, payload, LIMITS)


@pytest.mark.parametrize(
    "nodes",
    [
        [op("aten.full.default", [4], 1.5), op("aten.bernoulli.default", ref(0))],
        [op("aten.full.default", [4], -0.5), op("aten.bernoulli.default", ref(0))],
        [op("aten.full.default", [4], {"float": "nan"}), op("aten.bernoulli.default", ref(0))],
        [op("aten.zeros.default", [4]), op("aten.full.default", [4], 2.0), op("aten.bernoulli_.Tensor", ref(0), ref(1))],
        [op("aten.full.default", [4], -1.0), op("aten.poisson.default", ref(0))],
        [op("aten.full.default", [4], {"float": "inf"}), op("aten.multinomial.default", ref(0), 1)],
        [op("aten.full.default", [4], -1.0), op("aten.multinomial.default", ref(0), 1, True)],
        [read(), op("aten.normal_.default", ref(0))],
        [read("model.tied.output"), op("aten.uniform_.default", ref(0))],
    ],
    ids=str,
)
def test_parameters_are_looked_at_before_they_are_used(nodes: Any) -> None:
    before = MODEL._module.tied.weight.clone()
    with pytest.raises((InvalidProgramError, nnsight.remote.ExecutionFailedError)):
        execute_payload(MODEL, encode(job(*nodes)), LIMITS)
    assert torch.equal(before, MODEL._module.tied.weight)
