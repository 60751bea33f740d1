"""Lazy tensors: the object the block holds becomes the tensor that was computed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nnsight import NNsight

from ...conftest import both

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


def wrap(*modules: torch.nn.Module) -> NNsight:
    return NNsight(torch.nn.Sequential(*modules).eval(), compile={"backend": "eager"})


@both
@pytest.mark.parametrize(
    "passing", [torch.nn.Dropout(0.5), torch.nn.Identity(), torch.nn.Flatten(2)], ids=lambda m: type(m).__name__
)
def test_a_value_that_the_model_passes_on_unchanged(compile: bool, passing: torch.nn.Module) -> None:
    """One tensor computed for two places: the lazy one and the model's result."""
    model = wrap(passing)
    x = X[..., None] if isinstance(passing, torch.nn.Flatten) else X
    with model.trace(x, compile=compile) as tracer:
        halved = (model.input * 0.5).save()
        model.input = halved
        seen = model[0].output.save()
        result = tracer.result.save()
    for value in (halved, seen, result):
        assert type(value) is torch.Tensor
        assert torch.equal(value.flatten(), X.flatten() * 0.5)


@both
def test_what_became_of_it_is_an_ordinary_tensor(compile: bool) -> None:
    model = wrap(torch.nn.Linear(4, 4))
    with torch.no_grad(), model.trace(X, compile=compile):
        hidden = model[0].output.save()
        twice = (hidden * 2).save()
    assert type(hidden) is type(twice) is torch.Tensor
    assert not vars(hidden)
    assert torch.equal(copy.deepcopy(hidden), hidden)
    assert torch.equal(pickle.loads(pickle.dumps(twice)), hidden + hidden)
    hidden += 1.0
    assert torch.equal(hidden, twice / 2 + 1)
    hidden.requires_grad_(True)
    (hidden**2).sum().backward()
    assert torch.equal(hidden.grad, 2 * hidden)


@both
def test_a_leaf_made_in_the_block(compile: bool) -> None:
    model = wrap(torch.nn.Linear(4, 4))
    with model.trace(X, compile=compile):
        scale = torch.ones(4, requires_grad=True).save()
        model[0].output = model[0].output * scale
        out = model.output.save()
    out.sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, model._module(X).sum(0))


@pytest.mark.parametrize("cut", [False, True], ids=["one graph", "cut"])
def test_attributes_that_a_block_sets_on_a_tensor_stay_on_it(cut: bool) -> None:
    model = wrap(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for compile in (False, True, True, True, True):  # known blocks are replayed
        seen = []
        with torch.no_grad(), model.trace(X, compile=compile):
            hidden = model[0].output
            hidden.layer = 0
            if cut:
                seen.append(hidden.sum().item())
            hidden.layer += 1
            seen.append(hidden.layer)
            late = model[1].output.save()
            late.layer = [hidden.layer]
        assert type(late) is torch.Tensor and vars(late) == {"layer": [1]}
        assert seen[-1] == 1
