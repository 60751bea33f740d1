"""Results as bytes: safetensors for the tensors, a JSON tree for how they nest."""

from __future__ import annotations

from typing import Any

import torch

from .container import pack, unpack
from .errors import InvalidProgramError
from .trees import ABSENT, NONE, Budget, check_tree, read_tree, tensor_names, write_tree

VERSION = 1

_KINDS = frozenset({"list", "tuple", "dict", "tensor", "str", "float", "dtype", "absent"})

#: Results come from a server that the user chose: these bounds are for damaged files.
_MAX_BYTES = 2**40
_MAX_HEADER = 2**28


def encode_results(values: dict[str, Any]) -> bytes:
    """Return values by name, nested lists, tuples and dicts of tensors and plain data, as a container."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return {"absent": type(value).__name__}
        if id(value) not in names:
            names[id(value)] = f"r{len(tensors)}"
            tensors[names[id(value)]] = value
        return {"tensor": names[id(value)]}

    saves = {name: write_tree(value, leaf) for name, value in values.items()}
    return pack_results(saves, tensors)


def pack_results(saves: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """Return trees by name, and the tensors that they mention, as a container."""
    return pack({"version": VERSION, "saves": saves}, tensors)


def unpack_results(results: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the trees and the tensors of a container.

    Raises:
        InvalidProgramError: If it is malformed.
    """
    content, tensors = unpack(results, _MAX_BYTES, _MAX_HEADER)
    if type(content) is not dict or set(content) != {"version", "saves"} or content["version"] != VERSION:
        raise InvalidProgramError("These are no results of a version that can be read.")
    if type(content["saves"]) is not dict:
        raise InvalidProgramError("The results are malformed.")
    budget = Budget(10**8, 64)
    for tree in content["saves"].values():
        check_tree(tree, _KINDS, budget)
        if not tensors.keys() >= set(tensor_names(tree)):
            raise InvalidProgramError("The results lack a tensor.")
    return content["saves"], tensors


def decode_results(results: bytes) -> dict[str, Any]:
    """Return saved values by name: nested lists, tuples and dicts of tensors and plain data. Nothing is unpickled.

    Values that only the client has, such as objects of its own, are left out; so are entries that were never computed.

    Raises:
        InvalidProgramError: If the container is malformed.
    """
    saves, tensors = unpack_results(results)

    def leaf(kind: str, content: Any) -> Any:
        return tensors[content] if kind == "tensor" else None if content == NONE else ABSENT

    made = {name: read_tree(tree, leaf) for name, tree in saves.items()}
    return {name: value for name, value in made.items() if value is not ABSENT}
