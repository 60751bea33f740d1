"""Which blocks are determined by what they read: their effects can be had again without running them.

A block may be replayed (:mod:`nnsight.fx.replay.replay`) if its Python does nothing but ask for values of the model, compute with
tensors, and put results into variables and containers of its own. This module finds that out from the syntax tree, by
following what kind of thing each variable is, through the functions and modules that it calls, too. It is a proof by cases: a
statement, a call or an attribute that is not known to be harmless ends it, and the block runs each time, as any block may.
Nothing is executed except attribute look-ups on the objects that the block reads from outside.

What a block reads from outside are its *roots* (:mod:`nnsight.fx.replay.guards`), which a replay compares with what they were. A test of a
constant among them says the same in each replay, so only one of its branches counts.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...runtime.modules.located import Located
from ...runtime.probing import Modules
from ...tracing.block import TRACER_NAME, Block
from .abstract_values import (
    OWN,
    PLAIN_METACLASSES,
    SOME,
    TRACER,
    VALUE,
    Each,
    Items,
    Known,
    RootOf,
    Row,
    Undetermined,
    are_alike,
    either,
    truth_of,
)
from .callees import Calls
from .guards import LONGEST, Root
from .variables import BlockVariables, Findings

#: Exceptions that a block may raise where it catches them.
_BUILT_IN_ERRORS = tuple(
    found for found in vars(builtins).values() if isinstance(found, type) and issubclass(found, BaseException)
)

#: How often a loop is followed until the kinds of its variables stay the same.
_ROUNDS = 20


def roots_of(
    block: Block, tracer: Any, modules: Modules | None, variable: Callable[[str], Any]
) -> tuple[tuple[Root, str], ...]:
    """Return what ``block`` reads from outside, with the kind of comparison that each needs.

    Args:
        block: The block.
        tracer: What ``as`` binds.
        modules: The modules of the traced model.
        variable: Returns what a name stands for before the block begins; raises ``KeyError`` for names without a value.

    Raises:
        Undetermined: If the block may do something that a replay would not repeat.
    """
    findings = Findings(tracer, modules)
    Analysis(findings, BlockVariables(block, variable)).run(block.body)
    for root, _ in findings.roots:
        if root in findings.filled:
            raise Undetermined(f"the list `{root}` is appended to and looked at")
    return (*findings.roots, *((root, "filled") for root in findings.filled))


def _takes_apart(target: ast.expr) -> bool:
    """Whether an assignment to ``target`` is one to each of several."""
    return isinstance(target, (ast.Tuple, ast.List)) and not _has_star(target)


def _has_star(node: ast.Tuple | ast.List) -> bool:
    return any(isinstance(element, ast.Starred) for element in node.elts)


class _Loop(NamedTuple):
    """The kinds of the variables where a loop is left, and where its next round begins, as far as statements do that."""

    left: list[dict[str, Any]]
    next: list[dict[str, Any]]


class Analysis(Calls):
    """Follows the statements of a block, or of a function that it calls.

    Attributes:
        live: Whether the next statement can be reached.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.live = True
        self._loops: list[_Loop] = []
        self._returned: list[Any] = []
        self._stores: list[list[tuple[str, Any]]] = []  # what is assigned in the `try` statements around

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements one after the other."""
        for statement in statements:
            if not self.live:
                return
            method = getattr(self, f"_{type(statement).__name__}", None)
            if method is None:
                raise Undetermined(f"a `{type(statement).__name__.lower()}` statement {self.at(statement)}")
            self.findings.left -= 1
            if self.findings.left < 0:
                raise Undetermined(f"there is too much to look through, {self.at(statement)}")
            method(statement)

    def result(self, body: Sequence[ast.stmt], node: Any) -> Any:
        """Return the kind of what the body of a function returns."""
        self.run(body)
        if self.live:
            self._returned.append(Known(None))
        if not self._returned:
            return VALUE  # it raises
        return functools.reduce(either, self._returned) or self.fail(node)

    def _Pass(self, node: ast.stmt) -> None: ...  # noqa: N802 - named after the nodes of ast

    def _Expr(self, node: ast.Expr) -> None:  # noqa: N802
        self.kind(node.value)

    def _Return(self, node: ast.Return) -> None:  # noqa: N802
        self._returned.append(Known(None) if node.value is None else self.kind(node.value))
        self.live = False

    def _Raise(self, node: ast.Raise) -> None:  # noqa: N802
        if self.findings.tried and node.exc is not None:
            self._check_raised(node.exc)
        self.live = False  # a run that ends so is not remembered

    def _check_raised(self, node: ast.expr) -> None:
        """Check that making an exception, which is going to be caught, does nothing else."""
        call = node if isinstance(node, ast.Call) else None
        if call is not None and not call.keywords:
            self.check_storable(map(self.kind, call.args), node)
        found = self.kind(node if call is None else call.func)
        if not isinstance(found, RootOf) or found.value not in _BUILT_IN_ERRORS or (call is not None and call.keywords):
            self.fail(node)
        self.findings.add(found.root, "object")

    def _Assert(self, node: ast.Assert) -> None:  # noqa: N802
        test = self.kind(node.test)
        self.check_operand(test, node)
        if self.findings.tried and node.msg is not None:
            self.check_operand(self.kind(node.msg), node)
        self.live = truth_of(test) is not False

    def _Break(self, node: ast.Break) -> None:  # noqa: N802
        self._loops[-1].left.append(self.kinds)
        self.live = False

    def _Continue(self, node: ast.Continue) -> None:  # noqa: N802
        self._loops[-1].next.append(self.kinds)
        self.live = False

    # -- assignments -------------------------------------------------------------------------------------------------

    def _Assign(self, node: ast.Assign) -> None:  # noqa: N802
        if isinstance(node.value, ast.Name) and node.value.id == TRACER_NAME:
            kind: Any = TRACER
        elif isinstance(node.value, ast.Tuple) and all(map(_takes_apart, node.targets)) and not _has_star(node.value):
            kind = Row(tuple(map(self.kind, node.value.elts)))
        else:
            kind = self.kind(node.value)
        for target in node.targets:
            self.store(target, kind)

    def _AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: N802
        if node.value is not None:
            self.store(node.target, self.kind(node.value))

    def _AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        kind = self.kind(node.value)
        self.check_operand(kind, node)
        target = node.target
        if isinstance(target, ast.Name):
            present = self.kind(ast.copy_location(ast.Name(target.id, ast.Load()), target))
            if present is OWN:
                return  # a container of the block's own is extended
            if isinstance(present, Items):
                self.fail(node)
            self.store(target, self.computed(node.op, present, kind, node))
            return
        if isinstance(target, ast.Subscript):
            present = ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
            self.check_operand(self.kind(present), node)
        else:
            present = ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
            self.check_operand(self.kind(present), node)
        self.store(target, VALUE)

    def store(self, target: ast.expr, kind: Any) -> None:
        """Assign a value of some kind."""
        if isinstance(target, ast.Name):
            if target.id not in self.assignable:
                raise Undetermined(f"`{target.id}` is a global variable, and assigned {self.at(target)}")
            self.kinds[target.id] = kind
            for stores in self._stores:
                stores.append((target.id, kind))
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(kind, Row):
            if len(target.elts) != len(kind.value) or any(isinstance(element, ast.Starred) for element in target.elts):
                self.fail(target)
            for element, part in zip(target.elts, kind.value, strict=True):
                self.store(element, part)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self.store(element, self.items(kind, target))
        elif isinstance(target, ast.Starred):
            self.store(target.value, OWN)
        elif isinstance(target, ast.Subscript):
            container = self.kind(target.value)
            is_tensor = isinstance(container, Known) and isinstance(container.value, torch.Tensor)
            if not (container is OWN or container is VALUE or is_tensor):
                raise Undetermined(f"something from outside is changed {self.at(target)}")
            self.check_operand(self.kind(target.slice), target)
            self.check_storable([kind], target)
        elif isinstance(target, ast.Attribute):
            self._store_attribute(self.kind(target.value), target, kind)
        else:
            raise Undetermined(f"an assignment {self.at(target)}")

    def _store_attribute(self, owner: Any, target: ast.Attribute, kind: Any) -> None:
        located = owner is SOME or owner is VALUE or (isinstance(owner, Known) and isinstance(owner.value, Located))
        if not located or target.attr not in ("output", "input", "inputs"):
            raise Undetermined(f"the attribute `{target.attr}` is assigned {self.at(target)}")
        if isinstance(owner, Known) and self.of_envoy(owner.value, target) is not VALUE:
            self.fail(target)
        self.check_storable([kind], target)

    # -- where ways part and join ------------------------------------------------------------------------------------

    def _If(self, node: ast.If) -> None:  # noqa: N802
        test = self.kind(node.test)
        self.check_operand(test, node)
        truth = truth_of(test)
        if truth is not None:
            self.run(node.body if truth else node.orelse)
            return
        before, ends = dict(self.kinds), []
        for branch in (node.body, node.orelse):
            self.kinds, self.live = dict(before), True
            self.run(branch)
            ends += self._ends()
        self._go_on(ends)

    def _For(self, node: ast.For) -> None:  # noqa: N802
        before, loops, returned = dict(self.kinds), list(self._loops), list(self._returned)
        stores, tried = list(self._stores), self.findings.tried

        def follow(items: Any) -> None:
            self.kinds, self.live, self._loops, self._returned = dict(before), True, list(loops), list(returned)
            self._stores, self.findings.tried = list(stores), tried
            self._loop(node, items)

        self.gone_over(node.iter, follow)

    def _loop(self, node: ast.For, items: Any) -> None:
        loop = _Loop([], [])
        self._loops.append(loop)
        if isinstance(items, Each):
            for item in items.value:
                if not self.live:
                    break
                if not items.is_exact:
                    loop.left.append(dict(self.kinds))
                self._round_of(node, item, loop)
        else:
            self._repeat(node, lambda: self._round_of(node, items, loop))
        self._loops.pop()
        if self.live:
            self.run(node.orelse)
        self._go_on([*self._ends(), *loop.left])

    def _repeat(self, node: ast.stmt, follow: Callable[[], None]) -> None:
        """Follow a loop of any length, until the kinds that a round begins with are those that it may leave."""
        for _ in range(_ROUNDS):
            before = dict(self.kinds)
            follow()
            self._go_on([before, *self._ends()])
            if before.keys() == self.kinds.keys() and all(are_alike(kind, self.kinds[name]) for name, kind in before.items()):
                return
        raise Undetermined(f"a loop {self.at(node)}")

    def _round_of(self, node: ast.For, item: Any, loop: _Loop) -> None:
        self.store(node.target, item)
        self._round(node.body, loop)

    def _round(self, body: Sequence[ast.stmt], loop: _Loop) -> None:
        self.run(body)
        self._go_on([*self._ends(), *loop.next])
        loop.next.clear()

    def _While(self, node: ast.While) -> None:  # noqa: N802
        loop = _Loop([], [])
        self._loops.append(loop)
        for _ in range(LONGEST):  # as long as constants say that it goes on
            if not self.live or self._test(node) is not True:
                break
            self._round(node.body, loop)
        if self.live and self._test(node) is not False:
            self._repeat(node, lambda: self._round(node.body, loop))
            self.live = self._test(node) is not True
        self._loops.pop()
        if self.live:
            self.run(node.orelse)
        self._go_on([*self._ends(), *loop.left])

    def _test(self, node: ast.While) -> bool | None:
        """Return what the test of a loop says at this point, if that is the same in each replay."""
        test = self.kind(node.test)
        self.check_operand(test, node)
        return truth_of(test)

    def _Try(self, node: ast.Try) -> None:  # noqa: N802
        parts = [*node.body, *node.orelse, *(statement for handler in node.handlers for statement in handler.body)]
        leaves = (ast.Return, ast.Break, ast.Continue)
        if node.finalbody and any(isinstance(part, leaves) for statement in parts for part in ast.walk(statement)):
            raise Undetermined(f"a `finally` in the way {self.at(node)}")
        before = dict(self.kinds)
        stores: list[tuple[str, Any]] = []
        self._stores.append(stores)
        self.findings.tried += 1
        self.run(node.body)
        self.findings.tried -= 1
        caught = self._after_any(before, stores)
        if self.live:
            self.run(node.orelse)
        ends = self._ends()
        for handler in node.handlers:
            self.kinds, self.live = dict(caught), True
            self._check_caught(handler)
            self.run(handler.body)
            ends += self._ends()
        self._stores.pop()
        if node.finalbody:
            goes_on = bool(ends)
            self.kinds, self.live = self._after_any(before, stores), True
            self.run(node.finalbody)
            self.live = self.live and goes_on
        else:
            self._go_on(ends)

    def _after_any(self, before: dict[str, Any], stores: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the kinds of the variables after any number of these assignments."""
        return functools.reduce(self._joined, [before, *({**before, name: kind} for name, kind in stores)])

    def _check_caught(self, handler: ast.ExceptHandler) -> None:
        """Check that it runs no code to see whether an exception is caught here; nothing may be done with the exception."""
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type] if handler.type else []
        for kind in map(self.kind, kinds):
            if not isinstance(kind, RootOf) or type(kind.value) not in PLAIN_METACLASSES:
                raise Undetermined(f"what is caught {self.at(handler)}")
            self.findings.add(kind.root, "object")
        if handler.name is not None:
            self.store(ast.copy_location(ast.Name(handler.name, ast.Store()), handler), None)

    def _With(self, node: ast.With) -> None:  # noqa: N802
        for item in node.items:
            call = item.context_expr
            known = self.kind(call.func) if isinstance(call, ast.Call) and not (call.args or call.keywords) else None
            switches = (torch.no_grad, torch.enable_grad)
            if item.optional_vars is not None or not (isinstance(known, RootOf) and known.value in switches):
                raise Undetermined(f"a context manager {self.at(node)}")
            self.findings.add(known.root, "object")
        self.run(node.body)

    def _ends(self) -> list[dict[str, Any]]:
        """Return the kinds of the variables here, if this can be reached."""
        return [self.kinds] if self.live else []

    def _go_on(self, ends: list[dict[str, Any]]) -> None:
        """Go on where several ways join, each with kinds of the variables."""
        self.live = bool(ends)
        if ends:
            self.kinds = functools.reduce(self._joined, ends)

    def _joined(self, mine: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for name in (*mine, *(name for name in others if name not in mine)):
            kind, other = mine.get(name), others.get(name)
            if name not in mine or name not in others:
                # In one of the ways the variable is what it was before the block, or unbound.
                try:
                    outside = self.outside(name)
                except KeyError:
                    outside = kind if name in mine else other  # used unbound, it is an error of the block
                kind, other = (kind, outside) if name in mine else (outside, other)
            joined[name] = either(kind, other)
        return joined
