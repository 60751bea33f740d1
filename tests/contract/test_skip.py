"""Skipping a module: it returns the given value, and neither it nor what is inside it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import nnsight
from nnsight import NNsight, fx
from nnsight.runtime import OutOfOrderError

from ..conftest import CACHE, Case, Hooks, Layer, Rows, agree, assert_no_instrumentation, both, close, same


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.second = Layer()
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)[0])[0])


class Repeated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.cell(x)
        return x


@pytest.fixture
def net() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def model(net: Stack) -> Rows:
    return Rows(net, compile={"backend": "eager"})


def test_a_skipped_module_returns_the_value(model: Rows, net: Stack, a: torch.Tensor) -> None:
    first = net.first(a)

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(a, compile=compile) as tracer:
            hidden = model.first.output
            model.second.skip(hidden)
            seen = model.second.output.save()
            out = model.output.save()
        return (seen, out), tracer

    agree(run, (first, net.head(first[0])))
    assert not torch.equal(net.head(first[0]), net(a)), "skipping makes a difference"


def test_the_whole_model_can_be_skipped(model: Rows, a: torch.Tensor) -> None:
    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(a, compile=compile) as tracer:
            model.skip(torch.ones(2, 2))
            result = tracer.result.save()
        return result, tracer

    agree(run, torch.ones(2, 2))


def test_eagerly_nothing_inside_runs(model: Rows, net: Stack, a: torch.Tensor) -> None:
    ran: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name)) for name, module in net.named_modules()
    ]
    with model.trace(a, compile=False):
        hidden = model.first.output
        model.second.skip(hidden)
    for handle in handles:
        handle.remove()
    assert ran == ["first.inner", "first", "head", ""]


def test_compiled_what_is_skipped_is_not_computed(net: Stack, a: torch.Tensor) -> None:
    """Weights that would poison the result are never used."""
    model = NNsight(net, compile={"backend": "eager"})
    torch.nn.init.constant_(net.second.inner.weight, float("nan"))
    for compile in (False, True):
        with model.trace(a, compile=compile):
            hidden = model.first.output
            model.second.skip(hidden)
            out = model.output.save()
        assert out.isfinite().all()


@both
def test_a_tensor_as_all_arguments(model: Rows, net: Stack, compile: bool, a: torch.Tensor) -> None:
    """``.inputs = (x, {})`` is a call with ``x``, and does not matter if the module is skipped."""
    with model.trace(a, compile=compile):
        result = model.first.output
        model.second.inputs = (torch.zeros_like(model.second.input), *model.second.inputs[1:])
        model.second.skip(result)
        skipped = model.output.save()
    with model.trace(a, compile=compile):
        model.second.inputs = torch.ones_like(model.second.input), {}
        called = model.output.save()
    close(skipped, net.head(net.first(a)[0]))
    close(called, net.head(net.second(torch.ones_like(a))[0]))


@both
def test_an_occurrence_is_skipped_alone(compile: bool, a: torch.Tensor) -> None:
    torch.manual_seed(0)
    net = Repeated()
    model = NNsight(net, compile={"backend": "eager"})
    with model.trace(a, compile=compile) as tracer:
        for _ in tracer.iter[1:3]:
            model.cell.skip(model.cell.input * 2.0)
        out = model.output.save()
    same(out, net.cell(net.cell(a) * 4.0))


@both
def test_a_condition_decides(model: Rows, net: Stack, compile: bool) -> None:
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        with model.trace(x, compile=compile) as tracer:
            if model.input.sum() > 0:
                hidden = model.first.output
                model.second.skip(hidden)
            out = model.output.save()
        assert len(tracer.report.breaks) == compile
        first = net.first(x)[0]
        same(out, net.head(first) if x.sum() > 0 else net(x))


@pytest.mark.slow
def test_layers_of_a_transformers_model(gpt2: Case) -> None:
    model, inputs = NNsight(gpt2.module, compile={"backend": "eager"}), gpt2.inputs()
    hooked = Hooks(gpt2.module)
    hooked.output("transformer.h.0", hooked.keep("hidden"))
    for index in (1, 2):
        hooked.output(f"transformer.h.{index}", lambda _: hooked.seen["hidden"])
    expected = hooked(**inputs).logits

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(**inputs, compile=compile) as tracer:
            hidden = model.transformer.h[0].output
            model.transformer.h[1].skip(hidden)
            model.transformer.h[2].skip(hidden)
            logits = model.output.logits.save()
        return logits, tracer

    assert not torch.equal(expected, gpt2.module(**inputs).logits)
    # With a key-value cache the layers do something beside their output, which the model returns.
    agree(run, expected)


def test_layers_with_a_cache_of_keys_and_values(gpt2: Case) -> None:
    """A skipped layer stores nothing in the cache that the model returns, and the next call goes on from there.

    There the layer would fail if it ran, as torch.compile finds out. It does not run, so the call goes on as Python, and says so.
    """
    model, inputs = NNsight(gpt2.module, compile={"backend": "eager"}), gpt2.inputs()
    following = {"input_ids": inputs["input_ids"][:, :1], "attention_mask": torch.ones(1, inputs["input_ids"].shape[1] + 1)}

    def run(compile: bool) -> list[Any]:
        with model.trace(**inputs, compile=compile) as tracer:
            model.transformer.h[1].skip(model.transformer.h[0].output)
            first = model.output.save()
        assert tracer.report.mode == ("compiled" if compile else "eager")
        keys = [layer.keys for layer in first.past_key_values.layers]
        stored = [0 if of_layer is None else of_layer.numel() for of_layer in keys]
        said = pytest.warns(nnsight.UncompiledWarning, match="batch2 tensor.*line .*compile=False") if compile else contextlib.nullcontext()
        with said, model.trace(**following, **{CACHE: first.past_key_values}, compile=compile):
            model.transformer.h[1].skip(model.transformer.h[0].output)
            second = model.output.logits.save()
        return [first.logits, second, stored]

    eager, compiled = run(False), run(True)
    same(compiled[:2], eager[:2])
    assert compiled[2] == eager[2]
    assert eager[2][1] == 0 < eager[2][0]


@pytest.mark.slow
def test_a_decoder_layer_with_cross_attention_in_every_step(caplog: pytest.LogCaptureFixture) -> None:
    """T5 adds a bias for each key, so dynamo cannot follow a layer without keys in step 2. It tries once, and one warning says so."""
    net = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ).eval()  # fmt: skip
    model, inputs = NNsight(net, compile={"backend": "eager"}), torch.arange(2, 9)[None]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}

    def run(compile: bool) -> tuple[list[torch.Tensor], Any]:
        logits = []
        with model.generate(input_ids=inputs, **options, compile=compile) as tracer:
            for _ in tracer.iter[:4]:
                model.decoder.block[1].skip(model.decoder.block[0].output)
                logits.append(model.lm_head.output.save())
        return logits, tracer.report

    expected, _ = run(compile=False)
    with pytest.warns(nnsight.UncompiledWarning, match="batch2 tensor.*line .*compile=False") as told:
        logits, report = run(compile=True)
    same(logits, expected)
    assert (len(told), len(report.breaks), report.graphs) == (1, 1, 1)
    assert "batch2 tensor" in report.breaks[0].reason
    assert not caplog.records, "torch's own tracebacks are no news"
    before = fx.counters.captures
    same(run(compile=True)[0], expected)
    assert fx.counters.captures == before
    # Without the skip nothing is in the way.
    with model.generate(input_ids=inputs, **options) as tracer:
        result = tracer.result.save()
    assert not tracer.report.breaks
    same(result, net.generate(input_ids=inputs, **options))


class Reading(torch.nn.Module):
    """Looks at what it has stored before, which has another shape where it was skipped."""

    def forward(self, x: torch.Tensor, stored: list[torch.Tensor]) -> torch.Tensor:
        width = stored[-1].shape[1] if stored else x.shape[1]
        return x * width


class Passing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), Reading()

    def forward(self, x: torch.Tensor, stored: list[torch.Tensor]) -> torch.Tensor:
        return self.second(self.first(x), stored)


def test_a_skipped_module_that_could_not_run(a: torch.Tensor) -> None:
    """Torch.compile follows it all the same and meets its error; the call goes on as Python, where the module does not run."""
    net = Passing()
    model = NNsight(net, compile={"backend": "eager"})
    with pytest.warns(nnsight.UncompiledWarning, match="IndexError"), model.trace(a, [torch.zeros(0)]):
        model.second.skip(model.first.output)
        out = model.output.save()
    same(out, net.first(a))
    with pytest.raises(IndexError), model.trace(a, [torch.zeros(0)]):
        out = model.output.save()


class Printing(Passing):
    def forward(self, x: torch.Tensor, stored: list[torch.Tensor]) -> torch.Tensor:
        print("forward")
        return super().forward(x, stored)


def test_a_model_that_has_run_in_part_is_not_run_again(a: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    """The print breaks the graph: the model runs as Python there, and torch.compile meets the error in the module alone."""
    model = NNsight(Printing(), compile={"backend": "eager"})
    with pytest.raises(Exception, match="IndexError|list index out of range"), model.trace(a, [torch.zeros(0)]):
        model.output.save()
    assert capsys.readouterr().out == "forward\n"


class Keeping(torch.nn.Module):
    """Stores something made of its input in itself."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = x.tanh()
        return x + self.state


