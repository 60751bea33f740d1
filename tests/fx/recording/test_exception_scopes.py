"""Errors that a block catches are raised where it catches them, and are the errors of an eager trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greenlet import greenlet

from nnsight import NNsight, fx
from nnsight.fx.recording.execution import GraphBreakError
from nnsight.fx.recording.failing_calls import handler


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    return NNsight(net, compile={"backend": "eager"})


def _index(hidden: torch.Tensor) -> Any:
    return torch.zeros(2)[hidden.argmax(-1) + 7]


def _invert(hidden: torch.Tensor) -> Any:
    return torch.linalg.inv(hidden[:4, :4] * 0 + torch.zeros(4, 4))


def _factorize(hidden: torch.Tensor) -> Any:
    return torch.linalg.cholesky(-torch.eye(4) + 0 * hidden[0, 0])


def _assign(hidden: torch.Tensor) -> Any:
    hidden[hidden.argmax(-1) + 7] = 0.0


def _quantile(hidden: torch.Tensor) -> None:
    torch.quantile(hidden, hidden.abs().max() + 2.0)


def _lose(hidden: torch.Tensor) -> None:
    torch.nn.functional.binary_cross_entropy(hidden + 9.0, hidden)


def _scatter(hidden: torch.Tensor) -> None:
    hidden.scatter_(1, hidden.argmax(-1, keepdim=True) + 7, 0.0)


def _draw(hidden: torch.Tensor) -> None:
    torch.empty(4, 4).bernoulli_(hidden.abs() + 2.0)


ZERO = torch.zeros(4, dtype=torch.long)

DIVISIONS: list[Callable[[torch.Tensor], Any]] = [
    lambda hidden: hidden.long() // ZERO,
    lambda hidden: 3 // (hidden.long() * 0),
    lambda hidden: hidden.long() % (hidden.argmax() * 0),
    lambda hidden: 3 % (hidden.to(torch.uint8) * 0),
    lambda hidden: torch.fmod(hidden.long(), other=hidden.long() * 0),
    lambda hidden: torch.div(hidden.long(), ZERO, rounding_mode="trunc"),
    lambda hidden: hidden.long().remainder_(ZERO),
    lambda hidden: torch.ops.aten.floor_divide(hidden.long(), ZERO),
    torch.vmap(lambda row: row.long() // ZERO),
]

FAILING = [_index, _invert, _factorize, _assign, _quantile, _lose, _scatter, _draw, *DIVISIONS]


@pytest.mark.parametrize("function", FAILING)
def test_an_error_of_values_is_caught_by_the_block(model: Any, function: Callable[..., Any]) -> None:
    x = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)

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
    hidden = model._module[0](x)
    assert len(expected) == 3 and expected[1] != "no error"
    assert torch.equal(wanted, model._module[2](hidden * 2.0))
    for _ in range(2):
        notes, out, tracer = run(True)
        assert notes == expected
        assert torch.equal(out, wanted)
        assert [found.reason.endswith("inside a `try`") for found in tracer.report.breaks] == [True]


def test_elsewhere_such_calls_stay_in_the_graph(model: Any) -> None:
    """Modes of torch catch nothing, a clause of a `try` is outside of it, and most calls fail by no value."""
    x = torch.ones(2, 4)
    with model.trace(x) as tracer:
        hidden = model[0].output
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            rows = torch.arange(4.0)[hidden.argmax(-1)]
        try:
            twice = torch.softmax(hidden, -1) @ hidden.T
            twice += (hidden.long() // 3 + hidden.long() / (ZERO + 1) + hidden % ZERO.float()).sum() * 0
        except ValueError:
            twice = None
        finally:
            rows = rows + torch.arange(4.0)[hidden.argmax(-1)]
        for _ in tracer.iter[:1]:
            rows = torch.zeros(4).gather(0, hidden.argmax(-1)) + rows
        with tracer.iter[:1]:
            embedded = torch.nn.functional.embedding(model[1].output.argmax(-1), torch.eye(4)).save()
        out = (rows, twice).save()
    assert tracer.report.breaks == [] and embedded.shape == (2, 4)
    assert out[0].shape == (2,) and out[1] is not None


def test_an_invoke_is_no_with_around_its_block(model: Any) -> None:
    x = torch.ones(2, 4)
    with model.trace() as tracer:
        with tracer.invoke(x):
            rows = torch.arange(4.0)[model[0].output.argmax(-1)].save()
        with tracer.invoke():
            model[1].output = torch.linalg.inv(torch.eye(4) + model[0].output.mean())[:2]
    assert tracer.report.breaks == [] and rows.shape == (2,)


def test_with_one_graph_the_call_is_refused(model: Any) -> None:
    model = NNsight(model._module, compile={"backend": "eager", "fullgraph": True})
    with pytest.raises(
        GraphBreakError, match="`__getitem__` may fail because of values, inside a `try` at `model.0.output`"
    ):
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
def test_a_mistake_has_the_words_of_an_eager_trace(model: Any, mistake: Callable[..., Any]) -> None:
    x = torch.ones(2, 4)

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


# -- what catches ------------------------------------------------------------------------------------------------------


class Loud:
    """Drops index errors."""

    def __enter__(self) -> Loud:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        return kind is not None and issubclass(kind, IndexError)


def _harmless(note: Callable[[], None]) -> None:
    with torch.no_grad(), torch.enable_grad(), torch.set_grad_enabled(False), torch.inference_mode():
        note()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.random.fork_rng(devices=[]):
        note()
    for _ in range(2):
        with torch.no_grad() as torch_mode:
            note()
    del torch_mode


def _withs(note: Callable[[], None]) -> None:
    loud, several, no_grad = Loud(), [torch.no_grad], Loud
    with loud:
        note()
    with Loud(), torch.no_grad():
        note()
    with torch.no_grad(), contextlib.suppress(IndexError):
        note()
    with contextlib.suppress(IndexError) if several else torch.no_grad():
        note()
    with torch.no_grad() and loud:
        note()
    with several[0]():
        note()
    with no_grad():  # not torch's
        note()
    with contextlib.ExitStack():
        note()
    with torch.no_grad():
        with loud:
            with torch.no_grad():
                note()


def _tries(note: Callable[[], None]) -> None:
    try:
        note()
    except ValueError:
        raise KeyError from None
    try:
        with torch.no_grad():
            note()
    except BaseException:
        raise
    try:
        note()
    finally:
        pass
    try:
        pass
    except ValueError:
        pass
    else:
        try:
            raise ValueError
        except ValueError as error:
            with torch.no_grad():
                try:
                    note()
                except* IndexError:
                    del error


def _no_tries(note: Callable[[], None]) -> None:
    note()
    try:
        pass
    except ValueError:
        pass
    else:
        note()
    try:
        raise ValueError
    except ValueError:
        note()
    try:
        pass
    finally:
        note()
    with contextlib.suppress(ValueError):
        try:
            raise ValueError
        finally:
            with contextlib.suppress(IndexError):
                pass
    [note() for _ in range(1)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_harmless, [None] * 4),
        (_withs, ["a `with` that may catch it"] * 9),
        (_tries, ["a `try`"] * 4),
        (_no_tries, [None] * 5),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_may_catch_an_error(function: Callable[[Callable[[], None]], None], expected: list[str | None]) -> None:
    found: list[str | None] = []
    greenlet(lambda: function(lambda: found.append(handler()))).switch()  # as a block, which has no frames around it
    assert found == expected


def suppressed(hidden: torch.Tensor, notes: list[str]) -> None:
    with contextlib.suppress(IndexError):
        _index(hidden)
        notes.append("no error")


def expected_by_a_test(hidden: torch.Tensor, notes: list[str]) -> None:
    with pytest.raises(IndexError) as raised:
        _index(hidden)
    notes.append(raised.typename)


def dropped_by_a_finally(hidden: torch.Tensor, notes: list[str]) -> None:
    for _ in range(2):
        try:
            _index(hidden)
            notes.append("no error")
        finally:
            break  # noqa: B012


@pytest.mark.parametrize("attempt", [suppressed, expected_by_a_test, dropped_by_a_finally])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "does not fail"])
def test_an_error_of_values_that_something_drops(
    model: Any, attempt: Callable[..., Any], fails: bool
) -> None:
    if attempt is expected_by_a_test and not fails:
        return  # raises by itself
    x = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)

    def run(compile: bool) -> Any:
        notes: list[str] = []
        with model.trace(x, compile=compile) as tracer:
            hidden = model[0].output
            attempt(hidden if fails else hidden[:, :1] - 7, notes)
            notes.append("behind")
            model[1].output = hidden * 2.0
            out = model.output.save()
        return notes, out, tracer

    expected, wanted, _ = run(False)
    assert torch.equal(wanted, model._module[2](model._module[0](x) * 2.0))
    for _ in range(2):
        fx.counters.reset()
        notes, out, tracer = run(True)
        assert notes == expected and notes[-1] == "behind"
        assert torch.equal(out, wanted)
        (cut,) = tracer.report.breaks
        assert "`__getitem__` may fail because of values, inside a " in cut.reason
        assert (
            Path(__file__).read_text().splitlines()[cut.line - 1] == "    return torch.zeros(2)[hidden.argmax(-1) + 7]"
        )
    assert fx.counters.compiles == fx.counters.recordings == 0
