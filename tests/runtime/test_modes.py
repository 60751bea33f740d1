"""Modes of torch that a block enters around several locations hold for the block, not for the layers that run meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight import NNsight, fx

from ..conftest import Rows, both

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Layer(torch.nn.Module):
    """Makes a tensor, whose device and gradient say in which modes it ran; perhaps breaks the graph before."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(x) + torch.zeros(4)


class CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


class CountingOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Packing(torch.autograd.graph.saved_tensors_hooks):
    """Notes the shapes of the tensors that autograd saves."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.seen.append(tuple(tensor.shape))
            return tensor

        super().__init__(pack, lambda tensor: tensor)


MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no inference": lambda: torch.inference_mode(False),
    "no grad": torch.no_grad,
    "enable grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "device": lambda: torch.device("meta"),
    "functions": CountingFunctions,
    "operators": CountingOperators,
    "saved tensors": Packing,
}

AROUND: dict[str, Callable[[], Any]] = {
    "plain": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "device": lambda: torch.device("cpu"),
}


#: Each mode in two of the surroundings.
PAIRS = [
    (entered, around)
    for number, entered in enumerate(MODES)
    for place, around in enumerate(AROUND)
    if (place - number) % len(AROUND) in (0, 2)
]


def described(value: Any) -> Any:
    return value if not isinstance(value, torch.Tensor) else (
        value.device.type, value.dtype, value.requires_grad, value.is_inference(),
        None if value.is_meta else value.detach().float().tolist(),
    )  # fmt: skip


def modes_now() -> Any:
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return (
        *map(str, keys), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_default_device(), torch.utils._device.CURRENT_DEVICE, torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(), torch._C._autograd._top_saved_tensors_default_hooks(True),
    )  # fmt: skip


def used(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute something on a value of the model, and something without."""
    return hidden, hidden @ torch.eye(4, device="cpu"), torch.ones(2) * 2.0


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "broken"])
def model(request: pytest.FixtureRequest) -> NNsight:
    torch.manual_seed(0)
    return NNsight(torch.nn.Sequential(*(Layer(request.param) for _ in range(3))), compile={"backend": "eager"})


@pytest.mark.parametrize(("entered", "around"), PAIRS)
def test_a_mode_around_two_locations(model: NNsight, entered: str, around: str) -> None:
    """The reference enters the mode in each of two plain hooks, and leaves it in them."""
    module = model._module
    expected: list[torch.Tensor] = []
    expected_seen: list[Any] = []

    def hook(_: Any, args: Any, out: torch.Tensor) -> None:
        with MODES[entered]() as mode:
            expected.extend(used(out))
        expected_seen.extend(getattr(mode, "seen", ()))

    with AROUND[around]():
        handles = [module[0].register_forward_hook(hook), module[1].register_forward_hook(hook)]
        expected.append(module(X))
        for handle in handles:
            handle.remove()

    for compile in (False, True, True):
        found: list[torch.Tensor] = []
        seen: list[Any] = []
        before = modes_now()
        with AROUND[around]():
            inside = modes_now()
            with model.trace(X, compile=compile):
                with MODES[entered]() as mode:
                    found.extend(used(model[0].output))
                    found.extend(used(model[1].output))
                seen.extend(getattr(mode, "seen", ()))
                found.append(model.output)
            assert modes_now() == inside
            assert described(model(X)) == described(expected[-1])
        assert modes_now() == before
        assert list(map(described, found)) == list(map(described, expected))
        assert seen == expected_seen


def too_long(model: NNsight, compile: bool, mode: Any) -> None:
    with model.trace(X, compile=compile) as tracer, mode:
        for _ in tracer.iter[:3]:
            model[1].output.save()


@both
@pytest.mark.parametrize("entered", MODES)
def test_an_error_inside_of_a_mode_leaves_none_behind(model: NNsight, entered: str, compile: bool) -> None:
    before = modes_now()
    with pytest.raises(ZeroDivisionError), model.trace(X, compile=compile), MODES[entered]():
        model[0].output.save()
        model[1].output.sum().item()
        1 / 0  # noqa: B018
    assert modes_now() == before
    with pytest.raises(RuntimeError), model.trace(torch.ones(2, 9), compile=compile), MODES[entered]():
        model[1].output.save()
    assert modes_now() == before
    with pytest.warns(UserWarning, match="The loop ended"):
        too_long(model, compile, MODES[entered]())
    assert modes_now() == before


