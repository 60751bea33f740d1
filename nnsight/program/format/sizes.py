"""Sizes that a block reads while a program for other inputs is recorded.

Python computes with a size in the recording, and the program has only the result: a position, a number of steps, a quotient. So for every
size that the block reads, and that a function of torch computes with or makes a number of tensors of (``chunk``), a node ``size``
records its value. A run with another size is refused with the user's line; its results would be wrong. Composite operators of the table
(``matmul``, ``reshape``) are recorded as they are, so what torch does with sizes in them needs no such node.

A size that depends on values, as that of ``hidden[hidden > 0]``, is an unknown of torch, a ``SymInt``, in every recording. A block that
reads it is refused.

A :class:`Shape` notes which of its sizes are read: ``hidden.shape[-1]`` fixes the width of the model and no length of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .operators import OPERATORS

#: Prefixes of integer arguments that are no sizes: dimensions, choices, and integers that torch passes on unchanged.
_NO_SIZES = ("dim", "reduction", "normalized_shape", "pad")

#: Functions that become operators of other names, with the integers that the block gives.
_INDEXING = frozenset({"__getitem__", "__setitem__"})

#: Methods that return sizes.
SIZE_METHODS = frozenset({"size", "numel", "nelement", "__len__", "stride", "sym_size", "sym_numel"})

_INTEGERS = frozenset({"int", "SymInt", "List[int]", "List[SymInt]"})


class Shape(tuple[int, ...]):
    """The sizes of a tensor; notes which of them are read, and asks for one that depends on values.

    Functions of torch would read them unseen, so they get the result of :func:`plain`.
    """

    _note: Callable[[int], int | None]

    def __new__(cls, sizes: torch.Size, note: Callable[[int], int | None]) -> Shape:
        """Return the shape of ``sizes``; ``note`` is called with the number of each dimension that is read, and may return its size."""
        made = super().__new__(cls, sizes)
        made._note = note
        return made

    def all(self) -> torch.Size:
        """Return all sizes, and note each as read."""
        return torch.Size(self[:])

    def numel(self) -> int:
        """Return how many entries there are."""
        return self.all().numel()

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]
        if isinstance(found, int):
            size = self._note(found)
            return super().__getitem__(found) if size is None else size
        return tuple(self[dim] for dim in found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.all())

    def __repr__(self) -> str:
        return repr(self.all())

    def __hash__(self) -> int:
        return hash(self.all())


def has_unknown_size(tensor: torch.Tensor) -> bool:
    """Whether a size of a fake depends on values."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def known_dims(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a fake whose sizes depend on no values."""
    return [dim for dim, size in enumerate(tensor.shape) if not isinstance(size, torch.SymInt)]


def _looking(name: str) -> Any:
    def method(self: Shape, *args: Any) -> Any:
        return getattr(self.all(), name)(*map(plain, args))

    return method


for _name in "eq ne lt le gt ge add mul rmul contains".split():
    setattr(Shape, f"__{_name}__", _looking(f"__{_name}__"))
for _name in "count index".split():
    setattr(Shape, _name, _looking(_name))
Shape.__radd__ = lambda self, other: other + self.all()  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    """Return an argument of a function, with sizes in place of a :class:`Shape`."""
    return value.all() if isinstance(value, Shape) else value


#: Operators with which functions of torch divide by a size.
_SCALING = frozenset({"aten.div.Tensor", "aten.div.Scalar", "aten.mul.Tensor", "aten.mul.Scalar"})

#: Operators that divide a dimension: the argument that says how, and the number of parts by the size and that argument.
_DIVIDING: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "aten.unbind.int": ("", lambda size, _: size),
    "aten.split.Tensor": ("split_size", lambda size, length: -(-size // max(length, 1))),
    "aten.chunk.default": ("chunks", min),
    "aten.tensor_split.sections": ("sections", lambda _, sections: sections),
}


def division(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return which dimension an operator divides, and the number of its results; ``None`` if it divides none."""
    if operator not in _DIVIDING:
        return None
    names = [argument.name for argument in OPERATORS[operator]._schema.arguments]
    given = {"dim": 0, **dict(zip(names, args, strict=False)), **kwargs}
    name, count = _DIVIDING[operator]
    return given["dim"], count(given["self"].shape[given["dim"]], given.get(name, 1))


def takes_sizes(function: str, operator: str, args: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether an operator got integers that torch computed, perhaps from sizes: integers that are not ``given`` to the function."""
    if function in _INDEXING:
        return False
    same = function.strip("_") == operator.split(".")[1].strip("_")
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
