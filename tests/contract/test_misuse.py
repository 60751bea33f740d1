"""Wrong programs: each is an error of the right type that says what and where, and leaves the model as it was.

A program is an expression in the block of a trace (:func:`inside`), an expression somewhere else (:func:`outside`, :func:`behind`),
or a function (:func:`mistake`), whose wrong line ends in ``# wrong``. The innermost frame of the traceback in this file has to be the
wrong line, or the message has to name it.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch
from greenlet import getcurrent, greenlet

import nnsight
from nnsight import LanguageModel, NNsight
from nnsight.runtime import OutOfOrderError, active_interleaver
from nnsight.runtime.errors import MissedProviderError, ReplacementShapeError
from nnsight.runtime.switching import workers
from nnsight.tracing import WithBlockNotFoundError
from nnsight.tracing.saving import saves

from ..conftest import Layer, Rows, assert_no_instrumentation, both

FILE = __file__


class Constant(torch.nn.Module):
    """Is called without arguments."""

    def forward(self) -> torch.Tensor:
        return torch.ones(1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.constant = Constant()
        self.unused = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x + self.constant()) * scale


class Failing(torch.nn.Module):
    """Raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        raise self.error


class Recursive(torch.nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return self.inner(x) if depth == 0 else self(self.inner(x), depth - 1)


@dataclass
class Case:
    """What a wrong program works on.

    Attributes:
        compile: Whether its traces are compiled.
        net: The module.
        model: The module, wrapped; joins invokes.
        x: An input.
    """

    compile: bool
    net: Net = field(default_factory=Net)
    x: torch.Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 12).reshape(3, 4))

    @cached_property
    def model(self) -> Rows:
        return Rows(self.net, compile={"backend": "eager"})

    @cached_property
    def language_model(self) -> LanguageModel:
        return nnsight.demo_model(compile={"backend": "eager"})

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.trace(*args, compile=self.compile, **kwargs)


@dataclass(frozen=True)
class Mistake:
    """One wrong program.

    Attributes:
        program: It.
        error: What it raises.
        says: Parts of the message.
        compiled: Error and parts of the message when compiled, if they differ.
        line: Number of the line that is wrong.
    """

    program: Callable[[Case], Any]
    error: type[BaseException]
    says: tuple[str, ...]
    compiled: tuple[Any, ...] | None
    line: int


MISTAKES: dict[str, Mistake] = {}


def mistake(error: type[BaseException], *says: str, compiled: tuple[Any, ...] | None = None) -> Any:
    """Add the decorated function to the table."""

    def add(program: Callable[[Case], Any]) -> Callable[[Case], Any]:
        lines, first = inspect.getsourcelines(program)
        (wrong,) = (number for number, line in enumerate(lines, first) if "# wrong" in line)
        assert program.__name__ not in MISTAKES
        MISTAKES[program.__name__] = Mistake(program, error, says, compiled, wrong)
        return program

    return add


def inside(name: str, expression: Callable[[Any, Any], Any], error: type[BaseException], *says: str) -> None:
    """Add a program whose block is an expression of the model and the tracer."""

    def program(case: Case) -> None:
        with case.trace(case.x) as tracer:
            expression(case.model, tracer)

    MISTAKES[name] = Mistake(program, error, says, None, expression.__code__.co_firstlineno)


def behind(name: str, expression: Callable[[Any, Any], Any], error: type[BaseException], *says: str) -> None:
    """Add a program that evaluates the expression of case and tracer when the trace is over."""

    def program(case: Case) -> None:
        with case.trace(case.x) as tracer:
            case.model.first.output.save()
        expression(case, tracer)

    MISTAKES[name] = Mistake(program, error, says, None, expression.__code__.co_firstlineno)


def outside(name: str, expression: Callable[[Case], Any], error: type[BaseException], *says: str) -> None:
    """Add a program that is an expression and has no trace."""
    MISTAKES[name] = Mistake(expression, error, says, None, expression.__code__.co_firstlineno)


@pytest.fixture(scope="module")
def made() -> dict[bool, Case]:
    """One case for all eager and one for all compiled programs: what one leaves behind hurts the next."""
    torch.manual_seed(0)
    return {compile: Case(compile) for compile in (False, True)}


@pytest.fixture
def case(made: dict[bool, Case], compile: bool) -> Case:
    return made[compile]


