"""Errors between two pieces and in one: what runs on the way out runs as in an eager trace, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nnsight import NNsight, fx

from ...conftest import Rows, assert_no_instrumentation, same

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
Notes = list[Any]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return Rows(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))), compile={"backend": "eager"})


def number(value: torch.Tensor) -> float:
    return round(value.sum().item(), 4)


def rows(h: torch.Tensor, notes: Notes) -> Iterator[torch.Tensor]:
    try:
        yield from h
    finally:
        notes.append(("generator left", number(h)))


class Noting:
    """A manager that looks at a tensor when it is left."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.tensor: torch.Tensor | None = None

    def __enter__(self) -> Noting:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.notes.append((kind, None if self.tensor is None else number(self.tensor)))


def in_a_generator_that_is_cut(model: Any, compile: bool, notes: Notes) -> None:
    with model.trace(X, compile=compile):
        for row in rows(model[1].output, notes):
            if row.sum() > -1e9:
                notes.append("row")
            raise KeyError("mine")


def before_a_finally_that_needs_a_value(model: Any, compile: bool, notes: Notes) -> None:
    with model.trace(X, compile=compile):
        h = model[1].output
        try:
            h = h * 2
            raise KeyError("mine")
        finally:
            notes.append(number(h))


def in_a_with(model: Any, compile: bool, notes: Notes) -> None:
    with model.trace(X, compile=compile):
        with Noting(notes) as noting:
            noting.tensor = model[1].output + 1
            if noting.tensor.norm() > 0:
                notes.append("cut")
                noting.tensor = model[2].output * 2
            raise KeyError("mine")


def of_another_invoke(model: Any, compile: bool, notes: Notes) -> None:
    """The first one waits, holds a tensor that nobody has asked for yet, and needs its value on the way out."""
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            h = model[1].output
            try:
                notes.append(model[3].output)
            finally:
                notes.append((tuple(h.shape), number(h)))
                notes.append(number(h * 2))
        with tracer.invoke(X.flip(0)):
            model[2].output += 1.0
            raise KeyError("second")


def of_stop_before_a_finally(model: Any, compile: bool, notes: Notes) -> None:
    with model.trace(X, compile=compile) as tracer:
        h = model[1].output * 3
        try:
            tracer.stop()
        finally:
            notes.append(number(h))


def behind_a_cut_with_saved_names(model: Any, compile: bool, notes: Notes) -> None:
    with contextlib.suppress(KeyError), model.trace(X, compile=compile):
        first = model[0].output.save()
        notes.append(number(first))
        second = (first * 2).save()
        late = model[1].output.save()
        raise KeyError("mine")
    notes.append((number(first), number(second)))
    with contextlib.suppress(UnboundLocalError):  # not computed in a compiled trace
        late.shape  # noqa: B018


def in_a_session(model: Any, compile: bool, notes: Notes) -> None:
    with model.session():
        with model.trace(X, compile=compile):
            h = model[1].output.save()
            notes.append(number(h))
        with model.trace(X, compile=compile):
            notes.append(number(model[2].output * h))
            raise KeyError("mine")


def in_a_trace_inside(model: Any, compile: bool, notes: Notes) -> None:
    with model.trace(X, compile=compile):
        h = model[1].output
        try:
            with model.trace(X * 2, compile=compile):
                if (model[1].output - h).norm() > 0:
                    raise KeyError("inner")
        except KeyError as error:
            notes.append((str(error), number(h)))
        notes.append(number(model[2].output))
        raise ValueError("outer")


ERRORS: list[Callable[[Any, bool, Notes], None]] = [
    in_a_generator_that_is_cut, before_a_finally_that_needs_a_value, in_a_with,
    of_another_invoke, of_stop_before_a_finally, behind_a_cut_with_saved_names,
    in_a_session, in_a_trace_inside,
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error(model: Any, error: Callable[[Any, bool, Notes], None]) -> None:
    """What the block notes, what arrives, from which lines, and what the next trace gives."""
    net = model._module

    def run(compile: bool) -> tuple[Notes, Any]:
        notes: Notes = []
        raised = None
        try:
            error(model, compile, notes)
        except BaseException as found:
            lines, traceback = [], found.__traceback__
            while traceback is not None:
                lines.append((traceback.tb_frame.f_code.co_name, traceback.tb_lineno))
                traceback = traceback.tb_next
            raised = type(found), str(found), type(found.__cause__), type(found.__context__), lines
        gc.collect()
        assert_no_instrumentation(net)
        assert not torch.overrides._get_current_function_mode_stack() and torch.is_grad_enabled()
        return notes, raised

    expected = run(False)
    assert expected[0] or expected[1]
    for _ in range(2):
        fx.counters.reset()
        assert run(True) == expected
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0
    with model.trace(X):
        out = model.output.save()
    same(out, net(X))


# -- a piece that is interrupted ---------------------------------------------------------------------------------------

trouble: list[int] = []


@torch.library.custom_op("tests_break_errors::troubled", mutates_args=())
def troubled(x: torch.Tensor) -> torch.Tensor:
    """Interrupts its call number ``trouble[0]``, or fails there if the number is even."""
    if trouble:
        trouble[0] -= 1
        if trouble[0] == 0:
            raise KeyboardInterrupt if trouble[1] % 2 else ValueError("mine")
    return torch.tanh(x)


troubled.register_fake(torch.empty_like)
troubled.register_autograd(
    lambda ctx, gradient: gradient * (1 - ctx.result**2),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "result", output),
)


class Troubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tests_break_errors.troubled(x)


class Broken(torch.nn.Module):
    """Breaks the graph between two calls of what may be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Sequential(torch.nn.Linear(4, 4), Troubled()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def interrupted_in_invokes(model: Any, notes: Notes) -> Any:
    with model.trace() as tracer:
        with tracer.invoke(X):
            h = model.first[0].output
            try:
                first = model.output.save()
            finally:
                notes.append(tuple(h.shape))
        with tracer.invoke(X.flip(0)):
            notes.append(number(model.second[0].output))
            model.second.output *= 2.0
            second = model.output.save()
    return first, second


def test_an_interrupt_in_any_piece_leaves_nothing_behind() -> None:
    """At each of the calls at which it can come, on a model that does not know the block at first."""
    torch.manual_seed(0)
    net = Broken()
    notes: Notes = []
    trouble.clear()
    expected = interrupted_in_invokes(Rows(net, compile=False), notes)
    known = Rows(net, compile={"backend": "eager"})
    for model in (known, known):
        for call in (1, 2):
            its_notes: Notes = []
            try:
                trouble[:] = [call, call]
                with pytest.raises(KeyboardInterrupt if call % 2 else ValueError):
                    interrupted_in_invokes(model, its_notes)
            finally:
                trouble.clear()
            assert its_notes == notes[: len(its_notes)]
            assert_no_instrumentation(net)
            assert not torch.overrides._get_current_function_mode_stack() and torch.is_grad_enabled()
            again: Notes = []
            same(interrupted_in_invokes(model, again), expected)
            assert again == notes
    same(known(X), net(X))


def new_net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))


def fails_by_itself(model: Any, kept: list[Any]) -> None:
    raise KeyError("mine")


def comes_too_late(model: Any, kept: list[Any]) -> None:
    kept.append(model[2].output + kept[0])
    model[1].output  # noqa: B018


def waits_in_vain(model: Any, kept: list[Any]) -> None:
    kept.append(model[2].output * 2)
    model[2].next().output  # noqa: B018


def fails_behind_a_cut(model: Any, kept: list[Any]) -> None:
    if kept[0].sum() > -1e9:
        kept.append(model[2].output[0])
    raise KeyError("mine")


@pytest.mark.parametrize("fail", [fails_by_itself, comes_too_late, waits_in_vain, fails_behind_a_cut])
def test_what_a_block_holds_when_it_fails_is_computed(fail: Callable[[Any, list[Any]], None]) -> None:
    """Tensors in lists of the user's, saved names, and buffers of the model are what an eager trace leaves behind."""
    left: list[Any] = []
    for compile in (False, True, True):
        net = new_net()
        model = NNsight(net, compile={"backend": "aot_eager"})
        kept: list[Any] = []
        saved: Any = None
        with pytest.raises(Exception, match=r".") as raised, model.trace(X, compile=compile) as tracer:
            hidden = model[0].output
            kept.append(hidden * 2)
            saved = (hidden + 1).save()
            hidden[0] = 0
            fail(model, kept)
        kept[-1].sum().backward()
        gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        left.append((raised.type, kept, saved, [buffer.clone() for buffer in net.buffers()], gradients))
        assert_no_instrumentation(net)
        if compile:
            assert len(tracer.report.breaks) == (fail is fails_behind_a_cut)
            assert tracer.report.compiles == (
                fail in (fails_behind_a_cut, waits_in_vain)
            )  # the model runs to its end for the latter
    for found in left[1:]:
        same(found[1:], left[0][1:])
        assert found[0] is left[0][0]


def test_nothing_runs_twice_if_a_piece_fails() -> None:
    """The error is raised by what the block asked for while it was computed, not by the block."""
    calls: list[int] = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            raise ValueError("no")

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0]

    model = NNsight(new_net(), compile={"backend": "eager"})
    with pytest.raises(ValueError, match="no"), model.trace(X):
        Fails.apply(model[0].output)
    assert calls == [1]
