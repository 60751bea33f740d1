"""The main proof: random models and random blocks, run by plain torch hooks, by the eager driver and compiled.

A *plan* is a list of actions at locations in the order in which the model passes them. An action is a plain function
of a tensor; torch hooks apply it in the reference, and a block applies it in a trace. Values, side effects and
what is shared between tensors must agree: bit by bit with the eager lowering, closely with ``aot_eager``.

``NNSIGHT_FUZZ_EXAMPLES`` sets the number of examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nnsight import NNsight, fx

from .conftest import assert_no_instrumentation

WIDTH = 4
EXAMPLES = int(os.environ.get("NNSIGHT_FUZZ_EXAMPLES", "60"))

# -- random models ----------------------------------------------------------------------------------------------------


class Residual(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Pair(torch.nn.Module):
    """Returns a tuple."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.inner(x), x * 0.5, None


class Unpair(torch.nn.Module):
    """Uses both parts of a tuple, the second by keyword."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.pair = Pair(inner)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, _ = self.pair(x)
        return self.scale(first, by=second)


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x * by + x


class Twice(torch.nn.Module):
    """Calls one module two times."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


class InPlace(torch.nn.Module):
    """Changes its own intermediate result."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * 1.0
        y[:, 0] += 1.0
        return y


Spec = Any  # ("linear",) or (kind, child) or ("sequence", [children])

leaves = st.sampled_from([("linear",), ("linear",), ("tanh",), ("norm",), ("identity",), ("dropout",)])
specs = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.tuples(st.sampled_from(["residual", "unpair", "twice", "inplace"]), children),
        st.tuples(st.just("sequence"), st.lists(children, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def build(spec: Spec) -> torch.nn.Module:
    kind = spec[0]
    if kind == "sequence":
        return torch.nn.Sequential(*(build(child) for child in spec[1]))
    if len(spec) == 2:
        return {"residual": Residual, "unpair": Unpair, "twice": Twice, "inplace": InPlace}[kind](build(spec[1]))
    return {
        "linear": lambda: torch.nn.Linear(WIDTH, WIDTH),
        "tanh": torch.nn.Tanh,
        "norm": lambda: torch.nn.LayerNorm(WIDTH),
        "identity": torch.nn.Identity,
        "dropout": lambda: torch.nn.Dropout(0.5),
    }[kind]()


# -- random blocks ----------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What a block can reach: tensors from outside, and what it has kept so far."""

    vector: torch.Tensor
    matrix: torch.Tensor
    total: torch.Tensor
    probe: torch.nn.Module
    memory: list[torch.Tensor] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)

    @staticmethod
    def make(seed: int) -> World:
        torch.manual_seed(seed)
        return World(torch.randn(WIDTH), torch.randn(WIDTH, WIDTH), torch.zeros(WIDTH), torch.nn.Linear(WIDTH, WIDTH))


Action = Callable[[torch.Tensor, World, float], torch.Tensor | None]


def remember(h: torch.Tensor, world: World, number: float) -> None:
    world.memory.append(h)


def remember_copy(h: torch.Tensor, world: World, number: float) -> None:
    world.memory.append(h.clone())


def remember_view(h: torch.Tensor, world: World, number: float) -> None:
    world.memory.append(h[:, :])