def attributes(module: torch.nn.Module) -> dict[str, list[str]]:
    return {path: list(vars(child)) for path, child in module.named_modules()}


def alive_greenlets() -> list[greenlet]:
    """Greenlets that run, or wait for something; not those that wait for the next block of this thread."""
    mine = {worker for _, worker in workers._idle.workers}
    current = getcurrent()
    while current is not None:
        mine.add(current)
        current = current.parent
    # By type: asking some objects of torch for their class makes them warn.
    return [found for found in gc.get_objects() if issubclass(type(found), greenlet) and found and found not in mine]


def position(error: BaseException) -> int:
    """Return the line of this file that the traceback of ``error`` ends in, models left out."""
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == FILE and f.name != "forward"), 0)


def assert_untouched(case: Case, before: dict[str, list[str]], tracing: Any) -> None:
    """Assert that nothing of a run is left, and that the next trace is right."""
    assert active_interleaver() is None
    assert saves.get() is None
    assert sys.gettrace() is tracing
    assert not alive_greenlets()
    assert_no_instrumentation(case.net)
    assert attributes(case.net) == before
    with case.trace(case.x):
        first = case.model.first.output.save()
        case.model.layers[0].output[0][:] += 1.0
        out = case.model.output.save()
    handle = case.net.layers[0].register_forward_hook(lambda _, __, output: (output[0] + 1.0, None))
    expected = case.net(case.x)
    handle.remove()
    torch.testing.assert_close(first, case.net.first(case.x), rtol=0.0, atol=0.0)
    torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0)


# -- locations -------------------------------------------------------------------------------------------------------


@mistake(OutOfOrderError, "Value was missed for model.first.output.i0", "move this line up")
def reads_an_earlier_location(case: Case) -> None:
    with case.trace(case.x):
        case.model.head.output.save()
        case.model.first.output.save()  # wrong


