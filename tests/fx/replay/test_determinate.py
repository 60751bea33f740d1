"""Replay of blocks with loops over constants, containers of modules and functions, ``functools.partial`` and ``try``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import NNsight, fx

from ...conftest import Hooks, same

VECTOR = torch.tensor([0.5, -1.0, 2.0, 0.25])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)])
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Dictionary(torch.nn.Module):
    """A small autoencoder."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder, self.decoder = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(h)))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return NNsight(Net().eval(), compile={"backend": "eager"})


def x(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4, dtype=torch.float32).view(rows, 4)


def applied(model: Any, function: Callable[..., Any], *more: Any, compile: bool = True) -> Any:
    """Replace what the second layer returns by what ``function`` makes of it; return the model's result."""
    with model.trace(x(), compile=compile):
        model.layers[1].output = function(model.layers[1].output, *more)
        out = model.output.save()
    return out


def replays(model: Any, function: Callable[..., Any], *more: Any) -> int:
    """Compare three runs and replays with a plain hook, see that they have an effect; return how many were replays."""
    before = fx.counters.replays
    for _ in range(3):
        expected = Hooks(model._module).output("layers.1", lambda h: function(h, *more))(x())
        same(applied(model, function, *more), expected)
        assert not torch.allclose(expected, model._module(x()))
    return fx.counters.replays - before


# -- what is replayed ------------------------------------------------------------------------------------------------------


def steer(h: torch.Tensor, vector: torch.Tensor, scale: float = 1.0, *, shift: Any = None) -> torch.Tensor:
    h = h + scale * vector
    return h if shift is None else shift(h)


DICTIONARIES = [Dictionary(0), Dictionary(1), Dictionary(2)]
BY_LAYER = {1: DICTIONARIES[0], 2: DICTIONARIES[1]}
BY_NAME = torch.nn.ModuleDict({"h0": DICTIONARIES[0], "h1": DICTIONARIES[1]})
NESTED: dict[str, Any] = {"functions": [torch.relu, steer], "layers": [0, 2], "scale": 2.0, "vector": VECTOR}
STEER = functools.partial(steer, vector=VECTOR, scale=2.0)


def a_partial(h: torch.Tensor) -> torch.Tensor:
    return STEER(h)


def a_partial_of_a_partial(h: torch.Tensor) -> torch.Tensor:
    return CLAMPED(h, scale=0.5)


CLAMPED = functools.partial(STEER, shift=functools.partial(torch.clamp, max=0.25))


def a_partial_of_a_module(h: torch.Tensor) -> torch.Tensor:
    return APPLIED(h)


APPLIED = functools.partial(DICTIONARIES[0])


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


def a_loop_over_items(h: torch.Tensor) -> torch.Tensor:
    for layer, dictionary in BY_LAYER.items():
        h = h + layer * dictionary(h)
    return h


def a_name_that_is_put_together(h: torch.Tensor) -> torch.Tensor:
    return BY_NAME[f"h{0}"](h) + BY_NAME[f"h{3 % 2}"](h)


def settings_in_a_dict(h: torch.Tensor) -> torch.Tensor:
    activation, function = NESTED["functions"][0], NESTED["functions"][-1]
    if NESTED["scale"] > 1.0 and 2 in NESTED["layers"]:
        h = activation(h)
    return function(h, NESTED["vector"], NESTED["scale"])


def a_while_loop(h: torch.Tensor) -> torch.Tensor:
    place, scale = 0, 1.0
    while place < len(DICTIONARIES):
        h = h + scale * DICTIONARIES[place](h)
        place, scale = place + 1, scale / 2
    return h


def a_while_loop_over_a_size(h: torch.Tensor) -> torch.Tensor:
    width = h.shape[-1]
    while width > 1:
        h = h * 0.5
        width //= 2
        if width == 77:
            break
    else:
        h = h + 1
    return h


def a_while_loop_that_is_left(h: torch.Tensor) -> torch.Tensor:
    count = 0
    while True:
        count += 1
        if count == 2:
            continue
        h = h + count
        if count > h.dim():
            break
    return h


def a_try(h: torch.Tensor) -> torch.Tensor:
    try:
        first = h[0]
    except (IndexError, TypeError):
        first = h.sum()
    else:
        h = h * 2
    finally:
        h = h + VECTOR
    return h + first


