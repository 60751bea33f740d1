"""Lowering: from a graph module to a callable.

Any ``torch.compile`` backend lowers a spliced graph exactly as it would lower the model's own. It wants fake inputs. Those
are made anew for each lowering, with the sizes the inputs have now as hints, because the hints of the captured graph are those
of the first call and a backend specializes on them. The numbers of the program are symbols like the sizes. What the backend
does assume about a symbol is collected afterwards as conditions of the lowering: under other sizes or numbers another one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .compat import BackendCallable, compile_lock, forget_fixed_floats
from .counters import counters
from .program import Number, Symbol


@dataclass(frozen=True, eq=False)
class Lowered:
    """A callable graph.

    Attributes:
        function: Takes the graph's inputs, returns its outputs as a sequence.
        conditions: What must hold for the symbols, as expressions over ``symbols``.
        symbols: The symbols, in the order of the sizes passed to :meth:`accepts`.
    """

    function: Callable[..., Any]
    conditions: tuple[Any, ...]
    symbols: tuple[Any, ...]

    def accepts(self, binding: tuple[int | float, ...]) -> bool:
        """Whether the graph is valid for these values of the symbols."""
        values = dict(zip(self.symbols, binding, strict=True))
        return all(bool(condition.xreplace(values)) for condition in self.conditions)

    def restricted(self) -> set[int]:
        """Return the positions of the symbols on which :meth:`accepts` depends."""
        mentioned = {symbol for condition in self.conditions for symbol in condition.free_symbols}
        return {position for position, symbol in enumerate(self.symbols) if symbol in mentioned}


def lower(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Sequence[Any],
    binding: tuple[int | float, ...],
    backend: BackendCallable,
    fixed: Collection[type] = (),
) -> Lowered:
    """Lower ``graph_module`` with ``backend``.

    Args:
        graph_module: Returns a tuple. Placeholders of captured nodes carry ``example_value``; then come those of externals and, last,
            of numbers.
        inputs: The values it is about to be called with, in order.
        symbols: Symbols of the captured graph.
        binding: The size each symbol has in ``inputs``, then the program's numbers.
        backend: What to lower with.
        fixed: Kinds of numbers to take as constants: the result is then for these numbers alone.
    """
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, static_shapes=False)
    fresh: dict[Any, Any] = {}
    for symbol, size in zip(symbols, binding, strict=False):
        source = torch._dynamo.source.ConstantSource(f"size_{symbol}")
        fresh[symbol] = environment.create_symintnode(
            environment.create_symbol(size, source, DimDynamic.DYNAMIC), hint=size, source=source
        )
    new_symbols = [number.node.expr for number in fresh.values()]
    conditions: list[Any] = []
    numbers: list[Any] = []
    for position, value in enumerate(binding[len(symbols) :]):
        number = value if type(value) in fixed else _symbol(environment, position, value)
        numbers.append(number)
        new_symbols.append(sympy.Symbol(f"fixed_{position}") if number is value else number.node.expr)  # type: ignore[union-attr]
        if number is value:
            conditions.append(sympy.Eq(new_symbols[-1], value))
    fakes = []
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, actual in zip(placeholders, inputs, strict=True):
        fake = _fake_placeholder(node, actual, mode, fresh, numbers)
        node.meta["example_value"] = fake
        fakes.append(fake)
    taken = list(range(len(inputs)))
    if fixed:
        constant = [node for node in placeholders if "number" in node.meta and node.meta["number"].kind in fixed]
        taken = [position for position, node in enumerate(placeholders) if node not in constant]
        _inline_numbers(graph_module, constant, numbers)
    with compile_lock, tracing(TracingContext(mode)):
        forget_fixed_floats()
        function = backend(graph_module, [fakes[position] for position in taken])
    if len(taken) < len(inputs):
        function = _with_arguments(function, taken)
    counters.add("compiles")
    conditions += [guard.expr for guard in environment.guards]
    for symbol in new_symbols:
        replaced = environment.replacements.get(symbol)
        if replaced is not None and replaced != symbol:
            conditions.append(sympy.Eq(symbol, replaced))
    return Lowered(function, tuple(conditions), tuple(new_symbols))


def _symbol(environment: ShapeEnv, index: int, value: int | float) -> Any:
    """Return a symbolic number about which nothing is assumed."""
    source = torch._dynamo.source.ConstantSource(f"number_{index}")
    symbol = environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    if isinstance(value, int):
        return environment.create_symintnode(symbol, hint=value, source=source)
    return environment.create_symfloatnode(symbol, hint=value, source=source)


def _fake_placeholder(
    node: torch.fx.Node, actual: Any, mode: FakeTensorMode, fresh: dict[Any, Any], numbers: Sequence[Any]
) -> Any:
    """Return the fake input for a placeholder of a spliced graph that is about to be called with ``actual``."""
    declaration = node.meta.get("declaration")
    if declaration is not None and any(
        isinstance(size, (Symbol, Number)) for size in (*declaration.shape, *(declaration.stride or ()))
    ):
        sizes = [_declared(size, fresh, numbers) for size in declaration.shape]
        stride = declaration.stride and [_declared(size, fresh, numbers) for size in declaration.stride]
        return _fake_like(actual, sizes, stride, mode)
    if "number" not in node.meta:
        return _fake_input(node.meta.get("example_value"), actual, mode, fresh)
    number = numbers[node.meta["number"].index]
    if not isinstance(number, torch.SymFloat):
        return number
    fake = mode.from_tensor(actual, static_shapes=True)
    fake.item_memo = number  # what `item` of the fake returns
    return fake


def _declared(size: Any, fresh: dict[Any, Any], numbers: Sequence[Any]) -> Any:
    if isinstance(size, Symbol):
        return list(fresh.values())[size.position]
    return numbers[size.index] if isinstance(size, Number) else size


def _inline_numbers(
    graph_module: torch.fx.GraphModule, placeholders: Sequence[torch.fx.Node], numbers: Sequence[Any]
) -> None:
    """Write numbers into the graph in place of their placeholders."""
    constants: dict[torch.fx.Node, Any] = {}
    for node in placeholders:
        value = numbers[node.meta["number"].index]
        constants[node] = value
        if node.meta["number"].kind is float:  # users take the value of the tensor
            constants.update(dict.fromkeys(node.users, value))
    for node in graph_module.graph.nodes:
        node.args = torch.fx.map_arg(node.args, lambda used: constants.get(used, used))
        node.kwargs = torch.fx.map_arg(node.kwargs, lambda used: constants.get(used, used))
    for node in reversed(constants):
        graph_module.graph.erase_node(node)
    graph_module.graph.lint()
    graph_module.recompile()


def _with_arguments(function: Callable[..., Any], taken: list[int]) -> Callable[..., Any]:
    """Return ``function`` for a caller who passes more than the arguments ``taken``."""
    return lambda *arguments: function(*[arguments[position] for position in taken])


def _fake_input(example: Any, actual: Any, mode: FakeTensorMode, fresh: dict[Any, Any]) -> Any:
    """Return a fake of ``actual`` whose symbolic sizes are those of ``example``, over the fresh symbols."""
    if not isinstance(actual, torch.Tensor):
        return _renewed(example, fresh) if isinstance(example, torch.SymInt) else actual
    symbolic = isinstance(example, torch.Tensor) and any(
        isinstance(number, torch.SymInt) for number in (*example.shape, *example.stride())
    )
    if not symbolic:
        return mode.from_tensor(actual, static_shapes=True)
    size = [_renewed(number, fresh) for number in example.shape]
    stride = [_renewed(number, fresh) for number in example.stride()]
    return _fake_like(actual, size, stride, mode)


def _fake_like(actual: torch.Tensor, size: list[Any], stride: list[Any] | None, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake of ``actual`` with the given sizes; contiguous without ``stride``."""
    with mode, torch.no_grad():
        if stride is None:
            fake = torch.empty(size, dtype=actual.dtype, device=actual.device)
        else:
            fake = torch.empty_strided(size, stride, dtype=actual.dtype, device=actual.device)
    if actual.requires_grad:
        fake.requires_grad_(True)
    return fake


def _renewed(number: Any, fresh: dict[Any, Any]) -> Any:
    """Return ``number`` with the captured graph's symbols replaced by the fresh ones."""
    if not isinstance(number, torch.SymInt):
        return number
    expression = number.node.expr
    if expression.is_number:  # dynamo found out while tracing that the size is fixed
        return int(expression)
    if expression.is_symbol:
        return fresh[expression]
    hints = {symbol: new.node.hint for symbol, new in fresh.items()}
    renamed = expression.xreplace({symbol: new.node.expr for symbol, new in fresh.items()})
    environment = next(iter(fresh.values())).node.shape_env
    return environment.create_symintnode(renamed, hint=int(expression.xreplace(hints)))
