"""The operations inside a module's ``forward``: names, values, edits, skips, and functions within functions."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import nnsight
from nnsight import NNsight, fx
from nnsight.runtime.errors import MissedProviderError, OutOfOrderError
from nnsight.runtime.modules.listing import SourceError
from nnsight.runtime.modules.tree import ModuleTree

from ..conftest import Case, assert_no_instrumentation, both, same


def scores_of(query: torch.Tensor, key: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Attention weights; a function of its own, to be looked into."""
    return torch.softmax(torch.matmul(query, key.transpose(-1, -2)) * scale, dim=-1)


def louder(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator like those of transformers: it calls what it wraps and changes the result."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2.0

    return wrapper


class Base(torch.nn.Module):
    def combine(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.add(x, y)


class Attention(Base):
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(4, 4)
        self.k = torch.nn.Linear(4, 4)
        self.__bias = torch.nn.Parameter(torch.randn(4))

    def combine(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().combine(x, y) + self.__bias

    def forward(self, x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        """Uses most of what a forward can have."""
        weigh = scores_of if times else None
        weights = weigh(self.q(x), self.k(x), scale=0.5)
        mixed = torch.matmul(weights, x)
        for _ in range(times):
            mixed = F.gelu(mixed)
        parts = [torch.mul(mixed, factor) for factor in (0.5, 1.5)]
        return self.combine(torch.stack(parts).sum(0), x)


class Decorated(torch.nn.Module):
    @louder
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attention(), Attention()])
        self.loud = Decorated()
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.loud(x))


class Reference:
    """The same model with functions of the module under test replaced for one call: no interception involved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, net: torch.nn.Module, x: torch.Tensor, owner: Any, name: str, edit: Callable[..., Any]) -> torch.Tensor:
        original = getattr(owner, name)
        calls = iter(range(1000))
        with self._monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, **kwargs: edit(next(calls), original(*args, **kwargs)))
            return net(x)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Reference:
    return Reference(monkeypatch)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 4)


@pytest.fixture
def net() -> Iterator[Net]:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        yield net
    assert_no_instrumentation(net)
    assert all("forward" not in module.__dict__ for module in net.modules())


@pytest.fixture
def model(net: Net) -> NNsight:
    return NNsight(net, compile={"backend": "eager"})


# -- names and printing ------------------------------------------------------------------------------------------------


def test_operations_are_named_after_what_is_called_inner_calls_first(model: NNsight) -> None:
    assert list(model.layers[0].source) == [
        "self_q_0",
        "self_k_0",
        "weigh_0",
        "weights_0",
        "torch_matmul_0",
        "mixed_0",
        "range_0",
        "F_gelu_0",
        "mixed_1",
        "torch_mul_0",
        "parts_0",
        "torch_stack_0",
        "sum_0",
        "self_combine_0",
    ]
    assert len(model.layers[0].source) == 14
    assert model.layers[0].source.names == tuple(model.layers[0].source)
    assert "F_gelu_0" in model.layers[0].source and "F_gelu_1" not in model.layers[0].source


@both
def test_subscripts_are_left_out_of_names(compile: bool) -> None:
    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
            self.functions = {"relu": [torch.relu]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            x = self.layers[1].forward(x)
            x = self.functions["relu"][0](x)
            return (x + x).mean()

    model = NNsight(Listed(), compile={"backend": "eager"})
    calls = [name for name in model.source.names if not name.startswith("x_")]
    assert calls == ["self_layers_0", "self_layers_forward_0", "self_functions_0", "mean_0"]
    given = torch.ones(1, 4)
    with model.trace(given, compile=compile):
        hidden = model.source.self_layers_0.output.save()
        made = model.source.self_functions_0.output.save()
    assert torch.equal(hidden, model._module.layers[0](given))
    assert torch.equal(made, torch.relu(model._module.layers[1](hidden)))


class Assigning(torch.nn.Module):
    """Assigns in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.slots: list[Any] = [None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h: torch.Tensor = h + 1
        self.state = h * 3
        self.slots[0] = self.state
        a, (b, c) = h + 1, [h + 2, h + 3]
        d, e = torch.split(h, 2, -1)
        f = g = h
        h += 1
        for i in range(2):
            k = h * i
        pick = self.lin
        y = pick(h)
        pick = torch.relu
        *rest, last = a, b
        torch.split(h, 2)[0][:] = h[:2]  # nothing that has a name
        return pick(y) + a + b + c + torch.cat([d, e], -1) + f + g + k + self.state + last


ASSIGNMENTS = ("h_0", "h_1", "self_state_0", "self_slots_0", "a_0", "b_0", "c_0", "k_0", "y_0", "pick_2")


@pytest.fixture
def assigning() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Assigning(), compile={"backend": "eager"})


def test_assignments_are_operations_under_names_that_no_call_has(assigning: NNsight) -> None:
    names = assigning.source.names
    assert tuple(name for name in names if name in ASSIGNMENTS) == ASSIGNMENTS
    assert set(names) - {*ASSIGNMENTS} == {"torch_split_0", "range_0", "pick_0", "pick_1", "torch_split_1", "torch_cat_0"}
    # An assignment to `pick` comes before each of its calls: counting all, the second call is number 3.
    assert assigning.source.pick_3.path == "model.source.pick_1"
    with pytest.raises(SourceError, match=r"model\.source\.h_0` is an assignment"):
        assigning.source.h_0.source  # noqa: B018
    with pytest.raises(AttributeError, match="no operation `pick_4`"):
        assigning.source.pick_4  # noqa: B018


@both
def test_assigned_values_are_read_and_replaced(assigning: NNsight, x: torch.Tensor, compile: bool) -> None:
    x = x[:, 0]
    with torch.no_grad(), assigning.trace(x, compile=compile) as tracer:
        first = assigning.source.h_0.output.save()
        assigning.source.h_1.output = first * 0
        state = assigning.source.self_state_0.output.save()
        assigning.source.b_0.output[:] = 7.0
        turns = [].save()
        for _ in tracer.iter[:2]:
            turns.append(assigning.source.k_0.output + 0)
        called = assigning.source.pick_0.output.save()
        assigning.source.pick_3.output = torch.zeros(2, 4)
        out = assigning.output.save()
    h = torch.zeros(2, 4)
    assert torch.equal(first, x * 2) and torch.equal(state, h)
    assert [turn.tolist() for turn in turns] == [(h + 1).mul(i).tolist() for i in range(2)]
    y = assigning._module.lin(h + 1)
    assert torch.equal(called, y)
    # `h += 1` changes `f`, `g`, and the halves of `h` as well.
    same(out, 0 + (h + 1) + 7.0 + 3 + 1 + 1 + 1 + 1 + 0 + 7.0)


def test_printing_shows_names_beside_lines(model: NNsight) -> None:
    lines = str(model.layers[0].source).splitlines()
    (line,) = (line for line in lines if "F.gelu" in line)
    assert line.split() == ["F_gelu_0", "->", "6", "mixed", "=", "F.gelu(mixed)"]
    (sum_line,) = (line for line in lines if line.split()[:1] == ["sum_0"])
    assert sum_line.split() == ["sum_0", "->", "+", "..."]
    assert lines[0].split()[:4] == ["*", "0", "def", "forward(self,"]
    assert not any(line.startswith(" *") or "* " in line[: line.index("def")] for line in lines[1:] if "def" in line)


def test_printing_an_operation_marks_its_line(model: NNsight) -> None:
    shown = str(model.layers[0].source.F_gelu_0)
    assert shown.startswith("model.layers.0.source.F_gelu_0:")
    (line,) = (line for line in shown.splitlines() if line.startswith("-->"))
    assert line.split() == ["-->", "mixed", "=", "F.gelu(mixed)", "<--"]


def test_listing_installs_nothing(model: NNsight, x: torch.Tensor) -> None:
    str(model.layers[0].source)
    dir(model.layers[0].source)
    assert not model._tree._operations.opened


# -- values --------------------------------------------------------------------------------------------------------------


@both
def test_what_iterating_gives_are_names_and_operations(model: NNsight, x: torch.Tensor, compile: bool) -> None:
    (operation,) = model.head.source
    assert operation == "F_linear_0" and operation.name == "F_linear_0" and {operation} == {"F_linear_0"}
    assert operation.path == "model.head.source.F_linear_0"
    with model.trace(x, compile=compile):
        before = operation.output.clone().save()
        operation.output = operation.output * 2
        after = model.head.output.save()
    assert torch.equal(before * 2, after)
    with pytest.raises(AttributeError):
        operation.nonsense  # noqa: B018


@both
def test_reading_outputs_and_inputs(model: NNsight, net: Net, x: torch.Tensor, compile: bool) -> None:
    layer = net.layers[1]
    before = net.layers[0](x)
    weights = scores_of(layer.q(before), layer.k(before), scale=0.5)
    for _ in range(2):
        with model.trace(x, compile=compile):
            found = model.layers[1].source.weigh_0.output.save()
            first = model.layers[1].source.torch_matmul_0.input.save()
            args, kwargs = model.layers[1].source.torch_matmul_0.inputs
            second = args[1].save()
    torch.testing.assert_close(found, weights, rtol=0, atol=0)
    torch.testing.assert_close(first, weights, rtol=0, atol=0)
    torch.testing.assert_close(second, before, rtol=0, atol=0)


@both
def test_keyword_arguments_are_seen_and_replaced(model: NNsight, net: Net, x: torch.Tensor, compile: bool) -> None:
    layer = net.layers[0]
    with model.trace(x, compile=compile):
        _, kwargs = model.layers[0].source.weigh_0.inputs
        scale = nnsight.save(kwargs["scale"])
    assert scale == 0.5
    with model.trace(x, compile=compile):
        args, kwargs = model.layers[0].source.weigh_0.inputs
        model.layers[0].source.weigh_0.inputs = ((args[0] * 3.0, args[1]), kwargs)
        found = model.layers[0].source.weigh_0.output.save()
    torch.testing.assert_close(found, scores_of(layer.q(x) * 3.0, layer.k(x), scale=0.5))


@both
@pytest.mark.parametrize("in_place", [False, True])
def test_edits_reach_the_model(
    model: NNsight, net: Net, x: torch.Tensor, reference: Reference, compile: bool, in_place: bool
) -> None:
    expected = reference(net, x, F, "gelu", lambda call, out: torch.zeros_like(out) if call == 0 else out)
    with model.trace(x, compile=compile) as tracer:
        if in_place:
            model.layers[0].source.F_gelu_0.output[:] = 0.0
        else:
            model.layers[0].source.F_gelu_0.output = torch.zeros(2, 3, 4)
        out = model.output.save()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert not torch.equal(out, net(x))
    assert not tracer.report.breaks


@both
def test_an_operation_in_a_loop_occurs_once_for_each_turn(
    model: NNsight, net: Net, x: torch.Tensor, reference: Reference, compile: bool
) -> None:
    expected = reference(net, x, F, "gelu", lambda call, out: out * 2.0 if call == 1 else out)
    with model.trace(x, compile=compile) as tracer:
        for _step in tracer.iter[1]:
            model.layers[0].source.F_gelu_0.output *= 2.0
        out = model.output.save()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@both
def test_skipping_an_operation(model: NNsight, net: Net, x: torch.Tensor, compile: bool) -> None:
    with model.trace(x, compile=compile):
        model.layers[1].source.self_combine_0.skip(torch.ones(2, 3, 4))
        out = model.output.save()
    torch.testing.assert_close(out, net.head(net.loud(torch.ones(2, 3, 4))), rtol=0, atol=0)


@both
def test_calls_of_submodules_are_operations_as_well_as_modules(
    model: NNsight, net: Net, x: torch.Tensor, compile: bool
) -> None:
    with model.trace(x, compile=compile):
        given = model.layers[0].source.self_q_0.input.save()
        assert compile or "forward" in vars(net.layers[0])
        inside = model.layers[0].q.output.save()
        returned = model.layers[0].source.self_q_0.output.save()
    torch.testing.assert_close(given, x, rtol=0, atol=0)
    torch.testing.assert_close(inside, net.layers[0].q(x), rtol=0, atol=0)
    torch.testing.assert_close(returned, inside, rtol=0, atol=0)


@both
def test_a_torch_module_can_be_looked_into(model: NNsight, net: Net, x: torch.Tensor, compile: bool) -> None:
    assert list(model.head.source) == ["F_linear_0"]
    with model.trace(x, compile=compile):
        weight = model.head.source.F_linear_0.inputs[0][1].save()
        model.head.source.F_linear_0.output[..., 0] = 7.0
        out = model.output.save()
    torch.testing.assert_close(weight, net.head.weight, rtol=0, atol=0)
    expected = net(x)
    expected[..., 0] = 7.0
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@both
def test_a_decorated_forward_keeps_its_decorators(model: NNsight, net: Net, x: torch.Tensor, compile: bool) -> None:
    with model.trace(x, compile=compile):
        inner = model.loud.source.torch_tanh_0.output.save()
        model.loud.source.torch_tanh_0.output[:] = 0.25
        outer = model.loud.output.save()
    assert torch.equal(inner, torch.full((2, 3, 4), 0.25))
    assert torch.equal(outer, torch.full((2, 3, 4), 0.5))


def plainly_louder(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same decorator without ``functools.wraps``."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2.0

    return wrapper


def either(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that picks another function at run time."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if args[1].sum() > 0 else other(*args, **kwargs)

    return wrapper


class Plainly(torch.nn.Module):
    @plainly_louder
    @plainly_louder
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Either(torch.nn.Module):
    forward = either(Plainly.forward, Decorated.forward)


@both
def test_a_decorator_without_wraps_is_looked_through(compile: bool) -> None:
    model, x = NNsight(Plainly(), compile={"backend": "eager"}), torch.ones(2, 3)
    assert model.source.names == ("torch_tanh_0",)
    with model.trace(x, compile=compile):
        model.source.torch_tanh_0.output[:] = 0.25
        outer = model.output.save()
    assert torch.equal(outer, torch.full((2, 3), 1.0))
    assert NNsight(Either()).source.names == ("args_sum_0", "function_0", "other_0")


def _weights(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    return scores_of(layer.q(x), layer.k(x), scale=0.5)


# -- functions within functions ------------------------------------------------------------------------------------------


@both
def test_looking_into_the_function_an_operation_calls(model: NNsight, net: Net, x: torch.Tensor, compile: bool) -> None:
    layer = net.layers[0]
    with model.trace(x, compile=compile):
        logits = model.layers[0].source.weigh_0.source.torch_matmul_0.output.save()
        model.layers[0].source.weigh_0.source.torch_softmax_0.output[:] = 0.0
        mixed = model.layers[0].source.torch_matmul_0.output.save()
    torch.testing.assert_close(logits, layer.q(x) @ layer.k(x).transpose(-1, -2), rtol=0, atol=0)
    assert torch.equal(mixed, torch.zeros(2, 3, 4))


@both
def test_looking_into_a_method_with_super_and_private_names(
    model: NNsight, net: Net, x: torch.Tensor, reference: Reference, compile: bool
) -> None:
    inner = model.layers[0].source.self_combine_0.source
    assert list(inner) == ["combine_0"]
    expected = reference(net, x, torch, "add", lambda call, out: out * 0.5 if call == 0 else out)
    with model.trace(x, compile=compile):
        model.layers[0].source.self_combine_0.source.combine_0.source.torch_add_0.output *= 0.5
        out = model.output.save()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@both
def test_attention_weights_of_a_transformers_model(gpt2: Case, compile: bool) -> None:
    ids = gpt2.inputs()["input_ids"]
    module = gpt2.module
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            expected = module(ids, output_attentions=True).attentions[1]
            model = NNsight(module, compile={"backend": "eager"})
            with model.trace(ids, compile=compile):
                attention = model.transformer.h[1].attn.source.attention_interface_0
                inner = attention.source.nn_functional_softmax_0.output.save()
                weights = attention.output[1].save()
    finally:
        module.set_attn_implementation(before)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    torch.testing.assert_close(inner, expected, rtol=0, atol=0)


# -- when it is mentioned ------------------------------------------------------------------------------------------------


def proj_of(layer: Any) -> torch.Tensor:
    return layer.source.self_combine_0.output


@both
def test_mentioned_late_in_the_block(model: NNsight, net: Net, x: torch.Tensor, compile: bool) -> None:
    with model.trace(x, compile=compile):
        before = model.layers[0].output.save()
        direct = model.layers[1].source.weigh_0.output.save()
        by_helper = proj_of(model.layers[1]).save()
    torch.testing.assert_close(direct, _weights(net.layers[1], before), rtol=0, atol=0)
    torch.testing.assert_close(by_helper, net.layers[1](before), rtol=0, atol=0)


def test_a_name_made_at_run_time_works_where_the_model_has_not_been_captured(
    model: NNsight, net: Net, x: torch.Tensor
) -> None:
    with model.trace(x, compile=False):
        before = model.layers[0].output.save()
        found = getattr(model.layers[1].source, "weigh" + "_0").output.save()
    torch.testing.assert_close(found, _weights(net.layers[1], before), rtol=0, atol=0)


def test_a_name_made_at_run_time_after_the_capture_is_an_error_once(model: NNsight, net: Net, x: torch.Tensor) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with model.trace(x):
            before = model.layers[0].output.save()
            found = getattr(model.layers[1].source, "weigh" + "_0").output.save()
        return before, found

    with pytest.raises(MissedProviderError, match="run the trace again"):
        run()
    before, found = run()
    torch.testing.assert_close(found, _weights(net.layers[1], before), rtol=0, atol=0)


def test_a_name_inside_an_operation_after_the_capture_is_an_error_once(model: NNsight, net: Net, x: torch.Tensor) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with model.trace(x):
            before = model.layers[0].output.save()
            weigh = getattr(model.layers[1].source, "weigh" + "_0")
            found = getattr(weigh.source, "torch_softmax" + "_0").output.save()
        return before, found

    with pytest.raises(MissedProviderError, match="run the trace again"):
        run()
    before, found = run()
    torch.testing.assert_close(found, _weights(net.layers[1], before), rtol=0, atol=0)


class Weights:
    """As helper libraries have them: the names are behind a special method, a property, or a function in an attribute."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.product = lambda layer: layer.source.weigh_0.source.torch_matmul_0.output

    def __getitem__(self, layer: int) -> Any:
        return self.model.layers[layer].source.weigh_0.source.torch_softmax_0.output

    @property
    def combined(self) -> Any:
        return self.model.layers[1].source.self_combine_0.output


@pytest.mark.parametrize("how", ["variable", "attribute", "partial", "method"])
def test_names_behind_objects_are_found_before_the_capture(net: Net, x: torch.Tensor, how: str) -> None:
    wrapped = NNsight(net, compile={"backend": "eager"})
    weights = Weights(wrapped)
    if how == "attribute":
        wrapped.weights = weights
    read = weights.__getitem__ if how == "method" else functools.partial(Weights.__getitem__, weights)
    with wrapped.trace(x) as tracer:
        before = wrapped.layers[0].output.save()
        if how == "attribute":
            found = wrapped.weights[1].save()
        elif how == "variable":
            product = weights.product(wrapped.layers[1]).save()
            found = weights[1].save()
            combined = weights.combined.save()
        else:
            found = read(1).save()
    assert tracer.report.mode == "compiled"
    torch.testing.assert_close(found, _weights(net.layers[1], before), rtol=0, atol=0)
    if how == "variable":
        torch.testing.assert_close(torch.softmax(product * 0.5, dim=-1), found)
        torch.testing.assert_close(combined, net.layers[1](before), rtol=0, atol=0)


def test_operations_that_were_passed_uncounted_are_an_error_where_the_count_matters(
    model: NNsight, net: Net, x: torch.Tensor
) -> None:
    with pytest.raises(OutOfOrderError, match="Mention it earlier"):
        with model.trace(x, compile=False):
            model.layers[0].output.save()
            getattr(model.layers[0].source, "F_gelu" + "_0").output.save()
    fresh = NNsight(Net())
    with pytest.raises(OutOfOrderError, match="Mention it earlier"):
        with fresh.trace(x):
            fresh.layers[0].output.save()
            getattr(fresh.layers[0].source, "weigh" + "_0").output.save()


def test_passed_operations_are_out_of_order(model: NNsight, x: torch.Tensor) -> None:
    for compile in (False, True):
        with pytest.raises(OutOfOrderError, match="weigh_0"):
            with model.trace(x, compile=compile):
                model.layers[0].source.self_combine_0.output.save()
                model.layers[0].source.weigh_0.output.save()


# -- cost ----------------------------------------------------------------------------------------------------------------


def test_the_same_block_again_captures_and_records_nothing(model: NNsight, x: torch.Tensor) -> None:
    def run() -> torch.Tensor:
        with model.trace(x):
            out = model.layers[0].source.weigh_0.source.torch_softmax_0.output.save()
        return out

    first = run()
    fx.counters.reset()
    assert torch.equal(run(), first)
    with model.trace(x):
        model.layers[0].source.F_gelu_0.output.save()
    assert fx.counters.captures == 0
    assert fx.counters.recordings == 1


def test_a_thread_waits_until_another_has_opened_what_both_ask_for(net: Net, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = NNsight(net)
    opening, go_on = threading.Event(), threading.Event()
    replace = ModuleTree._replace_forward

    def late(*args: Any) -> None:
        opening.set()
        assert go_on.wait(60)
        replace(*args)

    monkeypatch.setattr(ModuleTree, "_replace_forward", late)
    found: dict[str, torch.Tensor] = {}

    def work(name: str) -> None:
        with model.trace(x):
            weights = model.layers[0].source.weigh_0.output.save()
        found[name] = weights

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    assert opening.wait(60)
    threads[1].start()
    threads[1].join(0.5)  # it has asked by then, and would have run
    go_on.set()
    for thread in threads:
        thread.join(60)
    same(found["first"], _weights(net.layers[0], x))
    same(found["second"], found["first"])


# -- what cannot be looked into --------------------------------------------------------------------------------------------


def test_an_unknown_operation_names_those_near_it(model: NNsight) -> None:
    with pytest.raises(AttributeError, match=r"no operation `F_gelu_1`\. Did you mean `F_gelu_0`"):
        model.layers[0].source.F_gelu_1  # noqa: B018


def test_a_submodule_has_its_own_source(model: NNsight) -> None:
    with pytest.raises(SourceError, match=r"calls a module\. Use the module's own envoy: `model\.layers\.0\.q\.source`"):
        model.layers[0].source.self_q_0.source  # noqa: B018


class Processor:
    """An object that is called, as the attention processors of diffusers are."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, owner: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.mul(owner.lin(x), self.scale)
        return torch.tanh(scaled)


class Processed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)
        self.processor = Processor(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.processor
        return self.processor(self, x) + chosen(self, x)


@both
def test_looking_into_the_call_of_an_object(x: torch.Tensor, compile: bool) -> None:
    model = NNsight(Processed(), compile={"backend": "eager"})
    assert model.source.self_processor_0.source.names == ("owner_lin_0", "torch_mul_0", "scaled_0", "torch_tanh_0")
    with torch.no_grad(), model.trace(x, compile=compile):
        product = model.source.self_processor_0.source.torch_mul_0.output.clone().save()
        model.source.self_processor_0.source.scaled_0.output[:] = 0.0
        tanh = model.source.chosen_0.source.torch_tanh_0.output.save()
        out = model.output.save()
    with torch.no_grad():
        same(product, model._module.lin(x) * 3)
        same(tanh, torch.tanh(product))
        same(out, tanh)


def test_what_is_no_function_of_python_has_no_source(model: NNsight) -> None:
    with pytest.raises(SourceError, match="C function"):
        model.layers[0].source.torch_matmul_0.source  # noqa: B018
    with pytest.raises(SourceError, match="only the source of functions"):
        model.layers[0].source.range_0.source  # noqa: B018


@both
def test_a_function_that_only_a_run_can_tell_is_listed_from_that_run_on(net: Net, x: torch.Tensor, compile: bool) -> None:
    model = NNsight(net, compile={"backend": "eager"})
    source = model.layers[0].source.weigh_0.source
    assert repr(source).endswith("known after the next run of the model>") and "names" in dir(source)
    with pytest.raises(SourceError, match="only known while the model runs. Trace the model once"):
        list(source)
    with model.trace(x, compile=compile):
        model.output.save()
    assert source.names == model.layers[0].source.weigh_0.source.names and source.names[0] in dir(source)
    assert f"{source.names[0]} " in repr(source)
    with model.trace(x, compile=compile):
        first = getattr(source, source.names[0]).output.save()
    assert first is not None


@both
def test_an_unknown_operation_of_such_a_function(net: Net, x: torch.Tensor, compile: bool) -> None:
    model = NNsight(net, compile={"backend": "eager"})
    for _ in range(2):
        with pytest.raises(AttributeError, match=r"`model\.layers\.0\.source\.weigh_0\.source` has no operation `pick_9`.*There are: "):
            with model.trace(x, compile=compile):
                model.layers[0].source.weigh_0.source.pick_9.output.save()


def test_code_from_a_string_has_no_source(x: torch.Tensor) -> None:
    namespace: dict[str, Any] = {"torch": torch}
    exec("class Made(torch.nn.Module):\n    def forward(self, x):\n        return torch.tanh(x)\n", namespace)
    with pytest.raises(SourceError, match="no source text"):
        NNsight(namespace["Made"]()).source  # noqa: B018


def test_a_forward_set_on_the_instance(x: torch.Tensor) -> None:
    net = Net()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    net.loud.forward = forward  # type: ignore[method-assign]
    model = NNsight(net)
    with model.trace(x):
        found = model.loud.source.torch_sigmoid_0.output.save()
        model.loud.source.torch_sigmoid_0.output = torch.zeros_like(found)
        out = model.loud.output.save()
    assert torch.equal(out, torch.zeros(2, 3, 4))
    assert net.loud.forward is forward


def test_a_model_with_accelerate_hooks(x: torch.Tensor) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Doubling(ModelHook):
        def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
            return output * 2.0

    net = Net()
    add_hook_to_module(net.loud, Doubling())
    with torch.no_grad():
        plain = net(x)
        model = NNsight(net)
        with model.trace(x):
            inner = model.loud.source.torch_tanh_0.output.save()
            outer = model.loud.output.save()
            out = model.output.save()
    torch.testing.assert_close(outer, inner * 4.0, rtol=0, atol=0)
    torch.testing.assert_close(out, plain, rtol=0, atol=0)
