"""A block as a function over a shared scope.

The body of a ``with`` statement runs later, any number of times, and reads and assigns variables of the function around it. So it is
compiled as an inner function whose variables are all free, and every variable is a cell in a :class:`Scope`.

* An outermost block gets new cells, filled from the user's frame.
* A block inside a block gets the same cells, so sibling invokes, an iteration body and the block around them share variables.

The code has the user's file name and positions, so tracebacks, debuggers and nested blocks (which look up *their* ``with`` statement in the
same file) need no line arithmetic.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import dis
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .assertions import rewritten
from .body import GRADIENT_NAME, RESULT_NAME, SAVE_NAME, Rewriter, refuse_jumps
from .errors import BLOCK_NAME
from .loops import StepLoop, is_same_at_each_step, step_loop
from .parsing import nested_code, parameters
from .saving import save_method, saves
from .source import WithSite, body_lines, find_with

SCOPE_NAME = "__nnsight_scope__"
TRACER_NAME = "__nnsight_tracer__"
#: Built-ins by which one gets at all variables, also at those that the block does not mention.
_LOOKS_AROUND = {"breakpoint", "dir", "eval", "exec", "locals", "vars"}
_OWN_NAMES = (SCOPE_NAME, TRACER_NAME, SAVE_NAME, RESULT_NAME, GRADIENT_NAME)

#: What ``x`` is replaced by in ``x.grad``; set by the runtime, this layer knows no tensors.
gradient_of: list[Callable[[Any], Any]] = [lambda value: value]


def is_bound(cell: types.CellType) -> bool:
    """Whether the variable of ``cell`` has a value."""
    try:
        cell.cell_contents  # noqa: B018 - raises for an unbound variable
    except ValueError:
        return False
    return True


@dataclass(eq=False)
class Scope:
    """The variables of a family of blocks, one cell each."""

    cells: dict[str, types.CellType] = field(default_factory=dict)  # cell by variable name

    def branch(self, block: Block, trace: Block) -> Branch:
        """Return the scope of one of the blocks in that of ``trace`` that take turns.

        Variables that ``block`` assigns are its own, and :meth:`Branch.publish` shows them to the others. Variables that it only reads are
        those that others assign, or have their present value, as a loop variable does.
        """
        cells: dict[str, types.CellType] = {}
        others = {
            name for name, spans in trace.inner.items() if any(not first <= block.line <= last for first, last in spans)
        }
        for name in block.shared:
            cell = self.cells[name]
            bound = is_bound(cell)
            if name in block.stored or (bound and name not in others):
                cells[name] = types.CellType(cell.cell_contents) if bound else types.CellType()
            else:
                cells[name] = cell
        return Branch(cells, self, block.stored)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of every bound variable."""
        return ((name, cell.cell_contents) for name, cell in self.cells.items() if is_bound(cell))

    def copy(self) -> Scope:
        """Return a scope with the same values in cells of its own."""
        copied = Scope({name: types.CellType() for name in self.cells})
        for name, value in self.items():
            copied.cells[name].cell_contents = value
        return copied

    def take_saved(self, other: Scope) -> None:
        """Bind the saved values of ``other`` here."""
        marked = saves.get() or {}
        for name, value in other.items():
            if id(value) in marked:
                self.cells[name].cell_contents = value

    def drop_unsaved(self, names: frozenset[str]) -> None:
        """Unbind those of the variables ``names`` whose values are not saved."""
        marked = saves.get() or {}
        for name, value in list(self.items()):
            if name in names and id(value) not in marked:
                del self.cells[name].cell_contents

    def clear(self) -> None:
        """Unbind all variables, so that the scope keeps no object alive."""
        self.cells.clear()


@dataclass(eq=False)
class Branch(Scope):
    """The scope of a block that takes turns with others."""

    around: Scope = field(default_factory=Scope)  # the variables of all of them
    names: frozenset[str] = frozenset()  # those that this block assigns

    def publish(self) -> None:
        """Show the others what is bound here."""
        for name, value in self.items():
            if name in self.names:
                self.around.cells[name].cell_contents = value

    def pull(self) -> None:
        """Bind those of its own variables that the block has not bound to what others have shown."""
        for name, value in self.around.items():
            if name in self.names and not is_bound(self.cells[name]):
                self.cells[name].cell_contents = value


