"""Events and queues: how a driver of one's own serves a block in the documented words, and what becomes of errors."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight.intervention.interleaver import (
    Cancelation,
    EarlyStopException,
    Events,
    Interleaver,
    Mediator,
    OutOfOrderError,
    Value,
)

from ..conftest import both
from ..runtime.test_batching import Rows
from ..runtime.test_interleaver import current
from .test_interleaver import ONE, TWO, rows


def started(*blocks: Callable[[], Any], **options: Any) -> tuple[Interleaver, list[Mediator]]:
    """Return a run and its mediators, with the run not entered yet."""
    mediators = [Mediator(block, name=f"block {number}", **options) for number, block in enumerate(blocks)]
    return Interleaver(mediators), mediators


# -- the box ----------------------------------------------------------------------------------------------------------------


def test_a_value_is_a_box_for_one_value() -> None:
    box = Value()
    assert (box.has_value, box.value, box.get()) == (False, None, None)
    box.put(None)
    assert box.has_value
    box.put(3)
    assert (box.has_value, box.value) == (True, 3)
    assert box.get() == 3
    assert not box.has_value
    box.restore(4)
    assert box.get() == 4


def test_who_waits_for_a_value_is_woken_by_a_put_and_not_by_a_restore() -> None:
    box, seen = Value(), []
    waiter = threading.Thread(target=lambda: seen.append(box.wait()))
    waiter.start()
    box.restore("restored")
    waiter.join(0.05)
    assert waiter.is_alive() and box.lock.locked() and seen == []
    box.put("put")
    waiter.join(60)
    assert seen == ["put"]
    assert box.get() == "put"
    box.put("next")
    assert not box.lock.locked()
    assert box.wait() == "next"


# -- the queues of a mediator -----------------------------------------------------------------------------------------------


def test_the_event_queue_shows_what_the_block_waits_with() -> None:
    inside: list[Any] = []

    def block() -> None:
        inside.append(current().event_queue.has_value)
        current().request("a")
        current().swap("b.i2", "new")
        current().skip("c.input", "unrun")
        current().send(Events.BARRIER, None)
        current().request_once("d")

    run, (mediator,) = started(block)
    queue = mediator.event_queue
    assert isinstance(queue, Mediator.Value)
    assert (queue.has_value, queue.value, queue.get(), queue.wait()) == (False, None, None, None)
    with run:
        assert inside == [False]
        assert queue.has_value
        assert queue.get() == queue.wait() == queue.value == (Events.VALUE, "a.i0")
        run.handle("a", 1)
        assert queue.value == (Events.SWAP, ("b.i2", "new"))
        for _ in range(3):
            run.handle("b", 1)
        assert queue.value == (Events.SKIP, ("c.input.i0", "unrun"))
        run.handle("c.input", 1)
        assert queue.value == (Events.BARRIER, None)
        assert mediator.handle_barrier_event(None, {mediator.name})
        assert queue.value == (Events.VALUE, "d.i0")
        run.handle("d", 1)
        assert not queue.has_value
    assert not queue.has_value


def test_events_are_made_by_the_block_alone() -> None:
    replacement = torch.ones(2)
    run, (mediator,) = started(lambda: current().swap("a", replacement))
    with run:
        queue = mediator.event_queue
        queue.restore(queue.get())
        for change in (queue.restore, queue.put):
            with pytest.raises(ValueError, match=r"waits with \(<Events\.SWAP: 'swap'>, .*Only the block can change"):
                change((Events.VALUE, "a.i0"))
        assert not hasattr(queue, "lock")
        assert mediator.lock == 0
        assert run.handle("a", torch.zeros(2)) is replacement


def test_an_answer_that_is_put_reaches_the_block_at_once() -> None:
    seen: list[Any] = []

    def block() -> None:
        seen.append(current().request("a"))
        seen.append(current().request("b"))

    run, (mediator,) = started(block)
    with run:
        queue = mediator.response_queue
        assert (queue.has_value, queue.value, queue.get(), queue.wait()) == (False, None, None, None)
        queue.put(1)
        assert seen == [1]
        assert not queue.has_value
        queue.restore(2)
        assert seen == [1, 2]
        with pytest.raises(ValueError, match="does not wait for a value"):
            queue.put(3)


# -- answering events -------------------------------------------------------------------------------------------------------


def drive(run: Interleaver, mediator: Mediator, provider: str, value: Any) -> tuple[bool, Any]:
    """Serve a block as the documents describe it; return whether it was served, and what became of the value."""
    run.batcher.current_provider, run.batcher.current_value = provider, value
    event, data = mediator.event_queue.get()
    if event is Events.VALUE:
        served = mediator.handle_value_event(data, provider)
    elif event is Events.SWAP:
        served = mediator.handle_swap_event(provider, *data)
    else:
        served = mediator.handle_skip_event(provider, *data)
    return served, run.batcher.current_value


def test_a_driver_serves_a_block_event_by_event() -> None:
    seen: list[Any] = []

    def block() -> None:
        seen.append(current().request("a"))
        current().swap("a", "replaced")
        current().swap("b", "other")
        current().skip("c.input", "unrun")

    run, (mediator,) = started(block)
    with run:
        assert drive(run, mediator, "z.i0", 0) == (False, 0)
        assert drive(run, mediator, "a.i1", 0) == (False, 0)
        assert seen == []
        assert drive(run, mediator, "a.i0", 1) == (True, "replaced")
        assert seen == [1]
        assert drive(run, mediator, "b.i0", 2) == (True, "other")
        assert drive(run, mediator, "c.input.i0", 3) == (True, 3)
        assert run.take_skip("c.input") == ("unrun",)
        assert not mediator.alive
    assert seen == [1]


def test_an_event_that_the_block_does_not_wait_with_is_refused() -> None:
    run, (mediator,) = started(lambda: current().swap("a", 1))
    with run:
        with pytest.raises(ValueError, match=r"waits with \(<Events\.SWAP: 'swap'>, \('a\.i0', 1\)\).*answered as.*Events\.VALUE"):
            mediator.handle_value_event("a.i0", "a.i0")
        with pytest.raises(ValueError, match=r"answered as .*'b\.i0'"):
            mediator.handle_swap_event("b.i0", "b.i0", 1)
        with pytest.raises(ValueError, match=r"answered as .*'a\.i0', 2"):
            mediator.handle_swap_event("a.i0", "a.i0", 2)
        run.handle("a", 0)
        with pytest.raises(ValueError, match="waits with None"):
            mediator.handle_value_event("a.i0", "a.i0")


def test_handle_and_respond_of_one_mediator() -> None:
    """A driver of one's own can serve a block directly."""
    seen: list[Any] = []

    def block() -> None:
        seen.append(current().request("a"))
        current().swap("a", "replaced")
        seen.append(current().request("b.i3"))

    def other() -> None:
        current().request("a")
        seen.append("other")

    mediator, second = Mediator(block), Mediator(other)
    run = Interleaver([mediator, second])
    with run:
        assert mediator.handle("b.i0", 0) == 0
        assert mediator.handle("a.i1", 0) == 0
        assert seen == []
        assert mediator.handle("a.i0", 1) == "replaced"
        assert mediator.waiting == ("b", 3)
        assert mediator.respond(2) == 2
        assert seen == [1, 2]
        assert not mediator.alive
        assert second.alive
        with pytest.raises(ValueError, match="does not wait"):
            mediator.respond(3)
        assert run.handle("a.i0", 5, iterate=False) == 5
    assert seen == [1, 2, "other"]


