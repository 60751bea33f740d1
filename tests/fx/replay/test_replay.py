"""Replay: the effects of a block come without running it, if and only if they are those of a run."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, fx
from nnsight.envoy.envoy import Envoy
from nnsight.fx.replay.replay import Replays
from nnsight.runtime.errors import OutOfOrderError
from nnsight.runtime.modules.eproperty import eproperty
from nnsight.tracing import Backend

from ...conftest import Hooks, same

ACTIVATION = torch.relu
FACTOR = 2.0


class Layer(torch.nn.Module):
    """Returns a tuple, and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x) * scale
        return h, h.mean(-1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, scale=0.5)[0])
        return self.head(x)


class Env(types.SimpleNamespace):
    """What a block reads from outside."""


@pytest.fixture(scope="module")
def tuples() -> Any:
    return NNsight(Net().eval(), compile={"backend": "eager"})


@pytest.fixture
def model(tuples: Any) -> Any:
    """A captured model that has seen no block; a test must leave its modules as they are."""
    tuples._compiled.replays = Replays()
    return tuples


@pytest.fixture
def fresh() -> Any:
    """A model of its own."""
    return NNsight(Net().eval(), compile={"backend": "eager"})


def x(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4, dtype=torch.float32).view(rows, 4)


# -- blocks, and what changes between their runs ---------------------------------------------------------------------------
#
# A block is a function of the model, its environment and whether to compile; it returns what it saved and the tracer.


def steer(model: Any, env: Env, compile: bool) -> Any:
    vector, factor = env.vector, env.factor
    with model.trace(env.x, compile=compile) as tracer:
        h = model.layers[1].output[0]
        h[:, -1] += 4.0 * vector[0]
        h += factor * vector
        out = model.output.save()
    return out, tracer


def attributes(model: Any, env: Env, compile: bool) -> Any:
    with model.trace(env.x, compile=compile) as tracer:
        model.layers[0].output[0][:] += env.vector
        if env.flag:
            model.layers[2].output[0][:] = 0
        out = model.output.save()
        shape = out.shape.save()
    return (out, shape), tracer


def loops(model: Any, env: Env, compile: bool) -> Any:
    vectors, places = env.vectors, env.places
    with model.trace(env.x, compile=compile) as tracer:
        kept = [].save()
        named = {}.save()
        for i, layer in enumerate(model.layers):
            h = layer.output[0]
            if i in places:
                h += vectors[i % len(vectors)]
            kept.append(h)
            named[f"mean {i}"] = layer.output[1] * 2
        count = len(kept).save()
    return (kept, named, count), tracer


def fills(model: Any, env: Env, compile: bool) -> Any:
    kept, other, vector, layers = env.kept, env.other, env.vector, [model.layers[index] for index in env.order]
    with model.trace(env.x, compile=compile) as tracer:
        for layer in layers:
            h = layer.output[0]
            h[:] += vector
            kept.append(h)
            other.append((layer.output[1] * 2, len("two"), vector.sum()))
            env.more.append({"h": h})
        kept.append(vector)
        first = layers[-1].output[1].save()
        out = model.output.save()
    return (first, out, other is kept, len(kept), [kept[-2] is more["h"] for more in env.more]), tracer


def functions(model: Any, env: Env, compile: bool) -> Any:
    act = env.act
    with model.trace(env.x, compile=compile) as tracer:
        first = act(model.layers[0].output[0]).save()
        model.layers[1].output = (torch.nn.functional.gelu(model.layers[1].output[0]), model.layers[1].output[1])
        both = [each.sum() for each in model.layers[2].output].save()
    return (first, both), tracer


def global_names(model: Any, env: Env, compile: bool) -> Any:
    with model.trace(env.x, compile=compile) as tracer:
        model.layers[0].output[0][:] = ACTIVATION(model.layers[0].output[0]) * FACTOR
        out = model.output.save()
    return out, tracer


def edits_outside(model: Any, env: Env, compile: bool) -> Any:
    memory, other = env.memory, env.other
    with model.trace(env.x, compile=compile) as tracer:
        memory += 1
        h = model.layers[0].output[0]
        h *= other
        out = model.head.output.save()
        memory[:] = memory + out.sum()
    return (out, memory.clone(), other.clone()), tracer


