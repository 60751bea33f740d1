"""Sizes that a block looks at while a program is recorded, which is to run on other inputs, too.

What Python does with a size is over when the block has been recorded: a program has the position, the loop, or the quotient that came of
it. So for every size that is looked at, and that torch takes for an operation made of others (``chunk``, a product of matrices), a node
``size`` says what it was. Where a program meets another size, it is refused with the user's line, in place of results that nobody meant.

A :class:`Shape` notes which of its sizes are looked at: ``hidden.shape[-1]`` fixes the width of the model and no length of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .operators import OPERATORS

#: Beginnings of arguments of operators that are integers and no sizes: dimensions, choices, and what torch passes on as it is.
_NO_SIZES = ("dim", "reduction", "normalized_shape", "pad")

#: What comes down to operators of other names, with the integers that the block gives.
_INDEXING = frozenset({"__getitem__", "__setitem__"})

#: Methods that tell sizes.
SIZE_METHODS = frozenset({"size", "numel", "nelement", "__len__", "stride", "sym_size", "sym_numel"})

_INTEGERS = frozenset({"int", "SymInt", "List[int]", "List[SymInt]"})


class Shape(tuple[int, ...]):
    """The sizes of a tensor, of which it is noted which are looked at.

    Functions of torch would take them unseen, so they get what :func:`plain` returns.
    """

    _note: Callable[[int], None]

    def __new__(cls, sizes: torch.Size, note: Callable[[int], None]) -> Shape:
        """Return the shape of ``sizes``; ``note`` is called with the number of each dimension that is looked at."""
        made = super().__new__(cls, sizes)
        made._note = note
        return made

    def all(self) -> torch.Size:
        """Return all sizes, looking at each."""
        return torch.Size(self[:])

    def numel(self) -> int:
        """Return how many entries there are."""
        return self.all().numel()

    def __getitem__(self, index: Any) -> Any:
        found = range(len(self))[index]
        for dim in [found] if isinstance(found, int) else found:
            self._note(dim)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        return iter(self.all())

    def __repr__(self) -> str:
        return repr(self.all())

    def __hash__(self) -> int:
        return hash(self.all())


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


def takes_sizes(function: str, operator: str, args: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether an operator got integers that torch computed, perhaps of sizes.

    Args:
        function: Name of the function that the block called.
        operator: Name of an operator that it came down to.
        args: Arguments of the operator.
        given: Leaves of the arguments of the function.
    """
    if function in _INDEXING:
        return False
    same = function.strip("_") == operator.split(".")[1].strip("_")
    said = {item for item in given if type(item) is int} if same else set()
    for argument, value in zip(OPERATORS[operator]._schema.arguments, args, strict=False):
        kind = str(argument.real_type)
        kind = kind[len("Optional[") : -1] if kind.startswith("Optional[") else kind
        if kind in _INTEGERS and not argument.name.startswith(_NO_SIZES):
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if any(type(number) is int and number >= 0 and number not in said for number in numbers):
                return True
    return False
