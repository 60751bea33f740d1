"""Rewriting of a ``with`` body for its compilation as a function. Statements that would leave the enclosing function are refused."""

from __future__ import annotations

import ast
import linecache
from typing import Any

SAVE_NAME = "__nnsight_save__"
RESULT_NAME = "__nnsight_result__"
GRADIENT_NAME = "__nnsight_gradient__"

#: Statements and expressions that leave a function, with their keywords for error messages.
_JUMPS: dict[type[ast.AST], str] = {
    ast.Return: "return",
    **dict.fromkeys((ast.Yield, ast.YieldFrom), "yield"),
    **dict.fromkeys((ast.Await, ast.AsyncFor, ast.AsyncWith), "await"),
}


class Rewriter(ast.NodeTransformer):
    """Rewrites a body so that it can be the body of a closure.

    * ``x.save()`` becomes a call that works for every object, see :mod:`nnsight.tracing.saving`.
    * ``tracer.result()`` also works where ``tracer.result`` is not a function, and ``x.grad`` looks ``x`` up in a backward pass.
    * ``super()`` gets its arguments, and ``return`` becomes an error.
    * Annotations and ``nonlocal`` statements are dropped, because all variables of a block are nonlocal.
    """

    def __init__(self, first_argument: str | None, filename: str) -> None:
        self._nested = 0
        self._first_argument = first_argument
        self._filename = filename

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not (node.args or node.keywords):
            if self._first_argument is not None and not self._nested:
                names = ("__class__", self._first_argument)
                node.args = [ast.copy_location(ast.Name(name, ast.Load()), node) for name in names]
            return node
        if not isinstance(node.func, ast.Attribute) or node.args or node.keywords:
            return node
        if node.func.attr == "save":
            name, argument = SAVE_NAME, node.func.value
        elif node.func.attr == "result":
            name, argument = RESULT_NAME, node.func
        else:
            return node
        function = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        return ast.copy_location(ast.Call(function, [argument], []), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "grad":
            function = ast.copy_location(ast.Name(GRADIENT_NAME, ast.Load()), node.value)
            node.value = ast.copy_location(ast.Call(function, [node.value], []), node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if self._nested:
            return node
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self._nested:
            return node
        text, place = _refusal("return", node, self._filename)
        arguments: list[ast.expr] = [ast.Constant(text), ast.Tuple([ast.Constant(item) for item in place], ast.Load())]
        error = ast.Call(ast.Name("SyntaxError", ast.Load()), arguments, [])
        raising = ast.copy_location(ast.Raise(error), node)
        for part in ast.walk(error):
            ast.copy_location(part, node)
        return raising

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return node if self._nested else ast.copy_location(ast.Pass(), node)

    def _visit_scope(self, node: ast.AST) -> ast.AST:
        self._nested += 1
        self.generic_visit(node)
        self._nested -= 1
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope  # noqa: N815 - names ast looks up


def refuse_jumps(node: ast.With, filename: str) -> None:
    """Check that no statement jumps out of the block, because a deferred body cannot do so.

    A ``return`` in a condition or a loop may never be reached, so :class:`Rewriter` makes it an error at run time. A ``try`` or ``with``
    statement around the ``return`` could hide that error, so such a ``return`` is refused here.

    Raises:
        SyntaxError: For the first such statement.
    """

    def visit(current: ast.AST, in_loop: bool, returns: bool | None) -> None:
        """Check the children of a node. ``returns``: True in a condition or loop, False in a ``try`` or ``with``, None in neither."""
        for child in ast.iter_child_nodes(current):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                continue
            jump = _JUMPS.get(type(child))
            if isinstance(child, ast.Return) and returns:
                jump = None
            elif isinstance(child, ast.comprehension) and child.is_async:
                jump = "await"
            elif isinstance(child, (ast.Break, ast.Continue)) and not in_loop:
                jump = "break or continue of a loop around the block"
            if jump is not None:
                raise SyntaxError(*_refusal(jump, child.target if isinstance(child, ast.comprehension) else child, filename))
            passed = returns
            if isinstance(child, (ast.Try, ast.TryStar, ast.With)):
                passed = False
            elif isinstance(child, (ast.If, ast.For, ast.While, ast.Match)) and returns is None:
                passed = True
            if isinstance(child, (ast.For, ast.AsyncFor, ast.While)):
                visit(ast.Module(body=child.body, type_ignores=[]), True, passed)
                visit(ast.Module(body=child.orelse, type_ignores=[]), in_loop, passed)
            else:
                visit(child, in_loop, passed)

    visit(ast.Module(body=node.body, type_ignores=[]), False, None)


def _refusal(jump: str, place: Any, filename: str) -> tuple[str, tuple[Any, ...]]:
    """Return the arguments of the ``SyntaxError`` for a jump out of a block."""
    line = place.lineno
    text = (
        f"`{jump}` at {filename}:{line} would leave a block that runs later, together with the model. "
        "Save what you need and use it after the block."
    )
    columns = place.col_offset + 1, place.end_col_offset + 1
    return text, (filename, line, columns[0], linecache.getline(filename, line), place.end_lineno, columns[1])
