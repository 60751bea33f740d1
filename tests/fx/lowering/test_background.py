"""Stages of a variant: it runs at once with what is there, and as one graph once that is lowered; results stay the same."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, UncompiledWarning, fx
from nnsight.fx.lowering import background
from nnsight.fx.lowering.backends import resolve_backend

from ...conftest import Hooks
from .test_regions import WIDTH, Stack

X = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)


class Staged:
    """A backend that notes on which thread it lowered which sizes of graphs, and which of its graphs ran.

    In the background it goes on only when ``gate`` is open.
    """

    def __init__(self, backend: str = "eager") -> None:
        self._lower = resolve_backend(backend)
        self.gate = threading.Event()
        self.lowered: list[tuple[str, int]] = []
        self.grad_modes: list[tuple[bool, bool]] = []
        self.ran: list[str] = []
        self.fail = False

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        where = "here" if threading.current_thread() is threading.main_thread() else "background"
        calls = sum(node.op.startswith("call") for node in graph_module.graph.nodes)
        if where == "background":
            assert self.gate.wait(60)
            if self.fail:
                raise NotImplementedError("no such luck")
        self.lowered.append((where, calls))
        self.grad_modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        function = self._lower(graph_module, inputs)

        def run(*arguments: Any) -> Any:
            self.ran.append(where)
            return function(*arguments)

        return run


@pytest.fixture
def backend() -> Any:
    made = Staged("aot_eager")
    yield made
    made.gate.set()
    assert fx.wait(60)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def edited(model: NNsight, x: torch.Tensor, block: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    with model.trace(x):
        hidden = model.blocks[block].output
        hidden[:, 0] += 2.0
        kept = hidden.save()
        out = model.output.save()
    return out, kept


def check(net: torch.nn.Module, found: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, block: int = 1) -> None:
    def edit(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, 0] += 2.0
        return value

    hooks = Hooks(net).output(f"blocks.{block}", edit)
    expected = hooks.output(f"blocks.{block}", hooks.keep("kept"))(x)
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], hooks.seen["kept"], rtol=1e-6, atol=1e-6)


def test_a_variant_runs_node_by_node_then_as_one_graph(backend: Staged) -> None:
    net = Stack()
    model = NNsight(net, compile={"backend": backend, "background": True})
    for _ in range(3):  # nothing is ready before the gate opens
        check(net, edited(model, X), X)
    assert not backend.ran and not fx.wait(0.0)
    backend.gate.set()
    assert fx.wait(60)
    assert [where for where, _ in backend.lowered] == ["background"]
    check(net, edited(model, X), X)
    assert backend.ran == ["background"]
    assert fx.counters.compiles == 1


def test_regions_run_until_the_whole_graph_is_there(backend: Staged) -> None:
    net = Stack()
    model = NNsight(net, compile={"backend": backend, "regions": True, "background": True})
    for _ in range(3):
        check(net, edited(model, X), X)
    assert [where for where, _ in backend.lowered] == ["here"] * 4
    assert set(backend.ran) == {"here"}
    backend.gate.set()
    assert fx.wait(60)
    assert [where for where, _ in backend.lowered] == ["here"] * 4 + ["background"]
    assert backend.lowered[-1][1] > max(calls for where, calls in backend.lowered if where == "here")
    backend.ran.clear()
    for _ in range(2):
        check(net, edited(model, X), X)
    assert backend.ran == ["background"] * 2


@torch.library.custom_op("nnsight_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Pause:
    """What the shape function of ``doubled`` does when a tracer calls it in the background: it says so, and waits."""

    reached = threading.Event()
    go_on = threading.Event()


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    background = threading.current_thread() is not threading.main_thread()
    if background and any(frame.name == "dispatch_trace" for frame in traceback.extract_stack()):
        Pause.reached.set()
        assert Pause.go_on.wait(60)
    return torch.empty_like(x)


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(self.first(x))


def test_compiled_functions_run_while_the_background_traces(backend: Staged) -> None:
    backend.gate.set()
    plus_one = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    plus_one(X)
    net = Doubled()
    model = NNsight(net, compile={"backend": backend, "background": True})
    try:
        for _ in range(3):
            torch.testing.assert_close(model(X), net(X))
        assert Pause.reached.wait(60)
        torch.testing.assert_close(plus_one(X), X + 1)
        torch.testing.assert_close(model(X), net(X))
        with model.trace(X):
            model.first.output[:] = 1.0
            out = model.output.save()
        assert out.eq(2.0).all()
    finally:
        Pause.go_on.set()
    assert fx.wait(60)
    torch.testing.assert_close(model(X), net(X))
    assert backend.ran == ["background"]


def test_a_block_that_runs_once_is_not_lowered_in_the_background(backend: Staged) -> None:
    backend.gate.set()
    model = NNsight(Stack(), compile={"backend": backend, "background": True})
    for block in range(3):
        edited(model, X, block)
    assert fx.wait(60)
    assert not backend.lowered
    edited(model, X, 2)
    assert fx.wait(60)
    assert len(backend.lowered) == 1


def test_one_lowering_serves_all_sizes(backend: Staged) -> None:
    backend.gate.set()
    net = Stack()
    model = NNsight(net, compile={"backend": backend, "background": True, "dynamic": True})
    for _ in range(3):
        torch.testing.assert_close(model(X), net(X), rtol=1e-6, atol=1e-6)
        assert fx.wait(60)
    assert backend.ran == ["background"], "a plain call switches, too"
    backend.lowered.clear()
    sizes = [torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH) for rows in (4, 5, 6)]
    for x in sizes[:2] * 2:
        check(net, edited(model, x), x)
    assert fx.wait(60)
    backend.ran.clear()
    for x in sizes * 2:
        check(net, edited(model, x), x)
    assert fx.wait(60)
    assert len(backend.lowered) == 1
    assert backend.ran == ["background"] * 6


@pytest.mark.parametrize("regions", [False, True])
def test_a_failure_is_logged_once_and_the_stage_stays(caplog: pytest.LogCaptureFixture, regions: bool) -> None:
    backend = Staged()
    backend.fail = True
    backend.gate.set()
    net = Stack()
    model = NNsight(net, compile={"backend": backend, "regions": regions, "background": True})
    said: Any = contextlib.nullcontext()  # regions are compiled, and stay
    if not regions:
        said = pytest.warns(UncompiledWarning, match="the backend cannot lower it .NotImplementedError: no such luck")
    with caplog.at_level(logging.WARNING, "nnsight.fx"), said:
        for _ in range(4):
            check(net, edited(model, X), X)
            assert fx.wait(60)
    assert caplog.text.count("NotImplementedError: no such luck") == 1
    assert "background" not in backend.ran


def test_the_background_has_the_grad_mode_and_autocast_of_the_trace(backend: Staged) -> None:
    backend.gate.set()
    model = NNsight(Stack(), compile={"backend": backend, "background": True})
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with model.trace(X):
                out = model.output.save()
        assert fx.wait(60)
        with model.trace(X):
            again = model.output.save()
    assert backend.grad_modes == [(True, True)]
    assert out.requires_grad
    assert again.requires_grad
    assert again.dtype == out.dtype == torch.bfloat16
    torch.testing.assert_close(again, out, rtol=0.02, atol=0.02)


def test_what_waits_to_be_lowered_holds_no_tensor(no_gc: None) -> None:
    backend = Staged()
    net = Stack()
    first = NNsight(net, compile={"backend": backend, "background": True})
    model = NNsight(Stack(), compile={"backend": backend, "background": True})
    for which in (first, model, first, model):  # captures wait for what is being compiled, and come first
        edited(which, X)
    parameter = weakref.ref(model._module.embed.weight)
    del model, which
    gc.collect()
    assert parameter() is None
    backend.gate.set()
    assert fx.wait(60)


def test_a_worker_that_ends_drops_jobs_and_interrupts_the_one_that_runs() -> None:
    worker, started, ran = background._Worker(), threading.Event(), []

    def endless() -> None:
        started.set()
        while True:
            time.sleep(0.001)

    worker.submit(endless)
    worker.submit(lambda: ran.append(1))
    assert started.wait(60) and not worker.wait(0.0)
    worker._end()
    worker.submit(lambda: ran.append(2))
    assert not worker.thread.is_alive() and not ran  # type: ignore[union-attr]
    atexit.unregister(worker._end)


def test_waiting_in_the_background_is_refused() -> None:
    raised: list[Exception] = []

    def job() -> None:
        try:
            fx.wait()
        except RuntimeError as error:
            raised.append(error)

    background.submit(job)
    assert fx.wait(60)
    assert "would never return" in str(raised[0])


@pytest.mark.slow
def test_inductor_lowers_in_the_background() -> None:
    net = Stack()
    model = NNsight(net, compile={"regions": True, "background": True})
    results = []
    for _ in range(3):
        results.append(edited(model, X)[0])
        fx.wait()
    expected = Hooks(net).output("blocks.1", lambda value: torch.cat([value[:, :1] + 2.0, value[:, 1:]], dim=1))(X)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert fx.counters.compiles + fx.counters.loads == 5


def test_the_short_form(backend: Staged) -> None:
    """``compile="background"`` says the same as the option, for a model and for a trace."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())
    assert NNsight(net, compile="background")._compiled.options == {"background": True}  # type: ignore[union-attr]
    model = NNsight(net, compile={"backend": backend, "background": True})
    backend.gate.set()
    for _ in range(3):
        with model.trace(X, compile="background"):
            model[0].output[:] *= 2.0
            out = model.output.save()
        torch.testing.assert_close(out, torch.tanh(net[0](X) * 2.0))
        assert fx.wait(60)
    assert {where for where, _ in backend.lowered} == {"background"}
    plain = NNsight(net, compile={"backend": "eager"})
    with pytest.raises(ValueError, match=r"model\.compile\(background=True"):
        with plain.trace(X, compile="background"):
            plain.output.save()
    with pytest.raises(TypeError, match="is True, False or 'background', not 'later'"):
        with plain.trace(X, compile="later"):
            plain.output.save()
