"""Results as bytes: tensors in safetensors, and their nesting as a JSON tree."""

from __future__ import annotations

from typing import Any

import torch

from .container import pack, unpack
from .errors import require
from .trees import ABSENT, NONE, Budget, Tree, check_tree, read_tree, tensor_names, write_tree

VERSION = 1

_KINDS = frozenset({"list", "tuple", "dict", "tensor", "str", "float", "dtype", "absent"})

#: The user chose the server, so these bounds only protect against damaged files.
_MAX_BYTES = 2**40
_MAX_HEADER = 2**28


class Tensors(dict[str, torch.Tensor]):
    """The tensors of results by name. A tensor that is added twice has one name."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}

    def tree(self, tensor: torch.Tensor) -> Tree:
        """Add a tensor to the results, and return its tree."""
        name = self._names.setdefault(id(tensor), f"r{len(self)}")
        self[name] = tensor
        return {"tensor": name}


def encode_results(values: dict[str, Any]) -> bytes:
    """Return a container of values by name. A value is nested lists, tuples and dicts of tensors and plain data."""
    tensors = Tensors()

    def leaf(value: Any) -> Any:
        return tensors.tree(value) if isinstance(value, torch.Tensor) else {"absent": type(value).__name__}

    return pack_results({name: write_tree(value, leaf) for name, value in values.items()}, tensors)


def pack_results(saves: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """Return a container of trees by name, and of the tensors that they mention."""
    return pack({"version": VERSION, "saves": saves}, tensors)


def unpack_results(results: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the trees and the tensors of a container. Raise an :class:`InvalidProgramError` if it is malformed."""
    content, tensors = unpack(results, _MAX_BYTES, _MAX_HEADER)
    known = type(content) is dict and set(content) == {"version", "saves"} and content["version"] == VERSION
    require(known, f"The data is not a container of results in version {VERSION} of the format.")
    require(type(content["saves"]) is dict, "The results are malformed.")
    budget = Budget(10**8, 64)
    for tree in content["saves"].values():
        check_tree(tree, _KINDS, budget)
        require(tensors.keys() >= set(tensor_names(tree)), "The results lack a tensor.")
    return content["saves"], tensors


def decode_results(results: bytes) -> dict[str, Any]:
    """Return saved values by name: nested lists, tuples and dicts of tensors and plain data. Nothing is unpickled.

    Values that only the client has, such as its own objects, are left out. Entries that were never computed are left out, too.

    Raises:
        InvalidProgramError: If the container is malformed.
    """
    return values_of(*unpack_results(results))


def values_of(saves: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the values of trees by name, without absent values."""

    def leaf(kind: str, content: Any) -> Any:
        return tensors[content] if kind == "tensor" else None if content == NONE else ABSENT

    made = {name: read_tree(tree, leaf) for name, tree in saves.items()}
    return {name: value for name, value in made.items() if value is not ABSENT}
