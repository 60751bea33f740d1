"""Lowering: from a graph module to a callable.

Any ``torch.compile`` backend lowers a spliced graph exactly as it would lower the model's own. It wants fake inputs. Those
are made anew for each lowering, with the sizes the inputs have now as hints, because the hints of the captured graph are those
of the first call and a backend specializes on them. The numbers of the program are symbols like the sizes. What the backend
does assume about a symbol is collected afterwards as conditions of the lowering: under other sizes or numbers another one is made.

Inputs that share memory are a special case if the graph writes to it: backends have to know, so their fakes share memory, too,
and have plain sizes. Such a lowering is for inputs that share memory in the same way.

A lowering has two parts. :func:`prepare` makes the fakes and needs the real inputs; :func:`lower_prepared` calls the backend and
needs them no more, so it may happen later and on another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .. import progress
from ..capturing.direct import Direct
from ..counters import counters
from ..effects import Kind, Memory, kind_of
from ..splicing.nodes import edited_by
from ..torch_compat import (
    TracingContext,
    compile_lock,
    forget_fixed_floats,
    found_in_cache,
    tracing,
    with_backward_repeatable,
    with_gradients_apart,
    without_tracebacks_of_autograd,
    without_view_replay,
)
from .backends import BackendCallable, without_fusion
from .symbols import Symbols


class Placement(NamedTuple):
    """How the inputs of a graph lie in memory, as far as a lowering depends on it.

    Attributes:
        sharing: Which of them share memory that the graph writes to, see :func:`sharing_of`.
        layouts: Those of the inputs that come from the piece before, see :mod:`~nnsight.fx.lowering.strides`.
    """

    sharing: tuple[int, ...] = ()
    layouts: tuple[Any, ...] = ()


#: Of a graph that writes to none of its inputs and has none from a piece before.
NO_PLACEMENT = Placement()


@dataclass(frozen=True, eq=False)
class Lowered:
    """A callable graph.

    Attributes:
        function: Takes the graph's inputs, returns its outputs as a sequence.
        conditions: What must hold for the symbols, as expressions over ``symbols``.
        symbols: The symbols, in the order of the sizes passed to :meth:`accepts`.
        compiles: How many graphs a backend compiled for it.
        placement: How its inputs lie in memory.
        partial: Places of the tensors whose gradient lacks a part, see :func:`~nnsight.fx.lowering.gradient_borders.partial_results`.
        node_by_node: Whether the graph itself runs, so that autograd sees which input of it is edited through another.
        regions: How many graphs it calls one after the other.
        uncompiled: Why its nodes run one by one although it was to be compiled, and the remedy; empty if it is compiled, or if nobody
            need know.
    """

    function: Callable[..., Any]
    conditions: tuple[Any, ...]
    symbols: tuple[Any, ...]
    compiles: int = 1
    placement: Placement = NO_PLACEMENT
    partial: frozenset[int] = frozenset()
    node_by_node: bool = False
    regions: int = 1
    uncompiled: str = ""

    @cached_property
    def direct(self) -> Direct:
        """The function for a caller who hands its inputs over."""
        return Direct(self.function)

    def accepts(self, binding: tuple[int | float, ...]) -> bool:
        """Whether the graph is valid for these values of the symbols."""
        values = dict(zip(self.symbols, binding, strict=True))
        return all(bool(condition.xreplace(values)) for condition in self.conditions)

    def restricted(self) -> set[int]:
        """Return the positions of the symbols on which :meth:`accepts` depends."""
        mentioned = {symbol for condition in self.conditions for symbol in condition.free_symbols}
        return {position for position, symbol in enumerate(self.symbols) if symbol in mentioned}


def sharing_of(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return, for each input, the first one that it shares memory with; empty if none does."""
    storages = [item.untyped_storage()._cdata if isinstance(item, torch.Tensor) else -1 - n for n, item in enumerate(inputs)]
    first: dict[int, int] = {}
    found = tuple(first.setdefault(storage, position) for position, storage in enumerate(storages))
    return found if len(first) < len(found) else ()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A graph about to be lowered.

    Attributes:
        graph_module: The graph; its placeholders carry the fakes as ``example_value``.
        fakes: A fake for each placeholder, in order.
        symbols: What the sizes of the fakes are made of.
        taken: Positions of the inputs for which there still are placeholders; the others have become constants.
        placement: As in :class:`Lowered`.
    """

    graph_module: torch.fx.GraphModule
    fakes: list[Any]
    symbols: Symbols
    taken: tuple[int, ...] | None = None
    placement: Placement = NO_PLACEMENT

    def with_all_inputs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` for a caller who also passes the inputs that have become constants."""
        taken = self.taken
        if taken is None:
            return function
        return lambda *inputs: function(*[inputs[position] for position in taken])


