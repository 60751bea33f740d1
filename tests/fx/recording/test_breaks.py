"""Cuts: a block that needs a concrete value gets it, once, in order, and the rest stays compiled."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nnsight import NNsight, UncompiledWarning, fx
from nnsight.fx.recording.execution import GraphBreakError

from ...conftest import assert_no_instrumentation, same

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


@pytest.fixture(scope="module")
def model() -> NNsight:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    return NNsight(module, compile={"backend": "eager"})


Log = list[Any]


def branch(h: Any, log: Log) -> Any:
    return h * 2 if h.sum() > 0 else h * 3


def comparison_in_if(h: Any, log: Log) -> Any:
    if (h > 10).any() or not (h < 10).all():
        return h
    return -h


def item(h: Any, log: Log) -> Any:
    value = h.max().item()
    log.append((type(value), value))
    return h / value


def float_and_int(h: Any, log: Log) -> Any:
    first = h.detach()[0, 0]
    log.append((float(first), int(first * 100), bool(first)))
    return h * float(first)


def printing(h: Any, log: Log) -> Any:
    print("before", 1)
    print(h)
    print("mean", h.mean())
    return h + 1


def formatting(h: Any, log: Log) -> Any:
    log.append(f"{h[0, 0]:.4f} {h.detach()[0]}")
    log.append(str(h.detach()))
    log.append(repr(h.shape))
    return h + 1


def tolist(h: Any, log: Log) -> Any:
    log.append(h[0].tolist())
    return h + 1


def numpy(h: Any, log: Log) -> Any:
    array = h.detach().numpy()
    log.append(array.copy())
    return h + torch.from_numpy(np.ones_like(array))


def numpy_function(h: Any, log: Log) -> Any:
    log.append(np.asarray(h.detach()).sum())
    return h + 1


def nonzero(h: Any, log: Log) -> Any:
    rows = (h[:, 0] > -100).nonzero().flatten()
    return h + rows.sum()


def boolean_index(h: Any, log: Log) -> Any:
    chosen = h[h > 0]
    log.append(tuple(chosen.shape))
    return h + chosen.sum()


def unique(h: Any, log: Log) -> Any:
    return h + torch.unique(h).numel()


def indexing_a_list(h: Any, log: Log) -> Any:
    log.append(["a", "b", "c"][h[:, 0].argmax()])
    return h + 1


def membership(h: Any, log: Log) -> Any:
    log.append(3.0 in h)
    return h + 1


def equality(h: Any, log: Log) -> Any:
    log.append(torch.equal(h, h.clone()))
    log.append(torch.allclose(h, h + 1e-9))
    return h + 1


def two_cuts(h: Any, log: Log) -> Any:
    if h.sum() > 1000:
        return h
    h = h + 1
    log.append(h.mean().item())
    return h * 2


def edit_cut_edit(h: Any, log: Log) -> None:
    h += 1.0
    log.append(h.sum().item())
    h *= 2.0
    log.append(h.sum().item())


def view_across_the_cut(h: Any, log: Log) -> None:
    row = h[0]
    log.append(h.sum().item())
    row += 5.0
    log.append(h[0, 0].item())


def external_across_the_cut(h: Any, log: Log) -> Any:
    total = torch.zeros(4)
    total += h.detach().sum(0)
    log.append(total.tolist())
    total += 1.0
    return h + total


def copying(h: Any, log: Log) -> Any:
    other = copy.deepcopy(h.detach())
    log.append(other.sum().item())
    return h + other


def sorting_python(h: Any, log: Log) -> Any:
    order = sorted(range(3), key=lambda index: h[index, 0])
    log.append(order)
    return h[order]


def max_python(h: Any, log: Log) -> Any:
    return h * max(h[0, 0], h[1, 1])


NEEDS: list[Callable[[Any, Log], Any]] = [
    branch, comparison_in_if, item, float_and_int, printing, formatting, tolist, numpy, numpy_function, nonzero,
    boolean_index, unique, indexing_a_list, membership, equality, two_cuts, edit_cut_edit,
    view_across_the_cut, external_across_the_cut, copying, sorting_python, max_python,
]  # fmt: skip


def run(model: NNsight, need: Callable[[Any, Log], Any], compile: bool, x: torch.Tensor = X) -> tuple[Any, ...]:
    log: Log = []
    with model.trace(x, compile=compile) as tracer:
        first = (model[0].output * 1).save()
        hidden = model[1].output
        changed = need(hidden, log)
        if changed is not None:
            model[1].output = changed
        late = model[2].output.save()
        late += 0.5
        mixed = (late + first).save()
        out = model.output.save()
    return first, late, mixed, out, log, tracer


def reference(model: NNsight, need: Callable[[Any, Log], Any]) -> tuple[Any, ...]:
    """The same by hand, module by module."""
    log: Log = []
    module = model._module
    first = module[0](X)
    hidden = module[1](first)
    changed = need(hidden, log)
    late = module[2](hidden if changed is None else changed) + 0.5
    return first, late, late + first, module[3](late), log


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.__name__)
def test_values_output_and_side_effects(
    model: NNsight, need: Callable[[Any, Log], Any], grad: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.set_grad_enabled(grad):
        *expected, expected_log = reference(model, need)
        expected_printed = capsys.readouterr().out
        assert not torch.allclose(expected[3], model._module(X))
        for compile in (False, True, True):
            fx.counters.reset()
            *values, log, tracer = run(model, need, compile)
            printed = capsys.readouterr().out
            assert printed == expected_printed
            assert len(log) == len(expected_log)
            for mine, wanted in zip(log, expected_log, strict=True):
                assert type(mine) is type(wanted)
                assert np.array_equal(mine, wanted) if isinstance(mine, np.ndarray) else mine == wanted
            for value, wanted in zip(values, expected, strict=True):
                assert type(value) is torch.Tensor
                assert torch.equal(value, wanted), compile
    assert len(tracer.report.breaks) >= 1
    assert fx.counters.compiles == fx.counters.recordings == fx.counters.captures == 0, "the second run is known"


def test_new_values_take_the_other_branch(model: NNsight) -> None:
    """Each way of a branch is a program of its own; a third value finds both known."""
    with torch.no_grad():
        for x in (X, -X, X * 100, X * -100):
            run(model, branch, True, x)
        fx.counters.reset()
        for x in (X * 3, X * -2):
            assert torch.equal(run(model, branch, True, x)[3], run(model, branch, False, x)[3])
    assert fx.counters.compiles == 0


def test_the_report_names_line_location_and_reason(model: NNsight, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nnsight.fx"):
        with model.trace(X) as tracer:
            hidden = model[1].output
            size = hidden.sum().item()  # the line
            size.save()
    (cut,) = tracer.report.breaks
    assert cut.location == "model.1.output"
    assert "item" in cut.reason
    assert cut.filename == __file__
    lines = Path(__file__).read_text().splitlines()
    assert lines[cut.line - 1].strip() == "size = hidden.sum().item()  # the line"
    assert str(cut) in str(tracer.report)
    assert "1 break," in str(tracer.report)
    assert str(cut) in caplog.text
    assert fx.counters.breaks == 1


def test_a_concrete_tensor_needs_no_cut(model: NNsight) -> None:
    external = torch.ones(3)
    with model.trace(X) as tracer:
        hidden = model[1].output
        if external.sum() > 2 and external[0].item() == 1.0:
            hidden += external.tolist()[0]
        out = model.output.save()
    assert not tracer.report.breaks
    assert not torch.equal(out, model._module(X))


def test_a_cut_before_anything_was_recorded(model: NNsight) -> None:
    with model.trace(X) as tracer:
        value = model.input.sum().item().save()
    assert value == X.sum().item()
    assert tracer.report.mode == "compiled"


def test_cuts_at_every_location(model: NNsight) -> None:
    log: Log = []
    with torch.no_grad(), model.trace(X) as tracer:
        for layer in model:
            log.append(layer.input.sum().item())
            log.append(layer.output.sum().item())
        out = model.output.save()
    expected: Log = []
    value = X
    with torch.no_grad():
        for layer in model._module:
            expected.append(value.sum().item())
            value = layer(value)
            expected.append(value.sum().item())
    assert log == expected
    assert torch.equal(out, value)
    assert len(tracer.report.breaks) >= 5


def test_fullgraph_makes_a_cut_an_error(model: NNsight) -> None:
    strict = NNsight(model._module, compile={"backend": "eager", "fullgraph": True})
    with pytest.raises(GraphBreakError) as raised:
        with strict.trace(X):
            hidden = strict[1].output
            if hidden.sum() > 0:  # the line
                hidden += 1
    message = str(raised.value)
    assert __file__ in message
    line = int(message.split(":")[1])
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == "if hidden.sum() > 0:  # the line"
    assert "fullgraph" in message
    with strict.trace(X) as tracer:
        hidden = strict[1].output
        strict[1].output = torch.where(hidden.sum() > 0, hidden + 1, hidden)
        out = strict.output.save()
    assert not tracer.report.breaks
    assert torch.equal(out, run_where(model))
    assert_no_instrumentation(model._module)


def run_where(model: NNsight) -> torch.Tensor:
    module = model._module
    hidden = module[1](module[0](X))
    return module[3](module[2](hidden + 1 if hidden.sum() > 0 else hidden))


def test_an_error_after_a_cut_runs_nothing_twice(model: NNsight) -> None:
    events: list[str] = []
    with pytest.raises(KeyError, match="late"):
        with model.trace(X):
            early = model[0].output.sum().item().save()
            events.append("cut")
            kept = model[1].output.save()
            events.append("error")
            raise KeyError("late")
    assert events == ["cut", "error"]
    assert isinstance(early, float)
    same(kept, model._module[1](model._module[0](X)))  # as an eager trace brings it home


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_cuts_of_lowered_graphs(model: NNsight, backend: str) -> None:
    lowered = NNsight(model._module, compile={"backend": backend})
    chosen = [branch, edit_cut_edit, view_across_the_cut, external_across_the_cut]
    for need in chosen if backend == "aot_eager" else chosen[:2]:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                *expected, expected_log = reference(model, need)
                *values, log, _ = run(lowered, need, True)
            for value, wanted in zip(values, expected, strict=True):
                torch.testing.assert_close(value, wanted)
            for mine, wanted in zip(log, expected_log, strict=True):
                assert mine == pytest.approx(wanted, rel=1e-5)


class Graphs(torch.nn.Module):
    """A model that breaks the graph itself: dynamo hands over two graphs, with Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.third = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        if x.sum() > 1e6:
            x = x * 0
        return self.third(x)


