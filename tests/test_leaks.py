"""Nothing stays behind: after any kind of trace, a process holds what it held before.

Each *kind* is a function that traces once and returns what it saved. Rounds over all kinds are repeated, and live tensors, frames,
greenlets and hooks are counted after the first rounds and after the last. What goes, goes by reference counting alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import sys
import threading
import tracemalloc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from greenlet import greenlet
from transformers.utils import ModelOutput

from nnsight import NNsight
from nnsight.runtime import OutOfOrderError, active_interleaver
from nnsight.tracing.saving import saves

from .conftest import Layer, Rows, assert_no_instrumentation, both


class Net(torch.nn.Module):
    """Runs one layer three times, so that there are steps, and fails for a row that its table does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.table = torch.nn.Embedding(2, 4)
        self.layer = Layer()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.layer(x)[0]
        return self.head(x + self.table(row))


X = torch.linspace(-1, 1, 12).reshape(3, 4)
ROW, NO_ROW = torch.zeros(3, dtype=torch.long), torch.full((3,), 7)


def new_model() -> Rows:
    return Rows(Net(), compile={"backend": "eager"})


# -- kinds of traces -------------------------------------------------------------------------------------------------

Kind = Callable[[Rows, bool], Any]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


@kind
def reads(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile):
        hidden = model.first.output.save()
        out = model.output.save()
    return hidden, out


@kind
def edits_in_place(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile):
        model.layer.output[0][:, 0] = 0.0
        out = model.output.save()
    return out


@kind
def replaces(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile):
        model.first.output = model.first.output * 2.0
        out = model.output.save()
    return out


@kind
def fails_in_the_block(model: Rows, compile: bool) -> Any:
    with contextlib.suppress(ZeroDivisionError), model.trace(X, ROW, compile=compile):
        hidden = model.first.output
        hidden / (1 / 0)
    return ()


@kind
def reads_in_the_wrong_order(model: Rows, compile: bool) -> Any:
    with contextlib.suppress(OutOfOrderError), model.trace(X, ROW, compile=compile):
        last = model.head.output
        first = model.first.output
    return ()


@kind
def replaces_by_the_wrong_shape(model: Rows, compile: bool) -> Any:
    with contextlib.suppress(ValueError), model.trace(X, ROW, compile=compile):
        model.first.output = torch.zeros(7, 5)
    return ()


@kind
def fails_in_the_model(model: Rows, compile: bool) -> Any:
    with contextlib.suppress(IndexError), model.trace(X, NO_ROW, compile=compile):
        hidden = model.first.output
    return ()


@kind
def stops(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile) as tracer:
        hidden = model.first.output.save()
        tracer.stop()
    return hidden


@kind
def skips(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile):
        model.layer.skip((model.first.output, None))
        out = model.output.save()
    return out


@kind
def invokes(model: Rows, compile: bool) -> Any:
    with model.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X, ROW):
            mine = model.first.output
            barrier()
            one = model.output.save()
        with tracer.invoke(X + 1, ROW):
            barrier()
            model.first.output = mine
            two = model.output.save()
    return one, two


@kind
def leaves_a_barrier_open(model: Rows, compile: bool) -> Any:
    with contextlib.suppress(OutOfOrderError), model.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(X, ROW):
            mine = model.first.output
            barrier()
    return ()


@kind
def steps(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile) as tracer:
        kept = [].save()
        for _ in tracer.iter[:3]:
            kept.append(model.layer.inner.output)
    return kept


@kind
def gradients(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile):
        hidden = model.first.output.requires_grad_()
        with model.output.sum().backward():
            grad = hidden.grad.save()
    return grad


@kind
def fails_in_a_backward_block(model: Rows, compile: bool) -> Any:
    with contextlib.suppress(ZeroDivisionError), model.trace(X, ROW, compile=compile):
        hidden = model.first.output.requires_grad_()
        with model.output.sum().backward():
            hidden.grad / (1 / 0)
    return ()


@kind
def caches(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile) as tracer:
        cache = tracer.cache(include_inputs=True)
    return cache["model.first"].output, cache["model.layer"].inputs


@kind
def sessions(model: Rows, compile: bool) -> Any:
    with model.session():
        with model.trace(X, ROW, compile=compile):
            hidden = model.first.output
        with model.trace(X, ROW, compile=compile):
            model.first.output = hidden
            out = model.output.save()
    return out


@kind
def keeps_edits_and_clears_them(model: Rows, compile: bool) -> Any:
    with model.edit() as edited:
        edited.first.output[:] = 0.0
    with edited.trace(X, ROW, compile=compile):
        out = edited.output.save()
    with model.edit(inplace=True):
        model.first.output[:] = 1.0
    model.clear_edits()
    return out


@kind
def decides_on_a_value(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile):
        hidden = model.first.output
        if hidden.sum() > -1e9:
            model.layer.output[0][:] = 0.0
        out = model.output.save()
    return out


@kind
def calls_a_module_early(model: Rows, compile: bool) -> Any:
    with model.trace(X, ROW, compile=compile):
        early = model.head(model.first.output).save()
    return early


# -- counting --------------------------------------------------------------------------------------------------------


def counted() -> dict[str, int]:
    """Count what a trace could leave behind, by type."""
    gc.collect()
    objects = gc.get_objects()
    kinds = collections.Counter(type(found) for found in objects)
    of_package = sum(number for type_, number in kinds.items() if str(type_.__module__).startswith("nnsight."))
    return {
        "tensors": sum(number for type_, number in kinds.items() if issubclass(type_, torch.Tensor)),
        "greenlets": sum(issubclass(type(found), greenlet) and found.parent is not None for found in objects),
        "frames": kinds[types.FrameType],
        "tracebacks": kinds[types.TracebackType],
        "objects of the package": of_package,
        "cells": kinds[types.CellType],
        "functions": kinds[types.FunctionType],
    }