def prepare(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Sequence[Any],
    binding: tuple[int | float, ...],
    fixed: Collection[type] = (),
    placement: Placement = NO_PLACEMENT,
    static: bool = False,
) -> Prepared:
    """Make the fake inputs with which ``graph_module`` is to be lowered.

    Args:
        graph_module: Returns a tuple. Placeholders of captured nodes carry ``example_value``; then come those of externals and, last,
            of numbers.
        inputs: The values it is about to be called with, in order.
        symbols: Symbols of the captured graph.
        binding: The size each symbol has in ``inputs``, then the program's numbers.
        fixed: Kinds of numbers to take as constants: the result is then for these numbers alone.
        placement: How the inputs lie in memory.
        static: Whether sizes are constants, too.
    """
    sharing = placement.sharing
    made = Symbols(symbols, binding, fixed=fixed)
    if static:
        made.specialize_sizes()
    if sharing:
        made.fix(binding)
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    fakes = []
    for position, (node, actual) in enumerate(zip(placeholders, inputs, strict=True)):
        if sharing and sharing.count(sharing[position]) > 1:
            fake = made.mode.from_tensor(actual, static_shapes=True)
        else:
            fake = made.fake_of_placeholder(node, actual)
        node.meta["example_value"] = fake
        fakes.append(fake)
    constant = [node for node in placeholders if "number" in node.meta and node.meta["number"].kind in fixed]
    if not constant:
        return Prepared(graph_module, fakes, made, placement=placement)
    taken = tuple(position for position, node in enumerate(placeholders) if node not in constant)
    _inline_numbers(graph_module, constant, made.numbers)
    return Prepared(graph_module, [fakes[position] for position in taken], made, taken, placement)


def lower_prepared(prepared: Prepared, backend: BackendCallable) -> Lowered:
    """Lower a graph with ``backend``."""
    symbols = prepared.symbols
    given = _give_back_inputs(prepared.graph_module)
    if prepared.placement.sharing:
        backend = run_as_is if _may_mix_up_results(prepared.graph_module.graph) else without_fusion(backend)
    with (
        progress.step(progress.LOWERING),
        compile_lock,
        tracing(TracingContext(symbols.mode)),
        without_view_replay(),
        with_backward_repeatable(),
        with_gradients_apart(),
        found_in_cache() as cached,
        without_tracebacks_of_autograd(),
    ):
        forget_fixed_floats()
        lowered = backend(prepared.graph_module, prepared.fakes)
    function = prepared.with_all_inputs(_with_inputs_returned(lowered, given))
    counters.add("loads" if cached() else "compiles")
    made = int(not cached())
    node_by_node = isinstance(getattr(lowered, "__self__", lowered), torch.fx.GraphModule)
    return Lowered(function, symbols.conditions(), symbols.symbols, made, prepared.placement, node_by_node=node_by_node)


def _give_back_inputs(graph_module: torch.fx.GraphModule) -> dict[int, int]:
    """Let a graph no longer return the inputs that it returns, perhaps edited; they are known to whoever passes them.

    Ahead-of-time autograd mixes up the results of a graph that returns an input it has edited, and has edited another one
    that requires gradients.

    Returns:
        The position of the input for the position of each such result.
    """
    nodes = list(graph_module.graph.nodes)
    inputs = {node: position for position, node in enumerate(node for node in nodes if node.op == "placeholder")}
    returned, given = [], {}
    for position, node in enumerate(nodes[-1].args[0]):
        source = node
        while isinstance(source, torch.fx.Node) and (edited := edited_by(source)) is not None:
            source = edited
        if source in inputs and isinstance(source.meta.get("example_value"), torch.Tensor):
            given[position] = inputs[source]
        else:
            returned.append(node)
    if given:
        nodes[-1].args = (tuple(returned),)
        graph_module.graph.lint()
        graph_module.recompile()
    return given


def _may_mix_up_results(graph: torch.fx.Graph) -> bool:
    """Whether ahead-of-time autograd may return wrong tensors of a graph that edits memory which inputs of it share.

    It takes one input for all of them, and looks for the base of a result in a wrong place: of one that shares memory with an input
    and, under gradients, of a view of what is computed.
    """
    memory = Memory(graph)
    returned = next(iter(reversed(graph.nodes))).all_input_nodes
    if any(memory.group(node) == memory.of_inputs() for node in returned):
        return True
    return torch.is_grad_enabled() and any(map(_may_be_view, returned))


def _may_be_view(node: torch.fx.Node) -> bool:
    source: torch.fx.Node | None = node
    while source is not None:
        node, source = source, edited_by(source)
    return node.op != "placeholder" and kind_of(node) is not Kind.NEW


def run_as_is(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Lower a graph by not lowering it: its nodes run one by one."""
    return graph_module.forward


def _with_inputs_returned(function: Callable[..., Any], given: dict[int, int]) -> Callable[..., Any]:
    """Return a function that returns the inputs ``given``, too; see :func:`_give_back_inputs`."""
    if not given:
        return function

    def with_inputs(*inputs: Any) -> list[Any]:
        results = list(function(*inputs))
        for position, source in sorted(given.items()):
            results.insert(position, inputs[source])
        return results

    return with_inputs


def lower(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    symbols: Sequence[Any],
    binding: tuple[int | float, ...],
    backend: BackendCallable,
) -> Lowered:
    """Lower ``graph_module`` with ``backend``; see :func:`prepare` for the arguments."""
    return lower_prepared(prepare(graph_module, inputs, symbols, binding), backend)


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
