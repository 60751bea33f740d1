"""Abstract values of expressions: operators, tests, containers and comprehensions."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .names import VALUE, Concrete, Container, Items, Method, Names, OutsideObject, is_known_constant, join, truth_of

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

#: The analysis computes only with numbers whose absolute value is less.
_LARGE = 2**31

#: Types of constants that have a single object for each value.
_SINGLETONS = (bool, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda key, keys: key in keys, ast.NotIn: lambda key, keys: key not in keys,
}  # fmt: skip


class Expressions(Names):
    """Evaluates expressions, except for names, attributes and items (:class:`~.names.Names`) and calls."""

    # -- values ----------------------------------------------------------------------------------------------------

    def several(self, nodes: Sequence[ast.expr]) -> list[Any]:
        """Return the abstract values of elements or arguments. Fails for a starred value with unknown items."""
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                items = self.items(self.value(node.value), node)
                found += self.fail(node) if items is None else items.items
            else:
                found.append(self.value(node))
        return found

    def _Tuple(self, node: ast.Tuple) -> Any:  # noqa: N802
        return Items(tuple(self.several(node.elts)))

    def _elements(self, node: Any) -> Any:
        self.check_storable(self.several(node.elts), node)
        return VALUE

    _List = _Set = _elements

    def _Dict(self, node: ast.Dict) -> Any:  # noqa: N802
        self.check_storable([self.value(part) for part in (*node.keys, *node.values) if part is not None], node)
        return VALUE

    def _Slice(self, node: ast.Slice) -> Any:  # noqa: N802
        parts = [Concrete(None) if part is None else self.value(part) for part in (node.lower, node.upper, node.step)]
        for part in parts:
            self.check_operand(part, node)
        return Concrete(slice(*(part.value for part in parts))) if all(map(is_known_constant, parts)) else VALUE

    def _computed(self, node: ast.expr) -> Any:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.check_operand(self.value(child), node)
        return VALUE

    _FormattedValue = _JoinedStr = _computed

    def _BinOp(self, node: ast.BinOp) -> Any:  # noqa: N802
        return self.computed(node.op, self.value(node.left), self.value(node.right), node)

    def computed(self, operation: ast.operator, one: Any, other: Any, node: ast.AST) -> Any:
        """Return the abstract result of an operator with two operands. The result of two known numbers is a known number."""
        for each in (one, other):
            self.check_operand(each, node)
            if isinstance(each, Items):  # the result is a `VALUE`, so the items must be storable
                self.check_storable(each.items, node)
        compute = _ARITHMETIC.get(type(operation))
        numbers = [each.value for each in (one, other) if isinstance(each, Concrete) and type(each.value) in (bool, int, float)]
        if compute is None or len(numbers) < 2 or not all(-_LARGE < number < _LARGE for number in numbers):
            return VALUE
        try:
            return Concrete(compute(*numbers))
        except ZeroDivisionError:  # the block will raise it, too
            return VALUE

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:  # noqa: N802
        value = self.value(node.operand)
        self.check_operand(value, node)
        if isinstance(node.op, ast.USub) and isinstance(value, Concrete) and type(value.value) is int:
            return Concrete(-value.value)
        truth = truth_of(value) if isinstance(node.op, ast.Not) else None
        return VALUE if truth is None else Concrete(not truth)

    def _Compare(self, node: ast.Compare) -> Any:  # noqa: N802
        values = [self.value(part) for part in (node.left, *node.comparators)]
        operation = node.ops[0]
        by_identity = [isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops]
        if any(by_identity):
            for value in values:
                if isinstance(value, (OutsideObject, Method)):
                    self.findings.add((value.function if isinstance(value, Method) else value).path, "object")
            same = _are_same(values) if len(values) == 2 else None
            if same is None and not all(map(_is_identified, values)):
                return self.fail(node)
            if all(by_identity):
                return VALUE if same is None else Concrete(same is isinstance(operation, ast.Is))
        if isinstance(operation, (ast.In, ast.NotIn)):
            values[1] = _compared(values[1])
        for value in values:
            self.check_operand(value, node)
        if len(values) == 2 and type(operation) in _COMPARISONS and all(map(_is_constant, values)):
            try:
                return Concrete(_COMPARISONS[type(operation)](*map(_constant, values)))
            except TypeError:  # the block will raise it, too
                return VALUE
        return VALUE

    def _BoolOp(self, node: ast.BoolOp) -> Any:  # noqa: N802
        values = []
        for part in node.values:
            values.append(self.value(part))
            self.check_operand(values[-1], node)
            truth = truth_of(values[-1])
            if truth is isinstance(node.op, ast.Or):
                break
            if truth is not None and part is not node.values[-1]:
                values.pop()
        return functools.reduce(join, values) or self.fail(node)

    def _IfExp(self, node: ast.IfExp) -> Any:  # noqa: N802
        test = self.value(node.test)
        self.check_operand(test, node)
        truth = truth_of(test)
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        return join(self.value(node.body), self.value(node.orelse)) or self.fail(node)

    # -- comprehensions and the values that they iterate over ----------------------------------------------------------

    def comprehension(self, node: Any) -> Any:
        """Return the abstract value of a comprehension, or of a generator expression that is consumed at once."""
        before, assignable = dict(self.values), self.assignable
        self.assignable = assignable | {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        self._generate(node, node.generators)
        self.values, self.assignable = before, assignable
        return VALUE

    _ListComp = _SetComp = _DictComp = comprehension

    def _generate(self, node: Any, generators: Sequence[ast.comprehension]) -> None:
        if not generators:
            parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
            self.check_storable([self.value(part) for part in parts], node)
            return
        generator, *others = generators
        items = self.iterated(generator.iter)
        for item in (VALUE,) if items is None else items.items:
            self.store(generator.target, item)
            for test in generator.ifs:
                value = self.value(test)
                self.check_operand(value, node)
                if truth_of(value) is False:
                    break
            else:
                self._generate(node, others)

    def iterated(self, node: ast.expr) -> Items | None:
        """Return the items of a loop over an expression, see :meth:`items`, also through ``enumerate`` and ``zip``."""
        if isinstance(node, ast.List):
            return Items(tuple(self.several(node.elts)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            function = self.value(node.func)
            only_strict = all(word.arg == "strict" and isinstance(word.value, ast.Constant) for word in node.keywords)
            if isinstance(function, OutsideObject) and function.value in (enumerate, zip) and only_strict:
                columns = [items.items for argument in node.args if (items := self.iterated(argument)) is not None]
                if function.value is enumerate and len(node.args) == 1 and columns:
                    columns.insert(0, tuple(map(Concrete, range(len(columns[0])))))
                if len(columns) == len(node.args) + (function.value is enumerate):
                    self.findings.add(function.path, "object")
                    return Items(tuple(map(Items, zip(*columns, strict=False))))
        return self.items(self.value(node), node)

    # -- assignments, which a subclass implements --------------------------------------------------------------------

    def store(self, target: ast.expr, value: Any) -> None:
        """Assign an abstract value to a target."""
        raise NotImplementedError


def _compared(container: Any) -> Any:
    """Return a container as :class:`Items` of its keys or items, if guards compare them; else unchanged."""
    if isinstance(container, Items):
        return container._replace(is_tuple=True)
    if isinstance(container, Container) and (container.is_plain or type(container.value) is dict):
        return Items(tuple(map(Concrete, container.value)))
    return container


def _is_constant(value: Any) -> bool:
    return value.is_tuple and all(map(_is_constant, value.items)) if isinstance(value, Items) else is_known_constant(value)


def _constant(value: Any) -> Any:
    return tuple(map(_constant, value.items)) if isinstance(value, Items) else value.value


def _is_identified(value: Any) -> bool:
    """Whether guards compare the identity of a value: of containers they compare the items, and equal constants may be two objects."""
    return type(value.value) in _SINGLETONS if is_known_constant(value) else not isinstance(value, Container)


def _are_same(values: list[Any]) -> bool | None:
    """Whether two values are the same object in each replay: known if one of them is ``None``; else the result is ``None``."""
    if not any(isinstance(value, Concrete) and value.value is None for value in values):
        return None
    if not all(isinstance(value, (Concrete, Container, OutsideObject, Method, Items)) for value in values):
        return None
    return all(isinstance(value, Concrete) and value.value is None for value in values)
