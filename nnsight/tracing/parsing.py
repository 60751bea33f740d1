"""Parsing Python, and compiling parts of syntax trees to functions.

CPython 3.11 and 3.12 count the depth of a syntax tree in a counter that all threads share. A garbage collection may switch threads while a
tree is created. If another thread parses then, the count is wrong at the end, and correct text raises a ``SystemError``. Only the counter
is affected, so :func:`parse` tries again.
"""

from __future__ import annotations
import __future__ as features

import ast
import types
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_ATTEMPTS = 20

#: The flags of code objects that ``from __future__ import ...`` sets, and that ``compile`` accepts.
_FUTURE_FLAGS = 0
for _feature in features.all_feature_names:
    _FUTURE_FLAGS |= getattr(features, _feature).compiler_flag


def parse(text: str, filename: str = "<unknown>") -> ast.Module:
    """Return the syntax tree of ``text``, as ``ast.parse`` does.

    Raises:
        SyntaxError: If ``text`` is not valid Python.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(text, filename)
        except SystemError:
            continue
    return ast.parse(text, filename)


def parameters(names: Iterable[str] = ()) -> ast.arguments:
    """Return the parameters of a function definition, without defaults."""
    return ast.arguments(posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[])


def nested_code(statement: ast.stmt, free: Collection[str], class_name: str | None, filename: str, flags: int) -> types.CodeType:
    """Compile ``statement`` inside an outer function and return the code object of the inner function.

    Args:
        statement: A function definition, or a ``return`` of a lambda.
        free: Variables of the outer function.
        class_name: Name of the enclosing class, which mangles private names (``self.__x``).
        filename: The file that tracebacks show.
        flags: Flags of the original code object, for the features imported from ``__future__``.
    """
    body = [statement]
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name not in free:
        body.insert(0, ast.copy_location(ast.Global([statement.name]), statement))  # a recursive call looks its name up in the globals
    top: ast.stmt = ast.FunctionDef(name="around", args=parameters(free), body=body, decorator_list=[], type_params=[])
    if class_name is not None:
        ast.copy_location(top, statement)
        top = ast.ClassDef(name=class_name, bases=[], keywords=[], body=[top], decorator_list=[], type_params=[])
    module = ast.fix_missing_locations(ast.Module(body=[ast.copy_location(top, statement)], type_ignores=[]))
    code = compile(module, filename, "exec", flags & _FUTURE_FLAGS, dont_inherit=True)
    for _ in range(2 if class_name is None else 3):
        code = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return code


def with_cells(function: types.FunctionType, cells: Sequence[types.CellType], code: types.CodeType | None = None) -> Any:
    """Return a copy of ``function`` with other cells for its free variables, and with ``code`` if it is given."""
    made = types.FunctionType(code or function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells))
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
    made.__qualname__, made.__doc__, made.__module__ = function.__qualname__, function.__doc__, function.__module__
    made.__dict__.update(function.__dict__)
    return made
