"""Operations: the calls inside a Python function, as locations of their own.

Between the input and the output of a module lies its ``forward``, ordinary Python that calls submodules, methods and functions. To
stop a run at such a call, the function is compiled a second time from its own syntax tree, with each ``f(x)`` in it turned
into ``operation(f, x)``, where ``operation`` intercepts the call exactly as the call of a module is intercepted
(:func:`~nnsight.runtime.instrumentation.intercepted`). Positions stay those of the file, so tracebacks and debuggers show the user's model.

An operation is named after what is called, dots as underscores, and numbered in the order of evaluation, an inner call
before the one around it: in ``self.c_proj(x.view(y))`` there are ``x_view_0`` and ``self_c_proj_0``. The function that an
operation calls can be looked into in turn.

The rewritten functions belong to one tree of modules and are installed for the time of a run.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import dis
import functools
import itertools
import linecache
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..tracing.source import parsed_file
from .instrumentation import TracedCall, intercepted, is_compiling
from .interleaver import active_interleaver

#: Builtins that look at the frame of their caller, so their call cannot be made from elsewhere.
_ABOUT_FRAME = frozenset({"super", "locals", "globals", "vars", "dir", "eval", "exec", "breakpoint"})

_OPERATION = "__nnsight_operation_{}__"

#: Attribute of a rewritten function: the function it was made from.
_ORIGINAL = "__nnsight_original__"

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


_listings: dict[int, tuple[weakref.ref[types.CodeType], Listing]] = {}


def listing_of(function: types.FunctionType) -> Listing:
    """Return the listing of a plain function; made once for its code.

    Raises:
        SourceError: If there is no source, or the file was changed after it was loaded.
    """
    key = id(function.__code__)
    known = _listings.get(key)
    if known is None:
        forget = _listings.pop
        reference = weakref.ref(function.__code__, lambda _: forget(key, None))
        known = _listings[key] = (reference, _list(function))
    return known[1]


def _list(function: types.FunctionType) -> Listing:
    code = function.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}"
    tree = parsed_file(code.co_filename, function.__globals__)
    if tree is None:
        raise SourceError(f"`{function.__qualname__}` ({where}) has no source text that could be read.")
    found = _definition(tree, code)
    if found is None:
        raise SourceError(
            f"`{function.__qualname__}` was not found at {where}. The file was probably edited after it was loaded: reload it."
        )
    node, class_name = found
    plain = copy.deepcopy(node)
    if not _same(_compiled(plain, class_name, code, []), code):
        raise SourceError(f"The file of `{function.__qualname__}` ({where}) was edited after it was loaded: reload it.")
    rewriter = _Rewriter(node, code.co_firstlineno)
    rewritten = rewriter.rewritten()
    free = [_OPERATION.format(number) for number in range(len(rewriter.operations))]
    last = node.end_lineno or code.co_firstlineno
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 : last]
    return Listing(
        tuple(line.rstrip("\n") for line in lines),
        {operation.name: operation for operation in rewriter.operations},
        _compiled(rewritten, class_name, code, free),
    )


def _definition(tree: ast.Module, code: types.CodeType) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, str | None] | None:
    """Return the definition that ``code`` was compiled from, and the name of the class around it."""
    pending: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while pending:
        node, class_name = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node, class_name
        if isinstance(node, ast.ClassDef):
            class_name = node.name
        pending.extend((child, class_name) for child in ast.iter_child_nodes(node))
    return None


def _compiled(
    node: ast.FunctionDef | ast.AsyncFunctionDef, class_name: str | None, original: types.CodeType, free: list[str]
) -> types.CodeType:
    """Compile the body of ``node``, without decorators, defaults and annotations; they are those of the original."""
    node.decorator_list = []
    node.returns = None
    arguments = node.args
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
    module = ast.fix_missing_locations(ast.Module(body=[top], type_ignores=[]))
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
        operation = ast.copy_location(ast.Name(_OPERATION.format(len(self.operations)), ast.Load()), node.func)
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


# -- functions with their operations intercepted --------------------------------------------------------------------


def layers_of(function: Any, what: str) -> list[types.FunctionType]:
    """Return ``function`` and, innermost last, the functions that its decorators wrapped.

    Args:
        function: Any callable.
        what: How messages name it.

    Raises:
        SourceError: If it is no Python function.
    """
    if isinstance(function, torch.nn.Module):
        raise SourceError(f"{what} is a module ({type(function).__name__}): use the `.source` of its own envoy.")
    if isinstance(function, type):
        raise SourceError(f"{what} makes a `{function.__name__}`; only functions can be looked into.")
    function = getattr(function, "__func__", function)
    function = getattr(function, _ORIGINAL, function)
    if not isinstance(function, types.FunctionType):
        kind = "a C function" if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)) else "an object"
        name = getattr(function, "__qualname__", type(function).__name__)
        raise SourceError(f"{what} is {kind} (`{name}`), which has no Python source to look into.")
    layers = [function]
    while isinstance(inner := getattr(layers[-1], "__wrapped__", None), types.FunctionType):
        layers.append(inner)
    return layers


def _replaced_cell(layer: types.FunctionType, old: Any, new: Any) -> types.FunctionType:
    """Return ``layer``, a decorator's wrapper, around ``new`` in place of ``old``."""
    closure = layer.__closure__ or ()
    positions = [index for index, cell in enumerate(closure) if _content(cell) is old]
    if not positions:
        raise SourceError(f"A decorator of `{old.__qualname__}` keeps it where it cannot be replaced.")
    cells = [types.CellType(new) if index in positions else cell for index, cell in enumerate(closure)]
    made = types.FunctionType(layer.__code__, layer.__globals__, layer.__name__, layer.__defaults__, tuple(cells))
    made.__kwdefaults__ = layer.__kwdefaults__
    made.__dict__.update(layer.__dict__, __wrapped__=new)
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


