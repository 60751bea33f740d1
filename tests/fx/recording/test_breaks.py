"""Cuts: a block that needs a concrete value gets it, once, in order, and the rest stays compiled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

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


@pytest.mark.parametrize("use", [operand, swapped_in, in_place])
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


def test_a_model_that_is_cut_at_every_layer_lowers_a_layer_once() -> None:
    """A piece that is only read is one layer and nothing else: a single region."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Layer() for _ in range(8)))
    model = NNsight(net, compile={"backend": "eager", "regions": True})

    def run() -> tuple[list[float], torch.Tensor]:
        norms: list[float] = []
        with torch.no_grad(), model.trace(X):
            for layer in model:
                norms.append(layer.output.norm().item())
                layer.output *= 1.5
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
            value = value * 1.5
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
@pytest.mark.parametrize("show", [torch.Tensor.numpy, np.from_dlpack], ids=lambda show: show.__name__)
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


def test_a_backward_pass_behind_all_that_the_model_computes_is_no_cut() -> None:
    """Attribution patching at the logits is one graph, with the gradients that torch hooks see."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 50}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tiny_gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    ids = torch.arange(8)[None] % 50
    kept: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)
        kept[-1].retain_grad()

    parts = [part for layer in tiny_gpt2.transformer.h for part in (layer.attn, layer.mlp)]
    handles = [part.register_forward_hook(keep) for part in parts]
    tiny_gpt2(ids).logits[:, -1].logsumexp(-1).sum().backward()
    for handle in handles:
        handle.remove()
    expected = [each.grad for each in kept]
    model = NNsight(tiny_gpt2, compile={"backend": "aot_eager", "fullgraph": True})
    for place in (lambda: model.lm_head.output, lambda: model.output.logits):
        with model.trace(ids) as tracer:
            found = []
            for layer in model.transformer.h:
                found += [layer.attn.output[0], layer.mlp.output]
            with place()[:, -1].logsumexp(-1).sum().backward():
                gradients = [each.grad for each in reversed(found)].save()
        assert tracer.report.breaks == []
        assert tracer.report.mode == "compiled"
        assert all(map(torch.allclose, reversed(gradients), expected))


def test_an_edit_behind_a_backward_pass_at_the_end_makes_it_a_cut() -> None:
    """Then there are two graphs; only the first one is there while the block has not gone on."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    for fullgraph in (False, True):
        model = NNsight(net, compile={"backend": "eager", "fullgraph": fullgraph})
        with pytest.raises(GraphBreakError, match="`backward` needs a concrete value at `model.1.output`") if fullgraph else nullcontext():
            with model.trace(X) as tracer:
                out = model[1].output
                out.sum().backward(retain_graph=True)
                out[:] = 0.0
                result = model.output.save()
            assert (result == 0).all()
            assert [cut.location for cut in tracer.report.breaks] == ["model.1.output"]
    net.zero_grad()
