"""One tensor at several locations: each read of it is its own value, and an edit in place reaches all of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.remote import NotExpressibleError


def passing_on() -> Any:
    """A model in which the output of ``a`` is the input of ``b``, and ``b``, ``c`` and ``d`` share a tensor, too."""
    torch.manual_seed(0)
    layers = [("a", torch.nn.Linear(4, 4)), ("b", torch.nn.Linear(4, 4)), ("c", torch.nn.Identity()), ("d", torch.nn.Linear(4, 4))]
    return NNsight(torch.nn.Sequential(OrderedDict(layers)))


def edit_the_later_read(model: Any) -> Any:
    first = model.a.output
    second = model.b.input
    second += 1
    return first


def edit_the_earlier_read(model: Any) -> Any:
    first = model.a.output
    second = model.b.input
    first += 1
    return second


def edit_part_of_the_earlier_read(model: Any) -> Any:
    first = model.a.output
    second = model.b.input
    first[0] += 1
    return second


def edit_both(model: Any) -> Any:
    first = model.a.output
    second = model.b.input
    row = first[0]
    row += 1
    other = first[1]
    other *= 2
    second[1] += 3
    return first + second + row


def edit_a_replacement(model: Any) -> Any:
    new = model.a.output * 2
    model.a.output = new
    found = model.b.input
    new += 1
    found += 1
    return new + found


def edit_three_reads(model: Any) -> Any:
    values = [model.b.output, model.c.input, model.c.output, model.d.input]
    for number in range(4):
        values[number] += number
    return sum(values)


def put_the_earlier_read_back(model: Any) -> Any:
    first = model.b.output
    model.c.output = first * 2
    model.d.input = first
    return first


BLOCKS = [edit_the_later_read, edit_the_earlier_read, edit_part_of_the_earlier_read, edit_both, edit_a_replacement, edit_three_reads,
          put_the_earlier_read_back]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_program_is_the_block(block: Callable[[Any], Any]) -> None:
    x, y = torch.randn(2, 4), torch.randn(3, 4)
    expected = []
    for value in (x, y):
        model = passing_on()
        with model.trace(value):
            made = block(model).clone().save()
            out = model.output.save()
        expected.append((made, out))
    model = passing_on()
    with model.trace(x, program=True) as tracer:
        made = block(model).clone().save()
        out = model.output.save()
    torch.testing.assert_close((made, out), expected[0])
    found = tracer.program.run(passing_on(), y)
    torch.testing.assert_close((found["made"], found["out"]), expected[1])


def test_each_read_is_the_value_at_its_location() -> None:
    """Another program replaces the tensor between two reads of it."""
    model, x = passing_on(), torch.randn(2, 4)
    with model.trace(x, program=True) as replacing:
        model.b.input = model.b.input * 0 + 7
    with model.trace(x, program=True) as reading:
        cache = reading.cache(modules=[model.a, model.b], include_inputs=True).save()
        first = model.a.output
        second = model.b.input
        pair = [first, second].save()
        model.d.output = first + second
        out = model.output.save()
    found = replacing.program.then(reading.program).run(model, x)
    first = model._module.a(x)
    second = torch.full_like(first, 7)
    torch.testing.assert_close(found["pair"], [first, second])
    torch.testing.assert_close(found["out"], first + second)
    (kept,), (((taken,), _),) = found["cache"]["model.a"]["output"], found["cache"]["model.b"]["input"]
    torch.testing.assert_close([kept, taken], [first, second])


def test_a_tensor_in_a_dataclass_is_edited_in_place_and_not_replaced() -> None:
    @dataclasses.dataclass
    class Pair:
        one: torch.Tensor
        other: torch.Tensor

    class Pairs(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x + 1, x + 2)

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = Pairs()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pair = self.pairs(x)
            return pair.one + pair.other

    model, x = NNsight(Sum()), torch.ones(2)
    with pytest.raises(NotExpressibleError, match=r"inside an object of type Pair at `model.pairs.output` is replaced"):
        with model.trace(x, program=True):
            pair = model.pairs.output
            model.pairs.output = dataclasses.replace(pair, one=pair.one * 2)
    with model.trace(x, program=True) as tracer:
        model.pairs.output.one[:] *= 2
        out = model.output.save()
    assert out.tolist() == tracer.program.run(model, x)["out"].tolist() == [7, 7]


@pytest.mark.parametrize("how", [{"program": True}, {"remote": "local"}], ids=str)
def test_an_own_tensor_that_is_edited_again(how: Any) -> None:
    """The first edit is one of real values. The tensor is still one that the block has made."""

    def run(**how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model, x = passing_on(), torch.ones(3, 4)
        with torch.no_grad(), model.trace(x, **how):
            total = torch.zeros(4)
            total += 1
            total += model.a.output.sum(0)
            total *= 2
            model.d.output[:] += total
            out = model.output.save()
            total.save()
        return total, out

    torch.testing.assert_close(run(**how), run())
