"""What a block is told of gradients before the graph has run is what an eager trace tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight


class Edits(torch.nn.Module):
    """Edits tensors that require no gradient, so that they do, and goes on with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.first, self.second, self.last = torch.nn.Identity(), torch.nn.Tanh(), torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones_like(x)
        self.first(ones)
        ones.mul_(self.linear(x))
        self.second(ones)
        zeros = torch.zeros_like(x)
        part = zeros[:, 0]
        self.last(zeros)
        part.add_(ones[:, 1])
        return self.last(zeros) + self.second(ones)


def _known(*tensors: torch.Tensor) -> list[Any]:
    return [(tensor.requires_grad, tensor.is_leaf, type(tensor.grad_fn).__name__ if tensor.is_leaf else "") for tensor in tensors]


def _of_the_model(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    found = [_known(model.first.output), _known(model.second.input), _known(model.last.output)]
    return [*found, _known(model.output, model.output > 0, model.output.argmax(-1))]


def _of_an_input(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    hidden = model.input
    return [_known(hidden, hidden * 2, x), _known(model.linear.weight, vector), model.linear.weight.grad is None]


def _behind_a_replacement_by_what_is_detached(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    model.second.input = model.second.input.detach()
    hidden = model.second.output
    return [_known(hidden, hidden * 2, hidden.clone().add_(1.0), hidden[0]), _known(model.output)]


def _behind_a_replacement_by_what_is_trained(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    model.linear.output += vector
    return [_known(model.linear.output), _known(model.second.output), _known(model.output)]


def _behind_a_skip(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    model.linear.skip(model.linear.input.detach())
    return [_known(model.second.input), _known(model.output)]


def _behind_an_edit_of_a_view(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    hidden = model.linear.output.detach().clone()
    part, other, apart = hidden[:, 0], hidden[1], hidden.detach()
    part.mul_(vector[0])
    return [_known(hidden, part, other, apart, other * 2, apart * 2)]


def _behind_an_edit_of_what_comes_from_outside(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    total, single = torch.zeros(4), torch.zeros(4)
    part = total[:2]
    before = _known(total, part)
    total.add_((model.linear.output * vector).sum(0))
    single[0] = total[0]
    return [before, _known(total, part, total * 2, part * 2, single, total.detach()), total._version, single._version]


def _behind_a_cut_and_a_replacement(model: Any, x: torch.Tensor, vector: torch.Tensor) -> list[Any]:
    ones = model.first.output
    part, apart = ones[0], ones.detach()
    model.linear.output += vector
    positive = bool(model.linear.output.sum() > 0)  # the model edits `ones` in the next piece
    return [positive, _known(model.second.output, ones, part, apart), _known(model.output, x)]


BLOCKS = [
    _of_the_model,
    _of_an_input,
    _behind_a_replacement_by_what_is_detached,
    _behind_a_replacement_by_what_is_trained,
    _behind_a_skip,
    _behind_an_edit_of_a_view,
    _behind_an_edit_of_what_comes_from_outside,
    _behind_a_cut_and_a_replacement,
]


@pytest.fixture(scope="module", params=["trained", "frozen"])
def model(request: pytest.FixtureRequest) -> NNsight:
    return NNsight(Edits().eval().requires_grad_(request.param == "trained"), compile={"backend": "eager"})


@pytest.mark.parametrize("given", ["leaf", "computed"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__.strip("_"))
def test_what_autograd_knows_of_a_tensor(block: Callable[..., list[Any]], model: NNsight, given: str) -> None:
    def run(compile: bool, grad: bool = True) -> list[Any]:
        x, vector = torch.ones(3, 4, requires_grad=given == "leaf"), torch.ones(4, requires_grad=True)
        x = x.requires_grad_() * 2 if given == "computed" else x
        with torch.set_grad_enabled(grad), model.trace(x, compile=compile) as tracer:
            found = block(model, x, vector).save()  # type: ignore[attr-defined]
        assert (tracer.report.mode == "compiled") == compile
        return found

    for grad in (True, False):
        expected = run(False, grad)
        assert run(True, grad) == run(True, grad) == expected


def test_the_gradient_that_a_weight_has_is_there_when_the_graph_uses_the_weight() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), compile={"backend": "eager"})
    weight = model._module[0].weight
    weight.grad = torch.full((4, 4), 2.0)
    for compile in (False, True, True):
        with model.trace(torch.ones(3, 4), compile=compile):
            projected = model[0].output @ weight
            model[1].output = model[1].output - 0.5 * weight.grad[0]
            out = model.output.save()
        torch.testing.assert_close(out, torch.tanh(model._module[0](torch.ones(3, 4))) - 1.0)


def test_asking_costs_no_cut_where_nothing_changed() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    model = NNsight(net, compile={"backend": "eager", "fullgraph": True})
    for _ in range(2):
        with model.trace(torch.ones(3, 4)):
            model[0].output += 1.0
            doubled = model[1].output.detach() * 2.0
            asked = [doubled.requires_grad, model[1].output.requires_grad, model.output.is_leaf].save()  # type: ignore[attr-defined]
        assert asked == [False, True, False]
