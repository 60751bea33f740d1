"""A ``with`` statement as text, from which its block can be made again in another process.

A code object belongs to one version of Python and says nothing to a reader; the text of the statement has neither
fault. It is taken down verbatim, with the file and the line it stood at. To make a block of it again, the text is put
into :mod:`linecache` at the same line of a file that exists only there. The ordinary machinery then finds everything in
its place: positions, tracebacks, and the blocks inside the block, which look up *their* ``with`` statement in that file.
The header is kept as part of the text and is not evaluated.
"""

from __future__ import annotations
import __future__ as futures

import ast
import dis
import hashlib
import io
import linecache
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .block import Block, compile_block
from .parsing import parse
from .source import WithSite, find_with


@dataclass(frozen=True)
class Excerpt:
    """One item of a ``with`` statement, as text.

    Attributes:
        text: The whole lines of the statement.
        filename: The file it was written in.
        line: Its first line there.
        item: Which context manager of the header the block belongs to.
        class_name: Name of the class around it, for private names.
        first_argument: Name of the first parameter of the function around it, which ``super()`` reads.
        features: What the file imports from ``__future__``.
    """

    text: str
    filename: str
    line: int
    item: int = 0
    class_name: str | None = None
    first_argument: str | None = None
    features: tuple[str, ...] = ()

    @classmethod
    def of(cls, frame: types.FrameType) -> Excerpt:
        """Take down the statement that ``frame`` is entering."""
        site = find_with(frame)
        first, last = site.node.lineno, site.node.end_lineno
        text = "".join(linecache.getlines(site.filename, frame.f_globals)[first - 1 : last])
        features = tuple(
            name for name in futures.all_feature_names if frame.f_code.co_flags & getattr(futures, name).compiler_flag
        )
        return cls(text, site.filename, first, site.item, site.class_name, site.first_argument, features)

    @property
    def place(self) -> str:
        """Where it was written, as ``file:line``."""
        return f"{self.filename}:{self.line}"

    @property
    def registered_name(self) -> str:
        """Name of the file in :mod:`linecache` that holds it."""
        identity = repr((self.text, self.line, self.class_name, self.first_argument)).encode(errors="backslashreplace")
        return f"<edit {hashlib.sha256(identity).hexdigest()[:12]} of {self.filename}>"

    def register(self) -> list[str]:
        """Put the text where tracebacks and blocks inside the block look for it; return the lines of that file."""
        known = linecache.cache.get(self.registered_name)
        if known is not None and len(known) > 1:
            return known[2]
        around: list[str] = []
        indent = self.text[: len(self.text) - len(self.text.lstrip())]
        if indent:  # something has to be there for it to be indented under
            around.append("if True:\n" if self.class_name is None else f"class {self.class_name}:\n")
        if len(indent) > 1 and self.first_argument is not None:
            around.append(f"{indent[0]}def _({self.first_argument}):\n")
        lines = ["\n"] * (self.line - 1 - len(around)) + around + io.StringIO(self.text).readlines()
        linecache.cache[self.registered_name] = (sum(map(len, lines)), None, lines, self.registered_name)
        return lines

    def statement(self) -> ast.With:
        """Return the statement, at its line.

        Raises:
            SyntaxError: If the text is not a ``with`` statement of this version of Python.
        """
        tree = parse("".join(self.register()), self.registered_name)
        node = next((node for node in ast.walk(tree) if isinstance(node, ast.With)), None)
        if node is None or node.lineno != self.line or not 0 <= self.item < len(node.items):
            raise SyntaxError(f"The text of {self.place} is not a `with` statement.")
        return node

    def block(self, variables: Iterable[str]) -> Block:
        """Compile the body anew, in a function that has these variables.

        Raises:
            SyntaxError: If the text is not a ``with`` statement of this version of Python.
        """
        site = WithSite(self.registered_name, self.statement(), self.item, self.class_name, self.first_argument)
        flags = 0
        for name in self.features:
            flags |= getattr(futures, name).compiler_flag
        return compile_block(site, set(variables), True, flags)

    def needed(self) -> set[str]:
        """Return the names whose value before the block can matter: those it may read before it binds them."""
        node = self.statement()
        target = node.items[self.item].optional_vars
        bound = set() if target is None else _stored(target)
        rest = node.items[self.item + 1 :]
        needed = _needed([ast.With(items=rest, body=node.body)] if rest else node.body, bound)[0]
        return {self._mangled(name) for name in needed}

    def _mangled(self, name: str) -> str:
        """Return what Python makes of a name in the class around the statement."""
        is_private = self.class_name is not None and name.startswith("__") and not name.endswith("__")
        return f"_{self.class_name.lstrip('_')}{name}" if is_private and self.class_name else name


def global_names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names of globals and built-ins that ``code``, or a function in it, reads, and those it assigns."""
    read: set[str] = set()
    assigned: set[str] = set()
    pending = [code]
    while pending:
        current = pending.pop()
        for instruction in dis.get_instructions(current):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                read.add(instruction.argval)
            elif instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                assigned.add(instruction.argval)
        pending.extend(constant for constant in current.co_consts if isinstance(constant, types.CodeType))
    return read, assigned


def _needed(statements: Sequence[ast.stmt], bound: set[str]) -> tuple[set[str], set[str]]:
    """Return the names that ``statements`` may read before binding them, and those bound for certain afterwards.

    Where it is not obvious, a name counts as needed: a loop or a block may not run, a function may run at any time.
    """
    needed: set[str] = set()
    bound = set(bound)
    for statement in statements:
        match statement:
            case ast.Assign() | ast.AnnAssign(value=ast.expr()) | ast.Import() | ast.ImportFrom():
                needed |= _loaded(statement) - bound
                bound |= _stored(statement)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                needed |= _loaded(statement) - bound
                bound.add(name)
            case ast.If(test=test, body=body, orelse=orelse):
                needed |= _loaded(test) - bound
                (first, after_first), (second, after_second) = _needed(body, bound), _needed(orelse, bound)
                needed |= first | second
                bound = after_first & after_second
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                needed |= (_loaded(iterated) | _loaded(target)) - bound
                needed |= _needed(body, bound | _stored(target))[0] | _needed(orelse, bound)[0]
            case ast.With(items=items, body=body):
                inside = set(bound)
                for item in items:
                    needed |= _loaded(item) - inside
                    inside |= _stored(item)
                needed |= _needed(body, inside)[0]
            case _:
                needed |= _loaded(statement) - bound
    return needed, bound


def _loaded(node: ast.AST) -> set[str]:
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Store):
            names.add(part.id)
        elif isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            names.add(part.target.id)
    return names


def _stored(node: ast.AST) -> set[str]:
    """Return the names that ``node`` binds by itself, not in a function inside it."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    targets: list[Any] = [node]
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.withitem):
        targets = [node.optional_vars] if node.optional_vars is not None else []
    return {
        part.id
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
