"""Results as bytes: safetensors for the tensors, a JSON tree for how they nest."""

from __future__ import annotations

from typing import Any

import torch

from .container import pack, unpack
from .errors import require
from .trees import ABSENT, NONE, Budget, Tree, check_tree, read_tree, tensor_names, write_tree

VERSION = 1

_KINDS = frozenset({"list", "tuple", "dict", "tensor", "str", "float", "dtype", "absent"})

#: Results come from a server that the user chose: these bounds are for damaged files.
_MAX_BYTES = 2**40
_MAX_HEADER = 2**28


class Tensors(dict[str, torch.Tensor]):
    """The tensors of results by name, each once."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}

    def tree(self, tensor: torch.Tensor) -> Tree:
        """Return the tree of a tensor, which becomes part of the results."""
        name = self._names.setdefault(id(tensor), f"r{len(self)}")
        self[name] = tensor
        return {"tensor": name}


def encode_results(values: dict[str, Any]) -> bytes:
    """Return values by name, nested lists, tuples and dicts of tensors and plain data, as a container."""
    tensors = Tensors()

    def leaf(value: Any) -> Any:
        return tensors.tree(value) if isinstance(value, torch.Tensor) else {"absent": type(value).__name__}

    return pack_results({name: write_tree(value, leaf) for name, value in values.items()}, tensors)


def pack_results(saves: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """Return trees by name, and the tensors that they mention, as a container."""
    return pack({"version": VERSION, "saves": saves}, tensors)


def unpack_results(results: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the trees and the tensors of a container; raise an :class:`InvalidProgramError` if it is malformed."""
    content, tensors = unpack(results, _MAX_BYTES, _MAX_HEADER)
    known = type(content) is dict and set(content) == {"version", "saves"} and content["version"] == VERSION
    require(known, "These are no results of a version that can be read.")
    require(type(content["saves"]) is dict, "The results are malformed.")
    budget = Budget(10**8, 64)
    for tree in content["saves"].values():
        check_tree(tree, _KINDS, budget)
        require(tensors.keys() >= set(tensor_names(tree)), "The results lack a tensor.")
    return content["saves"], tensors


def decode_results(results: bytes) -> dict[str, Any]:
    """Return saved values by name: nested lists, tuples and dicts of tensors and plain data. Nothing is unpickled.

    Values that only the client has, such as objects of its own, are left out, as are entries that were never computed.

    Raises:
        InvalidProgramError: If the container is malformed.
    """
    return values_of(*unpack_results(results))


def values_of(saves: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the values that trees stand for, by name, without those that are absent."""

    def leaf(kind: str, content: Any) -> Any:
        return tensors[content] if kind == "tensor" else None if content == NONE else ABSENT

    made = {name: read_tree(tree, leaf) for name, tree in saves.items()}
    return {name: value for name, value in made.items() if value is not ABSENT}