def a_try_that_fails(h: torch.Tensor) -> torch.Tensor:
    scale = 1.0
    try:
        scale = 3.0
        h = h + torch.ones(7, 7)
        scale = 5.0
    except RuntimeError:
        h = h - 1
    return h * scale


def a_try_with_a_raise(h: torch.Tensor) -> torch.Tensor:
    try:
        if h.dim() != 3:
            raise ValueError(f"{h.dim()} dimensions")
        h = h.sum(1)
    except ValueError:
        h = h.flip(0)
    return h


def a_try_around_a_function_that_raises(h: torch.Tensor) -> torch.Tensor:
    for dims in (3, 2):
        try:
            h = with_dims(h, dims) * 2
        except ValueError:
            h = h + dims
    return h


def with_dims(h: torch.Tensor, dims: int) -> torch.Tensor:
    if h.dim() != dims:
        raise ValueError(f"not {dims}")
    return h


REPLAYED = [
    a_partial,
    a_partial_of_a_partial,
    a_partial_of_a_module,
    a_computed_index,
    an_index_in_a_loop,
    a_loop_over_modules,
    a_loop_over_items,
    a_name_that_is_put_together,
    settings_in_a_dict,
    a_while_loop,
    a_while_loop_over_a_size,
    a_while_loop_that_is_left,
    a_try,
    a_try_that_fails,
    a_try_with_a_raise,
    a_try_around_a_function_that_raises,
]


@pytest.mark.parametrize("function", REPLAYED, ids=lambda function: function.__name__)
def test_such_functions_are_replayed(model: Any, function: Callable[..., Any]) -> None:
    assert replays(model, function) == 2


def test_autoencoders_by_layer_are_replayed(model: Any) -> None:
    """A loop over all layers of the model in which a dict says which of them are edited."""

    def run(compile: bool) -> Any:
        with model.trace(x(), compile=compile) as tracer:
            for place, layer in enumerate(model.layers):
                if place in BY_LAYER:
                    layer.output[:] = BY_LAYER[place](layer.output)
            out = model.output.save()
        return out, tracer.report

    hooks = Hooks(model._module)
    for place, dictionary in BY_LAYER.items():
        hooks.output(f"layers.{place}", lambda h, dictionary=dictionary: dictionary(h))
    expected = hooks(x())
    for compile in (False, True, True, True):
        out, report = run(compile)
        same(out, expected)
    assert report.replayed
    assert len(report.spliced) == 3, "two of three layers and the result"


def test_a_partial_made_each_time_is_replayed(model: Any) -> None:
    """New tensors are new values of inputs, and the object itself does not matter."""
    for scale in (1.0, 2.0, 3.0):
        assert replays(model, functools.partial(steer, vector=scale * VECTOR)) >= 2
    assert fx.counters.replays == 8
    assert fx.counters.compiles == 1


# -- what changes is seen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["function", "argument", "keyword", "another keyword", "another argument"])
def test_what_changes_in_a_partial_is_seen(model: Any, what: str) -> None:
    chosen = {
        "function": functools.partial(torch.mul, other=VECTOR),
        "argument": functools.partial(_scaled, 3.0, by=2.0),
        "keyword": functools.partial(_scaled, 2.0, by=3.0),
        "another keyword": functools.partial(_scaled, 2.0, by=2.0, more=1.0),
        "another argument": functools.partial(_scaled, 2.0, VECTOR[:1], by=2.0),
    }
    first = functools.partial(_scaled, 2.0, by=2.0)
    assert replays(model, lambda h: first(h) + 1) == 2
    for function in (chosen[what], first):
        expected = Hooks(model._module).output("layers.1", function)(x())
        same(applied(model, function), expected)
        same(applied(model, function), expected)


def _scaled(scale: float, *h: torch.Tensor, by: float = 1.0, more: float = 0.0) -> torch.Tensor:
    return sum(h) * scale * by + more


