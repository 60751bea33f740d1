"""Abstract values: their kinds, and those of variables, attributes and items, with the guards that they need.

:mod:`nnsight.fx.replay.determinate` computes an abstract value for each expression of a block. Its kind decides which operations have no
effect outside: a block may compute with a tensor and append to its own list, but only read the attributes of an object from outside.
The value ``None``, the top of the lattice, means that a variable may be different objects on different paths. It must not be used.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ...envoy.envoy import Envoy
from ...envoy.source import Source
from ...runtime.modules.eproperty import eproperty
from ...runtime.modules.located import Located
from ...runtime.modules.tree import ModuleTree
from ...tracing.block import SCOPE_NAME, TRACER_NAME, Block
from ...tracing.body import RESULT_NAME, SAVE_NAME
from ...tracing.saving import save
from .guards import LONGEST, GuardPath, GuardStep, holds_modules, is_constant, is_of_torch, kind_of, look_up

#: Built-ins whose only effect is to compute a value from their arguments.
_HARMLESS_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        "abs all any bool complex dict divmod enumerate float frozenset int len list max min pow range "
        "reversed round set slice sorted str sum tuple zip"
    ).split()
)

_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye from_numpy full full_like linspace logspace normal ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm tensor zeros zeros_like complex polar"
).split()

#: Methods of tensors with effects beyond the tensors.
ESCAPING = frozenset("backward register_hook register_post_accumulate_grad_hook share_memory_ retain_grad save".split())

#: Built-ins that consume a generator before they return.
EAGER = (all, any, dict, frozenset, list, max, min, set, sorted, sum, tuple)

#: Metaclasses for which ``isinstance`` runs no user code.
PLAIN_METACLASSES = (type, type(torch.Tensor), type(torch.nn.Parameter), type(torch.nn.Module))


class Undetermined(Exception):
    """The effects of the block cannot be proved to depend only on the objects that it reads. The message, a clause, says why."""


#: A tensor, a number, a container that the block made, or a nest of them. Operations on it are recorded, or local to the block.
VALUE: Any = object()

#: The method ``skip`` of an envoy.
SKIP: Any = object()

#: The tracer of the block.
TRACER: Any = object()


class Concrete(NamedTuple):
    """A known object: the same one, or an equal constant, in each replay; a tensor from outside only has the same metadata."""

    value: Any


class Container(NamedTuple):
    """A list, tuple or dict from outside.

    Attributes:
        path: The path to it.
        value: The container.
        is_plain: Whether it contains only tensors and constants, so that guards compare all its items.
    """

    path: GuardPath
    value: Any
    is_plain: bool


class OutsideObject(NamedTuple):
    """An object from outside. Guards compare it, or only the attributes that the block reads."""

    path: GuardPath
    value: Any


class Method(NamedTuple):
    """A method of an object from outside."""

    function: OutsideObject
    owner: OutsideObject


class Items(NamedTuple):
    """A tuple, or the items of another object, as a sequence of abstract values."""

    items: tuple[Any, ...]
    is_tuple: bool = True  # else the items of a list or of a view of a dict, which is equal to no tuple


def are_alike(one: Any, other: Any) -> bool:
    """Whether two abstract values are equal; objects in them are compared by identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Concrete):
        return one.value is other.value
    if isinstance(one, (Container, OutsideObject)):
        return one.path == other.path and one.value is other.value
    if isinstance(one, (Method, Items)):
        parts: Any = (one.items, other.items) if isinstance(one, Items) else (one, other)
        kinds_agree = isinstance(one, Method) or one.is_tuple == other.is_tuple
        return kinds_agree and len(parts[0]) == len(parts[1]) and all(map(are_alike, *parts))
    return False


def join(one: Any, other: Any) -> Any:
    """Return the least abstract value that covers both; ``None``, the top, if no other covers them."""
    if are_alike(one, other):
        return one
    return VALUE if all(each is VALUE or is_known_constant(each) for each in (one, other)) else None


def is_known_constant(value: Any) -> bool:
    """Whether the object of an abstract value is known and a constant."""
    return isinstance(value, Concrete) and is_constant(value.value)


