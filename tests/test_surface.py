"""The documented members of interleaver, mediator, backend and tracer, used as extensions use them."""

from __future__ import annotations

import contextvars
import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from greenlet import getcurrent

from nnsight import NNsight
from nnsight.intervention.backends.base import Backend
from nnsight.intervention.envoy import Envoy, eproperty
from nnsight.intervention.interleaver import (
    NNSIGHT_PREFIX,
    Cancelation,
    EarlyStopException,
    Events,
    Interleaver,
    Mediator,
    OutOfOrderError,
    SkipException,
)
from nnsight.intervention.tracing.base import Tracer
from nnsight.intervention.tracing.globals import Globals
from nnsight.intervention.tracing.tracer import InterleavingTracer
from nnsight.intervention.tracing.util import WithBlockNotFoundError, wrap_exception

from .conftest import Hooks, assert_no_instrumentation, both

X = torch.arange(6.0).reshape(2, 3)


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


def current() -> Mediator:
    mediator = Envoy(torch.nn.Identity()).interleaver.current
    assert mediator is not None
    return mediator


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
def test_a_number_asks_for_one_passage(model: NNsight, compile: bool) -> None:
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
def test_iterate_requester_says_which_passage_is_meant(model: NNsight, compile: bool) -> None:
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
    with pytest.raises(ValueError, match=r"passage of `model\.step\.output`.*while a block runs only"):
        model.interleaver.iterate_requester("model.step.output")


@both
def test_history_has_the_passages_so_far(model: NNsight, compile: bool) -> None:
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
    with pytest.raises(TypeError, match="no batcher"):
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


# -- properties that prepare their request ---------------------------------------------------------------------------------


def requires_scores(stub: Callable[..., Any]) -> Callable[..., Any]:
    """Register, for this run, a hook that offers what the property waits for."""

    def prepared(owner: Any) -> Any:
        handle = owner.module.register_forward_hook(
            lambda module, args, output: type(owner).scores.provide(owner, output.softmax(-1))
        )
        owner.interleaver.current.hooks.append(handle)
        return stub(owner)

    prepared.__name__, prepared.__doc__ = stub.__name__, stub.__doc__
    return prepared


class Scores:
    """An owner of eproperties that is no envoy."""

    path = None

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.interleaver = Interleaver()

    @eproperty(description="softmax of the output")
    @requires_scores
    def scores(self) -> Any:
        """Softmax of the module's output."""


def test_a_decorator_prepares_the_request_and_its_hooks_go_with_the_run() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 3)
    owner = Scores(module)
    assert Scores.scores.key == "scores"
    assert Scores.scores.__doc__ == "Softmax of the module's output."
    seen: list[torch.Tensor] = []

    def block() -> None:
        seen.append(owner.scores)
        owner.scores = torch.zeros(2, 3)

    run = Interleaver([Mediator(block)])
    owner.interleaver = run
    with run:
        replaced = module(X)
        assert len(module._forward_hooks) == 1
        run.finish()
    assert not module._forward_hooks
    assert torch.equal(replaced, torch.zeros(2, 3))
    assert torch.equal(seen[0], module(X).softmax(-1))


def test_an_owner_says_the_run_where_none_is_active() -> None:
    seen: list[Any] = []

    class Owner:
        path = "owner"

        def __init__(self, interleaver: Interleaver) -> None:
            self.interleaver = interleaver

        @eproperty()
        def value(self) -> Any:
            """A value."""

    def block() -> None:
        contextvars.Context().run(lambda: seen.append(owner.value))

    run = Interleaver([Mediator(block)])
    owner = Owner(run)
    with run:
        contextvars.Context().run(lambda: Owner.value.provide(owner, 3))
        run.finish()
    assert seen == [3]
    with pytest.raises(ValueError, match=r"Cannot access `owner\.value` outside of interleaving"):
        owner.value  # noqa: B018


# -- backends ---------------------------------------------------------------------------------------------------------------


