"""Invokes: blocks side by side in one run, what they share, and how they wait for each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nnsight
from nnsight import CONFIG, NNsight
from nnsight.runtime import OutOfOrderError

from ..conftest import Hooks, Rows, agree, assert_no_instrumentation, both, close, same


@pytest.fixture
def model() -> Rows:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    return Rows(net, compile={"backend": "eager"})


# -- the order of things ----------------------------------------------------------------------------------------------


@both
def test_blocks_take_turns_in_the_order_of_their_definition(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    """The bodies run to their first access before the model starts, and what is between them before that."""
    order: list[str] = []
    if not compile:
        model._module.register_forward_pre_hook(lambda *_: order.append("model"))
    with model.trace(compile=compile) as tracer:
        order.append("before")
        with tracer.invoke(a):
            order.append("first starts")
            model[0].output  # noqa: B018
            order.append("first at 0")
            model[2].output  # noqa: B018
            order.append("first at 2")
        order.append("between")
        with tracer.invoke(b):
            order.append("second starts")
            model[0].output  # noqa: B018
            order.append("second at 0")
            model[2].output  # noqa: B018
            order.append("second at 2")
        order.append("after")
    expected = ["before", "between", "after", "first starts", "second starts", *(["model"] * (not compile))]
    assert order == [*expected, "first at 0", "second at 0", "first at 2", "second at 2"]


@both
def test_only_saved_names_are_bound_afterwards(model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool) -> None:
    def run() -> set[str]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                kept_one = model.output.save()
                lost_one = kept_one + 1
            with tracer.invoke(b):
                kept_two = model.output.save()
                lost_two = 3
        return set(locals())

    assert run() >= {"kept_one", "kept_two", "tracer"}
    assert not run() & {"lost_one", "lost_two"}


# -- variables of other invokes -----------------------------------------------------------------------------------


def test_a_value_of_an_earlier_location_goes_to_another_invoke(model: Rows, a: torch.Tensor, b: torch.Tensor) -> None:
    hooked = Hooks(model._module)
    hooked.output("0", hooked.keep("hidden", lambda h: h[:2]))
    hooked.output("2", lambda out: torch.cat([out[:2], out[2:] + hooked.seen["hidden"]]))
    expected = hooked(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                hidden = model[0].output
            with tracer.invoke(b):
                model[2].output = model[2].output + hidden
                out = model.output.save()
        return out, tracer

    agree(run, expected[2:])
    assert not torch.equal(expected[2:], model._module(b)), "the reference itself was changed"


@both
def test_a_value_of_the_same_location_needs_a_barrier(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    with pytest.raises(NameError, match="hidden") as caught:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model[0].input  # noqa: B018
                hidden = model[0].output
            with tracer.invoke(b):
                model[0].output = hidden
    assert re.search(r"`hidden` is assigned in the invoke at .*test_invoker.py:\d+", str(caught.value))
    assert "`barrier = tracer.barrier(2)`" in str(caught.value) and "`barrier()`" in str(caught.value)
    assert "different names" not in str(caught.value)
    assert_no_instrumentation(model._module)


@both
def test_a_variable_that_two_invokes_assign_needs_two_names(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    with pytest.raises(NameError, match="`hidden` is assigned in the invoke at .* different names"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                hidden = model[0].output
            with tracer.invoke(b):
                hidden = hidden + model[1].output


def test_a_barrier_hands_a_value_over_at_one_location(model: Rows, a: torch.Tensor, b: torch.Tensor) -> None:
    patched = Hooks(model._module).output("0", lambda h: torch.cat([h[:2], h[:2] * 2.0]))
    expected = patched(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(a):
                hidden = model[0].output
                barrier()
                one = model.output.save()
            with tracer.invoke(b):
                barrier()
                model[0].output = hidden * 2.0
                two = model.output.save()
        return (one, two), tracer

    agree(run, (expected[:2], expected[2:]))


def test_a_barrier_may_be_used_again(model: Rows, a: torch.Tensor, b: torch.Tensor) -> None:
    hooked = Hooks(model._module)
    hooked.output("0", lambda h: torch.cat([h[:2], h[:2]]))
    hooked.output("2", lambda out: torch.cat([out[2:] + 1.0, out[2:]]))
    expected = hooked(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(a):
                there = model[0].output
                barrier()
                barrier()
                model[2].output = back + 1.0  # noqa: F821 - bound by the other invoke
                one = model.output.save()
            with tracer.invoke(b):
                barrier()
                model[0].output = there
                back = model[2].output
                barrier()
                two = model.output.save()
        return (one, two), tracer

    agree(run, (expected[:2], expected[2:]))


class Box:
    """Something with attributes."""


@both
@pytest.mark.parametrize("around", ["session", "no_grad"])
def test_the_variable_of_a_loop_inside_another_block_is_the_one_of_its_turn(
    model: Rows, a: torch.Tensor, around: str, compile: bool
) -> None:
    turns = list(range(3))
    if around == "session":
        with model.session():
            with model.trace(a, compile=compile):
                hidden = [model[turn].output for turn in turns]
            with model.trace(compile=compile) as tracer:
                outs = [].save()
                for turn in turns:
                    with tracer.invoke(a):
                        outs.append(model[2].output + hidden[turn])
    else:
        with model.trace(compile=compile) as tracer:
            outs = [].save()
            with torch.no_grad():
                for turn in turns:
                    with tracer.invoke(a):
                        outs.append(model[2].output + model._module[: turn + 1](a))
    net = model._module
    close(outs, [net(a) + net[: turn + 1](a) for turn in turns])  # the rows are computed together with others


@both
def test_a_loop_around_an_invoke_and_a_loop_in_another_have_one_variable(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    with model.trace(compile=compile) as tracer:
        turns, counted = [].save(), [].save()
        with tracer.invoke(a):
            for turn in range(3):
                model[turn].output.save()
            for number in range(3):
                (model[2].output + number).save()
        for turn in range(2):
            with tracer.invoke(b):
                turns.append(model[0].output.sum() * 0 + turn)
        number = 5
        while number < 7:
            with tracer.invoke(b):
                counted.append(model[0].output.sum() * 0 + number)
            number += 1
    assert [int(turn) for turn in turns] == [0, 1]
    assert [int(number) for number in counted] == [5, 6]


@both
def test_an_invoke_in_a_loop_sees_what_another_one_in_the_loop_assigns(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    with model.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        for _ in range(1):
            found = None
            with tracer.invoke(a):
                found = model[0].output.sum()
                barrier()
            with tracer.invoke(b):
                barrier()
                total = (model[1].output.sum() * 0 + found).save()
    close(total, model._module[0](a).sum())


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_invokes_fill_one_container(model: Rows, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
    """What one invoke puts into a dict, a list or an object is there for the others, and is left after the trace."""
    edit = Hooks(model._module).output("0", lambda h: torch.cat([h[:2] * 2.0, h[2:]]))
    edit.output("0", edit.keep("hidden"))
    out = edit(torch.cat([a, b]))
    hidden = edit.seen["hidden"]
    assert not torch.equal(hidden, model._module[0](torch.cat([a, b])))

    def run(compile: bool) -> tuple[Any, Any]:
        table, items, box = {}, [], Box()
        with model.trace(compile=compile) as tracer:
            if where == "inside":
                table, items, box = {}.save(), [].save(), nnsight.save(Box())
            with tracer.invoke(a):
                model[0].output *= 2.0
                table["a"] = model[0].output.save()
                table["of both"] = {"a": table["a"].sum()}
                items.append(model[2].output)
                box.a = model.output
            with tracer.invoke(b):
                table["b"] = model[0].output.save()
                table["of both"]["b"] = table["b"].sum()
                items.append(model[2].output)
                box.b = items[-1] * 1.0
        return (table, items, box.a, box.b), tracer

    agree(
        run,
        (
            {"a": hidden[:2], "of both": {"a": hidden[:2].sum(), "b": hidden[2:].sum()}, "b": hidden[2:]},
            [out[:2], out[2:]],
            out[:2],
            out[2:],
        ),
    )


@pytest.fixture
def _isolated() -> Iterator[None]:
    CONFIG.APP.CROSS_INVOKER = False
    yield
    CONFIG.APP.CROSS_INVOKER = True


@both
@pytest.mark.usefixtures("_isolated")
def test_isolated_invokes_do_not_see_each_others_variables(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    with pytest.raises(NameError, match="hidden.*CROSS_INVOKER is off"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                hidden = model[0].output
            with tracer.invoke(b):
                model[2].output = hidden


@both
@pytest.mark.usefixtures("_isolated")
def test_isolated_invokes_still_see_what_is_around_them_and_save(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    scale, log = 2.0, []
    with model.trace(compile=compile) as tracer:
        offset = 1.0
        with tracer.invoke(a):
            model[0].output = model[0].output * scale
            offset = 100.0
            one = model.output.save()
            log.append("one")
        with tracer.invoke(b):
            model[0].output = model[0].output + offset
            two = model.output.save()
            log.append("two")
    edit = Hooks(model._module).output("0", lambda h: torch.cat([h[:2] * 2.0, h[2:] + 1.0]))
    same(torch.cat([one, two]), edit(torch.cat([a, b])))
    assert log == ["one", "two"]


# -- ends and mistakes ------------------------------------------------------------------------------------------------


@both
def test_an_error_in_one_invoke_ends_the_run_at_its_line(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    with pytest.raises(KeyError, match="mistake") as caught:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                kept = model[0].output.save()
                model[1].output  # noqa: B018
                raise KeyError("mistake")
            with tracer.invoke(b):
                lost = model.output.save()
    assert caught.traceback[-1].path.name == "test_invoker.py"
    assert "raise KeyError" in str(caught.traceback[-1].statement)
    if not compile:  # compiled, the failure comes before the graph runs
        same(kept, model._module[0](torch.cat([a, b]))[:2])
    assert "lost" not in locals()
    assert_no_instrumentation(model._module)


@both
def test_out_of_order_within_an_invoke_and_in_order_across(
    model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool
) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(a):
            late = model[2].output.save()
        with tracer.invoke(b):
            early = model[0].output.save()
    whole = torch.cat([a, b])
    same((late, early), (model._module(whole)[:2], model._module[0](whole)[2:]))
    with pytest.raises(OutOfOrderError, match="Value was missed"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model[2].output  # noqa: B018
                model[0].output  # noqa: B018
            with tracer.invoke(b):
                pass


@both
def test_a_value_read_before_the_invokes_has_no_model_to_come_from(model: Rows, a: torch.Tensor, compile: bool) -> None:
    opened: list[str] = []
    with pytest.raises(ValueError, match="The model did not execute"):
        with model.trace(compile=compile) as tracer:
            model[0].output  # noqa: B018
            opened.append("never")
            with tracer.invoke(a):
                pass
    assert not opened


@both
def test_invokes_without_any_input(model: Rows, compile: bool) -> None:
    ran: list[str] = []
    with pytest.raises(ValueError, match="The model did not execute"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke():
                ran.append("never")
    assert not ran


@both
def test_a_stop_in_one_invoke_ends_the_run_for_all(model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool) -> None:
    reached: list[str] = []
    for _ in range(2):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                first = model[0].output.save()
                other = model[1].output
                other *= 2
                other.save()
                tracer.stop()
                reached.append("after the stop")
            with tracer.invoke(b):
                second = model[0].output.save()
                third = model[1].output.save()  # the same location, which is finished first
            with tracer.invoke():
                cache = tracer.cache()
                model[1].input  # noqa: B018
        hidden = model._module[0](torch.cat([a, b]))
        same((first, second, other, third), (hidden[:2], hidden[2:], hidden.tanh()[:2] * 2, hidden.tanh()[2:]))
        same(cache["model.1"].output, torch.cat([other, third]))
        assert list(cache) == ["model.0", "model.1"]
    assert not reached
    assert_no_instrumentation(model._module)


@both
def test_what_lies_behind_a_stop_is_out_of_order(model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool) -> None:
    for _ in range(2):
        with pytest.raises(OutOfOrderError, match=r"`model\.output\.i0` was not provided: another block had called tracer\.stop"):
            with model.trace(compile=compile) as tracer:
                with tracer.invoke(a):
                    model[0].output.save()
                    tracer.stop()
                with tracer.invoke(b):
                    model[0].output.save()
                    model.output.save()
        with pytest.raises(OutOfOrderError, match=r"`model\.0\.output\.i0` was not provided"):
            with model.trace(compile=compile) as tracer:
                with tracer.invoke(a):
                    tracer.stop()  # before the model
                with tracer.invoke(b):
                    model[0].output.save()
        caught: list[torch.Tensor] = []
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model[1].output.save()
                tracer.stop()
            with tracer.invoke(b):
                hidden = model[0].output
                try:
                    model.output.save()
                except OutOfOrderError:
                    caught.append(hidden * 2)
                    hidden.save()
        close(caught[0], model._module[0](b) * 2)
        close(hidden, model._module[0](b))
    with pytest.warns(UserWarning, match=r"model\.0\.output\.i1"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model[1].output.save()
                tracer.stop()
            with tracer.invoke(b):
                for step in tracer.iter[:2]:
                    kept = (model[0].output * (step + 1)).save()
    close(kept, model._module[0](b))
    assert_no_instrumentation(model._module)


# -- inputs -----------------------------------------------------------------------------------------------------------


@both
def test_an_invoke_knows_its_input(model: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool) -> None:
    for factor in (1.0, 2.0, 3.0):
        one_input, two_input = a * factor, b * factor
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(one_input) as one:
                seen = [*one.args, *one.inputs[0], model.input.clone()].save()
            assert one.args == (one_input,) and one.kwargs == {}  # between the invokes, too
            with tracer.invoke(two_input) as two:
                other = (two.inputs[0][0] * 2).save()
            with tracer.invoke() as three:
                none = [three.inputs, three.args, three.kwargs].save()
        assert all(torch.equal(found, one_input) for found in seen)
        assert torch.equal(other, two_input * 2)
        assert none == [None, (), {}]


# -- classes that join the inputs of all invokes at once ---------------------------------------------------------------


class AtOnce(NNsight):
    """``_batch`` gets all invokes; inputs are lists of numbers."""

    def _batch_size(self, *inputs: Any, **kwargs: Any) -> int:
        return len(inputs[0]) if inputs else 0

    def _batch(self, invokes: Any, function: Any) -> Any:
        self.__dict__["seen"] = (len(invokes), function)
        return (torch.cat([torch.tensor(inputs[0]) for inputs, _ in invokes]),), {}


@both
@pytest.mark.parametrize("fn", [None, "forward"])
def test_inputs_joined_at_once(compile: bool, fn: str | None) -> None:
    model = AtOnce(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)))
    one, two = [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]
    with model.trace(compile=compile, **({} if fn is None else {"fn": fn})) as tracer:
        with tracer.invoke(one):
            model[0].output[:] *= 2
            first = model[1].output.save()
        with tracer.invoke(two):
            second = model[1].output.save()
        with tracer.invoke():
            whole = model[0].output.save()
    assert model.seen[0] == 2 and callable(model.seen[1])
    module = model._module
    torch.testing.assert_close(first, module[1](module[0](torch.tensor(one)) * 2))
    torch.testing.assert_close(second, module(torch.tensor(two)))
    assert len(whole) == 3


@both
def test_a_single_input_joined_at_once(compile: bool) -> None:
    """``_batch`` also prepares the input of a trace, of a scan, and of a call without a block."""
    model = AtOnce(torch.nn.Linear(2, 3))
    with model.trace([[1.0, 2.0]], compile=compile):
        out = model.output.save()
    assert model.seen == (1, model._module)
    assert torch.equal(out, model._module(torch.tensor([[1.0, 2.0]])))
    with model.scan([[1.0, 2.0], [3.0, 4.0]]):
        shape = nnsight.save(model.output.shape)
    assert shape == (2, 3)
    assert torch.equal(model.trace([[1.0, 2.0]], trace=False), out)


def test_a_batcher_class_is_reported_to_have_no_effect() -> None:
    class Own(AtOnce):
        _batcher_class = object

    model = Own(torch.nn.Linear(2, 3))
    with pytest.warns(UserWarning, match="`Own._batcher_class` has no effect") as caught, model.trace() as tracer:
        with tracer.invoke([[1.0, 2.0]]):
            one = model.output.save()
        with tracer.invoke([[3.0, 4.0]]):
            pass
    assert len(one) == 1
    assert caught[0].filename == __file__


def test_an_input_without_rows_among_those_joined_at_once() -> None:
    model = AtOnce(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"`AtOnce\._batch_size` found no rows in the input of invoke 1"), model.trace() as tracer:
        with tracer.invoke([[1.0, 2.0]]):
            pass
        with tracer.invoke(scale=2.0):
            pass


# -- errors that something catches ------------------------------------------------------------------------------------


class Catching(torch.nn.Module):
    """Has code that catches the errors of a module, and modules that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused, self.other = (torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except Exception:
            x = x * 0
        return self.second(x)


@pytest.fixture
def catching() -> Rows:
    return Rows(Catching(), compile={"backend": "eager"})


@both
def test_a_block_that_catches_a_missed_location_may_miss_another(catching: Rows, a: torch.Tensor, compile: bool) -> None:
    """The block ended without an error at its second location, and the rest of it did not run."""
    with pytest.raises(OutOfOrderError, match=r"model\.other\.output"):
        with catching.trace(a, compile=compile):
            try:
                catching.unused.output  # noqa: B018
            except OutOfOrderError:
                catching.other.output  # noqa: B018


@both
@pytest.mark.parametrize("waits_first", [True, False])
def test_a_block_that_catches_a_missed_location_releases_a_barrier(
    catching: Rows, a: torch.Tensor, compile: bool, waits_first: bool
) -> None:
    order: list[str] = []
    with catching.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        if waits_first:
            with tracer.invoke():
                barrier()
                order.append("released")
        with tracer.invoke(a):
            try:
                catching.unused.output  # noqa: B018
            except OutOfOrderError:
                order.append("caught")
            barrier()
        if not waits_first:
            with tracer.invoke():
                barrier()
                order.append("released")
    assert order == ["caught", "released"]


@both
def test_a_loop_that_catches_everything_ends_with_the_model(catching: Rows, a: torch.Tensor, compile: bool) -> None:
    steps: list[int] = []
    with pytest.warns(UserWarning, match="The loop ended"), catching.trace(a, compile=compile) as tracer:
        for step in tracer.iter[:]:
            try:
                catching.second.output  # noqa: B018
                steps.append(step)
            finally:
                catching.first.next().output  # noqa: B018
    assert steps == [0]


@both
def test_a_model_cannot_catch_the_error_of_a_replacement(catching: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool) -> None:
    """The error occurs when the rows of the invokes are joined, which is in a call of the model."""
    with pytest.raises(ValueError, match=r"model\.first\.output"):
        with catching.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                catching.first.output = torch.zeros(len(a) + 3, 4)
            with tracer.invoke(b):
                catching.output.save()


@both
def test_a_model_cannot_catch_the_error_of_a_skip(catching: Rows, a: torch.Tensor, b: torch.Tensor, compile: bool) -> None:
    with pytest.raises(ValueError, match="skipped by some invokes and not by others"):
        with catching.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                catching.first.skip(a)
            with tracer.invoke(b):
                catching.output.save()


@both
def test_a_name_of_an_invoke_is_unknown_in_the_body_of_the_trace(model: Rows, a: torch.Tensor, compile: bool) -> None:
    with pytest.raises(NameError, match="`hidden` is assigned in the invoke at .*test_invoker.py:.* runs before its invokes"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                hidden = model[0].output
            hidden = hidden + 1
