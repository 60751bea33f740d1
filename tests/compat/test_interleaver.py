"""A run with the documented names of earlier versions: where it comes from, the rows of its blocks, its modules and caches."""

from __future__ import annotations

import copy
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from nnsight import NNsight, runtime
from nnsight.intervention.batching import Batcher, BatchGroup
from nnsight.intervention.interleaver import EarlyStopException, Interleaver, Mediator

from ..conftest import both
from ..runtime.test_batching import Rows
from ..runtime.test_interleaver import current

X = torch.arange(6.0).reshape(2, 3)
ONE, TWO = torch.ones(1, 3), torch.full((2, 3), 2.0)


class Repeated(torch.nn.Module):
    """Calls one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.step = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self.step(self.first(x)))


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Repeated(), compile={"backend": "eager"})


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


@pytest.fixture
def rows() -> Rows:
    return Rows(two_layers(), compile={"backend": "eager"})


# -- the interleaver of an envoy ------------------------------------------------------------------------------------------


@both
def test_the_interleaver_of_an_envoy_is_the_run_of_this_context(model: NNsight, compile: bool) -> None:
    runs: list[Interleaver] = []
    idle = model.interleaver
    assert not idle.interleaving
    assert idle.current is None
    assert idle.mediators == []
    with model.trace(X, compile=compile) as tracer:
        runs.append(run := model.interleaver)
        inside = (run.interleaving, run is model.first.interleaver, run.tracer is tracer, run.current in run.mediators)
        facts = [*inside, run.current.batch_group, run.current.idx, len(run.mediators)].save()
        model.output.save()
    assert facts == [True, True, True, True, None, 0, 1]
    (run,) = runs
    assert not run.interleaving
    assert run.tracer is None
    assert run.mediators == []


@both
def test_iterate_requester_says_which_occurrence_is_meant(model: NNsight, compile: bool) -> None:
    seen: list[str] = []
    with model.trace(X, compile=compile) as tracer:
        run = model.interleaver
        seen.append(run.iterate_requester("model.step.output"))
        for _ in tracer.iter[1:2]:
            seen.append(run.iterate_requester("model.step.output"))
            model.step.output  # noqa: B018
            seen.append(run.iterate_requester("model.step.output"))
            seen.append(run.iterate_requester("model.step.output.i5"))
    assert seen == [f"model.step.output.i{number}" for number in (0, 1, 1, 5)]
    with pytest.raises(ValueError, match=r"occurrence of `model\.step\.output`.*no block is running"):
        model.interleaver.iterate_requester("model.step.output")


def test_an_interleaver_swallows_a_stop_and_can_be_used_again() -> None:
    seen: list[Any] = []

    def block() -> None:
        seen.append(current().request("a"))
        raise EarlyStopException

    tracer = object()
    run = Interleaver([Mediator(block)], tracer)
    with run:
        assert run.tracer is tracer
        with pytest.raises(ValueError, match="in the middle of a run"):
            run.initialize([], None)
        run.handle("a", 1)
        seen.append("not reached")
    assert seen == [1]
    assert not run.interleaving
    run.initialize([Mediator(block)], tracer)
    assert run.counts == {}
    with run:
        run.handle("a", 2)
    assert seen == [1, 2]
    with pytest.raises(TypeError, match="takes no batcher"):
        Interleaver([], None, object())


def test_a_copy_of_an_interleaver_is_idle() -> None:
    def block() -> None:
        current().request("a")

    run = Interleaver([Mediator(block)])
    with run:
        copied = copy.deepcopy({"run": run})["run"]
        assert copied is not run
        assert not copied.interleaving
        assert copied.mediators == []
        run.handle("a", 1)


def test_handle_with_a_numbered_location() -> None:
    seen: list[Any] = []

    def block() -> None:
        seen.append(current().request("a.i2"))

    run = Interleaver([Mediator(block)])
    with run:
        run.handle("a.i1", "one", iterate=False)
        run.handle("a", "two", iterate=False)
        run.finish()
        assert run.counts == {"a": 3}
    assert seen == ["two"]


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
            with pytest.raises(ValueError, match="only its own rows"):
                batcher.swap([1, 2], value)
            with pytest.raises(ValueError, match="only its own rows"):
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
    with pytest.raises(ValueError, match="number of rows of the batch is not known"):
        Interleaver().batcher.narrow([0, 1])


def test_a_batcher_is_refused_as_each_run_has_its_own() -> None:
    run = Interleaver([], None, None)
    with pytest.raises(TypeError, match=r"takes no batcher.*batch_group"):
        Interleaver([], None, run.batcher)


# -- modules and caches -----------------------------------------------------------------------------------------------------


def test_the_modules_of_the_model_need_no_preparation_and_others_are_refused(model: NNsight) -> None:
    with model.trace(X, compile=False):
        model.interleaver.wrap_module(model._module.step)
        out = model.step.output.save()
    assert torch.equal(out, model._module.step(model._module.first(X)))
    with pytest.raises(ValueError, match=r"The Linear is not a module of the model that runs here\. Make it one"):
        with model.trace(X, compile=False):
            model.interleaver.wrap_module(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="not a module of the model that runs here"):
        Interleaver().wrap_module(model._module.step)


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


# -- documented names --------------------------------------------------------------------------------------------------------

INTERLEAVER = (
    "mediators tracer batcher current defer_exceptions interleaving initialize cancel iterate_requester wrap_module handle "
    "check_dangling_mediators check_cache_full __enter__ __exit__ __deepcopy__"
)
MEDIATOR = (
    "intervention name idx info batch_group interleaver event_queue response_queue worker skip_container history user_cache "
    "hooks iteration_tracker iteration all_stop args cross_invoker original_globals deferred_exception transform lock alive "
    "frame MissedProviderError OutOfOrderError Value __enter__ __exit__ start cancel handle handle_value_event "
    "handle_swap_event handle_exception_event handle_barrier_event handle_end_event handle_skip_event respond send request "
    "swap stop skip end exception push pull set_user_cache remove_hooks __getstate__ __setstate__"
)
VALUE = "value lock has_value get wait put restore"


def test_members_of_the_interleaver_and_its_mediators() -> None:
    mediator = Mediator(lambda: None, None, "mine", None, 1)
    run = Interleaver([mediator], None, None)
    assert [name for name in INTERLEAVER.split() if not hasattr(run, name)] == []
    assert [name for name in MEDIATOR.split() if not hasattr(mediator, name)] == []
    assert [name for name in VALUE.split() if not hasattr(Mediator.Value(), name)] == []