def test_a_model_that_breaks_the_graph() -> None:
    torch.manual_seed(0)
    model = NNsight(Graphs(), compile={"backend": "eager"})
    module = model._module
    with torch.no_grad():
        hidden = module.first(X) + 1
        second = module.second(hidden) * 2
        expected = module.third(second)
        for compile in (False, True, True):
            with model.trace(X, compile=compile) as tracer:
                model.first.output[:] += 1
                state = model.first.output.save()
                model.second.output = model.second.output * 2
                both = (state + model.third.output).save()
                out = model.output.save()
            assert torch.equal(state, hidden), compile
            assert torch.equal(out, expected), compile
            assert torch.equal(both, hidden + expected), compile
        assert torch.equal(model(X), module(X))
    assert tracer.report.graphs >= 2


def test_a_cut_where_another_trace_stopped() -> None:
    """Both end the first part of the graph at one place, and only the cut needs what the rest uses."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model = NNsight(net, compile={"backend": "eager"})
    x = torch.randn(3, 4)
    with torch.no_grad():
        with model.trace(x) as tracer:
            stopped = model[0].output.save()
            tracer.stop()
        with model.trace(x):
            hidden = model[0].output.save()
            hidden.tolist()
            out = model.output.save()
        with model.trace(x) as tracer:
            again = model[0].output.save()
            tracer.stop()
        assert torch.equal(stopped, net[0](x))
        assert torch.equal(hidden, stopped)
        assert torch.equal(again, stopped)
        assert torch.equal(out, net(x))


# -- a trace inside a trace -------------------------------------------------------------------------------------------


def operand(inner: NNsight, hidden: torch.Tensor) -> Any:
    inner[0].output[:, 0] = hidden[:, 0]
    return inner[2].output.save()


def swapped_in(inner: NNsight, hidden: torch.Tensor) -> Any:
    inner[0].output = hidden
    return inner[2].output.save()


def in_place(inner: NNsight, hidden: torch.Tensor) -> Any:
    """Changes the outer run from the inner one."""
    hidden *= inner[0].output
    return inner[2].output.save()


def in_a_list(inner: NNsight, hidden: torch.Tensor) -> Any:
    inner[0].output[:] = torch.cat([hidden[:1], hidden[1:] * 2.0])
    return inner[2].output.save()


@pytest.mark.parametrize("use", [operand, swapped_in, in_place, in_a_list])
@pytest.mark.parametrize("own", [True, False], ids=["the same model", "another model"])
def test_a_compiled_trace_uses_a_tensor_of_the_one_around_it(use: Callable[[Any, Any], Any], own: bool) -> None:
    """The outer graph is cut where the inner block uses its tensor; without that the values of the two are as by hand."""
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)) for _ in range(2)]
    model = NNsight(nets[0], compile={"backend": "eager"})
    inner = model if own else NNsight(nets[1], compile={"backend": "eager"})
    other = X.flip(0)

    def by_hand() -> tuple[torch.Tensor, torch.Tensor]:
        hidden, below = nets[0][0](X) + 1.0, inner._module[0](other)
        if use is in_place:
            hidden = hidden * below
        else:
            below = {
                operand: torch.cat([hidden[:, :1], below[:, 1:]], 1),
                swapped_in: hidden,
                in_a_list: torch.cat([hidden[:1], hidden[1:] * 2.0]),
            }[use]
        return nets[0][2](torch.tanh(hidden)), inner._module[2](torch.tanh(below))

    with torch.no_grad():
        expected = by_hand()
        for compile in (False, True, True):
            fx.counters.reset()
            with model.trace(X, compile=compile) as tracer:
                hidden = model[0].output
                hidden += 1.0
                with inner.trace(other, compile=compile):
                    seen = use(inner, hidden).save()
                out = model.output.save()
            same((out, seen), expected)
            assert len(tracer.report.breaks) == compile
    (cut,) = tracer.report.breaks
    assert cut.reason == "a trace inside the block uses a tensor of this one"
    assert cut.location == "model.0.output" and cut.filename == __file__
    assert fx.counters.recordings == fx.counters.compiles == 0, "both blocks were known"
    assert not torch.equal(expected[0], nets[0](X)) and (
        use is in_place or not torch.equal(expected[1], nets[1](other))
    )


@pytest.mark.parametrize("given", [False, True], ids=["used", "as the input"])
def test_a_trace_that_may_not_be_cut_names_the_line_that_uses_its_tensor(given: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    outer, inner = (NNsight(net, compile={"backend": "eager", "fullgraph": full}) for full in (True, False))
    with pytest.raises(GraphBreakError, match=r"test_breaks\.py:\d+: a .* at `model\.0\.output`"):
        with outer.trace(X):
            hidden = outer[0].output
            with inner.trace(hidden if given else X):
                product = (inner[0].output * hidden).save()
    assert "product" not in locals()
    assert_no_instrumentation(net)


def test_a_generation_inside_a_trace_uses_its_tensor() -> None:
    from ...contract.guide import PARIS, ROME, new_language_model

    lm = new_language_model()
    found = []
    with torch.no_grad():
        for compile in (False, True):
            with lm.trace(PARIS, compile=compile) as tracer:
                hidden = lm.transformer.h[0].output
                with lm.generate(ROME, max_new_tokens=3, do_sample=False, compile=compile):
                    lm.transformer.h[0].output[:, -1] = hidden[:, -1] * 5.0
                    ids = lm.generator.output.save()
                logits = lm.lm_head.output.save()
            found.append((ids, logits))
        plain = lm._module(**lm.tokenizer(PARIS, return_tensors="pt")).logits
        encoded = lm.tokenizer(ROME, return_tensors="pt")
        unpatched = lm._module.generate(**encoded, max_new_tokens=3, do_sample=False)
        source: list[torch.Tensor] = []
        layer = lm._module.transformer.h[0]
        with layer.register_forward_hook(lambda _, __, out: source.append(out[:, -1] * 5.0)):
            lm._module(**lm.tokenizer(PARIS, return_tensors="pt"))
        calls: list[int] = []

        def patch(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return out if len(calls) > 1 else torch.cat([out[:, :-1], source[0][:, None]], 1)

        with layer.register_forward_hook(patch):
            patched = lm._module.generate(**encoded, max_new_tokens=3, do_sample=False)
    for pair in found:
        same(pair, (patched, plain))
    assert not torch.equal(patched, unpatched)
    assert len(tracer.report.breaks) == 1


def test_a_tensor_of_a_failed_trace_is_one_like_others(model: NNsight) -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), model.trace(X):
        kept.append(model[0].output)
        1 / 0  # noqa: B018
    with model.trace(-X):
        model[0].output = kept[0]
        out = model.output.save()
    same(out, model._module(X))


def test_a_tensor_of_an_interrupted_trace_has_no_value_in_another(model: NNsight) -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(KeyboardInterrupt), model.trace(X):
        kept.append(model[0].output)
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="was never computed, because its trace was interrupted"):
        with model.trace(X):
            model[0].output = kept[0]


def test_a_tensor_of_a_trace_of_another_thread_has_no_value_yet(model: NNsight) -> None:
    def elsewhere(hidden: torch.Tensor, errors: list[Exception]) -> None:
        try:
            with torch.no_grad(), model.trace(X):
                model[0].output = hidden
        except Exception as error:
            errors.append(error)

    errors: list[Exception] = []
    with torch.no_grad():
        with model.trace(X):
            hidden = model[0].output
            thread = threading.Thread(target=elsewhere, args=(hidden, errors))
            thread.start()
            thread.join()
            out = model.output.save()
        same(out, model._module(X))
    (error,) = errors
    assert type(error) is RuntimeError and "still running in another thread" in str(error)


# -- pieces are found again --------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("factor", [1.5, None], ids=["edited", "read"])
def test_a_model_that_is_cut_at_every_layer_lowers_a_layer_once(factor: float | None) -> None:
    """A piece that is only read is one layer and nothing else: a single region."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Layer() for _ in range(8)))
    model = NNsight(net, compile={"backend": "eager", "regions": True})

    def run() -> tuple[list[float], torch.Tensor]:
        norms: list[float] = []
        with torch.no_grad(), model.trace(X):
            for layer in model:
                norms.append(layer.output.norm().item())
                if factor is not None:
                    layer.output *= factor
            out = model.output.save()
        return norms, out

    fx.counters.reset()
    found = run()
    assert fx.counters.breaks == 8
    assert fx.counters.compiles <= 4 and fx.counters.reuses >= 6, fx.counters
    fx.counters.reset()
    again = run()
    assert fx.counters.breaks == 8 and fx.counters.compiles == fx.counters.recordings == fx.counters.reuses == 0
    expected: list[float] = []
    value = X
    with torch.no_grad():
        for layer in net:
            value = layer(value)
            expected.append(value.norm().item())
            value = value if factor is None else value * factor
    for norms, out in (found, again):
        assert norms == expected
        assert torch.equal(out, value)