def live_tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def assert_clean(model: Rows) -> None:
    assert active_interleaver() is None
    assert saves.get() is None
    assert sys.gettrace() is None or "nnsight" not in repr(sys.gettrace())
    assert_no_instrumentation(model._module)
    for module in model._module.modules():
        assert "_compiled_call_impl" not in vars(module)


def run_all(model: Rows, compile: bool, rounds: int) -> None:
    for _ in range(rounds):
        for trace in KINDS.values():
            trace(model, compile)


@pytest.mark.parametrize(("compile", "traces"), [(False, 150), (True, 40)], ids=["eager", "compiled"])
def test_many_traces_leave_nothing(compile: bool, traces: int) -> None:
    """Counts after a warm-up are the counts at the end, and so is the memory that Python has handed out."""
    model = new_model()
    run_all(model, compile, 3)
    before = counted()
    tracemalloc.start()
    try:
        run_all(model, compile, 1)
        gc.collect()
        memory = tracemalloc.get_traced_memory()[0]
        run_all(model, compile, traces // len(KINDS) + 1)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - memory
    finally:
        tracemalloc.stop()
    after = counted()
    assert all(after[name] <= before[name] for name in before), (before, after)
    assert grown < 100_000, f"{grown} bytes more after {traces} traces"
    assert_clean(model)


@both
@pytest.mark.parametrize("name", KINDS)
def test_saved_values_and_the_model_die_with_their_names(name: str, compile: bool, no_gc: None) -> None:
    model = new_model()
    KINDS[name](model, compile)
    tensors = live_tensors()
    saved = torch.utils._pytree.tree_leaves(KINDS[name](model, compile))
    references = [weakref.ref(leaf) for leaf in saved if isinstance(leaf, torch.Tensor)]
    assert bool(references) == (not name.startswith(("fails", "reads_in_the", "replaces_by", "leaves")))
    del saved
    leaf = None
    assert [reference() for reference in references] == [None] * len(references)
    assert live_tensors() == tensors
    if compile:  # what dynamo, not this package, keeps of a model it has compiled
        gc.collect()
    references = [weakref.ref(model), weakref.ref(model._module), weakref.ref(model._module.head.weight)]
    del model
    assert [reference() for reference in references] == [None] * 3


@dataclasses.dataclass
class Result(ModelOutput):
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


class Structured(Net):
    def forward(self, x: torch.Tensor, row: torch.Tensor) -> Result:
        hidden = self.first(x)
        return Result(self.head(hidden), hidden)


@both
def test_a_saved_structure_dies_with_its_name(compile: bool, no_gc: None) -> None:
    """Of a compiled model it is made behind the graph, where a block cannot be replayed."""
    model = Rows(Structured(), compile={"backend": "eager"})
    for _ in range(4):
        with model.trace(X, ROW, compile=compile):
            out = model.output.save()
        references = [weakref.ref(out), weakref.ref(out.logits), weakref.ref(out.hidden)]
        del out
        assert [reference() for reference in references] == [None] * 3


@both
def test_a_model_that_failed_dies_with_its_name(compile: bool, no_gc: None) -> None:
    """Dynamo keeps its error in a frame, and frames keep those that called them."""

    def run() -> weakref.ref[Any]:
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(3, 3))
        model = NNsight(net, compile={"backend": "eager"})
        with pytest.raises(RuntimeError), model.trace(torch.ones(2, 4), compile=compile):
            model[0].output.save()
            model.output.save()
        return weakref.ref(net)

    new_model().trace(X, ROW, trace=False)  # what is imported for a first call keeps an error, too
    assert run()() is None


@both
def test_an_error_holds_what_it_happened_to_and_no_longer(compile: bool, no_gc: None) -> None:
    """A traceback shows frames, which hold the values in them; without the error they go."""
    model = new_model()
    references: list[weakref.ref[Any]] = []

    def run() -> None:
        with model.trace(X, ROW, compile=compile):
            hidden = model.first.output
            references.append(weakref.ref(hidden))
            raise KeyError("mine")

    try:
        run()
    except KeyError as error:
        kept = error
    assert active_interleaver() is None
    del kept
    assert references[0]() is None


@both
def test_threads_leave_nothing(compile: bool) -> None:
    """Four threads trace one model ten times each; the same counts hold as for one."""
    model = new_model()
    expected = model._module(X, ROW)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        kinds = list(KINDS.values())
        try:
            for count in range(10):
                trace = kinds[(number + count) % len(kinds)]
                if trace not in (keeps_edits_and_clears_them, gradients, fails_in_a_backward_block):
                    trace(model, compile)
                hidden, out = reads(model, compile)
                torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0)
        except BaseException as error:
            failures.append(error)

    def run() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run_all(model, compile, 1)
    run()
    grown: dict[str, int] = {}
    for _ in range(3):  # the order of threads is chance, and so is the round that makes the last variant
        before = counted()
        run()
        assert not failures, failures
        after = counted()
        grown = {name: after[name] - before[name] for name in after if after[name] > before[name]}
        if not grown:
            break
    assert not grown, grown
    assert_clean(model)


@pytest.fixture(autouse=True)
def _collected() -> None:
    """A failed assertion of one test keeps its frames; the next one starts from what is there then."""
    gc.collect()
