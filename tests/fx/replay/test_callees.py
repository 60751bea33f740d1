"""Replay of blocks that call functions and modules: they are looked into, and do in a replay what they do in a run."""

from __future__ import annotations

import functools
import gc
import importlib.util
import linecache
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import fx
from nnsight.fx.replay import names

from ...conftest import Hooks, same
from .conftest import VECTOR, applied, by_hand, check, x

SCALE = 2.0
STEERS = {"up": VECTOR, "down": -0.5 * VECTOR}

# -- functions that are replayed -------------------------------------------------------------------------------------------


def plain(h: torch.Tensor, v: torch.Tensor = VECTOR, *, scale: float = 1.5) -> torch.Tensor:
    """Adds a vector."""
    return h + scale * v


def calls_others(h: torch.Tensor) -> torch.Tensor:
    shifted, norm = _shifted_and_norm(h)
    if norm is None:
        raise ValueError("no norm")
    return SCALE * shifted / (1.0 + norm)


def _shifted_and_norm(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return plain(h, scale=0.5), h.norm(dim=-1, keepdim=True)


def adds_items(h: torch.Tensor) -> torch.Tensor:
    for name, vector in STEERS.items():
        h = h + (2.0 if name == "up" else 1.0) * vector
    return h * len(STEERS.keys()) - sum(STEERS.values())


def first_of(h: Any) -> torch.Tensor:
    if isinstance(h, (tuple, list)):
        h = h[0]
    kept: list[torch.Tensor] = []
    for i in range(4):
        if i < 3:
            kept.append(h * i)  # noqa: PERF401 - as people write it
    return sum(kept[:2]) + VECTOR


def early(h: torch.Tensor, mode: str = "add", act: Any = None) -> torch.Tensor:
    if act is not None:
        h = act(h)
    if mode == "add":
        return h + VECTOR
    if mode == "scale":
        return h * SCALE
    raise ValueError(mode)


@torch.no_grad()
def decorated(h: torch.Tensor) -> torch.Tensor:
    return h * 3.0 + VECTOR


def restores(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        means = [row.mean() for row in h.unbind(0)]
        return h - torch.stack(means)[:, None] * 2.0 + max(len(means), 2)


def make_adder(vector: torch.Tensor, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def add(h: torch.Tensor) -> torch.Tensor:
        return h + vector * scale

    return add


class Steering:
    offset = 0.25

    def __init__(self, vector: torch.Tensor, scale: float = 1.0) -> None:
        self.vector, self.scale = vector, scale

    def add(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h) + self.times(2.0) * self.vector + self.offset

    def times(self, factor: float) -> float:
        return factor * self.scale


FUNCTIONS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a function": lambda: (plain,),
    "arguments": lambda: (plain, VECTOR * 2),
    "a closure": lambda: (make_adder(VECTOR, 3.0),),
    "two lambdas in a line": lambda: ((lambda h: h - VECTOR), (lambda h: h + VECTOR * 2))[1:],
    "functions that call functions": lambda: (calls_others,),
    "a loop": lambda: (first_of,),
    "items of a dict": lambda: (adds_items,),
    "branches": lambda: (early, "scale"),
    "a function as argument": lambda: (lambda h: early(h, "add", torch.relu),),
    "a function of ours as argument": lambda: (lambda h: early(h, act=plain),),
    "a context": lambda: (restores,),
    "a method": lambda: (lambda h, steering: steering.add(h), Steering(VECTOR)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_replayed(model: Any, name: str) -> None:
    function, *more = FUNCTIONS[name]()
    assert check(model, function, *more) == 2


def test_a_function_whose_file_was_edited_runs_each_time(model: Any, tmp_path: Any) -> None:
    """What is written there now is not what runs."""
    path = tmp_path / "edited_steering.py"
    path.write_text("CALLS = {'n': 0}\ndef steer(h):\n    CALLS.update(n=CALLS['n'] + 1)\n    return h * 3\n")
    spec = importlib.util.spec_from_file_location("edited_steering", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text("CALLS = {'n': 0}\ndef steer(h):\n    h = h + 0\n    return h * 3\n")
    linecache.checkcache(str(path))
    assert check(model, module.steer) == 0
    assert module.CALLS["n"] == 6


def test_functions_made_anew_each_time_are_replayed(model: Any) -> None:
    """What is compared is their code and what they read."""
    for k in range(6):
        function = make_adder(VECTOR * (k + 1), 2.0)
        same(applied(model, function), by_hand(model, function))
    assert fx.counters.replays == 5
    for scale in (3.0, 3.0, 2.0):
        function = make_adder(VECTOR, scale)
        same(applied(model, function), by_hand(model, function))
    assert fx.counters.replays == 7


def test_what_a_function_saves_and_appends_to_outer_lists(model: Any) -> None:
    kept: list[Any] = []

    def note(h: torch.Tensor, more: Any) -> torch.Tensor:
        kept.append(h.norm())
        more.append(len(kept_elsewhere))
        return (h * 2).save()

    kept_elsewhere = (1, 2)
    for number in range(1, 4):
        with model.trace(x()):
            counts = [].save()
            doubled = note(model.layers[0].output, counts)
        expected = Hooks(model._module)
        expected.output("layers.0", expected.keep("h"))(x())
        same((doubled, kept), (expected.seen["h"] * 2, [expected.seen["h"].norm()] * number))
        assert counts == [2]
    assert fx.counters.replays == 2


# -- what they read changes ------------------------------------------------------------------------------------------------


def reads_globals(h: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(h) * SCALE + helper(h)


def helper(h: torch.Tensor) -> torch.Tensor:
    return h.sum(-1, keepdim=True)


def _other_helper(h: torch.Tensor) -> torch.Tensor:
    STATE.calls += 1
    return h.mean(-1, keepdim=True)


@pytest.mark.parametrize("what", ["global", "function", "code", "default", "keyword default", "function of torch", "effect"])
def test_what_a_function_reads_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    function = plain if "default" in what else reads_globals
    copied = types.FunctionType(function.__code__, globals(), "copied", function.__defaults__)
    copied.__kwdefaults__ = {**(function.__kwdefaults__ or {})}
    mine = types.FunctionType(helper.__code__, globals(), "helper")
    monkeypatch.setitem(globals(), "helper", mine)
    assert check(model, copied) == 2
    before = by_hand(model, copied)
    if what == "global":
        monkeypatch.setitem(globals(), "SCALE", 5.0)
    elif what == "function":
        monkeypatch.setitem(globals(), "helper", lambda h: h.amax(-1, keepdim=True))
    elif what == "code":
        mine.__code__ = (lambda h: h.amin(-1, keepdim=True)).__code__
    elif what == "default":
        copied.__defaults__ = (VECTOR * -3,)
    elif what == "keyword default":
        copied.__kwdefaults__["scale"] = -2.0
    elif what == "function of torch":
        monkeypatch.setattr(torch.nn.functional, "gelu", torch.sigmoid)
    else:
        monkeypatch.setitem(globals(), "helper", _other_helper)
    replays = check(model, copied)
    assert not torch.allclose(by_hand(model, copied), before)
    if what == "effect":
        assert replays == 0
        calls = STATE.calls
        applied(model, copied)
        assert STATE.calls == calls + 1
        _reset()
    else:
        assert replays == (3 if what == "default" else 2)


@pytest.mark.parametrize("what", ["attribute", "vector", "method", "class attribute", "class", "instance attribute"])
def test_what_a_method_reads_is_seen(model: Any, what: str) -> None:
    kind = type("Mine", (Steering,), {"offset": 0.25})
    steering = kind(VECTOR)

    def steered(h: torch.Tensor) -> torch.Tensor:
        return 0.5 * steering.add(h)

    assert check(model, steered) == 2
    before = by_hand(model, steered)
    if what == "attribute":
        steering.scale = 4.0
    elif what == "vector":
        steering.vector = VECTOR.flip(0)
    elif what == "method":
        kind.add = lambda self, h: h * self.scale * 3.0
    elif what == "class attribute":
        kind.offset = -2.0
    elif what == "class":
        steering.__class__ = type("Other", (Steering,), {"add": lambda self, h: h - 7.0})
    else:
        steering.add = lambda h: h - 5.0
    check(model, steered)
    assert not torch.allclose(by_hand(model, steered), before)


def test_whether_an_object_has_a_method_is_seen(model: Any) -> None:
    steering: Any = Steering(VECTOR)

    def function(h: torch.Tensor) -> torch.Tensor:
        return h * 2 if steering.add is None else h * 3

    assert check(model, function) == 2
    steering.add = None
    assert check(model, function) == 2


# -- functions that do more ------------------------------------------------------------------------------------------------


class State:
    """An object whose attributes may be read in a replay; that they are written ends the proof."""

    def __init__(self) -> None:
        self.calls = 0


STATE = State()


def prints(h: torch.Tensor) -> torch.Tensor:
    STATE.calls  # noqa: B018 - a read alone is harmless
    print("in the function")
    return h * 2


def writes_an_attribute(h: torch.Tensor) -> torch.Tensor:
    STATE.calls += 1
    return h * STATE.calls


def writes_a_global(h: torch.Tensor) -> torch.Tensor:
    global TOTAL
    TOTAL = TOTAL + 1
    return h * TOTAL


def in_a_lazy_generator(h: torch.Tensor) -> torch.Tensor:
    act = torch.relu
    later = (act(part) for part in h.unbind(0))
    act = counts_calls
    return torch.stack(list(later))


def counts_calls(h: torch.Tensor) -> torch.Tensor:
    STATE.calls += 1
    return h * STATE.calls


def calls_itself(h: torch.Tensor, depth: int = 2) -> torch.Tensor:
    STATE.calls += 0
    return h * 2 if depth == 0 else calls_itself(h, depth - 1)


@functools.cache
def counted(number: int) -> int:
    STATE.calls += 1
    return number


def is_cached(h: torch.Tensor) -> torch.Tensor:
    return h * counted(3)


TOTAL = 0

NOT_REPLAYED = [
    prints,
    writes_an_attribute,
    writes_a_global,
    in_a_lazy_generator,
    calls_itself,
    is_cached,
]


def _reset() -> None:
    global TOTAL
    TOTAL = 0
    STATE.calls = 0
    counted.cache_clear()


@pytest.mark.parametrize("function", NOT_REPLAYED, ids=lambda function: function.__name__)
def test_functions_that_do_more_run_each_time(
    model: Any, function: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for compile in (True, False):
        _reset()
        results.append([applied(model, function, compile=compile) for _ in range(4)])
        results[-1].append(torch.tensor([TOTAL, STATE.calls]))
    same(results[0], results[1])
    assert fx.counters.replays == 0
    if function is prints:
        assert capsys.readouterr().out == "in the function\n" * 8
    _reset()


def test_random_numbers_of_a_function_are_drawn_again(model: Any) -> None:
    def noisy(h: torch.Tensor) -> torch.Tensor:
        return h + torch.randn(4) + torch.rand_like(h)

    for seed in (0, 1, 1, 2):
        torch.manual_seed(seed)
        found = applied(model, noisy)
        torch.manual_seed(seed)
        same(found, applied(model, noisy, compile=False))
    assert fx.counters.replays == 3


def test_a_function_that_raises_raises_each_time(model: Any) -> None:
    for mode in ("add", "add", "other", "other", "scale"):
        if mode == "other":
            with pytest.raises(ValueError, match="other"):
                applied(model, early, mode)
        else:
            same(applied(model, early, mode), by_hand(model, early, mode))
    assert fx.counters.replays == 1


def test_values_that_a_function_looks_at(model: Any) -> None:
    def signed(h: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return h * 2 if v.sum() > 0 else h * 3

    for vector in (VECTOR, VECTOR, -VECTOR, -VECTOR, VECTOR):
        same(applied(model, signed, vector), by_hand(model, signed, vector))
    assert fx.counters.replays == 0


def test_attributes_that_a_user_gave_a_tensor(model: Any) -> None:
    def tagged(h: torch.Tensor, v: Any) -> torch.Tensor:
        return h * v.strength

    vector: Any = VECTOR.clone()
    for strength in (2.0, 2.0, 3.0, 4.0):
        vector.strength = strength
        same(applied(model, tagged, vector), by_hand(model, tagged, vector))
    assert fx.counters.replays == 0


@pytest.mark.parametrize("is_method", [False, True])
def test_what_a_user_added_to_tensors_runs_each_time(model: Any, monkeypatch: pytest.MonkeyPatch, is_method: bool) -> None:
    scale = 2.0

    def scaled(h: torch.Tensor) -> torch.Tensor:
        return h * scale

    def function(h: Any) -> torch.Tensor:
        return h.scaled() if is_method else h.scaled

    monkeypatch.setattr(torch.Tensor, "scaled", scaled if is_method else property(scaled), raising=False)
    assert check(model, function) == 0
    scale = 3.0
    assert check(model, function) == 0


def test_a_function_put_in_place_of_one_of_torch_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was there before torch's functions are listed."""
    mine = types.FunctionType(reads_globals.__code__, globals(), "hardtanh")
    monkeypatch.setattr(torch.overrides, "get_overridable_functions", lambda: {torch.nn.functional: [mine, torch.nn.functional.gelu]})
    names.harmless_functions.cache_clear()
    try:
        assert id(mine) not in names.harmless_functions()
        assert id(torch.nn.functional.gelu) in names.harmless_functions()
    finally:
        names.harmless_functions.cache_clear()


# -- modules -----------------------------------------------------------------------------------------------------------------


class SAE(torch.nn.Module):
    """A sparse autoencoder, as people write one."""

    def __init__(self) -> None:
        super().__init__()
        self.W_enc = torch.nn.Parameter(torch.randn(4, 8))
        self.W_dec = torch.nn.Parameter(torch.randn(8, 4))
        self.b_enc = torch.nn.Parameter(torch.zeros(8))
        self.register_buffer("threshold", torch.tensor(0.1))
        self.act = torch.nn.ReLU()
        self.norm = None

    def encode(self, h: torch.Tensor) -> torch.Tensor:
        if self.norm is not None:
            h = self.norm(h)
        features = self.act(h @ self.W_enc + self.b_enc)
        return torch.where(features > self.threshold, features, 0.0)

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.W_dec

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(h))


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)])
        self.named = torch.nn.ModuleDict({"out": torch.nn.RMSNorm(4)})

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            h = part(h) + number
        return self.named["out"](h) + self.parts[-1](h)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: torch.nn.Linear(4, 4),
    "sequential": lambda: torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.SiLU()),
    "batch norm": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)),
    "sae": SAE,
    "stack": Stack,
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_replayed(model: Any, name: str) -> None:
    assert check(model, MODULES[name]().eval()) == 2


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "parameter in place": (torch.no_grad()(lambda sae: sae.W_dec.mul_(3.0)), 3),
    "parameter replaced": (lambda sae: setattr(sae, "W_dec", torch.nn.Parameter(sae.W_dec * -2.0)), 3),
    "child replaced": (lambda sae: setattr(sae, "act", torch.nn.Tanh()), 2),
    "child added": (lambda sae: setattr(sae, "norm", torch.nn.LayerNorm(4)), 2),
    "buffer replaced": (lambda sae: setattr(sae, "threshold", torch.tensor(0.5)), 3),
    "hook": (lambda sae: sae.act.register_forward_hook(lambda *given: given[-1] * 2), 0),
    "forward of the instance": (lambda sae: setattr(sae, "forward", lambda h: h * 0.5), 0),
    "class": (lambda sae: setattr(sae, "__class__", type("Other", (SAE,), {"decode": lambda self, f: f[:, 2:6]})), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_in_a_module_is_seen(model: Any, name: str) -> None:
    sae = SAE()
    change, replays = CHANGES[name]
    assert check(model, sae) == 2
    before = by_hand(model, sae)
    change(sae)
    assert check(model, sae) == replays
    assert not torch.allclose(by_hand(model, sae), before)


@pytest.mark.parametrize("called", [False, True])
def test_a_first_child_is_seen(model: Any, called: bool) -> None:
    adapters: Any = torch.nn.Sequential() if called else torch.nn.ModuleList()

    def function(h: torch.Tensor) -> torch.Tensor:
        if called:
            return adapters(h) * 2
        for adapter in adapters:
            h = adapter(h)
        return h * 2

    assert check(model, function) == 2
    adapters.append(torch.nn.Linear(4, 4))
    assert check(model, function) == 2


class Scaling(torch.nn.Module):
    """Reads its parameter through a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(VECTOR.clone())

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return found * SCALE if name == "weight" else found

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.weight


def test_a_module_that_looks_up_its_parameters_runs_each_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = Scaling()
    assert check(model, scaling) == 0
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    assert check(model, scaling) == 0


def test_hooks_run_each_time(fresh: Any) -> None:
    """Of the module, of a module in it, and of all modules; without them it is replayed again."""
    model = fresh
    probe = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    calls: list[int] = []

    def note(*_: Any) -> None:
        calls.append(1)

    expected = by_hand(model, probe)
    applied(model, probe)
    for number, register in enumerate(
        [
            lambda: probe.register_forward_hook(note),
            lambda: probe[0].register_forward_pre_hook(note),
            lambda: probe.register_full_backward_hook(note),
            lambda: torch.nn.modules.module.register_module_forward_hook(lambda module, *_: (module is probe and note()) or None),
        ]
    ):
        handle = register()
        for _ in range(3):
            same(applied(model, probe), expected)
        handle.remove()
        assert len(calls) == (0 if number == 2 else 3)
        assert fx.counters.replays == number
        calls.clear()
        same(applied(model, probe), expected)
    assert fx.counters.replays == 3, "with a hook for all modules, and without it, the model is captured anew"
    same(applied(model, probe), expected)
    assert fx.counters.replays == 4


def test_train_and_eval(model: Any) -> None:
    noisy = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    for training in (False, True, True, False, True, False):
        noisy.train(training)
        torch.manual_seed(0)
        found = applied(model, noisy)
        torch.manual_seed(0)
        same(found, by_hand(model, noisy))
    assert fx.counters.replays == 4


class Counting(torch.nn.Module):
    def __init__(self, in_python: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.in_python = 0, in_python

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        if self.in_python:
            self.count += 1
        return h * self.calls


@pytest.mark.parametrize("in_python", [False, True])
def test_a_module_that_counts_its_calls(model: Any, in_python: bool) -> None:
    counting = Counting(in_python)
    for number in range(1, 5):
        same(applied(model, counting), by_hand(model, lambda h, number=number: h * float(number)))
        assert counting.calls == number
        assert counting.count == (number if in_python else 0)
    assert fx.counters.replays == (0 if in_python else 3)


def test_nothing_of_functions_and_modules_is_kept_alive(model: Any) -> None:
    def run() -> list[Any]:
        probe, vector = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), VECTOR.clone()

        def probed(h: torch.Tensor) -> torch.Tensor:
            return probe(h) + vector

        assert check(model, probed) == 2
        return [weakref.ref(each) for each in (probe, probe[0].weight, vector, probed)]

    references = run()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


# -- envoys as functions -----------------------------------------------------------------------------------------------------


def lens(model: Any, compile: bool = True) -> Any:
    with model.trace(x(), compile=compile):
        logits = [model.head(model.norm(layer.output)) for layer in model.layers].save()
    return logits


def test_the_logit_lens_is_replayed(fresh: Any) -> None:
    model = fresh
    for k in range(4):
        expected = Hooks(model._module)
        for layer in range(3):
            expected.output(f"layers.{layer}", expected.keep(f"h{layer}"))
        expected(x())
        head, norm = model._module.head, model._module.norm
        same(lens(model), [head(norm(expected.seen[f"h{layer}"])) for layer in range(3)])
        if k == 2:
            with torch.no_grad():
                model._module.head.weight.mul_(2.0)
    assert fx.counters.replays == 3


@pytest.mark.parametrize("what", ["hook", "forward", "child"])
def test_what_changes_in_the_module_of_an_envoy_is_seen(fresh: Any, what: str) -> None:
    model = fresh
    net = model._module
    for _ in range(2):
        before = lens(model)
    assert fx.counters.replays == 1
    if what == "hook":
        net.head.register_forward_hook(lambda *given: given[-1] * 2)
    elif what == "forward":
        net.head.forward = lambda h: h[:, :2]
    else:
        net.norm = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for _ in range(3):
        found = lens(model)
        same(found, lens(model, compile=False))
    assert not torch.equal(found[0], before[0])
    assert fx.counters.replays == (3 if what == "child" else 1)


def test_an_envoy_with_hook_runs_each_time(fresh: Any) -> None:
    model = fresh
    model._module.probe = torch.nn.Linear(4, 4)
    traced = []
    for _ in range(3):
        with model.trace(x()):
            scores = model.probe(model.layers[0].output, hook=True).save()
        traced.append(scores)
    same(traced[2], traced[0])
    assert fx.counters.replays == 0


def test_a_module_of_the_model_called_beside_it(model: Any) -> None:
    """Its parameters are inputs of the graph, and its calls are intercepted while a run is active."""
    head = model._module.head
    for _ in range(3):
        with model.trace(x()):
            scores = head(model.layers[0].output).save()
        expected = Hooks(model._module)
        expected.output("layers.0", expected.keep("h"))(x())
        same(scores, head(expected.seen["h"]))
    assert fx.counters.replays == 2