def is_storable(value: Any) -> bool:
    """Whether a value may become an item of a container or an argument of a function that only computes; there it is a ``VALUE``."""
    if isinstance(value, Items):
        return all(map(is_storable, value.items))
    return value is VALUE or (isinstance(value, Concrete) and not isinstance(value.value, (Located, Source)))


def is_operand(value: Any) -> bool:
    """Whether an operator or a test on a value runs no user code."""
    if isinstance(value, Concrete):
        return isinstance(value.value, torch.Tensor) or is_constant(value.value)
    if isinstance(value, Items):
        return all(map(is_operand, value.items))
    return value is VALUE or (isinstance(value, Container) and value.is_plain)


def truth_of(value: Any) -> bool | None:
    """Return the truth of a value, if it is the same in each replay; else ``None``."""
    return bool(value.value) if is_known_constant(value) else None


@functools.cache
def harmless_functions() -> frozenset[int]:
    """Return the identities of the functions that only compute: torch functions that take or make tensors, and some of Python."""
    found: set[int] = {id(function) for name in _FACTORIES if is_of_torch(function := getattr(torch, name))}
    for functions in torch.overrides.get_overridable_functions().values():
        own = [function for function in functions if is_of_torch(function)]
        found.update(id(function) for function in own if getattr(function, "__name__", "") not in ESCAPING)
    found.update(id(value) for name, value in vars(math).items() if callable(value) and not name.startswith("_"))
    found.update(id(function) for function in _HARMLESS_BUILTINS)
    found.update(id(value) for value in (torch.Size, torch.device))
    return frozenset(found)


def is_method(name: str) -> bool:
    """Whether tensors, plain containers or strings have a method of this name, and tensors none that the user has written."""
    kinds = (torch.Tensor, tuple, list, dict, set, str, torch.Size)
    return any(callable(getattr(kind, name, None)) for kind in kinds) and is_of_torch(getattr(torch.Tensor, name, None))


def is_plain_envoy(kind: type) -> bool:
    """Whether a class of envoys overrides none of the methods and properties of the package's envoys."""
    names = ("output", "input", "inputs", "skip", "source")
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "nnsight"]
    return all(getattr(kind, name, None) is getattr(bases[0], name, None) for name in names)


def is_of_package(kind: type, name: str) -> bool:
    """Whether an attribute of a class is defined in this package, not in a class of the user."""
    defining = next((base for base in kind.__mro__ if name in base.__dict__), object)
    return defining.__module__.partition(".")[0] == "nnsight"


