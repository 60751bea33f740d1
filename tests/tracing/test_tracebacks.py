"""What an error in or around a block looks like: the user's lines, the user's exception, nothing else.

The reference is Python itself: the frames and chains that the same lines have in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight import NNsight, WithBlockNotFoundError
from nnsight.remote import InvalidProgramError
from nnsight.runtime.errors import OutOfOrderError
from nnsight.tracing import Tracer

from ..contract.test_places import ENVIRONMENT, every_version, interpreter

PACKAGE = str(Path(nnsight.__file__).parent) + os.sep
X = torch.ones(1, 2)


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def make(**options: Any) -> NNsight:
    torch.manual_seed(0)
    return NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2), Inner(), torch.nn.Linear(2, 2)), **options)


@pytest.fixture
def model() -> NNsight:
    return make()


def lines(error: BaseException) -> list[str]:
    """Return the source lines of a traceback, outermost first, having looked for frames of the package."""
    entries = traceback.extract_tb(error.__traceback__)
    assert not [entry for entry in entries if entry.filename.startswith(PACKAGE)], entries
    return [str(entry.line) for entry in entries]


@contextlib.contextmanager
def caught(kind: type[BaseException] = BaseException) -> Iterator[list[BaseException]]:
    """Give the exception that the block ends with, without a frame of this function in its traceback."""
    found: list[BaseException] = []
    try:
        yield found
    except kind as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        found.append(error)
    assert found, "nothing was raised"


# -- frames -----------------------------------------------------------------------------------------------------------


def test_only_the_users_lines(model: NNsight) -> None:
    with caught(ZeroDivisionError) as found:
        with model.trace(X):  # the trace
            hidden = model[0].output
            hidden / (1 // 0)  # the line
    assert lines(found[0]) == ["with model.trace(X):  # the trace", "hidden / (1 // 0)  # the line"]


def test_what_format_exc_prints_behind_the_block(model: NNsight) -> None:
    try:
        with model.trace(X):
            model[0].output.nonsense  # noqa: B018
    except AttributeError:
        text = traceback.format_exc()
    assert "model[0].output.nonsense" in text
    assert text.count("  File ") == 2
    assert PACKAGE not in text
    assert "During handling" not in text


def test_errors_of_the_model_show_the_model(model: NNsight) -> None:
    with caught(RuntimeError) as found:
        with model.trace(torch.ones(1, 3)):
            model[0].output.save()
    assert "return F.linear(input, self.weight, self.bias)" in lines(found[0])
    with caught(RuntimeError) as found:
        with model.trace(X):
            model[0].output = torch.ones(1, 7)
    assert lines(found[0]) == ["with model.trace(X):"]
    cause = found[0].__cause__
    assert cause is not None
    assert "return self.linear(x).relu()" in lines(cause)


def test_errors_of_the_package_point_to_the_line(model: NNsight) -> None:
    with caught(OutOfOrderError) as found:
        with model.trace(X):
            model[2].output  # noqa: B018
            kept = model[0].output  # the line
    assert lines(found[0]) == ["with model.trace(X):", "kept = model[0].output  # the line"]
    with caught(IndexError) as found:
        with model.trace(X):
            model[99].output.save()
    assert lines(found[0])[:2] == ["with model.trace(X):", "model[99].output.save()"]
    with caught(ValueError) as found:
        with model.trace():
            model[0].output.save()
    assert lines(found[0])[0] == "with model.trace():"


def test_errors_of_the_capture_point_to_the_with() -> None:
    with caught(WithBlockNotFoundError) as found:
        exec(compile("\nwith Tracer():\n    a = 1\n", "<generated>", "exec"), {"Tracer": Tracer})
    lines(found[0])
    last = traceback.extract_tb(found[0].__traceback__)[-1]
    assert (last.filename, last.lineno) == ("<generated>", 2)


def test_a_text_of_the_same_shape_with_other_names_is_not_taken() -> None:
    other = "\nwith Tracer():\n    log()\n"  # texts in variables of the callers are candidates
    with caught(WithBlockNotFoundError):
        exec(compile("\nwith Tracer():\n    a = 1\n", "<elsewhere>", "exec"), {"Tracer": Tracer})
    assert "log" in other


def test_a_statement_that_cannot_be_deferred_is_shown_as_a_syntax_error(tmp_path: Path) -> None:
    path = tmp_path / "returns.py"
    path.write_text("def run(block):\n    with block():\n        return 'something'\n")
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    with caught(SyntaxError) as found:
        namespace["run"](Tracer)
    lines(found[0])
    text = "".join(traceback.format_exception(found[0]))
    assert f"File \"{path}\", line 3\n    return 'something'\n    ^^^^^^^^^^^^^^^^^^" in text


def test_debug_shows_all_frames(model: NNsight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnsight.CONFIG.APP, "DEBUG", True)
    with caught(RuntimeError) as found:
        with model.trace(X):
            raise RuntimeError
    names = [entry.name for entry in traceback.extract_tb(found[0].__traceback__)]
    assert {"__exit__", "run", "execute"} <= set(names)
    with caught(WithBlockNotFoundError) as found:
        exec("with Tracer():\n    a = 1\n", {"Tracer": Tracer})
    assert any(entry.filename.startswith(PACKAGE) for entry in traceback.extract_tb(found[0].__traceback__))


# -- kinds of exceptions ----------------------------------------------------------------------------------------------


class Custom(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(code)
        self.hint = hint


@pytest.mark.parametrize(
    "error",
    [
        Custom(3, hint="h"), KeyboardInterrupt("k"), SystemExit(4), GeneratorExit(), StopIteration(5), MemoryError(),
        BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError()]), SyntaxError("s", ("f.py", 1, 2, "text", 1, 3)),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"), OSError(2, "gone", "file"), ImportError("i", name="n"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_the_exception_is_the_users_own(model: NNsight, error: BaseException) -> None:
    error.add_note("a note")
    with caught() as found:
        with model.trace(X):
            model[0].output  # noqa: B018
            raise error
    assert found[0] is error
    assert lines(error) == ["with model.trace(X):", "raise error"]
    assert error.__notes__ == ["a note"]
    assert error.__context__ is None
    assert error.__cause__ is None


def test_causes_contexts_and_groups(model: NNsight) -> None:
    def inside(log: list[BaseException]) -> None:
        try:
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("second") from error
        except ValueError:
            try:
                raise TypeError("third")
            except TypeError as error:
                log.append(error)
                raise ExceptionGroup("several", [error, OSError("fourth")]) from None

    log: list[BaseException] = []
    with caught(ExceptionGroup) as found:
        with model.trace(X):
            inside(log)
    group = found[0]
    assert isinstance(group, ExceptionGroup)
    assert group.exceptions[0] is log[0] is group.__context__
    assert group.__suppress_context__
    second = log[0].__context__
    assert isinstance(second, ValueError)
    assert isinstance(second.__cause__, KeyError)
    assert second.__cause__.__context__ is None
    for error in (group, log[0], second, second.__cause__):
        lines(error)


def test_the_context_is_what_it_is_in_place(model: NNsight) -> None:
    """A trace in an ``except`` clause: what was being handled is the context of what the block raises."""
    handled = KeyError("handled")
    for block in (lambda: model.trace(X), Tracer, contextlib.nullcontext):
        with caught(ValueError) as found:
            try:
                raise handled
            except KeyError:
                with block():
                    raise ValueError("raised")  # noqa: B904 - the implicit context is what this is about
        assert found[0].__context__ is handled
        assert handled.__context__ is None
        lines(found[0])


def test_contexts_have_no_frames_of_the_package_either(model: NNsight) -> None:
    with caught(ValueError) as found:
        with model.trace(X):
            model[2].output  # noqa: B018
            try:
                model[0].output  # noqa: B018
            except OutOfOrderError as error:
                raise ValueError("after all") from error
    cause = found[0].__cause__
    assert isinstance(cause, OutOfOrderError)
    lines(cause)
    assert PACKAGE not in "".join(traceback.format_exception(found[0]))


def test_an_interrupt_while_the_model_runs() -> None:
    class Interrupted(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            signal.raise_signal(signal.SIGINT)
            return x

    model = NNsight(Interrupted())
    with caught(KeyboardInterrupt) as found:
        with model.trace(X):
            model.output.save()
    assert lines(found[0])[:1] == ["with model.trace(X):"]
    assert "signal.raise_signal(signal.SIGINT)" in lines(found[0])


# -- blocks of all kinds ----------------------------------------------------------------------------------------------


def fail() -> None:
    raise KeyError("on purpose")


def in_nested(model: NNsight) -> None:
    with Tracer():
        with model.trace(X):
            fail()


def in_invoke(model: NNsight) -> None:
    with model.trace() as tracer:
        with tracer.invoke(X):
            model[0].output  # noqa: B018
            fail()


def in_session(model: NNsight) -> None:
    with model.session():
        with model.trace(X):
            fail()


def in_edit(model: NNsight) -> None:
    with model.edit() as edited:
        fail()
    with edited.trace(X):
        edited[0].output.save()


def in_backward(model: NNsight) -> None:
    with model.trace(X):
        hidden = model[0].output
        hidden.requires_grad_()
        with model.output.sum().backward():
            hidden.grad  # noqa: B018
            fail()


def in_steps(model: NNsight) -> None:
    with model.trace(X) as tracer:
        with tracer.iter[:1]:
            model[0].output  # noqa: B018
            fail()


def in_scan(model: NNsight) -> None:
    with model.scan(X):
        fail()


def in_async(model: NNsight) -> None:
    async def traced() -> None:
        await asyncio.sleep(0)
        with model.trace(X):
            fail()

    asyncio.run(traced())


@pytest.mark.parametrize("kind", ["remote", "scan"])
def test_errors_on_fakes_end_at_the_users_line(model: NNsight, kind: str) -> None:
    """Not in the dispatch of fake tensors, nor with a second error as cause."""

    def run() -> None:
        with model.trace(X, remote="local") if kind == "remote" else model.scan(X):
            hidden = model[0].output
            (hidden + torch.ones(7, 7)).save()

    with caught(RuntimeError) as found:
        run()
    assert lines(found[0])[-2:] == [
        'with model.trace(X, remote="local") if kind == "remote" else model.scan(X):',
        "(hidden + torch.ones(7, 7)).save()",
    ]
    assert "7" in str(found[0]) and found[0].__cause__ is None and found[0].__context__ is None


def test_an_error_of_values_where_the_model_runs_has_the_users_line_and_no_cause(model: NNsight) -> None:
    """Fakes have no values, so recording the block goes well."""
    place = [9]
    with caught(InvalidProgramError) as found:
        with model.trace(X, remote="local"):
            picked = model[0].output[0][torch.tensor(place)].save()
    assert lines(found[0])[-1] == 'with model.trace(X, remote="local"):'
    assert re.search(
        r"`, line \d+ of .*test_tracebacks\.py failed: an index points outside .*\n    "
        r"picked = model\[0\]\.output\[0\]\[torch\.tensor\(place\)\]\.save\(\)",
        str(found[0]),
    )
    assert found[0].__cause__ is None and found[0].__suppress_context__


def test_errors_of_the_model_on_fakes_show_the_model(model: NNsight) -> None:
    with caught(RuntimeError) as found:
        with model.scan(torch.ones(1, 3)):
            model.output.save()
    shown = lines(found[0])
    assert "return F.linear(input, self.weight, self.bias)" in shown
    assert not [entry for entry in traceback.extract_tb(found[0].__traceback__) if "_subclasses" in entry.filename]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "run",
    [in_nested, in_invoke, in_session, in_edit, in_backward, in_steps, in_scan, in_async],
    ids=lambda f: f.__name__,
)
def test_blocks_of_all_kinds(run: Callable[[NNsight], None], compiled: bool) -> None:
    model = make(compile={"backend": "eager"}) if compiled else make()
    with caught(KeyError) as found:
        run(model)
    shown = lines(found[0])
    assert shown[0] == "run(model)"
    assert shown[-2:] == ["fail()", 'raise KeyError("on purpose")']
    assert not [line for line in shown if "torch" in line]
    assert torch.is_tensor(model(X)), "the model works on"


# -- uncaught ---------------------------------------------------------------------------------------------------------

UNCAUGHT = """\
from nnsight.tracing import Tracer

