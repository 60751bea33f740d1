"""What kind of thing an expression is.

:class:`Expressions` follows the expressions of a piece of code: of a block, or of a function that it calls. What it finds out on the
way, the roots above all, is common to all of them, see :class:`Findings`.
"""

from __future__ import annotations

import ast
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...envoy.envoy import Envoy
from ...envoy.source import Source
from ...runtime.modules.eproperty import eproperty
from ...runtime.modules.located import Located
from ...runtime.probing import Modules
from ...tracing.block import SCOPE_NAME, TRACER_NAME, Block
from ...tracing.body import RESULT_NAME, SAVE_NAME
from ...tracing.saving import save
from .abstract_values import (
    OWN,
    SKIP,
    SOME,
    TRACER,
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
    Super,
    Undetermined,
    all_plain,
    either,
    is_operand,
    is_plain_constant,
    is_plain_envoy,
    is_storable,
    truth_of,
)
from .guards import LONGEST, Root, Step, holds_modules, is_constant, kind_of, look_up

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
        step = Step("cell", free.index(name)) if name in free else Step("global", name)
        try:
            return self._root.to(*step), step.of(self._function)
        except LookupError:
            raise KeyError(name) from None


class Expressions:
    """Follows the kinds of expressions.

    ``kinds`` has the kind of each variable that the code has assigned so far. Where ways join that left a variable with
    different kinds, it has none, and using it ends the proof.

    Args:
        findings: What is found out.
        variables: The variables from outside.
    """

    def __init__(self, findings: Findings, variables: BlockVariables | FunctionVariables) -> None:
        self.findings = findings
        self.variables = variables
        self.assignable = variables.assignable
        self.kinds: dict[str, Any] = {}

    def at(self, node: Any) -> str:
        """Return where a node is, for a reason."""
        return f"in line {node.lineno}{self.variables.where}"

    def fail(self, node: Any) -> Any:
        raise Undetermined(f"`{ast.unparse(node)[:80]}` {self.at(node)}")

    def check_storable(self, kinds: Iterable[Any], node: ast.AST) -> None:
        """Check that values may go into a container, see :func:`is_storable`."""
        if not all(map(is_storable, kinds)):
            self.fail(node)

    def check_operand(self, kind: Any, node: ast.AST) -> None:
        """Check that an operator may be applied to a value, see :func:`is_operand`."""
        if not is_operand(kind):
            self.fail(node)

    def kind(self, node: ast.expr | None) -> Any:
        """Return the kind of an expression."""
        if node is None:
            return VALUE
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise Undetermined(f"a `{type(node).__name__.lower()}` {self.at(node)}")
        return method(node)

    # -- variables and attributes ----------------------------------------------------------------------------------

    def _Constant(self, node: ast.Constant) -> Any:  # noqa: N802 - named after the nodes of ast
        return Known(node.value)

    def _Name(self, node: ast.Name) -> Any:  # noqa: N802
        if node.id in self.kinds:
            kind = self.kinds[node.id]
            if kind is None:
                raise Undetermined(f"`{node.id}` {self.at(node)} may be one thing or another")
            return kind
        if node.id in (SCOPE_NAME, TRACER_NAME):
            return TRACER
        if node.id == SAVE_NAME:
            return Known(save)
        if node.id == RESULT_NAME:
            raise Undetermined(f"the result is read {self.at(node)}")
        try:
            return self.outside(self.mangled(node.id))
        except KeyError:
            raise Undetermined(f"`{node.id}` has no value {self.at(node)}") from None

    def outside(self, name: str) -> Any:
        """Return the kind of a variable from outside, which becomes a root; raises ``KeyError`` if it has no value."""
        return self.root(*self.variables.outside(name))

    def root(self, root: Root, value: Any) -> Any:
        """Return the kind of something from outside."""
        if value is self.findings.tracer:
            return TRACER
        kind = kind_of(value)
        if kind is None:
            raise Undetermined(f"`{root}` is a {type(value).__name__}")
        if kind == "object" and not isinstance(value, (Located, Source)):
            return RootOf(root, value)  # a root as soon as it is called; until then on the way to its attributes
        self.findings.add(root, kind)
        if kind == "envoys":
            for envoy in value:
                if not all_plain(envoy):
                    raise Undetermined(f"`{root}` has an envoy of a class of yours")
            return Envoys(value)
        if kind == "members":
            return Members(root, value)
        return Items(value) if kind == "items" else RootOf(root, value) if kind == "partial" else Known(value)

    def members(self, kind: Members) -> dict[Any, Any]:
        """Return the kinds of what is in a container from outside, by index or key."""
        keys = kind.value if type(kind.value) is dict else range(len(kind.value))
        return {key: self.root(kind.root.to("item", key), kind.value[key]) for key in keys}

    def _Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802
        return self.attribute(self.kind(node.value), node)

    def attribute(self, owner: Any, node: ast.Attribute) -> Any:
        """Return the kind of an attribute of a value."""
        if owner is TRACER and node.attr == "result" and getattr(self.findings.tracer, "output_location", None) is not None:
            return VALUE
        if owner is VALUE:
            return VALUE if node.attr != "grad" else self.fail(node)
        if owner is SOME:
            return self._of_some(node)
        if isinstance(owner, Known):
            value = owner.value
            if isinstance(value, (Located, Source)):
                return self.of_envoy(value, node)
            if isinstance(value, torch.Tensor):  # one that a user has added may be anything
                return VALUE if node.attr != "grad" and hasattr(torch.Tensor, node.attr) else self.fail(node)
            if is_constant(value):
                return VALUE
        if isinstance(owner, RootOf):
            return self._of_object(owner, self.mangled(node.attr), node)
        if isinstance(owner, Super):
            return self._of_super(owner, self.mangled(node.attr), node)
        return self.fail(node)

    def mangled(self, name: str) -> str:
        """Return the name of an attribute as it is looked up: private names of a class have its name in front."""
        around = self.variables.class_name
        if around is None or not around.strip("_") or not name.startswith("__") or name.endswith("__"):
            return name
        return f"_{around.lstrip('_')}{name}"

    def of_envoy(self, envoy: Any, node: ast.Attribute) -> Any:
        """Return the kind of an attribute of an envoy."""
        name = node.attr
        if isinstance(envoy, Located):
            found = getattr(type(envoy), name, None)
            children = getattr(envoy, "_children", {})
            if name in children:
                return Known(children[name])
            if isinstance(found, eproperty):
                if found is not getattr(Located, name, None):
                    raise Undetermined(f"`.{name}` {self.at(node)} is a property of a class of yours")
                return VALUE
            if found is not None and (name not in ("source", "skip") or not is_plain_envoy(type(envoy))):
                return self.fail(node)
        if name == "skip":
            return SKIP
        try:
            value = getattr(envoy, name)
        except Exception:  # the block will raise it, when it gets there
            return self.fail(node)
        return Known(value) if isinstance(value, (Located, Source)) else self.fail(node)

    def _some(self, envoy: Any, node: ast.AST) -> Any:
        """Return the kind of an envoy below ``envoy``, whichever it is."""
        return SOME if all_plain(envoy) else self.fail(node)

    def _of_some(self, node: ast.Attribute) -> Any:
        if node.attr in ("output", "input", "inputs"):
            return VALUE
        return SKIP if node.attr == "skip" else SOME

    def _of_object(self, owner: RootOf, name: str, node: ast.AST) -> Any:
        try:
            return self.root(owner.root.to("attribute", name), look_up(owner.value, name))
        except (LookupError, AttributeError):
            pass
        step = Step("class", name)
        try:
            found = step.of(owner.value)
        except LookupError:
            return self.fail(node)
        return self._of_class(owner, owner.root.to(*step), found, node)

    def _of_super(self, owner: Super, name: str, node: ast.AST) -> Any:
        step = Step("super", (owner.of.value, name))
        try:
            found = step.of(owner.owner.value)
        except LookupError:
            return self.fail(node)
        return self._of_class(owner.owner, owner.owner.root.to(*step), found, node)

    def _of_class(self, owner: RootOf, root: Root, found: Any, node: ast.AST) -> Any:
        """Return the kind of an attribute that the class of an object from outside has, as it is there."""
        if isinstance(found, types.FunctionType):
            return Bound(RootOf(root, found), owner)
        if type(found) is property and found.fget is not None:
            return self.call(Bound(RootOf(root.to("inner", "fget"), found.fget), owner), [], {}, node)
        if type(found) is staticmethod:
            return self.root(root.to("inner", "__func__"), found.__func__)
        if isinstance(found, torch.Tensor) or is_constant(found):
            return self.root(root, found)
        return self.fail(node)

    def _Subscript(self, node: ast.Subscript) -> Any:  # noqa: N802
        owner, index = self.kind(node.value), self.kind(node.slice)
        number = index.value if isinstance(index, Known) else None
        if isinstance(owner, Known) and isinstance(owner.value, Located):
            if isinstance(number, (int, str)):
                try:
                    return Known(owner.value[number])  # type: ignore[index]
                except Exception:  # as above
                    return self.fail(node)
            return self._some(owner.value, node)
        if is_plain_constant(index) and isinstance(owner, (Envoys, Items, Members)):
            return self._taken_out(owner, index.value, node)
        if owner is SOME or isinstance(owner, Envoys):
            return SOME
        if isinstance(owner, Row) and type(number) is int and -len(owner.value) <= number < len(owner.value):
            return owner.value[number]
        if isinstance(owner, RootOf) and type(number) in (int, str) and holds_modules(owner.value, indexed=True):
            return self._module_in(owner, number, node)
        self.check_operand(index, node)
        self.check_operand(owner, node)
        return VALUE

    def _taken_out(self, owner: Envoys | Items | Members, key: Any, node: ast.AST) -> Any:
        """Return the kind of one item of a container from outside."""
        value = owner.value
        if type(value) is not dict and type(key) is int and -len(value) <= key < 0:
            key += len(value)
        try:
            found = value[key]
        except (LookupError, TypeError):
            return self.fail(node)  # the block will raise it, when it gets there
        if isinstance(owner, Members):
            return self.fail(node) if type(key) is slice else self.root(owner.root.to("item", key), found)
        if isinstance(owner, Envoys):
            return Known(found) if isinstance(found, (Located, Source)) else Envoys(found)
        return Known(found) if is_constant(found) else VALUE

    def _module_in(self, owner: RootOf, key: Any, node: ast.AST) -> Any:
        names = list(owner.value._modules)
        try:
            name = key if isinstance(owner.value, torch.nn.ModuleDict) else names[key]
            found = owner.value._modules[name]
        except (LookupError, TypeError):
            return self.fail(node)
        self.findings.add(owner.root, "children")
        return self.root(owner.root.to("attribute", name), found)

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


