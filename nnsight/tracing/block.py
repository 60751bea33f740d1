"""A block as a function over a shared scope.

The body of a ``with`` statement runs later, any number of times, and uses variables of the enclosing function. So it is compiled as an
inner function whose variables are all free. Every variable is a cell in a :class:`Scope`.

* An outermost block gets new cells, filled from the user's frame.
* A nested block gets the cells of the enclosing block, so sibling invokes and iteration bodies share its variables.

The code has the user's file name and positions. So tracebacks, debuggers and nested blocks (which look up *their* ``with`` statement in the
same file) need no translation of line numbers.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import linecache
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .assertions import rewritten
from .body import GRADIENT_NAME, RESULT_NAME, SAVE_NAME, Rewriter, refuse_jumps
from .errors import BLOCK_NAME
from .frames import forget_snapshot, is_function, variables_of
from .loops import StepLoop, is_same_at_each_step, step_loop
from .parsing import nested_code, parameters
from .saving import save_method, saves
from .source import WithSite, body_lines, find_with

SCOPE_NAME = "__nnsight_scope__"
TRACER_NAME = "__nnsight_tracer__"
#: Built-ins that can read variables that the block does not mention.
_INSPECTING = {"breakpoint", "dir", "eval", "exec", "locals", "vars"}
_OWN_NAMES = (SCOPE_NAME, TRACER_NAME, SAVE_NAME, RESULT_NAME, GRADIENT_NAME)

#: The function that replaces ``x`` in ``x.grad``. The runtime sets it, because this layer does not import torch.
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
        """Return a scope for ``block``, one of several blocks in ``trace`` that take turns.

        Variables that ``block`` assigns get new cells; :meth:`Branch.publish` copies their values to the other blocks. Variables that other
        blocks assign share a cell with them, unless a loop around ``block`` sets them. All other variables keep their present values.
        """
        cells: dict[str, types.CellType] = {}
        others = {
            name
            for name, spans in trace.inner.items()
            if any(not first <= block.line <= last for first, last in spans) and not trace.is_set_by_loop(name, block.line)
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
        """Iterate over name and value of every bound variable."""
        return ((name, cell.cell_contents) for name, cell in self.cells.items() if is_bound(cell))

    def copy(self) -> Scope:
        """Return a scope with the same values in new cells."""
        copied = Scope({name: types.CellType() for name in self.cells})
        for name, value in self.items():
            copied.cells[name].cell_contents = value
        return copied

    def take_saved(self, other: Scope) -> None:
        """Copy the saved variables of ``other`` to this scope."""
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
    """The scope of a block that takes turns with other blocks."""

    around: Scope = field(default_factory=Scope)  # the scope that all of these blocks share
    names: frozenset[str] = frozenset()  # the variables that this block assigns

    def publish(self) -> None:
        """Copy the variables that this block assigned to the shared scope."""
        for name, value in self.items():
            if name in self.names:
                self.around.cells[name].cell_contents = value

    def pull(self) -> None:
        """Copy the shared values of variables that this block assigns, but has not bound so far."""
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
    stored: frozenset[str]  # names of the variables that it assigns
    inner: dict[str, set[tuple[int, int]]]  # variables that nested `with` statements assign, with the lines of these statements
    in_loops: dict[str, set[tuple[int, int, bool]]]  # variables that loops set, outside of nested `with` statements, see `_set_by_loops`
    target: str | tuple[str, ...] | None  # the name, or tuple of names, that `as` binds; `None` without one, or for another target
    body: tuple[ast.stmt, ...] = ()  # the rewritten syntax tree

    @property
    def source(self) -> list[str]:
        """The lines of the body; empty if the text can no longer be read."""
        lines = linecache.getlines(self.filename)
        return body_lines(lines, self.line)[1] if lines else []

    @functools.cached_property
    def looked_up(self) -> frozenset[str]:
        """The names that the body, or a function in it, looks up outside of itself, including the shared variables."""
        return frozenset(names_of(self.code)[1])

    @functools.cached_property
    def globals_read(self) -> tuple[str, ...]:
        """The names of globals that the body may read."""
        return tuple(self.looked_up.difference(self.shared))

    @functools.cached_property
    def step_loop(self) -> StepLoop | None:
        """The loop over steps of a generation, if the body contains nothing else."""
        binds = self.body and isinstance(self.body[0], ast.Assign) and ast.unparse(self.body[0].value) == TRACER_NAME
        return step_loop(self.body[1:] if binds else self.body)

    @functools.cached_property
    def is_same_at_each_step(self) -> bool:
        """Whether the body is a loop over all steps that does the same at each step; see :mod:`~nnsight.tracing.loops`."""
        return self.step_loop is not None and is_same_at_each_step(self.step_loop)

    def is_set_by_loop(self, name: str, line: int) -> bool:
        """Whether a loop around ``line`` sets a variable for the code there, and not for a ``with`` statement in the loop to change."""
        inside = self.inner.get(name, ())
        return any(
            first < line <= last and (is_target or not any(first <= start <= last for start, _ in inside))
            for first, last, is_target in self.in_loops.get(name, ())
        )

    @property
    def last_line(self) -> int:
        """The last line of the body."""
        return max((statement.end_lineno or 0 for statement in self.body), default=self.line)

    def only(self, body: Sequence[ast.stmt]) -> Block:
        """Return a block with only the statements ``body``, which are part of this block."""
        place = ast.copy_location(ast.Pass(), body[0])
        declared = [name for name in self.shared if name != "__class__"]
        whole: list[ast.stmt] = [*([ast.copy_location(ast.Nonlocal(declared), place)] if declared else []), *body]
        function = ast.FunctionDef(name=BLOCK_NAME, args=parameters(), body=whole, decorator_list=[], type_params=[])
        free = sorted({*self.shared, *_OWN_NAMES})
        code = nested_code(ast.copy_location(function, place), free, None, self.filename, self.code.co_flags)
        return replace(self, code=code, body=tuple(body))

    def bindings(self, value: Any) -> dict[str, Any]:
        """Return the variables that ``as`` binds if ``__enter__`` returns ``value``."""
        if isinstance(self.target, str):
            return {self.target: value}
        if self.target is None or not isinstance(value, tuple):
            return {}
        return dict(zip(self.target, value, strict=True))

    def open_scope(self, frame: types.FrameType) -> Scope:
        """Return the scope of the enclosing block, or a new scope with the variables of the user's frame."""
        if frame.f_code.co_name == BLOCK_NAME:
            scope = _scope_of(frame)
            for name in self.shared:
                if name not in scope.cells:
                    scope.cells[name] = types.CellType()
            return scope
        cell, variables = types.CellType, variables_of(frame)
        cells = {name: cell(variables[name]) if name in variables else cell() for name in self.shared}
        scope = Scope(cells)
        if is_function(frame):
            forget_snapshot(frame, variables)
            return scope
        around: types.FrameType | None = frame
        while around is not None and not is_function(around):
            # The variables of a class body lack those of the enclosing function, which is its caller.
            wanted = set(around.f_code.co_freevars).intersection(cells) - dict(scope.items()).keys()
            around = around.f_back
            if not wanted or around is None:
                break
            variables = variables_of(around)
            for name in wanted.intersection(variables):
                cells[name].cell_contents = variables[name]
            forget_snapshot(around, variables)
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
    """Call ``value`` and return the result; return ``value`` itself if it is not callable."""
    return value() if callable(value) else value


