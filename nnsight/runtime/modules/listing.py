"""A function as text and as operations.

The operations of a function are the calls in it. From the function's own syntax tree come their names and lines, and the code of a
second version of it in which each call ``f(x)`` is ``operation(f, x)``; what ``operation`` does is up to
:mod:`~nnsight.runtime.modules.operations`. The text is read from the file, and has to be the one that the function was compiled from.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import linecache
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...tracing.source import parsed_file

#: Builtins that look at the frame of their caller, so their call cannot be made from elsewhere.
_ABOUT_FRAME = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint"})

#: Name of the variable that stands for an operation, by its number.
OPERATION = "__nnsight_operation_{}__"

_FUTURE_FLAGS = functools.reduce(int.__or__, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names))

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class SourceError(ValueError):
    """A function cannot be looked into: it has no Python source, or one that is not its own any more."""


@dataclass(frozen=True)
class Operation:
    """A call in a function.

    Attributes:
        name: Its name, unique in the function.
        callee: What is called, as written.
        line: Its first line, counted from the first line of the function.
        end_line: Its last line, likewise.
        certain: Whether it is reached exactly once by every call of the function that returns.
    """

    name: str
    callee: ast.expr
    line: int
    end_line: int
    certain: bool


@dataclass(frozen=True, eq=False)
class Listing:
    """A function as text and as operations.

    Attributes:
        lines: Its source, decorators included.
        operations: Its operations by name, in the order of their numbering.
        code: The function with its calls intercepted; operation ``n`` is free in it.
    """

    lines: tuple[str, ...]
    operations: dict[str, Operation]
    code: types.CodeType


@dataclass(frozen=True, eq=False)
class Definition:
    """A function as it is written.

    Attributes:
        arguments: Its parameters.
        body: Its statements.
        class_name: Name of the class around it, for private names.
    """

    arguments: ast.arguments
    body: tuple[ast.stmt, ...]
    class_name: str | None


_Key = tuple[weakref.ref[types.CodeType], Any]
_listings: dict[int, _Key] = {}
_definitions: dict[int, _Key] = {}


def listing_of(function: types.FunctionType) -> Listing:
    """Return the listing of a plain function; made once for its code.

    Raises:
        SourceError: If there is no source, or the file was changed after it was loaded.
    """
    listing: Listing = _once(_listings, function, _list)
    return listing


def definition_of(function: types.FunctionType) -> Definition:
    """Return how a plain function, or a lambda, is written; looked for once for its code.

    Raises:
        SourceError: If there is no source, or what is written there does not compile to exactly this code.
    """
    definition: Definition = _once(_definitions, function, _define)
    return definition


def _once(known: dict[int, _Key], function: types.FunctionType, make: Callable[[types.FunctionType], Any]) -> Any:
    key = id(function.__code__)
    found = known.get(key)
    if found is None:
        forget = known.pop
        reference = weakref.ref(function.__code__, lambda _: forget(key, None))
        found = known[key] = (reference, make(function))
    return found[1]


def _tree_of(function: types.FunctionType) -> ast.Module:
    code = function.__code__
    tree = parsed_file(code.co_filename, function.__globals__)
    if tree is None:
        where = f"{code.co_filename}:{code.co_firstlineno}"
        raise SourceError(f"`{function.__qualname__}` ({where}) has no source text that could be read.")
    return tree


def _define(function: types.FunctionType) -> Definition:
    code, tree = function.__code__, _tree_of(function)
    imported = sorted(_imported(tree).intersection(code.co_names))
    for node, class_name in _candidates(tree, code):
        statement: ast.stmt = ast.Return(copy.deepcopy(node)) if isinstance(node, ast.Lambda) else copy.deepcopy(node)
        if _is_exactly(_compiled(ast.copy_location(statement, node), class_name, code, [], imported), code):
            body = [ast.copy_location(ast.Return(node.body), node.body)] if isinstance(node, ast.Lambda) else node.body
            return Definition(node.args, tuple(body), class_name)
    where = f"{code.co_filename}:{code.co_firstlineno}"
    raise SourceError(f"`{function.__qualname__}` is not what is written at {where}.")


def _list(function: types.FunctionType) -> Listing:
    code = function.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}"
    node, class_name = next(_candidates(_tree_of(function), code), (None, None))
    if node is None or isinstance(node, ast.Lambda):
        raise SourceError(
            f"`{function.__qualname__}` was not found at {where}. The file was probably edited after it was loaded: reload it."
        )
    plain = copy.deepcopy(node)
    if not _same(_compiled(plain, class_name, code, []), code):
        raise SourceError(f"The file of `{function.__qualname__}` ({where}) was edited after it was loaded: reload it.")
    rewriter = _Rewriter(node, code.co_firstlineno)
    rewritten = rewriter.rewritten()
    free = [OPERATION.format(number) for number in range(len(rewriter.operations))]
    last = node.end_lineno or code.co_firstlineno
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 : last]
    return Listing(
        tuple(line.rstrip("\n") for line in lines),
        {operation.name: operation for operation in rewriter.operations},
        _compiled(rewritten, class_name, code, free),
    )


def _candidates(
    tree: ast.Module, code: types.CodeType
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, str | None]]:
    """Yield the definitions that ``code`` may have been compiled from, and the name of the class around each."""
    pending: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while pending:
        node, class_name = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                yield node, class_name
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            yield node, class_name
        if isinstance(node, ast.ClassDef):
            class_name = node.name
        pending.extend((child, class_name) for child in ast.iter_child_nodes(node))


def _imported(tree: ast.Module) -> set[str]:
    """Return the names that a file imports outside of functions: their methods are called by other instructions."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Module, ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            pending.extend(ast.iter_child_nodes(node))
    return found


