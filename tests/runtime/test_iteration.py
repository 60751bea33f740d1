"""Loops over the occurrences of a location: which calls they meet, and how they end."""

from __future__ import annotations

import contextlib
import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, NNsightDeprecationWarning
from nnsight.fx.counters import counters
from nnsight.runtime import OutOfOrderError

from ..conftest import Hooks, Rows, agree, assert_no_instrumentation, both, same
from ..contract.guide import PARIS, language_model

STEPS = 5
ENDED = "which was never reached: the model had finished"


class Recurrent(torch.nn.Module):
    """Calls one cell ``STEPS`` times, and a gate at every second of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.Linear(3, 3)
        self.gate = torch.nn.Tanh()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(STEPS):
            x = self.cell(x)
            if step % 2 == 0:
                x = self.gate(x)
        return self.head(x)


def reference(
    net: Recurrent, x: torch.Tensor, edit: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, h: h
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs of the cell after ``edit(step, output)``, and the result, by a plain hook."""
    seen: list[torch.Tensor] = []

    def hook(output: torch.Tensor) -> torch.Tensor:
        seen.append(edit(len(seen), output))
        return seen[-1]

    out = Hooks(net).output("cell", hook)(x)
    return [h.clone() for h in seen], out


@pytest.fixture
def net() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent()


@pytest.fixture
def model(net: Recurrent) -> NNsight:
    return Rows(net, compile={"backend": "eager"})


