"""Capture of a block: which names are bound after it, where it may stand, what it leaves in the interpreter, and what is refused.

What its Python means is in contract/test_places.py, what its errors look like in test_tracebacks.py.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.tracing import Tracer
from nnsight.tracing.parsing import parse

from ..conftest import Rows, assert_no_instrumentation, both, same


def make() -> NNsight:
    torch.manual_seed(0)
    return NNsight(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)))


@pytest.fixture
def model() -> NNsight:
    return make()


X = torch.ones(1, 2)


def hidden_of(model: NNsight) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = model._module[0].register_forward_hook(lambda _, __, out: kept.append(out.clone()))
    model._module(X)
    handle.remove()
    return kept[0]


class Deferred(Tracer):
    """Runs its body when it is over, and says that it did."""

    ran = False

    def execute(self, function: Callable[[], None]) -> None:
        assert not self.ran
        self.ran = True
        function()


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_name_bound_to_a_saved_object_comes_home(model: NNsight) -> None:
    """The object is marked, not the name."""
    with model.trace(X):
        first = model[0].output
        second = first
        second.save()
    assert first is second
    assert torch.equal(first, hidden_of(model))


def test_reassigning_a_saved_name_drops_it(model: NNsight) -> None:
    with model.trace(X):
        value = model[0].output.save()
        value = value + 1
    with pytest.raises(UnboundLocalError):
        print(value)


@pytest.mark.parametrize("kind", ["list", "dict", "tuple", "set", "int", "float", "str", "object", "none", "bool"])
def test_saving_any_object(model: NNsight, kind: str) -> None:
    values = {
        "list": [1], "dict": {"a": 1}, "tuple": (1, 2), "set": {1}, "int": 12345, "float": 1.5, "str": "text",
        "object": types.SimpleNamespace(a=1), "none": None, "bool": True,
    }  # fmt: skip
    with model.trace(X):
        value = values[kind]
        same = value.save() is value
        result = (value, same).save()
    assert value == values[kind]
    assert result == (values[kind], True)


def test_numbers_computed_in_the_block_are_saved(model: NNsight) -> None:
    with model.trace(X):
        size = model[0].output.shape[-1].save()
        name = f"{size} wide".save()
        total = sum(range(size)).save()
    assert (size, name, total) == (3, "3 wide", 3)


def test_save_with_arguments_is_the_users_own(model: NNsight) -> None:
    class Writer:
        def save(self, path: str, *, mode: str) -> str:
            return path + mode

    writer = Writer()
    with model.trace(X):
        answer = [writer.save("a", mode="b")].save()
    assert answer == ["ab"]


def save_in_helper(value: Any) -> Any:
    return value.save()


def save_numbers_in_helper(value: torch.Tensor) -> tuple[list[int], int]:
    return [value.shape[0]].save(), value.shape[1].save()  # type: ignore[attr-defined]


def test_helper_functions_may_save(model: NNsight) -> None:
    with model.trace(X):
        hidden = save_in_helper(model[0].output)
        rows, columns = save_numbers_in_helper(hidden)
    assert torch.equal(hidden, hidden_of(model))
    assert (rows, columns) == ([1], 3)


def test_as_binds_the_tracer(model: NNsight) -> None:
    with model.trace(X) as tracer:
        inner = [tracer].save()
    assert inner[0] is tracer
    assert tracer.report.mode == "eager"


def test_as_may_be_an_attribute(model: NNsight) -> None:
    holder = types.SimpleNamespace()
    with model.trace(X) as holder.tracer:
        value = model[0].output.save()
    assert value is not None
    assert holder.tracer.report.mode == "eager"


def test_arguments_of_the_header_are_evaluated_once_and_first(model: NNsight) -> None:
    events: list[str] = []

    def prompt() -> torch.Tensor:
        events.append("header")
        return X

    with model.trace(prompt()):
        events.append("body")
    assert events == ["header", "body"]


# -- where blocks may stand -------------------------------------------------------------------------------------------


def test_nonlocal_names(model: NNsight) -> None:
    """Assigning a variable of an enclosing function follows the rule of all names: only saved objects come home."""
    total = 0

    def run() -> None:
        nonlocal total
        with model.trace(X):
            total = model[0].output.shape[-1].save()

    run()
    assert total == 3


ONE_LINE = """\
import torch
def trace(model, x):
    with model.trace(x): first = model[0].output.save(); second = model[1].output.save()
    with model.trace(
        x,
    ) as tracer: third = [tracer.result[0], "ü"]; third.save()  # the header ends here
    return first, second, third[0]
def invokes(model, x):
    with model.trace() as tracer:
        with tracer.invoke(x): first = model[0].output.save()
        with tracer.invoke(2 * x): second = model[0].output.save(); third = model.output.save()
    return first, second, third
def steps(model, x):
    found = []
    with model.trace(x) as tracer:
        for step in tracer.iter[:1]: found.append(model[0].output)
        with tracer.iter[:1] as step: found.append(model[1].output); found.append(step)
    return found
def two_items(model, x):
    with model.session(), model.trace(x): first = model[0].output.save()
    with model.trace() as tracer:
        with tracer.invoke(x), torch.no_grad(): second = model[0].output * 1; second.save()
    return first, second, second.requires_grad
