"""Kinds of values, as far as a proof needs them that a block does nothing but compute.

:mod:`nnsight.fx.replay.determinate` follows what kind of thing each expression is. What is known of a value decides what may be done with
it: a tensor may be computed with, a container of the block's own may be filled, an object from outside only leads to its attributes.
"""

from __future__ import annotations

import builtins
import functools
import math
from typing import Any, NamedTuple

import torch

from ...envoy.source import Source
from ...runtime.modules.located import Located
from ...tracing.saving import save
from .guards import Root, is_constant

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

#: Methods of containers by which a block fills one of its own.
FILLING = frozenset("append extend insert update setdefault add".split())

#: Methods of containers that only look.
LOOKING = frozenset("items keys values get index count copy".split())

#: Methods of tensors whose effect is not in the tensors alone.
REACHING_OUT = frozenset("backward register_hook register_post_accumulate_grad_hook share_memory_ retain_grad save".split())

#: Built-ins that make a container of the items they are given.
MAKING = (list, dict, set, tuple, sorted, zip, enumerate, reversed, frozenset)

#: Those that have gone over what they are given when they return.
EAGER = (all, any, dict, frozenset, list, max, min, set, sorted, sum, tuple)

#: Classes of classes for which ``isinstance`` runs no code of a user's.
PLAIN_METACLASSES = (type, type(torch.Tensor), type(torch.nn.Parameter), type(torch.nn.Module))


class Undetermined(Exception):
    """The block cannot be shown to be determined by what it reads; the message says why."""


class _Own:
    """A container that the block made itself."""


class _Value:
    """A tensor, a number, or a nest of them that belongs to the model: whatever is done to it is seen by the recording."""


class _Some:
    """An envoy, or an operation of one, that is chosen at run time."""


class _Skip:
    """The method ``skip`` of an envoy."""


class _Tracer:
    """The tracer of the block."""


OWN, VALUE, SOME, SKIP, TRACER = _Own(), _Value(), _Some(), _Skip(), _Tracer()


class Known(NamedTuple):
    """An object from outside that is the same in each replay."""

    value: Any


class Items(NamedTuple):
    """A container from outside, with the kinds of its items."""

    value: Any


class Envoys(NamedTuple):
    """A list or tuple of envoys from outside."""

    value: Any


class Members(NamedTuple):
    """A container from outside that holds modules, functions, containers: what is taken out of it is a root."""

    root: Root
    value: Any


class RootOf(NamedTuple):
    """An object from outside, whose attributes may be roots too."""

    root: Root
    value: Any


class Bound(NamedTuple):
    """A method of an object from outside."""

    function: RootOf
    owner: Any


class Super(NamedTuple):
    """``super()`` in a method."""

    of: RootOf
    owner: RootOf


class Row(NamedTuple):
    """Several kinds in their order: those of one item of ``enumerate`` or ``zip``, or of ``*args``."""

    value: tuple[Any, ...]


class Keywords(NamedTuple):
    """Kinds by name: those of ``**kwargs``."""

    value: dict[str, Any]


class Each(NamedTuple):
    """The kinds of the items that a loop goes over, one by one.

    Attributes:
        value: The kinds.
        is_exact: Whether it goes over all of them.
    """

    value: tuple[Any, ...]
    is_exact: bool = True


class Unpacked(NamedTuple):
    """Any number of arguments of one kind."""

    value: Any


def are_alike(kind: Any, other: Any) -> bool:
    """Whether two kinds say the same of a value."""
    if kind is other:
        return True
    if type(kind) is not type(other):
        return False
    if isinstance(kind, (Known, Items, Envoys)):
        return kind.value is other.value
    if isinstance(kind, (RootOf, Members)):
        return kind.root == other.root and kind.value is other.value
    if isinstance(kind, (Bound, Super, Row)):
        parts: Any = (kind.value, other.value) if isinstance(kind, Row) else (kind, other)
        return len(parts[0]) == len(parts[1]) and all(map(are_alike, *parts))
    return False


def either(kind: Any, other: Any) -> Any:
    """Return the kind of what is of one of two kinds; ``None`` if there is none."""
    if are_alike(kind, other):
        return kind
    return VALUE if all(each is VALUE or is_plain_constant(each) for each in (kind, other)) else None


def is_plain_constant(kind: Any) -> bool:
    """Whether a value is known, and a constant."""
    return isinstance(kind, Known) and is_constant(kind.value)


def is_located(kind: Any) -> bool:
    """Whether a value is known, and an envoy or an operation of one."""
    return isinstance(kind, Known) and isinstance(kind.value, (Located, Source))


def is_storable(kind: Any) -> bool:
    """Whether a value may go into a container, or to a function that computes: it can be got at there as a value."""
    return kind in (OWN, VALUE) if not isinstance(kind, tuple) else isinstance(kind, Known) and not is_located(kind)


def is_operand(kind: Any) -> bool:
    """Whether an operator or a test may be applied to this kind of value: then it does nothing of its own."""
    if isinstance(kind, Known):
        return isinstance(kind.value, torch.Tensor) or is_constant(kind.value)
    return isinstance(kind, Items) or kind is OWN or kind is VALUE


def truth_of(kind: Any) -> bool | None:
    """Return what a test of a value says in each replay; ``None`` if that is not known."""
    return bool(kind.value) if is_plain_constant(kind) else None


@functools.cache
def harmless_functions() -> frozenset[int]:
    """Identities of the functions that only compute: torch's that take tensors, those that make some, and some of Python's."""
    found: set[int] = {id(getattr(torch, name)) for name in _FACTORIES}
    for functions in torch.overrides.get_overridable_functions().values():
        found.update(id(function) for function in functions if getattr(function, "__name__", "") not in REACHING_OUT)
    found.update(id(value) for name, value in vars(math).items() if callable(value) and not name.startswith("_"))
    found.update(id(function) for function in _HARMLESS_BUILTINS)
    found.update(id(value) for value in (torch.Size, torch.device, save))
    return frozenset(found)


@functools.cache
def is_method(name: str) -> bool:
    """Whether tensors or plain containers and strings have such a method."""
    return any(callable(getattr(kind, name, None)) for kind in (torch.Tensor, tuple, list, dict, str, torch.Size))


def is_plain_envoy(kind: type) -> bool:
    """Whether a class of envoys has the properties and methods of all envoys, and not some of a user's."""
    names = ("output", "input", "inputs", "skip", "source")
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "nnsight"]
    return all(getattr(kind, name, None) is getattr(bases[0], name, None) for name in names)


def all_plain(envoy: Any) -> bool:
    """Whether an envoy and all below it are plain, see :func:`is_plain_envoy`."""
    return all(is_plain_envoy(type(each)) for each in (envoy.modules() if hasattr(envoy, "modules") else [envoy]))