def test_a_barrier_event_releases_those_it_names() -> None:
    order: list[str] = []

    def waits() -> None:
        current().send(Events.BARRIER, None)
        order.append(current().name)

    run, mediators = started(waits, waits, waits)
    with run:
        assert not mediators[0].handle_barrier_event("a", None)
        assert not mediators[0].handle_barrier_event("a", {"nobody"})
        assert order == []
        assert mediators[0].handle_barrier_event("a", {"block 0", "block 2"})
        assert order == ["block 0", "block 2"]
        assert mediators[1].alive


def test_an_end_event_ends_the_block_alone() -> None:
    seen: list[str] = []

    def ended() -> None:
        try:
            current().request("a")
        except Cancelation:
            seen.append("ended")
            raise

    def ends_itself() -> None:
        current().handle_end_event()
        seen.append("not reached")

    run, (mediator, _, other) = started(ended, ends_itself, lambda: seen.append(current().request("a")))
    with run:
        mediator.handle_end_event()
        assert seen == ["ended"]
        assert not mediator.alive
        assert other.alive
        run.handle("a", "value")
    assert seen == ["ended", "value"]


def test_an_exception_event_ends_the_block_and_is_raised() -> None:
    run, (mediator, other) = started(lambda: current().request("a"), lambda: current().request("a"))
    with run:
        with pytest.raises(KeyError, match="mine"):
            mediator.handle_exception_event(KeyError("mine"))
        assert not mediator.alive and other.alive
        run.defer_exceptions = True
        error = KeyError("kept")
        assert other.handle_exception_event(error) is False
        assert other.deferred_exception is error
        assert not other.alive


