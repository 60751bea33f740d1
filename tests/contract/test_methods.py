"""Methods and functions as traces: any way into a model, not only its call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.intervention.envoy import Envoy, traceable
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


class Encoding(NNsight):
    """A wrapper with a way into the model of its own."""

    @traceable
    def encode_twice(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Call the model's method, and its head on what that returned."""
        return self._module.head(self._module.encode(x)) * scale

    def _prepare_input(self, x: Any, **options: Any) -> Any:
        return (torch.as_tensor(x),), options


@pytest.fixture(params=[False, {"backend": "eager"}], ids=["eager", "compiled"])
def wrapped(request: Any) -> Any:
    torch.manual_seed(0)
    return Encoding(Encoder(), compile=request.param)


def test_a_traceable_method_in_a_header_is_traced(wrapped: Any) -> None:
    x = torch.rand(2, 3)
    with wrapped.encode_twice(x.tolist(), scale=2.0) as tracer:  # prepared as the input of a trace is
        wrapped.trunk.output[:, 0] = 3.0
        head = wrapped.head.input.save()
        result = tracer.result.save()
    assert head[:, 0].tolist() == [3.0, 3.0]
    same(result, wrapped._module.head(head) * 2.0)
    with pytest.raises(OutOfOrderError):
        with wrapped.encode_twice(x):
            wrapped.output.save()


def test_a_traceable_method_elsewhere_is_the_method_with_edits(wrapped: Any) -> None:
    x = torch.rand(2, 3)
    plain = wrapped._module.head(wrapped._module.encode(x))
    same(wrapped.encode_twice(x.tolist()), plain)
    with wrapped.edit() as edited:
        wrapped.trunk.output[:] = 0.0
    same(edited.encode_twice(x.tolist()), wrapped._module.head(torch.zeros(2, 4)))
    same(wrapped.encode_twice(x), plain)
    with wrapped.trace(x):
        beside = wrapped.encode_twice(x).save()  # nothing is prepared, and nothing is a location
        out = wrapped.output.save()
    same(beside, plain)
    same(out, plain)
    assert wrapped.encode_twice.__doc__ is not None and wrapped.encode_twice.__doc__.startswith("Call the model's method")


class Scaled(Envoy):
    """The envoy of a layer, with a traceable method."""

    @traceable
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self._module(x) * 2.0


def test_a_traceable_method_of_a_submodule() -> None:
    model: Any = NNsight(Encoder(), envoys={"trunk": Scaled}, compile={"backend": "eager"})
    x = torch.rand(2, 3)
    with model.trunk.scaled(x) as tracer:
        model.trunk.output[:] = 1.0
        result = tracer.result.save()
    assert result.tolist() == [[2.0] * 4] * 2
    same(model.trunk.scaled(x), model._module.trunk(x) * 2.0)
