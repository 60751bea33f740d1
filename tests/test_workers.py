"""The greenlets of blocks: what they hold, how they end, and how they go along with threads, forks and greenlets of the user."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet

from nnsight import NNsight
from nnsight.runtime import OutOfOrderError

X = torch.linspace(-1, 1, 6).reshape(3, 2)


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))


def used_by_a_trace(model: NNsight) -> greenlet:
    used = []
    with model.trace(X):
        used.append(getcurrent())
        out = model.output.save()
    torch.testing.assert_close(out, model._module(X), rtol=0.0, atol=0.0)
    return used[0]


def in_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_block_that_does_not_return_ends_its_greenlet(model: NNsight) -> None:
    used: list[greenlet] = []
    with pytest.raises(KeyError), model.trace(X):
        used.append(getcurrent())
        raise KeyError("mine")
    with model.trace(X) as tracer:
        used.append(getcurrent())
        tracer.stop()
    with pytest.raises(OutOfOrderError), model.trace(X):
        used.append(getcurrent())
        late = model.output
        early = model[0].output
    assert [worker.dead for worker in used] == [True] * 3
    used_by_a_trace(model)


def test_context_variables_of_a_block_end_with_it(model: NNsight, no_gc: None) -> None:
    class Value:
        pass

    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default=None)
    seen: list[Any] = []
    for _ in range(2):
        with model.trace(X):
            seen.append(variable.get())
            value = Value()
            reference = weakref.ref(value).save()
            variable.set(value)
            out = model.output
        assert variable.get() is None
        assert reference() is None
    token = variable.set("of the caller")
    with model.trace(X):
        seen.append(variable.get())
        out = model.output
    variable.reset(token)
    assert seen == [None, None, "of the caller"]


def test_greenlets_end_with_their_thread(model: NNsight, no_gc: None) -> None:
    def work() -> weakref.ref[greenlet]:
        return weakref.ref(used_by_a_trace(model))

    assert in_thread(work)() is None


def test_greenlets_of_the_user_can_trace(model: NNsight) -> None:
    """Two of them take turns while the model runs; each sees its own run."""
    results: dict[int, torch.Tensor] = {}

    def take_turns(*_: Any) -> None:
        parent = getcurrent().parent
        if parent is not None:
            parent.switch()

    model._module[0].register_forward_pre_hook(take_turns)

    def work(number: int) -> None:
        with model.trace(X):
            model[0].output += float(number)
            out = model.output.save()
        results[number] = out

    running = [greenlet(lambda number=number: work(number)) for number in range(3)]
    while running:
        for each in running:
            each.switch()
        running = [each for each in running if not each.dead]
    expected = model._module[0].forward(X)
    for number in range(3):
        torch.testing.assert_close(results[number], torch.tanh(expected + number), rtol=0.0, atol=0.0)


def test_a_trace_function_comes_and_goes(model: NNsight) -> None:
    """It sees the lines of blocks while it is set, and nothing later."""
    lines: list[str] = []

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        lines.append(frame.f_code.co_name)
        return trace

    def traced() -> int:
        lines.clear()
        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            used_by_a_trace(model)
        finally:
            sys.settrace(previous)
        return lines.count("__nnsight_block__")

    first = traced()
    assert first > 3
    untraced = len(lines)
    used_by_a_trace(model)
    assert len(lines) == untraced
    assert traced() == first


SCRIPT = """
import os, threading, torch
from nnsight import NNsight
from nnsight.runtime import OutOfOrderError

model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2)))

def trace():
    with model.trace(torch.ones(1, 2)):
        out = model[0].output.save()
    return out

started, end = threading.Barrier(4), threading.Event()

def work():
    trace()
    started.wait()
    end.wait()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
started.wait()
trace()
if FORK:
    child = os.fork()
    trace()
    if child:
        assert os.waitpid(child, 0)[1] == 0
print("traced", flush=True)
"""


@pytest.mark.parametrize(
    "fork",
    [False, pytest.param(True, marks=pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"))],
    ids=["exit", "fork"],
)
def test_a_process_that_has_traced_in_threads_ends_quietly(fork: bool, tmp_path: Any) -> None:
    """Also while some threads still run, or, in a forked child, are no more."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("FORK", str(fork)))
    done = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "traced\n" * (1 + fork), "")
