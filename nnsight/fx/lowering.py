"""Lowering: from a graph module to a callable.

Any ``torch.compile`` backend lowers a spliced graph exactly as it would lower the model's own. It wants fake inputs. Those
are made anew for each lowering, with the sizes the inputs have now as hints, because the hints of the captured graph are those
of the first call and a backend specializes on them. What the backend does assume about a symbolic size is
collected afterwards as conditions of the variant: under other sizes another variant is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .compat import BackendCallable, compile_lock
from .counters import counters
from .program import Symbol


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

    def accepts(self, binding: tuple[int, ...]) -> bool:
        """Whether the graph is valid for these sizes of the symbols."""
        values = dict(zip(self.symbols, binding, strict=True))
        return all(bool(condition.xreplace(values)) for condition in self.conditions)


def lower(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Sequence[Any],
    binding: tuple[int, ...],
    backend: BackendCallable,
) -> Lowered:
    """Lower ``graph_module`` with ``backend``.

    Args:
        graph_module: Returns a tuple. Placeholders of captured nodes carry ``example_value``; others are externals.
        inputs: The values it is about to be called with, in order.
        symbols: Symbols of the captured graph.
        binding: The size each symbol has in ``inputs``.
        backend: What to lower with.
    """
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, static_shapes=False)
    fresh: dict[Any, Any] = {}
    for symbol, size in zip(symbols, binding, strict=True):
        source = torch._dynamo.source.ConstantSource(f"size_{symbol}")
        fresh[symbol] = environment.create_symintnode(
            environment.create_symbol(size, source, DimDynamic.DYNAMIC), hint=size, source=source
        )
    fakes = []
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, actual in zip(placeholders, inputs, strict=True):
        example = node.meta.get("example_value")
        declaration = node.meta.get("declaration")
        if declaration is not None and any(isinstance(size, Symbol) for size in declaration.shape):
            numbers = list(fresh.values())
            sizes = [numbers[size.position] if isinstance(size, Symbol) else size for size in declaration.shape]
            fake = _fake_like(actual, sizes, None, mode)
        else:
            fake = _fake_input(example, actual, mode, fresh)
        node.meta["example_value"] = fake
        fakes.append(fake)
    with compile_lock, tracing(TracingContext(mode)):
        function = backend(graph_module, fakes)
    counters.add("compiles")
    conditions = [guard.expr for guard in environment.guards]
    new_symbols = tuple(number.node.expr for number in fresh.values())
    for old, replacement in zip(new_symbols, new_symbols, strict=True):
        replaced = environment.replacements.get(old)
        if replaced is not None and replaced != replacement:
            conditions.append(_equal(old, replaced))
    return Lowered(function, tuple(conditions), new_symbols)


def _equal(left: Any, right: Any) -> Any:
    import sympy

    return sympy.Eq(left, right)


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
