"""Models that break their own graph: locations, edits and saves on both sides and in the eager code between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import NNsight, fx
from nnsight.fx.recording.execution import GraphBreakError

from ...conftest import Hooks, assert_no_instrumentation

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()  # its caches are kept by the code of the modules here, which many models share


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.b = torch.nn.Linear(4, 4)


class Disabled(Part):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Branching(Part):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x + 1 if x.sum() > 0 else x - 1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x


class Custom(Part):
    """Has an operation with a gradient of its own; no break at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Cube.apply(self.a(x)))


class Whole(torch.nn.Module):
    def __init__(self, middle: torch.nn.Module) -> None:
        super().__init__()
        self.before = torch.nn.Linear(4, 4)
        self.middle = middle
        self.after = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.middle(self.before(x)))


def traced(model: NNsight, compile: bool) -> tuple[dict[str, Any], Any]:
    """Edit and read before, inside and behind the broken part; each passes something on to the next."""
    kept: dict[str, Any] = {}
    with model.trace(X.clone(), compile=compile) as tracer:
        model.before.output[:, 0] += 1.0
        first = model.before.output.save()
        model.middle.input *= 1.5
        kept["inner"] = model.middle.a.output * first[:, :1]
        model.middle.a.output = model.middle.a.output + kept["inner"]
        middle = model.middle.output.save()
        model.middle.output = middle * 2 + first
        kept["last"] = model.after.output + middle
        kept["out"] = model.output
    return {"first": first, "middle": middle, **kept}, tracer


def hooked(module: torch.nn.Module) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def before(out: torch.Tensor) -> torch.Tensor:
        out[:, 0] += 1.0
        seen["first"] = out
        return out

    def into(args: Any, kwargs: Any) -> None:
        args[0].mul_(1.5)

    def inner(out: torch.Tensor) -> torch.Tensor:
        seen["inner"] = out * seen["first"][:, :1]
        return out + seen["inner"]

    def middle(out: torch.Tensor) -> torch.Tensor:
        seen["middle"] = out
        return out * 2 + seen["first"]

    def after(out: torch.Tensor) -> None:
        seen["last"] = out + seen["middle"]

    hooks = Hooks(module).output("before", before).input("middle", into).output("middle.a", inner)
    seen["out"] = hooks.output("middle", middle).output("after", after)(X.clone())
    return seen


#: Models, and the text of the line at which each breaks the graph.
BROKEN: list[Any] = [
    (Disabled, "return self.after(self.middle(self.before(x)))"),
    (Branching, "return self.b(x + 1 if x.sum() > 0 else x - 1)"),
    (Custom, ""),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize(("part", "line"), BROKEN, ids=lambda item: getattr(item, "__name__", ""))
def test_a_model_that_breaks_its_graph(part: Callable[[], torch.nn.Module], line: str) -> None:
    torch.manual_seed(0)
    module = Whole(part())
    model = NNsight(module, compile={"backend": "eager"})

    def run(function: Callable[[], Any]) -> tuple[Any, Any]:
        module.zero_grad()
        found = function()
        values = found[0] if isinstance(found, tuple) else found
        values["last"].pow(2).sum().backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        return found, (gradients, {name: value.detach() for name, value in values.items()})

    _, expected = run(lambda: hooked(module))
    for compile in (False, True, True):
        fx.counters.reset()
        (_, tracer), found = run(lambda: traced(model, compile))  # noqa: B023
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=0.0, atol=0.0, msg=name)
        for one, other in zip(found[0], expected[0], strict=True):
            torch.testing.assert_close(one, other)
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0, "the second run is known"
    assert tracer.report.mode == "compiled"
    lines = Path(__file__).read_text().splitlines()
    where = {lines[cut.line - 1].strip() for cut in tracer.report.breaks if cut.filename == __file__}
    assert where == ({line} if line else set())
    assert all("the model breaks the graph" in cut.reason for cut in tracer.report.breaks)
    assert (tracer.report.graphs >= 2) == bool(line)
    with torch.no_grad():
        torch.testing.assert_close(model(X), module(X))
    assert_no_instrumentation(module)


def test_a_block_that_cuts_a_graph_of_a_model_that_breaks_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nnsight.fx")
    torch.manual_seed(0)
    module = Whole(Branching())
    model = NNsight(module, compile={"backend": "eager"})
    log: list[float] = []
    with torch.no_grad():
        expected = [module.before(X).sum().item()]
        hidden = module.middle.a(module.before(X) * 2)
        expected.append(hidden.sum().item())
        expected.append((middle := module.middle(module.before(X) * 2)).sum().item())
        for compile in (False, True, True):
            log.clear()
            with model.trace(X, compile=compile) as tracer:
                value = model.before.output
                log.append(value.sum().item())
                model.before.output = value * 2
                log.append(model.middle.a.output.sum().item())
                log.append(model.middle.output.sum().item())
                out = model.output.save()
            assert log == expected
            torch.testing.assert_close(out, module.after(middle), rtol=0.0, atol=0.0)
    kinds = [cut.reason.startswith("the model") for cut in tracer.report.breaks]
    assert True in kinds and False in kinds
    assert 1 <= sum("the model breaks the graph" in message for message in caplog.messages) <= 2, "logged when it is captured"


def test_with_fullgraph_a_break_of_the_model_is_an_error_of_dynamo() -> None:
    model = NNsight(Whole(Branching()), compile={"backend": "eager", "fullgraph": True})
    with pytest.raises(torch._dynamo.exc.Unsupported, match="(?s)ata-dependent branching.*test_model_breaks"):
        with model.trace(X):
            model.output.save()
    assert not issubclass(torch._dynamo.exc.Unsupported, GraphBreakError)