@mistake(OutOfOrderError, "model.first.input", "move this line up")
def reads_the_input_after_the_output(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        case.model.first.input.save()  # wrong


@mistake(MissedProviderError, "model.first.output", "another model")
def uses_another_models_module_of_the_same_name(case: Case) -> None:
    other = NNsight(Net())
    with case.trace(case.x):
        other.first.output.save()  # wrong


@mistake(TypeError, "A backend must be callable")
def names_a_backend(case: Case) -> None:
    with case.model.trace(case.x, backend="vllm"):  # wrong
        case.model.first.output.save()


@mistake(ValueError, "Cannot access `model.first.output` outside")
def reads_in_a_function_that_outlives_the_block(case: Case) -> None:
    kept: list[Any] = []
    with case.trace(case.x):
        kept.append(lambda: case.model.first.output)  # wrong
    kept[0]()


@mistake(ValueError, "Cannot access `model.first.output` outside", "model.trace")
def reads_in_a_session(case: Case) -> None:
    with case.model.session():
        case.model.first.output.save()  # wrong


@mistake(UnboundLocalError, "'hidden'")
def uses_what_was_not_saved(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output
    print(hidden)  # wrong


@mistake(UnboundLocalError, "'hidden'")
def deletes_what_was_saved(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output.save()
        del hidden
    print(hidden)  # noqa: F821  # wrong
inside("unused_input", lambda m, _: m.unused.inputs, OutOfOrderError, "model.unused.input", "does not call this module")
inside("container", lambda m, _: m.layers.output, OutOfOrderError, "model.layers.output", "was not provided", "ModuleList")
inside("second_call", lambda m, _: m.first.next().output, OutOfOrderError, "model.first.output", "occurred only 1 time")
inside("misspelt_output", lambda m, _: m.first.outptu, AttributeError, "`outptu`", "Did you mean `output`")
inside("an_item_too_many", lambda m, _: m.layers[0].output[5], IndexError, "tuple index out of range")
inside("no_arguments", lambda m, _: m.constant.input, ValueError, "model.constant", "without arguments")
inside("a_named_save", lambda m, _: m.first.output.save("hidden"), TypeError, "save() takes 1 positional argument")
inside("a_module_for_its_output", lambda m, _: m.first + 1, TypeError, "unsupported operand", "Envoy")
inside("an_output_called", lambda m, _: m.first.output(), TypeError, "not callable")
outside("a_misspelt_trace", lambda case: case.model.trce(case.x), AttributeError, "`trce`", "Did you mean `trace`")
outside("an_unknown_name", lambda case: case.model.layers["a"], KeyError, "`a`", "child modules")
outside("a_write_outside", lambda case: setattr(case.model.first, "output", 0), ValueError, "Cannot access `model.first.output` outside")
outside("a_tensor_saved_outside", lambda case: case.x.save(), ValueError, "save() was called outside a trace", "inside the block")


# -- values ----------------------------------------------------------------------------------------------------------


def replaces(name: str, path: str, error: type[BaseException], *says: str, value: Callable[[Any, Any], Any]) -> None:
    """Add a program that replaces what is at ``path`` by a value made of the model and the tracer."""
    *owner, attribute = path.split(".")

    def program(case: Case) -> None:
        with case.trace(case.x) as tracer:
            setattr(case.model.get(".".join(owner)), attribute, value(case.model, tracer))  # wrong

    wrong = program.__code__.co_firstlineno + 2
    MISTAKES[f"{path} by {name}"] = Mistake(program, error, says, None, wrong)
replaces("none", "first.output", TypeError, "model.first.output", "NoneType where the model has a tensor", value=lambda *_: None)
replaces("a number", "first.output", TypeError, "model.first.output", "int where the model has a tensor", value=lambda *_: 3)
replaces("a tracer", "first.output", TypeError, "model.first.output", "Tracer where the model has a tensor", value=lambda _, tracer: tracer)
replaces("a module", "first.output", TypeError, "model.first.output", "where the model has a tensor", value=lambda model, _: model.head)
replaces("a tensor", "layers.0.output", ReplacementShapeError, "another structure", "tuple", value=lambda *_: torch.zeros(3, 4))
replaces("a tensor", "first.inputs", ReplacementShapeError, "model.first.input", "another structure", value=lambda *_: torch.zeros(3, 4))
replaces("arguments", "first.inputs", ReplacementShapeError, "first.input", "another structure", value=lambda *_: (torch.zeros(3, 4),))
replaces("a module not called", "unused.output", OutOfOrderError, "does not call this module", value=lambda *_: torch.zeros(3, 4))


@mistake(TypeError, "model.first.output", "tuple", compiled=(ReplacementShapeError, "model.first.output", "structure"))
def replaces_a_tensor_by_a_tuple(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output = (torch.zeros(3, 4),)  # wrong


# -- input -----------------------------------------------------------------------------------------------------------


def given(name: str, error: type[BaseException], *says: str, language: bool = False, args: tuple[Any, ...], **kwargs: Any) -> None:
    """Add a program that traces a model with these arguments."""

    def program(case: Case) -> None:
        model = case.language_model if language else case.model
        with model.trace(*args, compile=case.compile, **kwargs):  # wrong
            model.output.save()

    wrong = program.__code__.co_firstlineno + 2
    MISTAKES[f"given {name}"] = Mistake(program, error, says, None, wrong)


ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)
given("a misspelt argument", TypeError, "unexpected keyword argument 'sclae'", args=(ROWS,), sclae=2.0)
given("too many arguments", TypeError, "4 were given", args=(ROWS, 1.0, 2.0))
given("text for a plain model", TypeError, "must be Tensor, not str", args=("The movie was",))
given("a module", TypeError, "must be Tensor, not NNsight", args=(NNsight(torch.nn.Linear(4, 4)),))
given("an empty prompt among others", ValueError, "Prompt 1 of 2 is empty", args=(["a", ""],), language=True)
outside(
    "a_misspelt_option_of_generate",
    lambda case: case.language_model.generate("The movie was", max_new_token=3),
    ValueError, "max_new_token",
)  # fmt: skip


# -- invokes and barriers --------------------------------------------------------------------------------------------


@mistake(ValueError, "Cannot invoke during an active model execution", "side by side")
def nests_invokes(case: Case) -> None:
    with case.trace() as tracer:
        with tracer.invoke(case.x):
            with tracer.invoke(case.x):  # wrong
                pass


@mistake(ValueError, "Cannot invoke", "given no input")
def invokes_in_a_trace_with_input(case: Case) -> None:
    with case.trace(case.x) as tracer:
        with tracer.invoke(case.x):  # wrong
            pass


@mistake(ValueError, "Cannot invoke", "has ended")
def invokes_after_the_trace(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output.save()
    with tracer.invoke(case.x):  # wrong
        pass


@mistake(OutOfOrderError, "barrier(3)", "never reached by every block")
def makes_a_barrier_of_too_many(case: Case) -> None:
    with case.trace() as tracer:
        barrier = tracer.barrier(3)
        with tracer.invoke(case.x):
            barrier()  # wrong
        with tracer.invoke(case.x):
            barrier()


inside("a_barrier_of_none", lambda _, tracer: tracer.barrier(0), ValueError, "at least one participant", "0")
inside("a_barrier_of_a_float", lambda _, tracer: tracer.barrier(2.0), TypeError, "tracer.barrier", "number of its participants", "float")


# -- steps -----------------------------------------------------------------------------------------------------------
inside("half_a_move", lambda _, tracer: tracer.next(0.5), TypeError, "next()", "float")
behind("a_loop_outside", lambda _, tracer: list(tracer.iter[:2]), ValueError, "tracer.iter", "inside the block")
behind("an_open_loop_outside", lambda _, tracer: list(tracer.all()), ValueError, "inside the block of a trace only")
behind("a_move_outside", lambda _, tracer: tracer.next(), ValueError, "tracer.next()", "inside the block")
behind("a_move_of_a_module_outside", lambda case, _: case.model.first.next(), ValueError, "inside the block of a trace only")


# -- skip and stop ---------------------------------------------------------------------------------------------------


inside("a_skip_without_a_value", lambda model, _: model.first.skip(), TypeError, "skip()", "'value'")
inside("a_skip_of_what_does_not_run", lambda m, _: m.unused.skip(0), OutOfOrderError, "model.unused.input", "does not call this module")
behind("a_stop_outside", lambda _, tracer: tracer.stop(), ValueError, "tracer.stop()", "inside the block of a trace only")
behind("a_result_afterwards", lambda _, tracer: tracer.result, ValueError, "Cannot access `result` outside of interleaving")


@mistake(OutOfOrderError, "model.first.input", "already ran past")
def skips_what_has_run(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output
        case.model.first.skip(hidden)  # wrong


@mistake(TypeError, "NoneType", compiled=(TypeError, "model.first.output", "NoneType where the model has a tensor", "compile=False"))
def skips_with_nothing(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.skip(None)  # wrong
        case.model.output.save()


@mistake(OutOfOrderError, "model.layers.0.inner.output", "inside one that was skipped")
def reads_inside_a_skipped_module(case: Case) -> None:
    with case.trace(case.x):
        case.model.layers[0].skip((case.x, None))
        case.model.layers[0].inner.output.save()  # wrong


# -- caches ----------------------------------------------------------------------------------------------------------


inside("an_unknown_module_cached", lambda _, t: t.cache(["model.frist"]), ValueError, "'model.frist'", "Did you mean `model.first`")
inside("a_module_not_wrapped", lambda model, t: t.cache([model._module.first]), TypeError, "modules of the wrapped model", "Linear")
inside("a_cache_of_nothing", lambda _, t: t.cache(include_output=False), ValueError, "tracer.cache()", "neither outputs nor inputs")
inside("a_dtype_by_name", lambda _, t: t.cache(dtype="float16"), TypeError, "dtype of a cache", "torch.float16")
inside("an_unknown_device", lambda _, t: t.cache(device="gpu"), RuntimeError, "gpu")
behind("a_cache_outside", lambda _, t: t.cache(), ValueError, "tracer.cache()", "inside the block")


@mistake(TypeError, "Cache", "context manager")
def enters_a_cache(case: Case) -> None:
    with case.trace(case.x) as tracer:
        with tracer.cache():  # wrong
            pass


# -- gradients -------------------------------------------------------------------------------------------------------


@mistake(RuntimeError, "does not require grad")
def goes_backward_without_gradients(case: Case) -> None:
    with torch.no_grad(), case.trace(case.x):
        loss = case.model.head.output.sum()
        with loss.backward():  # wrong
            pass


@mistake(ValueError, "Cannot request `model.first.output` in a backwards tracer", "before `with ...backward():`")
def reads_a_value_in_a_backward_block(case: Case) -> None:
    with case.trace(case.x):
        loss = case.model.head.output.sum()
        with loss.backward():
            case.model.first.output.save()  # wrong


@mistake(OutOfOrderError, ".grad", "(3, 2)", "reverse order")
def reads_gradients_in_forward_order(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output.requires_grad_()
        logits = case.model.head.output.requires_grad_()
        with logits.sum().backward():
            hidden.grad.save()
            logits.grad.save()  # wrong


def _replaces_a_gradient(by: Any) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        with case.trace(case.x):
            hidden = case.model.first.output.requires_grad_()
            with case.model.head.output.sum().backward():
                hidden.grad = by  # wrong

    program.__name__ = f"replaces_a_gradient_by_{getattr(by, 'dtype', by)}"
    return program


mistake(ReplacementShapeError, "gradient", "(7,)", "(3, 4)")(_replaces_a_gradient(torch.ones(7)))
mistake(TypeError, "gradient", "NoneType", "zeros_like")(_replaces_a_gradient(None))
mistake(TypeError, "gradient", "torch.float64", "torch.float32")(_replaces_a_gradient(torch.ones(3, 4, dtype=torch.float64)))


@mistake(ValueError, "backward")
def caches_in_a_backward_block(case: Case) -> None:
    with case.trace(case.x) as tracer:
        with case.model.head.output.sum().backward():
            tracer.cache()  # wrong


@mistake(RuntimeError, "second time", "retain_graph=True")
def goes_backward_twice(case: Case) -> None:
    with case.trace(case.x):
        loss = case.model.head.output.pow(2).sum()
        with loss.backward():
            pass
        with loss.backward():  # wrong
            pass


# -- the form of a block ---------------------------------------------------------------------------------------------


@mistake(WithBlockNotFoundError, "`with` statement", "__enter__")
def enters_by_hand(case: Case) -> None:
    case.trace(case.x).__enter__()  # wrong


@mistake(ValueError, "entered before", "again")
def enters_a_trace_in_itself(case: Case) -> None:
    trace = case.trace(case.x)
    with trace:
        with trace:  # wrong
            pass


# -- edits and options -----------------------------------------------------------------------------------------------


@mistake(OutOfOrderError, "model.unused.output", "does not call this module")
def edits_what_does_not_run(case: Case) -> None:
    with case.model.edit() as edited:
        case.model.unused.output[:] = 0  # wrong
    with edited.trace(case.x, compile=case.compile):
        edited.first.output.save()


outside("one_edit_cleared", lambda case: case.model.clear_edits("all"), TypeError, "clear_edits()", "positional argument")
outside("names_in_a_list", lambda case: NNsight(case.net, rename=["first"]), TypeError, "rename=", "dict")
outside("a_number_as_name", lambda case: NNsight(case.net, rename={"first": 3}), TypeError, "rename", "string")
outside("no_class_of_envoys", lambda case: NNsight(case.net, envoys=3), TypeError, "envoys=")
outside("an_unknown_option", lambda case: NNsight(case.net, renames={}), TypeError, "unknown options", "renames")


# -- errors of the user's own code -----------------------------------------------------------------------------------


@mistake(ZeroDivisionError, "division by zero")
def fails_in_the_block(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        1 / 0  # noqa: B018  # wrong


@mistake(UserWarning, "mine")
def warns_where_warnings_are_errors(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        warnings.warn("mine", stacklevel=1)  # wrong


@mistake(KeyError, "hook")
def fails_in_a_hook(case: Case) -> None:
    def hook(*_: Any) -> None:
        raise KeyError("hook")  # wrong

    model = NNsight(Net(), compile={"backend": "eager"})
    model._module.head.register_forward_hook(hook)
    with model.trace(case.x, compile=case.compile):
        model.first.output.save()


def _fails_in_the_model(error: BaseException) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        model = NNsight(Failing(error), compile={"backend": "eager"})
        try:
            with model.trace(case.x, compile=case.compile):  # wrong
                model.inner.output.save()
        finally:
            assert_no_instrumentation(model._module)

    program.__name__ = f"model_raises_{type(error).__name__}"
    return program


def _fails_in_the_block(error: BaseException) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        with case.trace(case.x):
            case.model.first.output.save()
            raise error  # wrong

    program.__name__ = f"block_raises_{type(error).__name__}"
    return program


for _error in (StopIteration("block"), KeyboardInterrupt("block"), SystemExit("block"), GeneratorExit("block")):
    mistake(type(_error), "block")(_fails_in_the_block(_error))
for _error in (ValueError("model"), KeyboardInterrupt("model"), SystemExit("model"), GeneratorExit("model")):
    mistake(type(_error), "model")(_fails_in_the_model(_error))


@both
@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistake(name: str, case: Case, compile: bool) -> None:
    """It is an error of the right type that names the place and the fix, and the model is as before."""
    wrong = MISTAKES[name]
    expected, *says = (wrong.compiled if compile and wrong.compiled else None) or (wrong.error, *wrong.says)
    before, tracing = attributes(case.net), sys.gettrace()
    with pytest.raises(expected) as caught:
        wrong.program(case)
    error = caught.value
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for part in says:
        assert part in message, message
    assert position(error) == wrong.line or f"{FILE}:{wrong.line}" in message, (position(error), wrong.line, message)
    assert_untouched(case, before, tracing)


# -- programs that look wrong and are not ----------------------------------------------------------------------------


@both
def test_a_loop_beyond_the_last_step_warns(case: Case, compile: bool) -> None:
    before, tracing = attributes(case.net), sys.gettrace()
    with pytest.warns(UserWarning, match=r"model\.first\.output\.i1.*Bound the loop"):
        with case.trace(case.x) as tracer:
            kept = [].save()
            for _ in tracer.iter[:2]:
                kept.append(case.model.first.output)
    assert len(kept) == 1
    assert_untouched(case, before, tracing)


@both
def test_a_trace_of_another_model_inside_a_trace(case: Case, compile: bool) -> None:
    before, tracing = attributes(case.net), sys.gettrace()
    other = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), compile={"backend": "eager"})
    with case.trace(case.x):
        case.model.first.output  # noqa: B018
        with other.trace(case.x, compile=compile):
            theirs = other[0].output.save()
        case.model.layers[0].output[0][:] = theirs
        out = case.model.layers[1].input.save()
    assert torch.equal(theirs, other._module[0](case.x))
    assert torch.equal(out, theirs)
    assert_untouched(case, before, tracing)
    assert_no_instrumentation(other._module)


@both
def test_a_trace_of_the_same_model_inside_a_trace(case: Case, compile: bool) -> None:
    before, tracing = attributes(case.net), sys.gettrace()
    with case.trace(case.x):
        outer = case.model.first.output.save()
        with case.trace(case.x * 2):
            inner = case.model.first.output.save()
        out = case.model.output.save()
    assert torch.equal(outer, case.net.first(case.x))
    assert torch.equal(inner, case.net.first(case.x * 2))
    assert torch.equal(out, case.net(case.x))
    assert_untouched(case, before, tracing)


@both
def test_a_module_that_calls_itself(compile: bool) -> None:
    model = NNsight(Recursive(), compile={"backend": "eager"})
    x = torch.ones(2, 4)
    with model.trace(x, compile=compile) as tracer:
        kept = [].save()
        for _ in tracer.iter[:3]:
            kept.append(model.inner.output)
    assert len(kept) == 3
    assert torch.equal(kept[-1], model._module(x))


@both
def test_an_error_may_be_saved(case: Case, compile: bool) -> None:
    with case.trace(case.x):
        try:
            case.model.first.outptu  # noqa: B018
        except AttributeError as error:
            kept = nnsight.save(error)
    assert "outptu" in str(kept)
    assert active_interleaver() is None


@both
def test_another_thread_is_outside(case: Case, compile: bool) -> None:
    """A block's values are not for threads that it starts."""
    before, tracing = attributes(case.net), sys.gettrace()
    raised: list[Exception] = []

    def read() -> None:
        try:
            case.model.first.output  # noqa: B018
        except ValueError as error:
            raised.append(error)

    with case.trace(case.x):
        case.model.first.output  # noqa: B018
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert "outside of interleaving" in str(raised.pop())
    assert_untouched(case, before, tracing)


def test_what_is_never_entered_warns() -> None:
    model = NNsight(Net())
    with pytest.warns(RuntimeWarning, match="Tracer was created but never entered"):
        model.trace(torch.ones(1, 4))
    with pytest.warns(RuntimeWarning, match="Tracer was created but never entered"):
        model.edit()
