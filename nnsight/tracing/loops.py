"""Blocks that consist of one loop over the steps of a generation: ``for _ in tracer.iter[:]: ...``.

If the body does the same at each step, it can run as a block of its own in each call of the model. This holds if the body uses neither
the number of the step nor the tracer, and if no variable carries a value from step to step. The analysis reads the syntax tree. If the
tree leaves a doubt, the loop counts as one whose steps differ.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Syntax that executes loads and stores in another order than the text, or that leaves the loop.
UNCLEAR = (
    ast.AsyncFunctionDef, ast.Await, ast.Break, ast.ClassDef, ast.Continue, ast.Delete, ast.FunctionDef, ast.Global, ast.Lambda, ast.Match,
    ast.NamedExpr, ast.Nonlocal, ast.Return, ast.Try, ast.TryStar, ast.While, ast.Yield, ast.YieldFrom,
)  # fmt: skip

#: Attributes that choose a step, or refer to the whole run.
_OF_RUNS = frozenset({"all", "barrier", "generator", "invoke", "iter", "next", "result", "stop"})

#: Attributes that a body may assign: the values of locations. Other attributes could carry state from step to step.
_VALUES = frozenset({"input", "inputs", "output"})


class StepLoop(NamedTuple):
    """A loop over the steps of a generation."""

    steps: ast.expr  # such as `tracer.iter[:]`
    number: set[str]  # names of the loop variables
    body: list[ast.stmt]


def step_loop(body: Sequence[ast.stmt]) -> StepLoop | None:
    """Return the loop over ``tracer.iter[...]`` or ``tracer.all()``, if ``body`` contains nothing else; else ``None``."""
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
    """Whether a loop is over all steps, and does the same at each step."""
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
    """Whether ``statements`` load the names ``stored`` only after this step has bound them, so that they read no value of an earlier step.

    ``bound`` contains the names that are bound already. The names that ``statements`` bind are added to it.
    """
    for statement in statements:
        parts: list[ast.AST] = [statement]
        inner: list[list[ast.stmt]] = []
        targets: list[ast.AST] = [statement]
        passed: set[str] = set()  # bound in the body only: the variables of a loop, which may run zero times
        if isinstance(statement, ast.If):
            parts, inner, targets = [statement.test], [statement.body, statement.orelse], []
        elif isinstance(statement, ast.For):
            parts, inner, targets, passed = [statement.iter], [statement.body, statement.orelse], [], _stores(statement.target)
        elif isinstance(statement, ast.With):
            parts = [item.context_expr for item in statement.items]
            inner, targets = [statement.body], [item.optional_vars for item in statement.items if item.optional_vars]
        if any((_loads(part) & stored) - bound for part in parts):
            return False
        bound |= set().union(*map(_stores, targets))
        for number, block in enumerate(inner):
            if not is_fresh(block, stored, bound if isinstance(statement, ast.With) else bound | (set() if number else passed)):
                return False
    return True


def _loads(part: ast.AST) -> set[str]:
    """Return the variables that ``part`` loads, without the variables of its comprehensions."""
    if isinstance(part, ast.Name):
        return {part.id} if isinstance(part.ctx, ast.Load) else set()
    found = set().union(*map(_loads, ast.iter_child_nodes(part)))
    if isinstance(part, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        own = set().union(*(_stores(generator.target) for generator in part.generators))
        return found - own | _loads(part.generators[0].iter)  # which is evaluated outside of the comprehension
    return found | (_stores(part.target) if isinstance(part, ast.AugAssign) else set())


def _stores(part: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
