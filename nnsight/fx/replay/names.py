"""What a name, an attribute or an item of a piece of code stands for.

What is found out on the way, the guards above all, is common to all code that a block runs, see :class:`~.variables.Findings`.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from typing import Any

import torch

from ...envoy.source import Source
from ...runtime.modules.eproperty import eproperty
from ...runtime.modules.located import Located
from ...tracing.block import SCOPE_NAME, TRACER_NAME
from ...tracing.body import RESULT_NAME, SAVE_NAME
from ...tracing.saving import save
from .abstract_values import (
    SKIP,
    SOME,
    TRACER,
    VALUE,
    Bound,
    Envoys,
    Items,
    Known,
    Members,
    RootOf,
    Row,
    Super,
    Undetermined,
    all_plain,
    is_operand,
    is_plain_constant,
    is_plain_envoy,
    is_storable,
)
from .guards import GuardStep, Root, holds_modules, is_constant, kind_of, look_up
from .variables import BlockVariables, Findings, FunctionVariables


class Names:
    """Follows the kinds of names, attributes and items; :class:`~.expressions.Expressions` those of all other expressions.

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

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any], node: Any) -> Any:
        """Return the kind of what a call returns."""
        return self.fail(node)

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
        step = GuardStep("class", name)
        try:
            found = step.of(owner.value)
        except LookupError:
            return self.fail(node)
        return self._of_class(owner, owner.root.to(*step), found, node)

    def _of_super(self, owner: Super, name: str, node: ast.AST) -> Any:
        step = GuardStep("super", (owner.of.value, name))
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