@both
def test_blocks_of_one_run_have_modes_of_their_own(compile: bool) -> None:
    """They enter and leave their modes in turns, so that those do not nest."""

    model = Rows(torch.nn.Sequential(*(Layer(False) for _ in range(4))), compile={"backend": "eager"})
    kept: dict[str, torch.Tensor] = {}
    before = modes_now()
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(X):
            model[0].output.sum()
            with torch.inference_mode(), torch.device("meta"):
                kept["a1"] = model[1].output * 2
                kept["a2"] = model[2].output * 2
                kept["a"] = torch.ones(1)
            kept["a3"] = model[3].output * 2
            kept["a out"] = torch.ones(1)
        with tracer.invoke(X), torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                kept["b0"] = model[0].output @ torch.eye(4)
                kept["b1"] = model[1].output @ torch.eye(4)
            with torch.inference_mode():
                kept["b2"] = model[2].output @ torch.eye(4)
            kept["b3"] = model[3].output @ torch.eye(4)
    assert modes_now() == before
    flags = {key: (value.is_inference(), value.requires_grad, value.dtype, value.device.type) for key, value in kept.items()}
    full, half = torch.float32, torch.bfloat16
    assert flags == {
        "a1": (True, False, full, "cpu"), "a2": (True, False, full, "cpu"), "a": (True, False, full, "meta"),
        "a3": (False, True, full, "cpu"), "a out": (False, False, full, "cpu"),
        "b0": (False, False, half, "cpu"), "b1": (False, False, half, "cpu"),
        "b2": (True, False, half, "cpu"), "b3": (False, True, half, "cpu"),
    }  # fmt: skip


def test_a_function_mode_in_a_block_stays_in_the_graph() -> None:
    model = NNsight(torch.nn.Sequential(*(Layer(False) for _ in range(3))), compile={"backend": "eager", "fullgraph": True})
    for _ in range(2):
        fx.counters.reset()
        mode = CountingFunctions()
        with model.trace(X), mode, torch.device("cpu"):
            model[0].output += 1.0
            out = (model[1].output * torch.ones(4)).save()
        assert {"ones", "mul"} <= set(mode.seen) and out.shape == (2, 4)
    assert fx.counters.recordings == fx.counters.compiles == 0


class Force(torch.nn.Module):
    """Enables gradients for an inner derivative, or disables them for a frozen part, as models of energies and of images do."""

    def __init__(self, enables: bool) -> None:
        super().__init__()
        self.first, self.energy, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.enables = enables

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.enables):
            inner = self.first(x).detach().requires_grad_(self.enables)
            energy = self.energy(inner).square().sum()
            force = torch.autograd.grad(energy, inner)[0] if self.enables else energy * inner
        return self.last(force)


@pytest.mark.parametrize("enables", [True, False])
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("compile", [False, {"backend": "eager"}, {"backend": "aot_eager"}], ids=["eager", "captured", "aot_eager"])
def test_a_block_has_gradients_where_the_model_enables_them(enables: bool, around: bool, compile: Any) -> None:
    net, vector = Force(enables), torch.ones(4, requires_grad=True)
    model = NNsight(net, compile=compile)
    seen: list[tuple[bool, bool]] = []

    def edit(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), (output * vector).requires_grad))
        return output * vector * 3

    with torch.set_grad_enabled(around):
        hook = net.energy.register_forward_hook(edit)
        expected = net(X)
        hook.remove()
        with model.trace(X) as tracer:
            scaled = model.energy.output * vector
            mode = torch.is_grad_enabled()
            flags = (mode, scaled.requires_grad).save()
            model.energy.output = scaled * 3
            out = model.output.save()
        torch.testing.assert_close(out, expected)
        assert tracer.report.mode == ("compiled" if compile else "eager") and bool(tracer.report.graphs) == bool(compile)
        expected_mode = enables or around  # that of the hook, but for a part of the model without gradients
        assert flags == (expected_mode, expected_mode) and seen[0] == (enables, enables)
        with model.trace(X):
            model.energy.output[:] *= 3
            out = model.output.save()
        torch.testing.assert_close(out, expected)


@both
def test_a_block_has_the_grad_mode_in_which_a_function_calls_the_model(compile: bool) -> None:
    """As in ``generate``, which calls the model under ``torch.no_grad()``."""

    class View(torch.nn.Module):
        """Returns a view, as the projections of GPT-2 do. Autograd refuses to edit it if it was made without gradients."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).view(-1, 4)

    class Net(torch.nn.Sequential):
        @torch.no_grad()
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self(self(x))

    net, vector = Net(Layer(False), View(), Layer(False)), torch.ones(4, requires_grad=True)
    model = NNsight(net, compile={"backend": "eager"})
    kept: dict[str, torch.Tensor] = {}
    with model.twice(X, compile=compile) as tracer:
        kept["before"] = X * vector
        kept["first"] = model[0].output * vector
        model[1].output += vector
        with torch.enable_grad():
            kept["inside"] = model[1].output * vector
        kept["after"] = model[2].output * vector
        for _ in tracer.iter[1:2]:
            kept["second"] = model[0].output * vector
    assert {key: value.requires_grad for key, value in kept.items()} == {
        "before": True, "first": False, "inside": True, "after": False, "second": False,
    }  # fmt: skip


@both
def test_a_block_of_a_backward_pass_has_gradients_enabled(compile: bool) -> None:
    """Autograd disables them in its hooks."""
    model = NNsight(torch.nn.Sequential(Layer(False), Layer(False)), compile={"backend": "eager"})
    scale = torch.ones(4, requires_grad=True)
    with model.trace(X, compile=compile):
        hidden = model[0].output
        with model.output.sum().backward():
            scaled = (hidden.grad * scale).save()
    scaled.sum().backward()
    assert scale.grad is not None
