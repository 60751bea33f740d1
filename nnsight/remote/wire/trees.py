"""Nested values as JSON.

A *tree* is JSON. Numbers, booleans and null stand for themselves; everything else is an object with one key that says what it is:

=================================  ======================================================================
``{"ref": [node, output]}``        a tensor that a node of the program makes
``{"tensor": name}``               a tensor of the container
``{"list": [...]}``                a list; ``{"tuple": [...]}`` likewise
``{"dict": [[key, tree], ...]}``   a dict; keys are strings or integers
``{"str": text}``                  a string
``{"float": "inf"}``               a float that JSON cannot write: ``inf``, ``-inf``, ``nan``
``{"dtype": "float32"}``           a dtype of torch
``{"absent": why}``                nothing: what the client alone has, or what was never computed
=================================  ======================================================================

Trees are checked against the kinds that their place allows, and never turned into anything but these values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .errors import InvalidProgramError

#: JSON of a nested value.
Tree = Any

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool".split()
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

#: Integers are those of torch.
MAX_INT = 2**63 - 1
MIN_INT = -(2**63)

#: Strings longer than this are never names, options or keys.
MAX_STRING = 256


class Absent:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = Absent()

#: What ``{"absent": ...}`` says of what the model had as ``None``.
NONE = "None"


class Budget:
    """How many more items the trees of one job may have.

    Args:
        items: Items of all trees together.
        nesting: Depth of each.
    """

    def __init__(self, items: int, nesting: int) -> None:
        self.items, self.nesting = items, nesting

    def spend(self, depth: int) -> None:
        """Count one item.

        Raises:
            InvalidProgramError: If there are too many, or they nest too deep.
        """
        self.items -= 1
        if self.items < 0:
            raise InvalidProgramError("The program has more items than the limit `items` allows.")
        if depth > self.nesting:
            raise InvalidProgramError(f"A value nests deeper than the limit `nesting`, {self.nesting}.")


def is_int(value: Any) -> bool:
    """Whether ``value`` is an integer that torch can hold; booleans are none."""
    return type(value) is int and MIN_INT <= value <= MAX_INT


def is_text(value: Any) -> bool:
    """Whether ``value`` is a short string of printable characters."""
    return type(value) is str and len(value) <= MAX_STRING and value.isprintable()


def check_tree(tree: Tree, kinds: frozenset[str], budget: Budget, depth: int = 0) -> None:
    """Raise unless ``tree`` is well formed and made of ``kinds`` (and numbers, booleans and null).

    Raises:
        InvalidProgramError: With what is wrong.
    """
    budget.spend(depth)
    if tree is None or type(tree) is bool:
        return
    if type(tree) in (int, float):
        if not (is_int(tree) or (type(tree) is float and math.isfinite(tree))):
            raise InvalidProgramError("A number is out of range.")
        return
    if type(tree) is not dict or len(tree) != 1:
        raise InvalidProgramError(f"A {type(tree).__name__} stands where a value belongs.")
    ((kind, content),) = tree.items()
    if kind not in kinds:
        raise InvalidProgramError(f"A value of kind {kind[:40]!r} is not allowed here.")
    if not _CHECKS[kind](content):
        raise InvalidProgramError(f"A value of kind {kind!r} is malformed.")
    if kind in ("list", "tuple"):
        for item in content:
            check_tree(item, kinds, budget, depth + 1)
    elif kind == "dict":
        seen = set()
        for pair in content:
            if type(pair) is not list or len(pair) != 2 or not (is_text(pair[0]) or is_int(pair[0])) or pair[0] in seen:
                raise InvalidProgramError("A dict is malformed, or has a key twice.")
            seen.add(pair[0])
            check_tree(pair[1], kinds, budget, depth + 1)


def _is_ref(content: Any) -> bool:
    return type(content) is list and len(content) == 2 and all(is_int(item) and item >= 0 for item in content)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "ref": _is_ref,
    "tensor": is_text,
    "list": lambda content: type(content) is list,
    "tuple": lambda content: type(content) is list,
    "dict": lambda content: type(content) is list,
    "str": is_text,
    "float": lambda content: type(content) is str and content in FLOATS,
    "dtype": lambda content: type(content) is str and content in DTYPES,
    "absent": is_text,
}


def references(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield the node and output of each reference in a checked tree."""
    for kind, content in leaves(tree):
        if kind == "ref":
            yield content[0], content[1]


def tensor_names(tree: Tree) -> Iterator[str]:
    """Yield the name of each tensor of the container that a checked tree mentions."""
    for kind, content in leaves(tree):
        if kind == "tensor":
            yield content


def leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield kind and content of each leaf of a checked tree that is written as an object."""
    if type(tree) is dict:
        ((kind, content),) = tree.items()
        if kind in ("list", "tuple"):
            for item in content:
                yield from leaves(item)
        elif kind == "dict":
            for _, item in content:
                yield from leaves(item)
        else:
            yield kind, content


def read_tree(tree: Tree, leaf: Callable[[str, Any], Any]) -> Any:
    """Return the value that a checked tree stands for; ``leaf(kind, content)`` gives references and tensors.

    Entries of lists for which ``leaf`` gives :data:`ABSENT` because they were never computed are left out.
    """
    if type(tree) is not dict:
        return tree
    ((kind, content),) = tree.items()
    if kind in ("list", "tuple"):
        values = [read_tree(item, leaf) for item in content]
        values = [value for value in values if value is not ABSENT]
        return values if kind == "list" else tuple(values)
    if kind == "dict":
        return {key: read_tree(item, leaf) for key, item in content}
    if kind == "float":
        return FLOATS[content]
    if kind == "dtype":
        return DTYPES[content]
    return content if kind == "str" else leaf(kind, content)


def write_tree(value: Any, leaf: Callable[[Any], Tree]) -> Tree:
    """Return the tree of a value; ``leaf(value)`` gives that of tensors, and of whatever has no tree of its own."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if is_int(value) else leaf(value)
    if kind is float:
        return (
            value if math.isfinite(value) else {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
        )
    if kind is str:
        return {"str": value} if is_text(value) else leaf(value)
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return {"dtype": DTYPE_NAMES[value]}
    if kind is list:
        return {"list": [write_tree(item, leaf) for item in value]}
    if isinstance(value, tuple):
        return {"tuple": [write_tree(item, leaf) for item in value]}
    if isinstance(value, dict) and all(is_text(key) or is_int(key) for key in value):
        return {"dict": [[key, write_tree(item, leaf)] for key, item in value.items()]}
    return leaf(value)
