"""Plain loops: loops over steps that only read and edit values of the model, in the same way in each step.

Only a plain loop may become a program. The program replaces its Python, so the loop must have no effects except on the values of the model
and on lists that it appends to. :mod:`nnsight.fx.replay.determinate` proves this from the syntax tree, and finds what the body reads from
outside. No code of the body is run. This module adds the conditions that all steps are alike, and that requests are independent.
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

#: Built-ins that can read variables by name.
_LOOKS_AROUND = frozenset({"breakpoint", "dir", "eval", "exec", "globals", "locals", "vars"})

#: Types whose objects other blocks cannot change. Another block can only bind their name to another object.
_UNCHANGING = (Located, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class NotPlainError(Exception):
    """Raised with the reason why a block has to run as Python."""


class Loop(NamedTuple):
    """A plain loop.

    Attributes:
        body: Its statements.
        stored: The names that it assigns, including the number of the step.
        used: The values of the names that the body reads from outside.
        guards: The paths that it reads from outside, with the kind of comparison that each needs. Excludes the lists that it appends to.
        lists: The names of the lists that it appends to.
        inner: Names in the code of the functions that it calls.
    """

    body: list[ast.stmt]
    stored: set[str]
    used: dict[str, Any]
    guards: tuple[tuple[GuardPath, str], ...]
    lists: set[str]
    inner: set[str]

    def plan(self, parameters: Collection[str] = ()) -> GuardPlan:
        """Return a plan that reads the guards, except those of ``parameters``."""
        return GuardPlan(tuple(guard for guard in self.guards if guard[0].steps or guard[0].start not in parameters))


def loop_of(block: Block, lookup: Callable[[str], Any]) -> Loop:
    """Return the plain loop of ``block``. ``lookup`` returns the value of a name, or raises ``KeyError``.

    Raises:
        NotPlainError: If ``block`` has no single loop over steps, or if this loop may have other effects, or if its steps may differ.
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
    """Prove that the body of a loop is plain, and return the loop. ``block`` has the statements ``body`` only."""
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
            code = _value_at(path, used).__code__
            inner.update(code.co_names, code.co_freevars)
    if any(path.steps for path in filled) or "save" in inner:
        raise NotPlainError("a function that it calls saves values, or it fills a list that is not a variable of the block")
    read = GuardPlan(guards).read(lookup)
    if read is None or any(tensor.is_inference() for tensor in read.tensors):
        raise NotPlainError("it uses an inference-mode tensor, whose edits cannot be detected")
    return Loop(body, stored, used, guards, {str(path) for path in filled}, inner)


def _value_at(path: GuardPath, used: dict[str, Any]) -> Any:
    value = used[path.start] if isinstance(path.start, str) else path.start()
    for step in path.steps:
        value = step.of(value)
    return value


def check_apart(loop: Loop, parameters: Collection[str], block: Block, others: Collection[Block]) -> None:
    """Raise :class:`NotPlainError` if other requests of the trace, with the blocks ``others``, may read or change variables of the loop.

    Other requests may have the same block: they have their own variables, and share only variables that no block assigns. In-place edits
    of ``parameters`` are harmless, because they are detected.
    """
    different = {other for other in others if other is not block}
    for name in loop.stored:
        if any(_can_see(other, name) for other in different):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")
    for name in loop.inner:
        if any(name in other.stored for other in different):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")
    for name, value in loop.used.items():
        mutable = not (isinstance(value, _UNCHANGING) or is_constant(value)) and name not in parameters
        shared = any(_can_see(other, name) if mutable else name in other.stored for other in different)
        if shared or (name in loop.lists - block.stored and block in others):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")


def _can_see(block: Block, name: str) -> bool:
    """Whether ``block`` may read the value that another block has bound to ``name``."""
    return name in (*block.shared, *block.looked_up) and not (name in block.stored and is_fresh(block.body, {name}, set()))
