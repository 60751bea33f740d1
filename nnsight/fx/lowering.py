"""Lowering: from a graph module to a callable.

Any ``torch.compile`` backend lowers a spliced graph exactly as it would lower the model's own. It wants fake inputs. Those
are made anew for each lowering, with the sizes the inputs have now as hints, because the hints of the captured graph are those
of the first call and a backend specializes on them. What the backend does assume about a symbolic size is
collected afterwards as conditions of the variant: under other sizes another variant is made.

A lowering has two parts. :func:`prepare` makes the fakes and needs the real inputs; :func:`lower_prepared` calls the backend and
needs them no more, so it may happen later and on another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .artifacts import found_in_cache
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
        compiles: How many graphs a backend compiled for it.
    """

    function: Callable[..., Any]
    conditions: tuple[Any, ...]
    symbols: tuple[Any, ...]
    compiles: int = 1

    def accepts(self, binding: tuple[int, ...]) -> bool:
        """Whether the graph is valid for these sizes of the symbols."""
        values = dict(zip(self.symbols, binding, strict=True))
        return all(bool(condition.xreplace(values)) for condition in self.conditions)


class Symbols:
    """Symbolic sizes for one lowering, in a shape environment of their own.

    Args:
        names: The symbols these stand for.
        binding: The size each of them has now.

    Attributes:
        environment: The shape environment; notes what is assumed about the symbols.
        mode: Mode of the fakes of this lowering.
        fresh: A symbolic number for each of ``names``.
        symbols: The symbols of those numbers.
    """

    def __init__(self, names: Sequence[Any], binding: Sequence[int]) -> None:
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment, static_shapes=False)
        self.fresh: dict[Any, Any] = {}
        for number, (name, size) in enumerate(zip(names, binding, strict=True)):
            source = torch._dynamo.source.ConstantSource(f"size_{number}")
            self.fresh[name] = self.environment.create_symintnode(
                self.environment.create_symbol(size, source, DimDynamic.DYNAMIC), hint=size, source=source
            )
        self.symbols = tuple(number.node.expr for number in self.fresh.values())

    def conditions(self) -> tuple[Any, ...]:
        """Return what has been assumed so far, as expressions over ``symbols``."""
        conditions = [guard.expr for guard in self.environment.guards]
        for symbol in self.symbols:
            replaced = self.environment.replacements.get(symbol)
            if replaced is not None and replaced != symbol:
                conditions.append(_equal(symbol, replaced))
        return tuple(conditions)

    def fake(self, example: Any, actual: Any) -> Any:
        """Return a fake of ``actual`` whose symbolic sizes are those of ``example``, over the fresh symbols."""
        if not isinstance(actual, torch.Tensor):
            return self.renewed(example) if isinstance(example, torch.SymInt) else actual
        symbolic = isinstance(example, torch.Tensor) and any(
            isinstance(number, torch.SymInt) for number in (*example.shape, *example.stride())
        )
        if not symbolic:
            return self.mode.from_tensor(actual, static_shapes=True)
        size = [self.renewed(number) for number in example.shape]
        stride = [self.renewed(number) for number in example.stride()]
        return self.fake_like(actual, size, stride)

    def fake_like(self, actual: torch.Tensor, size: list[Any], stride: list[Any] | None) -> torch.Tensor:
        """Return a fake of ``actual`` with the given sizes; contiguous without ``stride``."""
        with self.mode, torch.no_grad():
            if stride is None:
                fake = torch.empty(size, dtype=actual.dtype, device=actual.device)
            else:
                fake = torch.empty_strided(size, stride, dtype=actual.dtype, device=actual.device)
        if actual.requires_grad:
            fake.requires_grad_(True)
        return fake

    def renewed(self, number: Any) -> Any:
        """Return ``number`` with the symbols it is made of replaced by the fresh ones."""
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


@dataclass(frozen=True, eq=False)
class Prepared:
    """A graph about to be lowered.

    Attributes:
        graph_module: The graph; its placeholders carry the fakes as ``example_value``.
        fakes: A fake for each placeholder, in order.
        symbols: What the sizes of the fakes are made of.
    """

    graph_module: torch.fx.GraphModule
    fakes: list[Any]
    symbols: Symbols


def prepare(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], symbols: Sequence[Any], binding: tuple[int, ...]
) -> Prepared:
    """Make the fake inputs with which ``graph_module`` is to be lowered.

    Args:
        graph_module: Returns a tuple. Placeholders of captured nodes carry ``example_value``; others are externals.
        inputs: The values it is about to be called with, in order.
        symbols: Symbols of the captured graph.
        binding: The size each symbol has in ``inputs``.
    """
    made = Symbols(symbols, binding)
    numbers = list(made.fresh.values())
    fakes = []
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, actual in zip(placeholders, inputs, strict=True):
        declaration = node.meta.get("declaration")
        if declaration is not None and any(isinstance(size, Symbol) for size in declaration.shape):
            sizes = [numbers[size.position] if isinstance(size, Symbol) else size for size in declaration.shape]
            fake: Any = made.fake_like(actual, sizes, None)
        else:
            fake = made.fake(node.meta.get("example_value"), actual)
        node.meta["example_value"] = fake
        fakes.append(fake)
    return Prepared(graph_module, fakes, made)


def lower_prepared(prepared: Prepared, backend: BackendCallable) -> Lowered:
    """Lower a graph with ``backend``."""
    with compile_lock, tracing(TracingContext(prepared.symbols.mode)), found_in_cache() as cached:
        function = backend(prepared.graph_module, prepared.fakes)
    counters.add("loads" if cached() else "compiles")
    return Lowered(function, prepared.symbols.conditions(), prepared.symbols.symbols, compiles=not cached())


def lower(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Sequence[Any],
    binding: tuple[int, ...],
    backend: BackendCallable,
) -> Lowered:
    """Lower ``graph_module`` with ``backend``; see :func:`prepare` for the arguments."""
    return lower_prepared(prepare(graph_module, inputs, symbols, binding), backend)


def _equal(left: Any, right: Any) -> Any:
    import sympy

    return sympy.Eq(left, right)
