"""Taps: every value a module can take or return is seen by a compiled block as by an eager one."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from nnsight import NNsight, fx
from nnsight.fx.taps import Opaque, describe, parse_structure

from .conftest import same

X = torch.ones(2, 4)


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Output(ModelOutput):
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None


class Cache:
    """An object no graph can hold."""

    def __init__(self) -> None:
        self.count = 3


STRUCTURES: dict[str, Any] = {
    "tensor": lambda x: x + 1,
    "tuple": lambda x: (x + 1, x * 2),
    "list": lambda x: [x + 1, x * 2],
    "dict": lambda x: {"a": x + 1, "b": x * 2},
    "ordered": lambda x: collections.OrderedDict(a=x + 1, b=x * 2),
    "namedtuple": lambda x: Pair(x + 1, x * 2),
    "output": lambda x: Output(logits=x + 1, hidden=(x * 2, x * 3)),
    "partial output": lambda x: Output(logits=x + 1),
    "none": lambda x: (x + 1, None),
    "numbers": lambda x: (x + 1, 3, 2.5, True, "name", None),
    "nested": lambda x: {"a": [(x + 1, {"b": x * 2}), Pair(x * 3, [x, 7])]},
    "empty": lambda x: (x + 1, (), {}, []),
    "torch result": lambda x: torch.max(x, dim=-1),
    "integers": lambda x: (x.long(), x > 0, x.sum()),
    "same twice": lambda x: (lambda y: (y, y))(x + 1),
}


class Maker(torch.nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


class Taker(torch.nn.Module):
    """Passes whatever it gets through a module, and sums the tensors."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.maker = Maker(make)
        self.identity = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        value = self.identity(self.maker(x * 2))
        return value


@pytest.mark.parametrize("name", STRUCTURES)
def test_reading_structures(name: str) -> None:
    make = STRUCTURES[name]
    model = NNsight(Taker(make), compile={"backend": "eager"})
    expected = make(X * 2)
    for compile in (False, True):
        with model.trace(X, compile=compile) as tracer:
            out = model.maker.output.save()
            given = model.identity.input.save()
            result = tracer.result.save()
        same(out, expected)
        same(given, expected)
        same(result, expected)
    assert tracer.report.graphs == 1
    assert not tracer.report.breaks


@pytest.mark.parametrize("name", STRUCTURES)
def test_replacing_structures(name: str) -> None:
    """Every tensor of the value by another one, by assigning the whole value."""
    make = STRUCTURES[name]
    model = NNsight(Taker(make), compile={"backend": "eager"})

    def changed(value: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf.clone().zero_() if isinstance(leaf, torch.Tensor) else leaf, value)

    for compile in (False, True):
        with model.trace(X, compile=compile) as tracer:
            model.maker.output = changed(model.maker.output)
            given = model.identity.input.save()
            result = tracer.result.save()
        same(given, changed(make(X * 2)))
        same(result, changed(make(X * 2)))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_survive_their_description(name: str) -> None:
    spec = pytree.tree_structure(STRUCTURES[name](X))
    assert parse_structure(describe(spec)) == spec


def test_a_class_that_is_gone() -> None:
    with pytest.raises(LookupError, match="Gone of module nowhere"):
        parse_structure("('nowhere:Gone', None, (None,))")


def test_another_structure_is_refused() -> None:
    model = NNsight(Taker(STRUCTURES["tuple"]), compile={"backend": "eager"})
    with pytest.raises(ValueError, match=r"`model\.maker\.output`.*another structure"):
        with model.trace(X, compile=True):
            model.maker.output = [model.maker.output[0], model.maker.output[1]]


def test_another_constant_is_refused() -> None:
    model = NNsight(Taker(STRUCTURES["numbers"]), compile={"backend": "eager"})
    with pytest.raises(ValueError, match=r"`model\.maker\.output` changes 3 to 4"):
        with model.trace(X, compile=True):
            value = list(model.maker.output)
            value[1] = 4
            model.maker.output = tuple(value)


class WithCache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Maker(lambda pair: (pair[0] + pair[1].count, pair[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner((x, Cache()))[0]


def test_objects_no_graph_can_hold() -> None:
    model = NNsight(WithCache(), compile={"backend": "eager"})
    with model.trace(X, compile=True) as tracer:
        value, cache = model.inner.output
        model.inner.output = (value * 2, cache)
        shown = repr(cache).save()
        refusals = [].save()
        for use in (lambda: cache.count, lambda: cache[0], lambda: setattr(cache, "count", 1)):
            try:
                use()
            except TypeError as error:
                refusals.append(str(error))
        out = model.output.save()
    assert torch.equal(out, (X + 3) * 2)
    assert "Cache" in shown and "model.inner.output" in shown
    assert len(refusals) == 3
    assert all("compile=False" in text for text in refusals)
    assert not tracer.report.breaks
    assert not hasattr(Opaque("kind", "place"), "__len__")


def test_taps_leave_no_trace_in_the_plain_graph() -> None:
    """The unedited wrapped model runs the graph that torch.compile would run."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    expected = torch.compile(module, backend=backend)(X)
    model = NNsight(module, compile={"backend": backend})
    assert torch.equal(model(X), expected)
    plain, wrapped = ([node.target for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs)
    assert wrapped == plain
    assert fx.counters.captures == 1


def test_a_module_with_symbolic_numbers() -> None:
    """Sizes that a module passes on are plain numbers in the block."""

    class Sizes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Maker(lambda pair: (pair[0] * 2, pair[0].shape[0], pair[0].shape[0] * 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value, _, twice = self.inner((x, 1))
            return value + twice

    model = NNsight(Sizes(), compile={"backend": "eager", "dynamic": True})
    for length in (3, 5, 8):
        x = torch.ones(length, 2)
        for compile in (False, True):
            with model.trace(x, compile=compile):
                _, size, twice = model.inner.output
                seen = [size, twice, type(size), model.inner.output[0].shape].save()
                out = model.output.save()
            assert seen == [length, 2 * length, int, torch.Size([length, 2])]
            assert torch.equal(out, x * 2 + 2 * length)
    assert fx.counters.captures == 1