@dataclass(frozen=True, eq=False)
class Block:
    """A compiled body, ready to be bound to a scope."""

    code: types.CodeType  # code object of the body; every variable of the block is free in it
    filename: str  # the user's file
    line: int  # first line of the `with` statement
    shared: tuple[str, ...]  # names of all variables of the block
    stored: frozenset[str]  # those that it assigns
    inner: dict[str, set[tuple[int, int]]]  # those that `with` statements in it assign, each with the lines of these statements
    target: str | tuple[str, ...] | None  # name bound by `as`, or names if it is a tuple of them; `None` for anything else
    body: tuple[ast.stmt, ...] = ()  # its syntax tree, as it was compiled

    @property
    def source(self) -> list[str]:
        """The lines of the body; empty if the text cannot be read any more."""
        lines = linecache.getlines(self.filename)
        return body_lines(lines, self.line)[1] if lines else []

    @functools.cached_property
    def looked_up(self) -> frozenset[str]:
        """The names that it looks up outside, those of its variables included."""
        return frozenset(names_of(self.code)[1])

    @functools.cached_property
    def globals_read(self) -> tuple[str, ...]:
        """The names of globals that it may read."""
        return tuple(self.looked_up.difference(self.shared))

    @functools.cached_property
    def step_loop(self) -> StepLoop | None:
        """The loop over steps of a generation that is all of it, if it is one."""
        binds = self.body and isinstance(self.body[0], ast.Assign) and ast.unparse(self.body[0].value) == TRACER_NAME
        return step_loop(self.body[1:] if binds else self.body)

    @functools.cached_property
    def is_same_at_each_step(self) -> bool:
        """Whether it is a loop over all steps that does the same at each; see :mod:`~nnsight.tracing.loops`."""
        return self.step_loop is not None and is_same_at_each_step(self.step_loop)

    @property
    def last_line(self) -> int:
        """The last line of its body."""
        return max((statement.end_lineno or 0 for statement in self.body), default=self.line)

    def only(self, body: Sequence[ast.stmt]) -> Block:
        """Return a block that has only these statements of its body."""
        place = ast.copy_location(ast.Pass(), body[0])
        declared = [name for name in self.shared if name != "__class__"]
        whole: list[ast.stmt] = [*([ast.copy_location(ast.Nonlocal(declared), place)] if declared else []), *body]
        function = ast.FunctionDef(name=BLOCK_NAME, args=parameters(), body=whole, decorator_list=[], type_params=[])
        free = sorted({*self.shared, *_OWN_NAMES})
        code = nested_code(ast.copy_location(function, place), free, None, self.filename, self.code.co_flags)
        return replace(self, code=code, body=tuple(body))

    def bindings(self, value: Any) -> dict[str, Any]:
        """Return the variables that ``as`` binds if the context manager gives ``value``."""
        if isinstance(self.target, str):
            return {self.target: value}
        if self.target is None or not isinstance(value, tuple):
            return {}
        return dict(zip(self.target, value, strict=True))

    def open_scope(self, frame: types.FrameType) -> Scope:
        """Return the scope of the block around this one, or a new one with the values of the user's frame."""
        if frame.f_code.co_name == BLOCK_NAME:
            scope = _scope_of(frame)
            for name in self.shared:
                if name not in scope.cells:
                    scope.cells[name] = types.CellType()
            return scope
        cell, variables = types.CellType, frame.f_locals
        cells = {name: cell(variables[name]) if name in variables else cell() for name in self.shared}
        scope = Scope(cells)
        if _is_function(frame):
            _forget_snapshot(frame, variables)
            return scope
        around: types.FrameType | None = frame
        while around is not None and not _is_function(around):
            # The body of a class does not list what it reads of the function around it, which is its caller.
            wanted = set(around.f_code.co_freevars).intersection(cells) - dict(scope.items()).keys()
            around = around.f_back
            if not wanted or around is None:
                break
            variables = around.f_locals
            for name in wanted.intersection(variables):
                cells[name].cell_contents = variables[name]
            _forget_snapshot(around, variables)
        return scope

    def bind(self, scope: Scope, tracer: Any, module_globals: dict[str, Any]) -> Callable[[], None]:
        """Return the body as a function without arguments that works on ``scope``."""
        cell, cells = types.CellType, scope.cells
        own = (scope, tracer, save_method, called, gradient_of[0])
        closure = tuple([cell(own[item]) if isinstance(item, int) else cells[item] for item in self._closure])
        return types.FunctionType(self.code, module_globals, BLOCK_NAME, None, closure)

    @functools.cached_property
    def _closure(self) -> tuple[str | int, ...]:
        """The free variables of the code: names, or positions in :data:`_OWN_NAMES`."""
        own = {name: position for position, name in enumerate(_OWN_NAMES)}
        return tuple(own.get(name, name) for name in self.code.co_freevars)


