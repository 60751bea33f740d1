"""Abstract values: what is known of a value of a block without running the block.

:mod:`nnsight.fx.replay.determinate` computes one for each expression. The abstract value decides what a block may do with the value: a
tensor may be computed with, a list of the block's own may be filled, an object from outside only leads to its attributes.

``None`` in place of an abstract value means that a variable may be one thing or another. A block that uses it runs each time.
"""

from __future__ import annotations

import builtins
import enum
import functools
import math
from typing import Any, NamedTuple

import torch

from ...envoy.source import Source
from ...runtime.modules.located import Located
from .guards import GuardPath, is_constant

#: Built-ins that compute a value from their arguments and do nothing else.
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

#: Methods of tensors whose effect is not in the tensors alone.
REACHING_OUT = frozenset("backward register_hook register_post_accumulate_grad_hook share_memory_ retain_grad save".split())

#: Methods of a dict or list from outside that only look.
LOOKING = frozenset("get index count copy".split())

#: Built-ins that have consumed a generator when they return.
EAGER = (all, any, dict, frozenset, list, max, min, set, sorted, sum, tuple)

#: Metaclasses for which ``isinstance`` runs no code of a user's.
PLAIN_METACLASSES = (type, type(torch.Tensor), type(torch.nn.Parameter), type(torch.nn.Module))


class Undetermined(Exception):
    """The block cannot be shown to be determined by what it reads; the message says why."""


class _Single(enum.Enum):
    """An abstract value without content.

    Attributes:
        VALUE: A tensor, a number, a container that the block made, or a nest of them: what is done to it is recorded, or local.
        SKIP: The method ``skip`` of an envoy.
        TRACER: The tracer of the block.
    """

    VALUE, SKIP, TRACER = range(3)


VALUE, SKIP, TRACER = _Single


class Known(NamedTuple):
    """An object that is the same in each replay, or a tensor from outside with the same metadata."""

    value: Any


class Held(NamedTuple):
    """A list, tuple or dict from outside.

    Attributes:
        path: The way to it.
        value: The container.
        is_plain: Whether it contains tensors and constants only, all of which are compared in a replay.
    """

    path: GuardPath
    value: Any
    is_plain: bool


class Outside(NamedTuple):
    """An object from outside, whose attributes may be guards."""

    path: GuardPath
    value: Any


class Method(NamedTuple):
    """A method of an object from outside."""

    function: Outside
    owner: Outside


class Row(NamedTuple):
    """A tuple, or what a loop iterates over, by the abstract values of its items."""

    items: tuple[Any, ...]


def are_alike(one: Any, other: Any) -> bool:
    """Whether two abstract values say the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Known):
        return one.value is other.value
    if isinstance(one, (Held, Outside)):
        return one.path == other.path and one.value is other.value
    if isinstance(one, (Method, Row)):
        parts: Any = (one.items, other.items) if isinstance(one, Row) else (one, other)
        return len(parts[0]) == len(parts[1]) and all(map(are_alike, *parts))
    return False


def either(one: Any, other: Any) -> Any:
    """Return the abstract value of what is one of two; ``None`` if there is none."""
    if are_alike(one, other):
        return one
    return VALUE if all(each is VALUE or is_known_constant(each) for each in (one, other)) else None


def is_known_constant(value: Any) -> bool:
    """Whether a value is known, and a constant."""
    return isinstance(value, Known) and is_constant(value.value)


def is_storable(value: Any) -> bool:
    """Whether a value may go into a container, or to a function that computes: there it is a ``VALUE``."""
    if isinstance(value, Row):
        return all(map(is_storable, value.items))
    return value is VALUE or (isinstance(value, Known) and not isinstance(value.value, (Located, Source)))


def is_operand(value: Any) -> bool:
    """Whether an operator or a test may be applied to a value without running code of a user's."""
    if isinstance(value, Known):
        return isinstance(value.value, torch.Tensor) or is_constant(value.value)
    if isinstance(value, Row):
        return all(map(is_operand, value.items))
    return value is VALUE or (isinstance(value, Held) and value.is_plain)


def truth_of(value: Any) -> bool | None:
    """Return what a test of a value says in each replay; ``None`` if that is not known."""
    return bool(value.value) if is_known_constant(value) else None


@functools.cache
def harmless_functions() -> frozenset[int]:
    """Identities of the functions that only compute: torch's that take tensors, those that make some, and some of Python's."""
    found: set[int] = {id(getattr(torch, name)) for name in _FACTORIES}
    for functions in torch.overrides.get_overridable_functions().values():
        found.update(id(function) for function in functions if getattr(function, "__name__", "") not in REACHING_OUT)
    found.update(id(value) for name, value in vars(math).items() if callable(value) and not name.startswith("_"))
    found.update(id(function) for function in _HARMLESS_BUILTINS)
    found.update(id(value) for value in (torch.Size, torch.device))
    return frozenset(found)


@functools.cache
def is_method(name: str) -> bool:
    """Whether tensors or plain containers and strings have such a method."""
    kinds = (torch.Tensor, tuple, list, dict, set, str, torch.Size)
    return any(callable(getattr(kind, name, None)) for kind in kinds)


def is_plain_envoy(kind: type) -> bool:
    """Whether a class of envoys has the properties and methods of all envoys, and not some of a user's."""
    names = ("output", "input", "inputs", "skip", "source")
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "nnsight"]
    return all(getattr(kind, name, None) is getattr(bases[0], name, None) for name in names)