class Operations:
    """The functions of one tree of modules whose operations are watched.

    Args:
        traced_call: What an operation does while dynamo traces it.

    Attributes:
        opened: Paths of the modules, and of the operations, that were looked into.
        refused: Why the function that an operation called could not be looked into, by its path.
    """

    def __init__(self, traced_call: TracedCall | None = None) -> None:
        self.opened: set[str] = set()
        self.refused: dict[str, str] = {}
        self._traced_call = traced_call
        self._made: dict[str, weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType]] = {}

    def open(self, path: str) -> bool:
        """Watch the operations of the function at ``path`` from now on; return whether that is new."""
        if path in self.opened:
            return False
        self.opened.add(path)
        for outer in [made for made in self._made if path == made or path.startswith(f"{made}.source.")]:
            del self._made[outer]
        return True

    def intercept(self, path: str, function: Any) -> Any:
        """Return ``function``, found at ``path``, with its operations intercepted."""
        owner = getattr(function, "__self__", None)
        layers = layers_of(function, f"`{path}`")
        self.refused.pop(path, None)
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
        for number, name in enumerate(listing.operations):
            cells[_OPERATION.format(number)] = types.CellType(self._operation(f"{path}.source.{name}"))
        # Dynamo keeps what it compiled on the code object: each module has its own.
        code = listing.code.replace(co_name=listing.code.co_name)
        closure = tuple(cells[name] for name in code.co_freevars)
        made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        made.__qualname__, made.__doc__, made.__module__ = function.__qualname__, function.__doc__, function.__module__
        made.__annotations__ = function.__annotations__
        return made

    def _operation(self, path: str) -> Callable[..., Any]:
        """Return what an operation calls in place of the function."""
        watched = intercepted(path, self._traced_call)
        if path not in self.opened:
            return watched

        traced = types.SimpleNamespace()

        def keep(function: Any) -> str:
            """Keep the rewritten function where dynamo finds it; it calls this while it traces, for the name."""
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
            self._refuse(path, function)
            return watched(function, *args, **kwargs)

        return opened_operation

    def _intercept_or_refuse(self, path: str, function: Any) -> Any:
        try:
            return self.intercept(path, function)
        except SourceError as error:
            self._tell(path, str(error))
            return function

    def _refuse(self, path: str, function: Any) -> None:
        """Note that an operation called something that is no Python function."""
        if is_compiling():
            return
        try:
            layers_of(function, f"`{path}`")
        except SourceError as error:
            self._tell(path, str(error))

    def _tell(self, path: str, reason: str) -> None:
        """Raise the reason in the blocks that wait for something inside the function."""
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
    """Return what ``operation`` of ``function``, a method of ``module``, calls, or ``None`` if only a run can tell."""
    parts: list[str] = []
    callee = operation.callee
    while isinstance(callee, ast.Attribute):
        parts.append(callee.attr)
        callee = callee.value
    if not isinstance(callee, ast.Name):
        return None
    code = function.__code__
    if code.co_argcount and callee.id == code.co_varnames[0]:
        value: Any = module
    elif callee.id in code.co_varnames or callee.id in code.co_cellvars or callee.id in code.co_freevars:
        return None
    else:
        value = function.__globals__.get(callee.id, getattr(builtins, callee.id, None))
    for part in reversed(parts):
        value = getattr(value, part, None)
    return value


# -- what a block will ask for ---------------------------------------------------------------------------------------

#: Names that follow ``.source`` in a block, one tuple for each chain of attributes: ``x.source.a_0.source.b_0`` is ``(a_0, b_0)``.
Chains = frozenset[tuple[str, ...]]

_OPERATION_NAME = re.compile(r"_\d+$")


def mentioned_chains(code: types.CodeType, functions: Callable[[str], Any]) -> Chains:
    """Return the operations that a block, and the functions it calls, mention.

    A compiled model has to be captured with the operations in it before the block gets to them. Where the block does not
    mention them as attributes behind ``.source``, they become known when it gets there, which is too late for that run.

    Args:
        code: The block.
        functions: Returns what a name of the block stands for.
    """
    found: set[tuple[str, ...]] = set()
    seen: set[types.CodeType] = set()
    pending = [(code, functions)]
    while pending and len(seen) < 100:
        current, names = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        found |= _chains_in(current)
        for name in current.co_names + current.co_freevars:
            called = names(name)
            if isinstance(called, types.FunctionType):
                pending.append((called.__code__, called.__globals__.get))
        pending += [(item, names) for item in current.co_consts if isinstance(item, types.CodeType)]
    return frozenset(found)


def _chains_in(code: types.CodeType) -> set[tuple[str, ...]]:
    if "source" not in code.co_names:
        return set()
    found: set[tuple[str, ...]] = set()
    chain: list[str] | None = None
    expect_name = False
    for instruction in dis.get_instructions(code):
        name = instruction.argval if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        if name == "source":
            chain, expect_name = chain or [], True
        elif name is not None and _OPERATION_NAME.search(name):
            # Also a name that does not follow `.source` at once: the source may be in a variable.
            chain = [*chain, name] if chain is not None and expect_name else [name]
            expect_name = False
            found.add(tuple(chain))
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            chain, expect_name = None, False
    return found
