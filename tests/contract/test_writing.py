"""Changing activations: in place, by assignment, and where an edit takes effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight

from ..conftest import Hooks, both, same
from .guide import WIDTH, hooked, ids, zero_hidden


@both
def test_an_early_layer_is_zeroed_and_the_last_one_read(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.layers[0].output[0][:] = 0
        last = model.layers[-1].output[0].save()
    _, seen = hooked(model, ids(), layers__0=zero_hidden)
    same(last, seen["layers.2"][0])
    _, plain = hooked(model, ids())
    assert not torch.equal(last, plain["layers.2"][0])


@both
@pytest.mark.parametrize(
    ("where", "number"), [((...,), 0), ((slice(None), -1, slice(None)), 0), ((slice(None), slice(None), 0), 1)]
)
def test_in_place_edits(model: Any, compile: bool, where: Any, number: int) -> None:
    def edit(value: Any) -> Any:
        hidden = value[0].clone()
        hidden[where] = number
        return hidden, value[1]

    with model.trace(ids(), compile=compile):
        model.layers[0].output[0][where] = number
        out = model.output.save()
    same(out, hooked(model, ids(), layers__0=edit)[0])
    assert not torch.equal(out, model._module(ids()))


@both
def test_an_output_is_replaced(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.embed.output = model.embed.output * 0.5
        out = model.output.save()
    same(out, hooked(model, ids(), embed=lambda value: value * 0.5)[0])


@both
def test_an_input_is_replaced(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.layers[1].input = model.layers[1].input * 3
        model.norm.inputs = ((model.norm.input + 1,), {})
        out = model.output.save()

    reference = Hooks(model._module)
    reference.input("layers.1", lambda args, kwargs: ((args[0] * 3,), kwargs))
    reference.input("norm", lambda args, kwargs: ((args[0] + 1,), kwargs))
    same(out, reference(ids()))


@both
def test_a_tuple_is_replaced_by_a_new_one(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        whole = model.layers[0].output
        assert isinstance(whole, tuple) and len(whole) == 2
        model.layers[0].output = (torch.zeros_like(model.layers[0].output[0]), *model.layers[0].output[1:])
        out = model.output.save()
    same(out, hooked(model, ids(), layers__0=zero_hidden)[0])
    assert not torch.equal(out, model._module(ids()))


@both
def test_an_element_of_a_tuple_cannot_be_assigned(model: Any, compile: bool) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        with model.trace(ids(), compile=compile):
            model.layers[0].output[0] = torch.zeros(1, 5, WIDTH)


@both
def test_a_row_of_a_tensor_is_assigned(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.embed.output[0] = torch.zeros_like(model.embed.output[0])
        out = model.output.save()
    same(out, hooked(model, ids(), embed=torch.zeros_like)[0])


@both
def test_a_copy_shows_what_was_there_before(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        before = model.layers[0].output[0].clone().save()
        model.layers[0].output[0][:] = 0
        after = model.layers[0].output[0].save()
        out = model.output.save()
    same(before, hooked(model, ids())[1]["layers.0"][0])
    assert not after.any()
    same(out, hooked(model, ids(), layers__0=zero_hidden)[0])
    assert not torch.equal(out, model._module(ids()))


@both
def test_without_a_copy_both_names_are_one_tensor(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        before = model.layers[0].output[0].save()
        model.layers[0].output[0][:] = 0
        after = model.layers[0].output[0].save()
        out = model.output.save()
    assert not before.any() and not after.any()
    same(out, hooked(model, ids(), layers__0=zero_hidden)[0])
    assert before.data_ptr() == after.data_ptr()


class Sideways(torch.nn.Module):
    """A value is used between two locations at which it is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        aside = y * 2
        return self.second(y) + aside


@both
@pytest.mark.parametrize("order", ["late first", "early first"])
def test_the_same_edit_at_another_location_is_another_program(compile: bool, order: str) -> None:
    torch.manual_seed(0)
    model = NNsight(Sideways(), compile={"backend": "eager"})
    x = torch.randn(1, 4)
    kept = model._module.first(x)

    def late() -> torch.Tensor:
        with model.trace(x, compile=compile):
            hidden = model.first.output
            model.second.input  # noqa: B018
            hidden[:] = 0
            out = model.output.save()
        return out

    def early() -> torch.Tensor:
        with model.trace(x, compile=compile):
            hidden = model.first.output
            hidden[:] = 0
            model.second.input  # noqa: B018
            out = model.output.save()
        return out

    found = {"late": late(), "early": early()} if order == "late first" else {"early": early(), "late": late()}
    same(found["late"], kept * 2)
    same(found["early"], torch.zeros(1, 4))
