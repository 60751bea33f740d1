"""Listings: the source lines of a function, and the operations in it.

The operations of a function are its calls and its assignments. They are found in its syntax tree, which gives their names and lines. A
second version of the function is compiled from this tree, in which a call ``f(x)`` is ``operation(f, x)`` and ``y = x`` is
``y = operation(x)``, see :mod:`~nnsight.runtime.modules.operations`.

The calls of ``f`` are named ``f_0``, ``f_1``, …. A second numbering counts the calls of ``f`` and the assignments to ``f`` together, in
order of execution; it applies to numbers that no call has. So in ``f = pick(); f(x)`` the call is ``f_0``, and ``f_1`` is its alias. In
``f = pick()`` alone, the assignment is ``f_0``.

The source of a function is read from its file, and used only if it compiles to the same instructions as the function has.
"""

from __future__ import annotations

import ast
import copy
import dis
import linecache
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from ...tracing.errors import did_you_mean
from ...tracing.parsing import nested_code
from ...tracing.source import nodes_in_place, parsed_file

#: Builtins that read the frame of their caller, so an ``operation`` cannot make the call for it.
_ABOUT_FRAME = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint"})

#: Name of the free variable that holds an operation, by the operation's number.
OPERATION = "__nnsight_operation_{}__"

#: Instructions that may differ between two compilations of one function.
_NO_MEANING = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"}


class SourceError(ValueError):
    """The operations of a function cannot be listed: it has no Python source, or its file has changed since it was loaded."""


@dataclass(frozen=True)
class Operation:
    """A call or an assignment in a function."""

    name: str  # its name, unique in the function
    callee: ast.expr | None  # the expression that is called, as in the source; None for an assignment
    line: int  # its first line, as an offset from the first line of the function
    end_line: int  # its last line, likewise


@dataclass(frozen=True, eq=False)
class Listing:
    """The source lines and the operations of a function."""

    lines: tuple[str, ...]  # its source, decorators included
    operations: dict[str, Operation]  # its operations by name, in the order of their numbers
    code: types.CodeType  # the second version of the function, which calls operation `n` as a free variable
    aliases: dict[str, str]  # names of calls in the numbering that includes assignments, unless an operation has the same name


def no_operation(path: str, name: str, listing: Listing) -> str:
    """Return the message that the function at ``path`` has no operation ``name``, with the operations it has."""
    hint = did_you_mean(name, listing.operations)
    return f"`{path}.source` has no operation `{name}`.{hint} There are: {', '.join(listing.operations)}."


@dataclass(frozen=True, eq=False)
class Definition:
    """The syntax tree of a function."""

    arguments: ast.arguments  # its parameters
    body: tuple[ast.stmt, ...]  # its statements
    class_name: str | None  # name of the enclosing class, for the mangling of private names


_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Known = tuple[weakref.ref[types.CodeType], Any]
_listings: dict[int, _Known] = {}
_definitions: dict[int, _Known] = {}


def listing_of(function: types.FunctionType) -> Listing:
    """Return the listing of a Python function, cached by its code object. Raises the errors of :func:`definition_of`."""
    listing: Listing = _cached(_listings, function, _list)
    return listing


def definition_of(function: types.FunctionType) -> Definition:
    """Return the syntax tree of a Python function or lambda, cached by its code object.

    Raises:
        SourceError: If there is no source, or if the source does not compile to the function's code.
    """
    definition: Definition = _cached(_definitions, function, _define)
    return definition


def _cached(known: dict[int, _Known], function: types.FunctionType, make: Callable[[types.FunctionType], Any]) -> Any:
    key = id(function.__code__)
    found = known.get(key)
    if found is None:
        forget = known.pop
        reference = weakref.ref(function.__code__, lambda _: forget(key, None))
        found = known[key] = (reference, make(function))
    return found[1]


