"""Compiled backward passes: lowered when they first run, with gradients as autograd without a compiler gives them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import sympy
import torch
from torch._inductor import compile_fx

import nnsight
from nnsight.fx.lowering import backends


class Block(torch.nn.Module):
    """A residual block whose sizes matter to its backward pass: reductions over the length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each graph that Inductor lowers is a backward pass."""
    found: list[bool] = []
    inner = compile_fx.compile_fx_inner

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(bool(kwargs.get("is_backward")))
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", counted)
    return found


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return found


@pytest.mark.slow  # Inductor
def test_a_backward_pass_of_symbolic_sizes_is_lowered_when_it_runs(lowered: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(Block(), torch.nn.Linear(8, 3))
    plain, model = copy.deepcopy(net), nnsight.NNsight(net, compile=True)

    def run(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length))
        with model.trace(given):
            hidden = model[0].output.save()
            result = model.output.save()
        torch.testing.assert_close(hidden, plain[0](given))
        return result, plain(given)

    for length in (5, 7):
        run(length)
    assert lowered and not any(lowered)

    # The last length is more than Inductor assumes when it lowers the pass for another one.
    for length in (9, 2500):
        result, expected = run(length)
        result.square().mean().backward()
        expected.square().mean().backward()
        torch.testing.assert_close(gradients(net), gradients(plain))
        backward = lowered.count(True)
    assert backward == lowered.count(True) > 0
    assert not [record for record in caplog.records if "backward" in record.getMessage()], "nothing is said of the early lowering"


def test_a_backward_pass_that_runs_node_by_node_copies_for_views() -> None:
    """Inductor chooses the strides of what its code computes. Node by node, a tensor can have strides that torch's `view` does not take."""
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    expanded = graph.call_function(torch.ops.aten.expand.default, (given, [2, 4, 3]))
    graph.output(graph.call_function(torch.ops.aten.view.default, (expanded, [8, 3])))
    backward = backends._GuardedBackward(lambda _: None, torch.fx.GraphModule({}, graph), [torch.zeros(2, 1, 3)], [sympy.false])
    gradient = torch.arange(6.0).view(2, 1, 3)
    assert torch.equal(backward([gradient]), gradient.repeat(1, 4, 1).view(8, 3))


class Prefixed(torch.nn.Module):
    """A learned token in front, and learned positions: for a batch of one, their gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.token = torch.nn.Parameter(torch.randn(1, 1, 4))
        self.positions = torch.nn.Parameter(torch.randn(1, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), self.first(x)), 1)
        return self.second(x + self.positions).tanh()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_that_are_views_of_one_tensor_are_added_up_apart(backend: str) -> None:
    """Torch adds the second gradient of one parameter into the memory of the other's. Here, neither loses a backward pass."""
    torch.manual_seed(0)
    net, x = Prefixed(), torch.randn(1, 3, 4)
    plain, model = copy.deepcopy(net), nnsight.NNsight(net, compile={"backend": backend})
    out = plain(x)
    for loss in (out.sum(), out.sin().sum(), out.sum() * 0.5):
        loss.backward(retain_graph=True)
    with model.trace(x):
        hidden = model.first.output
        out = model.output.save()
        with out.sum().backward(retain_graph=True):
            hidden.grad.save()
        out.sin().sum().backward(retain_graph=True)
    (out.sum() * 0.5).backward()
    torch.testing.assert_close(gradients(net), gradients(plain))


