"""Each capture of a model says why it was made, in words about the call."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch

from nnsight import NNsight, UncompiledWarning, fx
from nnsight.fx.capturing.captures import TooManyCapturesError
from nnsight.fx.capturing.reasons import Situation, reason_of

from ...conftest import same


class Reader(torch.nn.Module):
    """Takes what a language model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop, self.last = torch.nn.Embedding(9, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 9)

    def forward(
        self,
        input_ids: torch.Tensor,
        scale: torch.Tensor | None = None,
        use_cache: bool = True,
        mode: str = "plain",
        past_key_values: Any = None,
    ) -> torch.Tensor:
        hidden = self.drop(self.table(input_ids))
        if use_cache:
            hidden = hidden + 1
        if mode == "twice":
            hidden = hidden * 2
        if scale is not None:
            hidden = hidden * scale
        if past_key_values is not None:
            hidden = hidden + past_key_values.sum()
        return self.last(hidden)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 9


def why(model: NNsight, *args: Any, **kwargs: Any) -> list[str]:
    """Return the reasons of the captures of one trace, whose results are compared with the module's."""
    torch.manual_seed(1)
    with model.trace(*args, **kwargs) as tracer:
        hidden = model.table.output.save()
        out = model.output.save()
    torch.manual_seed(1)
    same(out, model._module(*args, **kwargs))
    same(hidden, model._module.table(args[0] if args else kwargs["input_ids"]))
    assert tracer.report.graphs == 1 and not tracer.report.breaks
    assert len(tracer.report.captures) <= 1
    return [capture.reason for capture in tracer.report.captures]


@pytest.fixture
def model() -> NNsight:
    return NNsight(Reader().eval(), compile={"backend": "eager"})


def test_each_capture_says_what_is_different_now(model: NNsight) -> None:
    module = model._module
    assert why(model, input_ids=ids(2, 5)) == ["the first call"]
    assert why(model, input_ids=ids(2, 5)) == []
    assert why(model, input_ids=ids(2, 9)) == ["another length of prompt: 5 -> 9, sizes are symbolic from here on"]
    assert why(model, input_ids=ids(2, 7)) == []
    assert why(model, input_ids=ids(2, 1)) == ["a prompt of 1 token"]
    assert why(model, input_ids=ids(1, 4)) == ["a batch of 1"]
    with torch.no_grad():
        assert why(model, input_ids=ids(2, 7)) == ["gradients are disabled now"]
    assert why(model, input_ids=ids(2, 7), use_cache=False) == ["`use_cache` is given now"]
    assert why(model, input_ids=ids(2, 7), use_cache=True) == ["`use_cache` is True now, not False"]
    assert why(model, input_ids=ids(2, 7), mode="twice") == ["`mode` is given now"]
    assert why(model, input_ids=ids(2, 7), mode="other") == ["`mode` is 'other' now, not 'twice'"]
    assert why(model, input_ids=ids(2, 7).int()) == ["`input_ids` has another dtype now: expected Long, actual Int"]
    assert why(model, input_ids=ids(2, 7), scale=torch.ones(4)) == ["`scale` is given now"]
    assert why(model, input_ids=ids(2, 7), scale=torch.ones(1, 4)) == ["`scale` has another rank now: expected 1, actual 2"]
    scale = torch.ones(4).requires_grad_()
    assert why(model, input_ids=ids(2, 7), scale=scale) == ["`scale` has another requires_grad now: expected requires_grad=0"]
    assert why(model, input_ids=ids(2, 7), past_key_values=torch.ones(3)) == ["`past_key_values` is given now"]
    module.train()
    assert why(model, input_ids=ids(2, 7)) == ["`model.drop` is in train mode now"]
    module.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert why(model, input_ids=ids(2, 7)) == ["autocast is on now"]
    module.bfloat16()
    (reason,) = why(model, input_ids=ids(2, 7))
    assert "another dtype now" in reason
    module.float()
    assert why(model, input_ids=ids(2, 7)) == []
    assert fx.counters.captures == sum(fx.counters.reasons.values())


def test_positional_arguments_have_the_names_of_parameters(model: NNsight) -> None:
    assert why(model, ids(2, 5)) == ["the first call"]
    assert why(model, ids(3, 5)) == ["another batch: 2 -> 3, sizes are symbolic from here on"]
    assert why(model, ids(3, 5), torch.ones(4)) == ["`scale` is given now"]


def test_the_report_shows_captures_and_their_kinds_are_counted(model: NNsight) -> None:
    for length, shown in ((5, "  captured because\n    the first call\n"), (6, "    another length of prompt: 5 -> 6"), (6, "")):
        with model.trace(ids(2, length)) as tracer:
            model.output.save()
        assert shown in str(tracer.report) and ("captured" in str(tracer.report)) == bool(shown)
    assert fx.counters.reasons == {"first": 1, "size": 1}
    model._module.last = torch.nn.Linear(4, 9)
    (reason,) = why(model, ids(2, 5))
    assert reason.startswith("modules of the model, their hooks")


