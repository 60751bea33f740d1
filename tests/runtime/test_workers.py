"""The greenlets of blocks: what they hold, how they end, and how they go along with threads, forks and greenlets of the user."""

from __future__ import annotations

import contextlib
import contextvars
import cProfile
import os
import pstats
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet

from nnsight import NNsight
from nnsight.runtime import OutOfOrderError
from nnsight.runtime.switching import workers

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


def recursion_in_a_block(model: NNsight) -> int:
    """How many calls deep a block can recurse; the model is usable, and a trace of it right, afterwards."""
    reached = 0

    def deeper(level: int) -> None:
        nonlocal reached
        reached = level
        deeper(level + 1)

    with pytest.raises(RecursionError), model.trace(X):
        hidden = model[0].output
        deeper(1)
    used_by_a_trace(model)
    return reached


def called_below(frames: int, function: Any) -> Any:
    return function() if frames == 0 else called_below(frames - 1, function)


def test_a_worker_runs_one_block_after_the_other_however_they_end(model: NNsight) -> None:
    used = [used_by_a_trace(model)]
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
    with pytest.raises(StopIteration), model.trace(X):
        used.append(getcurrent())
        raise StopIteration
    model._module.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), model.trace(X):
        used.append(getcurrent())
        never = model.output
    assert [worker is used[0] for worker in used] == [True] * 6


def test_blocks_of_one_run_have_a_worker_each(model: NNsight) -> None:
    used = []
    for _ in range(2):
        with model.trace() as tracer:
            with tracer.invoke(X):
                used.append(getcurrent())
                out = model[0].output
            with tracer.invoke():
                used.append(getcurrent())
                out = model[0].output
    assert used[0] is not used[1]
    assert set(used[2:]) == set(used[:2])


def test_a_block_inside_a_block_has_a_worker_of_its_own_which_ends_with_it(model: NNsight) -> None:
    used = []
    other = NNsight(torch.nn.Linear(2, 2))
    for _ in range(2):
        with model.trace(X):
            used.append(getcurrent())
            hidden = model[0].output
            with other.trace(X):
                used.append(getcurrent())
                inner = other.output
            assert used[-1].dead
            out = model.output.save()
        torch.testing.assert_close(out, model._module(X), rtol=0.0, atol=0.0)
    assert used[0] is used[2]
    assert not used[0].dead


def test_a_block_can_recurse_as_deep_as_in_a_new_greenlet(model: NNsight) -> None:
    """Whichever other blocks its worker ran, and whether those were started from deeper or from less deep."""
    deep = 400
    fresh = in_thread(lambda: recursion_in_a_block(model)), in_thread(lambda: called_below(deep, lambda: recursion_in_a_block(model)))
    assert abs(fresh[0] - fresh[1] - deep) < 5

    def mixed() -> list[int]:
        from_here = [recursion_in_a_block(model) for _ in range(3)]
        below = [called_below(deep, lambda: recursion_in_a_block(model)) for _ in range(3)]
        return [*from_here, *below, recursion_in_a_block(model)]

    def mixed_the_other_way() -> list[int]:
        below = called_below(deep, lambda: [recursion_in_a_block(model) for _ in range(3)])
        return [recursion_in_a_block(model), recursion_in_a_block(model), *below]

    assert all(abs(reached - fresh[0]) <= 5 for reached in in_thread(mixed)[:3])
    assert all(abs(reached - fresh[1]) <= 5 for reached in in_thread(mixed)[3:6])
    assert abs(in_thread(mixed)[6] - fresh[0]) <= 5
    assert all(abs(reached - fresh[0]) <= 5 for reached in in_thread(mixed_the_other_way)[:2])
    assert all(abs(reached - fresh[1]) <= 5 for reached in in_thread(mixed_the_other_way)[2:])


def test_a_thread_keeps_few_workers(model: NNsight) -> None:
    def work() -> int:
        for frames in range(0, 800, 40):
            called_below(frames, lambda: used_by_a_trace(model))
        with model.trace() as tracer:
            with tracer.invoke(X):
                out = model.output
            for _ in range(3 * workers.KEPT):
                with tracer.invoke():
                    out = model.output
        return len(workers._idle.workers)

    assert 1 < in_thread(work) <= workers.KEPT


def test_a_worker_that_was_ended_while_idle_is_not_lent(model: NNsight) -> None:
    used = used_by_a_trace(model)
    with pytest.raises(KeyboardInterrupt):
        used.throw(KeyboardInterrupt())
    assert used.dead
    assert used_by_a_trace(model) is not used


def test_what_is_handled_around_a_trace_stays_there(model: NNsight) -> None:
    seen = []
    for _ in range(2):
        try:
            raise KeyError("around")
        except KeyError:
            with model.trace(X):
                seen.append(sys.exc_info())
                with contextlib.suppress(ValueError):
                    int("no number")
                out = model.output
            seen.append(sys.exc_info()[0])
    assert seen == [(None, None, None), KeyError] * 2


def test_a_profiler_comes_and_goes(model: NNsight) -> None:
    """Also while a worker is idle, and inside a block."""
    used_by_a_trace(model)
    profile = cProfile.Profile()
    profile.enable()
    used_by_a_trace(model)
    profile.disable()
    with model.trace(X):
        hidden = model[0].output
        profile.enable()
        out = model.output
    used_by_a_trace(model)
    profile.disable()
    used_by_a_trace(model)
    called = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert "__nnsight_block__" in called


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


SCRIPT = """
import os, threading, torch
from nnsight import NNsight

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
