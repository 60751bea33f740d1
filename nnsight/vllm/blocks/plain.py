"""Which loops over steps do nothing but read and edit values of the model, the same at each step.

Only such a loop may go on as a program: its Python is then not run, so it may have no effect beyond the values of the model and the lists
that it appends to. The syntax tree of the body says so, with what its names mean. Every expression has a *kind*, and what is not known to
have no effect is refused: calls of functions that are not torch's, attributes of other objects, edits of tensors from outside.

The kinds are of abstract values; no code of the body is run. A variable has one kind in all of the body, the join of those of its values.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from ...envoy.envoy import Envoy
from ...fx.recording.functions import DEMANDS, RANDOM
from ...runtime.modules.located import Located
from ...tracing import Block
from ...tracing.body import SAVE_NAME
from ...tracing.loops import UNCLEAR, is_fresh, step_loop

#: Kinds: a module or another place of the model, or several; a value made of those of the model; one that may share memory with a tensor
#: from outside; a list or dict from outside; torch or a part of it; a function of torch; a built-in function.
PLACE, VALUE, OWN, ITEMS, TORCH, FUNCTION, BUILTIN = "place value own items torch function builtin".split()

_DATA = frozenset({"input", "inputs", "output", "residual"})
_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "shape", "dtype", "device", "ndim", "is_cuda", "layout"})
_BUILTINS = frozenset({abs, bool, enumerate, float, int, len, max, min, range, reversed, round, slice, sum, tuple, zip})
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size, range, slice, types.EllipsisType)
_LOOKS_AROUND = frozenset({"breakpoint", "dir", "eval", "exec", "globals", "locals", "vars"})

_overridable = torch.overrides.get_overridable_functions()
_METHODS = frozenset(name for name in dir(torch.Tensor) if not name.startswith(("_", "register"))) - DEMANDS - RANDOM - {"map_", "apply_"}
_FUNCTIONS = {function for found in _overridable.values() for function in found} | {
    torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.tensor, torch.linspace,
}  # fmt: skip

#: Ends of names of functions that may edit what they are given.
_REMEMBERING = ("batch_norm", "instance_norm")


class NotPlainError(Exception):
    """Says why a block has to run as Python."""


class Loop(NamedTuple):
    """A loop over steps that only reads and edits values.

    Attributes:
        body: Its statements.
        stored: The names that it assigns, its number included.
        used: What the body finds outside, by name.
        lists: The names of the lists that it appends to.
    """

    body: list[ast.stmt]
    stored: set[str]
    used: dict[str, Any]
    lists: set[str]


def loop_of(block: Block, lookup: Callable[[str], Any]) -> Loop:
    """Return the loop of ``block`` over steps; ``lookup`` returns the value of a variable, or raises ``KeyError``.

    Raises:
        NotPlainError: If the loop may do something else than read and edit values, or not the same at each step.
    """
    found = [(statement, loop) for statement in block.body if (loop := step_loop([statement])) is not None]
    if len(found) != 1:
        raise NotPlainError("it has several loops over steps" if found else "it is no loop over `tracer.iter[...]`")
    statement, loop = found[0]
    nodes = [node for part in loop.body for node in ast.walk(part)]
    if not isinstance(statement, ast.For) or any(isinstance(node, UNCLEAR) for node in nodes):
        raise NotPlainError("the loop has statements that are not followed")
    if any(isinstance(node, ast.Name) and node.id == SAVE_NAME for node in nodes):
        raise NotPlainError("the loop saves a value in each step: append it to a list that was saved before")
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    loaded = {node.id for node in nodes if isinstance(node, ast.Name)} - stored
    steps = {node.id for node in ast.walk(loop.steps) if isinstance(node, ast.Name)} | loop.number
    if loaded & steps:
        raise NotPlainError(f"the loop uses `{min(loaded & steps)}`")
    if not is_fresh(loop.body, stored, set()):
        raise NotPlainError("a variable of the loop carries a value from one step to the next")
    rest = [node for part in block.body if part is not statement for node in ast.walk(part)]
    seen = {node.id for node in rest if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)} & (stored | loop.number)
    if seen or block.looked_up & _LOOKS_AROUND:
        raise NotPlainError(f"`{min(seen or block.looked_up & _LOOKS_AROUND)}` is used outside of the loop, too")
    check = _Kinds(lookup)
    for _ in range(2):  # the second time, each variable has the kinds of all its values
        check.run(loop.body)
    return Loop(loop.body, stored | loop.number, check.used, check.lists)


def check_apart(loop: Loop, parameters: Collection[str], block: Block, others: Collection[Block]) -> None:
    """Raise :class:`NotPlainError` if blocks of ``others``, the other requests of a trace, may see the variables of a loop, or change them.

    They may have the same block: with variables of its own, but for those that none assigns. Edits of ``parameters`` in place are noticed.
    """
    different = {other for other in others if other is not block}
    for name in loop.stored:
        if any(_sees(other, name) for other in different):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")
    for name, value in loop.used.items():
        mutable = isinstance(value, (torch.Tensor, list, dict)) and name not in parameters
        shared = any(_sees(other, name) if mutable else name in other.stored for other in different)
        if shared or (name in loop.lists - block.stored and block in others):
            raise NotPlainError(f"other requests of the trace use `{name}`, too")


def _sees(block: Block, name: str) -> bool:
    """Whether a block may use what another one has bound to ``name``."""
    return name in (*block.shared, *block.looked_up) and not (name in block.stored and is_fresh(block.body, {name}, set()))


class _Kinds:
    """The kinds of the variables of a body; ``used`` are those from outside, and ``lists`` those that it appends to."""

    def __init__(self, lookup: Callable[[str], Any]) -> None:
        self._lookup = lookup
        self._kinds: dict[str, Any] = {}
        self.used: dict[str, Any] = {}
        self.lists: set[str] = set()

    # -- statements ----------------------------------------------------------------------------------------------------

    def run(self, statements: Iterable[ast.stmt]) -> None:
        """Take over the kinds that statements give to variables."""
        for statement in statements:
            match statement:
                case ast.Assign():
                    kind = self.kind(statement.value)
                    for target in statement.targets:
                        self._bind(target, kind)
                case ast.AugAssign(target=target):
                    load: Any = ast.parse(ast.unparse(target), mode="eval").body
                    self._own(load, self.kind(load), statement)
                    self._value(statement.value)
                    if not isinstance(target, ast.Name):
                        self._bind(target, VALUE)
                case ast.If():
                    self._value(statement.test)
                    self.run([*statement.body, *statement.orelse])
                case ast.For():
                    self._bind(statement.target, self._item_of(statement.iter))
                    self.run([*statement.body, *statement.orelse])
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[item], keywords=[])) if (
                    name not in self._kinds and type(self._outside(name, statement)) is list
                ):
                    self.lists.add(name)
                    self._value(item)
                case ast.Expr():
                    self.kind(statement.value)
                case ast.Pass():
                    pass
                case _:
                    raise _refused(statement, "has a statement that is not followed")

    def _bind(self, target: ast.expr, kind: Any) -> None:
        match target:
            case ast.Name(id=name):
                known = self._kinds.get(name, kind)
                if known != kind and {known, kind} != {VALUE, OWN}:
                    raise _refused(target, f"gives `{name}` values of different kinds")
                self._kinds[name] = kind if known == kind else OWN
            case ast.Tuple(elts=targets):
                kinds = kind if isinstance(kind, tuple) else (kind,) * len(targets)
                for each, its in zip(targets, kinds, strict=False):
                    self._bind(each, its)
            case ast.Subscript(value=base):
                self._own(target, self.kind(base), target)
                self._value(target.slice)
            case ast.Attribute(value=base, attr=name) if name in _DATA and self.kind(base) == PLACE and kind in (VALUE, OWN):
                pass
            case _:
                raise _refused(target, "assigns something else than values of the model")

    def _own(self, edited: ast.expr, kind: Any, where: ast.AST) -> None:
        """Refuse an edit in place of what is not known to be of the model."""
        if kind != VALUE:
            raise _refused(where, f"edits `{ast.unparse(edited)}`, which is not known to be a value of the model, in place")

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> str:
        """Return the kind of an expression that is a value."""
        kind = self.kind(node)
        if kind not in (VALUE, OWN):
            raise _refused(node, f"uses `{ast.unparse(node)}` as a value")
        return kind

    def _joined(self, nodes: Iterable[ast.expr | None]) -> str:
        """Return the kind of what is made of values: from outside if all of them are."""
        kinds = [self._value(node) for node in nodes if node is not None]
        return VALUE if VALUE in kinds else OWN

    def _item_of(self, node: ast.expr) -> Any:
        """Return the kind of the items of what is iterated over."""
        kind = self.kind(node)
        return kind[0] if isinstance(kind, list) else OWN if kind == ITEMS else kind

    def kind(self, node: ast.expr) -> Any:
        """Return the kind of an expression; a list of one for what has items of this kind, and a tuple for one of several."""
        match node:
            case ast.Constant():
                return OWN
            case ast.Name(id=name):
                return self._kinds[name] if name in self._kinds else self._kind_of(name, self._outside(name, node), node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript(value=base, slice=index):
                self._value(index)
                kind = self.kind(base)
                if kind not in (PLACE, VALUE, OWN, ITEMS):
                    raise _refused(node, f"has an index of `{ast.unparse(base)}`")
                return OWN if kind == ITEMS else kind
            case ast.Slice():
                return self._joined([node.lower, node.upper, node.step])
            case ast.Tuple() | ast.List():
                return self._joined(node.elts)
            case ast.Dict():
                return self._joined([*node.keys, *node.values])
            case ast.BinOp():
                return self._joined([node.left, node.right])
            case ast.UnaryOp() | ast.Starred():
                return self._value(node.operand if isinstance(node, ast.UnaryOp) else node.value)
            case ast.Compare():
                return self._joined([node.left, *node.comparators])
            case ast.BoolOp():
                return OWN if OWN in [self._value(value) for value in node.values] else VALUE
            case ast.IfExp():
                kinds = {self._value(node.body), self._value(node.orelse), self._value(node.test)}
                return OWN if OWN in kinds else VALUE
            case ast.ListComp() | ast.GeneratorExp():
                for part in node.generators:
                    self._bind(part.target, self._item_of(part.iter))
                    for test in part.ifs:
                        self._value(test)
                return self._value(node.elt)
            case ast.Call():
                return self._call(node)
        raise _refused(node, f"has `{ast.unparse(node)}`, which is not followed")

    def _attribute(self, node: ast.Attribute) -> Any:
        base, name = node.value, node.attr
        kind = self.kind(base)
        if kind == PLACE and name in _DATA:
            return VALUE
        if kind == PLACE and not name.startswith("_") and (name in ("logits", "samples") or not hasattr(Envoy, name)):
            return PLACE
        if kind in (VALUE, OWN) and name in _ATTRIBUTES:
            return kind
        if kind == TORCH:
            return self._kind_of(ast.unparse(node), self._object(node), node)
        raise _refused(node, f"has `{ast.unparse(node)}`, which is not followed")

    def _object(self, node: Any) -> Any:
        """Return torch, or a part of it, that an expression names."""
        return self._outside(node.id, node) if isinstance(node, ast.Name) else getattr(self._object(node.value), node.attr, None)

    def _call(self, node: ast.Call) -> Any:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute) and (kind := self.kind(node.func.value)) in (VALUE, OWN):
            name = node.func.attr
            if name not in _METHODS:
                why = " needs a value" if name in DEMANDS else " draws" if name in RANDOM else ", which is not followed"
                raise _refused(node, f"has `{name}`{why}" if name in DEMANDS | RANDOM else f"calls `{name}`{why}")
            if name.endswith("_"):
                self._own(node.func.value, kind, node)
            return self._joined([node.func.value, *given])
        kind = self.kind(node.func)
        if kind == FUNCTION and not any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
            function = self._object(node.func)
            if function.__name__.endswith("_") and given:
                self._own(given[0], self.kind(given[0]), node)
            if self._joined(given) == OWN and not isinstance(function, types.BuiltinFunctionType):  # it may edit what it is given
                raise _refused(node, f"calls `{ast.unparse(node.func)}` without a value of the model")
            return self._joined(given)
        if kind == BUILTIN and {keyword.arg for keyword in node.keywords} <= {"strict", "start"}:
            name = self._object(node.func).__name__
            kinds = [self._item_of(item) for item in node.args]
            if name in ("enumerate", "zip"):
                return [tuple([OWN, *kinds[:1]] if name == "enumerate" else kinds)]
            if name in ("reversed", "tuple"):
                return kinds[:1]
            return OWN if name in ("len", "range") else self._joined(given)
        raise _refused(node, f"calls `{ast.unparse(node.func)}`, which may have effects that are not followed")

    # -- names from outside --------------------------------------------------------------------------------------------

    def _outside(self, name: str, node: ast.AST) -> Any:
        if name not in self.used:
            try:
                self.used[name] = self._lookup(name)
            except KeyError:
                if not hasattr(builtins, name):
                    raise _refused(node, f"uses `{name}`, which has no value") from None
                self.used[name] = getattr(builtins, name)
        return self.used[name]

    def _kind_of(self, name: str, value: Any, node: ast.AST) -> str:
        """Return the kind of a value from outside."""
        if isinstance(value, (Envoy, Located)):
            return PLACE
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == "torch":
            return TORCH
        if _is_own(value):
            return OWN
        if type(value) in (list, tuple, dict):
            items = list(value.values()) if type(value) is dict else value
            if all(map(_is_own, items)):
                return ITEMS
            if all(isinstance(item, Envoy) for item in items):
                return PLACE
        try:
            if value in _BUILTINS:
                return BUILTIN
            if value in _FUNCTIONS and value.__name__ not in RANDOM | DEMANDS and not value.__name__.endswith(_REMEMBERING):
                return FUNCTION
        except Exception:  # an object that cannot be looked up
            pass
        raise _refused(node, f"uses `{name}`, a {type(value).__name__}, which is not followed")



def _refused(node: ast.AST, why: str) -> NotPlainError:
    return NotPlainError(f"line {getattr(node, 'lineno', '?')} {why}")


def _is_own(value: Any) -> bool:
    """Whether it is a number, or the like, or a tensor whose edits can be noticed."""
    return type(value) in PLAIN or (type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_inference())
