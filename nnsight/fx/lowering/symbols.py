"""The symbols of one lowering, with a backend's assumptions about them, and the strides of tensors between two lowered graphs.

Each lowering has new symbols, with the present sizes and numbers as hints. It is made for inputs with certain strides, and generated code
relies on them. The fakes of a plan have the strides of eager operations, but a lowered graph may return other strides: Inductor drops
``torch.cat([empty, keys])`` and returns ``keys``, a view of a fused projection.

* Between regions, a tensor is copied if its strides are not those for which the next region was lowered (:func:`with_strides`). Few are.
* After a cut, the rest of the graph is lowered for the strides that its inputs have. If sizes are symbolic, strides are symbolic, too: a
  *layout* tells how strides follow from sizes, and a lowering serves all inputs with the same layout.
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
from ..torch_compat import ConstantSource, static_fake

#: For each dimension, innermost first: its number, and its stride divided by the stride that it would have without a gap. Dimensions of
#: size one come last, because their strides are never used.
Layout = tuple[tuple[int, int], ...]


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of ``tensor``; ``None`` if a stride is no multiple of the stride without a gap, as for overlapping elements."""
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
    """Return the strides of a tensor with this layout and these sizes, symbolic or not."""
    strides: list[Any] = [0] * len(sizes)
    dense: Any = 1
    for dim, gap in layout:
        strides[dim] = dense * gap
        if gap:
            dense = strides[dim] * sizes[dim]
    return strides