def helper():
    raise {error}

def main():
    with Tracer():
        with Tracer():
            helper()

main()
"""


@every_version
@pytest.mark.parametrize("error", ["ValueError('v')", "KeyboardInterrupt", "ExceptionGroup('g', [OSError()])"])
def test_uncaught(version: str, error: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT.format(error=error))
    done = subprocess.run(
        [interpreter(version), str(script)], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    numbers = [part.split(",")[0] for part in done.stderr.split(f'File "{script}", line ')[1:]]
    assert numbers == ["11", "7", "8", "9", "4"]
    assert done.stderr.count('File "') == 5
    assert done.returncode != 0


@every_version
def test_exit_codes(version: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNCAUGHT.format(error="SystemExit(7)"))
    done = subprocess.run([interpreter(version), str(script)], capture_output=True, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (7, b"")


# -- the interpreter's state ------------------------------------------------------------------------------------------


def test_nothing_is_traced_after_an_error(model: NNsight) -> None:
    before = sys.gettrace(), sys._getframe().f_trace
    for _ in range(2):
        with caught(RuntimeError):
            with model.trace(X):
                raise RuntimeError
        with caught(WithBlockNotFoundError):
            exec("with Tracer():\n    a = 1\n", {"Tracer": Tracer})
    assert (sys.gettrace(), sys._getframe().f_trace) == before


def test_a_debugger_sees_the_error_arrive(model: NNsight) -> None:
    seen: list[tuple[str, str, list[str]]] = []

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name not in ("traced", "__nnsight_block__"):
            return None
        if event == "exception" and argument[0] is KeyError:
            seen.append((frame.f_code.co_name, event, lines(argument[1].with_traceback(argument[2]))))
        elif event == "return":
            seen.append((frame.f_code.co_name, event, []))
        return trace

    def traced() -> None:
        with model.trace(X):
            raise KeyError

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyError):
            traced()
        installed = sys.gettrace()
    finally:
        sys.settrace(previous)
    assert installed is trace
    assert [entry[:2] for entry in seen] == [
        ("__nnsight_block__", "exception"),
        ("__nnsight_block__", "return"),
        ("traced", "exception"),
        ("traced", "return"),
    ]
    assert seen[2][2] == ["with model.trace(X):", "raise KeyError"]


