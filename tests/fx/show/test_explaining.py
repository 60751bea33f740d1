"""Looking inside: accounts of traces, files to step through, ranges in profiles, lines in errors."""

from __future__ import annotations

import bdb
import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

import nnsight
from nnsight import NNsight, fx
from nnsight.fx.show import debug

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
FILE = Path(__file__).name


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.table = torch.nn.Embedding(5, 6)
        self.second = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, row: torch.Tensor | int = 0) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)) + self.table(torch.as_tensor(row)))


def make(backend: Any = "eager") -> NNsight:
    torch.manual_seed(0)
    return NNsight(Net(), compile={"backend": backend})


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def line_of(function: Callable[..., Any], text: str) -> int:
    """Return the number of the line of ``function`` that contains ``text``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    start = function.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines[start - 1 :], start) if text in line)


def doubled(model: NNsight, x: torch.Tensor = X) -> Any:
    with model.trace(x) as tracer:
        model.first.output.mul_(2)
        out = model.output.save()
    return out, tracer


def cut(model: NNsight, x: torch.Tensor = X) -> Any:
    with model.trace(x) as tracer:
        if model.first.output.sum() > 1000:
            pass
        out = model.output.save()
    return out, tracer


# -- explain -----------------------------------------------------------------------------------------------------------


def test_a_trace_is_shown_stage_by_stage() -> None:
    model = make()
    _, tracer = doubled(model)
    text = str(fx.explain(tracer))
    where = f"{FILE}:{line_of(doubled, 'mul_')}"
    stages = [
        f"{FILE}:{line_of(doubled, 'with model')}: trace: compiled, 1 graph, 0 breaks",
        "captured graph: ",
        "symbolic sizes: none",
        "to the end of the graph",
        "at model.first.output",
        f"call mul_(%0, external 0)  # {where}" if "external 0)" in text else f"call mul_(%0, 2)  # {where}",
        "spliced graph, ",
        f"# <-- {where}",
        "lowered by eager; conditions on sizes: none",
    ]
    positions = [text.index(stage) for stage in stages]
    assert positions == sorted(positions)


def test_a_cut_is_shown_between_its_pieces() -> None:
    _, tracer = cut(make())
    explanation = fx.explain(tracer)
    text = str(explanation)
    reason = f":{line_of(cut, 'if model')}: `__bool__` needs a concrete value at `model.first.output`"
    assert text.count("captured graph: ") == 1
    assert text.count("spliced graph, ") == 2
    first, second = text.split("  piece, ")[1:]
    assert first.startswith("cut: ")
    assert reason in first.splitlines()[0]
    assert second.startswith("to the end of the graph")
    assert [str(item) for item in explanation.breaks] == [str(item) for item in tracer.report.breaks]


def test_a_stop_passes_sizes_and_conditions_are_shown() -> None:
    model = make("aot_eager")
    for x in (X, X[:2]):
        with model.trace(x) as tracer:
            (model.first.output * 3).exp()
            model.table.output.save()
            tracer.stop()
    text = str(fx.explain(tracer))
    assert "stopped at `model.table.output`" in text
    assert "drop_unused_calls " in text
    with model.trace(torch.cat([X, X])) as tracer:
        hidden = model.first.output
        hidden[:] = hidden + torch.ones(6, 1)
        model.output.save()
    (piece,) = tracer.report.pieces
    ((_, symbol),) = piece.graph.symbols
    assert f"symbolic sizes: {symbol} = 6" in str(fx.explain(tracer))
    for condition in piece.lowered.conditions:
        assert str(symbol) in piece.conditions(), condition


def test_all_traces_of_a_function() -> None:
    model = make()

    def both(factor: float, *, again: bool) -> None:
        assert factor == 2.0
        doubled(model)
        if again:
            cut(model)
            with model.trace(X, compile=False):
                model.output.save()

    explanation = fx.explain(both, 2.0, again=True)
    assert [report.mode for report in explanation.reports] == ["compiled", "compiled", "eager"]
    made = {"captures": 1, "recordings": 2, "splices": 3, "compiles": 3, "breaks": 1}
    assert explanation.counts == {**made, "reuses": 0, "loads": 0, "replays": 0}
    text = str(explanation)
    assert text.startswith("3 traces: 1 captures, 2 recordings, 3 splices, 3 compiles, 0 reuses, 0 loads, 1 breaks")
    assert text.rstrip().endswith("trace: eager")
    steady = fx.explain(doubled, model)
    assert steady.counts == {**dict.fromkeys(steady.counts, 0), "replays": 1}
    assert "mul_" in str(steady)
    assert str(fx.explain(lambda: None)).startswith("0 traces")


def test_what_cannot_be_explained() -> None:
    model = make()
    with pytest.raises(TypeError, match="a function to call, not 3"):
        fx.explain(3)
    _, tracer = doubled(model)
    with pytest.raises(TypeError, match="takes a tracer alone"):
        fx.explain(tracer, X)
    with pytest.raises(ValueError, match="has not run"), model.trace(X) as tracer:
        fx.explain(tracer)


# -- files -------------------------------------------------------------------------------------------------------------


def names(path: Path) -> set[str]:
    return {item.name for item in path.iterdir()}


def test_files_of_each_stage(tmp_path: Path) -> None:
    model = make()
    with nnsight.debug_dir(tmp_path, bytecode=False) as directory:
        out, _ = doubled(model)
        doubled(model)
    assert directory.path == tmp_path
    assert names(tmp_path) == {
        "README.md",
        "graph_1_captured.py",
        "graph_1_variant_1_program.txt",
        "graph_1_variant_1_spliced.py",
    }
    assert "nnsight_fx_capturing_taps_tap('model.first.output'" in (tmp_path / "graph_1_captured.py").read_text("utf-8")
    assert "call mul_" in (tmp_path / "graph_1_variant_1_program.txt").read_text("utf-8")
    spliced = (tmp_path / "graph_1_variant_1_spliced.py").read_text("utf-8")
    where = f"{FILE}:{line_of(doubled, 'mul_')}"
    assert f"# <-- {where}" in spliced

    rows = [row for row in (tmp_path / "README.md").read_text("utf-8").splitlines() if row.startswith("| ")][1:]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 2"]
    for row in rows:
        assert f"{FILE}:{line_of(doubled, 'with model')} | {where} | to the end of the graph" in row
        assert "(graph_1_variant_1_spliced.py)" in row

    doubled(model)  # closed
    cut(model)
    assert len(names(tmp_path)) == 4
    expected = model._module.second(torch.relu(model._module.first(X) * 2) + model._module.table.weight[0])
    assert torch.equal(out, expected)


class Stops(bdb.Bdb):
    """A debugger that notes where it stops, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[tuple[str, int, set[str]]] = []

    def user_line(self, frame: types.FrameType) -> None:
        if frame.f_code.co_name == "forward":
            self.stops.append((frame.f_code.co_filename, frame.f_lineno, set(frame.f_locals)))
        self.set_continue()


