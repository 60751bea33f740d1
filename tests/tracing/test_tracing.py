"""Capture of a block: what its Python means, what comes home, what an error looks like, and what is refused.

Mostly with a tracer that has no model behind it: this layer knows nothing of models.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import linecache
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight import NNsight, WithBlockNotFoundError
from nnsight.tracing import Tracer
from nnsight.tracing.parsing import parse

from ..conftest import Rows, both, same


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


def test_only_saved_names_come_home(model: NNsight) -> None:
    before = "untouched"
    with model.trace(X):
        kept = model[0].output.save()
        dropped = model[1].output
        before = model[1].output
    assert torch.equal(kept, hidden_of(model))
    assert before == "untouched"
    with pytest.raises(UnboundLocalError):
        print(dropped)


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


def test_the_function_save_does_the_same(model: NNsight) -> None:
    with model.trace(X):
        hidden = nnsight.save(model[0].output)
        several = nnsight.save([hidden, 1])
    assert torch.equal(hidden, hidden_of(model))
    assert several[0] is hidden


def test_save_outside_a_trace_is_an_error() -> None:
    with pytest.raises(ValueError, match="outside a trace"):
        nnsight.save([1])


def test_an_object_with_a_save_method_of_its_own_keeps_it(model: NNsight) -> None:
    class Checkpoint:
        saved = 0

        def save(self) -> str:
            self.saved += 1
            return "written"

    checkpoint = Checkpoint()
    with model.trace(X):
        answer = [checkpoint.save()].save()
    assert answer == ["written"]
    assert checkpoint.saved == 1


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


def test_mutating_outer_objects_is_visible(model: NNsight) -> None:
    outer: list[torch.Tensor] = []
    table: dict[str, Any] = {}
    holder = types.SimpleNamespace()
    with model.trace(X):
        outer.append(model[0].output)
        table["hidden"] = outer[0]
        holder.value = outer[0]
    assert torch.equal(outer[0], hidden_of(model))
    assert table["hidden"] is outer[0] is holder.value


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


def test_code_after_the_block_sees_old_values_inside(model: NNsight) -> None:
    """The body reads the variables as they are when the block is entered."""
    scale = 2.0
    with model.trace(X):
        value = (model[0].output * scale).save()
    scale = 3.0
    assert torch.equal(value, hidden_of(model) * 2.0)


def test_several_traces_reuse_a_name(model: NNsight) -> None:
    with model.trace(X):
        value = model[0].output.save()
    with model.trace(X * 2):
        value = model[0].output.save()
    assert torch.equal(value, model._module[0](X * 2))


# -- where blocks may stand -------------------------------------------------------------------------------------------


class Owner:
    __secret = 4.0
    scale = 2.0

    def __init__(self, model: NNsight) -> None:
        self.__model = model

    def run(self) -> torch.Tensor:
        with self.__model.trace(X):
            value = (self.__model[0].output * self.__secret).save()
        return value

    def with_super(self) -> Any:
        with self.__model.trace(X):
            value = [super().__init__, __class__].save()  # type: ignore[name-defined]
        return value

    @staticmethod
    def static(model: NNsight) -> torch.Tensor:
        with model.trace(X):
            value = (model[0].output * Owner.scale).save()
        return value


def test_methods_and_private_names(model: NNsight) -> None:
    assert torch.equal(Owner(model).run(), hidden_of(model) * 4.0)
    assert torch.equal(Owner.static(model), hidden_of(model) * 2.0)


def test_closures(model: NNsight) -> None:
    scale = 3.0

    def outer() -> Callable[[], torch.Tensor]:
        offset = 1.0

        def inner() -> torch.Tensor:
            with model.trace(X):
                value = (model[0].output * scale + offset).save()
            return value

        return inner

    assert torch.equal(outer()(), hidden_of(model) * 3.0 + 1.0)


def test_loops_around_and_inside(model: NNsight) -> None:
    values = []
    for factor in range(3):
        with model.trace(X * factor):
            inside = [].save()
            for layer in (model[0], model[1]):
                if layer is model[1] and factor == 1:
                    continue
                inside.append(layer.output)
                if factor == 2:
                    break
        values.append(inside)
    assert [len(inside) for inside in values] == [2, 1, 1]
    assert torch.equal(values[2][0], model._module[0](X * 2))


def test_functions_comprehensions_and_lambdas_in_the_block(model: NNsight) -> None:
    scale = 2.0
    with model.trace(X):
        hidden = model[0].output
        offset = 1.0

        def helper(value: torch.Tensor) -> torch.Tensor:
            return value * scale + offset

        offset = 5.0
        by_function = helper(hidden).save()
        by_comprehension = [hidden * factor + offset for factor in range(3)].save()
        by_lambda = (lambda value: value - offset)(hidden).save()
        by_generator = sum(hidden * factor for factor in (1, 2)).save()
        nested = {name: [hidden + i for i in range(2)] for name in "ab"}.save()

        class Inner:
            attribute = 7

        kind = Inner.attribute.save()
    reference = hidden_of(model)
    assert torch.equal(by_function, reference * 2 + 5)
    assert torch.equal(by_comprehension[2], reference * 2 + 5)
    assert torch.equal(by_lambda, reference - 5)
    assert torch.equal(by_generator, reference * 3)
    assert torch.equal(nested["b"][1], reference + 1)
    assert kind == 7


def test_returns_inside_functions_of_the_block_are_allowed(model: NNsight) -> None:
    with model.trace(X):

        def helper() -> Any:
            for _ in range(3):
                return model[0].output
            return None

        def generate() -> Any:
            yield helper()

        value = next(generate()).save()
    assert torch.equal(value, hidden_of(model))


def test_walrus_unpacking_augmented_and_delete(model: NNsight) -> None:
    counter = 1
    with model.trace(X):
        if (hidden := model[0].output) is not None:
            hidden.save()
        first, *rest = [hidden, 1, 2]
        rest.save()
        counter += 10
        counted = counter.save()
        del first
        missing = ("first" in dir()).save()
    assert torch.equal(hidden, hidden_of(model))
    assert rest == [1, 2]
    assert counted == 11
    assert missing is False


def test_try_except_finally_and_else(model: NNsight) -> None:
    events: list[str] = []
    with model.trace(X):
        try:
            model[0].output @ torch.ones(99, 99)
        except RuntimeError as error:
            events.append(type(error).__name__)
        else:
            events.append("else")
        finally:
            events.append("finally")
        value = model[1].output.save()
    assert events == ["RuntimeError", "finally"]
    assert value.shape == (1, 3)


def test_imports_annotations_asserts_and_match(model: NNsight) -> None:
    with model.trace(X):
        import math as m

        width: int = model[0].output.shape[-1]
        assert width == 3
        match width:
            case 3:
                answer = "three".save()
            case _:
                answer = "other".save()
        root = m.sqrt(9).save()
    assert (answer, root) == ("three", 3.0)


counter_of_module = 0


def test_global_names(model: NNsight) -> None:
    global counter_of_module
    counter_of_module = 1
    with model.trace(X):
        counter_of_module = counter_of_module + 4
    assert counter_of_module == 5


def test_a_global_statement_in_the_block(model: NNsight) -> None:
    with model.trace(X):
        global counter_set_in_block
        counter_set_in_block = model[0].output.shape[-1]
    assert counter_set_in_block == 3  # type: ignore[name-defined]


def test_nonlocal_names(model: NNsight) -> None:
    """Assigning a variable of an enclosing function follows the rule of all names: only saved objects come home."""
    total = 0

    def run() -> None:
        nonlocal total
        with model.trace(X):
            total = model[0].output.shape[-1].save()

    run()
    assert total == 3


def test_a_nonlocal_statement_in_a_function_of_the_block(model: NNsight) -> None:
    with model.trace(X):
        count = 0

        def bump() -> None:
            nonlocal count
            count += 2

        bump()
        bump()
        result = [count].save()
    assert result == [4]


def test_headers_over_several_lines(model: NNsight) -> None:
    with model.trace(
        X,
        compile=False,
    ) as tracer:
        value = model[0].output.save()
    with (
        model.trace(X) as other,
        torch.no_grad(),
    ):
        second = model[0].output.save()
        state = torch.is_grad_enabled().save()
    assert torch.equal(value, second)
    assert state is False
    assert tracer is not other


def test_contexts_before_the_trace_surround_it(model: NNsight) -> None:
    with torch.no_grad(), model.trace(X):
        value = model[0].output.save()
    assert not value.requires_grad


def test_contexts_after_the_trace_surround_the_body(model: NNsight) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def context(name: str) -> Any:
        events.append("enter " + name)
        yield name + "!"
        events.append("exit " + name)

    with context("a"), model.trace(X), context("b") as b, context("c"):
        events.append(b)
        model[0].output  # noqa: B018
    assert events == ["enter a", "enter b", "enter c", "b!", "exit c", "exit b", "exit a"]


def test_two_traces_in_one_header_and_alone_on_lines(model: NNsight) -> None:
    other = make()
    with model.trace(X), other.trace(X):
        inner = other[0].output.save()
    assert torch.equal(inner, hidden_of(other))


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


def test_generators_and_async_functions_may_contain_blocks(model: NNsight) -> None:
    def values() -> Any:
        for factor in (1, 2):
            with model.trace(X * factor):
                value = model[0].output.save()
            yield value

    async def run() -> torch.Tensor:
        with model.trace(X):
            value = model[0].output.save()
        return value

    first, second = values()
    assert torch.equal(first, hidden_of(model))
    assert torch.equal(second, model._module[0](X * 2))
    coroutine = run()
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    assert torch.equal(stop.value.value, hidden_of(model))


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


# -- errors -----------------------------------------------------------------------------------------------------------


def test_exceptions_keep_type_and_line(model: NNsight) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        with model.trace(X):
            hidden = model[0].output
            hidden / (1 // 0)  # the line
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert last.filename == __file__
    assert last.line == "hidden / (1 // 0)  # the line"
    assert raised.value.__context__ is None


def test_exceptions_in_helpers_show_block_and_helper(model: NNsight) -> None:
    def helper(value: torch.Tensor) -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError) as raised:
        with model.trace(X):
            helper(model[0].output)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.line for frame in frames[-2:]] == ["helper(model[0].output)", 'raise KeyError("missing")']
    assert not any("/nnsight/runtime/" in frame.filename for frame in frames[-2:])


def test_the_traceback_has_no_frames_of_the_machine(model: NNsight) -> None:
    try:
        with model.trace(X):
            model[0].output.nonsense  # noqa: B018
    except AttributeError as error:
        text = "".join(traceback.format_exception(error))
    assert "model[0].output.nonsense" in text
    assert "mediator" not in text
    assert "_SkipBody" not in text


def test_names_saved_before_an_error_come_home(model: NNsight) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        with model.trace(X):
            early = model[0].output.save()
            late = 1
            raise RuntimeError("on purpose")
    assert torch.equal(early, hidden_of(model))
    with pytest.raises(UnboundLocalError):
        print(late)


def test_an_error_in_the_model_keeps_its_own_frames() -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(7, 7)

    model = NNsight(Broken())
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        with model.trace(X):
            model.output.save()
    assert traceback.extract_tb(raised.value.__traceback__)[-1].line == "return x @ torch.ones(7, 7)"


def test_chained_exceptions_stay_chained(model: NNsight) -> None:
    with pytest.raises(ValueError, match="second") as raised:
        with model.trace(X):
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("second") from error
    assert isinstance(raised.value.__cause__, KeyError)


def test_the_model_works_after_an_error(model: NNsight) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            with model.trace(X):
                model[0].output  # noqa: B018
                raise RuntimeError("on purpose")
        with model.trace(X):
            value = model[0].output.save()
        assert torch.equal(value, hidden_of(model))


def test_system_exit_and_keyboard_interrupt_pass_through(model: NNsight) -> None:
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind):
            with model.trace(X):
                model[0].output  # noqa: B018
                raise kind
    assert torch.is_tensor(model(X))


def test_debug_shows_all_frames(model: NNsight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnsight.CONFIG.APP, "DEBUG", True)
    with pytest.raises(RuntimeError) as raised:
        with model.trace(X):
            model[0].output  # noqa: B018
            raise RuntimeError
    assert any("mediator" in frame.filename for frame in traceback.extract_tb(raised.value.__traceback__))


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


def test_no_trace_function_is_left(model: NNsight) -> None:
    previous = sys.gettrace()
    with model.trace(X):
        value = model[0].output.save()
        inside = [sys.gettrace()].save()
    assert sys.gettrace() is previous
    assert inside == [previous]
    assert sys._getframe().f_trace is None or previous is not None
    with contextlib.suppress(RuntimeError), model.trace(X):
        raise RuntimeError
    assert sys.gettrace() is previous
    assert value is not None


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


def test_an_error_that_is_gone_keeps_nothing(model: NNsight) -> None:
    references: list[weakref.ref[Any]] = []
    try:
        with model.trace(X):
            hidden = model[0].output
            references.append(weakref.ref(hidden))
            raise RuntimeError
    except RuntimeError:
        pass
    gc.collect()
    assert references[0]() is None


# -- what is refused --------------------------------------------------------------------------------------------------


def test_source_without_a_file(model: NNsight) -> None:
    namespace: dict[str, Any] = {"model": model, "x": X}
    with pytest.raises(WithBlockNotFoundError, match="cannot be read"):
        exec("with model.trace(x):\n    y = model[0].output.save()\n", namespace)
    assert "y" not in namespace


def test_source_registered_with_linecache(model: NNsight) -> None:
    """As notebooks and doctest do."""
    text = "with model.trace(x):\n    y = model[0].output.save()\n"
    name = "<registered 1>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace: dict[str, Any] = {"model": model, "x": X}
    exec(compile(text, name, "exec"), namespace)
    assert torch.equal(namespace["y"], hidden_of(model))


def test_a_file_edited_after_it_was_loaded(model: NNsight, tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    text = "def run(model, x):\n    with model.trace(x):\n        y = model[0].output.save()\n    return y\n"
    module = load(path, text)
    path.write_text("# a new line\n# another\n\n" + text)
    linecache.checkcache(str(path))
    with pytest.raises(WithBlockNotFoundError, match="edited after it was loaded"):
        module.run(model, X)


def test_enter_context_is_refused(model: NNsight) -> None:
    stack = contextlib.ExitStack()
    with pytest.raises(WithBlockNotFoundError):
        stack.enter_context(model.trace(X))
    with pytest.raises(WithBlockNotFoundError, match="must be entered by a `with` statement"):
        model.trace(X).__enter__()
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace()) or "pydev" in repr(sys.gettrace())


JUMPS = {
    "return": "def run(model, x):\n    with model.trace(x):\n        return model[0].output\n",
    "yield": "def run(model, x):\n    with model.trace(x):\n        yield model[0].output\n",
    "break": "def run(model, x):\n    for _ in range(2):\n        with model.trace(x):\n            break\n",
    "continue": "def run(model, x):\n    for _ in range(2):\n        with model.trace(x):\n            continue\n",
    "nested": "def run(model, x):\n    with model.trace(x):\n        if model:\n            return 1\n",
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


def test_a_trace_without_input(model: NNsight) -> None:
    with pytest.raises(ValueError, match="no input"):
        with model.trace():
            model[0].output.save()


def test_a_tracer_without_a_model() -> None:
    tracer = Deferred()
    with tracer:
        value = [1].save()
    assert value == [1]
    assert tracer.ran
    assert tracer.info is None


def test_a_backend_decides_about_the_block(model: NNsight) -> None:
    from nnsight.tracing import Backend

    class Twice(Backend):
        def __call__(self, tracer: Any) -> Any:
            self.function = super().__call__(tracer)
            self.line = tracer.info.line
            self.function()
            self.function()

    backend = Twice()
    events: list[str] = []
    with model.trace(X, backend=backend):
        events.append("run")
    assert events == ["run", "run"]
    assert linecache.getline(__file__, backend.line).strip() == "with model.trace(X, backend=backend):"


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
