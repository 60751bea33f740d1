"""From a frame to the ``with`` statement it is executing.

The interpreter knows where it is better than any line-based guess: every instruction carries the extent of
the syntax it was compiled from. While ``__enter__`` runs, the caller's current instruction is the one that
enters the context manager, so its extent names one ``with`` statement, and counting such instructions names
one item of it (``with a() as x, b() as y``). A statement whose extent no longer fits the text of the file means
that the file was changed after it was loaded, which is reported instead of running other lines than those
the user started.
"""

from __future__ import annotations

import ast
import dis
import linecache
import types
from dataclasses import dataclass

from .errors import WithBlockNotFoundError

_ENTER_INSTRUCTION = "BEFORE_WITH"
_CACHE = dis.opmap["CACHE"]


@dataclass(frozen=True)
class WithSite:
    """One item of one ``with`` statement.

    Attributes:
        filename: File of the statement.
        node: The statement.
        item: Index of the item whose context manager is being entered.
        class_name: Name of the class whose body lexically encloses the statement, for private names.
    """

    filename: str
    node: ast.With
    item: int
    class_name: str | None


_trees: dict[str, tuple[tuple[str, ...], ast.Module]] = {}


def _parsed(filename: str, module_globals: dict[str, object]) -> ast.Module | None:
    """Parse the file once; parse anew only when its cached lines were replaced."""
    lines = tuple(linecache.getlines(filename, module_globals))
    if not lines:
        return None
    known = _trees.get(filename)
    if known is not None and known[0] == lines:
        return known[1]
    try:
        tree = ast.parse("".join(lines), filename)
    except SyntaxError:
        return None
    _trees[filename] = (lines, tree)
    return tree


def _enter_position(frame: types.FrameType) -> tuple[tuple[int | None, ...], int]:
    """Extent of the entering instruction, and how many before it entered items of the same statement."""
    code, lasti = frame.f_code, frame.f_lasti
    positions = list(code.co_positions())
    here = positions[lasti // 2]
    earlier = sum(
        instruction.opname == _ENTER_INSTRUCTION and positions[instruction.offset // 2] == here
        for instruction in dis.get_instructions(code)
        if instruction.offset < lasti
    )
    return here, earlier


def _extent(node: ast.AST) -> tuple[int, int, int, int]:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)  # type: ignore[attr-defined]


def find_with(frame: types.FrameType) -> WithSite:
    """Locate the ``with`` item that ``frame`` is entering.

    Args:
        frame: The caller of ``__enter__``.

    Raises:
        WithBlockNotFoundError: If the frame has no source text, is not entering a ``with`` statement, or its
            text changed since it was compiled.
    """
    filename, line = frame.f_code.co_filename, frame.f_lineno
    tree = _parsed(filename, frame.f_globals)
    if tree is None:
        raise WithBlockNotFoundError(
            f"The source of the block at {filename}:{line} cannot be read, so its body cannot be deferred. "
            "Code made by exec() or compile() from a string has no source that Python keeps: put the block "
            "into a file, or register its text with `linecache` under this file name."
        )
    here, earlier = _enter_position(frame)
    stack: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while stack:
        node, class_name = stack.pop()
        if isinstance(node, ast.ClassDef):
            class_name = node.name
        if isinstance(node, ast.With):
            if _extent(node) == here:
                return WithSite(filename, node, earlier, class_name)
            for index, item in enumerate(node.items):
                if _extent(item.context_expr) == here:
                    return WithSite(filename, node, index + earlier, class_name)
            if None in here and node.lineno == line:
                return WithSite(filename, node, min(earlier, len(node.items) - 1), class_name)
        stack.extend((child, class_name) for child in ast.iter_child_nodes(node))
    raise WithBlockNotFoundError(_diagnostic(frame, filename, line))


def calls_for_with(frame: types.FrameType) -> bool:
    """Whether the call that ``frame`` is making is the context manager of a ``with`` statement.

    The instruction behind the call tells, so this needs no source.
    """
    code, offset = frame.f_code.co_code, frame.f_lasti + 2
    while offset < len(code) and code[offset] == _CACHE:
        offset += 2
    return offset < len(code) and dis.opname[code[offset]] == _ENTER_INSTRUCTION


def _diagnostic(frame: types.FrameType, filename: str, line: int) -> str:
    first = max(1, line - 2)
    context = "".join(
        f"  {'->' if number == line else '  '} {number}: {linecache.getline(filename, number).rstrip()}\n"
        for number in range(first, line + 3)
    )
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    cause = (
        "The file was probably edited after it was loaded: reload it and run again."
        if instruction == _ENTER_INSTRUCTION
        else "A trace must be entered by a `with` statement (not through ExitStack.enter_context or __enter__())."
    )
    return f"No `with` statement was found at {filename}:{line}. {cause}\n{context}"
