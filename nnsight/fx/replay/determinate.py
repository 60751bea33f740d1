"""Which blocks are determined by what they read, so that their effects can be replayed.

A block may be replayed (:mod:`nnsight.fx.replay.replay`) if its Python does nothing but ask for values of the model, compute with
tensors, and put results into variables and containers of its own. This module proves that by abstract interpretation of the
syntax tree: it computes an abstract value for each variable, through the functions and modules that the block calls. A
statement, a call or an attribute that is not known to be harmless ends the proof, and the block runs each time, as any block may.
Nothing is executed except attribute look-ups on the objects that the block reads from outside.

What a block reads from outside are its *guards* (:mod:`nnsight.fx.replay.guards`), which a replay compares with what they were. A test
of a constant among them says the same in each replay, so only one of its branches counts.

A function of the user's is followed as the block is: its syntax tree, with the abstract values of its arguments. What it reads of its
globals, closure, defaults and the attributes of ``self`` are guards, reached through the function. A module is its ``forward``, if
nothing is put around that; an envoy that is called as a function is its module's.
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
    PLAIN_METACLASSES,
    REACHING_OUT,
    SKIP,
    TRACER,
    VALUE,
    BlockVariables,
    Findings,
    FunctionVariables,
    Held,
    Items,
    Known,
    Method,
    Outside,
    Undetermined,
    either,
    harmless_functions,
    is_known_constant,
    is_method,
    truth_of,
)

#: Most functions that are followed one inside the other.
_DEEPEST = 40

#: Flags of functions whose body does not run when they are called.
_DEFERRED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def guards_of(
    block: Block, tracer: Any, modules: ModuleTree | None, variable: Callable[[str], Any]
) -> tuple[tuple[GuardPath, str], ...]:
    """Return what ``block`` reads from outside, with the kind of comparison that each needs; ``tracer`` is what ``as`` binds.

    Raises:
        Undetermined: If the block may do something that a replay would not repeat.
    """
    findings = Findings(tracer, modules)
    Analysis(findings, BlockVariables(block, variable)).run(block.body)
    for path, _ in findings.guards:
        if path in findings.filled:
            raise Undetermined(f"the list `{path}` is appended to and looked at")
    return (*findings.guards, *((path, "filled") for path in findings.filled))


class Calls(Expressions):
    """Evaluates calls: of functions that only compute, and of functions and modules that are followed."""

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
        if isinstance(called, torch.nn.Module):
            if has_global_hooks() or not is_called_plainly(called):
                raise Undetermined(f"`{function.path}` has hooks, or a call of its own, {self.at(node)}")
            self.findings.add(function.path, "module")
            return self._forward(function, given, named, node)
        return self.fail(node)

    def _computed_by(self, called: Any, given: list[Any], named: dict[str, Any], node: Any) -> Any:
        """Return the abstract value of what a function that only computes returns."""
        first = given[0] if len(given) == 1 and not named else None
        if called is len and isinstance(first, (Held, Items)):
            return Known(len(first.items if isinstance(first, Items) else first.value))
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
        if isinstance(owner, Held) and type(owner.value) is dict and name in ("items", "values", "keys") and not given:
            keys = tuple(map(Known, owner.value))
            if name == "keys":
                return Items(keys)
            values = tuple(self._member(owner, key) for key in owner.value)
            return Items(values if name == "values" else tuple(map(Items, zip(keys, values, strict=True))))
        is_tensor = isinstance(owner, Known) and isinstance(owner.value, torch.Tensor)
        if name == "save" and not given and (owner is VALUE or is_tensor):
            return owner  # in a function; in a block it is a call of something else
        if owner is VALUE or is_tensor or is_known_constant(owner):
            if name in REACHING_OUT or not is_method(name):
                return None
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
        """Follow an envoy that is called as a function: that is the ``forward`` of its module, which has no hooks then."""
        if envoy._tree is not self.findings.modules or type(envoy).__call__ is not Envoy.__call__ or "hook" in named:
            return self.fail(node)
        return self.call(Outside(GuardPath(weakref.ref(envoy._module)), envoy._module), given, named, node)

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


class Analysis(Calls):
    """Follows the statements of a block, or of a function that it calls.

    Attributes:
        live: Whether the next statement can be reached.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.live = True
        self._returned: list[Any] = []

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements one after the other."""
        for statement in statements:
            if not self.live:
                return
            method = getattr(self, f"_{type(statement).__name__}", None)
            if method is None:
                raise Undetermined(f"a `{type(statement).__name__.lower()}` statement {self.at(statement)}")
            method(statement)

    def result(self, body: Sequence[ast.stmt], node: Any) -> Any:
        """Return the abstract value of what the body of a function returns."""
        self.run(body)
        if self.live:
            self._returned.append(Known(None))
        if not self._returned:
            return VALUE  # it raises
        return functools.reduce(either, self._returned) or self.fail(node)

    def _Pass(self, node: ast.stmt) -> None: ...  # noqa: N802 - named after the nodes of ast

    def _Expr(self, node: ast.Expr) -> None:  # noqa: N802
        self.value(node.value)

    def _Return(self, node: ast.Return) -> None:  # noqa: N802
        self._returned.append(Known(None) if node.value is None else self.value(node.value))
        self.live = False

    def _Raise(self, node: ast.Raise) -> None:  # noqa: N802
        self.live = False  # nothing catches it, and a run that ends so is not remembered

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
        if isinstance(present, Held):
            self.fail(node)  # a list from outside would be extended
        self.store(node.target, self.computed(node.op, present, self.value(node.value), node))

    def store(self, target: ast.expr, value: Any) -> None:
        """Assign a value."""
        if isinstance(target, ast.Name):
            if target.id not in self.assignable:
                raise Undetermined(f"`{target.id}` is a global variable, and assigned {self.at(target)}")
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
            if container is not VALUE and not (isinstance(container, Known) and isinstance(container.value, torch.Tensor)):
                raise Undetermined(f"something from outside is changed {self.at(target)}")
            self.check_operand(self.value(target.slice), target)
            self.check_storable([value], target)
        elif isinstance(target, ast.Attribute):
            self._store_attribute(self.value(target.value), target, value)
        else:
            raise Undetermined(f"an assignment {self.at(target)}")

    def _store_attribute(self, owner: Any, target: ast.Attribute, value: Any) -> None:
        is_located = isinstance(owner, Known) and isinstance(owner.value, Located)
        kind = type(owner.value) if is_located else Located
        if not (is_located or owner is VALUE) or not isinstance(getattr(kind, target.attr, None), eproperty):
            raise Undetermined(f"the attribute `{target.attr}` is assigned {self.at(target)}")
        if isinstance(owner, Known) and self.of_envoy(owner.value, target) is not VALUE:
            self.fail(target)
        self.check_storable([value], target)

    # -- where ways part and join ------------------------------------------------------------------------------------

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
            ends += self._ends()
        self._go_on(ends)

    def _For(self, node: ast.For) -> None:  # noqa: N802
        items = self.iterated(node.iter)
        if items is None:
            raise Undetermined(f"a loop of unknown length {self.at(node)}")
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
            if item.optional_vars is not None or not (isinstance(known, Outside) and known.value in switches):
                raise Undetermined(f"a context manager {self.at(node)}")
            self.findings.add(known.path, "object")
        self.run(node.body)

    def _ends(self) -> list[dict[str, Any]]:
        """Return the variables here, if this can be reached."""
        return [self.values] if self.live else []

    def _go_on(self, ends: list[dict[str, Any]]) -> None:
        """Go on where several ways join."""
        self.live = bool(ends)
        if ends:
            self.values = functools.reduce(_joined, ends)


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the variables where two ways join; one that was assigned on a single way may be one thing or another."""
    return {name: either(one.get(name), other.get(name)) for name in {**one, **other}}
