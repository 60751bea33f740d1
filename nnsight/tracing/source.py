"""Finds the ``with`` statement that a frame is entering.

Every instruction has the extent of its syntax: lines and columns. While ``__enter__`` runs, the caller's current instruction is the one
that enters the context manager, so its extent identifies a ``with`` statement. The number of entering instructions before it identifies
the item (``with a() as x, b() as y``). The text is looked up by file name and may have changed since it was compiled. So it is compared
with the instructions (:mod:`.fitting`), and a statement that does not match is an error.
"""

from __future__ import annotations

import ast
import dis
import linecache
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import StringIO
from textwrap import dedent

from .assertions import are_rewritten
from .errors import WithBlockNotFoundError
from .fitting import fits
from .parsing import parse
from .unfiled import candidates

_ENTER_INSTRUCTION = "BEFORE_WITH"
_CACHE = dis.opmap["CACHE"]


@dataclass(frozen=True)
class WithSite:
    """One item of one ``with`` statement."""

    filename: str  # file of the statement
    node: ast.With  # the statement
    item: int  # index of the item whose context manager is being entered
    class_name: str | None  # name of the class that encloses the statement, for private names
    first_argument: str | None = None  # name of the first parameter of the enclosing function, which `super()` reads
    in_test: bool = False  # whether pytest has rewritten the assertions of the module


_trees: dict[str, tuple[tuple[str, ...], ast.Module]] = {}

#: Texts that are in no file, each with the file name under which it is registered in :mod:`linecache`.
_recovered: dict[str, str] = {}


def parsed_file(filename: str, module_globals: dict[str, object]) -> ast.Module | None:
    """Return the syntax tree of a file, or ``None`` if it has no text. The tree is cached until the lines in :mod:`linecache` change."""
    known = _trees.get(filename)
    lines = tuple(linecache.getlines(filename, module_globals))
    if not lines:  # after `linecache.clearcache()`, texts that are in no file are lost
        return None if known is None else known[1]
    if known is not None and known[0] == lines:
        return known[1]
    tree = _parsed("".join(lines))
    if tree is not None:
        _trees[filename] = (lines, tree)
    return tree


def _parsed(text: str) -> ast.Module | None:
    try:
        return parse(text)
    except (SyntaxError, ValueError):
        return None


def _enter_position(frame: types.FrameType) -> tuple[tuple[int | None, ...], int]:
    """Return the extent of the current instruction, and the number of earlier entering instructions with the same extent."""
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
    """Locate the ``with`` item that ``frame``, the caller of ``__enter__``, is entering.

    Raises:
        WithBlockNotFoundError: If the frame has no source text, if it is not entering a ``with`` statement, or if the text changed
            since it was compiled.
    """
    filename, line = frame.f_code.co_filename, frame.f_lineno
    tree = parsed_file(filename, frame.f_globals)
    site = None if tree is None else _site_in(tree, filename, frame)
    if site is None:
        site = _recovered_site(frame)
    if site is not None:
        return site
    if tree is None:
        raise WithBlockNotFoundError(
            f"The source of the block at {filename}:{line} cannot be read, so its body cannot be deferred. "
            "Python keeps no source of code that is compiled from a string by exec() or compile(), or piped into the interpreter: "
            "put the block into a file, or register its text with `linecache` under this file name."
        )
    raise WithBlockNotFoundError(_diagnostic(frame, filename, line))


def _site_in(tree: ast.Module, filename: str, frame: types.FrameType) -> WithSite | None:
    """Return the ``with`` item in ``tree`` that ``frame`` is entering; ``None`` if the code of the frame does not match the tree."""
    here, earlier = _enter_position(frame)
    for node, class_name, first_argument in nodes_in_place(tree):
        if not isinstance(node, ast.With):
            continue
        item = None  # the body of a `finally` is compiled several times, so `earlier` may count the items of earlier copies
        if _extent(node) == here or (None in here and node.lineno == frame.f_lineno):
            item = earlier % len(node.items)
        else:
            for index, candidate in enumerate(node.items):
                if _extent(candidate.context_expr) == here:
                    item = index + earlier % (len(node.items) - index)
        if item is not None:
            site = WithSite(filename, node, item, class_name, first_argument, are_rewritten(frame.f_globals))
            return site if fits(node, frame.f_code, frame.f_lasti) else None
    return None