@pytest.mark.parametrize(("backend", "step"), [("eager", False), ("aot_eager", True)])
def test_a_breakpoint_in_a_file_is_hit(tmp_path: Path, backend: str, step: bool) -> None:
    model = make(backend)
    with nnsight.debug_dir(tmp_path, step=step):
        expected, _ = doubled(model)
        path = tmp_path / "graph_1_variant_1_spliced.py"
        line = next(
            number for number, text in enumerate(path.read_text("utf-8").splitlines(), 1) if f"# <-- {FILE}" in text
        )
        debugger = Stops()
        assert debugger.set_break(str(path), line) is None
        before = sys.gettrace()
        try:
            out, _ = debugger.runcall(doubled, model)
        finally:
            sys.settrace(before)
            debugger.clear_all_breaks()
    assert [stop[:2] for stop in debugger.stops] == [(str(path), line)]
    assert "linear" in debugger.stops[0][2]
    assert torch.equal(out, expected)


def test_a_backend_that_compiles_runs_what_it_compiled(tmp_path: Path) -> None:
    model = make("aot_eager")
    with nnsight.debug_dir(tmp_path):
        doubled(model)
        ran = tmp_path / "graph_1_variant_1_spliced.py"
        assert ran.exists()
        (piece,) = doubled(model)[1].report.pieces
        assert debug.dumped(fx.explain(doubled, model).reports[0], piece)[0] is piece.lowered.function


def test_a_directory_may_be_opened_by_a_call(tmp_path: Path) -> None:
    model = make()
    directory = nnsight.debug_dir(str(tmp_path / "new" / "folder"))
    try:
        cut(model)
        with pytest.raises(ValueError, match="close that debug_dir first"):
            nnsight.debug_dir(tmp_path)
    finally:
        directory.close()
    index = (tmp_path / "new" / "folder" / "README.md").read_text("utf-8")
    assert f"{FILE}:{line_of(cut, 'if model')}: `__bool__` needs a concrete value" in index
    assert index.count("\n| 1 |") == 2
    with nnsight.debug_dir(tmp_path):
        doubled(model)
    assert (tmp_path / "graph_1_variant_1_spliced.py").exists()


def test_a_missing_decompiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)
    with pytest.raises(ImportError, match=r"pip install 'nnsight\[debug\]'"):
        nnsight.debug_dir(tmp_path, bytecode=True)
    nnsight.debug_dir(tmp_path).close()
    assert "pip install 'nnsight[debug]'" in (tmp_path / "README.md").read_text("utf-8")