def test_a_loop_over_prompts_compiles_each_way_of_a_branch_once(model: NNsight) -> None:
    net = model._module
    fresh = NNsight(net, compile={"backend": "eager"})
    compiles: dict[bool, list[int]] = {True: [], False: []}
    with torch.no_grad():
        for scale in (100.0, -100.0, 200.0, -200.0, 300.0, -300.0, 100.0):
            fx.counters.reset()
            with fresh.trace(X * scale) as tracer:
                hidden = fresh[1].output
                if hidden.sum() > 0:
                    fresh[2].output[:, 0] = 0.0
                out = fresh.output.save()
            third = net[2](by_hand := net[1](net[0](X * scale)))
            way = bool(by_hand.sum() > 0)
            if way:
                third[:, 0] = 0.0
            assert torch.equal(out, net[3](third))
            assert len(tracer.report.breaks) == 1
            compiles[way].append(fx.counters.compiles)
    for counts in compiles.values():
        assert counts[0] > 0 and counts[1:] == [0] * (len(counts) - 1) and len(counts) > 1


# -- what goes wrong between two pieces, and in one --------------------------------------------------------------------

trouble: list[BaseException] = []


@torch.library.custom_op("tests_breaks::troubled", mutates_args=())
def troubled(x: torch.Tensor) -> torch.Tensor:
    if trouble:
        raise trouble[0]
    return x * 2


