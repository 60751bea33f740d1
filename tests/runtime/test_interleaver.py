"""The interleaver: one primitive, ``handle``, and strict turns between a model and its blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.runtime import Interleaver, Mediator, OutOfOrderError, active_interleaver

from ..conftest import assert_no_instrumentation, both


class Shared(torch.nn.Module):
    """Calls one module several times, one under two names, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.step = torch.nn.Linear(3, 3)
        self.alias = self.step
        self.items = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.step(x)
        x = self.step(x)
        for item in self.items:
            x = item(x)
        return self.alias(x)


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Shared(), compile={"backend": "eager"})


X = torch.ones(2, 3)


# -- without a model -------------------------------------------------------------------------------------------------


def walk(block: Callable[[], Any], *offers: tuple[str, Any]) -> list[Any]:
    """Offer values to one block and return what became of them."""
    run = Interleaver([Mediator(block)])
    with run:
        results = [run.handle(location, value) for location, value in offers]
        run.finish()
    return results


def current() -> Mediator:
    run = active_interleaver()
    assert run is not None and run.current is not None
    return run.current


def test_handle_serves_who_waits_and_returns_the_replacement() -> None:
    seen: list[Any] = []

    def block() -> None:
        seen.append(current().request("b"))
        current().swap("c", "new")

    assert walk(block, ("a", 1), ("b", 2), ("c", 3), ("d", 4)) == [1, 2, "new", 4]
    assert seen == [2]


def test_a_location_may_be_read_again_while_the_model_stands_there() -> None:
    seen: list[Any] = []

    def block() -> None:
        seen.append(current().request("a"))
        current().swap("a", 10)
        seen.append(current().request("a"))
        current().swap("a", 20)

    assert walk(block, ("a", 1)) == [20]
    assert seen == [1, 10]


def test_several_blocks_take_turns_in_their_order() -> None:
    def block(number: int) -> Callable[[], None]:
        def function() -> None:
            current().swap("a", current().request("a") * 10 + number)

        return function

    run = Interleaver([Mediator(block(1)), Mediator(block(2)), Mediator(block(3))])
    with run:
        assert run.handle("a", 0) == 123
        run.finish()


def test_the_run_is_active_only_inside() -> None:
    run = Interleaver([])
    assert active_interleaver() is None
    assert not run.interleaving
    with run:
        assert active_interleaver() is run
        assert run.interleaving
    assert active_interleaver() is None


def test_a_cancelled_block_runs_its_finally() -> None:
    events: list[str] = []

    def block() -> None:
        try:
            current().request("never")
        finally:
            events.append("finally")

    run = Interleaver([Mediator(block)])
    with run:
        assert run.waited == {"never": 1}
    assert events == ["finally"]
    assert run.waited == {}


def test_blocks_that_start_before_a_failing_one_are_ended() -> None:
    events: list[str] = []

    def waits() -> None:
        try:
            current().request("a")
        finally:
            events.append("ended")

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        Interleaver([Mediator(waits), Mediator(fails)]).__enter__()
    assert events == ["ended"]
    assert active_interleaver() is None


# -- with a model, eager and compiled ---------------------------------------------------------------------------------


@both
def test_a_later_call_cannot_be_had_by_asking_late(model: NNsight, compile: bool) -> None:
    """The call of `step` that is still to come is not served in place of the first one, which has passed."""
    with pytest.raises(OutOfOrderError, match=r"model\.step\.output\.i0"):
        with model.trace(X, compile=compile):
            model.items[0].output  # noqa: B018
            model.step.output  # noqa: B018


@both
def test_two_threads_trace_one_model(model: NNsight, compile: bool) -> None:
    """Each gets its own values and its own edits; runs meet inside the model."""
    model._module.eval()
    barrier = threading.Barrier(2, timeout=120)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    with torch.no_grad():
        model(X)

    def trace(number: int) -> None:
        try:
            torch.set_num_threads(1)
            with torch.no_grad():
                for repeat in range(8):
                    x = X * (10 * number + repeat)
                    barrier.wait()
                    with model.trace(x, compile=compile):
                        given = model.input.clone().save()
                        barrier.wait()
                        hidden = model.items[0].output
                        hidden += number
                        state = hidden.clone().save()
                        barrier.wait()
                        out = model.output.save()
                    results[number, repeat] = (x, given, state, out)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=trace, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors, errors
    module = model._module
    with torch.no_grad():
        for (number, _), (x, given, state, out) in results.items():
            assert torch.equal(given, x)
            expected = module.items[0](module.step(module.step(x))) + number
            assert torch.equal(state, expected)
            assert torch.equal(out, module.step(module.items[1](expected)))
    assert len(results) == 16
    assert_no_instrumentation(module)


@both
def test_a_thread_without_a_trace_runs_the_plain_model(model: NNsight, compile: bool) -> None:
    """While one thread stands inside a trace, another calls the model and sees nothing of it."""
    expected = model._module(X)
    plain: list[torch.Tensor] = []

    def call() -> None:
        plain.append(model._module(X))
        plain.append(model(X))

    with model.trace(X, compile=compile):
        model.step.output = torch.zeros(2, 3)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
        out = model.output.save()
    assert len(plain) == 2
    assert torch.equal(plain[0], expected)
    assert torch.equal(plain[1], expected)
    assert not torch.equal(out, expected)
