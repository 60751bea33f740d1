"""Taps: every value a module can take or return is seen by a compiled block as by an eager one."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

import nnsight
from nnsight import NNsight, fx
from nnsight.fx.capturing.structures import describe, parse_structure, unflatten
from nnsight.fx.capturing.taps import Opaque, flatten
from nnsight.runtime.errors import structure_message

from ...conftest import Hooks, same

X = torch.ones(2, 4)


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Output(ModelOutput):
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None


@dataclasses.dataclass
class State:
    """A dataclass that ``pytree`` does not know."""

    hidden: torch.Tensor
    mask: torch.Tensor | None = None
    steps: int = 3
    rest: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    rest: Any = ()


class Attributes(dict):
    """A dict whose items are attributes too, as several libraries have one."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Ordered(collections.OrderedDict):
    pass


class Point:
    """An object of a class that is nothing special."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


#: What is compared by its attributes.
RECORDS = (State, Frozen, Point, Slots, collections.UserDict)


class Cache:
    """An object no graph can hold."""

    def __init__(self) -> None:
        self.count = 3


STRUCTURES: dict[str, Any] = {
    "ordered": lambda x: collections.OrderedDict(a=x + 1, b=x * 2),
    "output": lambda x: Output(logits=x + 1, hidden=(x * 2, x * 3)),
    "numbers": lambda x: (x + 1, 3, 2.5, True, "name", None),
    "nested": lambda x: {"a": [(x + 1, {"b": x * 2}), Pair(x * 3, [x, 7])]},
    "empty": lambda x: (x + 1, (), {}, []),
    "torch result": lambda x: torch.max(x, dim=-1),
    "same twice": lambda x: (lambda y: (y, y))(x + 1),
    "frozen dataclass": lambda x: Frozen(x + 1, (x * 2, 1)),
    "nested dataclasses": lambda x: {"a": State(x, rest=State(x * 2)), "b": (Frozen(x + 1, {"c": x * 3}), None), "n": 1},
    "subclass of dict": lambda x: Attributes(a=x + 1, b=[x * 2], n=3),
    "subclass of an ordered dict": lambda x: Ordered(a=x + 1, b=(x * 2, None)),
    "object": lambda x: Point(x + 1, (x * 2, 7)),
    "object with slots": lambda x: {"a": Slots(x + 1, [x * 2])},
    "object with a dict": lambda x: collections.UserDict({"a": x + 1, "b": x * 2}),
    "shapes": lambda x: (x + 1, x.shape, {"a": x.size(), "n": x.shape[0]}),
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


def plain(value: Any) -> Any:
    """Return a value with records as dicts, for comparison."""
    if isinstance(value, RECORDS):
        return {"class": type(value).__name__, **{name: plain(held) for name, held in attributes(value).items()}}
    if isinstance(value, (Attributes, Ordered)):
        return {"class": type(value).__name__, **{name: plain(held) for name, held in value.items()}}
    if isinstance(value, dict):
        return {key: plain(held) for key, held in value.items()}
    return type(value)(map(plain, value)) if type(value) in (tuple, list) else value


def attributes(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("x", "y")} if isinstance(record, Slots) else vars(record)


def mapped(value: Any, function: Any) -> Any:
    """Return a value with ``function`` applied to its tensors."""
    if isinstance(value, collections.UserDict):
        return type(value)(mapped(value.data, function))
    if isinstance(value, RECORDS):
        return type(value)(**{name: mapped(held, function) for name, held in attributes(value).items()})
    if isinstance(value, (Attributes, Ordered)):
        return type(value)((name, mapped(held, function)) for name, held in value.items())
    if type(value) in (tuple, list):
        return type(value)(mapped(held, function) for held in value)
    if type(value) is dict:
        return {key: mapped(held, function) for key, held in value.items()}
    return pytree.tree_map_only(torch.Tensor, function, value) if not isinstance(value, torch.Size) else value


def is_closed(name: str, compile: bool) -> bool:
    """Whether a module that is given this value cannot show it: objects are looked into where they come from."""
    return compile and name.startswith("object")


@pytest.mark.parametrize("name", STRUCTURES)
def test_reading_and_replacing_structures(name: str) -> None:
    """Every tensor of a value is read, and replaced by another one, by assigning the whole value."""
    make = STRUCTURES[name]
    model = NNsight(Taker(make), compile={"backend": "eager"})

    def changed(value: Any) -> Any:
        return mapped(value, lambda leaf: leaf.clone().zero_())

    for compile in (False, True):
        for edit in (lambda value: value, changed):
            expected = edit(make(X * 2))
            with model.trace(X, compile=compile) as tracer:
                out = nnsight.save(model.maker.output)
                if edit is changed:
                    model.maker.output = changed(out)
                given = None if is_closed(name, compile) else nnsight.save(model.identity.input)
                whole = nnsight.save(model.output)
                result = nnsight.save(tracer.result)
            assert type(out) is type(whole) is type(result) is type(expected)
            for found in (whole, result, *(() if is_closed(name, compile) else (given,)), *((out,) if edit is not changed else ())):
                same(plain(found), plain(expected))
    assert tracer.report.graphs == 1
    assert not tracer.report.breaks


def test_structures_survive_their_description() -> None:
    for name, make in STRUCTURES.items():
        value = make(X)
        leaves, spec = flatten(value)
        same(plain(unflatten(leaves, spec)), plain(value))
        if not {"dataclass", "dataclasses", "subclass", "object"} & set(name.split()):
            assert spec == pytree.tree_structure(value)
            assert parse_structure(describe(spec)) == spec
    with pytest.raises(LookupError, match="Gone of module nowhere"):
        parse_structure("('nowhere:Gone', None, (None,))")


def test_another_structure_or_constant_is_refused() -> None:
    model = NNsight(Taker(STRUCTURES["numbers"]), compile={"backend": "eager"})
    with pytest.raises(ValueError, match=r"`model\.maker\.output`.*another structure.*: a list of \d instead of a tuple of \d\."):
        with model.trace(X, compile=True):
            model.maker.output = [*model.maker.output]
    nested = torch.zeros(1), {"a": [torch.zeros(1)], "b": None}
    for other, said in (
        ((nested[0],), "a tuple of 1 instead of a tuple of 2."),
        ((nested[0], {"a": [nested[0]]}), "a dict with 'a' instead of a dict with 'a', 'b' at `[1]`."),
        ((nested[0], {"a": nested[0], "b": None}), "a single value instead of a list of 1 at `[1]['a']`."),
    ):
        assert structure_message("here", *map(pytree.tree_structure, (other, nested))).endswith(said)
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


class Passing(torch.nn.Module):
    """A dataclass goes from module to module, and the first of them changes it."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        self.first, self.second = torch.nn.Linear(4, 4), Maker(lambda state: state.hidden * state.steps + state.rest[0])

    def forward(self, x: torch.Tensor) -> Any:
        state = Frozen(x, [x]) if self.frozen else State(x, rest=[x])
        kept = state
        state = self.first_of(state)
        if self.frozen:
            return self.second(State(state.hidden, rest=state.rest)), state.hidden.shape.numel()
        return self.second(state), kept.hidden, kept.steps, kept is state

    def first_of(self, state: Any) -> Any:
        if self.frozen:
            return Frozen(self.first(state.hidden), state.rest)
        state.hidden = self.first(state.hidden)
        state.steps += 1
        return state


