"""Generation with values needed at some steps: compiled, eager and with a plain hook it is the same, and compiled once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import LanguageModel, fx
from nnsight.fx.recording.execution import GraphBreakError

from ..conftest import assert_no_instrumentation, same
from ..contract.guide import PARIS, new_language_model

NEW = 4
GREEDY = {"max_new_tokens": NEW, "do_sample": False}

Log = list[Any]
Need = Callable[[int, torch.Tensor, Log], torch.Tensor | None]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return new_language_model()


def branch(step: int, h: torch.Tensor, log: Log) -> torch.Tensor | None:
    """Goes one way at some steps and the other way at others, and needs no value at the second."""
    if step == 1:
        return h * 1.5
    if h[:, -1, 0] > 0:
        log.append(f"{step}: up")
        return h * 2.0
    log.append(f"{step}: down")
    return None


def items(step: int, h: torch.Tensor, log: Log) -> torch.Tensor | None:
    log.append((step, round(h[:, -1].sum().item(), 4)))
    print("step", step, f"{h[0, -1, 0]:.4f}", tuple(h.shape))
    h[:, -1] = h[:, -1].flip(-1) * (3.0 + float(h[0, -1, 0]))
    log.append((step, h[:, -1].argmax(-1).tolist()))
    return None


def suppressed(step: int, h: torch.Tensor, log: Log) -> torch.Tensor | None:
    with contextlib.suppress(IndexError):
        log.append((step, "in"))
        h = h + torch.ones(8)[h[0, -1].argmax()]
        log.append((step, "no error"))
    return h * 1.5


def drawn(step: int, h: torch.Tensor, log: Log) -> torch.Tensor | None:
    h = h + torch.rand(h.shape[-1])
    if h.sum() > -1e9:
        log.append(round(torch.rand(()).item(), 6))
    return h + torch.rand_like(h)


#: What needs values, and how often the graphs of all steps are cut for it.
NEEDS: list[tuple[Need, int]] = [(branch, NEW - 1), (items, 2 * NEW), (suppressed, NEW), (drawn, NEW)]


def hooked(model: LanguageModel, need: Need, prompt: str) -> tuple[torch.Tensor, list[torch.Tensor], Log]:
    log: Log = []
    last: list[torch.Tensor] = []

    def first(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        changed = need(len(last), out, log)
        return out if changed is None else changed

    module = model._module
    handles = [
        module.transformer.h[0].register_forward_hook(first),
        module.transformer.h[1].register_forward_hook(lambda _, __, out: last.append(out[:, -1].clone())),
    ]
    try:
        ids = module.generate(**model.tokenizer(prompt, return_tensors="pt"), **GREEDY)
    finally:
        for handle in handles:
            handle.remove()
    return ids, last, log


def traced(model: LanguageModel, need: Need, prompt: str, compile: bool) -> tuple[Any, Any]:
    log: Log = []
    with model.generate(prompt, **GREEDY, compile=compile) as tracer:
        last = [].save()
        for step in tracer.iter[:NEW]:
            hidden = model.transformer.h[0].output
            changed = need(step, hidden, log)
            if changed is not None:
                model.transformer.h[0].output = changed
            last.append(model.transformer.h[1].output[:, -1].clone())
        ids = model.generator.output.save()
    return (ids, last, log), tracer


@pytest.mark.parametrize(
    ("need", "cuts"),
    [pytest.param(*pair, marks=[] if pair[0] is drawn else pytest.mark.slow) for pair in NEEDS],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_values_that_are_needed_at_each_step(
    model: LanguageModel, need: Need, cuts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def observed(run: Callable[[], Any]) -> Any:
        torch.manual_seed(3)
        found = run()
        return found, capsys.readouterr().out, torch.rand(1).item()

    plain = model._module.generate(**model.tokenizer(PARIS, return_tensors="pt"), **GREEDY)
    expected = observed(lambda: hooked(model, need, PARIS))
    assert not torch.equal(expected[0][0], plain), "the edits change what is written"
    for compile in (False, True, True):
        fx.counters.reset()
        (found, tracer), out, number = observed(lambda: traced(model, need, PARIS, compile))  # noqa: B023
        same((found[0], found[1]), (expected[0][0], expected[0][1]))
        assert (found[2], out, number) == (expected[0][2], *expected[1:])
    assert fx.counters.breaks == len(tracer.report.breaks) == cuts
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0, "the second run is known"
    assert_no_instrumentation(model._module)


@pytest.mark.slow
def test_pieces_serve_all_lengths() -> None:
    """Lengths grow from step to step, and a tensor of the block of that length goes into the model."""
    fresh = new_language_model()

    def written(tokens: int, compile: bool) -> Any:
        with fresh.generate(PARIS, max_new_tokens=tokens, do_sample=False, compile=compile) as tracer:
            for _ in tracer.iter[:tokens]:
                hidden = fresh.transformer.h[0].output
                if hidden.sum() > -1e9:
                    fresh.transformer.h[0].output = hidden.flip(-1) * 2.0
            ids = fresh.generator.output.save()
        return ids

    written(2, True)
    written(2, True)  # whose first length is one of those for which graphs are symbolic by now
    fx.counters.reset()
    found = written(NEW, True)
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0
    same(found, written(NEW, False))


@pytest.mark.parametrize(
    "way", ["stop", *(pytest.param(way, marks=pytest.mark.slow) for way in ("break", "raise", "open loop"))]
)
def test_an_end_that_depends_on_a_value(model: LanguageModel, way: str) -> None:
    """Nothing of the block behind it runs."""
    plain, _, sums = hooked(model, lambda step, h, log: log.append(h.sum().item()), PARIS)
    width = plain.shape[1] - NEW

    def run(compile: bool) -> tuple[Any, ...]:
        notes: Log = []
        states: list[torch.Tensor] = []
        sizes: list[int] = []
        ids = error = None
        with contextlib.ExitStack() as stack:
            if way == "open loop":
                stack.enter_context(pytest.warns(UserWarning, match="The loop ended at"))
            if way == "raise":
                error = stack.enter_context(pytest.raises(KeyError, match="mine"))
            with model.generate(PARIS, **GREEDY, compile=compile) as tracer:
                for step in tracer.iter[:] if way == "open loop" else tracer.iter[:NEW]:
                    total = model.transformer.h[0].output.sum().item()
                    notes.append(step)
                    states.append(model.transformer.h[1].output.clone())
                    sizes.append(states[-1].shape[1])
                    model.lm_head.output[:, :, 0] = 0.0
                    if total == sums[2]:
                        notes.append("end")
                        if way == "stop":
                            tracer.stop()
                        elif way == "raise":
                            raise KeyError("mine")
                        elif way == "break":
                            break
                if way == "break":
                    ids = model.generator.output.save()
        return ids, sizes, states, notes, error is not None

    assert sums.count(sums[2]) == 1
    expected = run(False)
    assert expected[3].count("end") == 1 and expected[1][:3] == [width, width + 1, width + 2]
    assert len(expected[1]) == (4 if way == "open loop" else 3)
    assert way != "break" or torch.equal(expected[0], plain)
    for _ in range(2):
        fx.counters.reset()
        found = run(True)
        computed = 2 if way == "raise" else len(found[2])  # what was still to be computed when a trace fails is not
        same(found[2][:computed], expected[2][:computed])
        assert found[1] == expected[1] and found[3:] == expected[3:]
        assert way != "break" or torch.equal(found[0], plain)
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0
    assert_no_instrumentation(model._module)


@pytest.mark.slow
def test_with_fullgraph_a_value_at_a_step_is_an_error(model: LanguageModel) -> None:
    strict = LanguageModel(model._module, model.tokenizer, compile={"backend": "eager", "fullgraph": True})
    with pytest.raises(GraphBreakError, match="`item` needs a concrete value at `model.transformer.h.0.output`"):
        with strict.generate(PARIS, **GREEDY) as tracer:
            for _ in tracer.iter[:NEW]:
                strict.transformer.h[0].output.sum().item()
    assert_no_instrumentation(model._module)