def gradients(model, x):
    with model.trace(x):
        hidden = model[0].output.requires_grad_()
        with model.output.sum().backward(): first = hidden.grad.save()
    with model.trace(x): loss = model.output.sum(); bias = model._module[0].bias; grads = torch.autograd.grad(loss, bias).save()
    return first, grads
def edits(model, x):
    with model.edit() as edited: edited[0].output[:] = 1
    with edited.trace(x): after = edited.output.save()
    return after
def scans(model, x):
    with model.scan(x): shape = model[0].output.shape.save()
    return tuple(shape)
"""


@both
@pytest.mark.parametrize("name", ["trace", "invokes", "steps", "two_items", "gradients", "edits", "scans"])
def test_a_body_on_the_line_of_its_with(tmp_path: Path, name: str, compile: bool) -> None:
    """It is the body of the same statement on several lines, which is the reference."""
    tree = ast.parse(ONE_LINE)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    assert sum(block.lineno == block.end_lineno for block in blocks) == 11
    lines = ast.unparse(tree)
    assert not [
        node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.With) and node.lineno == node.end_lineno
    ]
    found = []
    for kind, text in ("one", ONE_LINE), ("several", lines):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        model = Rows(net, compile={"backend": "eager"} if compile else False)
        found.append(getattr(load(tmp_path / f"{kind}_{name}_{compile}.py", text), name)(model, X))
    same(*found)


def test_the_lines_of_a_body_on_the_line_of_its_with(tmp_path: Path) -> None:
    text = "def run(tracer):\n    with tracer as ü: first = 'ö'; (\n        first)\n"
    bodies = []

    class Looks(Deferred):
        def execute(self, function: Callable[[], None]) -> None:
            assert self.info is not None
            bodies.extend([self.info.source, self.parse(text, 2)])
            function()

    load(tmp_path / "looked_at.py", text).run(Looks())
    assert bodies == [["first = 'ö'; (\n", "        first)\n"], (2, ["first = 'ö'; (\n", "        first)\n"])]


def test_the_same_line_in_a_loop_compiles_once(model: NNsight, no_gc: None) -> None:
    from nnsight.tracing import block

    before = len(block._blocks)
    for _ in range(4):
        with model.trace(X):
            value = model[0].output.save()
    assert value is not None
    assert len(block._blocks) == before + 1


MODULE_TEXT = """\
import torch
from nnsight import NNsight
torch.manual_seed(0)
model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 3)))
x = torch.ones(1, 2)
scale = 2.0
untouched = "old"

with model.trace(x) as tracer:
    hidden = model[0].output.save()
    scaled = (hidden * scale).save()
    listed = [hidden * factor for factor in range(2)].save()
    untouched = 5
    local = 3
    def helper():
        return scale + local
    number = helper().save()

class Body:
    factor = 3.0
    with model.trace(x):
        inside = (model[0].output * factor).save()
"""


def load(path: Path, text: str | bytes) -> types.ModuleType:
    """Write a file and import it, under its name."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_module_level_and_class_bodies(tmp_path: Path) -> None:
    module = load(tmp_path / "script.py", MODULE_TEXT)
    assert torch.equal(module.scaled, module.hidden * 2)
    assert torch.equal(module.listed[1], module.hidden)
    assert module.number == 5.0
    assert module.untouched == "old"
    assert not hasattr(module, "local")
    assert torch.equal(module.Body.inside, module.hidden * 3)
    assert module.tracer.report.mode == "eager"


COMPREHENSIONS_TEXT = """
import torch
from nnsight import NNsight

model = NNsight(torch.nn.Sequential(torch.nn.Identity()))
found = []
for step in range(3):
    with model.trace(torch.ones(1)) as tracer:
        value = (model[0].output * step).save()
    found.append((value.item(), tracer.report.mode, step))

class Body:
    found = []
    for step in range(3):
        with model.trace(torch.ones(1)) as tracer:
            value = (model[0].output * step).save()
        found.append((value.item(), tracer.report.mode, step))
    ignored = [value for value in (8, 9)], [step for step in (8, 9)], [tracer for tracer in (8, 9)]

ignored = [value for value in (8, 9)], [step for step in (8, 9)], [tracer for tracer in (8, 9)]
"""


def test_variables_with_the_names_of_loop_variables_of_comprehensions(tmp_path: Path) -> None:
    """On Python 3.12, such loop variables are variables of the module, or of the class body."""
    module = load(tmp_path / "script.py", COMPREHENSIONS_TEXT)
    assert module.found == module.Body.found == [(0.0, "eager", 0), (1.0, "eager", 1), (2.0, "eager", 2)]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_names_saved_before_an_error_come_home(model: NNsight) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        with model.trace(X):
            early = model[0].output.save()
            late = 1
            raise RuntimeError("on purpose")
    assert torch.equal(early, hidden_of(model))
    with pytest.raises(UnboundLocalError):
        print(late)


# -- the interpreter's state ------------------------------------------------------------------------------------------


