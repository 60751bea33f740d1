"""What a driver of one's own sees of blocks and their run, and how it serves them in the documented words."""

from __future__ import annotations

import copy
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import CONFIG, NNsight
from nnsight.intervention.batching import Batcher, BatchGroup
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import (
    Cancelation,
    EarlyStopException,
    Events,
    Interleaver,
    Mediator,
    OutOfOrderError,
    Value,
)

from .conftest import assert_no_instrumentation
from .test_batching import Rows

both = pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
X = torch.arange(6.0).reshape(2, 3)
ONE, TWO = torch.ones(1, 3), torch.full((2, 3), 2.0)


def current() -> Mediator:
    mediator = Envoy(torch.nn.Identity()).interleaver.current
    assert mediator is not None
    return mediator


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


@pytest.fixture
def model() -> NNsight:
    return NNsight(two_layers(), compile={"backend": "eager"})


@pytest.fixture
def rows() -> Rows:
    return Rows(two_layers(), compile={"backend": "eager"})


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
    assert (queue.has_value, queue.value, queue.get()) == (False, None, None)
    with pytest.raises(ValueError, match="has not begun, is running now, or has ended"):
        queue.wait()
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
        with pytest.raises(ValueError, match=r"waits with Events\.SWAP for `a\.i0`; an event cannot be changed"):
            queue.restore((Events.VALUE, "a.i0"))
        with pytest.raises(ValueError, match="Only the block itself"):
            queue.put((Events.VALUE, "b"))
        with pytest.raises(AttributeError, match="have no lock"):
            queue.lock  # noqa: B018
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
        assert (queue.has_value, queue.value, queue.get()) == (False, None, None)
        queue.put(1)
        assert seen == [1]
        assert not queue.has_value
        queue.restore(2)
        assert seen == [1, 2]
        with pytest.raises(ValueError, match="does not wait for a value"):
            queue.put(3)
        with pytest.raises(ValueError, match=r"what `mediator\.send"):
            queue.wait()


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
        seen.append(current().skip_container)

    run, (mediator,) = started(block)
    with run:
        assert drive(run, mediator, "z.i0", 0) == (False, 0)
        assert drive(run, mediator, "a.i1", 0) == (False, 0)
        assert seen == []
        assert drive(run, mediator, "a.i0", 1) == (True, "replaced")
        assert seen == [1]
        assert drive(run, mediator, "b", 2) == (True, "other")
        assert mediator.skip_container is None
        assert drive(run, mediator, "c.input.i0", 3) == (True, 3)
        assert run.take_skip("c.input") == ("unrun",)
        assert not mediator.alive
    assert seen == [1, {"c.input": "unrun"}]


def test_a_block_that_waits_for_what_is_over_gets_an_error() -> None:
    caught: list[str] = []

    def block() -> None:
        try:
            current().request("a")
        except OutOfOrderError as error:
            caught.append(str(error))
            current().request("b")

    run, (mediator,) = started(block)
    with run:
        assert not mediator.handle_value_event("a.i0", "b.i0")
        assert caught == []
        run.counts["a"] = 1  # by a driver that counts by itself
        assert not mediator.handle_value_event("a.i0", "b.i0")
        assert len(caught) == 1 and "missed for a.i0" in caught[0]
        assert mediator.waiting == ("b", 0)


def test_an_event_that_the_block_does_not_wait_with_is_refused() -> None:
    run, (mediator,) = started(lambda: current().swap("a", 1))
    with run:
        with pytest.raises(ValueError, match=r"does not wait with Events\.VALUE for `a`, but it waits with Events\.SWAP for `a\.i0`"):
            mediator.handle_value_event("a", "a")
        with pytest.raises(ValueError, match=r"for `b`"):
            mediator.handle_swap_event("b", "b", 1)
        with pytest.raises(ValueError, match="not the one that the block waits with"):
            mediator.handle_swap_event("a", "a", 2)
        run.handle("a", 0)
        with pytest.raises(ValueError, match="does not wait for anything"):
            mediator.handle_value_event("a", "a")


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


# -- rows -------------------------------------------------------------------------------------------------------------------