# -- modes that the model switches -------------------------------------------------------------------------------------


class Switching(torch.nn.Module):
    """Runs one part without gradients, and one in autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            frozen = self.first(x)
            frozen = frozen * 2.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.second(frozen)
            low = low @ torch.eye(4)
        return self.third(low.float()) + frozen


@pytest.mark.parametrize("cuts", [False, True], ids=["one graph", "cut"])
def test_a_block_between_switches_of_modes_by_the_model(cuts: bool) -> None:
    """A block has a grad mode of its own, and computes in the model's autocast; a cut leaves both and enters them again."""
    torch.manual_seed(0)
    module = Switching()
    model = NNsight(module, compile={"backend": "aot_eager"})
    x = X.clone().requires_grad_()
    found = []
    for compile in (False, True, True):
        seen: list[Any] = []
        with model.trace(x, compile=compile) as tracer:
            first = model.first.output
            if cuts:
                seen.append(first.sum().item() > -1e9)
            added = (first * x.sum()).save()
            model.first.output = first + 1.0
            second = model.second.output
            if cuts:
                seen.append(second.sum().item() > -1e9)
            product = (second @ torch.eye(4)).save()
            model.second.output = second * 2
            out = model.output.save()
        seen += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        found.append((added, product, out, seen))
        assert len(tracer.report.breaks) == (2 * cuts if compile else 0)
    assert seen[-2:] == [True, False]
    with torch.no_grad():
        frozen = (module.first(x) + 1.0) * 2.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = module.second(frozen)
        wanted = low @ torch.eye(4)
        low = (low * 2) @ torch.eye(4)
    expected = module.third(low.float()) + frozen
    assert wanted.dtype == torch.bfloat16
    for added, product, out, seen in found:
        assert seen == found[0][-1]
        assert added.requires_grad, "the block has gradients on"
        torch.testing.assert_close(added, module.first(x).detach() * x.sum())
        assert product.dtype == wanted.dtype
        torch.testing.assert_close(product, wanted)
        torch.testing.assert_close(out, expected)
        (gradient,) = torch.autograd.grad(out.sum(), module.second.weight, retain_graph=True)
        (other,) = torch.autograd.grad(expected.sum(), module.second.weight, retain_graph=True)
        torch.testing.assert_close(gradient, other)


# -- modules that are loaded when they are called -----------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(Layer() for _ in range(3))
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return self.head(x)


def _dispatched(module: torch.nn.Module, folder: Path) -> torch.nn.Module:
    from accelerate import dispatch_model

    places = {"h.0": "cpu", "h.1": "disk", "h.2": "cpu", "head": "disk"}
    return dispatch_model(module, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def _hooked(module: torch.nn.Module, folder: Path) -> torch.nn.Module:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Halving(ModelHook):
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] + 1.0, *args[1:]), kwargs

        def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
            return output * 0.5

    add_hook_to_module(module.get_submodule("h.1"), Halving())
    return module


@pytest.mark.parametrize(("prepare", "cuts"), [pytest.param(_dispatched, True, marks=pytest.mark.slow), (_hooked, False)])
def test_gradients_of_offloaded_and_hooked_modules(
    prepare: Callable[[torch.nn.Module, Path], torch.nn.Module], cuts: bool, tmp_path: Path
) -> None:
    """Of hidden states on both sides of the breaks, of the input, and of the parameters that stay where they are."""
    pytest.importorskip("accelerate")

    modules = []
    for name in ("one", "two"):
        torch.manual_seed(0)
        modules.append(prepare(Stack(), tmp_path / name))
    by_hand, seen = modules[0], {}
    x = X.clone().requires_grad_()

    def first(out: torch.Tensor) -> torch.Tensor:
        seen["first"] = out * 2
        seen["first"].retain_grad()
        return seen["first"]

    def up(out: torch.Tensor) -> None:
        out.retain_grad()
        seen["up"] = out

    expected = Hooks(by_hand).output("h.0", first).output("h.2.up", up)(x)
    expected.pow(2).sum().backward()
    wanted = [seen["first"].grad, seen["up"].grad, x.grad, *(parameter.grad for parameter in by_hand.parameters())]
    model = NNsight(modules[1], compile={"backend": "eager"})
    for compile in (False, True, True):
        fx.counters.reset()
        model._module.zero_grad()
        x = X.clone().requires_grad_()
        with model.trace(x, compile=compile):
            hidden = model.h[0].output * 2
            if cuts:
                hidden.requires_grad_()  # has to be said where a cut comes between it and the loss
            model.h[0].output = hidden
            if cuts and model.h[1].output.sum() > -1e9:
                model.h[1].output *= 1.0
            inner = model.h[2].up.output
            out = model.output.save()
            with out.pow(2).sum().backward():
                of_inner = inner.grad.save()
                of_hidden = hidden.grad.save()
        torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0)
        found = [of_hidden, of_inner, x.grad, *(parameter.grad for parameter in model._module.parameters())]
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other)
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0


@pytest.mark.parametrize("compile", [False, True])
def test_autocast_in_a_block_is_not_for_the_layers_that_run_meanwhile(compile: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    model = NNsight(module, compile={"backend": "eager"})
    with torch.no_grad(), model.trace(X, compile=compile):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = (model[0].output @ torch.eye(4)).save()
            second = (model[1].output @ torch.eye(4)).save()
        third = (model[2].output @ torch.eye(4)).save()
        out = model.output.save()
    assert not torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        assert torch.equal(out, module(X)) and out.dtype == torch.float32
    assert (first.dtype, second.dtype, third.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
