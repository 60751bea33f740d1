"""A ``with`` statement as text, from which another process can compile the block again.

Tracebacks and inner blocks look up lines by file name. So the text is entered into :mod:`linecache` under a file name of its own, with
its original line numbers.
"""

from __future__ import annotations

import ast
import hashlib
import io
import linecache
import types
from collections.abc import Iterable
from dataclasses import dataclass

from .block import Block, compile_block
from .parsing import parse
from .source import WithSite, find_with


@dataclass(frozen=True)
class Excerpt:
    """One item of a ``with`` statement, as text."""

    text: str  # the complete lines of the statement; empty if they could not be read
    filename: str  # the file that contains the statement
    line: int  # the line of the file at which the statement begins
    item: int  # index of the context manager in the header to which the block belongs
    class_name: str | None  # name of the enclosing class, for private names
    flags: int  # compiler flags of the file, for its imports from `__future__`

    @classmethod
    def of(cls, frame: types.FrameType) -> Excerpt:
        """Return the statement that ``frame`` is entering."""
        site = find_with(frame)
        first, last = site.node.lineno, site.node.end_lineno
        text = "".join(linecache.getlines(site.filename, frame.f_globals)[first - 1 : last])
        return cls(text, site.filename, first, site.item, site.class_name, frame.f_code.co_flags)

    @property
    def place(self) -> str:
        """The position of the statement, as ``file:line``."""
        return f"{self.filename}:{self.line}"

    def block(self, variables: Iterable[str]) -> Block:
        """Compile the body. ``variables`` are the names of the variables of the enclosing code.

        Raises:
            SyntaxError: If the text is not a ``with`` statement of this version of Python.
        """
        header = "if True:\n" if self.class_name is None else f"class {self.class_name}:\n"
        around = [header] if self.text[:1].isspace() else []  # indented text needs an enclosing statement
        lines = ["\n"] * (self.line - 1 - len(around)) + around + io.StringIO(self.text).readlines()
        identity = repr((self.text, self.line, self.class_name)).encode(errors="backslashreplace")
        name = f"<edit {hashlib.sha256(identity).hexdigest()[:12]} of {self.filename}>"
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        statement = next((node for node in ast.walk(parse("".join(lines), name)) if isinstance(node, ast.With)), None)
        if statement is None or not 0 <= self.item < len(statement.items):
            raise SyntaxError("The text is not a `with` statement.")
        return compile_block(WithSite(name, statement, self.item, self.class_name), set(variables), False, self.flags)