@both
def test_the_batcher_shows_the_whole_batch_and_its_rows(rows: Rows, compile: bool) -> None:
    with rows.trace(compile=compile) as tracer:
        with tracer.invoke(ONE):
            rows[0].output[:] = 0
            rows[0].output = rows[0].output + 5
            batcher = rows.interleaver.batcher
            whole = batcher.current_value.clone().save()
            mine = batcher.narrow(rows.interleaver.current.batch_group).clone().save()
            second = batcher.narrow([1, 2]).clone().save()
            facts = (batcher.current_provider, batcher.total_batch_size, [*batcher.last_batch_group]).save()
            batcher.swap(rows.interleaver.current.batch_group, mine * 2)
        with tracer.invoke(TWO):
            other = rows[0].output.save()
            group = rows.interleaver.current.batch_group
            pair = (group[0], group[1], tuple(group)).save()
            out = rows.output.save()
        with tracer.invoke():
            after = rows[1].input.clone().save()
    linear = rows._module[0]
    assert torch.equal(mine, torch.full((1, 3), 5.0))
    assert torch.allclose(second, linear(TWO))
    assert torch.equal(whole, torch.cat([mine, second]))
    assert facts == ("model.0.output.i0", 3, [1, 2])
    assert pair == (1, 2, (1, 2))
    assert torch.allclose(other, linear(TWO))
    assert torch.allclose(out, rows._module(TWO))
    assert torch.equal(after[:1], torch.full((1, 3), 10.0))


def test_a_block_with_rows_replaces_its_own_only(rows: Rows) -> None:
    with rows.trace(compile=False) as tracer:
        with tracer.invoke(ONE):
            batcher, value = rows.interleaver.batcher, rows[0].output
            with pytest.raises(ValueError, match="its own rows only"):
                batcher.swap([1, 2], value)
            with pytest.raises(ValueError, match="its own rows only"):
                batcher.current_value = value
            with pytest.raises(ValueError, match="cannot move the model"):
                batcher.current_provider = "elsewhere"
        with tracer.invoke(TWO):
            pass


@both
def test_a_block_over_the_whole_batch_replaces_any_rows(rows: Rows, compile: bool) -> None:
    with rows.trace(compile=compile) as tracer:
        with tracer.invoke(ONE):
            first = rows[1].input.clone().save()
        with tracer.invoke(TWO):
            second = rows[1].input.clone().save()
        with tracer.invoke():
            rows[0].output  # noqa: B018
            batcher = rows.interleaver.batcher
            batcher.swap([1, 2], torch.zeros(2, 3))
            seen = rows[0].output.clone().save()
            batcher.current_value = batcher.current_value + 1
    linear = rows._module[0]
    assert torch.allclose(seen, torch.cat([linear(ONE), torch.zeros(2, 3)]))
    assert torch.allclose(first, linear(ONE) + 1)
    assert torch.equal(second, torch.ones(2, 3))


def test_a_driver_holds_out_a_value_to_blocks_with_rows() -> None:
    seen: list[torch.Tensor] = []

    def block() -> None:
        seen.append(current().request("a").clone())
        current().swap("a", torch.zeros(2, 3))
        seen.append(current().interleaver.batcher.current_value)

    mediator = Mediator(block, batch_group=BatchGroup(1, 2, 3))
    run = Interleaver([mediator])
    with run:
        batcher = run.batcher
        assert isinstance(batcher, Batcher)
        assert (batcher.current_value, batcher.current_provider) == (None, None)
        batcher.current_provider, batcher.current_value = "a.i0", torch.ones(3, 3)
        batcher.swap([0, 1], torch.full((1, 3), 7.0))
        assert torch.equal(batcher.narrow([0, 2])[0], torch.full((3,), 7.0))
        assert mediator.handle_value_event("a.i0", "a.i0")
        expected = torch.cat([torch.full((1, 3), 7.0), torch.zeros(2, 3)])
        assert torch.equal(batcher.current_value, expected)
    assert torch.equal(seen[0], torch.ones(2, 3))
    assert torch.equal(seen[1], expected)
    with pytest.raises(ValueError, match="How many rows the whole batch has is not known"):
        Interleaver().batcher.narrow([0, 1])


def test_a_batcher_of_ones_own_is_refused_as_nobody_would_call_it() -> None:
    class Own(Batcher):
        pass

    run = Interleaver()
    assert Interleaver([], None, run.batcher).batcher.current_value is None
    with pytest.raises(TypeError, match=r"would not call the Own.*batch_group"):
        Interleaver([], None, Own(run))


# -- modules and caches -----------------------------------------------------------------------------------------------------