def _define(function: types.FunctionType) -> Definition:
    node, class_name = _definition_node(function)
    body = [ast.copy_location(ast.Return(node.body), node.body)] if isinstance(node, ast.Lambda) else node.body
    return Definition(node.args, tuple(body), class_name)


def _list(function: types.FunctionType) -> Listing:
    code, (node, class_name) = function.__code__, _definition_node(function)
    if isinstance(node, ast.Lambda):
        raise SourceError(f"`{function.__qualname__}` ({code.co_filename}:{code.co_firstlineno}) is a lambda, which has no operations.")
    rewriter = _Rewriter(code.co_firstlineno, node)
    rewritten = copy.deepcopy(node)
    rewritten.body = [rewriter.visit(statement) for statement in rewritten.body]
    free = [OPERATION.format(number) for number in range(len(rewriter.operations))]
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 : node.end_lineno]
    return Listing(
        tuple(line.rstrip("\n") for line in lines),
        {operation.name: operation for operation in rewriter.operations},
        _compiled(rewritten, class_name, code, free),
        rewriter.aliases,
    )


def _definition_node(function: types.FunctionType) -> tuple[_Node, str | None]:
    """Return the definition that a function was compiled from, and the name of the enclosing class."""
    code = function.__code__
    name = f"`{function.__qualname__}` ({code.co_filename}:{code.co_firstlineno})"
    tree = parsed_file(code.co_filename, function.__globals__)
    if tree is None:
        raise SourceError(f"{name} has no source text that could be read.")
    for node, class_name in _candidates(tree, code):
        if _matches(_compiled(copy.deepcopy(node), class_name, code), code):
            return node, class_name
    raise SourceError(f"{name} differs from the code at this line of its file. The file was probably edited since its import: reload it.")


def _candidates(tree: ast.Module, code: types.CodeType) -> Iterator[tuple[_Node, str | None]]:
    """Yield the definitions with the name and first line of ``code``, and the name of the enclosing class of each."""
    for node, class_name, _ in nodes_in_place(tree):
        if isinstance(node, _Node) and getattr(node, "name", "<lambda>") == code.co_name:
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            if first == code.co_firstlineno:
                yield node, class_name


def _compiled(node: _Node, class_name: str | None, original: types.CodeType, free: Iterable[str] = ()) -> types.CodeType:
    """Compile ``node`` with the free variables and flags of ``original``. Removes decorators, defaults and annotations from ``node``."""
    if isinstance(node, ast.Lambda):
        statement: ast.stmt = ast.copy_location(ast.Return(node), node)
    else:
        node.decorator_list, node.returns, statement = [], None, node
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    arguments.defaults = []
    arguments.kw_defaults = [None] * len(arguments.kwonlyargs)
    return nested_code(statement, (*original.co_freevars, *free), class_name, original.co_filename, original.co_flags)


def _matches(compiled: types.CodeType, original: types.CodeType) -> bool:
    """Whether two functions have the same instructions. If pytest has rewritten the assertions of ``original``, only names are compared."""
    if any(name.startswith("@py") for name in original.co_varnames + original.co_names):
        return set(compiled.co_names) <= set(original.co_names)
    if compiled.co_varnames != original.co_varnames or compiled.co_freevars != original.co_freevars:
        return False
    mine, theirs = ([step for step in map(_meaning, dis.get_instructions(code)) if step] for code in (compiled, original))
    return len(mine) == len(theirs) and all(map(_same_step, mine, theirs))


def _meaning(instruction: dis.Instruction) -> tuple[str, Any] | None:
    """Return the part of an instruction that does not depend on the code around the function, or ``None``.

    Method look-ups count as attribute look-ups, because Python 3.12 compiles ``name.method()`` differently if the file imports ``name``.
    """
    name = instruction.opname
    if name in _NO_MEANING:
        return None
    is_jump = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
    return "LOAD_ATTR" if name == "LOAD_METHOD" else name, None if is_jump else instruction.argval


