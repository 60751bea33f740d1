"""What kind of thing an expression is.

:class:`Expressions` follows the expressions of a piece of code: of a block, or of a function that it calls. What it finds out on the
way, the roots above all, is common to all of them, see :class:`Findings`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ...envoy.envoy import Envoy
from ...runtime.modules.located import Located
from .abstract_values import (
    OWN,
    SOME,
    VALUE,
    Bound,
    Each,
    Envoys,
    Items,
    Keywords,
    Known,
    Members,
    RootOf,
    Row,
    Undetermined,
    either,
    is_plain_constant,
    truth_of,
)
from .guards import LONGEST, holds_modules, is_constant
from .names import Names

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

#: Numbers beyond this are not computed with in a proof.
_LARGE = 2**31

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip

class Expressions(Names):
    """Follows the kinds of expressions, see :class:`~.names.Names`."""

    # -- values ----------------------------------------------------------------------------------------------------

    def _Slice(self, node: ast.Slice) -> Any:  # noqa: N802
        for part in (node.lower, node.upper, node.step):
            self.check_operand(self.kind(part), node)
        return VALUE

    def _elements(self, node: Any) -> Any:
        for element in node.elts:
            self.check_storable([self.kind(element)], element)
        return OWN

    _List = _Tuple = _Set = _elements

    def _Dict(self, node: ast.Dict) -> Any:  # noqa: N802
        for part in (*node.keys, *node.values):
            if part is not None:
                self.check_storable([self.kind(part)], part)
        return OWN

    def _Starred(self, node: ast.Starred) -> Any:  # noqa: N802
        return self.items(self.kind(node.value), node)

    def _computed(self, node: ast.expr) -> Any:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.check_operand(self.kind(child), node)
        return VALUE

    _FormattedValue = _computed

    def _JoinedStr(self, node: ast.JoinedStr) -> Any:  # noqa: N802
        words: list[str] = []
        for part in node.values:
            written = isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None
            kind = self.kind(part.value if isinstance(part, ast.FormattedValue) and written else part)
            self.check_operand(kind, node)
            if isinstance(kind, Known) and type(kind.value) in (str, int):
                words.append(str(kind.value))
        return Known("".join(words)) if len(words) == len(node.values) else VALUE

    def _BinOp(self, node: ast.BinOp) -> Any:  # noqa: N802
        return self.computed(node.op, self.kind(node.left), self.kind(node.right), node)

    def computed(self, operation: ast.operator, kind: Any, other: Any, node: ast.AST) -> Any:
        """Return the kind of what an operator makes of two values; of two numbers it is a number that is known."""
        for each in (kind, other):
            self.check_operand(each, node)
        compute = _ARITHMETIC.get(type(operation))
        numbers = [each.value for each in (kind, other) if isinstance(each, Known) and type(each.value) in (bool, int, float)]
        if compute is None or len(numbers) < 2 or not all(-_LARGE < number < _LARGE for number in numbers):
            return VALUE
        try:
            return Known(compute(*numbers))
        except ZeroDivisionError:  # the block will raise it
            return VALUE

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:  # noqa: N802
        kind = self.kind(node.operand)
        self.check_operand(kind, node)
        if isinstance(node.op, ast.USub) and isinstance(kind, Known) and type(kind.value) is int:
            return Known(-kind.value)
        truth = truth_of(kind) if isinstance(node.op, ast.Not) else None
        return VALUE if truth is None else Known(not truth)

    def _Compare(self, node: ast.Compare) -> Any:  # noqa: N802
        kinds = [self.kind(part) for part in (node.left, *node.comparators)]
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            for kind in kinds:
                if isinstance(kind, RootOf):
                    self.findings.add(kind.root, "object")
            same = _are_same(kinds) if len(kinds) == 2 else None
            return VALUE if same is None else Known(same is isinstance(node.ops[0], ast.Is))
        compare = _COMPARISONS.get(type(node.ops[0])) if len(kinds) == 2 else None
        try:
            if len(kinds) == 2 and isinstance(node.ops[0], (ast.In, ast.NotIn)) and _is_key_of_dict(*kinds):
                return Known((kinds[0].value in kinds[1].value) is isinstance(node.ops[0], ast.In))
            for kind in kinds:
                self.check_operand(kind, node)
            if compare is not None and all(map(is_plain_constant, kinds)):
                return Known(compare(kinds[0].value, kinds[1].value))
        except TypeError:  # the block will raise it
            return VALUE
        return VALUE

    def _BoolOp(self, node: ast.BoolOp) -> Any:  # noqa: N802
        kinds = []
        for value in node.values:
            kind = self.kind(value)
            self.check_operand(kind, node)
            truth = truth_of(kind)
            if truth is None or truth is isinstance(node.op, ast.Or) or value is node.values[-1]:
                kinds.append(kind)
            if truth is isinstance(node.op, ast.Or):
                break
        found = kinds[0]
        for kind in kinds[1:]:
            found = either(found, kind)
        return found or self.fail(node)

    def _IfExp(self, node: ast.IfExp) -> Any:  # noqa: N802
        test = self.kind(node.test)
        self.check_operand(test, node)
        truth = truth_of(test)
        if truth is not None:
            return self.kind(node.body if truth else node.orelse)
        return either(self.kind(node.body), self.kind(node.orelse)) or self.fail(node)

    # -- comprehensions and what they go over ------------------------------------------------------------------------

    def comprehension(self, node: Any) -> Any:
        """Return the kind of what a comprehension makes, if its items are made at once."""
        before, assignable = dict(self.kinds), self.assignable
        self.assignable = assignable | {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        self._generate(node, node.generators)
        self.kinds, self.assignable = before, assignable
        return OWN

    _ListComp = _SetComp = _DictComp = comprehension

    def _generate(self, node: Any, generators: Sequence[ast.comprehension]) -> None:
        if not generators:
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self.check_storable([self.kind(part)], node)
            return
        generator, *others = generators
        before, assignable = dict(self.kinds), self.assignable

        def follow(items: Any) -> None:
            self.kinds, self.assignable = dict(before), assignable
            for item in items.value if isinstance(items, Each) else [items]:
                self.store(generator.target, item)
                tests = []
                for test in generator.ifs:
                    tests.append(self.kind(test))
                    self.check_operand(tests[-1], node)
                    if truth_of(tests[-1]) is False:
                        break
                else:
                    self._generate(node, others)

        self.gone_over(generator.iter, follow)

    def gone_over(self, node: ast.expr, follow: Callable[[Any], None]) -> None:
        """Follow what is done with each item of what a loop goes over: as one kind that all items have, or else one by one."""
        items = self.iterated(node)
        try:
            follow(items)
        except Undetermined:
            each = items if isinstance(items, Each) else self.iterated(node, exactly=True)
            if each is items or not isinstance(each, Each):
                raise
            follow(each)

    def iterated(self, node: ast.expr, exactly: bool = False) -> Any:
        """Return the kind of the items of what a loop goes over, or :class:`Each` of them.

        Args:
            node: What it goes over.
            exactly: Whether to tell items apart where one kind would do for all.
        """
        if exactly and isinstance(node, (ast.Tuple, ast.List)) and not any(isinstance(part, ast.Starred) for part in node.elts):
            return Each(tuple(map(self.kind, node.elts)))
        of_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node, ast.Call) and not of_method and not any(isinstance(part, ast.Starred) for part in node.args):
            function = self.kind(node.func)
            plain = all(word.arg == "strict" and isinstance(word.value, ast.Constant) for word in node.keywords)
            called = function.value if isinstance(function, RootOf) and plain else None
            if called in (enumerate, zip) and len(node.args) > (called is zip):
                assert isinstance(function, RootOf)
                self.findings.add(function.root, "object")
                return self._rows(called is enumerate, [self.iterated(argument, exactly) for argument in node.args])
            each = self._range(node) if called is range and exactly else None
            if each is not None:
                assert isinstance(function, RootOf)
                self.findings.add(function.root, "object")
                return each
        kind = self.kind(node)
        if isinstance(kind, RootOf) and holds_modules(kind.value):
            return Each(tuple(self._module_in(kind, key, node) for key in range(len(kind.value._modules))))
        if isinstance(kind, Members):
            of = self.members(kind)
            return Each(tuple(map(Known, of)) if type(kind.value) is dict else tuple(of.values()))
        if isinstance(kind, Row):
            return Each(kind.value)
        each = self._one_by_one(kind) if exactly else None
        return self.items(kind, node) if each is None else each

    @staticmethod
    def _one_by_one(kind: Any) -> Each | None:
        """Return the kinds of the items of something from outside; ``None`` if they are not known, or too many."""
        if not isinstance(kind, (Envoys, Items, Known)):
            return None
        value = kind.value
        if isinstance(value, Envoy):
            children = value._children.values()
            return Each(tuple(map(Known, children))) if type(value).__iter__ is Envoy.__iter__ else None
        if type(value) not in (list, tuple, dict, range) or len(value) > LONGEST:
            return None
        return Each(tuple(Known(item) if is_constant(item) or isinstance(kind, Envoys) else VALUE for item in value))

    def _range(self, node: ast.Call) -> Each | None:
        """Return the kinds of the numbers of a ``range``; ``None`` if they are not known, or too many."""
        kinds = [self.kind(argument) for argument in node.args]
        if not all(isinstance(kind, Known) and type(kind.value) is int for kind in kinds):
            return None
        try:
            return self._one_by_one(Known(range(*(kind.value for kind in kinds))))
        except (TypeError, ValueError):  # the block will raise it
            return None

    @staticmethod
    def _rows(numbered: bool, kinds: list[Any]) -> Any:
        """Return the kind of what ``enumerate`` or ``zip`` gives."""
        if numbered:
            if not isinstance(kinds[0], Each):
                return Row((VALUE, kinds[0]))
            numbers = map(Known, range(len(kinds[0].value))) if len(kinds) == 1 else [VALUE] * len(kinds[0].value)
            return Each(tuple(map(Row, zip(numbers, kinds[0].value, strict=True))), kinds[0].is_exact)
        lengths = [len(kind.value) for kind in kinds if isinstance(kind, Each)]
        if not lengths:
            return Row(tuple(kinds))
        columns = [kind.value if isinstance(kind, Each) else [kind] * min(lengths) for kind in kinds]
        exact = all(isinstance(kind, Each) and kind.is_exact for kind in kinds)
        return Each(tuple(map(Row, zip(*columns, strict=False))), exact)

    def items(self, kind: Any, node: ast.AST) -> Any:
        """Return the kind of what one gets by iterating over something."""
        if isinstance(kind, Known) and isinstance(kind.value, Located):
            return self._some(kind.value, node)
        if kind is SOME or isinstance(kind, Envoys):
            return SOME
        self.check_operand(kind, node)
        return VALUE

    # -- what statements and calls add -------------------------------------------------------------------------------

    def store(self, target: ast.expr, kind: Any) -> None:
        """Assign a value of some kind."""
        raise NotImplementedError

    def call(self, function: Any, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Return the kind of what a call returns."""
        raise NotImplementedError


def _is_key_of_dict(key: Any, container: Any) -> bool:
    """Whether a constant is looked for among the keys of a dict from outside, which are constants, too."""
    return is_plain_constant(key) and isinstance(container, (Items, Members)) and type(container.value) is dict


def _are_same(kinds: list[Any]) -> bool | None:
    """Return whether two values are one object, if that is the same in each replay: one is ``None``, the other known."""
    if not any(isinstance(kind, Known) and kind.value is None for kind in kinds):
        return None
    certain = (Known, Items, Envoys, Members, RootOf, Bound, Row, Keywords)
    if not all(kind is OWN or isinstance(kind, certain) for kind in kinds):
        return None
    return all(isinstance(kind, Known) and kind.value is None for kind in kinds)


