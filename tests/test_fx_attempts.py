"""Errors that a block catches are raised where it catches them, and are the errors of an eager trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.fx import attempts
from nnsight.fx.recording import GraphBreakError

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))


def _index(hidden: torch.Tensor) -> Any:
    return torch.zeros(2)[hidden.argmax(-1) + 7]


def _select(hidden: torch.Tensor) -> Any:
    return torch.zeros(2).index_select(0, (hidden[0] * 0 + 9).long())


def _embed(hidden: torch.Tensor) -> Any:
    return torch.nn.functional.embedding((hidden[0] * 0 + 9).long(), torch.zeros(2, 2))


def _invert(hidden: torch.Tensor) -> Any:
    return torch.linalg.inv(hidden[:4, :4] * 0 + torch.zeros(4, 4))


def _factorize(hidden: torch.Tensor) -> Any:
    return torch.linalg.cholesky(-torch.eye(4) + 0 * hidden[0, 0])


def _assign(hidden: torch.Tensor) -> Any:
    hidden[hidden.argmax(-1) + 7] = 0.0


FAILING = [_index, _select, _embed, _invert, _factorize, _assign]


@pytest.mark.parametrize("function", FAILING)
def test_an_error_of_values_is_caught_by_the_block(net: torch.nn.Module, function: Callable[..., Any]) -> None:
    model, x = NNsight(net, compile={"backend": "eager"}), torch.linspace(-1.0, 1.0, 16).reshape(4, 4)

    def run(compile: bool) -> Any:
        notes: list[str] = []
        with model.trace(x, compile=compile) as tracer:
            hidden = model[0].output
            notes.append("before")
            try:
                function(hidden)
                notes.append("no error")
            except (IndexError, RuntimeError) as error:
                notes.append(type(error).__name__)
                model[1].output = hidden * 2.0
            notes.append("behind")
            out = model.output.save()
        return notes, out, tracer

    expected, wanted, _ = run(False)
    hidden = net[0](x)
    assert len(expected) == 3 and expected[1] != "no error"
    assert torch.equal(wanted, net[2](hidden * 2.0))
    for _ in range(2):
        notes, out, tracer = run(True)
        assert notes == expected
        assert torch.equal(out, wanted)
        assert [found.reason.endswith("inside a `try`") for found in tracer.report.breaks] == [True]


def test_a_function_that_the_block_calls_catches(net: torch.nn.Module) -> None:
    model, x = NNsight(net, compile={"backend": "eager"}), torch.ones(2, 4)

    def looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        try:
            return table[index]
        except IndexError:
            return table.sum()

    def run(compile: bool) -> Any:
        with model.trace(x, compile=compile) as tracer:
            total = looked_up(torch.ones(3), model[0].output.argmax(-1) + 9).save()
        return total, tracer

    assert run(False)[0] == 3.0
    total, tracer = run(True)
    assert total == 3.0 and len(tracer.report.breaks) == 1


def test_elsewhere_such_calls_stay_in_the_graph(net: torch.nn.Module) -> None:
    """Neither a `with` nor a `finally` catches anything, and most calls fail by no value."""
    model, x = NNsight(net, compile={"backend": "eager"}), torch.ones(2, 4)
    with model.trace(x) as tracer:
        hidden = model[0].output
        with torch.no_grad():
            rows = torch.arange(4.0)[hidden.argmax(-1)]
        try:
            rows = rows + torch.arange(4.0)[hidden.argmax(-1)]
        finally:
            model[0].output[:, 0] = 0.0
        try:
            twice = torch.softmax(hidden, -1) @ hidden.T
        except ValueError:
            twice = None
        out = (rows, twice).save()
    assert tracer.report.breaks == [] and out[0].shape == (2,) and out[1] is not None


def test_with_one_graph_the_call_is_refused(net: torch.nn.Module) -> None:
    model = NNsight(net, compile={"backend": "eager", "fullgraph": True})
    with pytest.raises(GraphBreakError, match="`__getitem__` may fail because of values, inside a `try` at `model.0.output`"):
        with model.trace(torch.ones(2, 4)):
            try:
                torch.zeros(2)[model[0].output.argmax(-1)]
            except IndexError as error:
                raise ValueError from error


MISTAKES: list[Callable[[torch.Tensor], Any]] = [
    lambda hidden: hidden + torch.ones(9),
    lambda hidden: torch.zeros(1)[hidden],
    lambda hidden: torch.cat([hidden, torch.ones(1)]),
    lambda hidden: hidden.long().normal_(),
    lambda hidden: hidden[0].expand(3, 4).add_(1.0),
    lambda hidden: hidden.view(5, 5, 5),
    lambda hidden: hidden @ torch.ones(7, 7),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_has_the_words_of_an_eager_trace(net: torch.nn.Module, mistake: Callable[..., Any]) -> None:
    model, x = NNsight(net, compile={"backend": "eager"}), torch.ones(2, 4)

    def run(compile: bool) -> Any:
        notes: list[Any] = []
        torch.manual_seed(1)
        with model.trace(x, compile=compile):
            try:
                mistake(model[0].output)
            except Exception as error:
                notes.append((type(error), str(error)))
            out = model.output.save()
        return notes, out.tolist(), torch.rand(1).item()

    assert run(True) == run(False) == run(True)
    assert len(run(False)[0]) == 1


def _with_handlers(values: list[int]) -> list[bool]:
    found = [attempts.is_tried()]
    try:
        found.append(attempts.is_tried())
    except ValueError:
        found.append(attempts.is_tried())
    try:
        found.append(attempts.is_tried())
    finally:
        values.clear()
    try:
        found.append(attempts.is_tried())
    except BaseException:
        raise
    with torch.no_grad():
        found.append(attempts.is_tried())
    return found


def test_what_is_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames behind the block's do not count, so the function plays the block."""
    monkeypatch.setattr(attempts, "BLOCK_NAME", "_with_handlers")
    assert _with_handlers([]) == [False, True, False, True, False]
