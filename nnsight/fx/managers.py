"""Context managers that let errors through.

The manager of a ``with`` that is being executed is out of reach: the interpreter keeps it on a stack of its own. What can be read
is the expression it came from, if that is a name with attributes or a call of one, as in ``with torch.no_grad():``. So one
tells which manager it is without evaluating anything.

A manager lets all errors through if its ``__exit__`` returns nothing but ``None`` or ``False`` and raises no other error for
one that it is told of, which its code shows. One written in C is known by the package it is from. For a generator under
``contextlib.contextmanager`` it matters whether something catches errors where it yields; see :mod:`~nnsight.fx.attempts`.
Every other manager may catch them.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..tracing.block import is_bound, variables_of

#: Instructions that are no part of an expression.
_SILENT = frozenset({"PUSH_NULL", "PRECALL", "KW_NAMES", "EXTENDED_ARG", "CACHE", "NOP", "RESUME", "COPY_FREE_VARS"})

#: Instructions that a name begins with, and those that go on to an attribute.
_NAMES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})

#: The code of what ``contextlib.contextmanager`` makes of a generator.
_OF_GENERATOR = contextlib.contextmanager(contextlib.nullcontext).__code__  # type: ignore[arg-type]

#: Packages none of whose managers in C catches an error.
_KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy"})

#: Methods written in C.
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.BuiltinFunctionType)

#: Flags of code whose call returns a generator or a coroutine.
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_MISSING: Any = object()


@dataclass(frozen=True)
class Variables:
    """The variables of some code; those of a frame are looked at only if they are asked for."""

    globals: Mapping[str, Any]
    local: Callable[[], Mapping[str, Any]]

    @classmethod
    def of_frame(cls, frame: types.FrameType) -> Variables:
        return cls(frame.f_globals, functools.partial(variables_of, frame))

    @classmethod
    def of_function(cls, function: types.FunctionType) -> Variables:
        """Return what a function has from around it; its own variables are not known."""
        return cls(function.__globals__, functools.partial(_closure_of, function))

    def get(self, name: str, is_global: bool) -> Any:
        local = {} if is_global else self.local()
        return local.get(name, self.globals.get(name, vars(builtins).get(name, _MISSING)))


@dataclass(frozen=True)
class Manager:
    """What is known of a manager.

    Attributes:
        kind: Its class.
        function: Or the built-in function that makes it.
        generator: Or the code of the generator that it runs, and the variables there.
    """

    kind: type | None = None
    function: types.BuiltinFunctionType | None = None
    generator: tuple[types.CodeType, Variables] | None = None


@dataclass(frozen=True)
class Expression:
    """``name.attribute.attribute``, or a call of that."""

    name: str
    is_global: bool
    attributes: tuple[str, ...]
    is_call: bool

    def value(self, variables: Variables) -> Manager:
        """Return which manager that is, without running any code."""
        found = variables.get(self.name, self.is_global)
        for attribute in self.attributes:
            found = inspect.getattr_static(found, attribute, _MISSING)
            if isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
        if not self.is_call:
            running = found.gen if type(found) is contextlib._GeneratorContextManager else None
            if isinstance(running, types.GeneratorType) and running.gi_frame is not None:
                return Manager(generator=(running.gi_code, Variables.of_frame(running.gi_frame)))
            return Manager(type(found))
        if isinstance(found, type):
            return Manager(found if type(found).__call__ is type.__call__ else None)
        if isinstance(found, types.FunctionType) and found.__code__ is _OF_GENERATOR:
            function = inspect.unwrap(found)
            if isinstance(function, types.FunctionType):
                return Manager(generator=(function.__code__, Variables.of_function(function)))
        return Manager(function=found if isinstance(found, types.BuiltinFunctionType) else None)


def manager_of(before: Sequence[dis.Instruction]) -> Expression | None:
    """Return the expression of the manager of a ``with``, if it is a simple one.

    Args:
        before: The instructions before its body.
    """
    heard = [instruction for instruction in before if instruction.opname not in _SILENT]
    if len(heard) < 2 or heard[-1].opname != "BEFORE_WITH":
        return None
    last = heard[-2]
    whole = _extent(last)
    if whole is None:
        return None
    is_call = last.opname.startswith("CALL")
    # The name, its attributes and the call begin where the expression begins; arguments begin further on, and the names of those
    # given by keyword are said to stand in the whole of it.
    parts = []
    for instruction in reversed(heard[:-1]):
        extent = _extent(instruction)
        if extent is None or not whole[0] <= extent[0] <= extent[1] <= whole[1]:
            break
        if instruction is last or (extent[0] == whole[0] and extent != whole):
            parts.append(instruction)
    name, *others = parts[::-1]
    attributes = others[:-1] if is_call else others
    if name.opname not in _NAMES or any(other.opname not in _ATTRIBUTES for other in attributes):
        return None
    return Expression(name.argval, name.opname == "LOAD_GLOBAL", tuple(other.argval for other in attributes), is_call)


def lets_errors_through(manager: Manager) -> bool:
    """Whether a manager that runs no generator is known to catch no error."""
    if manager.function is not None:
        return _is_known(manager.function)
    return manager.kind is not None and _exits_quietly(manager.kind)


def _exits_quietly(kind: type) -> bool:
    leave = inspect.getattr_static(kind, "__exit__", None)
    if isinstance(leave, types.FunctionType):
        return _returns_nothing(leave.__code__)
    return isinstance(leave, _IN_C) and _is_known(kind)


@functools.lru_cache(maxsize=1024)
def _returns_nothing(code: types.CodeType) -> bool:
    instructions = [found for found in dis.get_instructions(code) if found.opname not in _SILENT]
    for before, found in zip([None, *instructions], instructions, strict=False):
        if found.opname == "RETURN_CONST" and found.argval not in (None, False):
            return False
        if found.opname == "RETURN_VALUE":
            nothing = before is not None and before.opname == "LOAD_CONST" and before.argval in (None, False)
            if not nothing or found.is_jump_target:
                return False
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    about_error = code.co_varnames[1:count]
    asks = any(
        found.opname.startswith("LOAD_FAST") and _names_in(found).intersection(about_error) for found in instructions
    )
    replaces = asks and any(found.opname == "RAISE_VARARGS" for found in instructions)
    return not replaces and not code.co_flags & _RUNS_LATER


def _names_in(instruction: dis.Instruction) -> set[str]:
    """Return the variables that an instruction loads; from Python 3.13 on some load two."""
    found = instruction.argval
    return {found} if isinstance(found, str) else set(found)


def _is_known(item: Any) -> bool:
    return str(item.__module__).partition(".")[0] in _KNOWN


def _closure_of(function: types.FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if is_bound(cell)}


def _extent(instruction: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return where the source of an instruction begins and ends, each as line and column."""
    found = instruction.positions
    if found is None or None in found:
        return None
    return (found.lineno, found.col_offset), (found.end_lineno, found.end_col_offset)  # type: ignore[return-value]