def test_a_debuggers_trace_function_is_put_back(model: NNsight) -> None:
    lines: list[int] = []

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "traced" and event == "line":
            lines.append(frame.f_lineno - frame.f_code.co_firstlineno)
        return trace if frame.f_code.co_name == "traced" else None

    def traced() -> torch.Tensor:
        with model.trace(X):
            value = model[0].output.save()
        after = value * 2
        return after

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        result = traced()
        installed = sys.gettrace()
    finally:
        sys.settrace(previous)
    assert installed is trace
    assert torch.equal(result, hidden_of(model) * 2)
    assert {1, 3, 4} <= set(lines), "the lines around the block are still traced"


def test_nothing_unsaved_stays_alive(model: NNsight, no_gc: None) -> None:
    references: list[weakref.ref[Any]] = []
    with model.trace(X):
        hidden = model[0].output
        references.append(weakref.ref(hidden))
        references.append(weakref.ref(model[1].output * 2))
        saved = model[2].output.save()
        references.append(weakref.ref(saved))
    assert [reference() is None for reference in references] == [True, True, False]
    del saved
    assert references[2]() is None


def test_a_tracer_that_is_kept_keeps_no_tensor(model: NNsight, no_gc: None) -> None:
    big = torch.ones(1, 2)
    reference = weakref.ref(big)
    with model.trace(big) as tracer:
        model[0].output.save()
    del big
    assert tracer.report.mode == "eager"
    assert reference() is None


# -- what is refused --------------------------------------------------------------------------------------------------


def test_source_registered_with_linecache(model: NNsight) -> None:
    """As notebooks and doctest do."""
    text = "with model.trace(x):\n    y = model[0].output.save()\n"
    name = "<registered 1>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace: dict[str, Any] = {"model": model, "x": X}
    exec(compile(text, name, "exec"), namespace)
    assert torch.equal(namespace["y"], hidden_of(model))


JUMPS = {
    "return": "def run(model, x):\n    with model.trace(x):\n        return model[0].output\n",
    "yield": "def run(model, x):\n    with model.trace(x):\n        yield model[0].output\n",
    "break": "def run(model, x):\n    for _ in range(2):\n        with model.trace(x):\n            break\n",
    "continue": "def run(model, x):\n    for _ in range(2):\n        with model.trace(x):\n            continue\n",
    "nested": "def run(model, x):\n    with model.trace(x):\n        if model:\n            return 1\n",
    "hidden": "def run(model, x):\n    with model.trace(x):\n        try:\n            if False:\n                return 1\n"
    "        except Exception:\n            pass\n",
    "else": "def run(model, x):\n    while True:\n        with model.trace(x):\n            for _ in ():\n"
    "                pass\n            else:\n                break\n",
    "await": "async def run(model, x):\n    with model.trace(x):\n        await model\n",
}


@pytest.mark.parametrize("name", JUMPS)
def test_jumps_out_of_the_block(model: NNsight, tmp_path: Path, name: str) -> None:
    module = load(tmp_path / f"jump_{name}.py", JUMPS[name])
    with pytest.raises(SyntaxError, match=rf"jump_{name}.py:\d"):
        result = module.run(model, X)
        if name == "yield":
            next(result)
        if name == "await":
            try:
                result.send(None)
            finally:
                result.close()


@both
def test_a_return_that_is_passed_by(model: NNsight, compile: bool) -> None:
    """It is an error where it is reached, behind what the block has done."""

    def collected(limit: float) -> Any:
        found = []
        with model.trace(X, compile=compile):
            for layer in (model[0], model[2]):
                hidden = layer.output
                if hidden is None:
                    return None
                found.append(hidden.save())
            while hidden.abs().sum() > limit:
                return found
        return found

    first, last = collected(1e9)
    assert torch.equal(first, hidden_of(model))
    torch.testing.assert_close(last, model._module(X))
    with pytest.raises(SyntaxError, match=r"`return` at .*test_tracing.py:\d+ would leave a block") as info:
        collected(-1.0)
    assert info.value.lineno == collected.__code__.co_firstlineno + 9
    assert_no_instrumentation(model._module)


def test_a_tracer_without_a_model() -> None:
    tracer = Deferred()
    with tracer:
        value = [1].save()
    assert value == [1]
    assert tracer.ran
    assert tracer.info is None


def test_blocks_are_reentrant_through_recursion(model: NNsight) -> None:
    def depth(number: int) -> torch.Tensor:
        inner = depth(number - 1) if number else X
        with model.trace(inner):
            value = model.output.save()
        return value

    expected = X
    for _ in range(3):
        expected = model._module(expected)
    assert torch.equal(depth(2), expected)


def test_a_count_that_another_thread_has_disturbed_is_no_error_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython counts the depth of syntax trees for all threads together."""
    failures = iter([True, True])
    plain = ast.parse

    def disturbed(*args: Any) -> ast.Module:
        if next(failures, False):
            raise SystemError("AST constructor recursion depth mismatch (before=69, after=63)")
        return plain(*args)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert ast.unparse(parse("a  =  1")) == "a = 1"
    assert next(failures, None) is None
    with pytest.raises(SyntaxError):
        parse("a = = 1")