def skips(model: Any, env: Env, compile: bool) -> Any:
    with model.trace(env.x, compile=compile) as tracer:
        h = model.layers[1].input
        model.layers[1].skip((h, h.mean(-1)))
        given = model.head.inputs.save()
        out = model.output.save()
    return (given[0], out), tracer


def saved_from_outside(model: Any, env: Env, compile: bool) -> Any:
    vector = env.vector
    with model.trace(env.x, compile=compile) as tracer:
        doubled = (vector * 2).save()
        same_object = vector
        same_object.save()
        h = (model.head.output + 1, {"half": model.head.output / 2, "n": 3}).save()
    assert same_object is vector
    return (doubled, h), tracer


VECTOR = torch.tensor([0.5, -1.0, 2.0, 0.25])

REPLAYED: dict[str, tuple[Callable[..., Any], dict[str, Any], list[dict[str, Any]]]] = {
    "values of tensors": (steer, {"vector": VECTOR, "factor": 1.5}, [{"vector": VECTOR + k} for k in range(3)]),
    "metadata of tensors": (
        steer,
        {"vector": VECTOR, "factor": 1.5},
        [{"vector": VECTOR.double()}, {"vector": VECTOR.repeat(2)[::2]}, {"vector": VECTOR}],
    ),
    "numbers": (steer, {"vector": VECTOR, "factor": 1.5}, [{"factor": 2.5}, {"factor": 2}, {"factor": True}, {"factor": 1.5}]),
    "sizes": (steer, {"vector": VECTOR, "factor": 1.5}, [{"x": x(5)}, {"x": x(7)}, {"x": x(5)}, {"x": x(7)}, {"x": x(1)}]),
    "attributes": (
        attributes,
        {"vector": VECTOR, "flag": False},
        [{"vector": VECTOR * 2}, {"flag": True}, {"vector": VECTOR * 3}, {"flag": 0}, {"x": x(2)}, {"x": x(6)}],
    ),
    "items": (
        loops,
        {"vectors": [VECTOR, VECTOR * 2], "places": (0, 2)},
        [{"vectors": [VECTOR]}, {"places": (1,)}, {"vectors": [VECTOR, -VECTOR]}, {"places": [0]}, {"places": {0: 1}}],
    ),
    "functions": (functions, {"act": torch.relu}, [{"act": torch.sigmoid}, {"act": torch.relu}, {"act": torch.tanh}]),
    "globals": (global_names, {}, [{}, {"x": x(3) * 2}]),
    "tensors edited outside": (
        edits_outside,
        {"memory": torch.zeros(3, 2), "other": VECTOR},
        [{"other": VECTOR * 2}, {"memory": torch.ones(3, 2)}, {}],
    ),
    "fills": (
        fills,
        {"kept": [1], "other": [], "more": [], "vector": VECTOR, "order": (0, 2)},
        [{"kept": [], "vector": VECTOR - 2}, {"order": (0, 1, 2)}, {"order": (1, 2)}, {"other": (both := []), "kept": both}],
    ),
    "skips": (skips, {}, [{"x": x(3) + 1}, {"x": x(4)}]),
    "saved from outside": (saved_from_outside, {"vector": VECTOR}, [{"vector": VECTOR - 3}, {}]),
}


def effects(block: Callable[..., Any], model: Any, env: dict[str, Any], compile: bool) -> Any:
    """Return what a run saves, and what it leaves behind in its environment."""
    mine = Env(**{"x": x(), **copy.deepcopy(env)})
    saved, tracer = block(model, mine, compile)
    return saved, {name: value for name, value in vars(mine).items() if name != "probe"}, tracer


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_is_what_a_run_would_have_been(model: Any, name: str) -> None:
    block, env, changes = REPLAYED[name]
    torch.manual_seed(0)
    rounds = [env, env, env]
    for change in changes:
        env = {**env, **change}
        rounds += [env, env]
    for round_env in rounds:
        saved, left, tracer = effects(block, model, round_env, True)
        expected, expected_left, _ = effects(block, model, round_env, False)
        same(saved, expected)
        same(left, expected_left)
        assert tracer.report.mode == "compiled"
    assert fx.counters.replays > 0


