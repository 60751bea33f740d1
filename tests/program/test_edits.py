"""Compiled edits: one program for all calls, with parameters; the result is that of the edits as Python."""

from __future__ import annotations

import copy
import linecache
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from nnsight import NNsight, UncompiledWarning, fx
from nnsight.remote import NotExpressibleError

from .test_bound import stack

ALPHA = 4.0
LIST: list[torch.Tensor] = []


def edited(model: Any, direction: torch.Tensor) -> Any:
    alpha = ALPHA
    with model.edit() as steered:
        model[1].output[:] += alpha * direction
    return steered


def by_hand(net: nn.Module, x: torch.Tensor, direction: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    out: torch.Tensor = net[3](net[2](net[1](net[0](x)) + alpha * direction))
    return out


@pytest.mark.parametrize("grad", [True, False])
def test_parameters_take_effect_at_the_next_call(grad: bool) -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    steered = edited(NNsight(net), direction)
    steered.compile(backend="aot_eager")
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(steered(x), by_hand(net, x, direction))
        assert list(steered.params) == ["alpha", "direction"]
        fx.counters.reset()
        for alpha in (6.0, 0.5):
            steered.params["alpha"] = alpha
            torch.testing.assert_close(steered(x), by_hand(net, x, direction, alpha))
        direction += 1.0
        torch.testing.assert_close(steered(x), by_hand(net, x, direction, 0.5))
        steered.params["direction"] = other = torch.randn(6)
        torch.testing.assert_close(steered(x), by_hand(net, x, other, 0.5))
        assert (fx.counters.captures, fx.counters.recordings, fx.counters.compiles) == (0, 0, 0)


def test_no_python_of_an_edit_runs_once_it_is_known() -> None:
    net, x, calls = stack(), torch.randn(3, 6), []

    def doubled(value: torch.Tensor) -> torch.Tensor:
        calls.append(value.shape)
        return 2 * value

    model = NNsight(net)
    with model.edit() as steered:
        model[1].output = doubled(model[1].output)
    steered.compile(backend="aot_eager")
    for rows in (3, 3, 5, 7):
        y = torch.randn(rows, 6)
        torch.testing.assert_close(steered(y), net[3](net[2](2 * net[1](net[0](y)))))
    assert len(calls) == 1
    torch.testing.assert_close(steered(x).shape, (3, 6))


def test_gradients_flow_to_parameters_and_weights() -> None:
    net, x = stack(), torch.randn(3, 6)
    direction = torch.randn(6, requires_grad=True)
    steered = edited(NNsight(net), direction)
    steered.compile(backend="aot_eager")
    for _ in range(2):
        steered(x).square().sum().backward()
    ours, weight = direction.grad.clone(), net[0].weight.grad.clone()
    direction.grad = net[0].weight.grad = None
    for _ in range(2):
        by_hand(net, x, direction).square().sum().backward()
    torch.testing.assert_close(ours, direction.grad)
    torch.testing.assert_close(weight, net[0].weight.grad)


def test_values_set_before_the_first_call_count() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    steered = edited(NNsight(net), direction)
    steered.compile(backend="aot_eager")
    with pytest.raises(KeyError, match="known after the first call"):
        steered.params["alpha"]
    steered.params["alpha"] = 1.0
    torch.testing.assert_close(steered(x), by_hand(net, x, direction, 1.0))
    with pytest.raises(KeyError, match="`beta` is not a parameter of the edits.*alpha, direction"):
        steered.params["beta"] = 1.0


def test_a_new_value_is_that_of_the_variable(tmp_path: Path) -> None:
    """Traces, copies, files and functions that a user compiles run the Python of the edits, or record it."""
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    steered = edited(NNsight(net), direction)
    with steered.edit() as later:
        later[3].output[:] += 1.0
    steered.compile(backend="aot_eager")
    before = by_hand(net, x, direction)
    torch.testing.assert_close(steered(x), before)
    other, compiled = torch.randn(6), torch.compile(lambda x: steered(x) + 0, backend="aot_eager")
    for alpha in (1.0, np.float64(0.5), -3):
        steered.params["alpha"], steered.params["direction"] = alpha, other
        due = by_hand(net, x, other, alpha)
        steered.export_edits(tmp_path / "edits")
        read = NNsight(net)
        read.import_edits(tmp_path / "edits")
        with steered.edit() as again:
            again[3].output[:] += 1.0
        for found in (steered(x), compiled(x), copy.deepcopy(steered)(x), read(x), again(x) - 1):
            torch.testing.assert_close(found, due)
        for compile in (True, False):
            with steered.trace(x, compile=compile):
                found = steered.output.save()
            torch.testing.assert_close(found, due)
    other.zero_()
    with steered.trace(x):
        found = steered.output.save()
    torch.testing.assert_close((found, steered(x)), (by_hand(net, x, other), by_hand(net, x, other)))
    torch.testing.assert_close(later(x) - 1, before)  # a copy that was made before keeps its values


def test_an_edit_that_changes_its_own_tensor_runs_as_python() -> None:
    net, x, vector = stack(), torch.randn(3, 6), torch.randn(6)
    start = vector.clone()
    model = NNsight(net)
    with model.edit() as steered:
        vector.mul_(0.5)
        model[1].output[:] += vector
    with pytest.raises(NotExpressibleError, match="changes `vector` in place"):
        steered.bake(x)
    assert torch.equal(vector, start)
    steered.compile(backend="eager")
    with pytest.warns(UncompiledWarning, match="changes `vector` in place"):
        found = [steered(x) for _ in range(3)]
    torch.testing.assert_close(found, [by_hand(net, x, start * factor, 1.0) for factor in (0.5, 0.25, 0.125)])


def test_two_names_of_one_tensor_are_one_parameter() -> None:
    net, x, first = stack(), torch.randn(3, 6), torch.randn(6)
    model, second = NNsight(net), first
    with model.edit() as steered:
        model[1].output[:] += first
        model[2].output[:] += second
    steered.compile(backend="eager")
    steered(x)
    [name] = steered.params
    with pytest.raises(KeyError, match=f"it is the same tensor as `{name}`"):
        steered.params["second" if name == "first" else "first"] = torch.zeros(6)


def test_a_new_value_of_a_variable_of_a_module() -> None:
    """The block of a function reads the global variables of its module, which stay as they are."""
    space: dict[str, Any] = {"alpha": 2.0}
    source = "def edit(model):\n    with model.edit() as steered:\n        model[1].output[:] *= alpha\n    return steered\n"
    linecache.cache["<edits>"] = len(source), None, source.splitlines(True), "<edits>"
    exec(compile(source, "<edits>", "exec"), space)
    net, x = stack(), torch.randn(3, 6)
    steered = space["edit"](NNsight(net))
    steered.compile(backend="aot_eager")
    steered.params["alpha"] = 3.0
    with steered.trace(x):
        found = steered.output.save()
    due = net[3](net[2](net[1](net[0](x)) * 3))
    torch.testing.assert_close((found, steered(x)), (due, due))
    assert space["alpha"] == 2.0


def test_a_name_that_no_edit_has_is_refused_at_once() -> None:
    steered = edited(NNsight(stack()), torch.randn(6))
    steered.compile(backend="aot_eager")
    with pytest.raises(KeyError, match="`beta` is not a parameter of the edits.*alpha, direction"):
        steered.params["beta"] = 1.0


def test_two_edits_with_variables_of_one_name() -> None:
    net, x = stack(), torch.randn(3, 6)
    first, second = torch.randn(6), torch.randn(6)
    model = NNsight(net)

    def add(target: Any, layer: int, direction: torch.Tensor) -> Any:
        with target.edit() as result:
            target[layer].output[:] += direction
        return result

    steered = add(add(model, 1, first), 2, second)
    steered.compile(backend="aot_eager")
    expected = net[3](net[2](net[1](net[0](x)) + first) + second)
    torch.testing.assert_close(steered(x), expected)
    assert list(steered.params) == ["direction", "direction_2"]
    steered.params["direction_2"] = torch.zeros(6)
    torch.testing.assert_close(steered(x), net[3](net[2](net[1](net[0](x)) + first)))


def test_two_edits_with_floats_of_one_name() -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)

    def scale(target: Any, layer: int, alpha: float) -> Any:
        with target.edit() as result:
            target[layer].output *= alpha
        return result

    steered = scale(scale(model, 1, 2.0), 2, 3.0)
    steered.compile(backend="aot_eager")
    steered(x)
    assert list(steered.params) == ["alpha", "alpha_2"]
    steered.params["alpha_2"] = 5.0
    torch.testing.assert_close(steered(x), net[3](5.0 * net[2](2.0 * net[1](net[0](x)))))


