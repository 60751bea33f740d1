"""Which blocks are determined by what they read: their effects can be had again without running them.

A block may be replayed (:mod:`nnsight.fx.replay`) if its Python does nothing but ask for values of the model, compute with
tensors, and put results into variables and containers of its own. This module finds that out from the syntax tree, by
following what kind of thing each expression is. It is a proof by cases: a statement, a call or an attribute that is not
known to be harmless ends it, and the block runs each time, as any block may. Nothing is executed except attribute
look-ups on the objects that the block reads from outside.

What a block reads from outside are its *roots* (:mod:`nnsight.fx.roots`), which a replay compares with what they were.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..eproperty import eproperty
from ..located import Located
from ..source import Source
from ..tracing.block import SCOPE_NAME, TRACER_NAME, Block
from ..tracing.body import RESULT_NAME, SAVE_NAME
from ..tracing.saving import save
from .roots import Root, is_constant, kind_of, look_up

#: Built-ins that compute a value from their arguments and do nothing else.
_HARMLESS_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        "abs all any bool complex dict divmod enumerate float frozenset int isinstance len list max min pow range "
        "reversed round set slice sorted str sum tuple zip"
    ).split()
)

_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye from_numpy full full_like linspace logspace normal ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm tensor zeros zeros_like complex polar"
).split()

#: Methods of containers by which a block fills one of its own.
_FILLING = frozenset("append extend insert update setdefault add".split())

#: Methods of containers that only look.
_LOOKING = frozenset("items keys values get index count copy".split())

#: Methods of tensors whose effect is not in the tensors alone.
_REACHING_OUT = frozenset("backward register_hook register_post_accumulate_grad_hook share_memory_ retain_grad save".split())


class Undetermined(Exception):
    """The block cannot be shown to be determined by what it reads; the message says why."""


class _Own:
    """A container that the block made itself."""


class _Value:
    """A tensor, a number, or a nest of them that belongs to the model: whatever is done to it is seen by the recording."""


class _Some:
    """An envoy, or an operation of one, that is chosen at run time."""


_OWN, _VALUE, _SOME = _Own(), _Value(), _Some()


class _Known(NamedTuple):
    """An object from outside that is the same in each replay."""

    value: Any


class _Items(NamedTuple):
    """A container from outside, with the kinds of its items."""

    value: Any


class _Envoys(NamedTuple):
    """A list or tuple of envoys from outside."""

    value: Any


_TRACER = object()


def roots_of(block: Block, tracer: Any, variable: Callable[[str], Any]) -> dict[Root, str]:
    """Return what ``block`` reads from outside, with the kind of comparison that each needs.

    Args:
        block: The block.
        tracer: What ``as`` binds.
        variable: Returns what a name stands for before the block begins; raises ``KeyError`` for names without a value.

    Raises:
        Undetermined: If the block may do something that a replay would not repeat.
    """
    analysis = _Analysis(block, tracer, variable)
    analysis.run(list(block.body))
    for root in analysis.filled:
        if root in analysis.roots:
            raise Undetermined(f"the list `{root}` is appended to and looked at")
    return analysis.roots | dict.fromkeys(analysis.filled, "filled")


@functools.cache
def _harmless_functions() -> frozenset[int]:
    """Identities of the functions that only compute: torch's that take tensors, those that make some, and some of Python's."""
    found: set[int] = {id(getattr(torch, name)) for name in _FACTORIES}
    for functions in torch.overrides.get_overridable_functions().values():
        found.update(id(function) for function in functions if getattr(function, "__name__", "") not in _REACHING_OUT)
    found.update(id(value) for name, value in vars(math).items() if callable(value) and not name.startswith("_"))
    found.update(id(function) for function in _HARMLESS_BUILTINS)
    found.update(id(value) for value in (torch.Size, torch.device, save))
    return frozenset(found)


class _Analysis:
    """Follows the kinds of values through one block.

    ``kinds`` has the kind of each variable that the block has assigned so far. Where ways join that left a variable with
    different kinds, it has none, and using it ends the proof.
    """

    def __init__(self, block: Block, tracer: Any, variable: Callable[[str], Any]) -> None:
        self.assignable = set(block.shared)
        self.tracer = tracer
        self.variable = variable
        self.roots: dict[Root, str] = {}
        self.filled: set[Root] = set()
        self.kinds: dict[str, Any] = {}

    # -- statements ------------------------------------------------------------------------------------------------

    def run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            method = getattr(self, f"_{type(statement).__name__}", None)
            if method is None:
                raise Undetermined(f"a `{type(statement).__name__.lower()}` statement in line {statement.lineno}")
            method(statement)

    def _Pass(self, node: ast.stmt) -> None: ...  # noqa: N802 - named after the nodes of ast

    _Break = _Continue = _Pass

    def _Expr(self, node: ast.Expr) -> None:  # noqa: N802
        self.kind(node.value)

    def _Assign(self, node: ast.Assign) -> None:  # noqa: N802
        if isinstance(node.value, ast.Name) and node.value.id == TRACER_NAME:
            kind: Any = _TRACER
        else:
            kind = self.kind(node.value)
        for target in node.targets:
            self._store(target, kind)

    def _AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        kind = self.kind(node.value)
        self._operand(kind, node)
        target = node.target
        if isinstance(target, ast.Name):
            present = self.kind(ast.copy_location(ast.Name(target.id, ast.Load()), target))
            if present is _OWN:
                return  # a container of the block's own is extended
            if isinstance(present, _Items):
                self._fail(node)
            self._operand(present, node)
            self._store(target, _VALUE)
        elif isinstance(target, ast.Subscript):
            self._operand(self.kind(ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)), node)
            self._store(target, _VALUE)
        else:
            self._operand(self.kind(ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)), node)
            self._store(target, _VALUE)

    def _If(self, node: ast.If) -> None:  # noqa: N802
        self._operand(self.kind(node.test), node)
        before = dict(self.kinds)
        self.run(node.body)
        after, self.kinds = self.kinds, before
        self.run(node.orelse)
        self._join(after)

    def _For(self, node: ast.For) -> None:  # noqa: N802
        items = self._iterated(node.iter)
        for _ in range(3):  # the kinds that a round leaves are those the next one begins with
            before = dict(self.kinds)
            self._store(node.target, items)
            self.run(node.body)
            self._join(before)
        self.run(node.orelse)

    def _With(self, node: ast.With) -> None:  # noqa: N802
        for item in node.items:
            call = item.context_expr
            known = self.kind(call.func) if isinstance(call, ast.Call) and not (call.args or call.keywords) else None
            switches = (torch.no_grad, torch.enable_grad)
            if item.optional_vars is not None or not (isinstance(known, _RootOf) and known.value in switches):
                raise Undetermined(f"a context manager in line {node.lineno}")
            self.roots[known.root] = "object"
        self.run(node.body)

    def _join(self, other: dict[str, Any]) -> None:
        for name in self.kinds.keys() | other.keys():
            kind, others = self.kinds.get(name), other.get(name)
            if name not in self.kinds or name not in other:
                # In one of the ways the variable is what it was before the block, or unbound.
                try:
                    outside = self._outside(name)
                except KeyError:
                    outside = kind if name in self.kinds else others  # used unbound, it is an error of the block
                kind, others = (kind, outside) if name in self.kinds else (outside, others)
            self.kinds[name] = self._either(kind, others)

    @staticmethod
    def _either(kind: Any, other: Any) -> Any:
        """Return the kind of what is of one of two kinds; ``None`` if there is none."""
        if kind is other or (type(kind) is type(other) and getattr(kind, "value", kind) is getattr(other, "value", other)):
            return kind
        plain = [each is _VALUE or (isinstance(each, _Known) and is_constant(each.value)) for each in (kind, other)]
        return _VALUE if all(plain) else None

    def _store(self, target: ast.expr, kind: Any) -> None:
        if isinstance(target, ast.Name):
            if target.id not in self.assignable:
                raise Undetermined(f"`{target.id}` is a global variable, and assigned in line {target.lineno}")
            self.kinds[target.id] = kind
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(kind, _Row):
            if len(target.elts) != len(kind.value) or any(isinstance(element, ast.Starred) for element in target.elts):
                self._fail(target)
            for element, part in zip(target.elts, kind.value, strict=True):
                self._store(element, part)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._store(element, self._items(kind, target))
        elif isinstance(target, ast.Starred):
            self._store(target.value, _OWN)
        elif isinstance(target, ast.Subscript):
            container = self.kind(target.value)
            if container is not _OWN and container is not _VALUE:
                self._tensor(container, target)
            self._operand(self.kind(target.slice), target)
            self._stored(kind, target)
        elif isinstance(target, ast.Attribute):
            owner = self.kind(target.value)
            located = owner in (_SOME, _VALUE) or (isinstance(owner, _Known) and isinstance(owner.value, Located))
            if not located or target.attr not in ("output", "input", "inputs"):
                raise Undetermined(f"the attribute `{target.attr}` is assigned in line {target.lineno}")
            if isinstance(owner, _Known) and self._of_envoy(owner.value, target) is not _VALUE:
                self._fail(target)
            self._stored(kind, target)
        else:
            raise Undetermined(f"an assignment in line {target.lineno}")

    def _stored(self, kind: Any, node: ast.AST) -> None:
        """Check that a value may go into a container, or to a function that computes: it can be got at there as a value."""
        located = isinstance(kind, _Known) and isinstance(kind.value, (Located, Source))
        if located or kind in (None, _TRACER, _SOME) or isinstance(kind, (_Items, _Envoys, _RootOf, _Row)):
            self._fail(node)

    @staticmethod
    def _tensor(kind: Any, node: ast.AST) -> None:
        if not (isinstance(kind, _Known) and isinstance(kind.value, torch.Tensor)):
            raise Undetermined(f"something from outside is changed in line {node.lineno}")  # type: ignore[attr-defined]

    # -- expressions -----------------------------------------------------------------------------------------------

    def kind(self, node: ast.expr | None) -> Any:
        """Return the kind of an expression."""
        if node is None:
            return _VALUE
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise Undetermined(f"a `{type(node).__name__.lower()}` in line {node.lineno}")
        return method(node)

    def _Constant(self, node: ast.Constant) -> Any:  # noqa: N802
        return _Known(node.value)

    def _Name(self, node: ast.Name) -> Any:  # noqa: N802
        if node.id in self.kinds:
            kind = self.kinds[node.id]
            if kind is None:
                raise Undetermined(f"`{node.id}` in line {node.lineno} may be one thing or another")
            return kind
        if node.id in (SCOPE_NAME, TRACER_NAME):
            return _TRACER
        if node.id == SAVE_NAME:
            return _Known(save)
        if node.id == RESULT_NAME:
            raise Undetermined(f"the result is read in line {node.lineno}")
        try:
            return self._outside(node.id)
        except KeyError:
            raise Undetermined(f"`{node.id}` has no value in line {node.lineno}") from None

    def _outside(self, name: str) -> Any:
        """Return the kind of a variable from outside, which becomes a root."""
        value = self.variable(name)
        return self._root(Root(name), value)

    def _root(self, root: Root, value: Any) -> Any:
        if value is self.tracer:
            return _TRACER
        kind = kind_of(value)
        if kind is None:
            raise Undetermined(f"`{root}` is a {type(value).__name__}")
        if kind == "object" and not isinstance(value, (Located, Source)):
            return _RootOf(root, value)  # a root as soon as it is called; until then on the way to its attributes
        self.roots[root] = kind
        if kind == "envoys":
            for envoy in value:
                if not _all_plain(envoy):
                    raise Undetermined(f"`{root}` has an envoy of a class of yours")
            return _Envoys(value)
        return _Items(value) if kind == "items" else _Known(value)

    def _Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802
        owner = self.kind(node.value)
        if owner is _VALUE:
            return _VALUE
        if owner is _SOME:
            return self._of_some(node)
        if isinstance(owner, (_Known, _RootOf)):
            value = owner.value
            if isinstance(value, (Located, Source)):
                return self._of_envoy(value, node)
            if isinstance(value, torch.Tensor):
                return _VALUE
            if isinstance(owner, _RootOf):
                return self._of_object(owner, node)
            if is_constant(value):
                return _VALUE
        return self._fail(node)

    def _of_envoy(self, envoy: Any, node: ast.Attribute) -> Any:
        name = node.attr
        if isinstance(envoy, Located):
            found = getattr(type(envoy), name, None)
            children = getattr(envoy, "_children", {})
            if name in children:
                return _Known(children[name])
            if isinstance(found, eproperty):
                if found is not getattr(Located, name, None):
                    raise Undetermined(f"`.{name}` in line {node.lineno} is a property of a class of yours")
                return _VALUE
            if found is not None and (name not in ("source", "skip") or not _is_plain(type(envoy))):
                return self._fail(node)
        if name == "skip":
            return _SKIP
        try:
            value = getattr(envoy, name)
        except Exception:  # the block will raise it, when it gets there
            return self._fail(node)
        return _Known(value) if isinstance(value, (Located, Source)) else self._fail(node)

    def _some(self, envoy: Any, node: ast.AST) -> Any:
        """Return the kind of an envoy below ``envoy``, whichever it is."""
        return _SOME if _all_plain(envoy) else self._fail(node)

    def _of_some(self, node: ast.Attribute) -> Any:
        if node.attr in ("output", "input", "inputs"):
            return _VALUE
        return _SKIP if node.attr == "skip" else _SOME

    def _of_object(self, owner: _RootOf, node: ast.Attribute) -> Any:
        value, name = owner.value, node.attr
        root = Root(owner.root.name, (*owner.root.attributes, name))
        try:
            found = look_up(value, name)
        except (KeyError, AttributeError):
            return self._fail(node)
        return self._root(root, found)

    def _Subscript(self, node: ast.Subscript) -> Any:  # noqa: N802
        owner, index = self.kind(node.value), self.kind(node.slice)
        if isinstance(owner, _Known) and isinstance(owner.value, Located):
            if isinstance(index, _Known) and isinstance(index.value, (int, str)):
                try:
                    return _Known(owner.value[index.value])  # type: ignore[index]
                except Exception:  # as above
                    return self._fail(node)
            return self._some(owner.value, node)
        if owner is _SOME or isinstance(owner, _Envoys):
            return _SOME
        self._operand(index, node)
        self._operand(owner, node)
        return _VALUE

    def _Slice(self, node: ast.Slice) -> Any:  # noqa: N802
        for part in (node.lower, node.upper, node.step):
            self._operand(self.kind(part), node)
        return _VALUE

    def _elements(self, node: Any) -> Any:
        for element in node.elts:
            self._stored(self.kind(element), element)
        return _OWN

    _List = _Tuple = _Set = _elements

    def _Dict(self, node: ast.Dict) -> Any:  # noqa: N802
        for part in (*node.keys, *node.values):
            if part is not None:
                self._stored(self.kind(part), part)
        return _OWN

    def _Starred(self, node: ast.Starred) -> Any:  # noqa: N802
        return self._items(self.kind(node.value), node)

    def _computed(self, node: ast.expr) -> Any:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._operand(self.kind(child), node)
        return _VALUE

    _BinOp = _UnaryOp = _Compare = _JoinedStr = _FormattedValue = _computed

    def _BoolOp(self, node: ast.BoolOp) -> Any:  # noqa: N802
        kinds = [self.kind(value) for value in node.values]
        for kind in kinds:
            self._operand(kind, node)
        return functools.reduce(self._either, kinds) or self._fail(node)

    def _IfExp(self, node: ast.IfExp) -> Any:  # noqa: N802
        self._operand(self.kind(node.test), node)
        return self._either(self.kind(node.body), self.kind(node.orelse)) or self._fail(node)

    def _comprehension(self, node: Any) -> Any:
        before, assignable = dict(self.kinds), self.assignable
        self.assignable = assignable | {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        for generator in node.generators:
            self._store(generator.target, self._iterated(generator.iter))
            for test in generator.ifs:
                self._operand(self.kind(test), node)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._stored(self.kind(part), node)
        self.kinds, self.assignable = before, assignable
        return _OWN

    _ListComp = _SetComp = _DictComp = _GeneratorExp = _comprehension

    def _Call(self, node: ast.Call) -> Any:  # noqa: N802
        given = [self.kind(argument) for argument in node.args]
        named = [self.kind(keyword.value) for keyword in node.keywords]
        if isinstance(node.func, ast.Attribute):
            done = self._method(node.func, given + named, node)
            if done is not None:
                return done
        function = self.kind(node.func)
        if function is _SKIP:
            self._all_stored(given + named, node)
            return _VALUE
        if not isinstance(function, (_Known, _RootOf)):
            return self._fail(node)
        called = function.value
        if called is save:
            return given[0] if len(given) == 1 and not named else self._fail(node)
        if id(called) not in _harmless_functions():
            return self._fail(node)
        if isinstance(function, _RootOf):
            self.roots[function.root] = "object"
        if called in (max, min):
            self._all_stored(given, node)
        self._all_stored([kind for kind in given if not isinstance(kind, _Items)] + named, node)
        return _OWN if called in _MAKING else _VALUE

    def _method(self, function: ast.Attribute, given: list[Any], node: ast.Call) -> Any:
        """Return the kind of a call of a method of a value; ``None`` if it is a call of something else."""
        if function.attr == "append" and self._fills_outside(function.value):
            self._all_stored(given, node)
            return _Known(None)
        owner, name = self.kind(function.value), function.attr
        is_value = owner is _VALUE or (
            isinstance(owner, _Known) and (isinstance(owner.value, torch.Tensor) or is_constant(owner.value))
        )
        if is_value and name not in _REACHING_OUT and _is_method(name):
            self._all_stored(given, node)
            return _VALUE
        if owner is _OWN and name in _FILLING | _LOOKING:
            self._all_stored(given, node)
            return _OWN if name in _LOOKING else _VALUE
        if isinstance(owner, _Items) and name in _LOOKING:
            return _OWN
        return None

    def _fills_outside(self, node: ast.expr) -> bool:
        """Whether a list is from outside; then it is one that the block fills."""
        if isinstance(node, ast.Name) and node.id not in self.kinds:
            try:
                root, value = Root(node.id), self.variable(node.id)
            except KeyError:
                return False
        elif isinstance(node, ast.Attribute) and isinstance(owner := self.kind(node.value), _RootOf):
            try:
                root, value = Root(owner.root.name, (*owner.root.attributes, node.attr)), look_up(owner.value, node.attr)
            except (KeyError, AttributeError):
                return False
        else:
            return False
        if type(value) is not list:
            return False
        self.filled.add(root)
        return True

    def _all_stored(self, kinds: list[Any], node: ast.AST) -> None:
        for kind in kinds:
            self._stored(kind, node)

    def _iterated(self, node: ast.expr) -> Any:
        """Return the kind of the items of what a loop goes over."""
        if isinstance(node, ast.Call) and not any(isinstance(argument, ast.Starred) for argument in node.args):
            function = self.kind(node.func)
            called = function.value if isinstance(function, _RootOf) and not node.keywords else None
            if called in (enumerate, zip):
                assert isinstance(function, _RootOf)
                self.roots[function.root] = "object"
                kinds = tuple(self._items(self.kind(argument), node) for argument in node.args)
                return _Row((_VALUE, *kinds[:1]) if called is enumerate else kinds)
        return self._items(self.kind(node), node)

    def _items(self, kind: Any, node: ast.AST) -> Any:
        """Return the kind of what one gets by iterating over something."""
        if isinstance(kind, _Known) and isinstance(kind.value, Located):
            return self._some(kind.value, node)
        if kind is _SOME or isinstance(kind, _Envoys):
            return _SOME
        if kind in (_OWN, _VALUE) or isinstance(kind, _Items):
            return _VALUE
        self._operand(kind, node)
        return _VALUE

    def _operand(self, kind: Any, node: ast.AST) -> None:
        """Check that an operator or a test may be applied to this kind of value: then it does nothing of its own."""
        plain = isinstance(kind, _Known) and (isinstance(kind.value, torch.Tensor) or is_constant(kind.value))
        if not (plain or kind in (_OWN, _VALUE) or isinstance(kind, _Items)):
            self._fail(node)

    @staticmethod
    def _fail(node: Any) -> Any:
        raise Undetermined(f"`{ast.unparse(node)[:80]}` in line {node.lineno}")


class _RootOf(NamedTuple):
    """An object from outside, whose attributes may be roots too."""

    root: Root
    value: Any


_SKIP = object()


class _Row(NamedTuple):
    """The kinds of the parts of one item, of ``enumerate`` or ``zip``."""

    value: tuple[Any, ...]


#: Built-ins that make a container of the items they are given.
_MAKING = (list, dict, set, tuple, sorted, zip, enumerate, reversed, frozenset)

def _is_plain(kind: type) -> bool:
    """Whether a class of envoys has the properties and methods of all envoys, and not some of a user's."""
    names = ("output", "input", "inputs", "skip", "source")
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "nnsight"]
    return all(getattr(kind, name, None) is getattr(bases[0], name, None) for name in names)


def _all_plain(envoy: Any) -> bool:
    """Whether an envoy and all below it are plain, see :func:`_is_plain`."""
    return all(_is_plain(type(each)) for each in (envoy.modules() if hasattr(envoy, "modules") else [envoy]))


@functools.cache
def _is_method(name: str) -> bool:
    """Whether tensors or plain containers and strings have such a method."""
    return any(callable(getattr(kind, name, None)) for kind in (torch.Tensor, tuple, list, dict, str, torch.Size))
