"""A mediator with the documented names of earlier versions: what a block asks for, what it knows, and what it runs."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from greenlet import getcurrent

from nnsight import NNsight
from nnsight.intervention.batching import BatchGroup
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import (
    NNSIGHT_PREFIX,
    Cancelation,
    Events,
    Interleaver,
    Mediator,
    OutOfOrderError,
    SkipException,
)

from ..conftest import assert_no_instrumentation, both
from ..runtime.test_batching import Rows
from ..runtime.test_interleaver import current
from .test_interleaver import ONE, TWO, Repeated, X, model, rows


def passes(module: Repeated) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the three calls of the model return."""
    first = module.first(X)
    second = module.step(first)
    return first, second, module.step(second)


def walk(blocks: list[Callable[[], Any]], *offers: tuple[str, Any]) -> list[Any]:
    """Offer values to blocks and return what became of them."""
    run = Interleaver([Mediator(block, name=f"block {number}") for number, block in enumerate(blocks)])
    with run:
        results = [run.handle(location, value) for location, value in offers]
        run.check_dangling_mediators()
    return results


# -- requests of a block -----------------------------------------------------------------------------------------------------


@both
def test_requests_by_the_name_of_a_location(model: NNsight, compile: bool) -> None:
    """The property that the documents derive `.output` from, written out by hand."""

    class Own(Envoy):
        @property
        def result(self) -> Any:
            return self.interleaver.current.request(self.interleaver.iterate_requester(f"{self.path}.output"))

        @result.setter
        def result(self, value: Any) -> None:
            self.interleaver.current.swap(self.interleaver.iterate_requester(f"{self.path}.output"), value)

        @property
        def plain(self) -> Any:
            return self.interleaver.current.request(f"{self.path}.output")

    model = NNsight(model._module, compile={"backend": "eager"}, envoys=Own)
    with model.trace(X, compile=compile):
        first = model.first.result.clone().save()
        model.first.result = model.first.plain * 2
        again = model.first.result.save()
        out = model.output.save()
    module = model._module
    expected = module.first(X)
    assert torch.equal(first, expected)
    assert torch.equal(again, expected * 2)
    assert torch.equal(out, module.step(module.step(expected * 2)))


@both
def test_a_number_asks_for_one_occurrence(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile):
        mediator = model.interleaver.current
        second = mediator.request("model.step.output.i1").clone().save()
        same = mediator.request("model.step.output.i1") is mediator.request("model.step.output.i1")
        mediator.swap("model.step.output.i1", second * 3)
        out = model.output.save()
        same.save()
    assert torch.equal(second, passes(model._module)[2])
    assert same
    assert torch.equal(out, second * 3)
    with pytest.raises(OutOfOrderError, match=r"missed for model\.step\.output\.i0"):
        with model.trace(X, compile=compile):
            mediator = model.interleaver.current
            mediator.request("model.step.output.i1")
            mediator.request("model.step.output.i0")
    with pytest.raises(OutOfOrderError, match=r"`model\.step\.output\.i2` was not provided: it occurred only 2 times"):
        with model.trace(X, compile=compile):
            model.interleaver.current.request("model.step.output.i2")


@both
def test_skip_by_the_name_of_an_input(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile):
        mediator = model.interleaver.current
        mediator.skip(model.interleaver.iterate_requester("model.first.input"), torch.ones(2, 3))
        mediator.skip("model.step.input.i1", torch.zeros(2, 3))
        out = model.output.save()
    assert torch.equal(out, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"skipped at its input.*not at `model\.first`"):
        with model.trace(X, compile=compile):
            model.interleaver.current.skip("model.first", X)


@both
def test_skip_exception_skips_the_module_and_ends_the_block(model: NNsight, compile: bool) -> None:
    reached: list[int] = []
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            model.first.input  # noqa: B018
            raise SkipException(torch.ones(2, 3))
            reached.append(1)
        with tracer.invoke():
            first = model.first.output.save()
            out = model.output.save()
    assert reached == []
    assert torch.equal(first, torch.ones(2, 3))
    assert torch.equal(out, model._module.step(model._module.step(torch.ones(2, 3))))
    with pytest.raises(ValueError, match="SkipException was raised where no module is about to run"):
        with model.trace(X, compile=compile):
            model.first.output  # noqa: B018
            raise SkipException(X)


@both
def test_stop_end_and_exception(model: NNsight, compile: bool) -> None:
    after: list[str] = []
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            model.first.output[:] = 0
            model.interleaver.current.end()
            after.append("end")
        with tracer.invoke():
            out = model.output.save()
    assert torch.equal(out, model._module.step(model._module.step(torch.zeros(2, 3))))
    calls: list[int] = []
    handle = model._module.step.register_forward_hook(lambda *_: calls.append(1))
    with model.trace(X, compile=False):
        first = model.first.output.save()
        model.interleaver.current.stop()
        after.append("stop")
    handle.remove()
    assert torch.equal(first, passes(model._module)[0])
    assert calls == []
    with pytest.raises(KeyError, match="mine"):
        with model.trace(X, compile=compile):
            model.interleaver.current.exception(KeyError("mine"))
    assert after == []
    assert_no_instrumentation(model._module)


