"""The steps of a compiled trace as plain functions on plain values, without an envoy.

A compiled trace captures the model once, records its block, splices the program into the captured graph, and lowers the result. Each
function here does one step, for tests, and for tools with a model or a backend of their own:

    captured = fx.capture(module, x)
    recorded = fx.record(captured, block)
    spliced = fx.splice(recorded)
    function = fx.lower(spliced, recorded, backend="inductor")
    function(*spliced.arguments(recorded.inputs))

Traces use the same parts, and cache the result of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..runtime.interleaver import Interleaver
from ..runtime.mediator import Mediator
from ..runtime.modules.tree import ModuleTree
from ..runtime.report import Report
from .block_events import BlockEvents, Input, ValueNumber
from .capturing.dynamo import new_caller
from .capturing.graph import CapturedGraph
from .capturing.taps import tapped_call
from .lowering.backends import resolve_backend
from .lowering.lowering import lower_prepared, prepare
from .recording.recording import Recording
from .splicing.pieces import Piece, SplicedGraph, as_argument
from .splicing.splice import splice as splice_graph


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """A captured graph, and its inputs in the call that it was captured from.

    Attributes:
        graph: The graph, with a tap for each location.
        inputs: Tensors and symbolic sizes, in the order of the graph's placeholders; parameters of the model are among them.
    """

    graph: CapturedGraph
    inputs: tuple[Any, ...]

    @property
    def locations(self) -> list[str]:
        """The locations that a block can read and edit, in the order of the graph."""
        return [tap.location for tap in self.graph.taps]


@dataclass(frozen=True, eq=False)
class RecordedBlock:
    """What a block did to a captured graph.

    Attributes:
        captured: The graph, and its inputs.
        program: The block as data: it compares by what it does, and prints.
        results: The tensors that the block returned, as references to values of the program.
        externals: Tensors from outside the block, and Python numbers that are factors or summands, as scalars; inputs of the spliced graph.
        numbers: Other Python numbers that may vary between runs, such as an index; inputs of the spliced graph, too.
        outputs: What the captured graph returned in the run that was recorded.
    """

    captured: CapturedCall
    program: BlockEvents
    results: tuple[ValueNumber | Input, ...]
    externals: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]
    outputs: tuple[Any, ...]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Inputs of the captured graph, externals, and numbers: floats as scalar tensors, as graphs take them."""
        return (*self.captured.inputs, *self.externals, *map(as_argument, self.numbers))


class Values:
    """The values of a run by location, as the block of :func:`record` sees them."""

    def __init__(self, mediator: Mediator) -> None:
        self._mediator = mediator

    def __getitem__(self, location: str) -> Any:
        return self._mediator.request(location)

    def __setitem__(self, location: str, value: Any) -> None:
        self._mediator.swap(location, value)


def capture(module: torch.nn.Module, *args: Any, dynamic: bool | None = None, **kwargs: Any) -> CapturedCall:
    """Capture one call of ``module`` as a graph with a tap for each location; the captured graph runs once.

    Args:
        module: Any module that dynamo can capture as one graph.
        *args: Its arguments.
        dynamic: As for ``torch.compile``: ``True`` for symbolic sizes.
        **kwargs: Its arguments by name.

    Raises:
        torch._dynamo.exc.Unsupported: If the module breaks the graph.
        RuntimeError: If ``torch.compile`` runs functions as Python here, under a stance or inside of another tracer.
    """
    tree = ModuleTree(module, traced_call=tapped_call)
    found: list[CapturedCall] = []

    def keep(graph_module: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graph = CapturedGraph(graph_module, resolve_backend("eager"))

        def run(*inputs: Any) -> Any:
            found.append(CapturedCall(graph, inputs))
            return graph.graph_module(*inputs)

        return run

    with tree.instrumentation:
        torch.compile(new_caller(module), backend=keep, fullgraph=True, dynamic=dynamic)(module, args, kwargs)
    if not found:
        raise RuntimeError(
            f"torch.compile ran the {type(module).__name__} as Python and captured no graph. It does so under the stance 'force_eager' "
            "and inside of another compiled function: call `capture` outside."
        )
    return found[0]


def record(captured: CapturedCall, block: Callable[[Values], Any]) -> RecordedBlock:
    """Run ``block`` against the captured graph, and the graph with its edits.

    Args:
        captured: See :func:`capture`.
        block: Called with the values of the run: ``values[location]`` waits for one, an assignment replaces it. Locations begin with
            ``model``, such as ``model.0.output``. It returns tensors in any containers, which become :attr:`RecordedBlock.results`.

    Raises:
        GraphBreakError: If the block needs the value of a tensor while it runs.
        TypeError: If it returns anything but values of the graph, or results computed from them.
        MissedProviderError: If the block waits for a location that the graph does not pass, or has passed.
    """
    results: list[ValueNumber | Input] = []

    def intervention() -> None:
        for leaf in pytree.tree_leaves(block(Values(mediator))):
            reference = recording.refer(leaf) if isinstance(leaf, torch.Tensor) else None
            if not isinstance(reference, (ValueNumber, Input)):
                raise TypeError(f"The block returned a {type(leaf).__name__} that is no value of the graph, nor computed from one.")
            results.append(reference)

    mediator = Mediator(intervention)
    run = Interleaver([mediator])
    recording = Recording(captured.graph, captured.inputs, run, Report(), fullgraph=True)
    with run:
        outputs = recording.walk()
        run.finish()
    program, externals, numbers = recording.state.program(), tuple(recording.externals), tuple(recording.numbers)
    return RecordedBlock(captured, program, tuple(results), externals, numbers, tuple(outputs))


def splice(recorded: RecordedBlock) -> SplicedGraph:
    """Write a program into a copy of its captured graph, and simplify the copy.

    Returns:
        A graph of ``spliced.arguments(recorded.inputs)`` that returns the results of the block, then those of the captured graph.
    """
    graph = recorded.captured.graph
    piece = Piece.of(graph, 0)
    results = [piece.inputs[result.index] if isinstance(result, Input) else result for result in recorded.results]
    outputs = [node for node in graph.outputs if isinstance(node, torch.fx.Node)]
    return splice_graph(graph, piece, recorded.program, len(graph.nodes) - 1, [*results, *outputs])


def lower(spliced: SplicedGraph, recorded: RecordedBlock, backend: Any = "inductor", **options: Any) -> Callable[..., Any]:
    """Lower a spliced graph to a function.

    Args:
        spliced: See :func:`splice`.
        recorded: Has the inputs to lower for. With symbolic sizes the function takes inputs of other sizes, too.
        backend: As for ``torch.compile``.
        **options: ``mode`` and ``options``, as for ``torch.compile``.

    Returns:
        A function of ``spliced.arguments(recorded.inputs)``, or of other values in their places, that returns a list.
    """
    graph, inputs = recorded.captured.graph, spliced.arguments(recorded.inputs)
    symbols = [symbol for _, symbol in graph.symbols]
    binding = (*graph.binding(recorded.captured.inputs), *recorded.numbers)
    lowered = lower_prepared(prepare(spliced.copy(), inputs, symbols, binding), resolve_backend(backend, **options))
    return lambda *arguments: list(lowered.function(*arguments))
