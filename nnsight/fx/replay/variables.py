"""What the names of a block or a function stand for, and what was found out about them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from ...runtime.probing import Modules
from ...tracing.block import Block
from .guards import GuardStep, Root


class Findings:
    """What is found out about a block and the functions that it calls.

    Args:
        tracer: What ``as`` binds.
        modules: The modules of the traced model.

    Attributes:
        roots: What is read from outside, with the kinds of comparison that each needs.
        filled: The lists from outside that are appended to.
        active: The functions that are being followed, one inside the other, with the identity of the object whose methods they are.
        left: How many statements may still be followed.
        tried: How many `try` statements there are around what is being followed.
    """

    def __init__(self, tracer: Any, modules: Modules | None) -> None:
        self.tracer, self.modules = tracer, modules
        self.roots: dict[tuple[Root, str], None] = {}
        self.filled: dict[Root, None] = {}
        self.active: list[tuple[types.CodeType, int]] = []
        self.left = 5000
        self.tried = 0

    def add(self, root: Root, kind: str) -> None:
        """Add a root."""
        self.roots[root, kind] = None


class BlockVariables:
    """The variables of a block.

    Args:
        block: The block.
        variable: Returns what a name stands for before the block begins; raises ``KeyError`` for names without a value.
    """

    where = ""
    class_name: str | None = None

    def __init__(self, block: Block, variable: Callable[[str], Any]) -> None:
        self.assignable = frozenset(block.shared)
        self._variable = variable

    def outside(self, name: str) -> tuple[Root, Any]:
        """Return a variable from outside, and what it is; raises ``KeyError`` if it has no value."""
        return Root(name), self._variable(name)


class FunctionVariables:
    """The variables of a function that is followed.

    Args:
        function: The function.
        root: How it is reached.
        class_name: Name of the class around it.
    """

    def __init__(self, function: types.FunctionType, root: Root, class_name: str | None) -> None:
        code = function.__code__
        self.assignable = frozenset((*code.co_varnames, *code.co_cellvars))
        self.where = f" of `{function.__qualname__}`"
        self.class_name = class_name
        self._function, self._root = function, root

    def outside(self, name: str) -> tuple[Root, Any]:
        """Return a variable from outside, and what it is; raises ``KeyError`` if it has no value."""
        free = self._function.__code__.co_freevars
        if name in self.assignable:
            raise KeyError(name)
        step = GuardStep("cell", free.index(name)) if name in free else GuardStep("global", name)
        try:
            return self._root.to(*step), step.of(self._function)
        except LookupError:
            raise KeyError(name) from None