def test_send_is_the_method_of_the_event() -> None:
    seen: list[Any] = []

    def block() -> None:
        send = current().send
        seen.append(send(Events.VALUE, "a.input"))
        send(Events.SWAP, ("a.input", 10))
        send(Events.SKIP, ("b.input.i0", 20))
        seen.append(current().interleaver.skips)
        send(Events.END)
        seen.append("not reached")

    assert walk([block], ("a.input", 1), ("b.input", 2)) == [10, 2]
    assert seen[0] == 1
    assert len(seen) == 2
    with pytest.raises(KeyError, match="sent"):
        walk([lambda: current().send(Events.EXCEPTION, KeyError("sent"))])
    assert {event.name for event in Events} == {"VALUE", "SWAP", "END", "EXCEPTION", "SKIP", "BARRIER"}


def test_a_barrier_by_events() -> None:
    order: list[str] = []

    def waits() -> None:
        current().send(Events.BARRIER, None)
        order.append(f"released at {current().request('a')}")

    def releases() -> None:
        order.append(f"stands at {current().request('a')}")
        current().send(Events.BARRIER, {"block 0"})
        order.append("goes on")

    assert walk([waits, releases], ("a", 1)) == [1]
    assert order == ["stands at 1", "goes on", "released at 1"]


def test_a_cancelled_block_sees_the_cancelation() -> None:
    events: list[str] = []

    def block() -> None:
        try:
            current().request("never")
        except Cancelation:
            events.append("cancelled")
            raise

    run = Interleaver([Mediator(block)])
    with run:
        run.cancel()
    assert events == ["cancelled"]


# -- what it knows ----------------------------------------------------------------------------------------------------------


@both
def test_history_has_the_occurrences_so_far(model: NNsight, compile: bool) -> None:
    mediators: list[Mediator] = []
    with model.trace(X, compile=compile):
        mediators.append(mediator := model.interleaver.current)
        before = set(mediator.history).save()
        mediator.request("model.step.output.i1")
        history = mediator.history.save()
        tracker = mediator.iteration_tracker.save()
    assert before == set()
    expected = {"model.first": 1, "model.step": 2}
    assert {entry for entry in history if "output" in entry} == {
        "model.first.output.i0",
        "model.step.output.i0",
        "model.step.output.i1",
    }
    for path, count in expected.items():
        assert tracker[f"{path}.output"] == tracker[f"{path}.input"] == count
    assert tracker["model.input"] == 1
    assert tracker["model.output"] == 0
    assert mediators[0].history == set()


def test_the_worker_is_a_greenlet_and_the_frame_is_the_blocks() -> None:
    seen: list[Any] = []

    def block() -> None:
        marker = "in the block"
        mediator = current()
        seen.append(mediator.worker is getcurrent())
        seen.append(mediator.frame.f_locals["marker"])
        mediator.request("a")

    mediator = Mediator(block)
    assert mediator.frame is None
    assert mediator.worker is None
    run = Interleaver([mediator])
    with run:
        assert mediator.frame.f_code is block.__code__
        assert mediator.frame.f_locals["marker"] == "in the block"
        run.handle("a", 1)
        assert mediator.frame is None
    assert seen == [True, "in the block"]


@both
def test_frame_and_info_of_a_captured_block(model: NNsight, compile: bool) -> None:
    mediators: list[Mediator] = []
    line = sys._getframe().f_lineno + 1
    with model.trace(X, compile=compile):
        mediators.append(mediator := model.interleaver.current)
        facts = (mediator.frame.f_code.co_filename, mediator.info.filename, mediator.info.line).save()
    assert facts == (__file__, __file__, line)
    assert mediators[0].frame is None


def test_names_of_mediators() -> None:
    assert Mediator(print, name="mine").name == "mine"
    unnamed = Mediator(print)
    assert unnamed.name == f"Mediator{id(unnamed)}"
    assert unnamed.idx is None
    assert NNSIGHT_PREFIX == "__nnsight"


