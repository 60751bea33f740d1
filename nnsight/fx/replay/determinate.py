"""Which blocks are determined by what they read, so that their effects can be replayed.

A block may be replayed (:mod:`nnsight.fx.replay.replay`) if its Python does nothing but ask for values of the model, compute with
tensors, and put results into variables and containers of its own. This module proves that by abstract interpretation of the
syntax tree: it computes an abstract value for each variable, through the functions and modules that the block calls. A
statement, a call or an attribute that is not known to be harmless ends the proof, and the block runs each time, as any block may.
Nothing is executed except attribute look-ups on the objects that the block reads from outside.

What a block reads from outside are its *guards* (:mod:`nnsight.fx.replay.guards`), which a replay compares with what they were. A test
of a constant among them says the same in each replay, so only one of its branches counts.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...runtime.modules.located import Located
from ...runtime.modules.tree import ModuleTree
from ...tracing.block import TRACER_NAME, Block
from .abstract_values import TRACER, VALUE, Held, Known, Outside, Undetermined, are_alike, either, truth_of
from .callees import Calls
from .guards import GuardPath
from .names import BlockVariables, Findings

#: How often a loop of unknown length is followed until the abstract values of its variables stay the same.
_ROUNDS = 5


def guards_of(
    block: Block, tracer: Any, modules: ModuleTree | None, variable: Callable[[str], Any]
) -> tuple[tuple[GuardPath, str], ...]:
    """Return what ``block`` reads from outside, with the kind of comparison that each needs.

    Args:
        block: The block.
        tracer: What ``as`` binds.
        modules: The modules of the traced model.
        variable: See :class:`~.names.BlockVariables`.

    Raises:
        Undetermined: If the block may do something that a replay would not repeat.
    """
    findings = Findings(tracer, modules)
    Analysis(findings, BlockVariables(block, variable)).run(block.body)
    for path, _ in findings.guards:
        if path in findings.filled:
            raise Undetermined(f"the list `{path}` is appended to and looked at")
    return (*findings.guards, *((path, "filled") for path in findings.filled))


class _Loop(NamedTuple):
    """The variables where `break` leaves a loop, and where `continue` begins its next round."""

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

    def _Assert(self, node: ast.Assert) -> None:  # noqa: N802
        test = self.value(node.test)
        self.check_operand(test, node)
        self.live = truth_of(test) is not False

    def _Break(self, node: ast.Break) -> None:  # noqa: N802
        self._loops[-1].left.append(self.values)
        self.live = False

    def _Continue(self, node: ast.Continue) -> None:  # noqa: N802
        self._loops[-1].next.append(self.values)
        self.live = False

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
        is_located = owner is VALUE or (isinstance(owner, Known) and isinstance(owner.value, Located))
        if not is_located or target.attr not in ("output", "input", "inputs"):
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
        loop = _Loop([], [])
        self._loops.append(loop)
        if items is None:
            self._repeat(node, loop)
        else:
            for item in items.items:
                if self.live:
                    self._round(node, item, loop)
        self._loops.pop()
        if self.live:
            self.run(node.orelse)
        self._go_on([*self._ends(), *loop.left])

    def _repeat(self, node: ast.For, loop: _Loop) -> None:
        """Follow a loop of any length, until the values that a round begins with are those that it may leave."""
        for _ in range(_ROUNDS):
            before = dict(self.values)
            self._round(node, VALUE, loop)
            self._go_on([before, *self._ends()])
            if before.keys() == self.values.keys() and all(are_alike(value, self.values[name]) for name, value in before.items()):
                return
        raise Undetermined(f"a loop {self.at(node)}")

    def _round(self, node: ast.For, item: Any, loop: _Loop) -> None:
        self.store(node.target, item)
        self.run(node.body)
        self._go_on([*self._ends(), *loop.next])
        loop.next.clear()

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