class Findings:
    """The results of the analysis of a block and the functions that it calls; ``tracer`` is the object that ``as`` binds.

    Attributes:
        guards: The paths of the objects that are read from outside, with the kind of comparison that each needs.
        filled: The lists from outside to which the block appends.
        active: The stack of calls under analysis: code, and the identity of the object whose method it is.
        left: Number of expressions that may still be analysed.
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
    """The variables of a block; ``variable`` returns the value of a name before the block, or raises ``KeyError``."""

    where = ""

    def __init__(self, block: Block, variable: Callable[[str], Any]) -> None:
        self.assignable = frozenset(block.shared)
        self._variable = variable

    def outside(self, name: str) -> tuple[GuardPath, Any]:
        """Return the path and the value of a variable from outside; raises ``KeyError`` if it has no value."""
        return GuardPath(name), self._variable(name)


class FunctionVariables:
    """The variables of a function under analysis; ``path`` is the path to the function."""

    def __init__(self, function: types.FunctionType, path: GuardPath) -> None:
        code = function.__code__
        self.assignable = frozenset((*code.co_varnames, *code.co_cellvars))
        self.where = f" of `{function.__qualname__}`"
        self._function, self._path = function, path

    def outside(self, name: str) -> tuple[GuardPath, Any]:
        """Return the path and the value of a variable from outside; raises ``KeyError`` if it has no value."""
        free = self._function.__code__.co_freevars
        if name in self.assignable or name.startswith("__"):  # in a class, Python mangles such a name
            raise KeyError(name)
        step = GuardStep("cell", free.index(name)) if name in free else GuardStep("global", name)
        try:
            return self._path.to(*step), step.of(self._function)
        except LookupError:
            raise KeyError(name) from None


class Names:
    """Evaluates names, attributes and items of a block or function; :class:`~.expressions.Expressions` evaluates other expressions.

    Attributes:
        values: The abstract value of each variable that the code has assigned so far.
    """

    def __init__(self, findings: Findings, variables: BlockVariables | FunctionVariables) -> None:
        self.findings = findings
        self.variables = variables
        self.assignable = variables.assignable
        self.values: dict[str, Any] = {}

    def at(self, node: Any) -> str:
        """Return the position of a node in words, for an error message."""
        return f"in line {node.lineno}{self.variables.where}"

    def fail(self, node: Any) -> Any:
        """Raise :class:`Undetermined` for an expression or a target that may have other effects."""
        raise Undetermined(f"`{ast.unparse(node)[:80]}` {self.at(node)} may have effects that are not followed")

    def check_storable(self, values: Iterable[Any], node: ast.AST) -> None:
        """Raise :class:`Undetermined` unless all values may become items of a container, see :func:`is_storable`."""
        if not all(map(is_storable, values)):
            self.fail(node)

    def check_operand(self, value: Any, node: ast.AST) -> None:
        """Raise :class:`Undetermined` unless an operator may be applied to a value, see :func:`is_operand`."""
        if not is_operand(value):
            self.fail(node)

    def value(self, node: ast.expr | None) -> Any:
        """Return the abstract value of an expression."""
        if node is None:
            return VALUE
        self.findings.left -= 1
        if self.findings.left < 0:
            raise Undetermined(f"it has too many expressions to analyse, those from `{ast.unparse(node)[:80]}` {self.at(node)} on")
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise Undetermined(f"the `{type(node).__name__.lower()}` expression {self.at(node)} is not analysed")
        return method(node)

    # -- variables and attributes ----------------------------------------------------------------------------------

    def _Constant(self, node: ast.Constant) -> Any:  # noqa: N802 - named after the nodes of ast
        return Concrete(node.value)

    def _Name(self, node: ast.Name) -> Any:  # noqa: N802
        if node.id in self.values:
            value = self.values[node.id]
            if value is None:
                raise Undetermined(f"`{node.id}` {self.at(node)} may be different objects on different paths")
            return value
        if node.id in (SCOPE_NAME, TRACER_NAME):
            return TRACER
        if node.id == SAVE_NAME:
            return Concrete(save)
        if node.id == RESULT_NAME:
            raise Undetermined(f"the result is read {self.at(node)}")
        try:
            return self.guarded(*self.variables.outside(node.id))
        except KeyError:
            raise Undetermined(f"`{node.id}` has no value {self.at(node)}") from None

    def guarded(self, path: GuardPath, value: Any) -> Any:
        """Return the abstract value of an object from outside, and add the guard that it needs."""
        if value is self.findings.tracer:
            return TRACER
        kind = kind_of(value)
        if kind is None:
            raise Undetermined(f"`{path}` is a {type(value).__name__}, which a replay cannot compare")
        if kind == "object" and not isinstance(value, (Located, Source)):
            return OutsideObject(path, value)  # becomes a guard when it is called; an owner of attributes need not be compared
        self.findings.add(path, kind)
        return Container(path, value, kind == "items") if kind in ("items", "members") else Concrete(value)

    def _Attribute(self, node: ast.Attribute) -> Any:  # noqa: N802
        return self.attribute(self.value(node.value), node)

    def attribute(self, owner: Any, node: ast.Attribute) -> Any:
        """Return the abstract value of an attribute of a value."""
        if owner is TRACER and node.attr == "result" and getattr(self.findings.tracer, "output_location", None) is not None:
            return VALUE
        if owner is VALUE:
            is_known = node.attr != "grad" and is_of_torch(getattr(torch.Tensor, node.attr, None))
            return VALUE if is_known else self.fail(node)
        if isinstance(owner, Concrete):
            value = owner.value
            if isinstance(value, (Located, Source)):
                return self.of_envoy(value, node)
            if isinstance(value, torch.Tensor):  # attributes that the user has added may be any object, and guards compare no `_base`
                found = getattr(torch.Tensor, node.attr, None)
                is_known = node.attr != "grad" and node.attr[0] != "_" and found is not None and is_of_torch(found)
                return VALUE if is_known else self.fail(node)
            if is_constant(value):
                return VALUE
        # Inside a class, Python mangles `__name`.
        return self._of_object(owner, node) if isinstance(owner, OutsideObject) and node.attr[:2] != "__" else self.fail(node)

    def of_envoy(self, envoy: Any, node: ast.Attribute) -> Any:
        """Return the abstract value of an attribute of an envoy."""
        name = node.attr
        if isinstance(envoy, Located):
            found = getattr(type(envoy), name, None)
            children = getattr(envoy, "_children", {})
            if name in children:
                return Concrete(children[name])
            if isinstance(found, eproperty):
                if not is_of_package(type(envoy), name):
                    raise Undetermined(f"`.{name}` {self.at(node)} is a property of a class of the user")
                return VALUE
            is_place = not callable(found) and is_of_package(type(found), "__get__")
            if found is not None and not is_place and (name not in ("source", "skip") or not is_plain_envoy(type(envoy))):
                return self.fail(node)
        if name == "skip":
            return SKIP
        try:
            value = getattr(envoy, name)
        except Exception:  # the block will raise it, too
            return self.fail(node)
        return Concrete(value) if isinstance(value, (Located, Source)) else self.fail(node)

    def _of_object(self, owner: OutsideObject, node: ast.Attribute) -> Any:
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
            return Method(OutsideObject(path, found), owner)
        return self.guarded(path, found) if isinstance(found, torch.Tensor) or is_constant(found) else self.fail(node)

    # -- items -----------------------------------------------------------------------------------------------------

    def _Subscript(self, node: ast.Subscript) -> Any:  # noqa: N802
        owner, index = self.value(node.value), self.value(node.slice)
        if is_known_constant(index):
            try:
                found = self._item(owner, index.value)
            except Exception:  # the block will raise it, too
                return self.fail(node)
            if found is not None:
                return found
        self.check_operand(index, node)
        self.check_operand(owner, node)
        return VALUE

    def _item(self, owner: Any, key: Any) -> Any:
        """Return the abstract value of an item, if the items of ``owner`` are known; else ``None``."""
        if isinstance(owner, Concrete) and isinstance(owner.value, Located):
            found = owner.value[key]  # type: ignore[index]
            return Items(tuple(map(Concrete, found))) if isinstance(found, list) else Concrete(found)
        if isinstance(owner, Items):
            return owner._replace(items=owner.items[key]) if type(key) is slice else owner.items[key]
        if isinstance(owner, Container):
            if type(owner.value) is not dict:
                key = range(len(owner.value))[key]  # makes negative numbers positive, and a slice a range
            if type(key) is range:
                return Items(tuple(self._member(owner, place) for place in key), type(owner.value) is tuple)
            return self._member(owner, key)
        if isinstance(owner, OutsideObject) and holds_modules(owner.value, indexed=True):
            return self._module(owner, key)
        return None

    def _member(self, owner: Container, key: Any) -> Any:
        found = owner.value[key]
        return Concrete(found) if owner.is_plain else self.guarded(owner.path.to("item", key), found)

    def _module(self, owner: OutsideObject, key: Any) -> Any:
        modules = owner.value._modules
        name = key if isinstance(owner.value, torch.nn.ModuleDict) else list(modules)[key]
        self.findings.add(owner.path, "children")
        return self.guarded(owner.path.to("attribute", name), modules[name])

    def items(self, value: Any, node: ast.AST) -> Items | None:
        """Return the items of a loop over a value; ``None`` if they are an unknown number of ``VALUE``."""
        if isinstance(value, Items):
            return value
        if isinstance(value, Concrete):
            if isinstance(value.value, Envoy) and type(value.value).__iter__ is Envoy.__iter__:
                return Items(tuple(map(Concrete, value.value._children.values())))
            if isinstance(value.value, (tuple, range)) and len(value.value) <= LONGEST:
                return Items(tuple(map(Concrete, value.value)))
        if isinstance(value, Container):
            if type(value.value) is dict:
                return Items(tuple(map(Concrete, value.value)))
            return Items(tuple(self._member(value, key) for key in range(len(value.value))))
        if isinstance(value, OutsideObject) and holds_modules(value.value):
            self.findings.add(value.path, "children")  # also without any child
            return Items(tuple(self._module(value, key) for key in range(len(value.value._modules))))
        self.check_operand(value, node)
        return None