@both
def test_the_caches_of_a_block(rows: Rows, compile: bool) -> None:
    mediators: list[Mediator] = []
    with rows.trace(compile=compile) as tracer:
        with tracer.invoke(ONE):
            cache = tracer.cache(modules=[rows[0]], include_inputs=True)
            mine = [found is cache for found in rows.interleaver.current.user_cache].save()
            mediators.append(rows.interleaver.current)
        with tracer.invoke(TWO):
            none = rows.interleaver.current.user_cache.save()
            rows.interleaver.current.set_user_cache(cache)
            again = len(rows.interleaver.current.user_cache).save()
    assert (mine, none, again) == ([True], [], 1)
    assert mediators[0].user_cache == []
    for values, expected in ((cache["model.0"].output, rows._module[0]), (cache["model.0"].input, lambda x: x)):
        assert len(values) == 2
        assert torch.allclose(values[0], expected(ONE)) and torch.allclose(values[1], expected(TWO))
    with pytest.raises(ValueError, match="is not in a run"):
        mediators[0].set_user_cache(cache)


# -- variables --------------------------------------------------------------------------------------------------------------


def test_push_shows_variables_at_once() -> None:
    shown: list[str] = []

    def block() -> None:
        shown.append("begins")
        current().push()
        shown.append("asks")
        current().request("a")

    run = Interleaver([Mediator(block, publish=lambda: shown.append("shown"))])
    with run:
        assert shown == ["begins", "shown", "asks", "shown"]
        run.handle("a", 1)
    assert shown == ["begins", "shown", "asks", "shown", "shown"]
    Mediator(block).push()


@both
def test_pull_binds_what_others_have_pushed(rows: Rows, compile: bool) -> None:
    with rows.trace(compile=compile) as tracer:
        with tracer.invoke(ONE):
            shared = rows[0].output
            shares = rows.interleaver.current.cross_invoker.save()
            rows[1].output  # noqa: B018
        with tracer.invoke(TWO):
            rows[1].input  # noqa: B018
            rows.interleaver.current.pull()
            shared = shared * 2
            rows.interleaver.current.pull()
            doubled = shared.save()
    assert torch.allclose(doubled, rows._module[0](ONE) * 2)
    assert shares is True


def test_without_sharing_there_is_nothing_to_pull(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNSIGHT_APP_CROSS_INVOKER", "false")
    with pytest.raises(NameError, match="shared"):
        with rows.trace(compile=False) as tracer:
            with tracer.invoke(ONE):
                shared = rows[0].output
            with tracer.invoke(TWO):
                assert rows.interleaver.current.cross_invoker is False
                rows[1].input  # noqa: B018
                rows.interleaver.current.pull()
                shared = shared * 2
    Mediator(print).pull()


# -- what a mediator runs ---------------------------------------------------------------------------------------------------


SEEN: list[Any] = []


def reads(factor: int = 1) -> None:
    """A block that can be pickled."""
    SEEN.append(current().request("a") * factor)


@pytest.fixture
def seen() -> list[Any]:
    SEEN.clear()
    return SEEN


def offer(mediator: Mediator, *values: Any) -> None:
    with Interleaver([mediator]) as run:
        for value in values:
            run.handle("a", value)


def test_arguments_of_the_function_of_a_block(seen: list[Any]) -> None:
    mediator = Mediator(reads)
    assert mediator.args == []
    mediator.args.append(100)
    offer(mediator, 1)
    assert seen == [100]


def test_a_block_runs_as_often_as_it_is_told(seen: list[Any]) -> None:
    mediator = Mediator(reads, None, "mine", None, 3)
    mediator.args = [2]
    assert (mediator.all_stop, Mediator(reads).all_stop) == (3, None)
    offer(mediator, 1, 2, 3, 4)
    assert seen == [2, 4, 6]
    assert mediator.all_stop == 3


@pytest.mark.parametrize("stop", [None, 2])
def test_the_globals_of_a_block(seen: list[Any], stop: int | None) -> None:
    mediator = Mediator(reads, stop=stop)
    mediator.args = [1]
    assert mediator.original_globals == {}
    with Interleaver([mediator]) as run:
        assert mediator.original_globals is globals()
        assert mediator.frame is not None and mediator.frame.f_code is reads.__code__
        run.handle("a", 1)
        run.handle("a", 1)
    assert mediator.original_globals == {}


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_mediator_travels_before_its_run(seen: list[Any], way: Callable[[Mediator], Mediator]) -> None:
    mediator = Mediator(reads, None, "mine", BatchGroup(1, 2, 3), 2)
    mediator.args = [3]
    mediator.iteration = 1
    arrived = way(mediator)
    assert (arrived.name, arrived.batch_group, arrived.all_stop) == ("mine", BatchGroup(1, 2, 3), 2)
    assert (arrived.args, arrived.iteration, arrived.interleaver) == ([3], 1, None)
    offer(arrived, torch.ones(3), torch.ones(3) * 2)
    assert [value.tolist() for value in seen] == [[3.0, 3.0], [6.0, 6.0]]
    offer(mediator, torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="has already started: copy or pickle a mediator before its run"):
        way(mediator)
