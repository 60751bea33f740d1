"""Properties, backends and tracers of one's own, used as extensions use them at the documented import paths."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import LanguageModel, NNsight
from nnsight.intervention.backends.base import Backend
from nnsight.intervention.envoy import eproperty
from nnsight.intervention.interleaver import Interleaver, Mediator
from nnsight.intervention.tracing.base import Tracer
from nnsight.intervention.tracing.globals import Globals
from nnsight.intervention.tracing.tracer import InterleavingTracer
from nnsight.intervention.tracing.util import WithBlockNotFoundError, wrap_exception

from ..conftest import Hooks, both
from .test_interleaver import X, model
from .test_mediator import passes

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
    assert raised.traceback[-1].path.name == "test_tracers.py"
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


def test_a_backend_of_a_generation_and_of_a_session(lm: LanguageModel) -> None:
    backend = Local()
    with lm.generate("The Eiffel Tower", max_new_tokens=2, do_sample=False, compile=False, backend=backend) as tracer:
        ids = tracer.result.save()
    prepared = lm.tokenizer("The Eiffel Tower", return_tensors="pt")
    assert torch.equal(ids, lm._module.generate(**prepared, max_new_tokens=2, do_sample=False))
    with lm.session(backend=backend):
        with lm.trace("The Eiffel Tower", compile=False):
            logits = lm.lm_head.output.save()
    assert backend.calls == 2
    assert torch.equal(logits, lm._module(**prepared).logits)