def _compiled(
    node: ast.stmt,
    class_name: str | None,
    original: types.CodeType,
    free: list[str],
    imported: Sequence[str] = (),
) -> types.CodeType:
    """Compile the body of ``node``, without decorators, defaults and annotations; they are those of the original.

    Args:
        node: A definition, which is changed, or a statement that returns a lambda.
        class_name: Name of the class around it.
        original: What the result is to take the place of.
        free: More names that are variables of a function around it.
        imported: Names that the file imports.
    """
    defined: Any = node.value if isinstance(node, ast.Return) else node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node.decorator_list = []
        node.returns = None
    arguments = defined.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    arguments.defaults = []
    arguments.kw_defaults = [None] * len(arguments.kwonlyargs)
    outer_arguments = [ast.arg(name) for name in (*original.co_freevars, *free)]
    parameters = ast.arguments(posonlyargs=[], args=outer_arguments, kwonlyargs=[], kw_defaults=[], defaults=[])
    outer = ast.FunctionDef(name="around", args=parameters, body=[node], decorator_list=[], type_params=[])
    top: ast.stmt = outer
    if class_name is not None:  # private names (``self.__x``) are mangled with the class around them
        top = ast.ClassDef(name=class_name, bases=[], keywords=[], body=[outer], decorator_list=[], type_params=[])
    for made in (outer, top):
        ast.copy_location(made, node)
    imports: list[ast.stmt] = [ast.Import([ast.alias(name)]) for name in imported]
    module = ast.fix_missing_locations(ast.Module(body=[*imports, top], type_ignores=[]))
    flags = original.co_flags & _FUTURE_FLAGS
    code = compile(module, original.co_filename, "exec", flags=flags, dont_inherit=True)
    for _ in range(2 if class_name is None else 3):
        code = next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return code