def called(value: Any) -> Any:
    """Return what ``value()`` returns, or ``value`` if it is no function."""
    return value() if callable(value) else value


def _is_function(frame: types.FrameType) -> bool:
    """Whether the frame is that of a function, whose variables are not a dictionary."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _scope_of(frame: types.FrameType) -> Scope:
    """Return the scope of a block's frame."""
    variables = frame.f_locals
    scope = variables[SCOPE_NAME]
    _forget_snapshot(frame, variables)
    return scope


def _forget_snapshot(frame: types.FrameType, variables: Any) -> None:
    """Empty the snapshot that ``frame.f_locals`` is before Python 3.13, which the frame would keep until it ends.

    A tensor the user deletes must not live on in it. The next look at ``f_locals`` fills it anew.
    """
    if _HAS_SNAPSHOTS and _is_function(frame):
        variables.clear()


_HAS_SNAPSHOTS = sys.version_info < (3, 13)

_blocks: dict[tuple[int, int], tuple[weakref.ref[types.CodeType], Block]] = {}


def block_at(frame: types.FrameType) -> Block:
    """Return the compiled block that ``frame`` is entering; each place in the code is compiled once."""
    key = (id(frame.f_code), frame.f_lasti)
    known = _blocks.get(key)
    if known is not None:
        return known[1]
    block = compile_block(find_with(frame), _local_names(frame), _is_function(frame), frame.f_code.co_flags)
    forget = _blocks.pop  # at interpreter exit the module's globals are gone before the last code objects
    reference = weakref.ref(frame.f_code, lambda _: forget(key, None))
    _blocks[key] = (reference, block)
    return block


def compile_block(site: WithSite, local: set[str] | None, in_function: bool, flags: int = 0) -> Block:
    """Compile the body of a ``with`` statement, which stands in code with the compiler flags ``flags``.

    Args:
        site: The statement.
        local: Variables of the code around it; ``None`` at module level, where they are globals.
        in_function: Whether that code is a function. There, an assigned name that is not local was declared global.

    Raises:
        SyntaxError: If the body contains a statement that cannot be deferred.
    """
    node, filename = site.node, site.filename
    refuse_jumps(node, filename)
    rewriter = Rewriter(site.first_argument, filename)
    body: list[ast.stmt] = [rewriter.visit(statement) for statement in copy.deepcopy(node.body)]
    if site.in_test:
        body = rewritten(body)
    if site.item + 1 < len(node.items):
        inner = ast.With(items=node.items[site.item + 1 :], body=body)
        # Located at its first item, by which a trace among the items finds its way back to this statement.
        body = [ast.copy_location(inner, inner.items[0].context_expr)]
    target = node.items[site.item].optional_vars
    if target is not None:
        assignment = ast.Assign(targets=[target], value=ast.Name(TRACER_NAME, ast.Load()))
        body.insert(0, ast.copy_location(assignment, target))

    outer = {name for part in ast.walk(node) if isinstance(part, ast.Nonlocal) for name in part.names}
    stored, loaded = names_of(_function_code(body, sorted(outer), site, flags))
    stored |= outer  # functions in the block assign these
    if local is None:  # a module's own variables are globals: only assignments need a cell
        shared, declared_global = stored, set()
    else:
        declared_global = stored - local if in_function else set()
        used = local if loaded & _LOOKS_AROUND else loaded & local
        shared = {name for name in stored | used if name.isidentifier()} - declared_global
    shared -= set(_OWN_NAMES)
    declarations: list[ast.stmt] = [ast.Expr(ast.Name(SCOPE_NAME, ast.Load()))]
    if declared_global:
        declarations.append(ast.Global(sorted(declared_global)))
    if shared - {"__class__"}:  # reading needs no declaration, but those that look around find declared names only
        declarations.append(ast.Nonlocal(sorted(shared - {"__class__"})))
    for declaration in declarations:
        ast.copy_location(declaration, node)
    code = _function_code(declarations + body, sorted(shared.union(_OWN_NAMES)), site, flags)
    name: str | tuple[str, ...] | None = target.id if isinstance(target, ast.Name) else None
    if isinstance(target, ast.Tuple) and all(isinstance(item, ast.Name) for item in target.elts):
        name = tuple(item.id for item in target.elts if isinstance(item, ast.Name))
    inside = _assigned_inside(node.body)
    return Block(code, filename, node.lineno, tuple(sorted(shared)), frozenset(stored & shared), inside, name, tuple(body))