SELECTIONS: dict[str, tuple[Any, list[int]]] = {
    "one": (2, [2]),
    "first": (0, [0]),
    "slice": (slice(1, 3), [1, 2]),
    "slice from the start": (slice(None, 2), [0, 1]),
    "slice with a step": (slice(0, 5, 2), [0, 2, 4]),
    "all, bounded": (slice(None, STEPS), [0, 1, 2, 3, 4]),
    "list": ([0, 2, 3], [0, 2, 3]),
    "tuple": ((1, 4), [1, 4]),
    "range": (range(1, 5, 3), [1, 4]),
    "nothing": ([], []),
    "empty slice": (slice(3, 3), []),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_loop_meets_the_chosen_calls(model: NNsight, net: Recurrent, x: torch.Tensor, name: str) -> None:
    chosen, numbers = SELECTIONS[name]
    seen, out = reference(net, x, lambda step, h: h * 2.0 if step in numbers else h)

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(x, compile=compile) as tracer:
            steps, values = [].save(), [].save()
            for step in tracer.iter[chosen]:
                model.cell.output = model.cell.output * 2.0
                steps.append(step)
                values.append(model.cell.output)
            out = model.output.save()
        return (steps, values, out), tracer

    agree(run, (numbers, [seen[number] for number in numbers], out))
    if numbers:
        assert not torch.equal(out, net(x)), "the reference itself was changed"


def test_a_loop_as_a_with_block(model: NNsight, net: Recurrent, x: torch.Tensor) -> None:
    _, out = reference(net, x, lambda step, h: h + step if step in (1, 3) else h)

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(x, compile=compile) as tracer:
            steps = [].save()
            with tracer.iter[[1, 3]] as step:
                model.cell.output = model.cell.output + step
                steps.append(step)
            out = model.output.save()
        return (steps, out), tracer

    agree(run, ([1, 3], out))


@both
def test_loops_by_the_model_are_those_of_the_tracer(model: NNsight, net: Recurrent, x: torch.Tensor, compile: bool) -> None:
    _, out = reference(net, x, lambda step, h: h + step if step < 2 else h)
    with pytest.warns(NNsightDeprecationWarning, match=r"use `tracer\.iter`") as caught:
        with model.trace(x, compile=compile):
            for step in model.iter[:2]:
                model.cell.output = model.cell.output + step
            made = model.output.save()
    assert torch.equal(made, out)
    place = caught[0].filename, linecache.getline(caught[0].filename, caught[0].lineno).strip()
    assert place == (__file__, "for step in model.iter[:2]:")
    with pytest.warns(UserWarning, match=ENDED), pytest.warns(FutureWarning, match=r"tracer\.all\(\)"):
        with model.trace(x, compile=compile):
            steps = [].save()
            for step in model.cell.all():
                model.cell.output  # noqa: B018
                steps.append(step)
    assert steps == list(range(STEPS))


@pytest.mark.parametrize("how", ["iter", "all"])
def test_an_open_loop_meets_every_call_and_ends_with_a_warning(
    model: NNsight, net: Recurrent, x: torch.Tensor, how: str
) -> None:
    seen, out = reference(net, x, lambda _, h: h - 1.0)
    after: list[str] = []

    def run(compile: bool) -> tuple[Any, Any]:
        with pytest.warns(UserWarning, match=rf"`model\.cell\.output\.i{STEPS}`, {ENDED}") as caught:
            with model.trace(compile=compile) as tracer:
                with tracer.invoke(x):
                    steps, values = [].save(), [].save()
                    for step in tracer.iter[:] if how == "iter" else tracer.all():
                        model.cell.output -= 1.0
                        steps.append(step)
                        values.append(model.cell.output.clone())
                    after.append("never")
                with tracer.invoke():
                    out = model.output.save()
        assert caught[0].filename == __file__
        return (steps, values, out), tracer

    agree(run, (list(range(STEPS)), seen, out))
    assert not after


@both
@pytest.mark.parametrize(("path", "calls"), [("cell", STEPS), ("gate", STEPS // 2 + 1), ("head", 1)])
def test_an_open_loop_has_no_body_for_a_call_that_is_not_made(
    model: NNsight, x: torch.Tensor, path: str, calls: int, compile: bool
) -> None:
    begun: list[int] = []
    with pytest.warns(UserWarning, match=rf"`model\.{path}\.output\.i{calls}`, {ENDED}"):
        with model.trace(x, compile=compile) as tracer:
            for step in tracer.iter[:]:
                begun.append(step)
                model.get(path).output.save()
    assert begun == list(range(calls))


@both
def test_a_body_begins_for_a_call_of_any_module(x: torch.Tensor, compile: bool) -> None:
    """Whether the body is going to ask for that module is not known before it runs."""

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(3, 3)
            self.act = torch.nn.Tanh()
            self.last = torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.act(self.act(self.first(x))))

    model = NNsight(Shared(), compile={"backend": "eager"})
    net = model._module
    begun: list[int] = []
    with pytest.warns(UserWarning, match=ENDED):
        with model.trace(x, compile=compile) as tracer:
            for step in tracer.iter[:]:
                begun.append(step)
                value = (model.first if step == 0 else model.act).output.save()
    assert begun == [0, 1]
    same(value, net.first(x).tanh().tanh())
    begun.clear()
    with pytest.warns(UserWarning, match=ENDED):
        with model.trace(x, compile=compile) as tracer:
            for step in tracer.iter[:]:
                begun.append(step)
                value = model.last.output.save()
    assert begun == [0]
    same(value, net(x))


def _steps_of_a_generation(how: str, read: Callable[[Any, int], Any], compile: bool, tokens: int = 3) -> list[int]:
    lm, begun = language_model(), []
    with pytest.warns(UserWarning, match=ENDED):
        with lm.generate(PARIS, max_new_tokens=tokens, do_sample=False, compile=compile) as tracer:
            if how == "with":
                with tracer.iter[:] as step:
                    begun.append(step)
                    read(lm, step)
            else:
                for step in tracer.iter[:] if how == "iter" else tracer.all():
                    begun.append(step)
                    read(lm, step)
    return begun


READS: dict[str, Callable[[Any, int], Any]] = {
    "first layer": lambda lm, _: lm.transformer.wte.output,
    "last layer": lambda lm, _: lm.lm_head.output,
    "one step": lambda lm, step: lm.lm_head.output if step == 1 else None,
    "no step": lambda *_: None,
    "back and forth": lambda lm, step: (lm.lm_head if step % 2 else lm.transformer.wte).output,
}


@both
@pytest.mark.parametrize(
    ("what", "how"), [*((what, "iter") for what in READS), ("last layer", "all"), ("no step", "with")]
)
def test_an_open_loop_has_a_body_for_each_token(what: str, how: str, compile: bool) -> None:
    assert _steps_of_a_generation(how, READS[what], compile) == [0, 1, 2]


@both
def test_an_open_loop_may_read_the_streamer(compile: bool) -> None:
    """It has the prompt, too, so it occurs once more than there are calls, and before the call of its number."""
    lm = language_model()
    seen: list[Any] = []

    def note() -> None:
        seen.append(lm.generator.streamer.output)
        lm.lm_head.output.save()

    with pytest.warns(UserWarning, match=ENDED):
        with lm.generate(PARIS, max_new_tokens=3, do_sample=False, compile=compile) as tracer:
            for step in tracer.iter[:]:
                if step > 0:
                    seen.append(lm.generator.streamer.output)  # noqa: PERF401
    assert len(seen) == 3
    seen.clear()
    with pytest.warns(UserWarning, match=ENDED):
        with lm.generate(PARIS, max_new_tokens=3, do_sample=False, compile=compile) as tracer:
            for _ in tracer.iter[:]:
                note()
    assert len(seen) == 4


def test_open_loops_of_invokes_have_bodies_of_their_own() -> None:
    lm, begun = language_model(), {"all": [], "later": [], "every second": []}
    with pytest.warns(UserWarning, match=ENDED):
        with lm.generate(max_new_tokens=4, do_sample=False, compile=False) as tracer:
            with tracer.invoke(PARIS):
                for step in tracer.iter[:]:
                    begun["all"].append(step)
                    lm.transformer.h[0].output[:] = 0
            with tracer.invoke(PARIS):
                for step in tracer.iter[2:]:
                    begun["later"].append(step)
                    lm.lm_head.output.save()
            with tracer.invoke():
                for step in tracer.iter[::2]:
                    begun["every second"].append(step)
                    lm.lm_head.output.save()
    assert begun == {"all": [0, 1, 2, 3], "later": [2, 3], "every second": [0, 2]}


@both
def test_an_open_loop_goes_on_where_another_has_stopped(
    model: NNsight, net: Recurrent, x: torch.Tensor, compile: bool
) -> None:
    seen, _ = reference(net, x)
    begun: list[int] = []
    with pytest.warns(UserWarning, match=ENDED):
        with model.trace(x, compile=compile) as tracer:
            values = [].save()
            for _ in tracer.iter[:2]:
                model.cell.input.save()
            for step in tracer.iter[1:]:
                begun.append(step)
                values.append(model.cell.output)
    assert begun == [1, 2, 3, 4]
    same(values, seen[1:])


@both
@pytest.mark.parametrize("how", ["error", "stop", "break"])
def test_a_body_may_end_the_loop_before_it_asks_for_anything(how: str, compile: bool) -> None:
    lm, begun = language_model(), []
    with contextlib.ExitStack() as expected:
        if how == "error":
            expected.enter_context(pytest.raises(KeyError, match="mistake"))
        with lm.generate(PARIS, max_new_tokens=3, do_sample=False, compile=compile) as tracer:
            logits = [].save()
            for step in tracer.iter[:]:
                begun.append(step)
                if step == 1 and how == "error":
                    raise KeyError("mistake")
                if step == 1 and how == "stop":
                    tracer.stop()
                if step == 1:
                    break
                logits.append(lm.lm_head.output)
            later = lm.lm_head.next().output.save()
    assert begun == [0, 1] and len(logits) == 1
    assert ("later" in locals()) == (how == "break")


def test_waiting_for_a_step_leaves_nothing_in_the_program() -> None:
    """A generation with an open loop is compiled as often as one with a bounded loop."""
    lm = language_model()

    def bounded() -> None:
        with lm.generate(PARIS, max_new_tokens=4, do_sample=False, compile=True) as tracer:
            for _ in tracer.iter[:4]:
                lm.transformer.h[0].output[:] *= 0.5

    def unbounded() -> None:
        with pytest.warns(UserWarning, match=ENDED):
            with lm.generate(PARIS, max_new_tokens=4, do_sample=False, compile=True) as tracer:
                for _ in tracer.iter[:]:
                    lm.transformer.h[0].output[:] *= 0.5

    bounded()
    before = counters.compiles, counters.recordings
    unbounded()
    assert (counters.compiles, counters.recordings) == before


@both
def test_an_open_loop_that_touches_no_module_ends(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with pytest.warns(UserWarning, match=r"ended after step 0, in which its body asked nothing") as warned:
        with model.trace(x, compile=compile) as tracer:
            steps = [].save()
            for step in tracer.iter[:]:
                steps.append(step)
            out = model.output.save()
    assert [warning.filename for warning in warned] == [__file__]
    assert steps == [0]
    same(out, model._module(x))


@both
def test_a_bounded_loop_that_is_too_long_keeps_what_it_did(
    model: NNsight, net: Recurrent, x: torch.Tensor, compile: bool
) -> None:
    after: list[str] = []
    with pytest.warns(UserWarning, match=ENDED):
        with model.trace(x, compile=compile) as tracer:
            values = [].save()
            for _ in tracer.iter[: STEPS + 3]:
                values.append(model.cell.output)
            after.append("never")
            lost = model.head.output.save()
    same(values, reference(net, x)[0])
    assert not after and "lost" not in locals()
    assert_no_instrumentation(net)


@both
def test_only_the_first_read_of_a_step_is_pinned(
    model: NNsight, net: Recurrent, x: torch.Tensor, compile: bool
) -> None:
    """The gate runs at steps 0, 2 and 4 of the cell, so its own calls are 0, 1 and 2."""
    seen, _ = reference(net, x)
    with model.trace(x, compile=compile) as tracer:
        pairs = [].save()
        for _ in tracer.iter[[2, 4]]:
            cell = model.cell.output
            pairs.append((cell, model.gate.output))
    same(pairs, [(seen[2], seen[2].tanh()), (seen[4], seen[4].tanh())])


@both
@pytest.mark.parametrize("chosen", [(0, 3), (0, 1, 4)], ids=str)
def test_steps_of_an_open_loop_without_a_read(
    model: NNsight, net: Recurrent, x: torch.Tensor, chosen: tuple[int, ...], compile: bool
) -> None:
    seen, _ = reference(net, x, lambda step, h: h * 3.0 if step in chosen else h)
    with pytest.warns(UserWarning, match=ENDED):
        with model.trace(x, compile=compile) as tracer:
            found = [].save()
            for step in tracer.iter[:]:
                if step in chosen:
                    model.cell.output = model.cell.output * 3.0
                    found.append(model.cell.output)
    same(found, [seen[step] for step in chosen])


@both
def test_a_loop_may_be_left_early_and_reading_goes_on(
    model: NNsight, net: Recurrent, x: torch.Tensor, compile: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(x, compile=compile) as tracer:
            for step in tracer.iter[:]:
                hidden = model.cell.output.save()
                if step == 1:
                    break
            out = model.head.output.save()
    same((hidden, out), (reference(net, x)[0][1], net(x)))


@both
def test_next_moves_on_one_call(model: NNsight, net: Recurrent, x: torch.Tensor, compile: bool) -> None:
    _, out = reference(net, x, lambda step, h: h * 2.0 if step == 1 else h)
    with model.trace(x, compile=compile) as tracer:
        first = model.cell.output.save()
        second = model.cell.next().output
        model.cell.output = second * 2.0
        third = model.cell.next().output.save()
        traced = model.output.save()
    seen, _ = reference(net, x, lambda step, h: h * 2.0 if step == 1 else h)
    same((first, third, traced), (seen[0], seen[2], out))


@both
def test_next_of_the_tracer_and_several_steps(model: NNsight, net: Recurrent, x: torch.Tensor, compile: bool) -> None:
    seen, _ = reference(net, x)
    with model.trace(x, compile=compile) as tracer:
        first = model.cell.output.save()
        tracer.next()
        second = model.cell.output.save()
        fifth = model.cell.next(3).output.save()
    same([first, second, fifth], [seen[0], seen[1], seen[4]])


@both
def test_next_past_the_last_call_is_an_error(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with pytest.raises(OutOfOrderError, match=rf"it occurred only {STEPS} times in this run"):
        with model.trace(x, compile=compile):
            model.cell.output.save()
            model.cell.next(STEPS).output.save()
    assert_no_instrumentation(model._module)


@both
def test_steps_backwards_are_missed(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with pytest.raises(OutOfOrderError, match=r"Value was missed for model\.cell\.output\.i1"):
        with model.trace(x, compile=compile) as tracer:
            for _ in tracer.iter[[3, 1]]:
                model.cell.output.save()


@both
def test_loops_in_two_invokes_keep_their_own_place(model: NNsight, net: Recurrent, compile: bool) -> None:
    a, b = torch.randn(1, 3), torch.randn(2, 3)

    def edit(step: int, h: torch.Tensor) -> torch.Tensor:
        return torch.cat([h[:1] + 1.0 if step < 2 else h[:1], h[1:] * 2.0 if step == 3 else h[1:]])

    _, out = reference(net, torch.cat([a, b]), edit)
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(a):
            for _ in tracer.iter[:2]:
                model.cell.output = model.cell.output + 1.0
            one = model.output.save()
        with tracer.invoke(b):
            for _ in tracer.iter[3]:
                model.cell.output = model.cell.output * 2.0
            two = model.output.save()
    same((one, two), (out[:1], out[1:]))


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (-1, ValueError, "cannot count from the end"),
        ([0, -2], ValueError, "cannot count from the end"),
        (slice(-2, None), ValueError, "cannot count from the end"),
        (slice(None, -1), ValueError, "cannot count from the end"),
        (slice(None, None, -1), ValueError, "cannot count from the end"),
        (slice(None, None, 0), ValueError, "cannot be zero"),
        (True, TypeError, "not bool"),
        ("0", TypeError, "not str"),
        (1.0, TypeError, "not float"),
        ([1.0], TypeError, "not float"),
        (slice("a", None), TypeError, "not str"),
    ],
    ids=str,
)
@both
def test_steps_that_make_no_sense(
    model: NNsight, x: torch.Tensor, chosen: Any, error: Any, message: str, compile: bool
) -> None:
    with pytest.raises(error, match=message):
        with model.trace(x, compile=compile) as tracer:
            for _ in tracer.iter[chosen]:
                pass


@both
def test_steps_without_a_loop_have_no_effect_and_warn(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    with pytest.warns(RuntimeWarning, match="without a loop has no effect") as warned:
        with model.trace(x, compile=compile) as tracer:
            tracer.all()
            out = model.output.save()
    assert [item.filename for item in warned] == [__file__]
    same(out, model._module(x))
