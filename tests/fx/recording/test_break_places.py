"""Every kind of demand in every place of a block: as with plain hooks, in a compiled trace, whatever lowers its pieces.

What is compared are values, what is printed and logged, lists that the block appends to, and random numbers drawn behind it; and the
second compiled run compiles nothing.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nnsight import fx

from ...conftest import Hooks, Rows, assert_no_instrumentation
from .test_cut_reasons import DEMANDS, _debugger, counter, logger  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.usefixtures("no_grad", "_debugger"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept"),
]

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
Log = list[Any]
Need = Callable[[Any, Log], Any]
Values = dict[str, Any]


class Apart(torch.nn.Linear):
    """Breaks the graph of the model."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Broken(torch.nn.Module):
    """Has a graph on either side of a module that runs as Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.apart, self.second, self.last = (
            kind(4, 4) for kind in (torch.nn.Linear, Apart, torch.nn.Linear, torch.nn.Linear)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.apart(self.first(x))
        return self.last(self.second(x))


class Again(torch.nn.Module):
    """Calls a module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.last(x)


def _row() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))


def changed_by(need: Need, log: Log, value: Any) -> Any:
    changed = need(value, log)
    log.append("behind")
    return value if changed is None else changed


# -- places: a block, and the same with hooks --------------------------------------------------------------------------


def in_invokes(model: Any, need: Need, log: Log, compile: bool) -> tuple[Values, Any]:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X.clone()):
            log.append("first")
            model[1].output = changed_by(need, log, model[1].output)
            one = model.output.save()
        with tracer.invoke(X.flip(0)):
            model[2].output = changed_by(need, log, model[2].output)
            other = model.output.save()
        with tracer.invoke():
            both = model[2].output.clone().save()
    return {"one": one, "other": other, "both": both}, tracer


def in_invokes_by_hand(net: torch.nn.Module, need: Need, log: Log) -> Values:
    hooks = Hooks(net)
    log.append("first")

    def first(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([changed_by(need, log, out[:3]), out[3:]])

    def second(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:3], changed_by(need, log, out[3:])])

    out = hooks.output("1", first).output("2", second).output("2", hooks.keep("both"))(torch.cat([X, X.flip(0)]))
    return {"one": out[:3], "other": out[3:], **hooks.seen}


def at_steps(model: Any, need: Need, log: Log, compile: bool) -> tuple[Values, Any]:
    kept = []
    with model.trace(X.clone(), compile=compile) as tracer:
        for step in tracer.iter[:3]:
            log.append(step)
            if step != 1:
                model.layer.output = changed_by(need, log, model.layer.output)
            kept.append(model.layer.output.clone().save())
        out = model.last.output.save()
    return {"kept": kept, "out": out}, tracer


def at_steps_by_hand(net: torch.nn.Module, need: Need, log: Log) -> Values:
    kept: list[torch.Tensor] = []

    def edit(out: torch.Tensor) -> torch.Tensor:
        log.append(len(kept))
        out = changed_by(need, log, out) if len(kept) != 1 else out
        kept.append(out.clone())
        return out

    return {"out": Hooks(net).output("layer", edit)(X.clone()), "kept": kept}


def in_an_edit(model: Any, need: Need, log: Log, compile: bool) -> tuple[Values, Any]:
    """A block that is kept and runs in the trace of another one, which has a cut of its own."""
    with model.edit() as edited:
        model[1].output = changed_by(need, log, model[1].output)
    with edited.trace(X.clone(), compile=compile) as tracer:
        seen = edited[1].output.clone().save()
        log.append(round(edited[2].output.sum().item(), 3))
        out = edited.output.save()
    return {"seen": seen, "out": out}, tracer


def in_an_edit_by_hand(net: torch.nn.Module, need: Need, log: Log) -> Values:
    hooks = Hooks(net)
    hooks.output("1", lambda out: changed_by(need, log, out)).output("1", hooks.keep("seen"))
    hooks.output("2", lambda out: log.append(round(out.sum().item(), 3)))
    return {"out": hooks(X.clone()), **hooks.seen}


def in_a_trace_inside(model: Any, need: Need, log: Log, compile: bool) -> tuple[Values, Any]:
    with model.trace(X.clone(), compile=compile) as tracer:
        outer = model[0].output * 2
        with model.trace(X.flip(0), compile=compile):
            model[1].output = changed_by(need, log, model[1].output)
            inner = model.output.save()
        model[1].output += 1.0
        out = (model.output + outer).save()
    return {"inner": inner, "out": out}, tracer


def in_a_trace_inside_by_hand(net: torch.nn.Module, need: Need, log: Log) -> Values:
    found: Values = {}

    def start(out: torch.Tensor) -> None:
        found["outer"] = out * 2
        handles = [hook for module in net.modules() for hook in module._forward_hooks.values()]
        assert len(handles) == 2
        inside = Hooks(net).output("1", lambda out: changed_by(need, log, out))
        saved = [dict(module._forward_hooks) for module in net.modules()]
        for module in net.modules():
            module._forward_hooks.clear()
        found["inner"] = inside(X.flip(0))
        for module, hooks in zip(net.modules(), saved, strict=True):
            module._forward_hooks.update(hooks)

    out = Hooks(net).output("0", start).output("1", lambda out: out + 1.0)(X.clone())
    return {"inner": found["inner"], "out": out + found["outer"]}