def _same_step(mine: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    (name, value), (other_name, other) = mine, theirs
    if isinstance(value, types.CodeType) and isinstance(other, types.CodeType):
        return _matches(value, other)
    return name == other_name and type(value) is type(other) and repr(value) == repr(other)


class _Rewriter(ast.NodeTransformer):
    """Rewrites calls ``f(x)`` to ``operation(f, x)`` and assigned values to ``operation(value)``, and lists these operations."""

    def __init__(self, first_line: int, definition: ast.AST) -> None:
        self.operations: list[Operation] = []
        self.aliases: dict[str, str] = {}
        self._first_line = first_line
        self._called = Counter(_name_of(node.func) for node in ast.walk(definition) if _is_operation(node))
        self._calls: Counter[str] = Counter()  # number of calls so far, by name
        self._all: Counter[str] = Counter()  # number of calls and assignments so far, by name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        callee = copy.deepcopy(node.func)
        self.generic_visit(node)
        if not _is_operation(node):
            return node
        name, number = _name_of(callee), self._calls[_name_of(callee)]
        self._calls[name] += 1
        if self._all[name] >= self._called[name]:
            self.aliases[f"{name}_{self._all[name]}"] = f"{name}_{number}"
        self._all[name] += 1
        operation = self._add(f"{name}_{number}", callee, node)
        return ast.copy_location(ast.Call(operation, [node.func, *node.args], node.keywords), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self._assigned(node.targets[0], node.value) if len(node.targets) == 1 else self.visit(node.value)
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self._assigned(node.target, node.value)
            node.target = self.visit(node.target)
        return node

    def _assigned(self, target: ast.expr, value: ast.expr) -> ast.expr:
        """Return the rewritten ``value``, as an operation if ``target`` has a name: ``y = f(x)`` becomes ``y = op_1(op_0(f, x))``."""
        kinds = (ast.Tuple, ast.List)
        if isinstance(target, kinds):
            if isinstance(value, kinds) and len(target.elts) == len(value.elts) and not any(map(_is_starred, (*target.elts, *value.elts))):
                value.elts = list(map(self._assigned, target.elts, value.elts))
                return value
            return self.visit(value)
        value, name = self.visit(value), _name_of(target)
        if name == "call":  # the target has no name
            return value
        number = self._all[name]
        self._all[name] += 1
        if number < self._called[name]:  # a call has this name
            return value
        return ast.copy_location(ast.Call(self._add(f"{name}_{number}", None, value), [value], []), value)

    def _add(self, name: str, callee: ast.expr | None, node: ast.expr) -> ast.expr:
        """Add an operation, and return the variable that stands for it."""
        variable = ast.copy_location(ast.Name(OPERATION.format(len(self.operations)), ast.Load()), node)
        start, end = node.lineno - self._first_line, (node.end_lineno or node.lineno) - self._first_line
        self.operations.append(Operation(name, callee, start, end))
        return variable


def _is_operation(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _ABOUT_FRAME)


def _is_starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


def _name_of(callee: ast.expr) -> str:
    """Return the dotted names at the end of ``callee``, or of an assignment target, joined by underscores.

    ``self.c_attn`` gives ``self_c_attn``, and ``self.c_attn(x).split`` gives ``split``. Subscripts are left out.
    """
    start, parts = attributes_of(callee)
    while isinstance(start, ast.Subscript):  # ``self.layers[i]`` is ``self_layers``
        start, before = attributes_of(start.value)
        parts = [*before, *parts]
    return "_".join([*([start.id] if isinstance(start, ast.Name) else ()), *parts]) or "call"


def attributes_of(expression: ast.expr) -> tuple[ast.expr, list[str]]:
    """Split an attribute chain into its base and the attribute names: ``f(x).a.b`` gives ``(f(x), ["a", "b"])``."""
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.insert(0, expression.attr)
        expression = expression.value
    return expression, names