def test_a_replay_makes_nothing_and_runs_nothing_twice(fresh: Any) -> None:
    model = fresh
    for k in range(5):
        saved, _, tracer = effects(steer, model, {"vector": VECTOR * k, "factor": 1.5}, True)
        expected = Hooks(model._module).output("layers.1", _by_hand(VECTOR * k, 1.5))(x())
        same(saved, expected)
        assert tracer.report.replayed is (k > 0)
        assert tracer.report.spliced == ["model.layers.1.output", "model.output"]
    assert (fx.counters.recordings, fx.counters.compiles, fx.counters.replays) == (1, 1, 4)


def _by_hand(vector: torch.Tensor, factor: float) -> Callable[[Any], Any]:
    def edit(value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        h = value[0].clone()
        h[:, -1] += 4.0 * vector[0]
        return h + factor * vector, value[1]

    return edit


def test_the_result_costs_what_the_output_of_the_model_does(fresh: Any) -> None:
    model = fresh
    def of_result(vector: torch.Tensor) -> Any:
        with model.trace(x()) as tracer:
            model.head.output[:] += vector
            scaled = (tracer.result * 2.0).save()
            result = tracer.result.save()
        return (result, scaled), tracer

    def of_output(vector: torch.Tensor) -> Any:
        with model.trace(x()) as tracer:
            model.head.output[:] += vector
            scaled = (model.output * 2.0).save()
            result = model.output.save()
        return (result, scaled), tracer

    counts = []
    for block in (of_output, of_result):
        model.compile(backend="eager")
        fx.counters.reset()
        for number in range(4):
            vector = VECTOR[:2] * number
            saved, tracer = block(vector)
            expected = Hooks(model._module).output("head", lambda h, v=vector: h + v)(x())
            same(saved, (expected, expected * 2.0))
            assert tracer.report.replayed is (number > 0)
            assert not tracer.report.breaks
        counts.append(copy.copy(fx.counters))
    assert counts[0] == counts[1]
    assert counts[0].replays == 3


def test_the_result_is_the_last_thing_a_block_can_read(model: Any) -> None:
    for compile in (False, True, True):
        with pytest.raises(OutOfOrderError, match=r"`result\.i0`"):
            with model.trace(x(), compile=compile) as tracer:
                tracer.result.save()
                model.output.save()


def test_saved_containers_are_new_each_time(model: Any) -> None:
    env = {"vectors": [VECTOR], "places": (0,)}
    first, second, third = (effects(loops, model, env, True)[0] for _ in range(3))
    assert fx.counters.replays == 2
    assert second[0] is not third[0] and second[0][0] is not third[0][0]
    second[0].clear()
    same(third[0], first[0])


def test_shared_memory_is_seen(model: Any) -> None:
    """Two names for one tensor are not two tensors, when one of them is edited."""
    for shared in (False, False, True, True, False):
        runs = []
        for compile in (True, False):
            memory = torch.zeros(4)
            env = Env(x=x(4)[:, :], memory=memory, other=memory if shared else torch.zeros(4) + 2)
            with model.trace(env.x, compile=compile):
                env_memory, other = env.memory, env.other
                env_memory += 1
                h = model.layers[0].output[0]
                h *= other
                out = model.head.output.save()
            runs.append((out, memory.clone()))
        same(runs[0], runs[1])
    assert fx.counters.replays > 0


class Remembering(torch.nn.Module):
    """Edits a buffer before its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("memory", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.memory.add_(1)
        return self.second(h + self.memory)


def test_shared_memory_with_what_the_model_edits_is_seen() -> None:
    model: Any = NNsight(Remembering().eval(), compile={"backend": "eager"})
    memory = model._module.memory
    for shared in (False, False, True, True, False):
        memory.zero_()
        vector = memory[:] if shared else torch.zeros(4)
        with model.trace(x()):
            h = model.second.input
            seen = (vector * 1).save()
            model.second.input = h + vector
            out = model.output.save()
        memory.zero_()
        same((seen, out), (torch.full((4,), float(shared)), model._module.second(model._module.first(x()) + 1 + float(shared))))
    assert fx.counters.replays > 0


@dataclasses.dataclass
class Plain:
    h: torch.Tensor

    def describe(self) -> str:
        return "a result"


@dataclasses.dataclass
class Scaled(Plain):
    @property
    def scaled(self) -> torch.Tensor:
        return self.h * FACTOR


class Summed(dict[str, torch.Tensor]):
    def get(self, key: str, default: Any = None) -> Any:
        return self[key] * FACTOR


class Pair(collections.namedtuple("Pair", "h more")):
    def sum(self) -> torch.Tensor:
        return self.h * FACTOR


class Returning(torch.nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        return self.kind(h=h, more=h) if self.kind is Pair else self.kind(h=h)


def _returned(model: Any, compile: bool) -> torch.Tensor:
    kind = model._module.kind
    if kind is Scaled:
        with model.trace(x(), compile=compile):
            out = model.output.scaled.save()
    elif kind is Summed:
        with model.trace(x(), compile=compile):
            out = model.output.get("h").save()
    elif kind is Pair:
        with model.trace(x(), compile=compile):
            out = model.output.sum().save()
    else:
        with model.trace(x(), compile=compile):
            out = model.output.h.save()
    return out


@pytest.mark.parametrize("kind", [Plain, Scaled, Summed, Pair])
def test_methods_and_properties_of_outputs_run_each_time(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    model = NNsight(Returning(kind).eval(), compile={"backend": "eager"})
    for factor in (2.0, 2.0, 3.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        expected = model._module.linear(x()) * (1.0 if kind is Plain else factor)
        same(_returned(model, True), expected)
    assert fx.counters.replays == (3 if kind is Plain else 0)


def test_a_dict_with_tensors_as_keys_is_saved_each_time(model: Any) -> None:
    for number in range(3):
        given = x() + number
        with model.trace(given):
            kept = {model.head.output: 1}.save()
        same(next(iter(kept)), model._module(given))
    assert fx.counters.replays == 0


def test_gradients_that_a_run_refuses_are_refused_by_a_replay() -> None:
    """A graph edits a tensor from outside and uses it: to autograd, nothing in the graph depends on the edited tensor."""
    model = NNsight(Net(), compile={"backend": "aot_eager"})
    for replayed in (False, True, True):
        scale = torch.ones(4, requires_grad=True) * 1
        with model.trace(x()) as tracer:
            scale *= model.layers[0].output[0].mean(0)
            loss = scale.square().sum().save()
        assert tracer.report.replayed == replayed
        with pytest.raises(ValueError, match="The gradient of this tensor cannot be computed"), (loss + scale.sum()).backward():
            scale.grad.save()


def test_the_models_own_tensors_as_outside_ones(model: Any) -> None:
    given = x()
    for vector in (VECTOR, VECTOR, model._module.layers[0].linear.bias, given[0], model._module.layers[0].linear.bias):
        runs = []
        for compile in (True, False):
            with model.trace(given, compile=compile):
                h = model.layers[1].output[0]
                h += vector
                out = model.output.save()
            runs.append(out)
        same(runs[0], runs[1])


def test_traces_are_replayed_for_a_default_device(model: Any) -> None:
    """``torch.device`` contexts, which ``torch.set_default_device`` enters too, are settings: another is another run."""

    given = x()

    def made(device: Any) -> torch.device:
        with contextlib.nullcontext() if device is None else torch.device(device), model.trace(given):
            model.layers[1].output[0][:] += 1.0
            out = model.output.save()
            used = torch.full((4,), 0.1).device.save()
        same(out, expected)
        return used

    with model.trace(given, compile=False):
        model.layers[1].output[0][:] += 1.0
        expected = model.output.save()
    devices = [None, "cpu", "meta"]
    assert [made(device).type for device in devices] == ["cpu", "cpu", "meta"]
    fx.counters.reset()
    assert [made(device).type for device in devices] == ["cpu", "cpu", "meta"]
    assert (fx.counters.replays, fx.counters.recordings) == (3, 0)
    with torch.overrides.BaseTorchFunctionMode():  # may do anything with the calls
        assert made(None).type == "cpu"
    assert fx.counters.replays == 3


@pytest.mark.parametrize("setting", ["grad mode", "swapped module", "default dtype", "train"])
def test_settings_are_seen(fresh: Any, setting: str) -> None:
    model = fresh
    net = model._module

    def both() -> None:
        runs = []
        for compile in (True, False):
            with model.trace(x(), compile=compile):
                bias = torch.full((4,), 0.1)
                model.layers[1].output[0][:] += bias
                out = model.output.save()
                kind = bias.dtype.save()
            runs.append((out.detach(), kind, out.requires_grad))
        same(runs[0][0], runs[1][0])
        assert runs[0][1:] == runs[1][1:]

    both()
    both()
    assert fx.counters.replays == 1
    if setting == "default dtype":
        torch.set_default_dtype(torch.float64)
        try:
            both()
        finally:
            torch.set_default_dtype(torch.float32)
    elif setting == "grad mode":
        with torch.no_grad():
            both()
            both()
    elif setting == "train":
        net.train()
        both()
    else:
        net.layers[1] = Layer()
        both()
        both()
    both()


# -- blocks that must run each time ----------------------------------------------------------------------------------------


class Recorder:
    """Counts what is done to it."""

    def __init__(self) -> None:
        self.calls = 0
        self.items: list[Any] = []

    @property
    def vector(self) -> torch.Tensor:
        self.calls += 1
        return VECTOR * self.calls

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        return value * self.calls

    def append(self, value: Any) -> None:
        self.items.append(value)


def _reads_a_property(model: Any, r: Recorder) -> Any:
    with model.trace(x()) as tracer:
        out = (model.layers[2].output[0] + r.vector).save()
    return out, tracer


def _appends(model: Any, r: Recorder) -> Any:
    with model.trace(x()) as tracer:
        r.append(model.output.sum().save())
    return len(r.items), tracer


def _appends_to_a_list(model: Any, r: Recorder) -> Any:
    items = r.items
    with model.trace(x()) as tracer:
        items.append(model.output.sum().save())
    return len(r.items), tracer


def _extends_a_list(model: Any, r: Recorder) -> Any:
    items = r.items
    with model.trace(x()) as tracer:
        items += [model.output.sum().save()]
    return len(r.items), tracer


def _hides_a_list(model: Any, r: Recorder) -> Any:
    items = r.items
    with model.trace(x()) as tracer:
        hidden = (items, 1)
        hidden[0].append(model.output.sum().save())
    return len(r.items), tracer


def _sets_an_attribute(model: Any, r: Recorder) -> Any:
    with model.trace(x()) as tracer:
        r.calls += 1
        out = model.output.save()
    return r.calls, tracer


def _prints(model: Any, r: Recorder) -> Any:
    with model.trace(x()) as tracer:
        r.items.append(1)
        print("in the block")
        out = model.output.save()
    return len(r.items), tracer


def _looks_at_a_value(model: Any, r: Recorder) -> Any:
    vector = VECTOR * (r.calls + 1)
    r.calls += 1
    with model.trace(x()) as tracer:
        first = vector[0].item()
        out = (model.output * first).save()
    return out, tracer


def _branches_on_a_value(model: Any, r: Recorder) -> Any:
    vector = VECTOR * (-1) ** r.calls
    r.calls += 1
    with model.trace(x()) as tracer:
        sign = 1 if vector[0] > 0 else -2
        out = (model.output * sign).save()
    return out, tracer


def _uses_a_global(model: Any, r: Recorder) -> Any:
    global COUNTED
    with model.trace(x()) as tracer:
        out = model.output.save()
        COUNTED = COUNTED + 1
    return COUNTED, tracer


def _uses_numpy(model: Any, r: Recorder) -> Any:
    array = (VECTOR * (r.calls + 1)).numpy()
    r.calls += 1
    with model.trace(x()) as tracer:
        out = (model.layers[2].output[0] + torch.from_numpy(array)).save()
    return out, tracer


COUNTED = 0

RUN_EACH_TIME = [
    value
    for name, value in list(globals().items())
    if name.startswith("_") and getattr(value, "__annotations__", {}).get("r")
]


@pytest.mark.parametrize("block", RUN_EACH_TIME, ids=lambda block: block.__name__.strip("_"))
def test_a_block_that_does_more_runs_each_time(model: Any, block: Callable[..., Any]) -> None:
    """Eager and compiled models go through the same runs, side effects included."""
    global COUNTED
    results = []
    for wrapped in (model, NNsight(copy.deepcopy(model._module), compile=False)):
        COUNTED = 0
        recorder = Recorder()
        results.append([block(wrapped, recorder)[0] for _ in range(4)])
    same(results[0], results[1])
    values = results[0]
    assert fx.counters.replays == 0 or block in (_uses_numpy, _appends_to_a_list, _appends)
    if isinstance(values[0], int):
        assert values == [1, 2, 3, 4]
    else:
        assert not torch.equal(*(torch.as_tensor(value if isinstance(value, torch.Tensor) else value[0]) for value in values[:2]))


def test_edits_of_the_model_and_invokes_run_each_time(fresh: Any) -> None:
    model = fresh
    def traced(target: Any) -> torch.Tensor:
        with target.trace(x()) as tracer:
            out = target.output.save()
        return out

    plain = model._module(x())
    for _ in range(3):
        same(traced(model), plain)
    assert fx.counters.replays == 2
    with model.edit() as edited:
        edited.head.output[:] = 1
    same(traced(edited), torch.ones_like(plain))
    same(traced(edited), torch.ones_like(plain))
    same(traced(model), plain)
    with model.edit(inplace=True):
        model.head.output[:] = 2
    same(traced(model), torch.full_like(plain, 2))
    model.clear_edits()
    same(traced(model), plain)


def test_errors_come_from_the_block(model: Any) -> None:
    """Whatever makes a block fail makes it run."""
    places = [0, 0, 7, 0]
    seen = []
    for place in places:
        index = torch.tensor([place])
        try:
            with model.trace(x()):
                out = model.layers[0].output[0].index_select(0, index).save()
            seen.append("ok")
        except (IndexError, RuntimeError):
            seen.append("error")
    assert seen == ["ok", "ok", "error", "ok"]


def test_errors_of_calls_on_outside_tensors_name_their_line(model: Any) -> None:
    table, kept = torch.ones(3, 2), 0
    for place in (0, 0, 7, 0):
        index, error = torch.tensor([place]), None
        try:
            with model.trace(x()) as tracer:
                row = table[index]
                out = (model.output + row).save()
        except IndexError as caught:
            error = traceback.format_exception(caught)
        assert (error is not None) is (place == 7)
        if error is not None:
            assert "row = table[index]" in "".join(error)
        else:
            same(out, model._module(x()) + 1)
            kept += tracer.report.replayed
    assert kept == 2


@pytest.mark.parametrize("edits", [False, True])
def test_errors_of_calls_on_outside_tensors_leave_the_grad_mode(model: Any, edits: bool) -> None:
    table, kept = torch.ones(3, 2), 0
    for place in (0, 0, 7, 0):
        index = torch.tensor([place])
        with pytest.raises(IndexError) if place else contextlib.nullcontext():
            with model.trace(x()) as tracer:
                with torch.no_grad():
                    if edits:
                        table += 1
                    row = table[index]
                out = (model.output + row).save()
            same(out, model._module(x()) + table[index])
            kept += tracer.report.replayed
        assert torch.is_grad_enabled()
    assert kept == 2
    assert table[0, 0] == 1 + 4 * edits


def test_another_function_under_the_same_name_is_another_block(model: Any) -> None:
    """A block that is determined with one function may do anything with another."""
    calls = []

    def counted(value: torch.Tensor) -> torch.Tensor:
        calls.extend([1])
        return value.sigmoid()

    for act in (torch.relu, torch.relu, counted, counted, counted, torch.relu, counted):
        saved = effects(functions, model, {"act": act}, True)[0]
        same(saved, effects(functions, model, {"act": torch.sigmoid if act is counted else act}, False)[0])
    assert len(calls) == 4
    assert fx.counters.replays == 2


def test_what_a_backend_puts_around_a_block_runs(model: Any) -> None:
    calls = []

    class Counting(Backend):
        def __call__(self, tracer: Any) -> Any:
            function = super().__call__(tracer)

            def counted() -> None:
                calls.append(len(calls))
                function()

            return tracer.execute(counted)

    for backend in (None, Counting(), Counting(), None, Counting()):
        with model.trace(x(), backend=backend):
            model.layers[1].output[0][:] *= 2.0
            out = model.output.save()
        same(out, Hooks(model._module).output("layers.1", lambda value: (value[0] * 2.0, value[1]))(x()))
    assert calls == [0, 1, 2]


class Noting(Envoy):
    """An envoy with a property that does more than return a value."""

    noted = 0

    @eproperty()
    def output(self) -> Any: ...

    @output.preprocess
    def output(self, value: Any) -> Any:
        Noting.noted += 1
        return value


@pytest.mark.parametrize("by_index", [False, True])
def test_properties_of_ones_own_run_each_time(by_index: bool) -> None:
    Noting.noted = 0
    model = NNsight(Net().eval(), compile={"backend": "eager"}, envoys={Layer: Noting})
    for _ in range(3):
        with model.trace(x()):
            kept = [layer.output[0] for layer in model.layers[:]] if by_index else model.layers[0].output[0]
            kept.save()
    assert Noting.noted == (9 if by_index else 3)
    assert len(kept) == 3
    assert fx.counters.replays == 0


def test_a_debugger_sees_the_block(model: Any) -> None:
    import sys

    lines = []

    def watch(frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code.co_name == "__nnsight_block__":
            lines.append(frame.f_lineno)
        return watch

    for watched in (False, False, True):
        previous = sys.gettrace()
        sys.settrace(watch if watched else previous)
        try:
            out = effects(steer, model, {"vector": VECTOR, "factor": 1.5}, True)[0]
        finally:
            sys.settrace(previous)
    assert fx.counters.replays == 1 or previous is not None
    assert len(lines) >= 4
    assert out.shape == (3, 2)


def test_what_never_repeats_is_not_remembered(model: Any) -> None:
    """A block whose environment is another each time is given up on, and stays right."""
    for number in range(40):
        saved, _, _ = effects(steer, model, {"vector": VECTOR, "factor": float(number)}, True)
    same(saved, Hooks(model._module).output("layers.1", _by_hand(VECTOR, 39.0))(x()))
    (state,) = model._compiled.replays._states.values()
    assert state.must_run or fx.counters.replays > 0
    assert state.reading is None or len(state.reading.environments) <= 64


def test_nothing_is_kept_alive(model: Any) -> None:
    env = Env(x=x(), vector=VECTOR.clone(), factor=1.5)
    for _ in range(3):
        out, tracer = steer(model, env, True)
    assert fx.counters.replays == 2
    references = [weakref.ref(env.vector), weakref.ref(out), weakref.ref(env.x), weakref.ref(env)]
    del env, out, tracer
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


class Counted(torch.nn.Module):
    """Counts its calls in a buffer, and in a list where dynamo cannot follow."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.breaks = breaks
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        h = self.linear(x)
        if self.breaks:
            torch._dynamo.graph_break()
            self.note()
            return h * 2 if h.sum() > 0 else h - 1
        return h

    @torch._dynamo.disable
    def note(self) -> None:
        self.seen.append("seen")


def test_a_model_that_is_not_compiled_any_more_runs_once() -> None:
    net = Counted(breaks=False)
    model = NNsight(net, compile={"backend": "eager"})
    for number in range(1, 6):
        with torch.compiler.set_stance("default" if number < 4 else "force_eager"), model.trace(x()):
            model.linear.output[:] *= 2.0
            out = model.output.save()
        assert net.calls == number
        same(out, net.linear(x()) * 2.0)
    assert fx.counters.replays == 2


def test_a_model_that_breaks_the_graph_runs_its_python_once_each_time() -> None:
    net = Counted(breaks=True)
    model = NNsight(net, compile={"backend": "eager"})
    for number in range(1, 8):
        given = x() * (-1) ** number
        with model.trace(given):
            hidden = model.linear.output.save()
            out = model.output.save()
        assert (net.calls, len(net.seen)) == (number, number)
        same((hidden, out), (net.linear(given), copy.deepcopy(net)(given)))
    assert fx.counters.replays == 0


def test_a_list_that_is_filled_and_looked_at(model: Any) -> None:
    """By one name it is filled, by the other it is looked at, at first or later."""
    kept: list[Any] = []
    seen: list[Any] = []
    for number in range(6):
        looked_at = [] if number < 3 else kept
        with model.trace(x()):
            kept.append(model.layers[0].output[1])
            count = len(looked_at).save()
        seen.append(count)
    assert seen == [0, 0, 0, 4, 5, 6]
    assert len(kept) == 6
    same(kept, [model._module.layers[0](x(), scale=0.5)[1]] * 6)
    assert fx.counters.replays == 2


def test_envoys_in_a_list_that_changes(model: Any) -> None:
    layers = [model.layers[0], model.layers[1]]
    for number in range(6):
        if number == 3:
            layers[1] = model.layers[2]
        kept: list[Any] = []
        with model.trace(x()):
            for layer in layers:
                kept.append(layer.output[1].save())  # noqa: PERF401 - as people write it
        expected = Hooks(model._module)
        keep = expected.keep("last", lambda value: value[1])
        expected.output(f"layers.{1 if number < 3 else 2}", keep)(x())
        same(kept[1], expected.seen["last"])
    assert fx.counters.replays == 4


def test_sizes_that_follow_from_values_are_seen(model: Any) -> None:
    def run(mask: torch.Tensor) -> torch.Tensor:
        with model.trace(torch.ones(2, 4)):
            out = (model.output * mask.nonzero()[:, 0].shape[0]).save()
        return out

    def run_indexed(mask: torch.Tensor) -> torch.Tensor:
        with model.trace(torch.ones(2, 4)):
            chosen = torch.arange(4)[mask]
            out = (model.output * len(chosen)).save()
        return out

    plain = model._module(torch.ones(2, 4))
    for bits in ([1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]):
        mask = torch.tensor(bits, dtype=torch.bool)
        same(run(mask), plain * sum(bits))
        same(run_indexed(mask), plain * sum(bits))


# -- blocks that ask for nothing ---------------------------------------------------------------------------------------------


def nothing(model: Any, env: Env, compile: bool) -> Any:
    with model.trace(env.x, compile=compile) as tracer:
        pass
    return None, tracer


def outside_only(model: Any, env: Env, compile: bool) -> Any:
    vector = env.vector
    with model.trace(env.x, compile=compile) as tracer:
        total = (vector * 2).sum().save()
        vector += 1
    return total, tracer


@pytest.mark.parametrize("block", [nothing, outside_only])
def test_a_block_that_asks_for_nothing_is_replayed_and_the_model_runs(fresh: Any, block: Any) -> None:
    model = fresh
    calls: list[int] = []
    model._module.head.register_buffer("count", torch.zeros(()))

    class Counted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x)

    model._module.head.__class__ = Counted
    env, vector = Env(x=x(), vector=torch.ones(4)), torch.ones(4)
    for number in range(1, 5):
        total, tracer = block(model, env, True)
        calls.append(tracer.report.replayed)
        assert model._module.head.count == number
        if block is outside_only:
            assert total == (vector * 2).sum()
            vector += 1
            assert torch.equal(env.vector, vector)
    assert calls[-1] and fx.counters.replays == sum(calls) >= 2
    assert fx.counters.recordings <= 1


def test_a_shape_stays_a_shape(model: Any) -> None:
    kept: list[Any] = []
    for number in range(4):
        with model.trace(x(3)) as tracer:
            hidden = model.layers[0].output[0]
            kept.append(({"shape": hidden.shape}, [hidden.size()], hidden.stride()))
        table, (size,), stride = kept[-1]
        assert tracer.report.replayed == (number > 0)
        assert type(table["shape"]) is type(size) is torch.Size and size.numel() == 12
        assert type(stride) is tuple