def _assigned_inside(body: list[ast.stmt]) -> dict[str, set[tuple[int, int]]]:
    """Return the names that ``with`` statements in ``body`` assign, each with the lines of the innermost of these statements."""
    found: dict[str, set[tuple[int, int]]] = {}
    pending: list[tuple[ast.AST, tuple[int, int] | None]] = [(statement, None) for statement in body]
    while pending:
        part, lines = pending.pop()
        if isinstance(part, ast.With):
            lines = (part.lineno, part.end_lineno or part.lineno)
        elif lines is not None and isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.setdefault(part.id, set()).add(lines)
        pending.extend((child, lines) for child in ast.iter_child_nodes(part))
    return found


def _local_names(frame: types.FrameType) -> set[str] | None:
    """Names of the frame's own variables; ``None`` at module level, where they are globals."""
    code = frame.f_code
    if code.co_name == BLOCK_NAME:
        return set(_scope_of(frame).cells)
    if _is_function(frame):
        return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return None if frame.f_locals is frame.f_globals else {*frame.f_locals, *code.co_freevars}


def _function_code(body: list[ast.stmt], free: list[str], site: WithSite, flags: int) -> types.CodeType:
    """Compile ``body`` as a function in which the names ``free`` are variables of a function around it."""
    function = ast.FunctionDef(name=BLOCK_NAME, args=parameters(), body=body, decorator_list=[], type_params=[])
    return nested_code(ast.copy_location(function, site.node), free, site.class_name, site.filename, flags)


def names_of(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names that ``code`` binds, and those that it or a function in it looks up outside."""
    stored = {*code.co_varnames, *code.co_cellvars}
    loaded = set(code.co_freevars)  # ``__class__``, which the compiler provides in a class
    pending = [code]
    while pending:
        current = pending.pop()
        loaded.update(
            instruction.argval
            for instruction in dis.get_instructions(current)
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
        )
        pending.extend(constant for constant in current.co_consts if isinstance(constant, types.CodeType))
    return stored, loaded


#: Before Python 3.13 ``frame.f_locals`` is a snapshot, and this writes it back to the frame.
_LOCALS_TO_FAST: Any = None
if sys.version_info < (3, 13):
    _LOCALS_TO_FAST = ctypes.pythonapi.PyFrame_LocalsToFast
    _LOCALS_TO_FAST.argtypes, _LOCALS_TO_FAST.restype = [ctypes.py_object, ctypes.c_int], None


def write_back(frame: types.FrameType, values: dict[str, Any]) -> None:
    """Bind ``values`` as variables of ``frame``."""
    variables = frame.f_locals
    variables.update(values)
    if _HAS_SNAPSHOTS and _is_function(frame):
        if values:
            _LOCALS_TO_FAST(frame, 0)
        variables.clear()  # also without values: skipping the body made the interpreter take a snapshot
