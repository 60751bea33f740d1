"""Operations: the calls and assignments inside a Python function, each with its own locations.

To stop a run at a call inside ``forward``, that function is compiled a second time from its syntax tree, with each ``f(x)`` rewritten to
``operation(f, x)``. An ``operation`` intercepts its call like the call of a module (:func:`.intercepted`). The rewritten code keeps the
positions of the file, so tracebacks and debuggers show the source of the model.

An operation is named after the expression that it calls, with underscores for dots. It is numbered in the order of evaluation, so an inner
call comes before the call around it: ``self.c_proj(x.view(y))`` has ``x_view_0`` and ``self_c_proj_0``. The function that an operation
calls can be opened in turn. The rewritten functions belong to one tree of modules and are installed for the time of a run.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...tracing.block import is_bound
from ...tracing.parsing import with_cells
from ..interleaver import active_interleaver
from .interception import TracedCall, intercepted, is_compiling
from .listing import OPERATION, Operation, SourceError, attributes_of, listing_of

#: Attribute of a rewritten function: the function it was made from.
_ORIGINAL = "__nnsight_original__"


def layers_of(function: Any, what: str) -> list[types.FunctionType]:
    """Return ``function`` and the functions that its decorators wrapped, the innermost last. Messages call the function ``what``.

    For an object whose class has a ``__call__`` in Python, the first function is that method. Raises SourceError for other callables.
    """
    if isinstance(function, torch.nn.Module):
        raise SourceError(f"{what} is a module ({type(function).__name__}): use the `.source` of its own envoy.")
    if isinstance(function, type):
        raise SourceError(f"{what} calls the class `{function.__name__}`; only the source of functions can be opened.")
    function = getattr(function, "__func__", function)
    function = getattr(function, _ORIGINAL, function)
    function = _call_of(function) or function
    if not isinstance(function, types.FunctionType):
        kind = "a C function" if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)) else "an object"
        name = getattr(function, "__qualname__", type(function).__name__)
        raise SourceError(f"{what} is {kind} (`{name}`), which has no Python source to look into.")
    layers = [function]
    while (inner := _wrapped_by(layers[-1])) is not None:
        layers.append(inner)
    return layers


def _wrapped_by(function: types.FunctionType) -> types.FunctionType | None:
    """Return the function that a decorator has wrapped as ``function``, or None.

    Without ``functools.wraps`` it is the only function in the closure that ``function`` calls, if ``function`` takes any arguments.
    """
    wrapped = getattr(function, "__wrapped__", None)
    if isinstance(wrapped, types.FunctionType):
        return wrapped
    code = function.__code__
    if not (code.co_flags & inspect.CO_VARARGS and code.co_flags & inspect.CO_VARKEYWORDS):
        return None
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if is_bound(cell) and isinstance(cell.cell_contents, types.FunctionType)}
    if not held:
        return None
    called = {name for operation in listing_of(function).operations.values() if (name := _name_of_callee(operation)) in held}
    return held[called.pop()] if len(called) == 1 else None


def _name_of_callee(operation: Operation) -> str | None:
    return operation.callee.id if isinstance(operation.callee, ast.Name) else None


def _call_of(callee: Any) -> types.FunctionType | None:
    """Return the Python method ``__call__`` of the class of an object, or None; None also for functions, classes and modules."""
    call = None if isinstance(callee, (type, torch.nn.Module)) else type(callee).__call__
    return call if isinstance(call, types.FunctionType) else None


def _itself(value: Any) -> Any:
    return value


def _replaced_cell(layer: types.FunctionType, old: Any, new: Any) -> types.FunctionType:
    """Return a copy of ``layer``, a decorator's wrapper, that wraps ``new`` in place of ``old``."""
    closure = layer.__closure__ or ()
    cells = [types.CellType(new) if is_bound(cell) and cell.cell_contents is old else cell for cell in closure]
    if cells == list(closure):
        raise SourceError(f"A decorator of `{old.__qualname__}` does not keep it in a closure variable, where it could be replaced.")
    made = with_cells(layer, cells)
    made.__wrapped__ = new
    return made


