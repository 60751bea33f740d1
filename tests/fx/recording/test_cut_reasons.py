"""Every way to demand a value in a block: same values, side effects and order as with plain hooks, and the expected cuts."""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from nnsight import NNsight, fx
from nnsight.fx.recording.execution import GraphBreakError

from ...conftest import Hooks, assert_no_instrumentation

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
Log = list[Any]
logger = logging.getLogger("tests.demands")


@pytest.fixture(scope="module")
def model() -> NNsight:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    return NNsight(module, compile={"backend": "eager"})


@pytest.fixture(scope="module")
def strict(model: NNsight) -> NNsight:
    return NNsight(model._module, compile={"backend": "eager", "fullgraph": True})


@torch.library.custom_op("tests_demands::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3


counter = {"calls": 0}


def formatted(h: Any, log: Log) -> Any:
    log.append(f"{h.detach()} {h[0, 0]:.3f} {h.detach().sum()!r}")
    log.append("{} {:.3f}".format(*(h.detach(), h.detach().sum())))
    return h + 1


def printed_between(h: Any, log: Log) -> Any:
    print("first")
    counter["calls"] += 1
    print(h.detach()[0], h.shape, sep="|")
    counter["calls"] += 1
    print("last", counter["calls"])
    return h * 2


def random_numbers(h: Any, log: Log) -> Any:
    log.append((torch.rand(2).tolist(), random.random()))
    if h.sum() > -1e9:
        log.append(torch.rand(2).tolist())
    return h + torch.randn(4) + torch.rand_like(h)


def random_numbers_in_the_graph(h: Any, log: Log) -> Any:
    h = torch.nn.functional.dropout(h, 0.5)
    log.append(h.sum().item())
    return torch.nn.functional.dropout(h, 0.5) + torch.rand(4)


def as_array(h: Any, log: Log) -> Any:
    log.append(np.asarray(h.detach()).copy())
    log.append(np.stack([row.detach() for row in h]))
    return h + 1


def edited_as_array(h: Any, log: Log) -> None:
    h.detach().numpy()[0] = 7.0


def mathematics(h: Any, log: Log) -> Any:
    h = h.detach()
    log.append((math.sqrt(h.norm()), math.isnan(h.sum()), round(h.sum().item(), 3), complex(h.sum())))
    return h + 1


def copied(h: Any, log: Log) -> Any:
    return h + copy.deepcopy(h.detach()) + copy.copy(h.detach())


def stopped_in_a_debugger(h: Any, log: Log) -> Any:
    before = h * 2
    breakpoint()
    return before + 1


def own_operator(h: Any, log: Log) -> Any:
    return h + torch.ops.tests_demands.doubled(h.detach())


def in_a_thread(h: Any, log: Log) -> Any:
    thread = threading.Thread(target=lambda: log.append(h.sum().item()))
    thread.start()
    thread.join()
    return h + 1


def without_gradients(h: Any, log: Log) -> Any:
    with torch.no_grad():
        other = h * 2
        log.append(other.sum().item())
    log.append((other.requires_grad, torch.is_grad_enabled()))
    return h + other


def with_gradients(h: Any, log: Log) -> Any:
    with torch.enable_grad():
        leaf = h.detach().clone().requires_grad_()
        (leaf**3).sum().backward()
    return h + leaf.grad


def in_inference_mode(h: Any, log: Log) -> Any:
    with torch.inference_mode():
        log.append((h * 2).sum().item())
    return h * 2


def in_autocast(h: Any, log: Log) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = h @ torch.eye(4)
    log.append(other.dtype)
    return h + other.float()


def indexing_a_list(h: Any, log: Log) -> Any:
    log.append(["a", "b", "c"][h[:, 0].argmax()])
    return h + 1


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


#: What demands a value, and how often the graph is cut for it.
DEMANDS: list[tuple[Callable[[Any, Log], Any], int]] = [
    (edit_cut_edit, 2),
    (view_across_the_cut, 2),
    (copied, 2),  # the copy shows the memory of the tensor
    *(
        (need, 1)
        for need in (
            formatted, printed_between, random_numbers, random_numbers_in_the_graph,
            as_array, edited_as_array,
            mathematics, stopped_in_a_debugger, own_operator,
            in_a_thread, without_gradients, with_gradients, in_inference_mode, in_autocast,
            indexing_a_list, external_across_the_cut,         )
    ),
]  # fmt: skip


def traced(model: NNsight, need: Callable[[Any, Log], Any], compile: bool) -> tuple[dict[str, torch.Tensor], Log, Any]:
    log: Log = []
    with model.trace(X, compile=compile) as tracer:
        first = (model[0].output * 1).save()
        hidden = model[1].output
        changed = need(hidden, log)
        log.append("behind")
        if changed is not None:
            model[1].output = changed
        kept = model[1].output.save() if changed is None else changed.save()
        late = model[2].output.save()
        late += 0.5
        out = model.output.save()
    return {"first": first, "kept": kept, "late": late, "out": out}, log, tracer


def hooked(model: NNsight, need: Callable[[Any, Log], Any]) -> tuple[dict[str, torch.Tensor], Log]:
    """The same with plain hooks."""
    log: Log = []
    seen: dict[str, torch.Tensor] = {}

    def at_first(out: torch.Tensor) -> None:
        seen["first"] = out * 1

    def at_second(out: torch.Tensor) -> torch.Tensor:
        changed = need(out, log)
        log.append("behind")
        seen["kept"] = out if changed is None else changed
        return seen["kept"]

    def at_third(out: torch.Tensor) -> torch.Tensor:
        out += 0.5
        seen["late"] = out
        return out

    hooks = Hooks(model._module).output("0", at_first).output("1", at_second).output("2", at_third)
    seen["out"] = hooks(X)
    return seen, log


@pytest.fixture
def _debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger that looks at a variable of the block and changes another."""

    def look(*_: Any, **__: Any) -> None:
        variables = sys._getframe(1).f_locals
        variables["log"].append((variables["h"].tolist(), variables["before"].sum().item()))

    monkeypatch.setattr(sys, "breakpointhook", look)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(("need", "cuts"), DEMANDS, ids=lambda item: getattr(item, "__name__", ""))
@pytest.mark.usefixtures("_debugger")
def test_a_demanded_value(
    model: NNsight,
    need: Callable[[Any, Log], Any],
    cuts: int,
    grad: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger=logger.name)

    def observed(run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        counter["calls"] = 0
        caplog.clear()
        with torch.set_grad_enabled(grad), torch.random.fork_rng():
            torch.manual_seed(3)
            random.seed(3)
            values, log, *tracer = run()
            drawn = (torch.rand(1).item(), random.random())
        return values, log, capsys.readouterr().out, caplog.messages[:], drawn, tracer

    expected = observed(lambda: hooked(model, need))
    for compile in (False, True, True):
        fx.counters.reset()
        found = observed(lambda: traced(model, need, compile))  # noqa: B023
        for name, wanted in expected[0].items():
            assert type(found[0][name]) is torch.Tensor
            torch.testing.assert_close(found[0][name], wanted, rtol=0.0, atol=0.0)
            assert found[0][name].requires_grad == wanted.requires_grad, name
        assert repr(found[1:5]) == repr(expected[1:5]), "side effects, in their order"
    assert fx.counters.breaks == len(found[5][0].report.breaks) == cuts
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0, "the second run is known"
    assert not torch.equal(expected[0]["out"], model._module(X)), "the block changes something"
    assert_no_instrumentation(model._module)


class WithContext(torch.autograd.Function):
    """Like ``Doubled``, with the context set up apart, and with an argument that has a default."""

    set_up: ClassVar[list[int]] = []

    @staticmethod
    def forward(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        WithContext.set_up.append(len(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * (ctx.factor + 1), None


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("function", [Doubled, WithContext])
@pytest.mark.parametrize("held", [False, True])
def test_an_autograd_function_keeps_its_gradient(model: NNsight, function: Any, held: bool, grad: bool) -> None:
    """Without gradients the calls in its forward are recorded; with them the graph is cut around it.

    Programs often hold ``apply`` under a name of their own, and call it at one place several times.
    """
    module, apply = model._module, function.apply
    x = X.clone().requires_grad_(grad)
    expected = module[3](module[2](apply(apply(module[1](module[0](x))))))
    for compile in (False, True, True):
        WithContext.set_up.clear()
        with torch.set_grad_enabled(grad), model.trace(x, compile=compile) as tracer:
            hidden = model[1].output
            for _ in range(2):
                hidden = apply(hidden) if held else function.apply(hidden)
            model[1].output = hidden
            out = model.output.save()
        torch.testing.assert_close(out, expected.detach() if not grad else expected, rtol=0.0, atol=0.0)
        if grad:
            assert len(WithContext.set_up) == 2 * (function is WithContext)
            (found,) = torch.autograd.grad(out.sum(), x)
            (wanted,) = torch.autograd.grad(expected.sum(), x, retain_graph=True)
            torch.testing.assert_close(found, wanted)
    reason = f"`{function.__name__}` is an autograd.Function, whose gradient is its own"
    assert [cut.reason for cut in tracer.report.breaks] == [reason] * grad  # the second call has a real tensor


def test_a_compiled_function_in_a_block_becomes_part_of_the_graph(model: NNsight) -> None:
    compiled: list[int] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph_module.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    for fullgraph in (False, True):
        function = torch.compile(doubled, backend=backend, fullgraph=fullgraph)
        for compile in (True, True):
            fx.counters.reset()
            with torch.no_grad(), model.trace(X, compile=compile) as tracer:
                model[1].output = function(model[1].output)
                out = model.output.save()
            module = model._module
            torch.testing.assert_close(out, module[3](module[2](module[1](module[0](X)) * 2 + 1)), rtol=0.0, atol=0.0)
            assert not tracer.report.breaks
        assert fx.counters.recordings == 0
        assert not compiled
        assert torch.equal(function(X), X * 2 + 1) and compiled.pop(), "outside it is compiled as ever"
        torch.compiler.reset()


def test_other_threads_compile_while_a_block_is_recorded(model: NNsight) -> None:
    compiled: list[int] = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph_module.forward

    doubled = torch.compile(lambda x: x * 2, backend=backend)
    results: list[torch.Tensor] = []
    with torch.no_grad(), model.trace(X) as tracer:
        hidden = model[1].output
        thread = threading.Thread(target=lambda: results.extend([doubled(X), Doubled.apply(X)]))
        thread.start()
        thread.join()
        hidden = doubled(hidden).save()
    assert len(compiled) == 1
    assert all(torch.equal(result, X * 2) for result in results) and len(results) == 2
    assert torch.equal(hidden, model._module[:2](X) * 2)
    assert not tracer.report.breaks


def test_a_torchscript_function_gets_no_values_that_are_not_there(model: NNsight) -> None:
    """It remembers what it was called with, so it must see no fake."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(torch.nn.Linear(4, 4), X)
    module = model._module
    with torch.no_grad():
        expected = module[3](module[2](scripted(module[1](module[0](X)))))
        for _ in range(4):
            with model.trace(X) as tracer:
                model[1].output = scripted(model[1].output)
                out = model.output.save()
            torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0)
    assert [cut.reason for cut in tracer.report.breaks] == ["`forward` is TorchScript"]


