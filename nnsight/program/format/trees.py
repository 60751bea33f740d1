"""Nested values as JSON.

A *tree* is JSON. Numbers, booleans and null stand for themselves. Each other value is an object with one key, which is its kind:

=================================  ======================================================================
``{"ref": [node, output]}``        the tensor number ``output`` in the result of a node of the program
``{"tensor": name}``               a tensor of the container
``{"list": [...]}``                a list; ``{"tuple": [...]}`` likewise
``{"dict": [[key, tree], ...]}``   a dict; keys are strings or integers
``{"str": text}``                  a string
``{"float": "inf"}``               a float that JSON cannot write: ``inf``, ``-inf``, ``nan``
``{"dtype": "float32"}``           a dtype of torch
``{"absent": why}``                no value: only the client has it, or it was never computed
=================================  ======================================================================

Each place of a program allows certain kinds, and trees are checked against them. Reading a tree makes no other objects than these values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .errors import require

#: A nested value as JSON.
Tree = Any

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool".split()
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

#: Maximum length of names, options and keys.
MAX_STRING = 256


class Absent:
    """The type of :data:`ABSENT`, which stands for a missing value."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = Absent()

#: The content of ``{"absent": ...}`` where the model had ``None``.
NONE = "None"


class Budget:
    """The number of items that the trees of a job may still contain, and the maximum depth of each tree."""

    def __init__(self, items: int, nesting: int) -> None:
        self.items, self.nesting = items, nesting

    def spend(self, depth: int) -> None:
        """Count one item. Raise an :class:`InvalidProgramError` if there are too many, or if ``depth`` is too large."""
        self.items -= 1
        require(self.items >= 0, "The program has more items than the limit `items` allows.")
        require(depth <= self.nesting, f"A value is nested more deeply than the limit `nesting`, {self.nesting}.")


def is_int(value: Any) -> bool:
    """Whether ``value`` is an integer that fits into 64 bits. Booleans do not count as integers."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_text(value: Any) -> bool:
    """Whether ``value`` is a short string of printable characters."""
    return type(value) is str and len(value) <= MAX_STRING and value.isprintable()


def is_finite(value: Any) -> bool:
    """Whether ``value`` is an integer that fits into 64 bits, or a finite float."""
    return is_int(value) or (type(value) is float and math.isfinite(value))


def check_tree(tree: Tree, kinds: frozenset[str], budget: Budget, depth: int = 0) -> None:
    """Raise an :class:`InvalidProgramError` unless ``tree`` is well formed and has only ``kinds``, numbers, booleans and null."""
    budget.spend(depth)
    if tree is None or type(tree) is bool:
        return
    if type(tree) in (int, float):
        require(is_finite(tree), "A number is out of range.")
        return
    require(type(tree) is dict and len(tree) == 1, f"A value is a {type(tree).__name__}, not a number or an object with one key.")
    ((kind, content),) = tree.items()
    require(kind in kinds, f"A value of kind {kind[:40]!r} is not allowed here.")
    require(_CHECKS[kind](content), f"A value of kind {kind!r} is malformed.")
    if kind in ("list", "tuple"):
        for item in content:
            check_tree(item, kinds, budget, depth + 1)
    elif kind == "dict":
        seen = set()
        for pair in content:
            named = type(pair) is list and len(pair) == 2 and (is_text(pair[0]) or is_int(pair[0]))
            require(named and pair[0] not in seen, "A dict is malformed, or has the same key twice.")
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


def is_ref(value: Any) -> bool:
    """Whether JSON is a reference to the result of a node."""
    return type(value) is dict and len(value) == 1 and type(value.get("ref")) is list


def references(value: Any) -> Iterator[tuple[int, int]]:
    """Yield the node and output of each reference in checked JSON, which is a tree or a node."""
    if is_ref(value):
        yield value["ref"][0], value["ref"][1]
    elif type(value) in (list, dict):
        for item in value if type(value) is list else value.values():
            yield from references(item)


def with_references(value: Any, replace: Callable[[int, int], Any]) -> Any:
    """Return checked JSON with ``replace(node, output)`` in place of each reference."""
    if type(value) is list:
        return [with_references(item, replace) for item in value]
    if type(value) is not dict:
        return value
    return replace(*value["ref"]) if is_ref(value) else {key: with_references(item, replace) for key, item in value.items()}


def tensor_names(tree: Tree) -> Iterator[str]:
    """Yield the name of each ``tensor`` in a checked tree."""
    for kind, content in leaves(tree):
        if kind == "tensor":
            yield content


def leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the kind and content of each leaf of a checked tree, apart from numbers, booleans and null."""
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
    """Return the value of a checked tree, or of a plain list of trees. ``leaf(kind, content)`` returns the values that are not plain data.

    Items of lists, tuples and dicts are left out if ``leaf`` returns :data:`ABSENT` for them.
    """
    if type(tree) is list:
        return [read_tree(item, leaf) for item in tree]
    if type(tree) is not dict:
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "ref":
            return leaf(kind, content)
        case "list" | "tuple":
            values = [value for item in content if (value := read_tree(item, leaf)) is not ABSENT]
            return values if kind == "list" else tuple(values)
        case "dict":
            return {key: value for key, item in content if (value := read_tree(item, leaf)) is not ABSENT}
        case "float":
            return FLOATS[content]
        case "dtype":
            return DTYPES[content]
        case "str":
            return content
    return leaf(kind, content)


def write_tree(value: Any, leaf: Callable[[Any], Tree]) -> Tree:
    """Return the tree of a value. ``leaf(value)`` returns the tree of each tensor, and of each object that a tree cannot represent."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if is_int(value) else leaf(value)
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
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
