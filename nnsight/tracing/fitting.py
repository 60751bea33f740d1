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

#: Instructions of Python 3.13 for two variables. They have the position of the first one.
_PAIRS = frozenset({"LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"})

#: Instructions that use the last loaded variable and have the position of an expression around it.
_USES = frozenset({"BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "BINARY_SUBSCR", "CALL", "LOAD_ATTR", "BUILD_TUPLE", "BUILD_LIST"})

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
    used: set[str] = set()
    for kind, extent, value in _compiled(code, enter):
        if kind == "name" and value[0] not in "@._":
            used.add(value)
        texts = written.get((kind, extent))
        if kind == "name" and value in unbound:
            continue
        if kind == "constant" and type(value) is str:
            texts = texts and strings
        if kind == "part":
            texts = [text for (other, at), names in written.items() if other == "name" and _is_inside(at, extent) for text in names]
        if texts and not any(_agrees(kind, text, value) for text in texts):
            return False
    return not used or bool(used & _identifiers(node))  # another text of the same shape has none of the names


def _identifiers(node: ast.AST) -> set[str]:
    """Return the names of variables, functions, classes and modules in ``node``."""
    found: set[str] = set()
    for part in ast.walk(node):
        for name in (getattr(part, attribute, None) for attribute in ("id", "name", "asname", "arg", "rest")):
            found.update([name, name.partition(".")[0]] if isinstance(name, str) else [])
    return found


def _is_inside(extent: Any, whole: Any) -> bool:
    return (whole[0], whole[2]) <= (extent[0], extent[2]) and (extent[1], extent[3]) <= (whole[1], whole[3])


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
    """Yield kind, extent and value of the instructions of a body or a function, and of the functions nested in it.

    The kind ``part`` is a name inside of the extent.
    """
    positions = list(code.co_positions())
    pair: tuple[str, ...] = ()  # the variables that the preceding instruction loads
    for instruction in dis.get_instructions(code):
        if instruction.offset <= enter:
            continue
        extent = positions[instruction.offset // 2]
        if enter >= 0 and instruction.opname == "LOAD_CONST" and extent == positions[enter // 2]:
            return  # end of the body: the call of `__exit__`
        if isinstance(instruction.argval, types.CodeType):
            yield from _compiled(instruction.argval)
        if pair and instruction.opname in _USES and None not in extent:
            yield "part", extent, pair[1]
        pair = instruction.argval if instruction.opname == "LOAD_FAST_LOAD_FAST" else ()
        if instruction.opname in _PAIRS and None not in extent:
            yield "name", extent, instruction.argval[0]
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