@pytest.mark.parametrize("frozen", [False, True])
def test_edits_inside_a_dataclass(frozen: bool) -> None:
    """In place, of an attribute, and of the whole object; and the object is the one the model goes on with."""
    torch._dynamo.reset()
    module = Passing(frozen)
    model = NNsight(module, compile={"backend": "eager"})

    def in_place(state: State) -> State:
        state.hidden[:, 0] = 5.0
        return state

    def an_attribute(state: State) -> State:
        state.hidden = state.hidden * 2
        state.rest[0] = state.rest[0] + 1
        return state

    def another(state: State) -> State:
        return dataclasses.replace(state, hidden=state.hidden - 1, rest=[state.rest[0] * 3])

    def by_hook(edit: Any) -> Any:
        return Hooks(module).input("second", lambda args, kwargs: ((edit(args[0]),), kwargs))(X)

    with torch.no_grad():
        for edit in (in_place, an_attribute, another):
            assert not torch.equal(by_hook(edit)[0], module(X)[0])
            for _ in range(2):
                expected = by_hook(edit)
                with model.trace(X) as tracer:
                    model.second.input = edit(model.second.input)
                    out = nnsight.save(model.output)
                if edit is another:  # its tensors go into the object that the model has
                    out, expected = out[0], expected[0]
                same(out, expected)
                assert tracer.report.graphs == 1
                assert not tracer.report.breaks
    assert fx.counters.captures == 1
    assert fx.counters.recordings == 3