def test_what_dynamo_made_is_decompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decompiler = types.ModuleType("depyf")
    decompiler.decompile = lambda code: f"# {len(code.co_code)} bytes of {code.co_name}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "depyf", decompiler)
    model = make()
    with nnsight.debug_dir(tmp_path, bytecode=True):
        doubled(model)
    (file,) = tmp_path.glob("bytecode_1_call_Net*.py")
    text = file.read_text("utf-8")
    assert "bytes of call_Net" in text
    assert "as dynamo made it" in text
    doubled(model, X[:2])  # captured again, and nobody looks
    assert not list(tmp_path.glob("bytecode_2*"))


# -- profiles ----------------------------------------------------------------------------------------------------------


def ranges(profile: torch.profiler.profile) -> list[str]:
    return [event.name.removeprefix("nnsight::") for event in profile.events() if event.name.startswith("nnsight::")]


def test_stages_are_ranges_of_a_profile() -> None:
    model = make()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as first:
        doubled(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as again:
        doubled(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as with_cut:
        cut(model)
    assert sorted(ranges(first)) == ["lower", "record", "run", "splice"]
    assert sorted(ranges(again)) == ["run"]  # replayed
    assert sorted(ranges(with_cut)) == ["lower"] * 2 + ["record"] + ["run"] * 2 + ["splice"] * 2
    inside = next(event for event in again.events() if event.name == "nnsight::run")
    assert "aten::mul_" in {child.name for child in inside.cpu_children}


def test_backends_get_the_lines_of_the_block() -> None:
    """Both what ``torch.compile`` shows of a graph, and what AOTAutograd hands to the kernels' compiler."""
    readable, kept = [], []

    def compiler(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        kept.extend(node.stack_trace or "" for node in graph_module.graph.nodes)
        return graph_module.forward

    lower = aot_autograd(fw_compiler=compiler)

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        readable.append(graph_module.print_readable(print_output=False))
        return lower(graph_module, inputs)

    doubled(make(backend))
    line = line_of(doubled, "mul_")
    assert f"{FILE}:{line} in block, code: model.first.output.mul_(2)" in readable[-1]
    assert any(f'{FILE}", line {line}, in block' in trace for trace in kept)


# -- errors that depend on values ----------------------------------------------------------------------------------------


def picked(model: NNsight, index: torch.Tensor) -> Any:
    with model.trace(X):
        part = model.first.output[:, index]
        model.first.output[:, 0] = part.sum(-1)
        out = model.output.save()
    return out


def test_an_error_in_a_running_graph_names_the_line_of_the_block() -> None:
    model = make()
    picked(model, torch.tensor([1, 2]))
    with pytest.raises(IndexError) as caught:
        picked(model, torch.tensor([1, 99]))
    line = line_of(picked, "part = model")
    assert caught.value.__notes__ == [
        f"The block computes this at {__file__}:{line}: part = model.first.output[:, index]"
    ]
    assert torch.equal(picked(model, torch.tensor([1, 2])), picked(model, torch.tensor([2, 1])))


def test_so_does_one_in_a_graph_that_runs_from_a_file(tmp_path: Path) -> None:
    model = make("aot_eager")
    with nnsight.debug_dir(tmp_path, step=True), pytest.raises(IndexError) as caught:
        picked(model, torch.tensor([99]))
    assert f"{__file__}:{line_of(picked, 'part = model')}" in caught.value.__notes__[0]


@pytest.mark.parametrize("mode", [contextlib.nullcontext(), torch.device("cpu")])
def test_an_error_in_the_model_names_the_line_of_the_model_and_one_behind_a_cut_has_no_other_cause(mode: Any) -> None:
    model = make()
    with mode, pytest.raises(IndexError) as caught, model.trace(X, torch.tensor(7)):
        model.first.output.mul_(2)
        model.output.save()
    (note,) = caught.value.__notes__
    assert note.startswith(f"The model computes this at {__file__}:{line_of(Net.forward, 'return self.second')}: ")
    with pytest.raises(IndexError) as caught, model.trace(X):
        part = model.first.output[:, torch.tensor([99])]
        torch.nn.functional.one_hot(part.long())  # how wide it is depends on values
    assert caught.value.__context__ is None


def test_an_error_of_compiled_code_says_how_to_find_the_line() -> None:
    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def fail(*inputs: Any) -> Any:
            raise RuntimeError("index out of bounds")

        return fail

    with pytest.raises(RuntimeError, match="index out of bounds") as caught:
        doubled(make(backend))
    assert "nnsight.debug_dir(path, step=True)" in caught.value.__notes__[0]
