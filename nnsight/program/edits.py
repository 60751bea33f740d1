"""Compiled edits: calls of a compiled model run its edits as one program, instead of running their Python."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from numbers import Real
from typing import Any

import torch

from ..modeling.base import NNsight
from ..modeling.tracing import ModelTracer
from ..runtime.editing import Edit
from ..runtime.errors import UncompiledWarning
from ..tracing.errors import user_position_now
from .baking import bake
from .bound import BoundProgram
from .format.payload import Job
from .record.inputs import inputs_of_edits
from .record.recorder import record_edits
from .run.fake_runs import input_key
from .run.program_block import ProgramBlock


class Params(MutableMapping[str, torch.Tensor]):
    """The tensors and floats that ``edits`` take from outside, by name. A new value takes effect at the next call, without a compilation.

    A float is a tensor without dimensions here. Tensors are the user's own objects, so in-place edits of them take effect, too. A new value
    is also that of the variable in the edits, so it takes effect where their Python runs: in traces, and in copies that are made later.
    """

    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits
        self._homes: dict[str, tuple[Edit, str]] = {}  # the edit of each name, and the variable in it
        for edit, inputs in zip(edits, inputs_of_edits(edits), strict=True):
            for variable, name in inputs.labels.items():
                self._homes.setdefault(name, (edit, variable))
        self._values: dict[str, torch.Tensor] = {}
        self._given: dict[str, Any] = {}  # values that were set before the edits were recorded
        self._fixed: dict[str, str] = {}
        self._programs: list[BoundProgram] = []
        self._why_none = ""  # the reason why the edits cannot be a program

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[self._known(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._homes and not self._programs and not self._why_none:
            self._given[name] = value
        else:
            self._known(name)
        for program in self._programs:
            if name in program.inputs.values:
                value = self._values[name] = program.inputs.put(name, value)  # all programs share one tensor
        self._rebind(name, value)

    def _rebind(self, name: str, value: Any) -> None:
        """Give ``value`` to the variable of this name, and to all variables with the same tensor, for later runs of Python."""
        edit, variable = self._homes.get(name, (None, ""))
        if edit is None:
            return
        old = _variables_of(edit)[variable][1]
        if isinstance(old, float):
            if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.dim() == 0):
                edit.rebind(variable, float(value))
            return
        if not isinstance(value, torch.Tensor):  # an error at the first call
            return
        for other in self._edits:
            for inner, (outer, present) in _variables_of(other).items():
                if present is old:
                    block = other.variables[outer]
                    other.rebind(outer, block.with_input(inner, value) if isinstance(block, ProgramBlock) else value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("A parameter of edits cannot be deleted: set it to another value.")

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def _known(self, name: str) -> str:
        if name in self._values:
            return name
        if self._why_none:
            raise KeyError(f"`{name}`: these edits have no parameters, because they cannot be a program: {self._why_none}")
        if not self._programs and name in self._homes:
            raise KeyError(f"`{name}`: the parameters are known after the first call of the model.")
        why = self._fixed.get(name, "no call of torch in the edits uses a tensor or a float from outside that has this name")
        raise KeyError(f"`{name}` is not a parameter of the edits: {why}. The parameters are {', '.join(self or self._homes) or 'none'}.")

    def add(self, program: BoundProgram, values: dict[str, torch.Tensor], fixed: dict[str, str]) -> None:
        """Add the parameters of a program that has just been recorded."""
        self._programs.append(program)
        self._fixed |= fixed
        for name, value in values.items():
            self._values[name] = program.inputs.put(name, self._values.get(name, value))
        given, self._given = self._given, {}
        for name, value in given.items():
            self[name] = value

    def give_up(self, why: str) -> None:
        """Drop all parameters because the edits cannot be a program. Raise a :class:`KeyError` if the user has set one before."""
        self._programs, self._values, self._why_none = [], {}, why
        for name in self._given:
            self._known(name)


def _variables_of(edit: Edit) -> dict[str, tuple[str, Any]]:
    """Return the variables of an edit, and the inputs of programs among them: the variable of each name, and the value."""
    variables = edit.variables
    programs = {name: value for name, value in variables.items() if isinstance(value, ProgramBlock)}
    found = {name: (name, value) for name, value in variables.items() if name not in programs}
    return {**found, **{inner: (name, value) for name, block in programs.items() for inner, value in block.inputs.items()}}


class CompiledEdits:
    """The edits of one model as programs: one program for all inputs, or one for each size of the input if an edit reads sizes.

    Attributes:
        params: The parameters of the edits.
        edits: The edits.
        are_same_at_each_step: Whether each edit is a loop over all steps that does the same in each step.
    """

    def __init__(self, model: NNsight) -> None:
        self.edits: list[Edit] = list(model._edits)
        self.params = Params(self.edits)
        self._general: BoundProgram | None = None
        self._by_size: dict[Any, BoundProgram] = {}
        self._python = False  # whether the edits run as Python because they cannot be a program
        self.are_same_at_each_step = all(edit.block.is_same_at_each_step for edit in self.edits)

    def generate(self, model: NNsight, generation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``generation``, and run the edits in each of its calls of ``model``. The edits must do the same in each step."""
        driver: Any = model._driver(True)
        return driver.call_function(generation, args, kwargs, functools.partial(self.call, model))

    def call(self, model: NNsight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled ``model`` with the program of its edits spliced into its graph, and return its output."""
        if self._python:
            return model._call_edited(None, args, kwargs)
        program = self._general
        if program is None:
            key = input_key(args, kwargs)
            if key is None and self._by_size:  # the sizes in a cache, or in an object of the user, are unknown
                return model._call_edited(None, args, kwargs)
            program = self._by_size.get(key) or self._recorded(model, args, kwargs, key)
            if program is None:
                return model._call_edited(None, args, kwargs)
        return program.run(model._driver(None), args, kwargs, {}, returns=True)[0]

    def _recorded(self, model: NNsight, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> BoundProgram | None:
        """Return the program of the edits, recorded for these arguments, or ``None`` if they cannot be a program."""
        try:
            job, values, fixed = _record(model, args, kwargs)
        except Exception as error:  # a mistake in an edit raises its error again when the edit runs as Python
            self._python = True
            filename, line = user_position_now()
            text = f"The edits of this compiled model run as Python in each call, because they cannot be a program: {error}"
            warnings.warn_explicit(text, UncompiledWarning, filename, line)
            self.params.give_up(str(error))
            return None
        named = {name: tensor for name, tensor in values.items() if name.isidentifier()}
        program = BoundProgram(job, model, sorted(named), values)
        self.params.add(program, named, fixed)
        if any(node["do"] == "size" for node in job.nodes):  # the program depends on sizes of the input
            self._by_size[key] = program
        else:
            self._general = program
        return program


def baked_edits(model: NNsight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.nn.Module:
    """Return a copy of the module of ``model`` with its edits baked in; see :meth:`.Editable.bake`."""
    if not model._edits:
        raise ValueError("This model has no edits to bake: `with model.edit() as edited:` puts them on a copy. Bake that copy.")
    if hasattr(model, "dispatch"):
        model.dispatch()
    model._sync()
    made_up = not args and not kwargs
    if made_up:
        kwargs = dict(getattr(model._module, "dummy_inputs", None) or {})
        if getattr(model._module, "main_input_name", None) not in {None, *kwargs}:  # that of transformers is for models of text
            kwargs = {}
        if not kwargs:
            raise ValueError("bake() needs an example of the input, as in `edited.bake(x)`, because it records the edits for its sizes.")
    args, kwargs = model._prepare_input(*args, **kwargs)[:2]
    try:
        job, values, _ = _record(model, args, kwargs)
    except Exception as error:
        if made_up:
            error.add_note("The model ran on its `dummy_inputs`. If it cannot, pass an example of the input: `edited.bake(**inputs)`.")
        raise
    compiled = model._compiled_edits
    if compiled is not None and compiled.edits == model._edits:
        values = {name: compiled.params.get(name, value) if name.isidentifier() else value for name, value in values.items()}
    return bake(model._module, job, values)


def _record(model: NNsight, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Job, dict[str, torch.Tensor], dict[str, str]]:
    """Record the edits of a model for prepared arguments; see :func:`~nnsight.program.record.recorder.record_edits`."""
    tracer = ModelTracer(lambda: model._driver(None), model._scanned, model, args, kwargs, None, model)
    tracer._entered = True
    return record_edits(tracer)
