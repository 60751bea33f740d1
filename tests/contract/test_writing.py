"""Changing activations: in place, by assignment, and where an edit takes effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight

from ..conftest import both, same
from .guide import WIDTH, hooked, ids, zero_hidden


@both
@pytest.mark.parametrize(
    ("where", "value"),
    [((...,), 0), ((slice(None), -1, slice(None)), 0), ((slice(None), slice(None), 0), 1), (0, torch.zeros(5, WIDTH))],
    ids=["all", "a position", "a dimension", "a row"],
)
def test_in_place_edits(model: Any, compile: bool, where: Any, value: Any) -> None:
    def edit(output: Any) -> Any:
        hidden = output[0].clone()
        hidden[where] = value
        return hidden, output[1]

    with model.trace(ids(), compile=compile):
        model.layers[0].output[0][where] = value
        last = model.layers[-1].output[0].save()
        out = model.output.save()
    expected, seen = hooked(model, ids(), layers__0=edit)
    same((last, out), (seen["layers.2"][0], expected))
    plain, before = hooked(model, ids())
    assert not torch.equal(out, plain) and not torch.equal(last, before["layers.2"][0])


@both
def test_an_element_of_a_tuple_cannot_be_assigned(model: Any, compile: bool) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        with model.trace(ids(), compile=compile):
            model.layers[0].output[0] = torch.zeros(1, 5, WIDTH)


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
