"""Effect analysis: proves that the effects of a block depend only on the objects that it reads.

A block may be replayed (:mod:`nnsight.fx.replay.replay`) if its Python only reads values of the model, computes with tensors, and stores
results in its own variables and containers. This module proves that by abstract interpretation of the syntax tree: it computes an abstract
value (:mod:`nnsight.fx.replay.names`) for each expression, through the functions and modules that the block calls. A statement, a call or
an attribute that may have another effect ends the proof (:class:`.Undetermined`), and the block then runs in each trace. The analysis
executes nothing but attribute look-ups on the objects that the block reads from outside.

The objects from outside are *guards* (:mod:`nnsight.fx.replay.guards`): a replay compares them with those of the recorded run. A test of a
guarded constant has the same result in each replay, so the analysis follows only one of its branches.

A function of the user is analysed like a block, with the abstract values of its arguments. The globals, closure variables, defaults and
attributes of ``self`` that it reads are guards, reached through the function. A call of a module is a call of its ``forward``, if it has no
hooks. An envoy that is called as a function is analysed as its module.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...envoy.envoy import Envoy
from ...runtime.modules.eproperty import eproperty
from ...runtime.modules.listing import SourceError, definition_of
from ...runtime.modules.located import Located
from ...runtime.modules.tree import ModuleTree
from ...tracing.block import TRACER_NAME, Block
from ...tracing.saving import save
from .expressions import Expressions
from .guards import GuardPath, GuardStep, has_global_hooks, is_called_plainly
from .names import (
    EAGER,
    ESCAPING,
    PLAIN_METACLASSES,
    SKIP,
    TRACER,
    VALUE,
    BlockVariables,
    Concrete,
    Container,
    Findings,
    FunctionVariables,
    Items,
    Method,
    OutsideObject,
    Undetermined,
    harmless_functions,
    is_known_constant,
    is_method,
    join,
    truth_of,
)

#: Greatest depth of nested calls that the analysis follows.
_DEEPEST = 40

#: Flags of functions whose body does not run at the call.
_DEFERRED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def guards_of(
    block: Block, tracer: Any, modules: ModuleTree | None, variable: Callable[[str], Any]
) -> tuple[tuple[GuardPath, str], ...]:
    """Return the guards of ``block``: the path of each object that it reads from outside, and the kind of its comparison.

    ``tracer`` is the object that ``as`` binds, and ``variable`` returns the value of a name before the block, or raises ``KeyError``.

    Raises:
        Undetermined: If the block may have an effect that a replay would not repeat.
    """
    findings = Findings(tracer, modules)
    Analysis(findings, BlockVariables(block, variable)).run(block.body)
    for path, _ in findings.guards:
        if path in findings.filled:
            raise Undetermined(f"it both appends to the list `{path}` and reads it")
    return (*findings.guards, *((path, "filled") for path in findings.filled))


class Calls(Expressions):
    """Evaluates calls: of functions that only compute, and of functions and modules of the user, which it analyses."""

    def _Call(self, node: ast.Call) -> Any:  # noqa: N802 - named after the nodes of ast
        written = node.func
        if isinstance(written, ast.Attribute):
            if written.attr == "append" and self._fills_outside(written.value):
                self.check_storable(map(self.value, node.args), node)
                return Concrete(None)
            owner = self.value(written.value)
            given, named = self._arguments(node, False)
            done = self._method(owner, written.attr, [*given, *named.values()], node)
            return self.call(self.attribute(owner, written), given, named, node) if done is None else done
        function = self.value(written)
        if isinstance(function, OutsideObject) and function.value is isinstance and len(node.args) == 2:
            return self._is_instance(function, node)
        given, named = self._arguments(node, isinstance(function, OutsideObject) and function.value in EAGER)
        return self.call(function, given, named, node)

    def _arguments(self, node: ast.Call, at_once: bool) -> tuple[list[Any], dict[str, Any]]:
        """Return the abstract arguments of a call; ``at_once`` is whether the call consumes a generator before it returns."""
        is_generator = at_once and len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp)
        given = [self.comprehension(node.args[0])] if is_generator else self.several(node.args)
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        return (given, named) if len(named) == len(node.keywords) else self.fail(node)

    def call(self, function: Any, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Return the abstract value of the result of a call."""
        if function is SKIP:
            self.check_storable([*given, *named.values()], node)
            return VALUE
        if isinstance(function, Method):
            return self.call(function.function, [function.owner, *given], named, node)
        if isinstance(function, Concrete) and isinstance(function.value, Envoy):
            return self._call_envoy(function.value, given, named, node)
        if not isinstance(function, (Concrete, OutsideObject)):
            return self.fail(node)
        called = function.value
        if called is save:
            self.check_storable(given, node)  # a replay would save a copy of a container from outside, with its former items
            return given[0] if len(given) == 1 and not named else self.fail(node)
        if not isinstance(function, OutsideObject):
            return self.fail(node)
        if id(called) in harmless_functions():
            self.findings.add(function.path, "object")
            return self._computed_by(called, given, named, node)
        if isinstance(called, types.FunctionType):
            return self._follow(function.path, called, given, named, node)
        if isinstance(called, torch.nn.Module):
            if has_global_hooks() or not is_called_plainly(called):
                raise Undetermined(f"the module `{function.path}`, called {self.at(node)}, has hooks or a `__call__` of its own")
            self.findings.add(function.path, "module")
            return self._forward(function, given, named, node)
        return self.fail(node)

    def _computed_by(self, called: Any, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Return the abstract result of a call of a function that only computes."""
        first = given[0] if len(given) == 1 and not named else None
        if called is len and isinstance(first, (Container, Items)):
            return Concrete(len(first.items if isinstance(first, Items) else first.value))
        if called is range and all(isinstance(value, Concrete) and type(value.value) is int for value in given):
            try:
                return Concrete(range(*(value.value for value in given)))
            except (TypeError, ValueError):  # the block will raise it, too
                return VALUE
        only_reads = first is not None or called not in (max, min, sum)  # with several arguments, these may return one of them
        checked = [value for value in given if not (only_reads and isinstance(value, Container) and value.is_plain)]
        self.check_storable([*checked, *named.values()], node)
        return VALUE

    # -- methods and built-ins ---------------------------------------------------------------------------------------

    def _method(self, owner: Any, name: str, given: list[Any], node: ast.Call) -> Any:
        """Return the abstract result of a call of a method of a plain value or container; ``None`` for other owners and methods."""
        if isinstance(owner, Container) and type(owner.value) is dict and name in ("items", "values", "keys") and not given:
            keys = tuple(map(Concrete, owner.value))
            if name == "keys":
                return Items(keys, False)
            values = tuple(self._member(owner, key) for key in owner.value)
            return Items(values if name == "values" else tuple(map(Items, zip(keys, values, strict=True))), False)
        is_tensor = isinstance(owner, Concrete) and isinstance(owner.value, torch.Tensor)
        if name == "save" and not given and (owner is VALUE or is_tensor):
            return owner  # in a function; in a block, `x.save()` has become a call of `save`
        if owner is VALUE or is_tensor or is_known_constant(owner):
            if name in ESCAPING or not is_method(name):
                return None
            self.check_storable(given, node)
            return VALUE
        return None

    def _fills_outside(self, node: ast.expr) -> bool:
        """Whether a name or an attribute is a list from outside. If so, note that the block appends to the list."""
        try:
            if isinstance(node, ast.Name) and node.id not in self.values:
                path, value = self.variables.outside(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(owner := self.value(node.value), OutsideObject) and node.attr[:2] != "__":
                step = GuardStep("attribute", node.attr)
                path, value = owner.path.to(*step), step.of(owner.value)
            else:
                return False
        except LookupError:
            return False
        if type(value) is list:
            self.findings.filled[path] = None
        return type(value) is list

    def _is_instance(self, function: OutsideObject, node: ast.Call) -> Any:
        written, classes = node.args
        value = self.value(written)
        for each in map(self.value, classes.elts if isinstance(classes, ast.Tuple) else [classes]):
            if not (isinstance(each, OutsideObject) and type(each.value) in PLAIN_METACLASSES):
                return self.fail(node)
            self.findings.add(each.path, "object")
        if isinstance(value, OutsideObject):
            self.findings.add(value.path, "object")
        self.findings.add(function.path, "object")
        return VALUE

    # -- functions and modules of the user's -------------------------------------------------------------------------

    def _call_envoy(self, envoy: Envoy, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Analyse a call of an envoy as a function, which calls the ``forward`` of its module without hooks."""
        if envoy._tree is not self.findings.modules or type(envoy).__call__ is not Envoy.__call__ or "hook" in named:
            return self.fail(node)
        return self.call(OutsideObject(GuardPath(weakref.ref(envoy._module)), envoy._module), given, named, node)

    def _forward(self, module: OutsideObject, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        step = GuardStep("class", "forward")
        try:
            found = step.of(module.value)
        except LookupError:
            return self.fail(node)
        return self.call(OutsideObject(module.path.to(*step), found), [module, *given], named, node)

    def _follow(self, path: GuardPath, function: types.FunctionType, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Analyse a call of a Python function; return the abstract value of its result."""
        code, findings = function.__code__, self.findings
        if code.co_flags & _DEFERRED:
            return self.fail(node)
        # Not by the code alone: a module may call a submodule of the same class.
        active = code, id(given[0].value) if given and isinstance(given[0], OutsideObject) else 0
        if active in findings.active or len(findings.active) >= _DEEPEST:
            raise Undetermined(f"`{function.__qualname__}` is recursive, or calls are nested more than {_DEEPEST} deep")
        try:
            definition = definition_of(function)
        except SourceError as error:
            raise Undetermined(str(error)) from None
        findings.add(path, "function")
        inner: Any = type(self)(findings, FunctionVariables(function, path))
        inner.values = self._parameters(path, function, given, named, node)
        findings.active.append(active)
        try:
            return inner.result(definition.body, node)
        finally:
            findings.active.pop()

    def _parameters(
        self, path: GuardPath, function: types.FunctionType, given: list[Any], named: dict[str, Any], node: Any
    ) -> dict[str, Any]:
        """Return the abstract values of the parameters of a function. Defaults that it uses become guards."""
        code, defaults, by_keyword = function.__code__, function.__defaults__ or (), function.__kwdefaults__ or {}
        count = code.co_argcount
        names = code.co_varnames[: count + code.co_kwonlyargcount]
        values = dict(zip(names[:count], given, strict=False))
        variadic = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        if variadic or len(given) > count or not set(names).difference(values).issuperset(named):
            return self.fail(node)  # `*args` and `**kwargs` are not analysed; the others are mistakes
        values |= named
        for position, name in enumerate(names):
            index = position - count + len(defaults)
            if name not in values and position < count and index >= 0:
                values[name] = self.guarded(path.to("default", index), defaults[index])
            elif name not in values and name in by_keyword:
                values[name] = self.guarded(path.to("keyword", name), by_keyword[name])
        return values if len(values) == len(names) else self.fail(node)


class Analysis(Calls):
    """Interprets the statements of a block, or of a function that it calls.

    Attributes:
        live: Whether the next statement is reachable.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.live = True
        self._returned: list[Any] = []

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Interpret statements in order."""
        for statement in statements:
            if not self.live:
                return
            method = getattr(self, f"_{type(statement).__name__}", None)
            if method is None:
                raise Undetermined(f"the `{type(statement).__name__.lower()}` statement {self.at(statement)} is not analysed")
            method(statement)

    def result(self, body: Sequence[ast.stmt], node: Any) -> Any:
        """Interpret the body of a function; return the join of the abstract values that it may return."""
        self.run(body)
        if self.live:
            self._returned.append(Concrete(None))
        if not self._returned:
            return VALUE  # the function always raises
        return functools.reduce(join, self._returned) or self.fail(node)

    def _Pass(self, node: ast.stmt) -> None: ...  # noqa: N802 - named after the nodes of ast

    def _Expr(self, node: ast.Expr) -> None:  # noqa: N802
        self.value(node.value)

    def _Return(self, node: ast.Return) -> None:  # noqa: N802
        self._returned.append(Concrete(None) if node.value is None else self.value(node.value))
        self.live = False

    def _Raise(self, node: ast.Raise) -> None:  # noqa: N802
        self.live = False  # no `try` is analysed, so nothing catches it, and a run that fails is not recorded for replay

    # -- assignments -------------------------------------------------------------------------------------------------

    def _Assign(self, node: ast.Assign) -> None:  # noqa: N802
        is_tracer = isinstance(node.value, ast.Name) and node.value.id == TRACER_NAME
        value = TRACER if is_tracer else self.value(node.value)
        for target in node.targets:
            self.store(target, value)

    def _AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: N802
        if node.value is not None:
            self.store(node.target, self.value(node.value))

    def _AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        present = self.value(node.target)
        if isinstance(present, Container):
            self.fail(node)  # the statement may extend a list from outside
        self.store(node.target, self.computed(node.op, present, self.value(node.value), node))

    def store(self, target: ast.expr, value: Any) -> None:
        """Assign an abstract value to a target; raise :class:`.Undetermined` if the assignment has an effect outside the block."""
        if isinstance(target, ast.Name):
            if target.id not in self.assignable:
                raise Undetermined(f"the global variable `{target.id}` is assigned {self.at(target)}")
            self.values[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = self.items(value, target)
            parts = [VALUE] * len(target.elts) if items is None else items.items
            if len(parts) != len(target.elts) or any(isinstance(element, ast.Starred) for element in target.elts):
                self.fail(target)
            for element, part in zip(target.elts, parts, strict=True):
                self.store(element, part)
        elif isinstance(target, ast.Subscript):
            container = self.value(target.value)
            if container is not VALUE and not (isinstance(container, Concrete) and isinstance(container.value, torch.Tensor)):
                raise Undetermined(f"an item of an object from outside is assigned {self.at(target)}")
            self.check_operand(self.value(target.slice), target)
            self.check_storable([value], target)
        elif isinstance(target, ast.Attribute):
            self._store_attribute(self.value(target.value), target, value)
        else:
            raise Undetermined(f"the target of an assignment {self.at(target)} is not analysed")

    def _store_attribute(self, owner: Any, target: ast.Attribute, value: Any) -> None:
        is_located = isinstance(owner, Concrete) and isinstance(owner.value, Located)
        kind = type(owner.value) if is_located else Located
        if not (is_located or owner is VALUE) or not isinstance(getattr(kind, target.attr, None), eproperty):
            raise Undetermined(f"the attribute `{target.attr}` is assigned {self.at(target)}")
        if isinstance(owner, Concrete) and self.of_envoy(owner.value, target) is not VALUE:
            self.fail(target)
        self.check_storable([value], target)

    # -- control flow --------------------------------------------------------------------------------------------------

    def _If(self, node: ast.If) -> None:  # noqa: N802
        test = self.value(node.test)
        self.check_operand(test, node)
        truth = truth_of(test)
        if truth is not None:
            self.run(node.body if truth else node.orelse)
            return
        before, ends = dict(self.values), []
        for branch in (node.body, node.orelse):
            self.values, self.live = dict(before), True
            self.run(branch)
            if self.live:
                ends.append(self.values)
        self.live = bool(ends)
        if ends:
            self.values = functools.reduce(_join_variables, ends)

    def _For(self, node: ast.For) -> None:  # noqa: N802
        items = self.iterated(node.iter)
        if items is None:
            raise Undetermined(f"the length of a loop {self.at(node)} is not known")
        for item in items.items:
            if self.live:
                self.store(node.target, item)
                self.run(node.body)
        if self.live:
            self.run(node.orelse)

    def _With(self, node: ast.With) -> None:  # noqa: N802
        for item in node.items:
            call = item.context_expr
            known = self.value(call.func) if isinstance(call, ast.Call) and not (call.args or call.keywords) else None
            switches = (torch.no_grad, torch.enable_grad)
            if item.optional_vars is not None or not (isinstance(known, OutsideObject) and known.value in switches):
                raise Undetermined(f"a context manager {self.at(node)} is neither `torch.no_grad()` nor `torch.enable_grad()`")
            self.findings.add(known.path, "object")
        self.run(node.body)


def _join_variables(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the variables after two paths join. A variable that is assigned on one path only has no abstract value."""
    return {name: join(one.get(name), other.get(name)) for name in {**one, **other}}
