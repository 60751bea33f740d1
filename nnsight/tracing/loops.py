"""Blocks that do the same at each step of a generation: ``for _ in tracer.iter[:]: ...`` and nothing else.

The body of such a loop can run as a block of its own in each call of the model. That is so if nothing in the body tells one step from
another: it does not use the number of the step or the tracer, and no variable carries a value from step to step. The syntax tree
says so; where it does not, the loop is taken as one that tells them apart.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Parts in which the order of loads and stores is not that of the text, or which leave the loop.
UNCLEAR = (
    ast.AsyncFunctionDef, ast.Await, ast.Break, ast.ClassDef, ast.Continue, ast.Delete, ast.FunctionDef, ast.Global, ast.Lambda, ast.Match,
    ast.NamedExpr, ast.Nonlocal, ast.Return, ast.Try, ast.TryStar, ast.While, ast.Yield, ast.YieldFrom,
)  # fmt: skip

#: Attributes that choose a step, or have a meaning for the whole run.
_OF_RUNS = frozenset({"all", "barrier", "generator", "invoke", "iter", "next", "result", "stop"})


#: Attributes that a body may assign: the values of a location. State that it keeps in others may tell steps apart.
_VALUES = frozenset({"input", "inputs", "output"})


class StepLoop(NamedTuple):
    """A loop over steps: the expression of the steps, the names that its number is bound to, and its body."""

    steps: ast.expr
    number: set[str]
    body: list[ast.stmt]


def step_loop(body: Sequence[ast.stmt]) -> StepLoop | None:
    """Return the loop over ``tracer.iter[...]`` or ``tracer.all()`` that is all of a block with this body, if it is one."""
    loop = body[0] if len(body) == 1 else None
    if isinstance(loop, ast.For) and not loop.orelse:
        steps, target = loop.iter, [loop.target]
    elif isinstance(loop, ast.With) and len(loop.items) == 1:
        steps, target = loop.items[0].context_expr, [item.optional_vars for item in loop.items if item.optional_vars]
    else:
        return None
    chooser = steps.value if isinstance(steps, ast.Subscript) else steps.func if isinstance(steps, ast.Call) else None
    if not isinstance(chooser, ast.Attribute) or chooser.attr != ("iter" if isinstance(steps, ast.Subscript) else "all"):
        return None
    return StepLoop(steps, set().union(*map(_stores, target)), loop.body)


def is_same_at_each_step(loop: StepLoop) -> bool:
    """Whether a loop is over all steps, and does the same at each."""
    found = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, UNCLEAR) or (isinstance(node, ast.Attribute) and node.attr in _OF_RUNS) for node in found):
        return False
    if any(isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in _VALUES for node in found):
        return False
    names = {node.id for node in found if isinstance(node, ast.Name)}
    tracer = {node.id for node in ast.walk(loop.steps) if isinstance(node, ast.Name)}
    stored = set().union(*map(_stores, loop.body))
    are_all = isinstance(loop.steps, ast.Call) or ast.unparse(loop.steps).endswith((".iter[:]", ".iter[0:]"))
    return are_all and names.isdisjoint(tracer | loop.number | {"next"}) and is_fresh(loop.body, stored, set())


def is_fresh(statements: Iterable[ast.stmt], stored: set[str], bound: set[str]) -> bool:
    """Whether each of the names ``stored`` in a loop is loaded only where this step has ``bound`` it; adds those that are bound behind."""
    for statement in statements:
        parts: list[ast.AST] = [statement]
        inner: list[list[ast.stmt]] = []
        targets: list[ast.AST] = [statement]
        if isinstance(statement, ast.If):
            parts, inner, targets = [statement.test], [statement.body, statement.orelse], []
        elif isinstance(statement, ast.For):
            parts, inner, targets = [statement.iter], [statement.body, statement.orelse], [statement.target]
        elif isinstance(statement, ast.With):
            parts = [item.context_expr for item in statement.items]
            inner, targets = [statement.body], [item.optional_vars for item in statement.items if item.optional_vars]
        if any((_loads(part) & stored) - bound for part in parts):
            return False
        bound |= set().union(*map(_stores, targets))
        if not all(is_fresh(block, stored, bound if isinstance(statement, ast.With) else bound.copy()) for block in inner):
            return False
    return True


def _loads(part: ast.AST) -> set[str]:
    """Return the names of variables around ``part`` that it loads."""
    nodes = list(ast.walk(part))
    own = {name for node in nodes if isinstance(node, ast.comprehension) for name in _stores(node.target)}
    changed = {node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - own | changed


def _stores(part: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
