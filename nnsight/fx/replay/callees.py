"""Calls: of functions that are known to only compute, and of functions and modules that are looked into.

A function of the user's is followed as the block itself is: its syntax tree, with the kinds of its arguments. What it reads of its
globals, its closure, its defaults and the attributes of ``self`` are roots, reached through the function. A module is its
``forward``, if nothing is put around that; an envoy that is called as a function is its module's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ...envoy.envoy import Envoy
from ...runtime.modules.listing import SourceError, definition_of
from ...tracing.saving import save
from .abstract_values import (
    EAGER,
    FILLING,
    LOOKING,
    MAKING,
    OWN,
    PLAIN_METACLASSES,
    REACHING_OUT,
    SKIP,
    VALUE,
    Bound,
    Envoys,
    Items,
    Keywords,
    Known,
    Members,
    RootOf,
    Row,
    Super,
    Undetermined,
    Unpacked,
    harmless_functions,
    is_method,
    is_plain_constant,
)
from .expressions import Expressions
from .guards import GuardStep, Root, has_global_hooks, is_called_plainly
from .variables import FunctionVariables

#: Most functions that are followed one inside the other.
_DEEPEST = 40

#: What torch makes of a function below ``@torch.no_grad()``.
_DECORATED = torch.no_grad()(lambda: None).__code__

#: Flags of functions whose body does not run when they are called.
_DEFERRED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Calls(Expressions):
    """Follows the kinds of calls."""

    def _Call(self, node: ast.Call) -> Any:  # noqa: N802 - named after the nodes of ast
        owner, written = None, node.func
        if isinstance(written, ast.Attribute):
            if written.attr == "append" and self._fills_outside(written.value):
                self.check_storable([self.kind(argument) for argument in node.args], node)
                return Known(None)
            owner = self.kind(written.value)
        else:
            owner = self.kind(written)
            if isinstance(owner, RootOf) and owner.value is isinstance and len(node.args) == 2:
                return self._is_instance(owner, node)
            if isinstance(owner, RootOf) and owner.value is super and not node.args:
                return self._super(owner, node)
        given, named = self._arguments(node)
        if isinstance(written, ast.Attribute):
            done = self._method(owner, written.attr, [*given, *named.values()], node)
            if done is not None:
                return done
            owner = self.attribute(owner, written)
        lazily = any(isinstance(argument, ast.GeneratorExp) for argument in node.args)
        if lazily and not (isinstance(owner, RootOf) and owner.value in EAGER):
            return self.fail(node)  # what it computes later may be something else
        return self.call(owner, given, named, node)

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        given: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                kind = self.kind(argument.value)
                if isinstance(kind, Row):
                    given += kind.value
                elif isinstance(kind, Members) and type(kind.value) is not dict:
                    given += self.members(kind).values()
                elif isinstance(kind, (Items, Known)) and type(kind.value) in (tuple, list):
                    given += map(Known, kind.value)  # each is compared in a replay
                else:
                    given.append(Unpacked(self.items(kind, argument)))
            else:
                given.append(self.comprehension(argument) if isinstance(argument, ast.GeneratorExp) else self.kind(argument))
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            kind = self.kind(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = kind
            elif isinstance(kind, Keywords):
                named |= kind.value
            elif isinstance(kind, Items) and type(kind.value) is dict and all(type(key) is str for key in kind.value):
                named |= {key: Known(value) for key, value in kind.value.items()}
            elif isinstance(kind, Members) and type(kind.value) is dict and all(type(key) is str for key in kind.value):
                named |= self.members(kind)
            else:
                named["**"] = kind
        return given, named

    def call(self, function: Any, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Return the kind of what a call returns."""
        if function is SKIP:
            self.check_storable([*given, *named.values()], node)
            return VALUE
        if isinstance(function, Bound):
            return self.call(function.function, [function.owner, *given], named, node)
        if isinstance(function, Known):
            if isinstance(function.value, Envoy):
                return self._call_envoy(function.value, given, named, node)
            if function.value is save:
                return given[0] if len(given) == 1 and not named else self.fail(node)
        if not isinstance(function, RootOf):
            return self.fail(node)
        called = function.value
        if called is save:
            return given[0] if len(given) == 1 and not named else self.fail(node)
        if id(called) in harmless_functions():
            self.findings.add(function.root, "object")
            if called is len and len(given) == 1 and not named and isinstance(given[0], (Envoys, Items, Members, Row)):
                return Known(len(given[0].value))
            given = [kind.value if isinstance(kind, Unpacked) else kind for kind in given]
            if called in (max, min):
                self.check_storable(given, node)
            parts = [part for kind in given for part in (kind.value if isinstance(kind, Row) else (kind,))]
            self.check_storable([kind for kind in parts if not isinstance(kind, Items)], node)
            self.check_storable(named.values(), node)
            return OWN if called in MAKING else VALUE
        if any(isinstance(kind, Unpacked) for kind in given) or "**" in named:
            return self.fail(node)
        if isinstance(called, types.FunctionType):
            return self._follow(function.root, called, given, named, node)
        if isinstance(called, types.MethodType):
            of = function.root.to("inner", "__self__")
            method = RootOf(function.root.to("inner", "__func__"), called.__func__)
            return self.call(method, [self.root(of, called.__self__), *given], named, node)
        if isinstance(called, torch.nn.Module):
            return self._call_module(function, given, named, node)
        if type(called) is functools.partial:
            return self._call_partial(function, given, named, node)
        step = GuardStep("special", "__call__")
        try:
            found = step.of(called)
        except LookupError:
            return self.fail(node)
        if not isinstance(found, types.FunctionType):
            return self.fail(node)
        return self.call(RootOf(function.root.to(*step), found), [function, *given], named, node)

    def _call_partial(self, function: RootOf, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Follow a ``functools.partial``: its function, with its arguments in front of those of the call."""
        root, partial = function
        first = [self.root(root.to("inner", "args").to("item", place), value) for place, value in enumerate(partial.args)]
        by_name = {name: self.root(root.to("inner", "keywords").to("item", name), value) for name, value in partial.keywords.items()}
        return self.call(self.root(root.to("inner", "func"), partial.func), [*first, *given], by_name | named, node)

    # -- methods and built-ins ---------------------------------------------------------------------------------------

    def _method(self, owner: Any, name: str, given: list[Any], node: ast.Call) -> Any:
        """Return the kind of a call of a method of a value; ``None`` if it is a call of something else."""
        is_tensor = isinstance(owner, Known) and isinstance(owner.value, torch.Tensor)
        given = [kind.value if isinstance(kind, Unpacked) else kind for kind in given]
        if name == "save" and not given and (owner is VALUE or owner is OWN or is_tensor):
            return owner  # in a function; in a block it is a call of something else
        if owner is VALUE or is_tensor or is_plain_constant(owner):
            if name in REACHING_OUT or not is_method(name):
                return None
            self.check_storable(given, node)
            return VALUE
        if isinstance(owner, Members) and type(owner.value) is dict and name in ("items", "values", "keys") and not given:
            of = self.members(owner)
            rows = {"items": (Row((Known(key), kind)) for key, kind in of.items()), "values": of.values(), "keys": map(Known, of)}
            return Row(tuple(rows[name]))
        if owner is OWN and name in FILLING | LOOKING:
            self.check_storable(given, node)
            return OWN if name in LOOKING else VALUE
        return OWN if isinstance(owner, Items) and name in LOOKING else None

    def _fills_outside(self, node: ast.expr) -> bool:
        """Whether a list is from outside; then it is one that the block fills."""
        if isinstance(node, ast.Name) and node.id not in self.kinds:
            try:
                root, value = self.variables.outside(self.mangled(node.id))
            except KeyError:
                return False
        elif isinstance(node, ast.Attribute) and isinstance(owner := self.kind(node.value), RootOf):
            step = GuardStep("attribute", self.mangled(node.attr))
            try:
                root, value = owner.root.to(*step), step.of(owner.value)
            except LookupError:
                return False
        else:
            return False
        if type(value) is not list:
            return False
        self.findings.filled[root] = None
        return True

    def _is_instance(self, function: RootOf, node: ast.Call) -> Any:
        value, classes = node.args
        kind = self.kind(value)
        for each in classes.elts if isinstance(classes, ast.Tuple) else [classes]:
            found = self.kind(each)
            if not (isinstance(found, RootOf) and type(found.value) in PLAIN_METACLASSES):
                return self.fail(node)
            self.findings.add(found.root, "object")
        if isinstance(kind, RootOf):
            self.findings.add(kind.root, "object")
        elif not (kind is OWN or kind is VALUE or isinstance(kind, (Items, Envoys, Known))):
            return self.fail(node)
        self.findings.add(function.root, "object")
        return VALUE

    def _super(self, function: RootOf, node: ast.Call) -> Any:
        first = self.first_argument
        owner = None if first is None else self.kinds.get(first)
        try:
            root, found = self.variables.outside("__class__")
        except KeyError:
            return self.fail(node)
        if not isinstance(owner, RootOf) or not isinstance(found, type) or not isinstance(owner.value, found):
            return self.fail(node)
        self.findings.add(function.root, "object")
        self.findings.add(root, "object")
        return Super(RootOf(root, found), owner)

    # -- functions and modules of the user's -------------------------------------------------------------------------

    def _call_envoy(self, envoy: Envoy, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Follow an envoy that is called as a function: that is the ``forward`` of its module, without its hooks."""
        known = envoy._tree is self.findings.modules and type(envoy).__call__ is Envoy.__call__
        if not known or "hook" in named or any(isinstance(kind, Unpacked) for kind in given) or "**" in named:
            return self.fail(node)
        return self._forward(RootOf(Root(weakref.ref(envoy._module)), envoy._module), given, named, node)

    def _call_module(self, function: RootOf, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        if has_global_hooks() or not is_called_plainly(function.value):
            raise Undetermined(f"`{function.root}` has hooks, or a call of its own, {self.at(node)}")
        self.findings.add(function.root, "module")
        return self._forward(function, given, named, node)

    def _forward(self, module: RootOf, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        step = GuardStep("class", "forward")
        try:
            found = step.of(module.value)
        except LookupError:
            return self.fail(node)
        return self.call(RootOf(module.root.to(*step), found), [module, *given], named, node)

    def _follow(self, root: Root, function: types.FunctionType, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Follow a function, given kinds of arguments; return the kind of what it returns."""
        code, findings = function.__code__, self.findings
        if code is _DECORATED:
            return self._follow_decorated(root, function, given, named, node)
        if code.co_flags & _DEFERRED:
            return self.fail(node)
        # A module in a module may be of the same class.
        active = code, id(given[0].value) if given and isinstance(given[0], RootOf) else 0
        if active in findings.active or (code.co_name in code.co_names and function.__globals__.get(code.co_name) is function):
            raise Undetermined(f"`{function.__qualname__}` calls itself")
        if len(findings.active) >= _DEEPEST:
            raise Undetermined(f"too many functions call each other {self.at(node)}")
        try:
            definition = definition_of(function)
        except SourceError as error:
            raise Undetermined(str(error)) from None
        findings.add(root, "function")
        inner = type(self)(findings, FunctionVariables(function, root, definition.class_name))
        inner.kinds = self._bound(definition.arguments, root, function, given, named, node)
        parameters = [*definition.arguments.posonlyargs, *definition.arguments.args]
        inner.first_argument = parameters[0].arg if parameters else None
        findings.active.append(active)
        try:
            return inner.result(definition.body, node)
        finally:
            findings.active.pop()

    def _follow_decorated(
        self, root: Root, function: types.FunctionType, given: list[Any], named: dict[str, Any], node: Any
    ) -> Any:
        """Follow a function below ``@torch.no_grad()`` and the like."""
        variables = FunctionVariables(function, root, None)
        try:
            around, inside = variables.outside("ctx_factory"), variables.outside("func")
        except KeyError:
            return self.fail(node)
        kind: Any = type(getattr(around[1], "__self__", None))
        if kind not in (torch.no_grad, torch.enable_grad) or around[1].__func__ is not kind.clone:
            return self.fail(node)
        self.findings.add(root, "function")
        self.findings.add(around[0].to("inner", "__func__"), "object")
        self.findings.add(around[0].to("inner", "__self__").to("inner", "__class__"), "object")
        return self.call(RootOf(*inside), given, named, node)

    def _bound(
        self,
        arguments: ast.arguments,
        root: Root,
        function: types.FunctionType,
        given: list[Any],
        named: dict[str, Any],
        node: Any,
    ) -> dict[str, Any]:
        """Return the kinds of the parameters of a function."""
        named = dict(named)
        positional = [*arguments.posonlyargs, *arguments.args]
        names = [parameter.arg for parameter in positional]
        kinds = dict(zip(names, given, strict=False))
        if arguments.vararg is not None:
            kinds[arguments.vararg.arg] = Row(tuple(given[len(names) :]))
        elif len(given) > len(names):
            return self.fail(node)
        defaults = function.__defaults__ or ()
        by_name = [parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)]
        for name in by_name:
            if name in named:
                if name in kinds:
                    return self.fail(node)
                kinds[name] = named.pop(name)
        if arguments.kwarg is not None:
            kinds[arguments.kwarg.arg] = Keywords(named)
        elif named:
            return self.fail(node)
        for position, name in enumerate(names):
            index = position - (len(names) - len(defaults))
            if name not in kinds:
                if index < 0:
                    return self.fail(node)
                kinds[name] = self.root(root.to("default", index), defaults[index])
        by_keyword = function.__kwdefaults__ or {}
        for parameter in arguments.kwonlyargs:
            if parameter.arg not in kinds:
                if parameter.arg not in by_keyword:
                    return self.fail(node)
                kinds[parameter.arg] = self.root(root.to("keyword", parameter.arg), by_keyword[parameter.arg])
        return kinds

    first_argument: str | None = None

    def result(self, body: Sequence[ast.stmt], node: Any) -> Any:
        """Return the kind of what the body of a function returns."""
        raise NotImplementedError
