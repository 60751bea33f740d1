"""Helpers that programs import from ``nnsight.util``."""

from __future__ import annotations

import collections
import types

import pytest
import torch
from transformers.utils import ModelOutput

import nnsight
from nnsight import NNsight
from nnsight.intervention.tracing.globals import Object
from nnsight.util import WrapperModule, apply, fetch_attr, from_import_path, to_import_path

from .conftest import both

X = torch.ones(2, 4)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@both
def test_a_module_that_passes_its_input_on_is_a_place_for_a_value(compile: bool) -> None:
    class Attachment(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = WrapperModule()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x)

    torch.manual_seed(0)
    model = NNsight(Net(), compile={"backend": "eager"} if compile else False)
    model.layers[0].attachment = Attachment()
    with model.edit() as edited:
        model.layers[0].output[:] = model.layers[0].attachment(model.layers[0].output, hook=True)
    with edited.trace(X):
        inner = edited.layers[0].attachment.output.clone().save()
        edited.layers[0].attachment.output *= 2.0
        out = edited.output.save()
    first, second = model._module.layers
    assert torch.equal(inner, first(X))
    assert torch.equal(out, second(first(X) * 2.0))
    assert WrapperModule()(1, 2) == (1, 2)


def test_paths_lead_through_modules_and_envoys() -> None:
    net = Net()
    model = NNsight(net)
    assert fetch_attr(net, "layers.1.weight") is net.layers[1].weight
    assert fetch_attr(model, "layers.1") is model.layers[1]
    assert fetch_attr(model, "") is model
    with pytest.raises(AttributeError):
        fetch_attr(model, "layers.7")


def test_a_function_of_everything_of_a_type() -> None:
    Pair = collections.namedtuple("Pair", "first second")
    data = [1, (2, "a"), {"b": 3, "c": None}, slice(4, None), Pair(5, "d")]
    assert apply(data, lambda number: -number, int) == [-1, (-2, "a"), {"b": -3, "c": None}, slice(-4, None), Pair(-5, "d")]
    assert data[0] == 1
    assert apply([{1, 2}, frozenset({3})], lambda number: -number, int) == [{-1, -2}, frozenset({-3})]
    output = ModelOutput(logits=X, hidden=(X, None))
    doubled = apply(output, lambda tensor: tensor * 2, torch.Tensor)
    assert type(doubled) is ModelOutput and torch.equal(doubled.logits, X * 2) and torch.equal(output.logits, X)
    found = apply(collections.defaultdict(list, a=1), str, int)
    assert type(found) is collections.defaultdict and found == {"a": "1"}


def test_attributes_of_objects_some_deep() -> None:
    inner = types.SimpleNamespace(size=1, sizes=[2, 3])
    outer = types.SimpleNamespace(size=4, inner=inner)
    assert apply(outer, lambda number: -number, int) is outer and (outer.size, inner.size) == (4, 1)
    apply([outer], lambda number: -number, int, 1)
    assert (outer.size, inner.size) == (-4, 1)
    apply(outer, lambda number: -number, int, n=2)
    assert (outer.size, inner.size, inner.sizes) == (4, -1, [-2, -3])


def test_values_of_a_trace_are_tensors_and_no_objects_of_their_own() -> None:
    model = NNsight(Net())
    with model.trace(X):
        hidden = model.layers[0].output.save()
    assert isinstance(hidden, torch.Tensor)
    assert not isinstance(hidden, Object)


def test_names_of_classes_lead_back_to_them() -> None:
    for known in (torch.nn.Linear, NNsight, collections.abc.Mapping, Net):
        assert from_import_path(to_import_path(known)) is known
    assert to_import_path(collections.OrderedDict) == "collections.OrderedDict"
    with pytest.raises(ImportError, match="no_such"):
        from_import_path("no_such.thing")
    with pytest.raises(AttributeError):
        from_import_path("collections.no_such")


def test_names_at_the_top() -> None:
    assert nnsight.Object is Object
    assert issubclass(nnsight.NNsightDeprecationWarning, FutureWarning)
    assert {"Object", "NNsightDeprecationWarning"} <= {*nnsight.__all__}