class Shortcut(torch.nn.Module):
    """A residual as in a ResNet: the sum is made in place, and the tensor that is edited is made before the other branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.main = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.shortcut = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        new = self.main(hidden)
        new += self.shortcut(hidden)
        return new.relu()


@pytest.mark.parametrize("training", [False, True])
def test_the_gradient_of_the_other_branch_of_a_residual_in_place(training: bool) -> None:
    torch.manual_seed(0)
    net, x = Shortcut().train(training), torch.randn(3, 4)
    plain, model = copy.deepcopy(net), nnsight.NNsight(net, compile={"backend": "aot_eager"})
    held: list[torch.Tensor] = []
    plain.shortcut.register_forward_hook(lambda _, __, out: held.append(out))
    out = plain(x)
    held[0].retain_grad()
    out.square().sum().backward()
    with model.trace(x) as tracer:
        hidden = model.shortcut.output
        with model.output.square().sum().backward():
            gradient = hidden.grad.save()
    assert not tracer.report.notes, "it is compiled"
    torch.testing.assert_close(gradient, held[0].grad)
    torch.testing.assert_close(gradients(net), gradients(plain))


def test_a_value_that_a_product_keeps_for_its_gradient_is_edited_behind_it() -> None:
    """As with an autoencoder whose error is kept: autograd refuses the backward pass, and the forward pass is compiled all the same."""
    torch.manual_seed(0)
    net, decode = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.Linear(4, 4)
    model = nnsight.NNsight(net, compile={"backend": "aot_eager", "dynamic": True})
    x = torch.randn(3, 4)
    with model.trace(x) as tracer:
        features = model[0].output.relu()
        error = model[0].output - decode(features)
        features[:, 1] = 2.0
        model[0].output = decode(features) + error
        out = model.output.save()
    assert not tracer.report.notes, "it is compiled"
    features = net[0](x).relu()
    edited = features.clone()
    edited[:, 1] = 2.0
    torch.testing.assert_close(out, (decode(edited) + net[0](x) - decode(features)).tanh())


class Experts(torch.nn.Module):
    """Adds the results of its parts in place, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        out.index_add_(0, torch.tensor([0, 1]), self.one(hidden[:2]))
        out[:, 4:] += self.other(hidden)[:, 4:]
        return out


def whole(model: Any, value: torch.Tensor) -> None:
    model[2].output[:] = value


def part(model: Any, value: torch.Tensor) -> None:
    model[2].output[:, :4] = value[:, :4]


def added(model: Any, value: torch.Tensor) -> None:
    model[2].output += value


def added_to_a_part(model: Any, value: torch.Tensor) -> None:
    model[2].output[-1] += value[-1]


def copied(model: Any, value: torch.Tensor) -> None:
    model[2].output.copy_(value)


def through_views(model: Any, value: torch.Tensor) -> None:
    hidden = model[2].output
    heads = hidden.view(3, 2, 4)
    first = heads[:, 0]
    first[:] = value[:, :4]
    heads[:, 1] *= value.view(3, 2, 4)[:, 0]
    assert hidden.shape == (3, 8)


def as_an_input(model: Any, value: torch.Tensor) -> None:
    model[3].input[:] = value


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_held", [False, True], ids=["", "held"])
@pytest.mark.parametrize("put", [whole, part, added, added_to_a_part, copied, through_views, as_an_input])
def test_the_gradient_of_a_tensor_that_goes_on_in_an_edit_in_place(put: Any, is_held: bool, backend: str) -> None:
    """Latents have a penalty of their own, and their reconstruction is written in place: the gradient has both parts.

    The warnings of a graph that runs uncompiled would be errors here.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.GELU(), Experts())
    given, weight = torch.randn(3, 8), torch.randn(8, 16)

    def run(compile: Any) -> list[torch.Tensor]:
        model = nnsight.NNsight(net, compile=compile)
        with model.trace(given):
            hidden = model[2].output
            latents = torch.relu(hidden @ weight)
            if not is_held:
                del hidden
            put(model, latents @ weight.T)
            expert = model[4].one.output
            loss = model.output.pow(2).sum() + 0.1 * latents.abs().sum() + expert.sum()
            with loss.backward():
                found = [expert.grad.clone(), latents.grad.clone()].save()
        return list(found)

    for found, expected in zip(run({"backend": backend}), run(False), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kept", ["detached", "attached"])
@pytest.mark.parametrize("used", [False, True], ids=["", "used"])
@pytest.mark.filterwarnings("ignore:In this compiled trace")
def test_values_are_kept_in_a_tensor_that_was_made_before(backend: str, kept: str, used: bool) -> None:
    """As attribution patching does for all edges: each location is written to the buffer, and then the gradients are read."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(4, 4), torch.nn.Tanh())))
    factor, x = torch.ones(3, 4, requires_grad=True), torch.randn(3, 4)

    def run(model: Any, buffer: torch.Tensor) -> tuple[Any, ...]:
        with model.trace(x) as tracer:
            held = []
            for place in range(3):
                hidden = model[2 * place].output
                held.append(hidden)
                buffer[place] = hidden.detach() if kept == "detached" else hidden
            loss = model.output.sum()
            if used:
                loss = loss + (buffer[1] * factor).sum()
            with loss.backward(retain_graph=True):
                found = [hidden.grad.clone() for hidden in reversed(held)].save()
        return found, buffer.detach().clone(), tracer.report

    *expected, _ = run(nnsight.NNsight(net), torch.zeros(3, 3, 4))
    *found, report = run(nnsight.NNsight(net, compile={"backend": backend}), torch.zeros(3, 3, 4))
    torch.testing.assert_close(found, expected)
    assert not report.notes or kept == "attached", "it is compiled"