def are_equal(sizes: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether a tensor of these sizes has its elements at the same places with either of two sets of strides."""
    return all(one == other or size == 1 for size, one, other in zip(sizes, strides, others, strict=True))


def with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` if it has these strides, else a copy that has them; gradients flow through the copy."""
    if tensor.stride() == strides or are_equal(tensor.shape, tensor.stride(), strides):
        return tensor
    return copied(tensor, strides)


def copied(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a copy with these strides. A dimension of stride 0 is copied as one element and expanded; gradients flow through it."""
    shape = tensor.shape
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return made if made.shape == shape else made.expand(shape)


def now(number: int | torch.SymInt) -> int:
    """Return the present value of a size without adding a guard on it."""
    return int(number.node.hint) if isinstance(number, torch.SymInt) else number


def is_contiguous(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether the strides are those of a contiguous tensor for all values of the symbols in them."""
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if expression(size) == 1:
            continue
        if expression(stride) != expected:
            return False
        expected = expected * expression(size)
    return True


def expression(number: Any) -> Any:
    """Return a size, symbolic or not, as a SymPy expression."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def as_python(number: Any, names: dict[Any, str]) -> str:
    """Return Python source for a symbolic size; ``names`` has the source for each symbol. Raises ``LookupError`` if a symbol is missing."""
    found = expression(number)
    missing = found.free_symbols - names.keys()
    if missing:
        raise LookupError(f"the size {sorted(map(str, missing))[0]} does not follow from the sizes of the inputs")
    return str(PythonPrinter().doprint(found.xreplace({symbol: sympy.Symbol(names[symbol]) for symbol in found.free_symbols})))


def wanting_grad(fake: Any, is_leaf: bool) -> torch.Tensor:
    """Make ``fake`` require a gradient, either as a leaf, which must not be edited in place, or as the result of an operation."""
    if is_leaf:
        return fake.requires_grad_()
    with fake.fake_mode, torch.enable_grad():  # in place, because a new tensor may have other strides
        seed = torch.zeros((), dtype=fake.dtype, device=fake.device, requires_grad=True)
        return fake.copy_(seed)


class Symbols:
    """Symbolic sizes and numbers for one lowering, in a shape environment of their own.

    Args:
        names: The symbols of the captured graph.
        binding: The present size of each of them, then the numbers of the program.
        free: Those of ``names`` about which nothing may be assumed, not even that they are positive.
        fixed: Types of numbers that are constants.

    Attributes:
        environment: The shape environment, which records the backend's assumptions about the symbols as guards.
        mode: Mode of the fakes of this lowering.
        fresh: A new symbolic size for each of ``names``.
        numbers: The numbers of the program, symbolic or fixed.
        symbols: The symbols of the sizes, then of the numbers.
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
            # A symbol with the value 0 or 1 is a number argument of the model, because dynamo specializes on sizes of 0 and 1.
            is_number = name in free or size in (0, 1)
            create = self.environment.create_unspecified_symbol if is_number else self.environment.create_symbol
            self.fresh[name] = self.environment.create_symintnode(
                create(size, source, DimDynamic.DYNAMIC), hint=size, source=source
            )
        self.numbers: list[Any] = []
        self.assumed: list[Any] = []  # assumptions that the environment does not record
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
        """Return the assumption that all sizes and numbers have their present values."""
        return [sympy.Eq(symbol, value) for symbol, value in zip(self.symbols, self._binding, strict=True)]

    def _number(self, index: int, value: int | float) -> Any:
        """Return a new symbolic number without assumptions."""
        source = ConstantSource(f"number_{index}")
        symbol = self.environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        if isinstance(value, int):
            return self.environment.create_symintnode(symbol, hint=value, source=source)
        return self.environment.create_symfloatnode(symbol, hint=value, source=source)

    def conditions(self) -> tuple[Any, ...]:
        """Return all assumptions so far, as expressions over ``symbols``."""
        conditions = [*self.assumed, *(self._over_symbols(guard.expr) for guard in self.environment.guards)]
        for symbol in self.symbols:
            replaced = self.environment.replacements.get(symbol)
            if replaced is not None and replaced != symbol:
                conditions.append(sympy.Eq(symbol, replaced))
        return tuple(conditions)

    def _over_symbols(self, assumed: Any) -> Any:
        """Return an assumption in terms of ``symbols`` only. A backend also makes symbols of its own, for equal or divided numbers."""
        others = assumed.free_symbols.difference(self.symbols)
        known = {symbol: self.environment.replacements[symbol] for symbol in others if symbol in self.environment.replacements}
        found = assumed.xreplace(known)
        if found.free_symbols.issubset(self.symbols):
            return found
        return sympy.And(*self.as_now())  # the assumption is only known to hold for the present values

    def fake(self, example: Any, actual: Any) -> Any:
        """Return a fake of ``actual`` with the symbolic sizes of ``example``, in terms of the fresh symbols."""
        if not isinstance(actual, torch.Tensor):
            return self.renewed(example) if isinstance(example, torch.SymInt) else actual
        numbers = (*example.shape, *example.stride()) if isinstance(example, torch.Tensor) else ()
        if not any(isinstance(number, torch.SymInt) for number in numbers):
            return static_fake(self.mode, actual)
        size = [self.renewed(number) for number in example.shape]
        stride = [self.renewed(number) for number in example.stride()]
        if not are_equal(actual.shape, actual.stride(), [now(number) for number in stride]):
            layout = layout_of(actual)
            if layout is None:
                return static_fake(self.mode, actual)
            stride = strides_in(layout, size)
        return self.fake_like(actual, size, stride)

    def _declared(self, size: Any) -> Any:
        """Return the symbolic or plain number for a size or a stride in the declaration of an external."""
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
            fake: Any = static_fake(self.mode, actual)
            if isinstance(number, torch.SymFloat):
                fake.item_memo = number  # makes `item` of the fake return the symbolic number
            return fake
        declared = () if declaration is None else (*declaration.shape, *(declaration.stride or ()))
        if declaration is not None and any(isinstance(size, (Symbol, Number)) for size in declared):
            sizes = [self._declared(size) for size in declaration.shape]
            stride = None if declaration.stride is None else [self._declared(size) for size in declaration.stride]
            return self.fake_like(actual, sizes, stride)
        return self.fake(node.meta.get("example_value"), actual)

    def fake_like(self, actual: torch.Tensor, size: list[Any], stride: list[Any] | None) -> torch.Tensor:
        """Return a fake of ``actual`` with the given sizes and strides; without ``stride``, it is contiguous."""
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
        if expression.is_number:  # dynamo has specialized the size while tracing
            return int(expression)
        if expression.is_symbol:
            return self.fresh[expression]
        hints = {symbol: new.node.hint for symbol, new in self.fresh.items()}
        renamed = expression.xreplace({symbol: new.node.expr for symbol, new in self.fresh.items()})
        return self.environment.create_symintnode(renamed, hint=int(expression.xreplace(hints)))
