"""Backward passes that are sent as data give what autograd gives, and leave nothing in the model that runs them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import nnsight
from nnsight import NNsight
from nnsight.remote import (
    InvalidProgramError,
    Limits,
    NotExpressibleError,
    decode,
    decode_results,
    encode,
    execute_payload,
    validate,
)
from nnsight.remote.together import kind_of

from .remoting import Catch
from .test_hostile import IDS, LIMITS, MODEL, job, node, op, read, ref
from .test_local import OTHER, PROMPT, REMOTE, Net, X


@pytest.fixture
def net() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Net())


def parts(net: NNsight) -> tuple[Any, Any]:
    return net._module.first, net._module.last


def agree(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for found, expected in pairs:
        assert type(found) is torch.Tensor and not found.requires_grad
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected.detach())


# -- against autograd by hand ----------------------------------------------------------------------------------------


def test_a_gradient_is_that_of_autograd(net: NNsight) -> None:
    first, last = parts(net)
    with net.trace(X, **REMOTE):
        hidden = net.first.output
        with torch.enable_grad():  # changes nothing
            loss = net.output.pow(2).sum()
        with loss.backward():
            gradient = hidden.grad.save()
            doubled = (hidden.grad * 2).save()
    # The layer behind edits `hidden` in place, so its gradient is that of what it has become, as in any trace.
    relu = first(X).relu().detach().requires_grad_()
    (behind,) = torch.autograd.grad(last(relu).pow(2).sum(), relu)
    agree((gradient, behind), (doubled, 2 * behind))


def test_a_tensor_of_ones_own_has_a_gradient(net: NNsight) -> None:
    first, last = parts(net)
    shift = torch.randn(4, requires_grad=True)
    last((first(X) * shift).relu()).sum().backward(inputs=[shift])
    with net.trace(X, **REMOTE):
        net.first.output = net.first.output * shift
        with net.output.sum().backward():
            gradient = shift.grad.save()
    agree((gradient, shift.grad))


def test_a_tensor_that_requires_gradients_is_used_in_the_block_of_a_pass(net: NNsight) -> None:
    _, last = parts(net)
    probe = torch.randn(4, requires_grad=True)
    relu = net._module.first(X).relu()
    expected = torch.autograd.grad(last(relu).pow(2).sum(), relu)[0] @ probe
    with net.trace(X, **REMOTE):
        hidden = net.relu.output
        with net.output.pow(2).sum().backward():
            found = (hidden.grad @ probe).save()
    agree((found, expected))


def test_a_weight_has_a_gradient_and_keeps_none(net: NNsight) -> None:
    _, last = parts(net)
    expected = torch.autograd.grad(net._module(X).pow(2).sum(), last.weight)[0]
    for model in (net, NNsight(net._module, compile={"backend": "eager"})):  # a compiled model runs such programs eagerly
        with model.trace(X, **REMOTE):
            with model.output.pow(2).sum().backward():
                gradient = model.last.weight.grad.save()
        agree((gradient, expected))
    assert all(weight.grad is None for weight in net._module.parameters())


def test_an_edit_in_place_and_what_was_made_of_it(net: NNsight) -> None:
    """The gradient at an edited value has the part that flows through what the block made of it, too."""
    first, last = parts(net)
    hidden = first(X) * 2
    loss = last(hidden).sum() + hidden.pow(2).sum()
    (expected,) = torch.autograd.grad(loss, hidden)
    plain = NNsight(nn.Sequential(first, last))
    with plain.trace(X, **REMOTE):
        hidden = plain[0].output
        hidden[:] *= 2
        squares = hidden.pow(2).sum()
        with (plain.output.sum() + squares).backward():
            gradient = hidden.grad.save()
    agree((gradient, expected))


def test_a_frozen_model_lets_gradients_through_to_what_requires_them(net: NNsight) -> None:
    _, last = parts(net)
    net._module.requires_grad_(False)
    relu = net._module.first(X).relu().requires_grad_()
    (expected,) = torch.autograd.grad(last(relu).pow(2).sum(), relu)
    with net.trace(X, **REMOTE):
        hidden = net.relu.output
        hidden.requires_grad_()
        with net.output.pow(2).sum().backward():
            gradient = hidden.grad.save()
    agree((gradient, expected))
    assert not any(weight.requires_grad for weight in net._module.parameters())


def test_a_second_derivative(net: NNsight) -> None:
    first, last = parts(net)
    hidden = first(X)
    (once,) = torch.autograd.grad(last(hidden).pow(3).sum(), hidden, create_graph=True)
    (expected,) = torch.autograd.grad(once.pow(2).sum(), hidden)
    plain = NNsight(nn.Sequential(first, last))
    with plain.trace(X, **REMOTE):
        hidden = plain[0].output
        with plain.output.pow(3).sum().backward(create_graph=True):
            once = hidden.grad
        with once.pow(2).sum().backward():
            twice = hidden.grad.save()
    agree((twice, expected))


# -- against ordinary traces -----------------------------------------------------------------------------------------


def of_several_layers(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        hidden = [layer.output for layer in model.transformer.h]
        logits = model.lm_head.output[:, -1]
        gradients = nnsight.save([])
        with (logits[:, 5] - logits[:, 6]).sum().backward():
            for tensor in reversed(hidden):
                gradients.append(tensor.grad)
                gradients.append((tensor * tensor.grad.abs()).sum(-1))
    return gradients


def of_two_passes(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        early, late = model.transformer.h[0].output, model.transformer.h[2].output
        logits = model.lm_head.output
        with logits[:, -1].logsumexp(-1).sum().backward(retain_graph=True):
            late.grad[:, :2] *= 0
            one = early.grad.save()
        with logits.backward(gradient=torch.ones_like(logits)):
            late.grad = late.grad.flip(1)
            two = early.grad.save()
        both = (one + two).save()
    return one, two, both


def of_invokes(model: Any, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        with tracer.invoke(PROMPT):
            hidden = model.transformer.h[1].output
            with model.lm_head.output[:, -1].logsumexp(-1).sum().backward(retain_graph=True):
                one = hidden.grad.save()
        with tracer.invoke([OTHER, PROMPT]):
            early, late = model.transformer.h[0].output, model.transformer.h[1].output
            with model.lm_head.output.pow(2).mean().backward():
                late.grad = late.grad * 2
                two = early.grad.save()
    return one, two


def of_what_a_module_made(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        hidden = model.transformer.h[1].output.detach().requires_grad_()
        probability = model.lm_head(model.transformer.ln_f(hidden)).softmax(-1)[0, -1, 3]
        with probability.backward():
            gradient = hidden.grad.save()
    return gradient


def of_a_session(model: Any, **where: Any) -> Any:
    with model.session(**where):
        with model.trace(PROMPT):
            clean = model.transformer.h[1].output
            target = model.lm_head.output[:, -1]
        with model.trace(OTHER):
            hidden = model.transformer.h[1].output
            loss = (model.lm_head.output[:, -1] - target).pow(2).sum()
            with loss.backward():
                one = hidden.grad.save()
                two = clean.grad.save()
    return one, two


def behind_no_grad(model: Any, **where: Any) -> Any:
    with model.trace(PROMPT, **where):
        hidden = model.transformer.h[1].output
        with torch.no_grad():
            direction = hidden / hidden.norm(dim=-1, keepdim=True)
            own = torch.zeros_like(hidden)
            own += hidden
            later = model.transformer.h[2].output
        model.lm_head.output = model.lm_head.output * (later * direction + own).sum()
        with model.lm_head.output[:, -1].logsumexp(-1).sum().backward():
            one = later.grad.save()
            two = hidden.grad.save()
    return one, two


def between_traces(model: Any, **where: Any) -> Any:
    """The value that is computed between the traces has no gradient on the server, and none is asked for."""
    with model.session(**where):
        with model.trace(PROMPT):
            target = model.lm_head.output[:, -1]
        target = target.float() * 2
        with model.trace(OTHER):
            hidden = model.transformer.h[1].output
            with (model.lm_head.output[:, -1] - target).pow(2).sum().backward():
                gradient = hidden.grad.save()
    return gradient


@pytest.mark.parametrize(
    "example",
    [of_several_layers, of_two_passes, of_invokes, of_what_a_module_made, of_a_session, behind_no_grad, between_traces],
    ids=lambda example: example.__name__,
)
def test_gradients_of_a_language_model(model: Any, example: Any) -> None:
    here = example(model)
    model._module.zero_grad()
    there = example(model, **REMOTE)
    assert all(weight.grad is None for weight in model._module.parameters())
    here, there = (value if isinstance(value, (list, tuple)) else [value] for value in (here, there))
    assert len(here) == len(there)
    agree(*zip(there, here, strict=True))


def payload_of(model: Any, prompt: str = PROMPT) -> bytes:
    kept = Catch()
    with model.trace(prompt, backend=kept):
        hidden = model.transformer.h[0].output
        weight = model.lm_head.weight
        with model.lm_head.output[:, -1].logsumexp(-1).sum().backward():
            gradient = hidden.grad.save()
            of_weight = weight.grad.save()  # that of the embedding, too, so it comes last
    return kept.payload


def test_passes_of_several_threads_do_not_see_each_other(model: Any) -> None:
    payloads = [payload_of(model), payload_of(model, OTHER)]
    assert kind_of(model, payloads[0]) is None  # such jobs share no forward pass
    alone = [decode_results(execute_payload(model, payload)) for payload in payloads]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda payload: decode_results(execute_payload(model, payload)), payloads * 4))
    for found, expected in zip(together, alone * 4, strict=True):
        agree(*((found[name], expected[name]) for name in expected))
    assert all(not weight._backward_hooks for weight in model._module.parameters())


def test_what_nobody_reads_is_not_differentiated(model: Any) -> None:
    kept = Catch()
    with model.trace(PROMPT, backend=kept):
        hidden = model.transformer.h[0].output
        hidden.requires_grad_()
        with model.lm_head.output.sum().backward():
            hidden.grad[:] = 0
        logits = model.lm_head.output.save()
    assert [node["do"] for node in kept.recorded.job.nodes] == ["read"]


def test_what_a_pass_keeps_and_computes_is_counted(model: Any) -> None:
    payload = payload_of(model)
    plain = Catch()
    with model.trace(PROMPT, backend=plain):
        total = model.lm_head.output[:, -1].logsumexp(-1).sum().save()
    few, many = validate(decode(plain.payload), model), validate(decode(payload), model)
    assert many.flops > 2 * few.flops and many.tensor_bytes > 10 * few.tensor_bytes
    with pytest.raises(InvalidProgramError, match="more bytes than the limit"):
        validate(decode(payload), model, Limits(total_bytes=many.tensor_bytes // 2))


# -- what cannot be sent, and what is wrong --------------------------------------------------------------------------


def bare(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        net.output.sum().backward()


def nested(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        loss = net.output.sum()
        with loss.backward(retain_graph=True):
            with loss.backward():
                pass


def with_inputs(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        hidden = net.relu.output
        with net.output.sum().backward(inputs=[hidden]):
            pass


def under_no_grad(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        hidden = net.relu.output
        with torch.no_grad():
            hidden *= 2
        with net.output.sum().backward():
            gradient = hidden.grad.save()


def a_trace_under_no_grad(net: NNsight) -> None:
    with torch.no_grad(), net.trace(X, **REMOTE):
        hidden = net.relu.output
        with net.output.sum().backward():
            gradient = hidden.grad.save()


def by_a_function(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        hidden = net.relu.output
        gradient = torch.autograd.grad(net.output.sum(), hidden)


def of_a_weight(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        net.last.weight.requires_grad_()


def of_something_before(net: NNsight) -> None:
    own = torch.ones(4, requires_grad=True)
    with net.trace(X, **REMOTE):
        net.first.output = net.first.output * (own * 2)
        with net.output.sum().backward():
            gradient = own.grad.save()


def asked_whether_it_requires_gradients(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        hidden = net.relu.output
        if not hidden.requires_grad:
            hidden.requires_grad_()


def with_respect_to_a_value_before_values(net: NNsight) -> None:
    with net.trace(X, **REMOTE):
        hidden = net.relu.output
        scale = torch.linalg.svdvals(hidden)[0]
        with (net.output.sum() * scale).backward():
            gradient = hidden.grad.save()


REFUSED = {
    with_respect_to_a_value_before_values: "`linalg_svdvals` before was done with values",
    bare: "bare `.backward",
    nested: "in the block of another",
    with_inputs: "`inputs=`",
    under_no_grad: "is edited in place under `torch.no_grad",
    a_trace_under_no_grad: "the trace is under `torch.no_grad",
    by_a_function: "`grad` cannot be sent",
    of_a_weight: "A weight of the model cannot",
    of_something_before: "a tensor of your own",
    asked_whether_it_requires_gradients: "`requires_grad` depends on the gradients of the run",
}


@pytest.mark.parametrize("block", REFUSED, ids=lambda block: block.__name__)
def test_what_cannot_be_sent_is_refused_at_its_line(net: NNsight, block: Any) -> None:
    with pytest.raises(NotExpressibleError, match=REFUSED[block]) as raised:
        block(net)
    assert f"{__file__}:" in str(raised.value)


def test_mistakes_are_those_of_any_trace(net: NNsight) -> None:
    with pytest.raises(ValueError, match="the model runs before the pass"), net.trace(X, **REMOTE):
        hidden = net.first.output
        with hidden.sum().backward():
            output = net.last.output
    with pytest.raises(ValueError, match="shape"), net.trace(X, **REMOTE):
        hidden = net.relu.output
        with net.output.sum().backward():
            hidden.grad = torch.ones(3)
    with pytest.raises(TypeError, match="replaced by a float"), net.trace(X, **REMOTE):
        hidden = net.relu.output
        with net.output.sum().backward():
            hidden.grad = 0.5
    with pytest.raises(InvalidProgramError, match="does not require gradients"), net.trace(X, **REMOTE):
        given = net.first.input
        with net.output.sum().backward():
            gradient = given.grad.save()
    with pytest.raises(InvalidProgramError, match="does not flow through"), net.trace(X, **REMOTE):
        hidden = net.relu.output
        apart = hidden * 2
        with net.output.sum().backward():
            gradient = apart.grad.save()
    with pytest.raises(InvalidProgramError, match=r"line \d+.*second time"), net.trace(X, **REMOTE):
        hidden = net.relu.output
        loss = net.output.pow(2).sum()
        with loss.backward():
            one = hidden.grad.save()
        with loss.backward():
            two = hidden.grad.save()


# -- payloads that mean harm -----------------------------------------------------------------------------------------

HIDDEN = read()


def backward(**more: Any) -> dict[str, Any]:
    return node("backward", **{"value": ref(1), **more})


GRAD = node("grad", wrt=ref(0))
END = node("end")
SQUARES = op("aten.sum.default", ref(0))

HOSTILE = {
    "without end": [HIDDEN, SQUARES, backward()],
    "end alone": [HIDDEN, END],
    "end twice": [HIDDEN, SQUARES, backward(), END, END],
    "a pass within a pass": [HIDDEN, SQUARES, backward(), backward(), END, END],
    "a gradient outside": [HIDDEN, GRAD],
    "a gradient behind the end": [HIDDEN, SQUARES, backward(), END, GRAD],
    "a gradient written outside": [HIDDEN, node("set_grad", wrt=ref(0), value=ref(0))],
    "a read within": [HIDDEN, SQUARES, backward(), read("model.output"), END],
    "a write within": [HIDDEN, SQUARES, backward(), node("write", site="model.output", at=0, leaf=0, value=ref(0)), END],
    "a barrier within": [HIDDEN, SQUARES, backward(), node("barrier", id=0, of=1), END],
    "a stop within": [HIDDEN, SQUARES, backward(), node("stop"), END],
    "a skip within": [HIDDEN, SQUARES, backward(), node("skip", site="model.norm.input", at=0, value=ref(0)), END],
    "requiring within": [HIDDEN, SQUARES, backward(), node("requires_grad", value=ref(0)), END],
    "of no tensor": [HIDDEN, SQUARES, backward(value=None), END],
    "of a number": [HIDDEN, SQUARES, backward(value=1), END],
    "of what comes later": [HIDDEN, SQUARES, backward(value=ref(4)), GRAD, END],
    "of what makes nothing": [HIDDEN, SQUARES, backward(value=ref(2)), END],
    "with a gradient that is text": [HIDDEN, SQUARES, backward(gradient={"str": "x"}), GRAD, END],
    "with a gradient of another shape": [HIDDEN, SQUARES, backward(gradient=ref(0)), GRAD, END],
    "retain_graph a number": [HIDDEN, SQUARES, backward(retain_graph=1), GRAD, END],
    "create_graph text": [HIDDEN, SQUARES, backward(create_graph="yes"), GRAD, END],
    "with inputs": [HIDDEN, SQUARES, backward(inputs=[ref(0)]), GRAD, END],
    "of a matrix": [HIDDEN, op("aten.mul.Scalar", ref(0), 2), backward(), GRAD, END],
    "with respect to a list": [HIDDEN, SQUARES, backward(), node("grad", wrt={"list": [ref(0)]}), END],
    "with respect to indices": [node("const", tensor="c"), op("aten.sum.default", ref(0)), backward(), GRAD, END],
    "a gradient of another type": [HIDDEN, SQUARES, backward(), node("set_grad", wrt=ref(0), value=ref(1)), END],
    "a gradient twice": [
        HIDDEN,
        op("aten.mul.Scalar", ref(0), 2),
        op("aten.sum.default", ref(1)),
        node("backward", value=ref(2)),
        node("grad", wrt=ref(1)),
        node("grad", wrt=ref(0)),
        node("grad", wrt=ref(1)),
        END,
    ],
    "a weight that would require gradients": [node("weight", name="scale"), node("requires_grad", value=ref(0)), backward(), END],
    "a view of a weight": [node("weight", name="scale"), op("aten.select.int", ref(0), 0, 0), node("requires_grad", value=ref(1))],
    "a weight as an activation": [read("model.tied.output"), op("aten.detach.default", ref(0)), node("requires_grad", value=ref(1))],
    "indices that would require gradients": [node("const", tensor="c"), node("requires_grad", value=ref(0))],
    "a leaf edited in place": [
        op("aten.ones.default", [4]),
        node("requires_grad", value=ref(0)),
        op("aten.mul_.Scalar", ref(0), 2),
        op("aten.sum.default", ref(0)),
        node("backward", value=ref(3)),
        node("grad", wrt=ref(0)),
        END,
    ],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pass_is_refused(name: str) -> None:
    before = {name: (weight.clone(), weight.requires_grad) for name, weight in MODEL._module.state_dict(keep_vars=True).items()}
    nodes = HOSTILE[name]
    tensors = {"c": IDS} if any(item["do"] == "const" for item in nodes) else {}
    payload = encode(job(*nodes, saves={"x": ref(0)}, **tensors))
    with pytest.raises(InvalidProgramError):
        execute_payload(MODEL, payload, LIMITS)
    for key, weight in MODEL._module.state_dict(keep_vars=True).items():
        assert weight.equal(before[key][0]) and weight.requires_grad is before[key][1] and weight.grad is None


def test_the_pass_of_the_hostile_ones_is_fine_as_such() -> None:
    payload = encode(job(HIDDEN, SQUARES, backward(), GRAD, END, saves={"x": ref(3)}))
    assert decode_results(execute_payload(MODEL, payload, LIMITS))["x"].eq(1).all()


def test_many_passes_cost_what_they_compute() -> None:
    heavy = [op("aten.ones.default", [512, 512]), node("requires_grad", value=ref(0)), op("aten.mm.default", ref(0), ref(0))]
    heavy += [op("aten.sum.default", ref(2))]
    for _ in range(20):
        number = len(heavy)
        heavy += [node("backward", value=ref(3), retain_graph=True), node("grad", wrt=ref(0)), END]
        assert heavy[number]["do"] == "backward"
    with pytest.raises(InvalidProgramError, match="floating point"):
        execute_payload(MODEL, encode(job(*heavy, saves={"x": ref(3)})), LIMITS)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_block_has_the_grad_mode_of_the_trace(net: NNsight, enabled: bool) -> None:
    with torch.set_grad_enabled(enabled), net.trace(X, **REMOTE):
        leaf = net.relu.output.detach().requires_grad_()
        found = [torch.is_grad_enabled(), leaf.requires_grad].save()
        with torch.no_grad():
            found.append(torch.is_grad_enabled())
            with torch.enable_grad():
                found.append(torch.is_grad_enabled())
        net.last.output[:] = leaf.sum()
        found.append(torch.is_grad_enabled())
    assert found == [enabled, True, False, True, enabled]
