"""A block is recorded once: what is sent after that has the values of now, and is never what a recording would not have been."""

from __future__ import annotations

import gc
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnsight import NNsight
from nnsight.remote.counts import counts

from ..conftest import same

FACTOR = 2.0
ACTIVATION: Callable[[torch.Tensor], torch.Tensor] = torch.relu


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.wide = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.linear(x))
        return (h, h.sum(-1)) if self.wide else (h,)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.head = torch.nn.Linear(4, 4)
        self.register_buffer("offset", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x) + self.offset


@pytest.fixture
def model() -> Any:
    torch.manual_seed(3)
    return NNsight(Net().eval())


def x(seed: int = 0, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


class Env(types.SimpleNamespace):
    """What a block reads from outside."""


# -- blocks; each returns what it saves ------------------------------------------------------------------------------


def steering(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        model.layers[1].output[0][:, -1] += 3.0 * env.a[0, 0] * env.b[0, -1]
        model.layers[1].output[0][:] += env.factor * env.a
        out = model.output.save()
    return out


def replacing(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        model.layers[0].output = (env.a + env.b,)
        out = model.output.save()
    return out


def conditions(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        hidden = model.layers[env.layer].output[0]
        if env.factor > 1:
            model.layers[2].output[0][:] = hidden * env.factor
        else:
            model.layers[2].output[0][:] -= hidden
        out = model.output.save()
    return out


def lists(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        found = [layer.output[0].clone() for layer in model.layers]
        found.append(env.a * 2)
        kept = {"all": found, "factor": env.factor, "rows": found[0].shape[0]}.save()
    return kept


def filling(model: Any, env: Any, **where: Any) -> Any:
    kept = list(env.earlier)
    with model.trace(env.x, **where):
        kept.append(model.layers[0].output[0] * env.factor)
        kept.append(env.b + 1)
        out = model.output.save()
    return kept, out


def changing_outside(model: Any, env: Any, **where: Any) -> Any:
    mine = env.a.clone()
    with model.trace(env.x, **where):
        model.layers[0].output[0][:] += mine
        mine.mul_(2.0)
        model.layers[1].output[0][:] += mine
        mine += env.b
        out = model.output.save()
    return out, mine


def drawing(model: Any, env: Any, **where: Any) -> Any:
    torch.manual_seed(env.seed)
    with model.trace(env.x, **where):
        model.layers[0].output[0][:] += torch.randn_like(env.a)
        out = model.output.save()
    return out, torch.rand(2)


def globals_(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        model.layers[1].output[0][:] = ACTIVATION(model.layers[1].output[0]) * FACTOR
        out = model.output.save()
    return out


def indexing(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        out = model.layers[0].output[0][:, [0, 2]] + model.output[:, env.columns]
        one = model.output[:, env.column].save()
        out = out.save()
    return out, one


def masks(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        chosen = env.mask.nonzero()[:, 0]
        out = (model.output * chosen.shape[0]).save()
        there = model.output[:, chosen].save()
    return out, there


def values(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        if env.a.sum() > 0:
            model.layers[1].output[0][:] *= 2.0
        model.layers[2].output[0][:] *= float(env.b.sum())
        out = model.output.save()
    return out


def closure(model: Any, env: Any, **where: Any) -> Any:
    scaled = (lambda factor: lambda tensor: tensor * factor)(env.factor)
    with model.trace(env.x, **where):
        model.layers[1].output[0][:] = scaled(model.layers[1].output[0])
        out = model.output.save()
    return out


def weights(model: Any, env: Any, **where: Any) -> Any:
    table = env.table
    with model.trace(env.x, **where):
        out = (model.output + table).save()
    return out


def sized(model: Any, env: Any, **where: Any) -> Any:
    with model.trace(env.x, **where):
        rows = model.layers[0].output[0].shape[0]
        out = (model.output[rows // 2] * rows).save()
    return out


BLOCKS = {
    block.__name__: block
    for block in (
        steering, replacing, conditions, lists, filling, changing_outside, drawing, globals_, indexing, masks, values, closure, weights,
        sized,
    )
}  # fmt: skip

#: Those that are recorded once if nothing but values of tensors changes.
ONCE = "steering replacing lists filling changing_outside drawing globals_ indexing conditions sized".split()


def environment(model: Any, **changes: Any) -> Any:
    seed = changes.pop("values", 0)
    found = Env(
        x=x(seed), a=x(seed + 1), b=x(seed + 2), factor=2.0, layer=0, seed=seed, earlier=[], column=1,
        columns=torch.tensor([1, 3]), mask=torch.tensor([True, False, True, False]), table=x(seed + 3)[0],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def compared(block: Callable[..., Any], model: Any, make: Callable[[], Any]) -> int:
    """Run a block here and as data, compare what comes of it, and return how often it was recorded."""
    here, there = make(), make()
    expected = block(model, here)
    before = counts["recordings"]
    found = block(model, there, remote="local")
    same(found, expected)
    for name, value in vars(here).items():
        if isinstance(value, torch.Tensor):
            same(getattr(there, name), value)
    return counts["recordings"] - before


@pytest.mark.parametrize("name", ONCE)
def test_a_block_is_recorded_once_and_sent_with_the_values_of_now(model: Any, name: str) -> None:
    recordings = [compared(BLOCKS[name], model, lambda seed=seed: environment(model, values=seed)) for seed in range(4)]
    assert recordings == [1, 0, 0, 0]


CHANGES: list[dict[str, Any]] = [
    {"factor": 3.0}, {"factor": 2}, {"factor": 0.5}, {"factor": -0.0}, {"factor": True}, {"layer": 1}, {"column": 2},
    {"x": x(5, 3), "a": x(6, 3), "b": x(7, 3)},
    {"x": x(5).double().float(), "a": x(6).t().contiguous().t()},
    {"earlier": [torch.ones(2), 1.5]},
    {"columns": torch.tensor([0, 2])}, {"columns": [0, 3]}, {"columns": torch.tensor([0, 1, 2])[:2]},
    {"column": torch.tensor(3)}, {"mask": torch.tensor([True, True, True, False])}, {"values": 9}, {"values": 10},
    {"seed": 4},
]  # fmt: skip


@pytest.mark.parametrize("name", list(BLOCKS))
def test_what_else_changes_is_never_missed(model: Any, name: str) -> None:
    for change in [{}, {}, *CHANGES, {}, *reversed(CHANGES)]:
        if name == "indexing" and ("x" in change) and change["x"].shape[0] == 3:
            continue
        compared(BLOCKS[name], model, lambda change=change: environment(model, **dict(change)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    name=st.sampled_from(list(BLOCKS)),
    rounds=st.lists(
        st.fixed_dictionaries(
            {
                "values": st.integers(0, 3),
                "factor": st.sampled_from([0.5, 2.0, 2, True]),
                "layer": st.sampled_from([0, 1, -2]),
                "column": st.sampled_from([0, 1, -1]),
            }
        ),
        min_size=2,
        max_size=6,
    ),
    aliased=st.booleans(),
)
def test_any_sequence_of_environments(name: str, rounds: list[dict[str, Any]], aliased: bool) -> None:
    torch.manual_seed(3)
    model = NNsight(Net().eval())
    for number, changes in enumerate(rounds):

        def make(changes: dict[str, Any] = changes, number: int = number) -> Any:
            made = environment(model, **changes)
            if aliased and number % 2:
                made.b = made.a
            return made

        compared(BLOCKS[name], model, make)


# -- what decides --------------------------------------------------------------------------------------------------------


def test_tensors_that_become_one_are_told_apart_again(model: Any) -> None:
    one = x(1)

    def pair(second: Callable[[torch.Tensor], torch.Tensor]) -> int:
        def make() -> Any:
            first = one.clone()
            return environment(model, a=first, b=second(first))

        return compared(replacing, model, make)

    def edited(second: Callable[[torch.Tensor], torch.Tensor]) -> None:
        def make() -> Any:
            first = one.clone()
            return environment(model, a=first, b=second(first))

        compared(changing_outside, model, make)

    seconds: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda first: first,
        lambda first: first.clone() + 1,
        lambda first: first.view_as(first),
        lambda first: first,
    ]
    assert [pair(second) for second in seconds] == [1, 1, 1, 1]  # one way of sharing is remembered
    assert pair(seconds[0]) == 0
    for second in (*seconds, *seconds):
        edited(second)


def test_the_input_itself_and_weights_as_outside_tensors(model: Any) -> None:
    shared = x(8)

    def run(**where: Any) -> Any:
        with model.trace(shared, **where):
            model.layers[0].output[0][:] += shared
            out = model.output.save()
        return out

    for _ in range(3):
        shared += 1.0
        same(run(remote="local"), run())
    for table in (x(1)[0], x(2)[0], model._module.offset, x(3)[0], model._module.head.bias.detach()):
        compared(weights, model, lambda table=table: environment(model, table=table))


def test_globals_that_change_are_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for factor, activation in (
        (2.0, torch.relu),
        (3.0, torch.relu),
        (3.0, torch.sigmoid),
        (3, torch.sigmoid),
        (2.0, torch.relu),
    ):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        monkeypatch.setitem(globals(), "ACTIVATION", activation)
        compared(globals_, model, lambda: environment(model))


def test_a_function_of_ones_own_runs_each_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return tensor * len(calls)

    monkeypatch.setitem(globals(), "ACTIVATION", mine)
    plain = model._module(x())
    for count in range(1, 4):
        with model.trace(x(), remote="local"):
            out = ACTIVATION(model.output).save()
        same(out, plain * count)


def test_a_model_that_changes_is_recorded_anew(model: Any) -> None:
    def run(**where: Any) -> Any:
        with model.trace(x(), **where):
            parts = len(model.layers[0].output)
            out = (model.output * parts).save()
        return out

    def check() -> int:
        before = counts["recordings"]
        same(run(remote="local"), run())
        return counts["recordings"] - before

    assert [check(), check()] == [1, 0]
    model._module.layers[0].wide = True
    assert [check(), check()] == [1, 0]
    model._module.layers[1] = Layer()
    assert [check(), check()] == [1, 0]
    model._module.head = torch.nn.Linear(4, 1)
    assert [check(), check()] == [1, 0]
    forward = model._module.layers[2].forward
    model._module.layers[2].forward = lambda x: (*forward(x), x)
    assert [check(), check()] == [1, 0]
    model._module.layers[0].wide = False
    assert check() == 1


def test_edits_and_invokes_are_recorded_each_time(model: Any) -> None:
    with model.edit() as edited:
        model.layers[0].output[0][:] = 0
    for _ in range(3):
        with edited.trace(x(), remote="local"):
            out = edited.output.save()
        with edited.trace(x()):
            expected = edited.output.save()
        same(out, expected)
    before = counts["recordings"]
    for seed in range(3):
        with model.trace(remote="local") as tracer:
            with tracer.invoke(x(seed)):
                out = model.output.save()
        same(out, model._module(x(seed)))
    assert counts["recordings"] - before == 3


def test_errors_of_outside_calls_are_raised(model: Any) -> None:
    def run(matrix: torch.Tensor) -> Any:
        with model.trace(x(), remote="local"):
            out = (model.output @ torch.linalg.inv(matrix)).save()
        return out

    for _ in range(3):
        same(run(2 * torch.eye(4)), model._module(x()) @ torch.linalg.inv(2 * torch.eye(4)))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        run(torch.zeros(4, 4))


def test_settings_of_torch_are_seen(model: Any) -> None:
    batch = x()

    def run(**where: Any) -> Any:
        with model.trace(batch, **where):
            out = (model.output + torch.ones(4)).save()
        return out

    same(run(remote="local"), run())
    torch.set_default_dtype(torch.float64)
    try:
        found, expected = run(remote="local"), run()
    finally:
        torch.set_default_dtype(torch.float32)
    same(found, expected)
    assert found.dtype == torch.float64


def test_saved_containers_are_new_each_time(model: Any) -> None:
    first, second = (lists(model, environment(model, values=1), remote="local") for _ in range(2))
    assert first is not second and first["all"] is not second["all"]
    same(first, second)


def test_nothing_keeps_the_model_alive() -> None:
    model = NNsight(Net().eval())
    for _ in range(2):
        steering(model, environment(model), remote="local")
    reference = weakref.ref(model._module)
    held = model._module.layers[0]
    del model
    gc.collect()
    assert reference() is None
    assert math.isfinite(held.linear.weight.sum().item())