def scale(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    return h * number


def add_vector(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    return h + number * world.vector


def add_memory(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    return h + world.memory[-1] if world.memory else h - 1.0


def use_memory_itself(h: torch.Tensor, world: World, number: float) -> torch.Tensor | None:
    return world.memory[0] if world.memory else None


def project(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    unit = world.vector / world.vector.norm()
    return h - (h @ unit)[:, None] * unit


def multiply_matrix(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    return torch.nn.functional.softmax(h @ world.matrix, dim=-1)


def choose(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    return torch.where(h > 0, h, world.vector * number)


def swap_halves(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    left, right = h.chunk(2, dim=-1)
    return torch.cat([right, left], dim=-1)


def top_only(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    values, indices = h.topk(2, dim=-1)
    return torch.zeros_like(h).scatter(-1, indices, values)


def call_probe(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    return world.probe(h)


def set_slice(h: torch.Tensor, world: World, number: float) -> None:
    h[:, 1:3] = number


def set_masked(h: torch.Tensor, world: World, number: float) -> None:
    h[h > 0.5] = number


def add_row(h: torch.Tensor, world: World, number: float) -> None:
    h[0] += world.vector


def multiply_in_place(h: torch.Tensor, world: World, number: float) -> None:
    h.mul_(number).clamp_(-5, 5)


def edit_through_view(h: torch.Tensor, world: World, number: float) -> None:
    h[1:].T[0] += number


def edit_memory(h: torch.Tensor, world: World, number: float) -> None:
    if world.memory:
        world.memory[-1].add_(number)


def accumulate(h: torch.Tensor, world: World, number: float) -> None:
    world.total += h.detach().mean(0)


def use_total(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    return h + world.total


def edit_vector(h: torch.Tensor, world: World, number: float) -> None:
    world.vector *= number


def note_shape(h: torch.Tensor, world: World, number: float) -> None:
    world.log.append((tuple(h.shape), h.dtype, h.requires_grad))


def note_sum(h: torch.Tensor, world: World, number: float) -> None:
    world.log.append(h.detach().sum().item())


def branch(h: torch.Tensor, world: World, number: float) -> torch.Tensor:
    if h.sum() > number:
        world.log.append("more")
        return h + 1.0
    world.log.append("less")
    return h - 1.0


ACTIONS: list[Action] = [
    remember, remember_copy, remember_view, scale, add_vector, add_memory, use_memory_itself, project, multiply_matrix,
    choose, swap_halves, top_only, call_probe, set_slice, set_masked, add_row, multiply_in_place, edit_through_view,
    edit_memory, accumulate, use_total, edit_vector, note_shape,
]  # fmt: skip
CUTTING: list[Action] = [note_sum, branch]

steps = st.lists(
    st.tuples(
        st.integers(0, 10_000),
        st.lists(st.sampled_from([*ACTIONS, *CUTTING]), min_size=1, max_size=3),
        st.sampled_from([0.5, 2.0, -1.5]),
    ),
    min_size=1,
    max_size=5,
)

Plan = list[tuple[str, str, list[Action], float]]


def locations_of(module: torch.nn.Module, x: torch.Tensor) -> list[tuple[str, str]]:
    """Locations in the order in which a forward pass meets them for the first time."""
    seen: list[tuple[str, str]] = []
    handles = []
    for path, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, path=path: seen.append((path, "input"))))
        handles.append(child.register_forward_hook(lambda *_, path=path: seen.append((path, "output"))))
    with torch.no_grad():
        module(x)
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(seen))


def make_plan(module: torch.nn.Module, x: torch.Tensor, drawn: Any) -> Plan:
    locations = locations_of(module, x)
    chosen = {number % len(locations): (actions, scale) for number, actions, scale in drawn}
    return [(*locations[index], *chosen[index]) for index in sorted(chosen)]


def apply(value: Any, actions: list[Action], world: World, number: float) -> Any:
    """Apply actions to a value; return it, or its replacement."""
    for action in actions:
        first = value[0] if isinstance(value, tuple) else value
        changed = action(first, world, number)
        if changed is not None:
            value = (changed, *value[1:]) if isinstance(value, tuple) else changed
    return value


def by_hooks(module: torch.nn.Module, plan: Plan, world: World, x: torch.Tensor) -> torch.Tensor:
    handles = []
    done: set[int] = set()

    def hook(number: int, actions: list[Action], scale: float, value: Any) -> Any:
        if number in done:  # a later call of the same module
            return value
        done.add(number)
        return apply(value, actions, world, scale)

    for number, (path, kind, actions, scale) in enumerate(plan):
        child = module.get_submodule(path)
        if kind == "output":
            handles.append(
                child.register_forward_hook(lambda _, __, out, n=number, a=actions, s=scale: hook(n, a, s, out))
            )
        else:
            handles.append(
                child.register_forward_pre_hook(
                    lambda _, args, n=number, a=actions, s=scale: (hook(n, a, s, args[0]), *args[1:])
                )
            )
    try:
        return module(x)
    finally:
        for handle in handles:
            handle.remove()


def by_trace(model: NNsight, plan: Plan, world: World, x: torch.Tensor, compile: bool) -> tuple[torch.Tensor, Any]:
    with model.trace(x, compile=compile) as tracer:
        for path, kind, actions, number in plan:
            envoy = model.get(path) if path else model
            if kind == "output":
                value = envoy.output
                changed = apply(value, actions, world, number)
                if changed is not value:
                    envoy.output = changed
            else:
                value = envoy.input
                changed = apply(value, actions, world, number)
                if changed is not value:
                    envoy.input = changed
        result = tracer.result.save()
    return result, tracer.report


def state(world: World, x: torch.Tensor, out: torch.Tensor) -> list[Any]:
    """Everything that one can see after a run."""
    return [out, x, world.vector, world.total, *world.memory, world.log]


def compare(found: list[Any], expected: list[Any], exact: bool) -> None:
    assert len(found) == len(expected)
    for mine, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            assert type(mine) is torch.Tensor
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(mine, wanted, equal_nan=True, **tolerance)
            assert mine.requires_grad == wanted.requires_grad
        else:
            assert type(mine) is type(wanted) and len(mine) == len(wanted)
            for one, other in zip(mine, wanted, strict=True):
                assert type(one) is type(other)
                same = one == other or (isinstance(one, float) and not exact and one == pytest.approx(other, rel=1e-4))
                assert same or (one != one and other != other), (one, other)  # both are not a number


def agree(spec: Spec, drawn: Any, grad: bool, seed: int, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    module = torch.nn.Sequential(build(spec)).eval()
    x = torch.randn(3, WIDTH)
    plan = make_plan(module, x, drawn)
    exact = backend == "eager"

    def run(how: str) -> tuple[list[Any], Any, BaseException | None]:
        world, mine = World.make(seed), x.clone()
        try:
            with torch.set_grad_enabled(grad):
                if how == "hooks":
                    return state(world, mine, by_hooks(module, plan, world, mine)), None, None
                out, report = by_trace(model, plan, world, mine, how == "compiled")
                return state(world, mine, out), report, None
        except Exception as error:  # the same mistake must be a mistake everywhere
            return [], None, error

    model = NNsight(module, compile={"backend": backend})
    expected, _, error = run("hooks")
    event("the reference raises" if error is not None else "the reference runs")
    for how in ("eager", "compiled", "compiled"):
        fx.counters.reset()
        found, report, raised = run(how)
        if error is None and raised is not None:
            raise raised
        assert type(raised) is type(error), (how, raised, error)
        if error is None:
            compare(found, expected, exact or how == "eager")
    if error is None:
        assert report.graphs == 1
        cutting = any(action in CUTTING for _, _, actions, _ in plan for action in actions)
        assert cutting or not report.breaks, report
        assert fx.counters.recordings == fx.counters.compiles == fx.counters.captures == 0, "the block was known"
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x.clone()), module(x.clone()), rtol=1e-4, atol=1e-5)
    assert_no_instrumentation(module)


fuzz = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@fuzz
@given(spec=specs, drawn=steps, grad=st.booleans(), seed=st.integers(0, 3))
def test_eager_lowering_agrees_bit_by_bit(spec: Spec, drawn: Any, grad: bool, seed: int) -> None:
    agree(spec, drawn, grad, seed, "eager")


@settings(fuzz, max_examples=max(1, EXAMPLES // 4))
@given(spec=specs, drawn=steps, grad=st.booleans(), seed=st.integers(0, 3))
def test_aot_lowering_agrees_closely(spec: Spec, drawn: Any, grad: bool, seed: int) -> None:
    agree(spec, drawn, grad, seed, "aot_eager")


@pytest.mark.slow
@settings(fuzz, max_examples=max(1, EXAMPLES // 20))
@given(spec=specs, drawn=steps, seed=st.integers(0, 3))
def test_inductor_agrees_closely(spec: Spec, drawn: Any, seed: int) -> None:
    agree(spec, drawn, False, seed, "inductor")