def test_a_mediator_as_a_context_ends_its_block() -> None:
    ended: list[bool] = []

    def block() -> None:
        try:
            current().request("a")
        finally:
            ended.append(True)

    run = Interleaver()
    with run:
        with Mediator(block) as mediator:
            mediator.start(run)
            assert mediator.alive and ended == []
        assert ended == [True] and not mediator.alive


# -- errors that wait -------------------------------------------------------------------------------------------------------


@both
def test_a_deferred_error_ends_its_block_and_no_other(rows: Rows, compile: bool) -> None:
    mediators: list[Mediator] = []

    def trace() -> tuple[torch.Tensor, torch.Tensor]:
        with rows.trace(compile=compile) as tracer:
            with tracer.invoke(ONE):
                rows.interleaver.defer_exceptions = True
                mediators.append(rows.interleaver.current)
                rows[0].output[:] = 0
                raise KeyError("of the first")
            with tracer.invoke(TWO):
                mediators.append(rows.interleaver.current)
                out = rows.output.save()
            with tracer.invoke():
                whole = rows.output.save()
        return out, whole

    module = rows._module
    for _ in range(2):
        mediators.clear()
        out, whole = trace()
        first, second = mediators
        assert torch.allclose(out, module(TWO), atol=1e-6)
        assert torch.allclose(whole[:1], module[1](torch.zeros(1, 3)), atol=1e-6)
        assert isinstance(first.deferred_exception, KeyError) and first.deferred_exception.args == ("of the first",)
        assert second.deferred_exception is None
        assert 'raise KeyError("of the first")' in "".join(traceback.format_exception(first.deferred_exception))


def test_what_is_deferred_includes_a_location_that_never_came_and_no_stop() -> None:
    def stops() -> None:
        current().request("a")
        raise EarlyStopException

    run, (waits, _) = started(lambda: current().request("never"), stops)
    run.defer_exceptions = True
    with run:
        run.check_dangling_mediators()
        assert isinstance(waits.deferred_exception, OutOfOrderError)
    run, _ = started(stops)
    run.defer_exceptions = True
    reached: list[int] = []
    with run:
        run.handle("a", 1)
        reached.append(1)
    assert reached == []
    run.initialize([Mediator(stops)])
    assert run.defer_exceptions is False
    run, (mediator,) = started(lambda: {}[0])
    with pytest.raises(KeyError):
        run.__enter__()
    assert mediator.deferred_exception is None