def nodes_in_place(tree: ast.Module) -> Iterator[tuple[ast.AST, str | None, str | None]]:
    """Yield every node, with the name of the enclosing class and the first parameter of the enclosing function."""
    stack: list[tuple[ast.AST, str | None, str | None]] = [(tree, None, None)]
    while stack:
        node, class_name, first_argument = stack.pop()
        yield node, class_name, first_argument
        if isinstance(node, ast.ClassDef):
            class_name = node.name
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = node.args.posonlyargs + node.args.args
            first_argument = parameters[0].arg if parameters else None
        stack.extend((child, class_name, first_argument) for child in ast.iter_child_nodes(node))


def _recovered_site(frame: types.FrameType) -> WithSite | None:
    """Find the ``with`` item of ``frame`` in a text that is in no file, and register the text in :mod:`linecache` under a name of its own.

    The block is compiled under that name, so tracebacks show its lines, and nested blocks find their statements.
    """
    for text in candidates(frame):
        tree = _parsed(text)
        site = None if tree is None else _site_in(tree, frame.f_code.co_filename, frame)
        if tree is None or site is None:
            continue
        name = _recovered.get(text)
        if name is None:
            name = f"<{frame.f_code.co_filename[1:-1]} {len(_recovered) + 1}>"
            _recovered[text] = name
            lines = StringIO(text).readlines()
            linecache.cache[name] = (len(text), None, lines, name)
            _trees[name] = (tuple(lines), tree)
        return replace(site, filename=name)
    return None


def body_lines(source: str | Iterable[str], line: int) -> tuple[int, list[str]]:
    """Return the body of the ``with`` statement that begins at ``line`` of ``source``: the number of its first line, and its lines.

    If the body is on the line of its ``with``, the returned first line begins with the first statement of the body.

    Raises:
        WithBlockNotFoundError: If no ``with`` statement begins there.
    """
    lines = StringIO(source if isinstance(source, str) else "".join(source)).readlines()
    text = dedent("".join(lines))
    tree = _parsed(text)
    nodes = () if tree is None else ast.walk(tree)
    node = next((node for node in nodes if isinstance(node, ast.With) and node.lineno == line), None)
    if node is None:
        raise WithBlockNotFoundError(f"No `with` statement begins at line {line} of the source.\n{_context(lines, line)}")
    statement = node.body[0]
    first = statement.lineno
    body = lines[first - 1 : node.end_lineno]
    # Columns count bytes of the parsed text, from which the common indentation was removed.
    parsed = StringIO(text).readlines()[first - 1].encode()
    if parsed[: statement.col_offset].strip():
        body[0] = parsed[statement.col_offset :].decode()
    return first, body


def calls_for_with(frame: types.FrameType) -> bool:
    """Whether the result of the call that ``frame`` is making is entered by a ``with`` statement.

    The instruction after the call decides, so no source is needed.
    """
    code, offset = frame.f_code.co_code, frame.f_lasti + 2
    while offset < len(code) and code[offset] == _CACHE:
        offset += 2
    return offset < len(code) and dis.opname[code[offset]] == _ENTER_INSTRUCTION


def _context(lines: list[str], line: int) -> str:
    """Return the lines around ``line`` with their numbers, and an arrow at ``line``."""
    numbers = range(max(1, line - 2), min(len(lines), line + 2) + 1)
    return "".join(f"  {'->' if number == line else '  '} {number}: {lines[number - 1].rstrip()}\n" for number in numbers)


def _diagnostic(frame: types.FrameType, filename: str, line: int) -> str:
    context = _context(linecache.getlines(filename), line)
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    cause = (
        "The file was probably edited after it was loaded: reload it and run again."
        if instruction == _ENTER_INSTRUCTION
        else "A trace must be entered by a `with` statement (not through ExitStack.enter_context or __enter__())."
    )
    return f"No `with` statement was found at {filename}:{line}. {cause}\n{context}"