def added_by_index(value: torch.Tensor) -> torch.Tensor:
    value[..., torch.tensor([2, 0])] += 10.0
    return value


def multiplied_by_list(value: torch.Tensor) -> torch.Tensor:
    value[:, [0, 1]] *= 3.0
    return value


def picked(value: torch.Tensor) -> torch.Tensor:
    chosen = value[:, torch.tensor([2, 0])]
    value[:, 0] = 5.0
    value[:, 2] = 6.0
    return chosen


def picked_and_edited(value: torch.Tensor) -> torch.Tensor:
    chosen = value[:, torch.tensor([2, 0])]
    chosen.mul_(3.0)
    value.mul_(2.0)
    return chosen


def converted(value: torch.Tensor) -> torch.Tensor:
    other = value.double()
    value.mul_(2.0)
    value.add_(1.0)
    return other.float()


def copied_by_reshape(value: torch.Tensor) -> torch.Tensor:
    other = value.t().reshape(-1)
    other.mul_(3.0)
    value.add_(1.0)
    return other


def viewed(value: torch.Tensor) -> torch.Tensor:
    other = value.reshape(-1)[:4]
    value.mul_(2.0)
    other.add_(1.0)
    return other


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "edit",
    [
        added_by_index,
        multiplied_by_list,
        picked,
        picked_and_edited,
        converted,
        copied_by_reshape,
        pytest.param(viewed, marks=pytest.mark.filterwarnings("ignore:In this compiled trace")),
    ],
)
def test_what_is_computed_from_a_tensor_before_an_edit_in_place(edit: Any, backend: str) -> None:
    torch.manual_seed(0)
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)), torch.randn(2, 4)

    def run(compile: Any) -> list[torch.Tensor]:
        model = nnsight.NNsight(net, compile=compile)
        with model.trace(x):
            value = model[0].output
            computed = edit(value)
            loss = model.output.pow(2).mean() + computed.pow(2).mean()
            with loss.backward():
                gradient = value.grad.clone()
            found = [value.detach(), computed.detach(), loss.detach(), gradient].save()
        return found

    torch.testing.assert_close(run({"backend": backend}), run(False))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "split", [lambda x: x.chunk(2, -1), lambda x: torch.split(x, [1, 3], -1), lambda x: x.unbind(0)], ids=["chunk", "split", "unbind"]
)
def test_items_of_an_input_that_is_split_are_edited(split: Any, backend: str) -> None:
    class Scaling(torch.nn.Module):
        def __init__(self, scales: bool) -> None:
            super().__init__()
            self.linear, self.scales = torch.nn.Linear(4, 4), scales

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.scales:
                split(x)[0].mul_(3.0)
            return self.linear(x)

    torch.manual_seed(0)
    net, x, given = Scaling(True), torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(nnsight.NNsight(net, compile={"backend": backend})(x.clone()), net(x.clone()))
    net, due = Scaling(False), given.clone()
    model = nnsight.NNsight(net, compile={"backend": backend})
    with model.trace(given):
        split(model.linear.input)[1].mul_(2.0)
        result = model.output.save()
    split(due)[1].mul_(2.0)
    torch.testing.assert_close(given, due)
    torch.testing.assert_close(result, net(due))