troubled.register_fake(torch.empty_like)
troubled.register_autograd(lambda context, gradient: gradient * 2)


class Troubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            frozen = torch.ops.tests_breaks.troubled(self.first(x))
        return self.third(torch.ops.tests_breaks.troubled(self.second(frozen)))


def _raising(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        if trouble:
            raise trouble[0]
        return graph_module.forward(*arguments)

    return run


@pytest.mark.parametrize("cut", [False, True], ids=["one graph", "cut"])
@pytest.mark.parametrize("raised", [KeyboardInterrupt(), ValueError("mine")], ids=["KeyboardInterrupt", "ValueError"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", _raising])
def test_an_exception_while_a_piece_runs_leaves_nothing_behind(backend: Any, raised: BaseException, cut: bool) -> None:
    torch.manual_seed(0)
    net = Troubled()
    model = NNsight(net, compile={"backend": backend})
    events: list[str] = []

    def run() -> Any:
        with model.trace(X):
            events.append("begin")
            hidden = model.first.output
            if cut and hidden.sum() > -1e9:
                events.append("cut")
            with torch.no_grad():
                doubled = (torch.ops.tests_breaks.troubled(hidden) + 1.0).save()
            events.append("end")
            out = model.output.save()
        return doubled, out

    trouble.clear()
    run()
    modes = torch.is_grad_enabled(), len(torch.overrides._get_current_function_mode_stack())
    try:
        trouble.append(raised)
        events.clear()
        with pytest.raises(type(raised)) as caught:
            run()
    finally:
        trouble.clear()
    assert caught.value is raised or "mine" in str(caught.value)
    assert events.count("begin") == 1 and events.count("cut") <= 1 and events.count("end") <= 1
    assert modes == (torch.is_grad_enabled(), len(torch.overrides._get_current_function_mode_stack())) == (True, 0)
    assert_no_instrumentation(net)
    doubled, out = run()
    assert torch.equal(out, net(X)) and out.requires_grad and not doubled.requires_grad
    assert torch.equal(doubled, net.first(X) * 2 + 1.0)
    assert torch.equal(model(X), net(X))


def test_an_error_between_two_pieces_has_the_traceback_of_the_block_alone(model: NNsight) -> None:
    import traceback

    with pytest.raises(ZeroDivisionError) as raised:
        with torch.no_grad(), model.trace(X):
            count = int(model[0].output.sum() > -1e9)
            model[1].output += 1.0
            1 / (count - 1)  # the line
    frames = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename == __file__]
    assert frames[-1].line == "1 / (count - 1)  # the line"
    assert torch.is_grad_enabled() and not torch.overrides._get_current_function_mode_stack()
    assert_no_instrumentation(model._module)
    same(run(model, branch, True)[3], run_branch(model))


def run_branch(model: NNsight) -> torch.Tensor:
    return reference(model, branch)[3]


# -- a lowering that fails ---------------------------------------------------------------------------------------------


def test_a_piece_that_cannot_be_lowered_runs_node_by_node() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    lowered: list[int] = []

    def picky(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if any("relu" in str(node.target) for node in graph_module.graph.nodes):
            raise NotImplementedError("no relu here")
        lowered.append(len(graph_module.graph.nodes))
        return graph_module.forward

    for options in ({}, {"regions": True}):
        model = NNsight(net, compile={"backend": picky, **options})
        lowered.clear()
        for _ in range(2):
            with pytest.warns(UncompiledWarning, match="NotImplementedError: no relu here"), model.trace(X) as tracer:
                first = model[0].output
                if first.sum() > -1e9:
                    model[0].output = torch.relu(first)
                model[1].output = torch.relu(model[1].output)
                if model[1].output.sum() > -1e9:
                    model[1].output += 1.0
                out = model.output.save()
        assert torch.equal(out, net[2](torch.relu(net[1](torch.relu(net[0](X)))) + 1.0))
        assert len(tracer.report.notes) == 1 and tracer.report.notes[0].startswith("the graph up to `model.1.output` ran operation by")
        assert lowered, "other pieces are lowered"


# -- edits in place of tensors that are real already -------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_name_that_is_saved_survives_an_operator_in_place(model: NNsight, grad: bool) -> None:
    """`h *= 2` binds the name anew; with a tensor that is real by then it is the same one, which is saved."""
    net = model._module
    with torch.set_grad_enabled(grad):
        for compile in (False, True, True):
            kept: Log = []
            with model.trace(X, compile=compile) as tracer:
                total = torch.zeros(3, 4).save()
                total += model[0].output
                state = model[1].output.save()
                kept.append(state)
                if state.sum() > -1e9:
                    state *= 2.0
                total += state
                kept.append(state)
                out = model.output.save()
            first = net[0](X)
            hidden = net[1](first) * 2.0
            same((total, state, out), (first + hidden, hidden, net[3](net[2](hidden))))
            assert all(torch.equal(item, hidden) for item in kept)
            assert grad or kept[0] is kept[1] is state
            assert total.requires_grad == state.requires_grad == grad
            assert len(tracer.report.breaks) == compile


class Rectified(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.relu(self.first(x)))


@pytest.mark.parametrize("early", [True, False], ids=["needs the value", "has the value"])
@pytest.mark.parametrize("show", [torch.Tensor.numpy, np.asarray, np.from_dlpack], ids=lambda show: show.__name__)
def test_an_array_shows_each_later_edit_of_its_memory(show: Callable[[Any], Any], early: bool) -> None:
    torch.manual_seed(0)
    net = Rectified()
    model = NNsight(net, compile={"backend": "eager"})
    with torch.no_grad():
        hidden = net.first(X)
        expected = [hidden.clone(), hidden.relu_().clone(), (hidden + 1.0) * 3.0]
        for compile in (False, True, True):
            seen: Log = []
            with model.trace(X, compile=compile):
                first = model.first.output
                if not early:
                    first.tolist()
                array = show(first)
                seen.append(torch.tensor(array))
                behind = model.relu.output
                seen.append(torch.tensor(array))
                array += 1.0
                row = first[0]
                row *= 3.0
                first[1:] *= 3.0
                seen.append(torch.tensor(array))
                out = model.output.save()
            same(seen, expected)
            same(out, net.last(expected[-1]))


def test_an_array_that_shows_other_memory_asks_for_no_cut(model: NNsight) -> None:
    net = model._module
    with torch.no_grad():
        for _ in range(2):
            with model.trace(X) as tracer:
                array = model[0].output.numpy()
                model[1].output += 1.0
                model[1].output[:, 0] = 0.0
                model[2].output *= 2.0
                out = model.output.save()
            hidden = net[1](net[0](X)) + 1.0
            hidden[:, 0] = 0.0
            same(out, net[3](net[2](hidden) * 2.0))
            assert len(tracer.report.breaks) == 1


def test_gradients_by_autograd_grad(model: NNsight) -> None:
    net = model._module
    for compile in (False, True, True):
        with model.trace(X, compile=compile) as tracer:
            hidden = model[0].output
            loss = model[2].output.pow(2).sum()
            (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)
            model[2].output += gradient
            gradient.save()
            out = model.output.save()
        first = net[0](X)
        third = net[2](net[1](first))
        (expected,) = torch.autograd.grad(third.pow(2).sum(), first, retain_graph=True)
        torch.testing.assert_close(gradient, expected)
        torch.testing.assert_close(out, net[3](third + expected))
        assert len(tracer.report.breaks) == compile