def _same(compiled: types.CodeType, original: types.CodeType) -> bool:
    """Whether a function compiled from the file is the one that was loaded; pytest adds to those with an ``assert``.

    Instructions are not compared: the compiler chooses some by what is around the function.
    """
    arguments = original.co_argcount + original.co_kwonlyargcount
    if compiled.co_varnames[:arguments] != original.co_varnames[:arguments]:
        return False
    parts = [
        (set(code.co_names), _lines(code), {repr(part) for part in code.co_consts if _is_plain(part)})
        for code in (compiled, original)
    ]
    if any(name.startswith("@py") for name in original.co_varnames + original.co_names):
        return all(mine <= theirs for mine, theirs in zip(*parts, strict=True))
    return parts[0] == parts[1]


def _is_exactly(compiled: types.CodeType, original: types.CodeType) -> bool:
    """Whether two functions have the same instructions, with the same names and constants."""
    names = all(
        getattr(compiled, name) == getattr(original, name)
        for name in ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    )
    names = names and not (compiled.co_flags ^ original.co_flags) & ~inspect.CO_NESTED
    return names and len(compiled.co_consts) == len(original.co_consts) and all(
        _is_exactly(mine, theirs)
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType)
        else type(mine) is type(theirs) and repr(mine) == repr(theirs)
        for mine, theirs in zip(compiled.co_consts, original.co_consts, strict=True)
    )


def _is_plain(constant: Any) -> bool:
    return isinstance(constant, (int, float, complex, str, bytes, tuple))


def _lines(code: types.CodeType) -> set[int]:
    return {line for *_, line in code.co_lines() if line is not None} - {code.co_firstlineno}  # that of a decorator


class _Rewriter(ast.NodeTransformer):
    """Turns each call ``f(x)`` of a definition into ``operation(f, x)`` and lists them."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef, first_line: int) -> None:
        self.operations: list[Operation] = []
        self._node = node
        self._first_line = first_line
        self._used: Counter[str] = Counter()
        self._certain = {_position(call) for call in _certain_calls(node.body)}

    def rewritten(self) -> Any:
        """Return a copy of the definition with its calls intercepted."""
        node = copy.deepcopy(self._node)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        callee, position = copy.deepcopy(node.func), _position(node)
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _ABOUT_FRAME:
            return node
        name = _name_of(callee)
        number = self._used[name]
        self._used[name] += 1
        operation = ast.copy_location(ast.Name(OPERATION.format(len(self.operations)), ast.Load()), node.func)
        start, end = node.lineno - self._first_line, (node.end_lineno or node.lineno) - self._first_line
        self.operations.append(Operation(f"{name}_{number}", callee, start, end, position in self._certain))
        return ast.copy_location(ast.Call(operation, [node.func, *node.args], node.keywords), node)


def _position(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _name_of(callee: ast.expr) -> str:
    """Return the dotted names at the end of ``callee``, joined: ``self.c_attn(x).split`` is ``split``."""
    parts: list[str] = []
    while isinstance(callee, ast.Attribute):
        parts.append(callee.attr)
        callee = callee.value
    if isinstance(callee, ast.Name):
        parts.append(callee.id)
    return "_".join(reversed(parts)) or "call"


def _certain_calls(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """Yield the calls that running ``body`` to its end makes exactly once."""
    for statement in body:
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                yield from _unconditional(item.context_expr)
            yield from _certain_calls(statement.body)
        elif isinstance(statement, ast.If):
            yield from _unconditional(statement.test)
        elif isinstance(statement, (ast.For, ast.AsyncFor)):
            yield from _unconditional(statement.iter)
        elif isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return, ast.Delete)):
            yield from _unconditional(statement)
        if _may_leave(statement):
            return


def _may_leave(node: ast.AST) -> bool:
    if isinstance(node, _SCOPES):
        return False
    return isinstance(node, ast.Return) or any(_may_leave(child) for child in ast.iter_child_nodes(node))


def _unconditional(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, _SCOPES):
        return
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.BoolOp):
        children = node.values[:1]
    elif isinstance(node, ast.IfExp):
        children = [node.test]
    elif isinstance(node, _COMPREHENSIONS):
        children = [node.generators[0].iter]
    elif isinstance(node, ast.Call):
        yield node
    for child in children:
        yield from _unconditional(child)
