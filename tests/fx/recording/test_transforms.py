"""``torch.func``, ``torch.vmap`` and ``torch.where`` in a block stay in the graph, and may still ask for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from nnsight import NNsight, fx

from ...conftest import Hooks

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
Log = list[Any]
probe = torch.nn.Linear(4, 4)


@pytest.fixture(scope="module")
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), compile={"backend": "eager"})


def chosen(h: Any, log: Log) -> Any:
    return torch.where(h.sum() > 0, h * 2, h * 3)


def mapped(h: Any, log: Log) -> Any:
    return torch.vmap(lambda row: row * row.sum())(h)


def mapped_around_the_hidden_state(h: Any, log: Log) -> Any:
    return torch.vmap(lambda row: row * h.mean() + row.argmax())(X) + h


def mapped_with_randomness(h: Any, log: Log) -> Any:
    return torch.vmap(lambda row: row + torch.rand(4), randomness="different")(h) + torch.rand(4)


def gradient(h: Any, log: Log) -> Any:
    return torch.func.grad(lambda x: (x**3).sum())(h)


def gradient_of_each_row(h: Any, log: Log) -> Any:
    return torch.vmap(torch.func.grad(lambda row: (row**2).sum() * row[0]))(h)


def gradient_of_parameters(h: Any, log: Log) -> Any:
    parameters = {name: value.detach() for name, value in probe.named_parameters()}

    def loss(parameters: Any) -> Any:
        return (torch.func.functional_call(probe, parameters, (h,)) ** 2).sum()

    return h @ torch.func.grad(loss)(parameters)["weight"]


def jacobians(h: Any, log: Log) -> Any:
    def columns(x: Any) -> Any:
        return (x**2).sum(0)

    return h + torch.func.jacrev(columns)(h).sum() + torch.func.hessian(lambda x: (x**3).sum())(h[0]).sum()


def branch_within(h: Any, log: Log) -> Any:
    def loss(x: Any) -> Any:
        log.append("loss")
        return (x**2).sum() if x.sum() > -100 else x.sum()

    return torch.func.grad(loss)(h) + h


def value_of_another_tensor_within(h: Any, log: Log) -> Any:
    doubled = h * 2
    changed = torch.vmap(lambda row: row * doubled.sum().item() + doubled[0])(h)
    changed = changed + doubled + h
    log.append((type(doubled) is torch.Tensor, type(h) is torch.Tensor))
    return changed


#: What is transformed, and how often the graph is cut for it.
TRANSFORMS: list[tuple[Callable[[Any, Log], Any], int]] = [
    (chosen, 0), (mapped, 0), (mapped_around_the_hidden_state, 0), (mapped_with_randomness, 0),
    (gradient, 0), (gradient_of_each_row, 0), (gradient_of_parameters, 0),
    (jacobians, 0), (branch_within, 1), (value_of_another_tensor_within, 1),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(("change", "cuts"), TRANSFORMS, ids=lambda item: getattr(item, "__name__", ""))
def test_a_transform(model: NNsight, change: Callable[[Any, Log], Any], cuts: int) -> None:
    module = model._module

    def run(function: Callable[[Log], Any]) -> tuple[Any, Log]:
        log: Log = []
        module.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            out = function(log)
        out.pow(2).sum().backward()
        return (out.detach(), [parameter.grad for parameter in module.parameters()]), log

    def traced(compile: bool, log: Log) -> Any:
        nonlocal tracer
        with model.trace(X, compile=compile) as tracer:
            model[1].output = change(model[1].output, log)
            out = model.output.save()
        return out

    tracer: Any = None
    (out, gradients), log = run(lambda log: Hooks(module).output("1", lambda out: change(out, log))(X))
    for compile in (False, True, True):
        fx.counters.reset()
        (found, its_gradients), its_log = run(lambda log: traced(compile, log))  # noqa: B023
        torch.testing.assert_close(found, out, rtol=0.0, atol=0.0)
        for one, other in zip(its_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other)
        assert its_log == log
    assert len(tracer.report.breaks) == cuts
    assert fx.counters.recordings == fx.counters.compiles == 0, "the second run is known"
    assert not torch.equal(out, module(X))


@pytest.mark.slow
def test_transforms_of_lowered_graphs(model: NNsight) -> None:
    lowered = NNsight(model._module, compile={"backend": "inductor", "fullgraph": True})
    module = model._module
    for change in (mapped, gradient_of_each_row, jacobians):
        with torch.no_grad():
            expected = module[2](change(module[1](module[0](X)), []))
            for _ in range(2):
                with lowered.trace(X):
                    lowered[1].output = change(lowered[1].output, [])
                    out = lowered.output.save()
                torch.testing.assert_close(out, expected)


# -- torch.cond, torch.while_loop and torch.scan ------------------------------------------------------------------------


def both_ways(h: Any, log: Log) -> Any:
    return torch.cond(h.sum() > 0, lambda x: x * 2, lambda x: x * 3 + probe.bias.detach(), (h,))


def failing_if_not_chosen(h: Any, log: Log) -> Any:
    return torch.cond(h.sum() > -100, lambda: h * 2, lambda: h.gather(1, torch.full((3, 4), 99)))


def looping(h: Any, log: Log) -> Any:
    return while_loop(lambda x: x.norm() > 0.5, lambda x: (x * 0.5,), (h,))[0]


def halved(h: Any) -> Any:
    while h.norm() > 0.5:
        h = h * 0.5
    return h


def scanning(h: Any, log: Log) -> Any:
    """Carries on a sum, and gives what it was before; the other way round, too."""
    factor = h.detach().abs().max() * 0.0 + 2.0
    last, sums = scan(lambda carry, row: (carry + row * factor, carry), torch.zeros(4), h)
    last_back, sums_back = scan(lambda carry, row: (carry * row, row), torch.ones(4), h, reverse=True)
    return sums + last + sums_back + last_back


def scanned(h: Any) -> Any:
    last, sums, last_back = torch.zeros(4), [], torch.ones(4)
    for row in h:
        sums.append(last)
        last = last + row * 2.0
    for row in reversed(h):
        last_back = last_back * row
    return torch.stack(sums) + last + h + last_back


#: Blocks, what they do by hand, and why the graph is cut.
CONTROL: list[tuple[Callable[[Any, Log], Any], Callable[[Any], Any], str]] = [
    (both_ways, lambda h: h * 2 if h.sum() > 0 else h * 3 + probe.bias.detach(), "`torch.cond` runs Python"),
    (failing_if_not_chosen, lambda h: h * 2, "`torch.cond` runs Python"),
    (looping, halved, "`torch.while_loop` runs Python"),
    (scanning, scanned, "`torch.scan` runs Python"),
]


@pytest.mark.parametrize(("change", "by_hand", "reason"), CONTROL, ids=lambda item: getattr(item, "__name__", ""))
def test_control_flow_of_torch(model: NNsight, change: Callable[[Any, Log], Any], by_hand: Callable[[Any], Any], reason: str) -> None:
    """It cuts the graph, with the reason, and is right."""
    for x in (X, X * -3.0, X):
        expected = Hooks(model._module).output("1", by_hand)(x)
        for _ in range(2):
            fx.counters.reset()
            with model.trace(x) as tracer:
                model[1].output = change(model[1].output, [])
                out = model.output.save()
            torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0)
            assert out.requires_grad
        (cut,) = tracer.report.breaks
        assert reason in cut.reason
        assert fx.counters.recordings == fx.counters.compiles == 0, "the second run is known"


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # linearize does so on plain tensors, too
def test_what_torch_traces_itself_is_refused(model: NNsight) -> None:
    """``torch.func.linearize`` would keep what it sees of a tensor without a value; without compilation it works."""

    def linearized(h: Any) -> Any:
        value, tangent = torch.func.linearize(torch.sin, h)
        return value + tangent(torch.ones_like(h))

    with pytest.raises(NotImplementedError, match=r"test_transforms.*`torch.func.jvp`"), torch.no_grad(), model.trace(X):
        model[1].output = linearized(model[1].output)
    with torch.no_grad(), model.trace(X, compile=False):
        model[1].output = linearized(model[1].output)
        out = model.output.save()
    with torch.no_grad():
        torch.testing.assert_close(out, Hooks(model._module).output("1", lambda h: h.sin() + h.cos())(X))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flexible_attention_cuts_the_graph(model: NNsight) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attended(h: Any) -> Any:
        heads = h.reshape(1, 1, 3, 4).repeat(1, 1, 1, 4)
        return flex_attention(heads, heads, heads, score_mod=lambda score, b, head, i, j: score * 2 + i - j)[0, 0, :, :4]

    def by_hand(h: Any) -> Any:
        heads, place = h.repeat(1, 4), torch.arange(3)
        scores = heads @ heads.T / 4.0 * 2 + place[:, None] - place
        return (scores.softmax(-1) @ heads)[:, :4]

    with torch.no_grad():
        expected = Hooks(model._module).output("1", by_hand)(X)
        for compile in (False, True, True):
            with model.trace(X, compile=compile) as tracer:
                model[1].output = attended(model[1].output)
                out = model.output.save()
            torch.testing.assert_close(out, expected)
    assert len(tracer.report.breaks) == 1