def test_a_parameter_that_is_renamed_gets_no_name_of_a_variable() -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)

    def first(target: Any, alpha: torch.Tensor) -> Any:
        with target.edit() as result:
            target[1].output[:] += alpha
        return result

    def second(target: Any, alpha: torch.Tensor, alpha_2: torch.Tensor) -> Any:
        with target.edit() as result:
            target[2].output[:] += alpha
            target[2].output[:] *= alpha_2
        return result

    one, two, three = (torch.full((6,), number) for number in (1.0, 2.0, 3.0))
    steered = second(first(model, one), two, three)
    steered.compile(backend="aot_eager")
    steered(x)
    assert {name: value[0].item() for name, value in steered.params.items()} == {"alpha": 1.0, "alpha_2": 3.0, "alpha_3": 2.0}


def test_a_parameter_of_programs_of_several_sizes_is_one_tensor() -> None:
    net, alpha = stack(), 2.0
    model = NNsight(net)
    with model.edit() as steered:
        hidden = model[1].output
        hidden[hidden.shape[0] // 2] *= alpha
    steered.compile(backend="eager")
    with model.edit() as zeroed:
        hidden = model[1].output
        hidden[hidden.shape[0] // 2] = 0.0
    inputs = [torch.randn(rows, 6) for rows in (3, 6)]
    for x in inputs:
        steered(x)
    steered.params["alpha"] = 1.0
    steered.params["alpha"].zero_()
    for x in inputs:
        torch.testing.assert_close(steered(x), zeroed(x))


def test_parameters_of_edits_that_are_no_program_are_refused() -> None:
    model, x, alpha = NNsight(stack()), torch.randn(3, 6), 2.0
    with model.edit() as steered:
        if model[1].output.norm() > 0:
            model[2].output *= alpha
    steered.compile(backend="eager")
    steered.params["alpha"] = 3.0
    with pytest.warns(UncompiledWarning), pytest.raises(KeyError, match="`alpha`: these edits have no parameters.*needs values"):
        steered(x)
    with pytest.raises(KeyError, match="these edits have no parameters"):
        steered.params["alpha"] = 3.0


@pytest.mark.slow
def test_an_edit_that_looks_at_sizes_is_recorded_for_each(model: Any) -> None:
    with model.edit() as sized:
        hidden = model.transformer.h[1].output
        hidden[:, hidden.shape[1] // 2] = 0.0
    with model.edit() as plain:
        hidden = model.transformer.h[1].output
        hidden[:, hidden.shape[1] // 2] = 0.0
    sized.compile(backend="aot_eager")
    for length in (5, 8, 5, 11):
        ids = torch.randint(0, 1000, (1, length))
        torch.testing.assert_close(sized(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_decode_with_a_cache(model: Any, begun: bool) -> None:
    direction = torch.randn(model.config.n_embd)
    with model.edit() as steered:
        model.transformer.h[1].output[:, -1] += direction
    with model.edit() as plain:
        model.transformer.h[1].output[:, -1] += direction
    steered.compile(backend="aot_eager")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    ids = torch.randint(0, 1000, (2, 6))
    if begun:
        for cache in caches:
            plain(ids[:, :3], past_key_values=cache, use_cache=True)
    for step in range(4):
        given = ids if step == 0 else ids[:, step : step + 1]
        found, expected = (
            one(given, past_key_values=cache, use_cache=True).logits for one, cache in zip((steered, plain), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["value", "list"])
def test_an_edit_that_cannot_be_a_program_runs_as_python_and_says_so(kind: str) -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)
    LIST.clear()
    if kind == "value":
        with model.edit() as steered:
            if model[1].output.norm() > 0:
                model[2].output[:] = 1.0
    else:
        with model.edit() as steered:
            LIST.append(model[1].output)
            model[2].output[:] = 1.0
    steered.compile(backend="aot_eager")
    with pytest.warns(UncompiledWarning, match="run as Python in each call, because they cannot be a program"):
        found = steered(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(steered(x), found)
    torch.testing.assert_close(found, net[3](torch.ones(3, 6)))
    assert len(LIST) == (2 if kind == "list" else 0)
    assert all(type(item) is torch.Tensor for item in LIST)


def test_a_mistake_in_an_edit_is_raised_as_it_is_as_python() -> None:
    model, x = NNsight(stack()), torch.randn(3, 6)
    with model.edit() as edited:
        model[1].output[:] += torch.ones(5)
    edited.compile(backend="aot_eager")
    with pytest.warns(UncompiledWarning, match="cannot be a program"), pytest.raises(RuntimeError, match="size of tensor a"):
        edited(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_an_edit_that_looks_at_sizes_with_a_cache(model: Any) -> None:
    def made() -> Any:
        with model.edit() as edited:
            hidden = model.transformer.h[1].output
            hidden[:, hidden.shape[1] // 2] = 0.0
        return edited

    steered, plain = made(), made()
    steered.compile(backend="eager")
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for length in (4, 2, 3):
        ids = torch.randint(0, 1000, (1, length))
        found, expected = (
            one(ids, past_key_values=cache, use_cache=True).logits for one, cache in zip((steered, plain), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_edits_that_come_later_run_too() -> None:
    net, x, direction = stack(), torch.randn(3, 6), torch.randn(6)
    steered = edited(NNsight(net), direction)
    steered.compile(backend="aot_eager")
    steered(x)
    with steered.edit(inplace=True):
        steered[2].output[:] = 0.0
    torch.testing.assert_close(steered(x), net[3](torch.zeros(3, 6)))
    steered.clear_edits()
    torch.testing.assert_close(steered(x), net(x))


def test_params_of_a_module_that_has_some() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(AttributeError, match="has no attribute `params`"):
        NNsight(net).params  # noqa: B018
    net.params = {"of": "the module"}
    assert NNsight(net).params == {"of": "the module"}


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


@torch.no_grad()
def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3.0 * x


def _without(model: Any) -> None:
    with torch.no_grad():
        model[1].output = model[1].output * 3.0


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model[1].output[:, 0] *= 3.0
    model[2].output = model[2].output * 2.0


def _partly(model: Any) -> None:
    hidden = model[1].output
    with torch.set_grad_enabled(False):
        factor = hidden.norm(dim=-1, keepdim=True)
        with torch.enable_grad():
            other = hidden.mean(-1, keepdim=True)
    model[1].output = hidden / factor + other


def _switched(model: Any) -> None:
    hidden = model[1].output
    torch.set_grad_enabled(False)
    factor = hidden.norm(dim=-1, keepdim=True)
    torch.set_grad_enabled(True)
    model[1].output = hidden / factor


def _decorated(model: Any) -> None:
    model[1].output = model[1].output + tripled(model[1].output)


def _across(model: Any) -> None:
    with torch.no_grad():
        hidden = model[1].output * 2.0
        model[2].output = model[2].output + hidden


def _detached(model: Any) -> None:
    model[1].output = model[1].output * model[1].output.detach()


def _function(model: Any) -> None:
    model[1].output = Rounded.apply(model[1].output)


EDITS = [_without, _in_place, _partly, _switched, _decorated, _across, _detached, _function]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.filterwarnings("ignore:The edits of this compiled model run as Python")
def test_gradients_are_those_of_the_edits_as_python(edit: Any) -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)

    def gradients(call: Any) -> list[Any]:
        net.zero_grad(set_to_none=True)
        call(x).square().sum().backward()
        return [parameter.grad for parameter in net.parameters()]

    def made() -> Any:
        with model.edit() as edited:
            edit(model)
        return edited

    expected, steered = gradients(made()), made()
    steered.compile(backend="aot_eager")
    torch.testing.assert_close(gradients(steered), expected)
    torch.testing.assert_close(gradients(steered), expected)
    if edit is _function:
        with pytest.raises(NotExpressibleError, match="`Rounded` is an autograd.Function"):
            made().bake(x)
    else:
        torch.testing.assert_close(gradients(made().bake(x)), expected)


def _noise(model: Any) -> None:
    model[1].output = model[1].output + torch.randn_like(model[1].output)


def _integers(model: Any) -> None:
    model[1].output = model[1].output * torch.randint_like(model[1].output, 3, 9)


def _in_memory(model: Any) -> None:
    made = torch.zeros_like(model[1].output)
    made.random_(2, 7)
    model[1].output = model[1].output + made


def _dropped(model: Any) -> None:
    model[1].output = torch.nn.functional.dropout(model[1].output)


def _dropped_on_gpus(model: Any) -> None:
    model[1].output = torch.native_dropout(model[1].output, 0.5, True)[0]  # the operator of `dropout` on CUDA


def _outside(model: Any) -> None:
    model[1].output = model[1].output + torch.randn(3, 6)


@pytest.mark.parametrize("edit", [_noise, _integers, _in_memory, _dropped, _dropped_on_gpus, _outside])
@pytest.mark.filterwarnings("ignore:The edits of this compiled model run as Python")
def test_each_call_draws_the_numbers_that_the_edits_draw_as_python(edit: Any) -> None:
    net, x = stack(), torch.randn(3, 6)
    model = NNsight(net)

    def made() -> Any:
        with model.edit() as edited:
            edit(model)
        return edited

    def runs(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [call(x) for _ in range(3)]

    steered = made()
    steered.compile(backend="eager")
    steered(x)
    expected = runs(made())
    assert not torch.equal(expected[0], expected[1])
    torch.testing.assert_close(runs(steered), expected)
    if edit is not _outside:
        torch.testing.assert_close(runs(made().bake(x)), expected)