class Local(Backend):
    """Runs a block here, as the documents write it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tracer: Any) -> Any:
        function = super().__call__(tracer)
        self.calls += 1
        try:
            Globals.enter()
            return tracer.execute(function)
        except Exception as error:
            raise wrap_exception(error, tracer.info) from None
        finally:
            Globals.exit()


class InThread(Backend):
    """Hands a block to a worker thread and waits."""

    def __call__(self, tracer: Any) -> Any:
        function = super().__call__(tracer)
        context, errors = contextvars.copy_context(), []

        def work() -> None:
            try:
                Globals.enter()
                tracer.execute(function)
            except BaseException as error:
                errors.append(error)
            finally:
                Globals.exit()

        thread = threading.Thread(target=context.run, args=(work,))
        thread.start()
        thread.join(60)
        if errors:
            raise wrap_exception(errors[0], tracer.info) from None


class Elsewhere(Backend):
    """Does not run the block at all."""

    def __call__(self, tracer: Any) -> Any:
        self.function = super().__call__(tracer)


@both
@pytest.mark.parametrize("kind", [Local, InThread])
def test_a_backend_that_runs_the_block(model: NNsight, compile: bool, kind: type[Backend]) -> None:
    backend = kind()
    with model.trace(X, compile=compile, backend=backend):
        model.first.output[:, 0] = 0
        out = model.output.save()
        unsaved = model.output + 1
    reference = Hooks(model._module).output("first", lambda value: torch.cat([value[:, :1] * 0, value[:, 1:]], 1))
    assert torch.equal(out, reference(X))
    assert "unsaved" not in locals()
    with pytest.raises(KeyError, match="in the block") as raised:
        with model.trace(X, compile=False, backend=backend):
            saved = model.first.output.save()
            raise KeyError("in the block")
    assert raised.traceback[-1].path.name == "test_surface.py"
    assert torch.equal(saved, passes(model._module)[0])
    assert not Globals.saves


def test_a_backend_that_does_not_run_the_block(model: NNsight) -> None:
    backend, ran = Elsewhere(), []
    with model.trace(X, backend=backend) as tracer:
        ran.append(1)
    assert ran == []
    assert tracer.backend is backend
    assert callable(backend.function)


class Later(Backend):
    """Keeps the block as a job, which runs when the backend is called without a tracer."""

    def __call__(self, tracer: Any = None) -> Any:
        if tracer is not None:
            self.job = (tracer, super().__call__(tracer))
            return None
        tracer, function = self.job
        try:
            Globals.enter()
            tracer.execute(function)
            return {name: value for name, value in tracer.scope.items() if id(value) in Globals.saves}
        finally:
            Globals.exit()


@both
def test_a_backend_that_runs_the_block_after_its_with_statement(model: NNsight, compile: bool) -> None:
    def submit() -> Any:
        factor = 2.0
        with model.trace(X, compile=compile, backend=Later()) as tracer:
            model.first.output *= factor
            out = model.output.save()
            unsaved = out + 1
        assert "out" not in locals() and "unsaved" not in locals()
        return tracer.backend

    result = submit()()
    assert set(result) == {"out"}
    assert torch.equal(result["out"], Hooks(model._module).output("first", lambda value: value * 2.0)(X))


def test_globals() -> None:
    assert not Globals.saves
    with pytest.raises(ValueError, match=r"exit\(\) without"):
        Globals.exit()
    Globals.enter()
    value = [1]
    from nnsight import save

    assert save(value) is value
    assert id(value) in Globals.saves
    Globals.enter()
    assert id(value) in Globals.saves
    Globals.exit()
    assert id(value) in Globals.saves
    Globals.exit()
    assert not Globals.saves
    with pytest.raises(ValueError, match="outside a trace"):
        save(value)


def test_clearing_the_cache_compiles_blocks_anew(model: NNsight) -> None:
    infos: list[Any] = []

    def trace() -> torch.Tensor:
        with model.trace(X) as tracer:
            infos.append(tracer.info)
            out = model.output.save()
        return out

    first, again = trace(), trace()
    assert infos[0] is infos[1]
    Globals.cache.clear()
    assert torch.equal(trace(), first)
    assert torch.equal(first, again)
    assert infos[2] is not infos[0]


# -- tracers ----------------------------------------------------------------------------------------------------------------


def test_a_tracer_that_wraps_the_code_of_its_block() -> None:
    class Timed(Tracer):
        def compile(self) -> Callable[[], None]:
            function = super().compile()

            def around() -> None:
                events.append("set up")
                function()
                events.append("tear down")

            return around

    events: list[str] = []
    with Timed():
        events.append("block")
        kept = [1, 2].save()
    assert events == ["set up", "block", "tear down"]
    assert kept == [1, 2]


@both
def test_a_tracer_that_runs_its_block_twice(model: NNsight, compile: bool) -> None:
    class Twice(InterleavingTracer):
        def execute(self, function: Callable[[], None]) -> Any:
            super().execute(function)
            super().execute(function)

    outs: list[torch.Tensor] = []
    with Twice(model._driver(compile), model, (X,), {}):
        model.first.output *= len(outs) + 1
        outs.append(model.output)
    module = model._module
    first = passes(module)[0]
    assert len(outs) == 2
    for factor, out in enumerate(outs, 1):
        assert torch.equal(out, module.step(module.step(first * factor)))


def test_a_tracer_looks_at_its_block_when_it_captures_it() -> None:
    class Looking(Tracer):
        def capture(self) -> Any:
            info = super().capture()
            seen.append((isinstance(info, Tracer.Info), info is self.info, info.line, info.source, set(self.scope.cells)))
            return info

    seen: list[Any] = []
    value = 1
    line = sys._getframe().f_lineno + 1
    with Looking():
        # a comment
        doubled = [value * 2].save()
    assert doubled == [2]
    ((is_info, is_own, found, source, names),) = seen
    assert (is_info, is_own, found) == (True, True, line)
    assert "".join(source).strip() == "doubled = [value * 2].save()"
    assert names == {"doubled", "value"}
    tracer = Looking()
    with pytest.raises(ValueError, match="This Looking is not entered"):
        tracer.capture()
    with tracer:
        pass


def test_parse_finds_the_lines_of_a_block() -> None:
    source = """\
    x = 1
    with trace(
        "a", 2
    ), other():
        first()

        if x:
            second()
    after()
"""
    expected = ["        first()\n", "\n", "        if x:\n", "            second()\n"]
    assert Tracer.parse(source, 2) == (5, expected)
    assert Tracer.parse(source.splitlines(keepends=True), 2) == (5, expected)
    with pytest.raises(WithBlockNotFoundError, match=r"(?s)begins at line 5.*-> 5:         first\(\)"):
        Tracer.parse(source, 5)
    with pytest.raises(WithBlockNotFoundError, match="line 1 of the source"):
        Tracer.parse("with", 1)