@pytest.mark.slow
def test_no_number_of_situations_leaves_compiled_mode(model: NNsight, caplog: pytest.LogCaptureFixture) -> None:
    """More captures than dynamo allows, each of a kind of its own, and the first is still there."""
    limit = torch._dynamo.config.recompile_limit
    with caplog.at_level(logging.WARNING):
        for number in range(17):
            why(model, ids(2, 5), mode=f"mode {number}")
        captures = fx.counters.captures
        why(model, ids(2, 5), mode="mode 0")
    assert fx.counters.captures == captures == 17 > 2 * limit
    (message,) = caplog.messages
    assert "captured 17 times" in message and "`mode` is 'mode 16' now" in message and "Give the same value" in message
    assert torch._dynamo.config.recompile_limit == limit


class Changing(torch.nn.Linear):
    """Counts how often it runs as Python."""

    calls = 0

    @torch.compiler.disable
    def note(self) -> None:
        Changing.calls += 1

    def forward(self, x: torch.Tensor, flag: str = "a") -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.note()
        return super().forward(x) * len(flag)


def test_beyond_the_limit_of_ours_a_trace_runs_uncompiled_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Sequential(Changing(4, 4))

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module[0]

        def forward(self, x: torch.Tensor, flag: str) -> torch.Tensor:
            return self.inner(x, flag) + 1

    whole = Whole()
    model = NNsight(whole, compile={"backend": "eager", "max_captures": 2})

    def run(flag: str) -> Any:
        with model.trace(torch.ones(2, 4), flag) as tracer:
            model.inner.output *= 2
            out = model.output.save()
        same(out, (whole(torch.ones(2, 4), flag) - 1) * 2 + 1)
        return tracer.report

    for flag in ("a", "bb"):
        assert not run(flag).breaks
    with caplog.at_level(logging.WARNING, logger="torch"), pytest.warns(UncompiledWarning) as caught:
        report = run("ccc")
    (warning,) = caught
    message = str(warning.message)
    assert "captured 2 times" in message and "`flag` is 'ccc' now" in message and "max_captures=8" in message
    assert warning.filename == __file__
    (found,) = report.breaks
    assert found.reason.startswith("the model runs uncompiled") and found.filename == __file__
    assert not caplog.records  # torch says nothing of its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("dddd").breaks
        assert not run("a").breaks
        model(torch.ones(2, 4), "eeeee")
    assert fx.counters.captures == 2


def test_with_fullgraph_it_is_an_error() -> None:
    model = NNsight(Reader().eval(), compile={"backend": "eager", "fullgraph": True, "max_captures": 1})
    why(model, ids(2, 5))
    with pytest.raises(TooManyCapturesError, match="another length of prompt: 5 -> 6") as raised:
        why(model, ids(2, 6))
    assert "max_captures=4" in str(raised.value)
    why(model, ids(2, 5))


def test_what_torch_does_not_capture_is_a_warning_too() -> None:
    class Opaque(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    module = torch.nn.Sequential(Opaque())
    module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    model = NNsight(module, compile={"backend": "eager"})
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with model.trace(torch.ones(2, 4)) as tracer:
                out = model.output.save()
        same(out, torch.full((2, 4), 2.0))
        found.append([entry.category for entry in caught])
    assert found[1] == []
    assert tracer.report.breaks


@pytest.mark.parametrize("limit", [0, 1.5, True, "8"])
def test_a_limit_is_a_number(limit: Any) -> None:
    with pytest.raises(TypeError, match="max_captures"):
        NNsight(Reader(), compile={"max_captures": limit})


class Breaks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return self.second(x)


def test_a_model_that_breaks_its_graph_is_compiled_and_does_not_warn() -> None:
    model = NNsight(torch.nn.Sequential(Breaks(), Breaks()), compile={"backend": "eager"})
    kinds: list[str] = []
    reasons: list[str] = []
    for rows in (2, 2, 3, 4):
        with model.trace(torch.ones(rows, 4)) as tracer:
            model[1].second.output.save()
        kinds += [capture.kind for capture in tracer.report.captures]
        reasons += map(str, tracer.report.captures)
    assert {"break", "size"} <= set(kinds) <= {"break", "size", "type"}
    assert "the first call of `Breaks.forward`, after a graph break" in reasons
    assert "another module of the same class, after a graph break" in reasons


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("2 <= kwargs['input_ids'].size()[0]", "a batch of 1"),
        ("kwargs['input_ids'].size()[1] <= 4", "another length of prompt: 5, for which"),
        ("Mod(args[0].size()[1], 8) == 0", "another length of prompt: 5"),
        ("the_model._modules['table'].training == True", "`model.table` is in eval mode now"),
        ("KeyError on kwargs['labels']", "`labels` is not given now"),
        ("GLOBAL_STATE changed: num_threads ", "torch's num_threads has changed"),
        ("something(else)", "a condition of torch: something(else)"),
        ("x" * 500, "…"),
    ],
)
def test_guards_in_words(guard: str, expected: str) -> None:
    variables = {"the_model": Reader().eval(), "args": (ids(1, 5),), "kwargs": {"input_ids": ids(1, 5)}}
    capture = reason_of([guard], Situation(variables, ("input_ids",), [frozenset({"labels", "input_ids"})]))
    assert expected in capture.reason and len(capture.reason) < 200
    assert capture.guard == guard
