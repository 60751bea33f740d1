"""Methods and functions as traces: any way into a model, not only its call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.intervention.interleaver import OutOfOrderError

from ..conftest import same
from .guide import ids, new_tower


class Encoder(torch.nn.Module):
    """A model with more ways in than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(4, 2)

    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.trunk(x)) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


@pytest.fixture
def encoder() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Encoder(), compile={"backend": "eager"})


def test_a_method_in_a_header_is_traced(encoder: Any) -> None:
    x = torch.rand(2, 3)
    with encoder.encode(x, scale=2.0) as tracer:
        hidden = encoder.trunk.output.save()
        result = tracer.result.save()
    same(hidden, encoder._module.trunk(x))
    same(result, encoder._module.encode(x, scale=2.0))


def test_a_traced_method_is_edited(encoder: Any) -> None:
    x = torch.rand(2, 3)
    with encoder.encode(x) as tracer:
        encoder.trunk.output[:] = 1
        result = tracer.result.save()
    same(result, torch.ones(2, 4))


def test_a_traced_method_stays_within_itself(encoder: Any) -> None:
    with pytest.raises(OutOfOrderError):
        with encoder.encode(torch.rand(2, 3)):
            encoder.head.output.save()


def test_a_method_called_without_a_block_is_the_method(encoder: Any) -> None:
    x = torch.rand(2, 3)
    result = encoder.encode(x, scale=3.0)
    same(result, encoder._module.encode(x, scale=3.0))
    same(encoder.trunk.extra_repr(), encoder._module.trunk.extra_repr())


def test_a_method_of_a_submodule_is_traced() -> None:
    outer = NNsight(torch.nn.Sequential(Encoder()))
    x = torch.rand(2, 3)
    with outer[0].encode(x) as tracer:
        hidden = outer[0].trunk.output.save()
        result = tracer.result.save()
    same(hidden, outer._module[0].trunk(x))
    same(result, outer._module[0].encode(x))


def test_a_method_called_inside_a_block_is_the_method(encoder: Any) -> None:
    x = torch.rand(2, 3)
    with encoder.trace(x, compile=False):
        again = encoder.encode(x * 2).save()
        out = encoder.output.save()
    same(again, encoder._module.encode(x * 2))
    same(out, encoder._module(x))


def test_a_class_may_say_how_a_method_is_traced() -> None:
    class Doubling(NNsight):
        def __nnsight_encode__(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return self._module.encode(x, **kwargs) * 2

    model = Doubling(Encoder())
    x = torch.rand(2, 3)
    with model.encode(x) as tracer:
        hidden = model.trunk.output.save()
        result = tracer.result.save()
    same(hidden, model._module.trunk(x))
    same(result, model._module.encode(x) * 2)


def test_a_function_is_traced_with_the_modules_of_a_model() -> None:
    own = new_tower()

    def both_ways(x: torch.Tensor) -> torch.Tensor:
        return own._module(x) + own._module(x.flip(1))

    with own.trace(ids(), fn=both_ways, compile=False) as tracer:
        first = own.head.output.save()
        second = own.head.next().output.save()
        result = tracer.result.save()
    same((first, second), (own._module(ids()), own._module(ids().flip(1))))
    same(result, first + second)
