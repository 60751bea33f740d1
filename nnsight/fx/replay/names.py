"""Variables, attributes and items: what they stand for, and the guards that they need."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...envoy.envoy import Envoy
from ...envoy.source import Source
from ...runtime.modules.eproperty import eproperty
from ...runtime.modules.located import Located
from ...runtime.modules.tree import ModuleTree
from ...tracing.block import SCOPE_NAME, TRACER_NAME, Block
from ...tracing.body import RESULT_NAME, SAVE_NAME
from ...tracing.saving import save
from .abstract_values import (
    SKIP,
    TRACER,
    VALUE,
    Held,
    Known,
    Method,
    Outside,
    Row,
    Undetermined,
    is_known_constant,
    is_operand,
    is_plain_envoy,
    is_storable,
)
from .guards import LONGEST, GuardPath, GuardStep, holds_modules, is_constant, kind_of, look_up


class Findings:
    """What is found out about a block and the functions that it calls; ``tracer`` is what ``as`` binds.

    Attributes:
        guards: What is read from outside, with the kinds of comparison that each needs.
        filled: The lists from outside that are appended to.
        active: The functions that are being followed, one inside the other, with the identity of the object whose methods they are.
        left: How many expressions may still be followed.
    """

    def __init__(self, tracer: Any, modules: ModuleTree | None) -> None:
        self.tracer, self.modules = tracer, modules
        self.guards: dict[tuple[GuardPath, str], None] = {}
        self.filled: dict[GuardPath, None] = {}
        self.active: list[tuple[types.CodeType, int]] = []
        self.left = 20_000

    def add(self, path: GuardPath, kind: str) -> None:
        """Add a guard."""
        self.guards[path, kind] = None


class BlockVariables:
    """The variables of a block; ``variable`` returns what a name stands for before it begins, or raises ``KeyError``."""

    where = ""

    def __init__(self, block: Block, variable: Callable[[str], Any]) -> None:
        self.assignable = frozenset(block.shared)
        self._variable = variable

    def outside(self, name: str) -> tuple[GuardPath, Any]:
        """Return a variable from outside, and what it is; raises ``KeyError`` if it has no value."""
        return GuardPath(name), self._variable(name)


class FunctionVariables:
    """The variables of a function that is followed; ``path`` is the way to it."""

    def __init__(self, function: types.FunctionType, path: GuardPath) -> None:
        code = function.__code__
        self.assignable = frozenset((*code.co_varnames, *code.co_cellvars))
        self.where = f" of `{function.__qualname__}`"
        self._function, self._path = function, path

    def outside(self, name: str) -> tuple[GuardPath, Any]:
        """Return a variable from outside, and what it is; raises ``KeyError`` if it has no value."""
        free = self._function.__code__.co_freevars
        if name in self.assignable or name.startswith("__"):  # in a class, Python would look for another name
            raise KeyError(name)
        step = GuardStep("cell", free.index(name)) if name in free else GuardStep("global", name)
        try:
            return self._path.to(*step), step.of(self._function)
        except LookupError:
            raise KeyError(name) from None


class Names:
    """Evaluates names, attributes and items of a piece of code; :class:`~.expressions.Expressions` all other expressions.

    Attributes:
        values: The abstract value of each variable that the code has assigned so far.
    """

    def __init__(self, findings: Findings, variables: BlockVariables | FunctionVariables) -> None:
        self.findings = findings
        self.variables = variables
        self.assignable = variables.assignable
        self.values: dict[str, Any] = {}

    def at(self, node: Any) -> str:
        """Return where a node is, for a reason."""
        return f"in line {node.lineno}{self.variables.where}"

    def fail(self, node: Any) -> Any:
        raise Undetermined(f"`{ast.unparse(node)[:80]}` {self.at(node)}")

    def check_storable(self, values: Iterable[Any], node: ast.AST) -> None:
        """Check that values may go into a container, see :func:`is_storable`."""
        if not all(map(is_storable, values)):
            self.fail(node)

    def check_operand(self, value: Any, node: ast.AST) -> None:
        """Check that an operator may be applied to a value, see :func:`is_operand`."""
        if not is_operand(value):
            self.fail(node)

    def value(self, node: ast.expr | None) -> Any:
        """Return the abstract value of an expression."""
        if node is None:
            return VALUE
        self.findings.left -= 1
        if self.findings.left < 0:
            raise Undetermined(f"there is too much to look through, {self.at(node)}")
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise Undetermined(f"a `{type(node).__name__.lower()}` {self.at(node)}")
        return method(node)

    # -- variables and attributes ----------------------------------------------------------------------------------

    def _Constant(self, node: ast.Constant) -> Any:  # noqa: N802 - named after the nodes of ast
        return Known(node.value)

    def _Name(self, node: ast.Name) -> Any:  # noqa: N802
        if node.id in self.values:
            value = self.values[node.id]
            if value is None:
                raise Undetermined(f"`{node.id}` {self.at(node)} may be one thing or another")
            return value
        if node.id in (SCOPE_NAME, TRACER_NAME):
            return TRACER
        if node.id == SAVE_NAME:
            return Known(save)
        if node.id == RESULT_NAME:
            raise Undetermined(f"the result is read {self.at(node)}")
        try:
            return self.guarded(*self.variables.outside(node.id))
        except KeyError:
            raise Undetermined(f"`{node.id}` has no value {self.at(node)}") from None

    def guarded(self, path: GuardPath, value: Any) -> Any:
        """Return the abstract value of something from outside, and add the guard that it needs."""
        if value is self.findings.tracer:
            return TRACER
        kind = kind_of(value)
        if kind is None:
            raise Undetermined(f"`{path}` is a {type(value).__name__}")
        if kind == "object" and not isinstance(value, (Located, Source)):
            return Outside(path, value)  # a guard as soon as it is called; until then on the way to its attributes
        self.findings.add(path, kind)
        return Held(path, value, kind == "items") if kind in ("items", "members") else Known(value)

    def _Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802
        return self.attribute(self.value(node.value), node)

    def attribute(self, owner: Any, node: ast.Attribute) -> Any:
        """Return the abstract value of an attribute of a value."""
        if owner is TRACER and node.attr == "result" and getattr(self.findings.tracer, "output_location", None) is not None:
            return VALUE
        if owner is VALUE:
            return VALUE if node.attr != "grad" else self.fail(node)
        if isinstance(owner, Known):
            value = owner.value
            if isinstance(value, (Located, Source)):
                return self.of_envoy(value, node)
            if isinstance(value, torch.Tensor):  # one that a user has added may be anything
                return VALUE if node.attr != "grad" and hasattr(torch.Tensor, node.attr) else self.fail(node)
            if is_constant(value):
                return VALUE
        # In a class, `__name` is looked up under another name.
        return self._of_object(owner, node) if isinstance(owner, Outside) and node.attr[:2] != "__" else self.fail(node)

    def of_envoy(self, envoy: Any, node: ast.Attribute) -> Any:
        """Return the abstract value of an attribute of an envoy."""
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

    def _of_object(self, owner: Outside, node: ast.Attribute) -> Any:
        try:
            return self.guarded(owner.path.to("attribute", node.attr), look_up(owner.value, node.attr))
        except (LookupError, AttributeError):
            pass
        step = GuardStep("class", node.attr)
        try:
            path, found = owner.path.to(*step), step.of(owner.value)
        except LookupError:
            return self.fail(node)
        if isinstance(found, types.FunctionType):
            return Method(Outside(path, found), owner)
        return self.guarded(path, found) if isinstance(found, torch.Tensor) or is_constant(found) else self.fail(node)

    # -- items -----------------------------------------------------------------------------------------------------

    def _Subscript(self, node: ast.Subscript) -> Any:  # noqa: N802
        owner, index = self.value(node.value), self.value(node.slice)
        if is_known_constant(index):
            try:
                found = self._item(owner, index.value)
            except Exception:  # the block will raise it, when it gets there
                return self.fail(node)
            if found is not None:
                return found
        self.check_operand(index, node)
        self.check_operand(owner, node)
        return VALUE

    def _item(self, owner: Any, key: Any) -> Any:
        """Return the abstract value of an item of something with known items, else ``None``."""
        if isinstance(owner, Known) and isinstance(owner.value, Located):
            found = owner.value[key]  # type: ignore[index]
            return Row(tuple(map(Known, found))) if isinstance(found, list) else Known(found)
        if isinstance(owner, Row):
            return Row(owner.items[key]) if type(key) is slice else owner.items[key]
        if isinstance(owner, Held):
            if type(owner.value) is not dict:
                key = range(len(owner.value))[key]  # counts from the front, or is several
            return Row(tuple(self._member(owner, place) for place in key)) if type(key) is range else self._member(owner, key)
        if isinstance(owner, Outside) and holds_modules(owner.value, indexed=True):
            return self._module(owner, key)
        return None

    def _member(self, owner: Held, key: Any) -> Any:
        found = owner.value[key]
        return Known(found) if owner.is_plain else self.guarded(owner.path.to("item", key), found)

    def _module(self, owner: Outside, key: Any) -> Any:
        modules = owner.value._modules
        name = key if isinstance(owner.value, torch.nn.ModuleDict) else list(modules)[key]
        self.findings.add(owner.path, "children")
        return self.guarded(owner.path.to("attribute", name), modules[name])

    def items(self, value: Any, node: ast.AST) -> Row | None:
        """Return what a loop over a value goes through, one by one; ``None`` if that is any number of ``VALUE``."""
        if isinstance(value, Row):
            return value
        if isinstance(value, Known):
            if isinstance(value.value, Envoy) and type(value.value).__iter__ is Envoy.__iter__:
                return Row(tuple(map(Known, value.value._children.values())))
            if isinstance(value.value, (tuple, range)) and len(value.value) <= LONGEST:
                return Row(tuple(map(Known, value.value)))
        if isinstance(value, Held):
            if type(value.value) is dict:
                return Row(tuple(map(Known, value.value)))
            return Row(tuple(self._member(value, key) for key in range(len(value.value))))
        if isinstance(value, Outside) and holds_modules(value.value):
            return Row(tuple(self._module(value, key) for key in range(len(value.value._modules))))
        self.check_operand(value, node)
        return None