@pytest.mark.parametrize("what", ["item", "length", "order", "key", "constant", "type"])
def test_what_changes_in_a_container_is_seen(model: Any, what: str) -> None:
    held: dict[str, Any] = {"list": [Dictionary(0), 2.0], "dict": {"a": Dictionary(1), "b": Dictionary(2)}}

    def function(h: torch.Tensor) -> torch.Tensor:
        for place, (name, dictionary) in enumerate(held["dict"].items()):
            h = h + (place + 1) * dictionary(h)
            if name == "c":
                h = h * 2
        return h + held["list"][0](h) * held["list"][1] * len(held["list"])

    assert replays(model, function) == 2
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


class Told(ValueError):
    """Tells that it was made, and that it was looked for."""

    def __init__(self) -> None:
        CALLS.append("made")


class Asked(type):
    def __subclasscheck__(cls, kind: type) -> bool:
        CALLS.append("asked")
        return super().__subclasscheck__(kind)


def notes(text: str) -> str:
    CALLS.extend((text,))
    return text


def a_handler_that_does_more(h: torch.Tensor) -> torch.Tensor:
    try:
        h = h + torch.ones(7, 7)
    except RuntimeError:
        notes("caught")
        h = h - 1
    return h


def an_exception_that_is_looked_at(h: torch.Tensor) -> torch.Tensor:
    try:
        h = h + torch.ones(7, 7)
    except RuntimeError as error:
        notes(type(error).__name__)
        h = h * len(error.args) + 1
    return h


def an_exception_that_does_more(h: torch.Tensor) -> torch.Tensor:
    try:
        raise Told
    except ValueError:
        return h + 1


def a_finally_that_does_more(h: torch.Tensor) -> torch.Tensor:
    try:
        h = h + 1
    finally:
        notes("finally")
    return h


def a_loop_that_does_more(h: torch.Tensor) -> torch.Tensor:
    count = 0
    while count < 2:
        notes("round")
        count += 1
    return h + count


def a_module_that_may_be_another(h: torch.Tensor) -> torch.Tensor:
    act: Any = torch.relu
    try:
        h = h * 2
        act = tells
        h = h + torch.ones(7, 7)
        act = torch.relu
    except RuntimeError:
        pass
    return act(h) + 1


def tells(h: torch.Tensor) -> torch.Tensor:
    notes("called")
    return h


def behind_a_loop_that_is_left(h: torch.Tensor) -> torch.Tensor:
    act: Any = tells
    while True:
        if h.dim() == 2:
            break
        act = torch.relu
    return act(h) + 1


RUN_EACH_TIME = [
    a_handler_that_does_more,
    an_exception_that_is_looked_at,
    an_exception_that_does_more,
    a_finally_that_does_more,
    a_loop_that_does_more,
    a_module_that_may_be_another,
    behind_a_loop_that_is_left,
]


@pytest.mark.parametrize("function", RUN_EACH_TIME, ids=lambda function: function.__name__)
def test_functions_that_do_more_run_each_time(model: Any, function: Callable[..., Any]) -> None:
    noted, results = [], []
    for compile in (False, True):
        CALLS.clear()
        results.append([applied(model, function, compile=compile) for _ in range(3)])
        noted.append(list(CALLS))
    same(*results)
    assert noted[0] == noted[1] != []
    assert fx.counters.replays == 0


ASSERTING = """
def harmless(h):
    try:
        assert h.dim() == 7, f"{h.dim()} dimensions"
    except AssertionError:
        return h + 1
    return h

def with_a_message_that_does_more(h):
    try:
        assert h.dim() == 7, notes("message")
    except AssertionError:
        return h + 1
    return h
"""


def test_assertions_that_are_caught(model: Any, tmp_path: Path) -> None:
    """In a file of their own: pytest rewrites those of this one."""
    path = tmp_path / "asserting.py"
    path.write_text(ASSERTING)
    names: dict[str, Any] = {"notes": notes}
    exec(compile(ASSERTING, str(path), "exec"), names)
    assert replays(model, names["harmless"]) == 2
    CALLS.clear()
    for _ in range(3):
        applied(model, names["with_a_message_that_does_more"])
    assert CALLS == ["message"] * 3
    assert fx.counters.replays == 2


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

    for index in (1, 2, 3, 0, 7):
        place.fill_(index)
        same(applied(model, function), Hooks(model._module).output("layers.1", function)(x()))
    assert fx.counters.replays == 0
    place.fill_(1)
    assert replays(model, elsewhere) == 2, "where nothing would catch it, it is replayed"
