"""Checks whether instructions can have been compiled from a text.

A file may have been edited since it was compiled, and code without a file may come from another text. So each instruction that uses a
variable, an attribute, a constant or an operator is compared with the syntax at its position. Versions of Python differ in the positions
that they give to instructions, and test runners rewrite assertions. So only clear contradictions count: a different name, a different
operator, or a different constant of the same type.
"""

from __future__ import annotations

import ast
import dis
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.MatMult: "@", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_VARIABLES = {f"{verb}_{kind}" for verb in ("LOAD", "STORE", "DELETE") for kind in ("NAME", "FAST", "GLOBAL", "DEREF")}
_KINDS = {
    **dict.fromkeys(_VARIABLES, "name"),
    **dict.fromkeys(("LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR"), "attribute"),
    "BINARY_OP": "operator",
    "COMPARE_OP": "operator",
    "LOAD_CONST": "constant",
}

Extent = tuple[int | None, ...]


def fits(node: ast.With, code: types.CodeType, enter: int) -> bool:
    """Whether the body that ``code`` enters at offset ``enter`` can have been compiled from the body of ``node``.

    Timers assemble code from several texts, so only the instructions of the body are compared.
    """
    written = _written(node)
    # Names of `except ... as name` are unbound at the end of the clause, by instructions at the position of its last statement.
    unbound = {part.name for part in ast.walk(node) if isinstance(part, ast.ExceptHandler)}
    # Format strings are compiled in parts, some of them at the position of a neighbouring part.
    strings = [text for (kind, _), texts in written.items() if kind == "constant" for text in texts if type(text) is str]
    for kind, extent, value in _compiled(code, enter):
        texts = written.get((kind, extent))
        if kind == "name" and value in unbound:
            continue
        if kind == "constant" and type(value) is str:
            texts = texts and strings
        if texts and not any(_agrees(kind, text, value) for text in texts):
            return False
    return True


def _written(node: ast.AST) -> dict[tuple[str, Extent], list[Any]]:
    """Return the names, attributes, constants and operators in ``node``, by their kind and the extent of the expression."""
    written: dict[tuple[str, Extent], list[Any]] = defaultdict(list)
    for part in ast.walk(node):
        for kind, value in _meaning(part):
            extent: Extent = (part.lineno, part.end_lineno, part.col_offset, part.end_col_offset)  # type: ignore[attr-defined]
            written[kind, extent].append(value)
    return written


def _meaning(part: ast.AST) -> Iterator[tuple[str, Any]]:
    if isinstance(part, ast.Name):
        yield "name", part.id
    elif isinstance(part, ast.Attribute):
        yield "attribute", part.attr
    elif isinstance(part, ast.Constant):
        yield "constant", part.value
    elif isinstance(part, (ast.BinOp, ast.AugAssign)):
        yield "operator", _OPERATORS[type(part.op)]
    elif isinstance(part, ast.Compare):
        for operator in part.ops:
            if type(operator) in _OPERATORS:
                yield "operator", _OPERATORS[type(operator)]


def _compiled(code: types.CodeType, enter: int = -1) -> Iterator[tuple[str, Extent, Any]]:
    """Yield kind, extent and value of the instructions of a body or a function, and of the functions nested in it."""
    positions = list(code.co_positions())
    for instruction in dis.get_instructions(code):
        if instruction.offset <= enter:
            continue
        extent = positions[instruction.offset // 2]
        if enter >= 0 and instruction.opname == "LOAD_CONST" and extent == positions[enter // 2]:
            return  # end of the body: the call of `__exit__`
        if isinstance(instruction.argval, types.CodeType):
            yield from _compiled(instruction.argval)
        kind = _KINDS.get(instruction.opname)
        if kind is not None and None not in extent:
            value = instruction.argrepr if kind == "operator" else instruction.argval
            yield kind, extent, value


def _agrees(kind: str, text: Any, value: Any) -> bool:
    if kind == "constant":
        if isinstance(text, str) and isinstance(value, str):  # part of a format string, or an annotation that is kept as text
            return value in text or value in text.replace("%%", "%") or value == repr(text)
        return type(text) is not type(value) or text == value or text != text  # noqa: PLR0124 - NaN
    if not isinstance(value, str) or value.startswith("@") or (value.startswith("__") and value.endswith("__")):
        return True  # names in rewritten assertions, names of this package, and names that Python adds to classes
    if kind == "operator":
        return value.removeprefix("bool(").rstrip("=)") == text.rstrip("=")
    return value.endswith(text)  # private names are mangled