class KeepingBoth(Keeping):
    """What it stores is a concatenation, but not one with what was stored before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = torch.cat([x.tanh(), x])
        return x + self.state[: x.shape[0]]


@pytest.mark.parametrize("kind", [Keeping, KeepingBoth])
def test_a_state_that_is_made_anew_is_refused(kind: type[Keeping], a: torch.Tensor) -> None:
    """The graph does not show what the module stored before. The error names a way out, which works."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), kind())
    model = NNsight(net, compile={"backend": "eager"})
    with pytest.raises(ValueError, match=r"`model.1` cannot be skipped in this compiled trace.*compile=False"), model.trace(a):
        model[1].skip(model[0].output)
        out = model.output.save()
    with model.trace(a, compile=False):
        model[1].skip(model[0].output)
        out = model.output.save()
    same(out, net[0](a))
    assert net[1].state is None


class Counting(torch.nn.Module):
    """Returns a number, which dynamo makes a symbol, beside a tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, x.shape[0] * x.shape[1]


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, count = self.counting(x)
        return hidden.reshape(count)


def test_a_skipped_module_that_returns_a_number_made_of_sizes() -> None:
    model = NNsight(Counted(), compile={"backend": "eager", "dynamic": True})
    for length in (5, 6):
        x = torch.randn(2, length)
        with model.trace(x):
            hidden = model.counting.input
            model.counting.skip((hidden * 3, hidden.shape[0] * hidden.shape[1]))
            out = model.output.save()
        same(out, (x * 3).reshape(-1))
    assert nnsight.fx.counters.captures == 1


# -- invokes ----------------------------------------------------------------------------------------------------------


def test_every_invoke_gives_its_own_rows(model: Rows, net: Stack, a: torch.Tensor, b: torch.Tensor) -> None:
    c = torch.randn(3, 4)
    hidden = torch.cat([net.first(torch.cat([a, c]))[0][:2], torch.zeros(3, 4)])

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                mine = model.first.output
                model.second.skip(mine)
                one = model.output.save()
            with tracer.invoke(c):
                model.second.skip((torch.zeros(3, 4), None))
                two = model.output.save()
        return torch.cat([one, two]), tracer

    agree(run, net.head(hidden))


def test_an_empty_invoke_skips_for_all(model: Rows, net: Stack, a: torch.Tensor, b: torch.Tensor) -> None:
    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                one = model.output.save()
            with tracer.invoke(b):
                two = model.output.save()
            with tracer.invoke():
                hidden = model.first.output
                model.second.skip(hidden)
        return torch.cat([one, two]), tracer

    agree(run, net.head(net.first(torch.cat([a, b]))[0]))


# -- mistakes ---------------------------------------------------------------------------------------------------------


def inside(model: Rows) -> None:
    hidden = model.first.output
    model.second.skip(hidden)
    model.second.inner.output.save()


def after_it_ran(model: Rows) -> None:
    hidden = model.second.output
    model.second.skip(hidden)


def while_it_runs(model: Rows) -> None:
    hidden = model.second.inner.output
    model.second.skip((hidden, None))


def after_a_later_one(model: Rows) -> None:
    model.head.input  # noqa: B018
    model.first.skip((torch.zeros(2, 4), None))


@pytest.mark.parametrize("mistake", [inside, after_it_ran, while_it_runs, after_a_later_one])
@both
def test_out_of_order(model: Rows, net: Stack, a: torch.Tensor, mistake: Callable[[Rows], None], compile: bool) -> None:
    with pytest.raises(OutOfOrderError, match=r"model\.(second|first)\.(inner\.output|input)"):
        with model.trace(a, compile=compile):
            mistake(model)
    assert_no_instrumentation(net)


@both
def test_a_value_of_another_shape(model: Rows, a: torch.Tensor, compile: bool) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        with model.trace(a, compile=compile):
            model.second.skip((torch.zeros(2, 3), None))
            model.output.save()


def test_a_model_that_fails_after_a_skip_says_so(model: Rows, a: torch.Tensor) -> None:
    with pytest.raises(TypeError) as caught:
        with model.trace(a, compile=False):
            model.second.skip(None)
    (note,) = caught.value.__notes__
    assert "test_skip.py" in note
    assert "`model.second` was skipped and returned a NoneType" in note