class Operations:
    """The rewritten functions of one tree of modules: those that were *opened*, so that runs stop at their operations."""

    def __init__(self, traced_call: TracedCall | None = None) -> None:
        self.opened: set[str] = set()  # paths of the modules and operations whose functions are open
        self.refused: dict[str, str] = {}  # why the function that an operation called could not be opened, by path of the operation
        #: The function of each opened module or operation, by path, as of the latest call or installation.
        self.called: weakref.WeakValueDictionary[str, types.FunctionType] = weakref.WeakValueDictionary()
        self._traced_call = traced_call
        self._made: dict[str, weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType]] = {}

    def open(self, path: str) -> bool:
        """Open the function at ``path``; return False if it is already open."""
        if path in self.opened:
            return False
        self.opened.add(path)
        for outer in [made for made in self._made if path == made or path.startswith(f"{made}.source.")]:
            del self._made[outer]
        return True

    def intercept(self, path: str, function: Any) -> Any:
        """Return a version of ``function``, which is at ``path``, with intercepted operations; SourceError if it has no Python source."""
        owner = function if _call_of(function) else getattr(function, "__self__", None)
        layers = layers_of(function, f"`{path}`")
        self.refused.pop(path, None)
        self.called[path] = layers[0]
        known = self._made.setdefault(path, weakref.WeakKeyDictionary())
        made = known.get(layers[0])
        if made is None:
            made = self._rewrite(path, layers[-1])
            for outer, inner in reversed(list(itertools.pairwise(layers))):
                made = _replaced_cell(outer, inner, made)
            setattr(made, _ORIGINAL, layers[0])
            known[layers[0]] = made
        return made if owner is None else types.MethodType(made, owner)

    def _rewrite(self, path: str, function: types.FunctionType) -> types.FunctionType:
        listing = listing_of(function)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for number, operation in enumerate(listing.operations.values()):
            made = self._operation if operation.callee is not None else self._assignment
            cells[OPERATION.format(number)] = types.CellType(made(f"{path}.source.{operation.name}"))
        # Dynamo caches compiled code by code object, so each module gets its own.
        code = listing.code.replace(co_name=listing.code.co_name)
        closure = tuple(cells[name] for name in code.co_freevars)
        return with_cells(function, closure, code)

    def _assignment(self, path: str) -> Callable[[Any], Any]:
        """Return the function that the value of the assignment at ``path`` passes through."""
        watched = intercepted(path, self._traced_call)

        def assigned(value: Any) -> Any:
            return watched(_itself, value)

        return assigned

    def _operation(self, path: str) -> Callable[..., Any]:
        """Return the function that makes the call of the operation at ``path``: ``(callable, *args, **kwargs) -> result``."""
        watched = intercepted(path, self._traced_call)
        if path not in self.opened:
            return watched

        traced = types.SimpleNamespace()

        def keep(function: Any) -> str:
            """Store the rewritten function where dynamo finds it, and return its name. Dynamo makes this call while it traces."""
            name = f"function_{id(function)}"
            setattr(traced, name, self._intercept_or_refuse(path, function))
            return name

        torch.compiler.assume_constant_result(keep)

        def rewritten(function: Any) -> Any:
            return getattr(traced, keep(function)) if is_compiling() else self._intercept_or_refuse(path, function)

        def opened_operation(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if isinstance(function, types.MethodType):
                return watched(types.MethodType(rewritten(function.__func__), function.__self__), *args, **kwargs)
            if isinstance(function, types.FunctionType):
                return watched(rewritten(function), *args, **kwargs)
            call = _call_of(function)
            if call is not None:
                return watched(types.MethodType(rewritten(call), function), *args, **kwargs)
            if not is_compiling():
                self._intercept_or_refuse(path, function)  # it is no Python function, so this records the reason
            return watched(function, *args, **kwargs)

        return opened_operation

    def _intercept_or_refuse(self, path: str, function: Any) -> Any:
        try:
            return self.intercept(path, function)
        except SourceError as error:
            self._refuse(path, str(error))
            return function

    def _refuse(self, path: str, reason: str) -> None:
        """Record why the function at ``path`` cannot be opened, and raise the reason in blocks that wait for one of its operations."""
        self.refused[path] = reason
        run = active_interleaver()
        for mediator in () if run is None else run.mediators:
            if mediator.waiting is not None and mediator.waiting[0].startswith(f"{path}.source."):
                mediator.throw(SourceError(reason))


def forward_of(module: torch.nn.Module) -> tuple[str, Any]:
    """Return the attribute that holds the computation of ``module``, and its value."""
    name = "_old_forward" if "_old_forward" in module.__dict__ else "forward"  # accelerate keeps it under that name
    return name, getattr(module, name)


def resolved_callee(operation: Operation, module: torch.nn.Module, function: types.FunctionType) -> Any:
    """Return the object that ``operation`` of ``function``, a method of ``module``, calls; ``None`` if it is known only during a run."""
    callee, parts = (None, []) if operation.callee is None else attributes_of(operation.callee)
    if not isinstance(callee, ast.Name):
        return None
    code = function.__code__
    if code.co_argcount and callee.id == code.co_varnames[0]:
        value: Any = module
    elif callee.id in code.co_varnames or callee.id in code.co_cellvars or callee.id in code.co_freevars:
        return None
    else:
        value = function.__globals__.get(callee.id, getattr(builtins, callee.id, None))
    for part in parts:
        value = getattr(value, part, None)
    return value