def test_a_dataclass_of_the_user_is_left_alone() -> None:
    """What is given to the model keeps its tensors; a frozen one is never written to."""
    for kind in (State, Frozen):
        model = NNsight(Maker(lambda state: state.hidden + 1), compile={"backend": "eager"})
        given = kind(X)
        hidden = given.hidden
        for _ in range(2):
            with model.trace(given) as tracer:
                seen = model.input.hidden.save()
                out = model.output.save()
            assert torch.equal(out, X + 1)
            assert torch.equal(seen, X)
            assert given.hidden is hidden
        assert tracer.report.graphs == 1
        assert torch.equal(model(given), X + 1)


class Filling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, kept: list[Any], table: dict[str, Any], state: State) -> torch.Tensor:
        x = self.linear(x)
        kept.append(x)
        table["last"] = (x + 1, kept)
        state.steps += 1
        state.mask = x * 2
        return x


class Collecting(torch.nn.Module):
    """Modules add to a list, a dict and a dataclass that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Filling() for _ in range(3)])

    def forward(self, x: torch.Tensor, outer: list[Any]) -> Any:
        kept: list[Any] = []
        table: dict[str, Any] = {}
        state = State(x)
        for layer in self.layers:
            x = layer(x, kept, table=table, state=state)
        outer.append(len(kept))
        return x, tuple(kept), table["last"][0], len(table["last"][1]), state.steps, state.mask


def test_modules_fill_the_containers_that_they_are_given() -> None:
    """Also where no block looks at them, and where one edits what is in them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Collecting()
    model = NNsight(module, compile={"backend": "aot_eager"})

    def by_hook() -> Any:
        def edit(args: Any, kwargs: Any) -> None:
            args[1][0][:, 0] = 7.0
            kwargs["state"].hidden = kwargs["state"].hidden * 0

        return Hooks(module).input("layers.1", edit)(X, [])

    with torch.no_grad():
        for _ in range(2):
            outer: list[Any] = []
            same(model(X, outer), module(X, []))
            assert outer == [3]
            outer.clear()
            with model.trace(X, outer) as tracer:
                out = nnsight.save(model.output)
            same(out, module(X, []))
            assert outer == [3]
            with model.trace(X, []) as tracer:
                args, kwargs = model.layers[1].inputs
                args[1][0][:, 0] = 7.0
                kwargs["state"].hidden = kwargs["state"].hidden * 0
                out = nnsight.save(model.output)
            same(out, by_hook())
            assert tracer.report.graphs == 1
            assert not tracer.report.breaks
    assert fx.counters.captures == 1


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


class OverASet(torch.nn.Module):
    """Calls a module for each item of a set that it makes of a list, as Gemma 3 does for its kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {number: self.inner(x * number) for number in set([3, 1, 2, 3])}  # noqa: C405
        return found[3] + found[1] + found[2]


@pytest.mark.parametrize("compile", [False, True])
def test_modules_called_for_a_set_are_called_in_the_order_of_python(compile: bool) -> None:
    x, expected = torch.linspace(-1.0, 1.0, 8).reshape(2, 4), []
    net = OverASet()
    with net.inner.register_forward_hook(lambda _, __, output: expected.append(output)):
        net(x)
    model = NNsight(net, compile={"backend": "eager"} if compile else False)
    with model.trace(x) as tracer:
        found = nnsight.save([])
        for _ in tracer.iter[:3]:
            found.append(model.inner.output)
    same(found, expected)
