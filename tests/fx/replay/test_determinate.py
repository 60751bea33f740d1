"""Replay of blocks with loops over constants and with containers of modules and functions; what is not proved runs each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnsight
from nnsight import fx

from ...conftest import Hooks, same
from .conftest import VECTOR, applied, check, x


class Dictionary(torch.nn.Module):
    """A small autoencoder."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder, self.decoder = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(h)))


# -- what is replayed ------------------------------------------------------------------------------------------------------


def steer(h: torch.Tensor, vector: torch.Tensor, scale: float = 1.0, *, shift: Any = None) -> torch.Tensor:
    h = h + scale * vector
    return h if shift is None else shift(h)


DICTIONARIES = [Dictionary(0), Dictionary(1), Dictionary(2)]
BY_LAYER = {1: DICTIONARIES[0], 2: DICTIONARIES[1]}
NESTED: dict[str, Any] = {"functions": [torch.relu, steer], "layers": [0, 2], "scale": 2.0, "vector": VECTOR}


def a_computed_index(h: torch.Tensor) -> torch.Tensor:
    place = 2 - 1
    place += 1
    return DICTIONARIES[place](h) + DICTIONARIES[-place](h)


def an_index_in_a_loop(h: torch.Tensor) -> torch.Tensor:
    for place in range(len(DICTIONARIES)):
        h = h + DICTIONARIES[place](h)
    return h


def a_loop_over_modules(h: torch.Tensor) -> torch.Tensor:
    for dictionary in DICTIONARIES:
        h = h + dictionary(h)
    return h + sum([BY_LAYER[layer](h) for layer in (1, 2)])


def settings_in_a_dict(h: torch.Tensor) -> torch.Tensor:
    activation, function = NESTED["functions"][0], NESTED["functions"][-1]
    if NESTED["scale"] > 1.0 and 2 in NESTED["layers"]:
        h = activation(h)
    return function(h, NESTED["vector"], NESTED["scale"])


REPLAYED = [
    a_computed_index,
    an_index_in_a_loop,
    a_loop_over_modules,
    settings_in_a_dict,
]


@pytest.mark.parametrize("function", REPLAYED, ids=lambda function: function.__name__)
def test_such_functions_are_replayed(model: Any, function: Callable[..., Any]) -> None:
    assert check(model, function) == 2


# -- what changes is seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["item", "length", "order", "key", "constant", "type"])
def test_what_changes_in_a_container_is_seen(model: Any, what: str) -> None:
    held: dict[str, Any] = {"list": [Dictionary(0), 2.0], "dict": {"a": Dictionary(1), "b": Dictionary(2)}}

    def function(h: torch.Tensor) -> torch.Tensor:
        for place, name in enumerate(held["dict"]):
            h = h + (place + 1) * held["dict"][name](h)
            if name == "c":
                h = h * 2
        return h + held["list"][0](h) * held["list"][1] * len(held["list"])

    assert check(model, function) == 2
    if what == "item":
        held["list"][0] = Dictionary(5)
    elif what == "length":
        held["list"].append(torch.relu)
    elif what == "order":
        held["dict"]["a"] = held["dict"].pop("a")
    elif what == "key":
        held["dict"]["c"] = held["dict"].pop("b")
    elif what == "constant":
        held["list"][1] = 3.0
    else:
        held["list"] = _Doubled(held["list"])
    for _ in range(3):
        same(applied(model, function), Hooks(model._module).output("layers.1", function)(x()))


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("equal", [lambda: [2.0], lambda: {"scale": 2.0}, lambda: tuple(map(float, "2"))])
def test_whether_equal_objects_are_the_same_is_seen(model: Any, equal: Callable[[], Any], chained: bool) -> None:
    """Guards compare the items of containers, and constants by value."""
    one = other = equal()

    def function(h: torch.Tensor) -> torch.Tensor:
        if chained:
            return h * 2 if one is other == one else h - 1
        return h * 2 if one is other else h - 1

    for _ in range(2):
        same(applied(model, function), Hooks(model._module).output("layers.1", function)(x()))
    other = equal()
    same(applied(model, function), Hooks(model._module).output("layers.1", function)(x()))
    flag = True
    assert check(model, lambda h: h * 2 if flag is True and one is not None else h - 1) == 2