class Hiding(torch.nn.Module):
    """Calls a module that is not one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.nn.Linear(3, 3)]
        self.last = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden[0](self.hidden[0](x)))


def test_a_wrapped_module_is_intercepted_until_the_run_ends() -> None:
    torch.manual_seed(0)
    model = NNsight(Hiding())
    hidden = model._module.hidden[0]
    with model.trace(X, compile=False):
        run = model.interleaver
        run.wrap_module(hidden, "hidden")
        run.wrap_module(hidden, "hidden")
        run.wrap_module(model._module.last)
        given = run.current.request("hidden.input")[0][0].clone().save()
        run.current.swap("hidden.output.i1", torch.zeros(2, 3))
        out = model.output.save()
    assert torch.equal(given, X)
    assert torch.equal(out, model._module.last(torch.zeros(2, 3)))
    assert "_call_impl" not in vars(hidden)
    assert_no_instrumentation(model._module)
    assert torch.equal(model._module(X), model._module.last(hidden(hidden(X))))


def test_a_compiled_graph_does_not_have_a_wrapped_module_and_says_so() -> None:
    model = NNsight(Hiding(), compile={"backend": "eager"})
    with pytest.raises(OutOfOrderError, match=r"captured does not have it\. Trace with `compile=False`"), model.trace(X):
        run = model.interleaver
        run.wrap_module(model._module.hidden[0], "hidden")
        run.current.swap("hidden.output.i1", torch.zeros(2, 3))
    with pytest.raises(OutOfOrderError, match="only 2 times"), model.trace(X, compile=False):
        run = model.interleaver
        run.wrap_module(model._module.hidden[0], "hidden")
        run.current.request("hidden.output.i2")


def test_wrapping_a_module_says_what_is_missing() -> None:
    model = NNsight(Hiding())
    with pytest.raises(ValueError, match="for the time of a run"):
        Interleaver().wrap_module(torch.nn.Linear(1, 1), "mine")
    with pytest.raises(ValueError, match="say by what `path`"):
        with model.trace(X, compile=False):
            model.interleaver.wrap_module(model._module.hidden[0])
    with pytest.raises(ValueError, match=r"is `model\.last` in this model"):
        with model.trace(X, compile=False):
            model.interleaver.wrap_module(model._module.last, "other")
    with pytest.raises(ValueError, match="known as `one` already"):
        with model.trace(X, compile=False):
            model.interleaver.wrap_module(model._module.hidden[0], "one")
            model.interleaver.wrap_module(model._module.hidden[0], "two")
    assert "_call_impl" not in vars(model._module.hidden[0])


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
    with pytest.raises(ValueError, match="is in no run"):
        mediators[0].set_user_cache(cache)


class Partly(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(3, 3)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@both
def test_a_module_that_a_cache_missed_is_warned_of(compile: bool) -> None:
    model = NNsight(Partly(), compile={"backend": "eager"})

    def trace() -> None:
        with model.trace(X, compile=compile) as tracer:
            tracer.cache(modules=[model.used, model.unused])
            tracer.result  # noqa: B018
            model.interleaver.check_cache_full()

    with pytest.warns(UserWarning, match=r"has nothing of `model\.unused`: not called"):
        trace()
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(modules=[model.used])
        tracer.result  # noqa: B018
        model.interleaver.check_cache_full()
    assert torch.equal(cache["model.used"].output, model._module(X))


# -- variables --------------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(CONFIG.APP, "CROSS_INVOKER", False)
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
    assert mediator.args == ()
    mediator.args = [10]
    mediator.args = [100]
    assert mediator.args == (100,)
    offer(mediator, 1)
    assert seen == [100]
    with pytest.raises(ValueError, match="has begun already"):
        mediator.args = [1]


def test_a_block_runs_as_often_as_it_is_told(seen: list[Any]) -> None:
    mediator = Mediator(reads, None, "mine", None, 3)
    mediator.args = [2]
    assert (mediator.all_stop, Mediator(reads).all_stop) == (3, None)
    offer(mediator, 1, 2, 3, 4)
    assert seen == [2, 4, 6]
    assert mediator.all_stop == 3
    with pytest.raises(ValueError, match="at least once; not 0"):
        Mediator(reads, stop=0)
    with pytest.raises(TypeError, match="an int; not str"):
        Mediator(reads, stop="3")  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [None, 2])
def test_the_globals_of_a_block(seen: list[Any], stop: int | None) -> None:
    mediator = Mediator(reads, stop=stop)
    mediator.args = [1]
    assert mediator.original_globals is globals()
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
    assert (arrived.args, arrived.iteration, arrived.interleaver) == ((3,), 1, None)
    offer(arrived, torch.ones(3), torch.ones(3) * 2)
    assert [value.tolist() for value in seen] == [[3.0, 3.0], [6.0, 6.0]]
    offer(mediator, torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="has begun already: copy or pickle a mediator before its run"):
        way(mediator)
