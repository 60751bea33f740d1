"""A ``with`` statement as text, from which its block can be compiled again in another process.

To compile it, the text is put into :mod:`linecache` at the same line of a file that exists only there, in which tracebacks and inner
blocks find their lines.
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

    text: str  # the whole lines of the statement; empty if they could not be read
    filename: str  # the file it was written in
    line: int  # its first line there
    item: int  # which context manager of the header the block belongs to
    class_name: str | None  # name of the class around it, for private names
    flags: int  # compiler flags of the file, for what it imports from `__future__`

    @classmethod
    def of(cls, frame: types.FrameType) -> Excerpt:
        """Return the statement that ``frame`` is entering."""
        site = find_with(frame)
        first, last = site.node.lineno, site.node.end_lineno
        text = "".join(linecache.getlines(site.filename, frame.f_globals)[first - 1 : last])
        return cls(text, site.filename, first, site.item, site.class_name, frame.f_code.co_flags)

    @property
    def place(self) -> str:
        """Where it was written, as ``file:line``."""
        return f"{self.filename}:{self.line}"

    def block(self, variables: Iterable[str]) -> Block:
        """Compile the body, given the names of the variables of the code around it; it may be no Python of this version."""
        header = "if True:\n" if self.class_name is None else f"class {self.class_name}:\n"
        around = [header] if self.text[:1].isspace() else []  # something that it is indented under
        lines = ["\n"] * (self.line - 1 - len(around)) + around + io.StringIO(self.text).readlines()
        identity = repr((self.text, self.line, self.class_name)).encode(errors="backslashreplace")
        name = f"<edit {hashlib.sha256(identity).hexdigest()[:12]} of {self.filename}>"
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        statement = next((node for node in ast.walk(parse("".join(lines), name)) if isinstance(node, ast.With)), None)
        if statement is None or not 0 <= self.item < len(statement.items):
            raise SyntaxError("The text is not a `with` statement.")
        return compile_block(WithSite(name, statement, self.item, self.class_name), set(variables), False, self.flags)
