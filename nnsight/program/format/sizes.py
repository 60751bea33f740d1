"""Sizes that a block reads while a program for other inputs is recorded.

During a recording, Python computes with a size, and the program contains only the result, such as a position or a quotient. The program
would give wrong results for inputs of other sizes. So a node ``size`` records every size that the block reads, that a function of torch
computes with, or that decides how many tensors a function returns (``chunk``). A run with another size is refused, with the user's line.
Composite operators of the table (``matmul``, ``reshape``) are single nodes, so the sizes that torch reads inside them are not recorded.

A size that depends on values, as in ``hidden[hidden > 0]``, is a ``SymInt`` in a recording. Reading it cuts the recording, or is refused.

A :class:`Shape` notes which of its sizes are read: ``hidden.shape[-1]`` fixes the width of the model, but not the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .operators import OPERATORS

#: Prefixes of the names of integer arguments that are not sizes: dimensions, choices, and integers that torch passes on unchanged.
_NO_SIZES = ("dim", "reduction", "normalized_shape", "pad")

#: Functions whose operators have other names. Their integers come from the block.
_INDEXING = frozenset({"__getitem__", "__setitem__"})

#: Methods that return sizes.
SIZE_METHODS = frozenset({"size", "numel", "nelement", "__len__", "stride", "sym_size", "sym_numel"})

_INTEGERS = frozenset({"int", "SymInt", "List[int]", "List[SymInt]"})


class Shape(tuple[int, ...]):
    """The sizes of a tensor. It notes which of them are read, and asks for the value of a size that depends on values.

    Functions of torch read the entries of a tuple without calling its methods, so they get the result of :func:`plain` instead.
    """

    _note: Callable[[int], int | None]
    _read: dict[int, int]

    def __new__(cls, sizes: torch.Size, note: Callable[[int], int | None]) -> Shape:
        """Return the shape ``sizes``. ``note(dim)`` is called for each dimension that is read, and returns the size if it was unknown."""
        made = super().__new__(cls, sizes)
        made._note, made._read = note, {}
        return made

    def all(self) -> torch.Size:
        """Return all sizes, and note that each of them is read."""
        return torch.Size(self[:])

    def numel(self) -> int:
        """Return the number of elements of the tensor."""
        return self.all().numel()

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]
        if isinstance(found, int):
            if found not in self._read:
                size = self._note(found)
                self._read[found] = super().__getitem__(found) if size is None else size
            return self._read[found]
        return tuple(self[dim] for dim in found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.all())

    def __repr__(self) -> str:
        return repr(self.all())

    def __hash__(self) -> int:
        return hash(self.all())


def has_unknown_size(tensor: torch.Tensor) -> bool:
    """Whether a size of a fake tensor depends on values."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def known_dims(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a fake tensor whose sizes do not depend on values."""
    return [dim for dim, size in enumerate(tensor.shape) if not isinstance(size, torch.SymInt)]


def _reads_all(name: str) -> Any:
    def method(self: Shape, *args: Any) -> Any:
        return getattr(self.all(), name)(*map(plain, args))

    return method


for _name in "eq ne lt le gt ge add mul rmul contains".split():
    setattr(Shape, f"__{_name}__", _reads_all(f"__{_name}__"))
for _name in "count index".split():
    setattr(Shape, _name, _reads_all(_name))
Shape.__radd__ = lambda self, other: other + self.all()  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    """Return an argument of a function, with all sizes in place of a :class:`Shape`."""
    return value.all() if isinstance(value, Shape) else value


#: Operators that functions of torch use to divide by a size.
_SCALING = frozenset({"aten.div.Tensor", "aten.div.Scalar", "aten.mul.Tensor", "aten.mul.Scalar"})

#: Operators that split a dimension: the name of their argument, and a function of the size and that argument that counts the parts.
_DIVIDING: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "aten.unbind.int": ("", lambda size, _: size),
    "aten.split.Tensor": ("split_size", lambda size, length: -(-size // max(length, 1))),
    "aten.chunk.default": ("chunks", min),
    "aten.tensor_split.sections": ("sections", lambda _, sections: sections),
}


def division(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the dimension that an operator splits, and the number of its results; ``None`` if it splits no dimension."""
    if operator not in _DIVIDING:
        return None
    names = [argument.name for argument in OPERATORS[operator]._schema.arguments]
    given = {"dim": 0, **dict(zip(names, args, strict=False)), **kwargs}
    name, count = _DIVIDING[operator]
    return given["dim"], count(given["self"].shape[given["dim"]], given.get(name, 1))


def takes_sizes(function: str, operator: str, args: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether an operator gets integers that torch computed, perhaps from sizes. They are not ``given`` to the calling ``function``."""
    if function in _INDEXING:
        return False
    same = function.partition(".")[0].strip("_") == operator.split(".")[1].strip("_")
    integers = {item for item in given if type(item) is int}
    said = integers if same else set()
    for argument, value in zip(OPERATORS[operator]._schema.arguments, args, strict=False):
        kind = str(argument.real_type)
        kind = kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind
        if operator in _SCALING and type(value) is int and value not in integers:
            return True
        if kind in _INTEGERS and not argument.name.startswith(_NO_SIZES):
            usual = argument.default_value
            numbers, known = (item if isinstance(item, (list, tuple)) else [item] for item in (value, usual))
            if any(type(number) is int and number >= 0 and number not in said and number not in known for number in numbers):
                return True
    return False