def _scope_of(frame: types.FrameType) -> Scope:
    """Return the scope of a block's frame."""
    variables = variables_of(frame)
    scope = variables[SCOPE_NAME]
    forget_snapshot(frame, variables)
    return scope


_blocks: dict[tuple[int, int], tuple[weakref.ref[types.CodeType], Block]] = {}


def block_at(frame: types.FrameType) -> Block:
    """Return the compiled block that ``frame`` is entering. Each block is compiled once and cached by its position in the code."""
    key = (id(frame.f_code), frame.f_lasti)
    known = _blocks.get(key)
    if known is not None:
        return known[1]
    block = compile_block(find_with(frame), _local_names(frame), is_function(frame), frame.f_code.co_flags)
    forget = _blocks.pop  # bound now: at interpreter exit, module globals are gone before the last code objects
    reference = weakref.ref(frame.f_code, lambda _: forget(key, None))
    _blocks[key] = (reference, block)
    return block


def compile_block(site: WithSite, local: set[str] | None, in_function: bool, flags: int = 0) -> Block:
    """Compile the body of a ``with`` statement.

    Args:
        site: The statement.
        local: Names of the variables of the enclosing code; ``None`` at module level, where variables are globals.
        in_function: Whether the enclosing code is a function. There, an assigned name that is not local was declared global.
        flags: Compiler flags of the enclosing code.

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
        # A trace among the remaining items finds this statement by the position of the first of them.
        body = [ast.copy_location(inner, inner.items[0].context_expr)]
    target = node.items[site.item].optional_vars
    if target is not None:
        assignment = ast.Assign(targets=[target], value=ast.Name(TRACER_NAME, ast.Load()))
        body.insert(0, ast.copy_location(assignment, target))

    outer = {name for part in ast.walk(node) if isinstance(part, ast.Nonlocal) for name in part.names}
    stored, loaded = names_of(_function_code(body, sorted(outer), site, flags))
    stored |= outer  # nested functions assign these
    if local is None:  # the variables of a module are globals: only assigned ones need a cell
        shared, declared_global = stored, set()
    else:
        declared_global = stored - local if in_function else set()
        used = local if loaded & _INSPECTING else loaded & local
        shared = {name for name in stored | used if name.isidentifier()} - declared_global
    shared -= set(_OWN_NAMES)
    declarations: list[ast.stmt] = [ast.Expr(ast.Name(SCOPE_NAME, ast.Load()))]
    if declared_global:
        declarations.append(ast.Global(sorted(declared_global)))
    if shared - {"__class__"}:  # reads need no declaration, but inspecting built-ins see only declared names
        declarations.append(ast.Nonlocal(sorted(shared - {"__class__"})))
    for declaration in declarations:
        ast.copy_location(declaration, node)
    code = _function_code(declarations + body, sorted(shared.union(_OWN_NAMES)), site, flags)
    name: str | tuple[str, ...] | None = target.id if isinstance(target, ast.Name) else None
    if isinstance(target, ast.Tuple) and all(isinstance(item, ast.Name) for item in target.elts):
        name = tuple(item.id for item in target.elts if isinstance(item, ast.Name))
    names = tuple(sorted(shared)), frozenset(stored & shared), _assigned_inside(node.body), _set_by_loops(node.body)
    return Block(code, filename, node.lineno, *names, name, tuple(body))


def _assigned_inside(body: list[ast.stmt]) -> dict[str, set[tuple[int, int]]]:
    """Return the names that ``with`` statements in ``body`` assign, each with first and last line of the innermost such statements."""
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


def _set_by_loops(body: list[ast.stmt]) -> dict[str, set[tuple[int, int, bool]]]:
    """Return the names that loops in ``body`` set in their own code, with first and last line of the loop.

    The third item says whether the name is the target of the loop.
    """
    found: dict[str, set[tuple[int, int, bool]]] = {}
    pending: list[tuple[ast.AST, tuple[tuple[int, int], ...]]] = [(statement, ()) for statement in body]
    while pending:
        part, loops = pending.pop()
        if isinstance(part, (ast.For, ast.While)):
            span = part.lineno, part.end_lineno or part.lineno
            for target in ast.walk(part.target) if isinstance(part, ast.For) else ():
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, set()).add((*span, True))
            loops = (*loops, span)
        elif isinstance(part, ast.With):
            loops = ()
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            for span in loops:
                found.setdefault(part.id, set()).add((*span, False))
        pending.extend((child, loops) for child in ast.iter_child_nodes(part))
    return found


def _local_names(frame: types.FrameType) -> set[str] | None:
    """Return the names of the frame's variables; ``None`` at module level, where they are globals."""
    code = frame.f_code
    if code.co_name == BLOCK_NAME:
        return set(_scope_of(frame).cells)
    if is_function(frame):
        return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    variables = variables_of(frame)
    return None if variables is frame.f_globals else {*variables, *code.co_freevars}


def _function_code(body: list[ast.stmt], free: list[str], site: WithSite, flags: int) -> types.CodeType:
    """Compile ``body`` as a function in which the names ``free`` are variables of an enclosing function."""
    function = ast.FunctionDef(name=BLOCK_NAME, args=parameters(), body=body, decorator_list=[], type_params=[])
    return nested_code(ast.copy_location(function, site.node), free, site.class_name, site.filename, flags)


def names_of(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names that ``code`` binds, and the names that ``code`` or a function in it looks up outside of ``code``."""
    stored = {*code.co_varnames, *code.co_cellvars}
    loaded = set(code.co_freevars)  # includes `__class__`, which the compiler provides in a class
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