@pytest.mark.parametrize("kind", ["slice", "keys", "member"])
def test_a_list_is_not_equal_to_a_tuple(model: Any, kind: str) -> None:
    """So the other branch runs, whose variables have to be guards."""
    places, named, scale = [0, 1], {"a": 1}, 2.0

    def function(h: torch.Tensor) -> torch.Tensor:
        if kind == "slice":
            return h * 3 if places[:2] == (0, 1) else h * scale
        if kind == "keys":
            return h * 3 if named.keys() == ("a",) else h * scale
        return h * 3 if places[:2] in ((0, 1), (1, 2)) or 1 in places[:1] or "b" in named.keys() else h * scale  # noqa: SIM118

    assert check(model, function) == 2
    scale = 4.0
    assert check(model, function) == 2


def test_the_value_of_an_index_is_seen(model: Any) -> None:
    """The integer in a scalar tensor is part of the program, and guards compare no values of tensors."""
    place = torch.tensor(1)

    def read(h: torch.Tensor) -> torch.Tensor:
        return h + h[:, place, None]

    def edit(h: torch.Tensor) -> torch.Tensor:
        h = h + 0
        h[:, place] = 5
        return h

    for function in (read, edit):
        for index in (1, 1, 2, 3):
            place.fill_(index)
            same(applied(model, function), Hooks(model._module).output("layers.1", function)(x()))


def test_whether_a_tensor_is_a_view_is_seen(model: Any) -> None:
    vector = torch.ones(4)

    def function(h: torch.Tensor) -> torch.Tensor:
        return h + 1 if vector._base is None else h - 1

    for seen in (torch.ones(4), torch.ones(4), torch.ones(8)[:4]):
        vector = seen
        same(applied(model, function), Hooks(model._module).output("layers.1", function)(x()))


def test_a_container_from_outside_is_saved_as_it_is(model: Any) -> None:
    for held in ([[1, 2]], [[1, 2]], [[3, 4]]):
        with model.trace(x()):
            kept = nnsight.save(held)
            pair = (held, model.layers[1].output).save()
        assert kept is held is pair[0]


class _Doubled(list[Any]):
    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return found * 2 if isinstance(found, float) else found


def test_a_list_that_holds_functions_and_is_filled(model: Any) -> None:
    kept: list[Any] = [torch.relu]

    def function(h: torch.Tensor) -> torch.Tensor:
        h = kept[0](h) * len(kept) + 1
        kept.append(torch.relu)
        return h

    for _ in range(3):
        count = len(kept)
        out = applied(model, function)
        same(out, Hooks(model._module).output("layers.1", lambda h, count=count: torch.relu(h) * count + 1)(x()))
    assert len(kept) == 4
    assert fx.counters.replays == 0


# -- what runs each time ---------------------------------------------------------------------------------------------------

CALLS: list[str] = []


def notes(text: str) -> str:
    CALLS.extend((text,))
    return text


def a_handler_that_does_more(h: torch.Tensor) -> torch.Tensor:
    try:
        h = h + torch.ones(7, 7)
    except RuntimeError as error:
        notes(type(error).__name__)
        h = h - 1
    return h


def a_loop_that_does_more(h: torch.Tensor) -> torch.Tensor:
    for count in range(2):
        notes("round")
        h = h + count
    return h


@pytest.mark.parametrize("function", [a_handler_that_does_more, a_loop_that_does_more])
def test_functions_that_do_more_run_each_time(model: Any, function: Callable[..., Any]) -> None:
    noted, results = [], []
    for compile in (False, True):
        CALLS.clear()
        results.append([applied(model, function, compile=compile) for _ in range(3)])
        noted.append(list(CALLS))
    same(*results)
    assert noted[0] == noted[1] != []
    assert fx.counters.replays == 0


def test_an_error_of_outside_values_is_caught_each_time(model: Any) -> None:
    """Whether a call on tensors from outside fails because of values is not known in a replay."""
    table, place = torch.arange(6.0).view(3, 2), torch.tensor([1])

    def function(h: torch.Tensor) -> torch.Tensor:
        try:
            row = table[place]
        except IndexError:
            row = torch.full((1, 2), -5.0)
        return h + row.sum()

    def elsewhere(h: torch.Tensor) -> torch.Tensor:
        return h + table[place].sum()

    for index in (1, 7, 0):
        place.fill_(index)
        same(applied(model, function), Hooks(model._module).output("layers.1", function)(x()))
    assert fx.counters.replays == 0
    place.fill_(1)
    assert check(model, elsewhere) == 2, "where nothing would catch it, it is replayed"
