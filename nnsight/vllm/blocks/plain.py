"""Which loops over steps do nothing but read and edit values of the model, the same at each step.

Only such a loop may go on as a program: its Python is then not run, so it may have no effect beyond the values of the model and the lists
that it appends to. :mod:`nnsight.fx.replay.determinate` proves that from the syntax tree, and says what the body reads from outside; no
code of the body is run. What is said here is what makes one step like another, and one request independent of the others.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ...fx.replay.determinate import guards_of
from ...fx.replay.guards import GuardPath, GuardPlan, is_constant
from ...fx.replay.names import Undetermined
from ...runtime.modules.located import Located
from ...tracing import Block
from ...tracing.body import SAVE_NAME
from ...tracing.loops import UNCLEAR, is_fresh, step_loop

#: Built-ins that look at variables by name.
_LOOKS_AROUND = frozenset({"breakpoint", "dir", "eval", "exec", "globals", "locals", "vars"})

#: What no other block can change: it can only be bound to another name.
_UNCHANGING = (Located, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class NotPlainError(Exception):
    """Says why a block has to run as Python."""


class Loop(NamedTuple):
    """A loop over steps that only reads and edits values.

    Attributes:
        body: Its statements.
        stored: The names that it assigns, its number included.
        used: What the body finds outside under a name.
        guards: What it reads from outside, with the kinds of comparison that each needs; without the lists that it appends to.
        lists: The names of these.
        inner: Names that functions use which it calls.
    """

    body: list[ast.stmt]
    stored: set[str]
    used: dict[str, Any]
    guards: tuple[tuple[GuardPath, str], ...]
    lists: set[str]
    inner: set[str]

    def plan(self, parameters: Collection[str] = ()) -> GuardPlan:
        """Return how to read the guards, without those that are ``parameters``."""
        return GuardPlan(tuple(guard for guard in self.guards if guard[0].steps or guard[0].start not in parameters))


def loop_of(block: Block, lookup: Callable[[str], Any]) -> Loop:
    """Return the loop of ``block`` over steps; ``lookup`` returns what a name stands for, or raises ``KeyError``.

    Raises:
        NotPlainError: If the loop may do something else than read and edit values, or not the same at each step.
    """
    found = [(statement, loop) for statement in block.body if (loop := step_loop([statement])) is not None]
    if len(found) != 1:
        raise NotPlainError("it has several loops over steps" if found else "it is no loop over `tracer.iter[...]`")
    statement, loop = found[0]
    nodes = [node for part in loop.body for node in ast.walk(part)]
    if not isinstance(statement, ast.For) or any(isinstance(node, UNCLEAR) for node in nodes):
        raise NotPlainError("the loop has statements that are not followed")
    if any(isinstance(node, ast.Name) and node.id == SAVE_NAME for node in nodes):
        raise NotPlainError("the loop saves a value in each step: append it to a list that was saved before")
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)} - stored
    steps = {node.id for node in ast.walk(loop.steps) if isinstance(node, ast.Name)} | loop.number
    if loaded & steps:
        raise NotPlainError(f"the loop uses `{min(loaded & steps)}`")
    if not is_fresh(loop.body, stored, set()):
        raise NotPlainError("a variable of the loop carries a value from one step to the next")
    rest = [node for part in block.body if part is not statement for node in ast.walk(part)]
    seen = {node.id for node in rest if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)} & (stored | loop.number)
    if seen or block.looked_up & _LOOKS_AROUND:
        raise NotPlainError(f"`{min(seen or block.looked_up & _LOOKS_AROUND)}` is used outside of the loop, too")
    return _proved(block.only(loop.body), loop.body, stored | loop.number, lookup)


def _proved(block: Block, body: list[ast.stmt], stored: set[str], lookup: Callable[[str], Any]) -> Loop:
    """Return the loop whose body is that of ``block``, after the proof."""

    try:
        found = guards_of(block, None, None, lookup)
    except Undetermined as reason:
        raise NotPlainError(str(reason)) from None
    guards = tuple(guard for guard in found if guard[1] != "filled")
    filled = [path for path, kind in found if kind == "filled"]
    names = {path.start: None for path, _ in found if isinstance(path.start, str)}
    used = {name: lookup(name) for name in names}
    inner: set[str] = set()
    for path, kind in guards:
        if kind == "function":
            code = _reached(path, used).__code__
            inner.update(code.co_names, code.co_freevars)
    if any(path.steps for path in filled) or "save" in inner:
        raise NotPlainError("a function that it calls saves values, or a list that it fills is not one of its variables")
    read = GuardPlan(guards).read(lookup)
    if read is None or any(tensor.is_inference() for tensor in read.tensors):
        raise NotPlainError("it uses a tensor of inference mode, whose edits cannot be noticed")
    return Loop(body, stored, used, guards, {str(path) for path in filled}, inner)


def _reached(path: GuardPath, used: dict[str, Any]) -> Any:
    value = used[path.start] if isinstance(path.start, str) else path.start()
    for step in path.steps:
        value = step.of(value)
    return value


def check_apart(loop: Loop, parameters: Collection[str], block: Block, others: Collection[Block]) -> None:
    """Raise :class:`NotPlainError` if blocks of ``others``, the other requests of a trace, may see the variables of a loop, or change them.

    They may have the same block: with variables of its own, but for those that none assigns. Edits of ``parameters`` in place are noticed.
    """
    different = {other for other in others if other is not block}
    for name in loop.stored:
        if any(_sees(other, name) for other in different):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")
    for name in loop.inner:
        if any(name in other.stored for other in different):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")
    for name, value in loop.used.items():
        mutable = not (isinstance(value, _UNCHANGING) or is_constant(value)) and name not in parameters
        shared = any(_sees(other, name) if mutable else name in other.stored for other in different)
        if shared or (name in loop.lists - block.stored and block in others):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")


def _sees(block: Block, name: str) -> bool:
    """Whether a block may use what another one has bound to ``name``."""
    return name in (*block.shared, *block.looked_up) and not (name in block.stored and is_fresh(block.body, {name}, set()))
