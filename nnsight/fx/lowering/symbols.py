"""The symbols of one lowering, what a backend assumes about them, and the strides of tensors that one lowered graph hands to another.

The symbols are new ones, with the present sizes and numbers as hints. A lowering is made for inputs of certain strides, and generated code
relies on them. The fakes of a plan have the strides of eager operations, but a backend may return others: Inductor drops
``torch.cat([empty, keys])`` and returns ``keys``, a view of a fused projection.

* Between regions, a tensor with other strides than the next region was lowered for is copied (:func:`with_strides`). Few are.
* Behind a cut, the rest of the graph is lowered for the strides that its inputs have. Where sizes are symbolic, so are the
  strides: a *layout* says how strides follow from sizes, and a lowering serves all inputs of one layout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from ..block_events import Declare, Number, Symbol
from ..torch_compat import ConstantSource

#: For each dimension, innermost first: its number, and its stride as a multiple of that of a tensor without gaps. Dimensions of size one
#: come last, because their strides are never used.
Layout = tuple[tuple[int, int], ...]


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return how the strides of ``tensor`` follow from its sizes; ``None`` if they overlap or leave gaps that are no multiple."""
    sizes, strides = tensor.shape, tensor.stride()
    found: list[tuple[int, int]] = []
    dense = 1
    single = [dim for dim, size in enumerate(sizes) if size == 1]
    for dim in sorted(set(range(len(sizes))).difference(single), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] % dense:
            return None
        found.append((dim, strides[dim] // dense))
        dense = strides[dim] * sizes[dim] or dense
    return (*found, *((dim, 1) for dim in single))


def strides_in(layout: Layout, sizes: Sequence[Any]) -> list[Any]:
    """Return the strides that a tensor of these sizes, symbolic or not, has in a layout."""
    strides: list[Any] = [0] * len(sizes)
    dense: Any = 1
    for dim, gap in layout:
        strides[dim] = dense * gap
        if gap:
            dense = strides[dim] * sizes[dim]
    return strides


def are_equal(sizes: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two sets of strides put the elements of a tensor of these sizes at the same places."""
    return all(one == other or size == 1 for size, one, other in zip(sizes, strides, others, strict=True))


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor``, or a copy of it that has these strides; gradients flow through the copy."""
    if tensor.stride() == strides or are_equal(tensor.shape, tensor.stride(), strides):
        return tensor
    return copied(tensor, strides)


def copied(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a copy with these strides. Along a dimension of stride 0 there is one element, and gradients are those of a copy of all."""
    shape = tensor.shape
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return made if made.shape == shape else made.expand(shape)


def now(number: int | torch.SymInt) -> int:
    """Return the present value of a size, without assuming that it stays so."""
    return int(number.node.hint) if isinstance(number, torch.SymInt) else number


def is_contiguous(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether strides, symbolic or not, are those of a contiguous tensor, for all values of the symbols."""
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if expression(size) == 1:
            continue
        if expression(stride) != expected:
            return False
        expected = expected * expression(size)
    return True


def expression(number: Any) -> Any:
    """Return a size as a SymPy expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def as_python(number: Any, names: dict[Any, str]) -> str:
    """Return source that computes a symbolic size from the source in ``names`` for each symbol; raise ``LookupError`` if one is missing."""
    found = expression(number)
    missing = found.free_symbols - names.keys()
    if missing:
        raise LookupError(f"no input tells the size {sorted(map(str, missing))[0]}")
    return str(PythonPrinter().doprint(found.xreplace({symbol: sympy.Symbol(names[symbol]) for symbol in found.free_symbols})))


def wanting_grad(fake: Any, is_leaf: bool) -> torch.Tensor:
    """Let autograd follow ``fake``. A leaf may not be edited in place, the result of an operation may be."""
    if is_leaf:
        return fake.requires_grad_()
    with fake.fake_mode, torch.enable_grad():  # in place, because a copy has strides of its own
        seed = torch.zeros((), dtype=fake.dtype, device=fake.device, requires_grad=True)
        return fake.copy_(seed)


class Symbols:
    """Symbolic sizes for one lowering, in a shape environment of their own.

    Args:
        names: The symbols of the captured graph.
        binding: The size each of them has now, then the numbers of the program.
        free: Those of ``names`` about which nothing may be assumed, not even that they are positive.
        fixed: Kinds of numbers that are constants.

    Attributes:
        environment: The shape environment, which notes what is assumed about the symbols.
        mode: Mode of the fakes of this lowering.
        fresh: A symbolic number for each of ``names``.
        numbers: The numbers of the program, symbolic or fixed.
        symbols: The symbols of all these.
    """

    def __init__(
        self,
        names: Sequence[Any],
        binding: Sequence[int | float],
        free: Collection[Any] = (),
        fixed: Collection[type] = (),
    ) -> None:
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment, static_shapes=False)
        self._binding = tuple(binding)
        self.fresh: dict[Any, Any] = {}
        for number, (name, size) in enumerate(zip(names, binding, strict=False)):
            source = ConstantSource(f"size_{number}")
            # Sizes of 0 and 1 are no symbols. Numbers that the model is called with may be 0 or 1, and are symbols.
            is_number = name in free or size in (0, 1)
            create = self.environment.create_unspecified_symbol if is_number else self.environment.create_symbol
            self.fresh[name] = self.environment.create_symintnode(
                create(size, source, DimDynamic.DYNAMIC), hint=size, source=source
            )
        self.numbers: list[Any] = []
        self.assumed: list[Any] = []
        symbols = [number.node.expr for number in self.fresh.values()]
        for position, value in enumerate(binding[len(names) :]):
            if type(value) in fixed:
                symbols.append(sympy.Symbol(f"fixed_{position}"))
                self.assumed.append(sympy.Eq(symbols[-1], value))
                self.numbers.append(value)
            else:
                self.numbers.append(self._number(position, value))
                symbols.append(self.numbers[-1].node.expr)
        self.symbols = tuple(symbols)

    def as_now(self) -> list[Any]:
        """Return the assumption that sizes and numbers are always those of now."""
        return [sympy.Eq(symbol, value) for symbol, value in zip(self.symbols, self._binding, strict=True)]

    def _number(self, index: int, value: int | float) -> Any:
        """Return a symbolic number about which nothing is assumed."""
        source = ConstantSource(f"number_{index}")
        symbol = self.environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        if isinstance(value, int):
            return self.environment.create_symintnode(symbol, hint=value, source=source)
        return self.environment.create_symfloatnode(symbol, hint=value, source=source)

    def conditions(self) -> tuple[Any, ...]:
        """Return what has been assumed so far, as expressions over ``symbols``."""
        conditions = [*self.assumed, *(self._over_symbols(guard.expr) for guard in self.environment.guards)]
        for symbol in self.symbols:
            replaced = self.environment.replacements.get(symbol)
            if replaced is not None and replaced != symbol:
                conditions.append(sympy.Eq(symbol, replaced))
        return tuple(conditions)

    def _over_symbols(self, assumed: Any) -> Any:
        """Return an assumption over ``symbols`` alone; a backend also makes symbols for numbers that it finds equal or divides."""
        others = assumed.free_symbols.difference(self.symbols)
        known = {symbol: self.environment.replacements[symbol] for symbol in others if symbol in self.environment.replacements}
        found = assumed.xreplace(known)
        if found.free_symbols.issubset(self.symbols):
            return found
        return sympy.And(*self.as_now())  # of the others only their present values are known

    def fake(self, example: Any, actual: Any) -> Any:
        """Return a fake of ``actual`` whose symbolic sizes are those of ``example``, over the fresh symbols."""
        if not isinstance(actual, torch.Tensor):
            return self.renewed(example) if isinstance(example, torch.SymInt) else actual
        numbers = (*example.shape, *example.stride()) if isinstance(example, torch.Tensor) else ()
        if not any(isinstance(number, torch.SymInt) for number in numbers):
            return self.mode.from_tensor(actual, static_shapes=True)
        size = [self.renewed(number) for number in example.shape]
        stride = [self.renewed(number) for number in example.stride()]
        if not are_equal(actual.shape, actual.stride(), [now(number) for number in stride]):
            layout = layout_of(actual)
            if layout is None:
                return self.mode.from_tensor(actual, static_shapes=True)
            stride = strides_in(layout, size)
        return self.fake_like(actual, size, stride)

    def _declared(self, size: Any) -> Any:
        """Return a size, or a stride, of the declaration of an external."""
        if isinstance(size, Symbol):
            return list(self.fresh.values())[size.position]
        return self.numbers[size.index] if isinstance(size, Number) else size

    def fake_of_placeholder(self, node: torch.fx.Node, actual: Any) -> Any:
        """Return the fake input for a placeholder of a spliced graph that is about to be called with ``actual``."""
        declaration: Declare | None = node.meta.get("declaration")
        taken: Number | None = node.meta.get("number")
        if taken is not None:
            number = self.numbers[taken.index]
            if taken.kind is not float:
                return number
            fake: Any = self.mode.from_tensor(actual, static_shapes=True)
            if isinstance(number, torch.SymFloat):
                fake.item_memo = number  # what `item` of the fake returns
            return fake
        declared = () if declaration is None else (*declaration.shape, *(declaration.stride or ()))
        if declaration is not None and any(isinstance(size, (Symbol, Number)) for size in declared):
            sizes = [self._declared(size) for size in declaration.shape]
            stride = None if declaration.stride is None else [self._declared(size) for size in declaration.stride]
            return self.fake_like(actual, sizes, stride)
        return self.fake(node.meta.get("example_value"), actual)

    def fake_like(self, actual: torch.Tensor, size: list[Any], stride: list[Any] | None) -> torch.Tensor:
        """Return a fake of ``actual`` with the given sizes; contiguous without ``stride``."""
        with self.mode, torch.no_grad():
            if stride is None:
                fake = torch.empty(size, dtype=actual.dtype, device=actual.device)
            else:
                fake = torch.empty_strided(size, stride, dtype=actual.dtype, device=actual.device)
        return wanting_grad(fake, actual.is_leaf) if actual.requires_grad else fake

    def renewed(self, number: Any) -> Any:
        """Return ``number`` with its symbols replaced by the fresh ones."""
        if not isinstance(number, torch.SymInt):
            return number
        expression = number.node.expr
        if expression.is_number:  # dynamo found out while tracing that the size is fixed
            return int(expression)
        if expression.is_symbol:
            return self.fresh[expression]
        hints = {symbol: new.node.hint for symbol, new in self.fresh.items()}
        renamed = expression.xreplace({symbol: new.node.expr for symbol, new in self.fresh.items()})
        return self.environment.create_symintnode(renamed, hint=int(expression.xreplace(hints)))