# -- what a cut says ---------------------------------------------------------------------------------------------------

INSTEAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "__bool__": (lambda h: 1 if h.sum() > 0 else 2, "torch.where"),
    "item": (lambda h: h.sum().item(), "the tensor itself"),
    "__repr__": (lambda h: f"{h.detach()!r}", "show the value after the block"),
    "numpy": (lambda h: h.detach().numpy(), "torch functions"),
    "nonzero": (lambda h: h.nonzero(), "masked_fill"),
    "equal": (lambda h: torch.equal(h, h), "(a == b).all()"),
    "untyped_storage": (lambda h: h.untyped_storage(), "torch functions"),
    "unique_dim": (lambda h: torch.unique(h, dim=0), "torch.where"),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_with_fullgraph_a_cut_names_the_line_the_value_and_what_to_write_instead(strict: NNsight, name: str) -> None:
    need, advice = INSTEAD[name]
    with pytest.raises(GraphBreakError) as raised, torch.no_grad():
        with strict.trace(X):
            hidden = strict[1].output
            need(hidden)
    message = str(raised.value)
    line = int(message.removeprefix(f"{__file__}:").split(":")[0])
    assert "lambda h" in Path(__file__).read_text().splitlines()[line - 1], "the line that needs the value"
    assert "at `model.1.output`" in message and advice in message
    assert name == "unique_dim" or f"`{name}`" in message
    assert_no_instrumentation(strict._module)


def test_a_cut_in_a_library_has_the_line_that_calls_it(model: NNsight) -> None:
    with torch.no_grad(), model.trace(X) as tracer:
        hidden = model[1].output
        copy.deepcopy([hidden])  # the line
    (cut,) = tracer.report.breaks
    assert cut.filename == __file__
    assert Path(__file__).read_text().splitlines()[cut.line - 1].strip() == "copy.deepcopy([hidden])  # the line"


def test_a_cut_is_logged_once_for_its_place(caplog: pytest.LogCaptureFixture) -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4)), compile={"backend": "eager"})
    with caplog.at_level(logging.INFO, logger="nnsight.fx"):
        for _ in range(3):
            with model.trace(X) as tracer:
                hidden = model[0].output
                print(hidden.sum().item())
                hidden.max().item()
    assert sum("graph cut" in message for message in caplog.messages) == 1
    assert len(tracer.report.breaks) == 1
