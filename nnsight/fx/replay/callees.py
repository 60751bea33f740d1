"""Calls: of functions that are known to only compute, and of functions and modules that are looked into.

A function of the user's is followed as the block is: its syntax tree, with the abstract values of its arguments. What it reads of its
globals, closure, defaults and the attributes of ``self`` are guards, reached through the function. A module is its
``forward``, if nothing is put around that; an envoy that is called as a function is its module's.
"""

from __future__ import annotations

import ast
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
    LOOKING,
    PLAIN_METACLASSES,
    REACHING_OUT,
    SKIP,
    VALUE,
    Held,
    Known,
    Method,
    Outside,
    Row,
    Undetermined,
    harmless_functions,
    is_known_constant,
    is_method,
)
from .expressions import Expressions
from .guards import GuardPath, GuardStep, has_global_hooks, is_called_plainly
from .names import FunctionVariables

#: Most functions that are followed one inside the other.
_DEEPEST = 40

#: What torch makes of a function below ``@torch.no_grad()``.
_DECORATED = torch.no_grad()(lambda: None).__code__

#: Flags of functions whose body does not run when they are called.
_DEFERRED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Calls(Expressions):
    """Evaluates calls."""

    def _Call(self, node: ast.Call) -> Any:  # noqa: N802 - named after the nodes of ast
        written = node.func
        if isinstance(written, ast.Attribute):
            if written.attr == "append" and self._fills_outside(written.value):
                self.check_storable(map(self.value, node.args), node)
                return Known(None)
            owner = self.value(written.value)
            given, named = self._arguments(node, False)
            done = self._method(owner, written.attr, [*given, *named.values()], node)
            return self.call(self.attribute(owner, written), given, named, node) if done is None else done
        function = self.value(written)
        if isinstance(function, Outside) and function.value is isinstance and len(node.args) == 2:
            return self._is_instance(function, node)
        given, named = self._arguments(node, isinstance(function, Outside) and function.value in EAGER)
        return self.call(function, given, named, node)

    def _arguments(self, node: ast.Call, at_once: bool) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call; ``at_once`` is whether it consumes a generator before it returns."""
        is_generator = at_once and len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp)
        given = [self.comprehension(node.args[0])] if is_generator else self.several(node.args)
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        return (given, named) if len(named) == len(node.keywords) else self.fail(node)

    def call(self, function: Any, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Return the abstract value of what a call returns."""
        if function is SKIP:
            self.check_storable([*given, *named.values()], node)
            return VALUE
        if isinstance(function, Method):
            return self.call(function.function, [function.owner, *given], named, node)
        if isinstance(function, Known) and isinstance(function.value, Envoy):
            return self._call_envoy(function.value, given, named, node)
        if not isinstance(function, (Known, Outside)):
            return self.fail(node)
        called = function.value
        if called is save:
            return given[0] if len(given) == 1 and not named else self.fail(node)
        if not isinstance(function, Outside):
            return self.fail(node)
        if id(called) in harmless_functions():
            self.findings.add(function.path, "object")
            return self._computed_by(called, given, named, node)
        if isinstance(called, types.FunctionType):
            return self._follow(function.path, called, given, named, node)
        if isinstance(called, types.MethodType):
            owner = self.guarded(function.path.to("inner", "__self__"), called.__self__)
            method = Outside(function.path.to("inner", "__func__"), called.__func__)
            return self.call(method, [owner, *given], named, node)
        if isinstance(called, torch.nn.Module):
            if has_global_hooks() or not is_called_plainly(called):
                raise Undetermined(f"`{function.path}` has hooks, or a call of its own, {self.at(node)}")
            self.findings.add(function.path, "module")
            return self._forward(function, given, named, node)
        return self.fail(node)

    def _computed_by(self, called: Any, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Return the abstract value of what a function that only computes returns."""
        first = given[0] if len(given) == 1 and not named else None
        if called is len and isinstance(first, (Held, Row)):
            return Known(len(first.items if isinstance(first, Row) else first.value))
        if called is range and all(isinstance(value, Known) and type(value.value) is int for value in given):
            try:
                return Known(range(*(value.value for value in given)))
            except (TypeError, ValueError):  # the block will raise it
                return VALUE
        only_reads = first is not None or called not in (max, min, sum)  # of several, these may return one
        checked = [value for value in given if not (only_reads and isinstance(value, Held) and value.is_plain)]
        self.check_storable([*checked, *named.values()], node)
        return VALUE

    # -- methods and built-ins ---------------------------------------------------------------------------------------

    def _method(self, owner: Any, name: str, given: list[Any], node: ast.Call) -> Any:
        """Return the abstract value of a call of a method of a value; ``None`` if it is a call of something else."""
        is_tensor = isinstance(owner, Known) and isinstance(owner.value, torch.Tensor)
        if name == "save" and not given and (owner is VALUE or is_tensor):
            return owner  # in a function; in a block it is a call of something else
        if owner is VALUE or is_tensor or is_known_constant(owner):
            if name in REACHING_OUT or not is_method(name):
                return None
            self.check_storable(given, node)
            return VALUE
        if isinstance(owner, Held) and type(owner.value) is dict and name in ("items", "values", "keys") and not given:
            keys = tuple(map(Known, owner.value))
            if name == "keys":
                return Row(keys)
            values = tuple(self._member(owner, key) for key in owner.value)
            return Row(values if name == "values" else tuple(map(Row, zip(keys, values, strict=True))))
        if isinstance(owner, Held) and owner.is_plain and name in LOOKING:
            self.check_storable(given, node)
            return VALUE
        return None

    def _fills_outside(self, node: ast.expr) -> bool:
        """Whether a name, or an attribute, stands for a list from outside; then it is one that the block fills."""
        try:
            if isinstance(node, ast.Name) and node.id not in self.values:
                path, value = self.variables.outside(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(owner := self.value(node.value), Outside) and node.attr[:2] != "__":
                step = GuardStep("attribute", node.attr)
                path, value = owner.path.to(*step), step.of(owner.value)
            else:
                return False
        except LookupError:
            return False
        if type(value) is list:
            self.findings.filled[path] = None
        return type(value) is list

    def _is_instance(self, function: Outside, node: ast.Call) -> Any:
        written, classes = node.args
        value = self.value(written)
        for each in map(self.value, classes.elts if isinstance(classes, ast.Tuple) else [classes]):
            if not (isinstance(each, Outside) and type(each.value) in PLAIN_METACLASSES):
                return self.fail(node)
            self.findings.add(each.path, "object")
        if isinstance(value, Outside):
            self.findings.add(value.path, "object")
        self.findings.add(function.path, "object")
        return VALUE

    # -- functions and modules of the user's -------------------------------------------------------------------------

    def _call_envoy(self, envoy: Envoy, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Follow an envoy that is called as a function: that is the ``forward`` of its module, without its hooks."""
        if envoy._tree is not self.findings.modules or type(envoy).__call__ is not Envoy.__call__ or "hook" in named:
            return self.fail(node)
        return self._forward(Outside(GuardPath(weakref.ref(envoy._module)), envoy._module), given, named, node)

    def _forward(self, module: Outside, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        step = GuardStep("class", "forward")
        try:
            found = step.of(module.value)
        except LookupError:
            return self.fail(node)
        return self.call(Outside(module.path.to(*step), found), [module, *given], named, node)

    def _follow(self, path: GuardPath, function: types.FunctionType, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Follow a function, given its arguments; return the abstract value of what it returns."""
        code, findings = function.__code__, self.findings
        if code is _DECORATED:
            return self._follow_decorated(path, function, given, named, node)
        if code.co_flags & _DEFERRED:
            return self.fail(node)
        # A module in a module may be of the same class.
        active = code, id(given[0].value) if given and isinstance(given[0], Outside) else 0
        if active in findings.active or len(findings.active) >= _DEEPEST:
            raise Undetermined(f"`{function.__qualname__}` calls itself, or too many functions call each other")
        try:
            definition = definition_of(function)
        except SourceError as error:
            raise Undetermined(str(error)) from None
        findings.add(path, "function")
        inner = type(self)(findings, FunctionVariables(function, path))
        inner.values = self._parameters(path, function, given, named, node)
        findings.active.append(active)
        try:
            return inner.result(definition.body, node)
        finally:
            findings.active.pop()

    def _follow_decorated(
        self, path: GuardPath, function: types.FunctionType, given: list[Any], named: dict[str, Any], node: Any
    ) -> Any:
        """Follow a function below ``@torch.no_grad()`` and the like."""
        variables = FunctionVariables(function, path)
        try:
            around, inside = variables.outside("ctx_factory"), variables.outside("func")
        except KeyError:
            return self.fail(node)
        kind: Any = type(getattr(around[1], "__self__", None))
        if kind not in (torch.no_grad, torch.enable_grad) or around[1].__func__ is not kind.clone:
            return self.fail(node)
        self.findings.add(path, "function")
        self.findings.add(around[0].to("inner", "__func__"), "object")
        self.findings.add(around[0].to("inner", "__self__").to("inner", "__class__"), "object")
        return self.call(Outside(*inside), given, named, node)

    def _parameters(
        self, path: GuardPath, function: types.FunctionType, given: list[Any], named: dict[str, Any], node: Any
    ) -> dict[str, Any]:
        """Return the abstract values of the parameters of a function; what it has defaults for are guards."""
        code, defaults, by_keyword = function.__code__, function.__defaults__ or (), function.__kwdefaults__ or {}
        count = code.co_argcount
        names = code.co_varnames[: count + code.co_kwonlyargcount]
        values = dict(zip(names[:count], given, strict=False))
        variadic = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        if variadic or len(given) > count or not set(names).difference(values).issuperset(named):
            return self.fail(node)  # `*args` and `**kwargs`, or a mistake
        values |= named
        for position, name in enumerate(names):
            index = position - count + len(defaults)
            if name not in values and position < count and index >= 0:
                values[name] = self.guarded(path.to("default", index), defaults[index])
            elif name not in values and name in by_keyword:
                values[name] = self.guarded(path.to("keyword", name), by_keyword[name])
        return values if len(values) == len(names) else self.fail(node)

    def result(self, body: Sequence[ast.stmt], node: Any) -> Any:
        """Return the abstract value of what the body of a function returns."""
        raise NotImplementedError