def beside_a_break_of_the_model(model: Any, need: Need, log: Log, compile: bool) -> tuple[Values, Any]:
    """In the graph before a module that runs as Python, at that, and in the graph behind it."""
    with model.trace(X.clone(), compile=compile) as tracer:
        first = model.first.output
        model.first.output = changed_by(need, log, first)
        model.apart.output = changed_by(need, log, model.apart.output)
        model.second.output = changed_by(need, log, model.second.output) + first
        out = model.output.save()
    return {"out": out}, tracer


def beside_a_break_of_the_model_by_hand(net: torch.nn.Module, need: Need, log: Log) -> Values:
    hooks = Hooks(net)
    seen: Values = {}

    def first(out: torch.Tensor) -> torch.Tensor:
        seen["first"] = out
        return changed_by(need, log, out)

    hooks.output("first", first).output("apart", lambda out: changed_by(need, log, out))
    hooks.output("second", lambda out: changed_by(need, log, out) + seen["first"])
    return {"out": hooks(X.clone())}


@dataclass(frozen=True)
class Place:
    """A block with one demand or more, the same with hooks, and the model.

    Attributes:
        block: The block.
        by_hand: The same.
        demands: How often values are needed where they are not there.
        cuts: How often the graph is cut besides.
        make: Makes the model.
    """

    block: Callable[..., tuple[Values, Any]]
    by_hand: Callable[..., Values]
    demands: int
    cuts: int = 0
    make: Callable[[], torch.nn.Module] = _row


PLACES = [
    Place(in_invokes, in_invokes_by_hand, 2),
    Place(at_steps, at_steps_by_hand, 2, 0, Again),
    Place(in_an_edit, in_an_edit_by_hand, 1, 1),
    Place(in_a_trace_inside, in_a_trace_inside_by_hand, 1),
    Place(beside_a_break_of_the_model, beside_a_break_of_the_model_by_hand, 2, 0, Broken),
]


@functools.cache
def model_of(make: Callable[[], torch.nn.Module], backend: str) -> Any:
    """Return one model for all kinds, so that programs of one must not be taken for those of another."""
    torch.manual_seed(0)
    return Rows(make(), compile={"backend": backend})


def check(place: Place, need: Need, backend: str, capsys: Any, caplog: Any) -> None:
    model = model_of(place.make, backend)
    caplog.set_level(logging.WARNING, logger=logger.name)

    def observed(run: Callable[[Log], Any]) -> tuple[Any, ...]:
        log: Log = []
        counter["calls"] = 0
        caplog.clear()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            random.seed(3)
            found = run(log)
            drawn = (torch.rand(1).item(), random.random())
        values, *tracer = found if isinstance(found, tuple) else (found,)
        return values, [log, capsys.readouterr().out, caplog.messages[:], drawn], tracer

    expected, effects, _ = observed(lambda log: place.by_hand(model._module, need, log))
    exact = backend != "inductor"
    for compile in (False, True, True):
        fx.counters.reset()
        found, its_effects, tracer = observed(lambda log: place.block(model, need, log, compile))  # noqa: B023
        assert found.keys() <= expected.keys() and found
        for name, value in found.items():
            tolerance = 0.0 if exact or not compile else 1e-5
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)
        if exact:
            assert repr(its_effects) == repr(effects), "side effects, in their order"
        else:
            assert len(its_effects[0]) == len(effects[0]) and its_effects[3] == effects[3]
    assert fx.counters.breaks == place.demands + place.cuts
    assert tracer[0].report.mode == "compiled"
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0, "the second run is known"
    assert_no_instrumentation(model._module)


#: Each demand that cuts once, in one of the places.
CASES = [(PLACES[number % len(PLACES)], need) for number, (need, cuts) in enumerate(DEMANDS) if cuts == 1]


def some(step: int) -> Any:
    """Return every case number ``step``, for ``parametrize``."""
    chosen = [pytest.param(place, need, id=f"{place.block.__name__}-{need.__name__}") for place, need in CASES[::step]]
    return pytest.mark.parametrize(("place", "need"), chosen)


@some(2)
def test_a_demand_in_its_place(
    place: Place, need: Need, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    check(place, need, "eager", capsys, caplog)


@pytest.mark.slow
@some(1)
def test_a_demand_in_its_place_of_pieces_that_are_lowered(
    place: Place, need: Need, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    check(place, need, "aot_eager", capsys, caplog)


@pytest.mark.slow
@some(9)
def test_a_demand_in_its_place_of_pieces_of_inductor(
    place: Place, need: Need, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    check(place, need, "inductor", capsys, caplog)
