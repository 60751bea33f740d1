"""Wrong programs: each is an error of the right type that says what and where, and leaves the model as it was.

The table is made of functions decorated with :func:`mistake`. The line with the mistake ends in ``# wrong``: the
innermost frame of the traceback in this file has to be that line, or the message has to name it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
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


@mistake(OutOfOrderError, "model.first.output", "move this line up")
def reads_an_earlier_location(case: Case) -> None:
    with case.trace(case.x):
        case.model.head.output.save()
        case.model.first.output.save()  # wrong


@mistake(OutOfOrderError, "model.first.input", "move this line up")
def reads_the_input_after_the_output(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        case.model.first.input.save()  # wrong


@mistake(OutOfOrderError, "model.input", "move this line up")
def reads_the_input_of_the_model_late(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        case.model.input.save()  # wrong


@mistake(OutOfOrderError, "model.unused.output", "does not call this module")
def reads_a_module_that_is_not_called(case: Case) -> None:
    with case.trace(case.x):
        case.model.unused.output.save()  # wrong


@mistake(OutOfOrderError, "model.unused.output", "does not call this module")
def writes_a_module_that_is_not_called(case: Case) -> None:
    with case.trace(case.x):
        case.model.unused.output = case.x  # wrong


@mistake(OutOfOrderError, "model.layers.output", "ModuleList")
def reads_a_container(case: Case) -> None:
    with case.trace(case.x):
        case.model.layers.output.save()  # wrong


@mistake(OutOfOrderError, "model.first.output", "occurred only 1 time")
def asks_for_a_second_call(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.next().output.save()  # wrong


@mistake(MissedProviderError, "model.0.output", "another model")
def uses_another_models_module(case: Case) -> None:
    other = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with case.trace(case.x):
        other[0].output.save()  # wrong


@mistake(MissedProviderError, "model.first.output", "another model")
def uses_another_models_module_of_the_same_name(case: Case) -> None:
    other = NNsight(Net())
    with case.trace(case.x):
        other.first.output.save()  # wrong


@mistake(AttributeError, "`outputs`", "Did you mean `output`", "would do nothing")
def assigns_a_misspelt_property(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.outputs = torch.zeros(2, 4)  # wrong


@mistake(ValueError, "next() cannot count")
def goes_back_a_step_of_a_module(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.next(-1).output.save()  # wrong


@mistake(TypeError, "True, False or", "model.compile")
def passes_options_to_trace(case: Case) -> None:
    with case.model.trace(case.x, compile={"backend": "eager"}):  # wrong
        case.model.first.output.save()


@mistake(TypeError, "rename=", "dict")
def renames_with_a_list(case: Case) -> None:
    NNsight(case.net, rename=["first"])  # wrong


@mistake(TypeError, "rename", "string")
def renames_to_a_number(case: Case) -> None:
    NNsight(case.net, rename={"first": 3})  # wrong


@mistake(TypeError, "envoys=")
def chooses_no_class_of_envoys(case: Case) -> None:
    NNsight(case.net, envoys=3)  # wrong


@mistake(KeyError, "`a`", "child modules")
def indexes_by_an_unknown_name(case: Case) -> None:
    case.model.layers["a"]  # wrong


@mistake(TypeError, "A backend is a callable")
def names_a_backend(case: Case) -> None:
    with case.model.trace(case.x, backend="vllm"):  # wrong
        case.model.first.output.save()


@mistake(AttributeError, "`frist`", "Did you mean `first`")
def misspells_a_module(case: Case) -> None:
    with case.trace(case.x):
        case.model.frist.output.save()  # wrong


@mistake(AttributeError, "`outptu`", "Did you mean `output`")
def misspells_output(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.outptu.save()  # wrong


@mistake(AttributeError, "`trce`", "Did you mean `trace`")
def misspells_trace(case: Case) -> None:
    with case.model.trce(case.x):  # wrong
        pass


@mistake(IndexError, "`model.layers` has 2 children", "index 9")
def asks_for_a_layer_too_many(case: Case) -> None:
    with case.trace(case.x):
        case.model.layers[9].output.save()  # wrong


@mistake(IndexError, "tuple index out of range")
def asks_for_an_item_too_many(case: Case) -> None:
    with case.trace(case.x):
        case.model.layers[0].output[5].save()  # wrong


@mistake(ValueError, "model.constant", "without arguments")
def reads_the_input_of_a_call_without_arguments(case: Case) -> None:
    with case.trace(case.x):
        case.model.constant.input.save()  # wrong


@mistake(ValueError, "Cannot access `model.first.output` outside", "model.trace", ".save()")
def reads_outside(case: Case) -> None:
    case.model.first.output  # noqa: B018  # wrong


@mistake(ValueError, "Cannot access `model.first.output` outside", "model.trace")
def writes_outside(case: Case) -> None:
    case.model.first.output = case.x  # wrong


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


@mistake(ValueError, "save() was called outside a trace", "inside the block")
def saves_outside(case: Case) -> None:
    nnsight.save(case.x)  # wrong


@mistake(ValueError, "save() was called outside a trace", "inside the block")
def saves_a_tensor_outside(case: Case) -> None:
    case.x.save()  # type: ignore[attr-defined]  # wrong


@mistake(TypeError, "save() takes 1 positional argument")
def names_what_is_saved(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save("hidden")  # wrong


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


# -- values ----------------------------------------------------------------------------------------------------------


@mistake(ReplacementShapeError, "model.first.output", "(3, 5)", "(3, 4)")
def replaces_by_another_shape(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output = torch.zeros(3, 5)  # wrong


@mistake(ReplacementShapeError, "model.layers.0.output", "another structure", "tuple")
def replaces_a_tuple_by_a_tensor(case: Case) -> None:
    with case.trace(case.x):
        case.model.layers[0].output = torch.zeros(3, 4)  # wrong


@mistake(TypeError, "model.first.output", "tuple", compiled=(ReplacementShapeError, "model.first.output", "structure"))
def replaces_a_tensor_by_a_tuple(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output = (torch.zeros(3, 4),)  # wrong


@mistake(TypeError, "model.first.output", "NoneType where the model has a tensor")
def replaces_by_none(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output = None  # wrong


@mistake(TypeError, "model.first.output", "int where the model has a tensor")
def replaces_by_a_number(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output = 3  # wrong


@mistake(TypeError, "model.first.output", "Tracer where the model has a tensor")
def replaces_by_a_tracer(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output = tracer  # wrong


@mistake(TypeError, "model.first.output", "where the model has a tensor")
def replaces_by_a_module(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output = case.model.head  # wrong


@mistake(ReplacementShapeError, "model.first.input", "another structure")
def replaces_inputs_by_a_tensor(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.inputs = case.x  # wrong


@mistake(ReplacementShapeError, "model.first.input", "another structure")
def replaces_inputs_by_the_arguments_alone(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.inputs = (case.x,)  # wrong


@mistake(TypeError, "unsupported operand", "Envoy")
def takes_a_module_for_its_output(case: Case) -> None:
    with case.trace(case.x):
        case.model.first + 1  # wrong


@mistake(TypeError, "not callable")
def calls_an_output(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output().save()  # wrong


# -- input -----------------------------------------------------------------------------------------------------------


@mistake(ValueError, "trace() was given no input", "model.trace(x)", "tracer.invoke(x)")
def gives_no_input(case: Case) -> None:
    with case.trace():  # wrong
        case.model.output.save()


@mistake(TypeError, "unexpected keyword argument 'sclae'")
def misspells_an_argument(case: Case) -> None:
    with case.trace(case.x, sclae=2.0):  # wrong
        case.model.first.output.save()


@mistake(TypeError, "4 were given")
def gives_too_many_arguments(case: Case) -> None:
    with case.trace(case.x, 1.0, 2.0):  # wrong
        case.model.first.output.save()


@mistake(TypeError, "must be Tensor, not str")
def gives_text_to_a_plain_model(case: Case) -> None:
    with case.trace("The movie was"):  # wrong
        case.model.first.output.save()


@mistake(TypeError, "must be Tensor, not Envoy")
def gives_a_module_as_input(case: Case) -> None:
    with case.trace(case.model.first):  # wrong
        case.model.first.output.save()


@mistake(ValueError, "it has no tokens")
def gives_an_empty_prompt(case: Case) -> None:
    with case.language_model.trace("", compile=case.compile):  # wrong
        pass


@mistake(ValueError, "Prompt 1 of 2 is empty")
def gives_an_empty_prompt_among_others(case: Case) -> None:
    with case.language_model.trace(["a", ""], compile=case.compile):  # wrong
        pass


@mistake(ValueError, "list of prompts is empty")
def gives_an_empty_list(case: Case) -> None:
    with case.language_model.trace([], compile=case.compile):  # wrong
        pass


@mistake(TypeError, "Token ids are integers", "inputs_embeds=")
def gives_floats_as_ids(case: Case) -> None:
    with case.language_model.trace(torch.ones(1, 3), compile=case.compile):  # wrong
        pass


@mistake(TypeError, "A trace takes one input, not 2", "list")
def gives_two_prompts(case: Case) -> None:
    with case.language_model.trace("a", "b", compile=case.compile):  # wrong
        pass


@mistake(AttributeError, "Tokenizer not found", "tokenizer=")
def gives_text_without_a_tokenizer(case: Case) -> None:
    model = LanguageModel(case.language_model._module)
    with model.trace("The movie was", compile=case.compile):  # wrong
        pass


@mistake(ValueError, "max_new_token")
def misspells_an_option_of_generate(case: Case) -> None:
    with case.language_model.generate("The movie was", max_new_token=3):  # wrong
        pass


# -- invokes and barriers --------------------------------------------------------------------------------------------


@mistake(ValueError, "Cannot invoke", "side by side")
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


@mistake(NotImplementedError, "Batching is not implemented for NNsight", "`_batch`")
def invokes_twice_on_a_plain_model(case: Case) -> None:
    model = NNsight(case.net)
    with model.trace(compile=case.compile) as tracer:  # wrong
        with tracer.invoke(case.x):
            pass
        with tracer.invoke(case.x):
            pass


@mistake(ValueError, "at least one participant", "0")
def makes_a_barrier_of_none(case: Case) -> None:
    with case.trace() as tracer:
        barrier = tracer.barrier(0)  # wrong
        with tracer.invoke(case.x):
            barrier()


@mistake(TypeError, "tracer.barrier", "number of its participants", "float")
def makes_a_barrier_of_a_float(case: Case) -> None:
    with case.trace() as tracer:
        tracer.barrier(2.0)  # wrong


@mistake(OutOfOrderError, "barrier(3)", "not all of its participants")
def makes_a_barrier_of_too_many(case: Case) -> None:
    with case.trace() as tracer:
        barrier = tracer.barrier(3)
        with tracer.invoke(case.x):
            barrier()  # wrong
        with tracer.invoke(case.x):
            barrier()


@mistake(OutOfOrderError, "barrier(2)", "not all of its participants")
def calls_a_barrier_twice(case: Case) -> None:
    with case.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(case.x):
            barrier()
            barrier()  # wrong
        with tracer.invoke(case.x):
            barrier()


@mistake(ValueError, "A barrier can be called inside an invoke only")
def calls_a_barrier_between_invokes(case: Case) -> None:
    with case.trace() as tracer:
        barrier = tracer.barrier(2)
        barrier()  # wrong
        with tracer.invoke(case.x):
            barrier()


@mistake(ValueError, "A barrier can be called inside an invoke only")
def calls_a_barrier_outside(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output.save()
    tracer.barrier(1)()  # wrong


# -- steps -----------------------------------------------------------------------------------------------------------


@mistake(ValueError, "tracer.iter", "-1")
def counts_steps_from_the_end(case: Case) -> None:
    with case.trace(case.x) as tracer:
        for _ in tracer.iter[-1]:  # wrong
            pass


@mistake(ValueError, "tracer.iter", "zero")
def steps_by_zero(case: Case) -> None:
    with case.trace(case.x) as tracer:
        for _ in tracer.iter[::0]:  # wrong
            pass


@mistake(TypeError, "tracer.iter", "str")
def names_a_step(case: Case) -> None:
    with case.trace(case.x) as tracer:
        for _ in tracer.iter["first"]:  # wrong
            pass


@mistake(TypeError, "tracer.iter", "float")
def chooses_half_steps(case: Case) -> None:
    with case.trace(case.x) as tracer:
        for _ in tracer.iter[0.0:]:  # wrong
            pass


@mistake(TypeError, "tracer.iter", "bool")
def chooses_steps_by_a_mask(case: Case) -> None:
    with case.trace(case.x) as tracer:
        for _ in tracer.iter[[True, False]]:  # wrong
            pass


@mistake(TypeError, "tracer.iter[:3]")
def loops_over_iter_itself(case: Case) -> None:
    with case.trace(case.x) as tracer:
        for _ in tracer.iter:  # wrong
            case.model.first.output.save()


@mistake(ValueError, "tracer.iter", "inside the block")
def loops_outside(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output.save()
    for _ in tracer.iter[:2]:  # wrong
        pass


@mistake(ValueError, "tracer.next()", "inside the block")
def moves_on_outside(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output.save()
    tracer.next()  # wrong


@mistake(ValueError, "next()", "-1", "does not go back")
def moves_back(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.next(-1)  # wrong


@mistake(TypeError, "next()", "float")
def moves_on_by_half_a_step(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.next(0.5)  # wrong


# -- skip and stop ---------------------------------------------------------------------------------------------------


@mistake(ValueError, "skip()", "inside the block")
def skips_outside(case: Case) -> None:
    case.model.first.skip(case.x)  # wrong


@mistake(TypeError, "skip()", "'value'")
def skips_without_a_value(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.skip()  # type: ignore[call-arg]  # wrong


@mistake(OutOfOrderError, "model.first.input", "already passed")
def skips_what_has_run(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output
        case.model.first.skip(hidden)  # wrong


@mistake(OutOfOrderError, "model.unused.input", "does not call this module")
def skips_what_does_not_run(case: Case) -> None:
    with case.trace(case.x):
        case.model.unused.skip(case.x)  # wrong


@mistake(OutOfOrderError, "model.layers.0.inner.output", "inside one that was skipped")
def reads_inside_a_skipped_module(case: Case) -> None:
    with case.trace(case.x):
        case.model.layers[0].skip((case.x, None))
        case.model.layers[0].inner.output.save()  # wrong


@mistake(ValueError, "`model.first` is skipped by some invokes", "all of them")
def skips_in_one_invoke(case: Case) -> None:
    with case.trace() as tracer:  # wrong
        with tracer.invoke(case.x):
            case.model.first.skip(case.x)
        with tracer.invoke(case.x):
            pass


@mistake(ValueError, "tracer.stop()", "inside the block")
def stops_outside(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output.save()
    tracer.stop()  # wrong


@mistake(ValueError, "Cannot access `result` outside")
def reads_the_result_afterwards(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output.save()
    tracer.result  # noqa: B018  # wrong


# -- caches ----------------------------------------------------------------------------------------------------------


@mistake(ValueError, "tracer.cache()", "inside the block")
def caches_outside(case: Case) -> None:
    with case.trace(case.x) as tracer:
        case.model.first.output.save()
    tracer.cache()  # wrong


@mistake(ValueError, "'model.frist'", "Did you mean `model.first`")
def caches_an_unknown_module(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.cache(["model.frist"])  # wrong


@mistake(ValueError, "'model.0'", "no module of this model")
def caches_another_models_module(case: Case) -> None:
    other = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with case.trace(case.x) as tracer:
        tracer.cache([other[0]])  # wrong


@mistake(TypeError, "list of modules")
def caches_one_module_without_a_list(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.cache(case.model.first)  # wrong


@mistake(TypeError, "list of modules")
def caches_one_path_without_a_list(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.cache("model.first")  # wrong


@mistake(TypeError, "modules of the wrapped model", "Linear")
def caches_a_module_that_is_not_wrapped(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.cache([case.net.first])  # wrong


@mistake(TypeError, "dtype of a cache", "torch.float16")
def caches_in_a_dtype_by_name(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.cache(dtype="float16")  # wrong


@mistake(RuntimeError, "gpu")
def caches_on_an_unknown_device(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.cache(device="gpu")  # wrong


@mistake(ValueError, "tracer.cache()", "neither outputs nor inputs")
def caches_nothing(case: Case) -> None:
    with case.trace(case.x) as tracer:
        tracer.cache(include_output=False)  # wrong


@mistake(TypeError, "Cache", "context manager")
def enters_a_cache(case: Case) -> None:
    with case.trace(case.x) as tracer:
        with tracer.cache():  # wrong
            pass


@mistake(KeyError, "`model.frist` is not in the cache", "`model.first`")
def looks_up_what_was_not_cached(case: Case) -> None:
    with case.trace(case.x) as tracer:
        cache = tracer.cache()
    cache["model.frist"]  # wrong


# -- gradients -------------------------------------------------------------------------------------------------------


@mistake(RuntimeError, "does not require grad")
def goes_backward_without_gradients(case: Case) -> None:
    with torch.no_grad(), case.trace(case.x):
        loss = case.model.head.output.sum()
        with loss.backward():  # wrong
            pass


@mistake(ValueError, "model.first.output", "before `with ...backward():`")
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


@mistake(ValueError, "does not require", ".requires_grad_()")
def reads_the_gradient_of_integers(case: Case) -> None:
    with case.trace(case.x):
        best = case.model.first.output.argmax()
        with case.model.head.output.sum().backward():
            best.grad.save()  # wrong


@mistake(ValueError, "does not flow through this tensor")
def reads_the_gradient_of_something_else(case: Case) -> None:
    with case.trace(case.x):
        other = torch.ones(2, requires_grad=True)
        with case.model.head.output.sum().backward():
            other.grad.save()  # wrong


@mistake(ReplacementShapeError, "gradient", "(7,)", "(3, 4)")
def replaces_a_gradient_by_another_shape(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output.requires_grad_()
        with case.model.head.output.sum().backward():
            hidden.grad = torch.ones(7)  # wrong


@mistake(TypeError, "gradient", "NoneType", "zeros_like")
def replaces_a_gradient_by_none(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output.requires_grad_()
        with case.model.head.output.sum().backward():
            hidden.grad = None  # wrong


@mistake(TypeError, "gradient", "torch.float64", "torch.float32")
def replaces_a_gradient_by_another_dtype(case: Case) -> None:
    with case.trace(case.x):
        hidden = case.model.first.output.requires_grad_()
        with case.model.head.output.sum().backward():
            hidden.grad = torch.ones(3, 4, dtype=torch.float64)  # wrong


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


@mistake(SyntaxError, "`return`", "after the block")
def returns_from_a_block(case: Case) -> Any:
    with case.trace(case.x):
        return case.model.output.save()  # wrong


@mistake(SyntaxError, "`yield`", "after the block")
def yields_from_a_block(case: Case) -> None:
    def generate() -> Iterator[Any]:
        with case.trace(case.x):
            yield case.model.output.save()  # wrong

    list(generate())


@mistake(SyntaxError, "break", "after the block")
def breaks_out_of_a_block(case: Case) -> None:
    for _ in range(2):
        with case.trace(case.x):
            break  # wrong


@mistake(SyntaxError, "`await`", "after the block")
def awaits_in_a_block(case: Case) -> None:
    async def coroutine() -> None:
        with case.trace(case.x):
            await case.model.output  # wrong

    with contextlib.closing(coroutine()) as started:
        started.send(None)


@mistake(WithBlockNotFoundError, "`with` statement", "ExitStack")
def enters_by_an_exit_stack(case: Case) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(case.trace(case.x))  # wrong


@mistake(WithBlockNotFoundError, "`with` statement", "__enter__")
def enters_by_hand(case: Case) -> None:
    case.trace(case.x).__enter__()  # wrong


@mistake(ValueError, "entered before", "anew")
def enters_a_trace_twice(case: Case) -> None:
    trace = case.trace(case.x)
    with trace:
        case.model.first.output.save()
    with trace:  # wrong
        pass


@mistake(ValueError, "entered before", "anew")
def enters_a_trace_in_itself(case: Case) -> None:
    trace = case.trace(case.x)
    with trace:
        with trace:  # wrong
            pass


# -- edits and options -----------------------------------------------------------------------------------------------


@mistake(AttributeError, "`frist`", "Did you mean `first`")
def misspells_a_module_in_an_edit(case: Case) -> None:
    with case.model.edit() as edited:
        case.model.frist.output[:] = 0  # wrong
    with edited.trace(case.x, compile=case.compile):
        edited.output.save()


@mistake(OutOfOrderError, "model.unused.output", "does not call this module")
def edits_what_does_not_run(case: Case) -> None:
    with case.model.edit() as edited:
        case.model.unused.output[:] = 0  # wrong
    with edited.trace(case.x, compile=case.compile):
        edited.first.output.save()


@mistake(TypeError, "edit()", "positional argument")
def edits_inplace_by_position(case: Case) -> None:
    with case.model.edit(True):  # type: ignore[misc]  # wrong
        pass


@mistake(TypeError, "clear_edits()", "positional argument")
def clears_one_edit(case: Case) -> None:
    case.model.clear_edits("all")  # type: ignore[call-arg]  # wrong


@mistake(ValueError, "rename", "`frist`")
def renames_an_unknown_module(case: Case) -> None:
    NNsight(case.net, rename={"frist": "start"})  # wrong


@mistake(ValueError, "rename", "`head`", "another name")
def renames_to_a_name_that_is_taken(case: Case) -> None:
    NNsight(case.net, rename={"first": "head"})  # wrong


@mistake(TypeError, "unknown options", "backends", "backend")
def compiles_with_an_unknown_option(case: Case) -> None:
    case.model.compile(backends="eager")  # wrong


@mistake(TypeError, "torch.nn.Module", "function")
def wraps_a_function(case: Case) -> None:
    NNsight(lambda x: x)  # type: ignore[arg-type]  # wrong


@mistake(TypeError, "unknown options", "renames")
def wraps_with_an_unknown_option(case: Case) -> None:
    NNsight(case.net, renames={})  # wrong


# -- errors of the user's own code -----------------------------------------------------------------------------------


@mistake(ZeroDivisionError, "division by zero")
def fails_in_the_block(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        1 / 0  # noqa: B018  # wrong


@mistake(ZeroDivisionError, "division by zero")
def fails_before_it_reads(case: Case) -> None:
    with case.trace(case.x):
        1 / 0  # noqa: B018  # wrong


@mistake(StopIteration)
def runs_out_of_items(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        next(iter([]))  # wrong


@mistake(UserWarning, "mine")
def warns_where_warnings_are_errors(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        warnings.warn("mine", stacklevel=1)  # wrong


@mistake(KeyboardInterrupt, "block")
def is_interrupted_in_the_block(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        raise KeyboardInterrupt("block")  # wrong


@mistake(SystemExit, "block")
def exits_in_the_block(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        raise SystemExit("block")  # wrong


@mistake(GeneratorExit, "block")
def ends_a_generator_in_the_block(case: Case) -> None:
    with case.trace(case.x):
        case.model.first.output.save()
        raise GeneratorExit("block")  # wrong


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


def test_the_table_is_long() -> None:
    assert len(MISTAKES) >= 45
    assert len({mistake.line for mistake in MISTAKES.values()}) >= 45


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
    with pytest.warns(RuntimeWarning, match="Tracer: made and never entered"):
        model.trace(torch.ones(1, 4))
    with pytest.warns(RuntimeWarning, match="Tracer: made and never entered"):
        model.edit()
