"""The steps of a compiled trace as plain functions on plain values, without an envoy.

A compiled trace captures the model once, records its block, splices the program into the captured graph, and lowers the result. Each
function here does one of these steps, for tests, and for tools with their own model or backend:

    captured = fx.capture(module, x)
    recorded = fx.record(captured, block)
    spliced = fx.splice(recorded)
    function = fx.lower(spliced, recorded, backend="inductor")
    function(*spliced.arguments(recorded.inputs))

Traces use the same code, and cache the result of each step.
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
    """A captured graph, and its inputs in the captured call.

    Attributes:
        graph: The graph, with a tap for each location.
        inputs: Tensors and values of symbolic sizes, in the order of the graph's placeholders. They include the model's parameters.
    """

    graph: CapturedGraph
    inputs: tuple[Any, ...]

    @property
    def locations(self) -> list[str]:
        """The locations that a block can read and edit, in the order of the graph."""
        return [tap.location for tap in self.graph.taps]


@dataclass(frozen=True, eq=False)
class RecordedBlock:
    """The program of a block for a captured graph, with the tensors and results of the recorded run.

    Attributes:
        captured: The graph, and its inputs.
        program: The block as data. Programs with equal effects are equal; ``print`` shows the steps.
        results: The tensors that the block returned, as references to values of the program or inputs of the graph.
        externals: Tensors from outside the block, and floats that a call takes as scalar tensors, such as a factor.
        numbers: Other Python numbers that vary between runs, such as an index.
        outputs: The outputs of the captured graph in the recorded run.
    """

    captured: CapturedCall
    program: BlockEvents
    results: tuple[ValueNumber | Input, ...]
    externals: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]
    outputs: tuple[Any, ...]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Inputs of the captured graph, externals, and numbers. Floats are scalar tensors, because graphs take them in this form."""
        return (*self.captured.inputs, *self.externals, *map(as_argument, self.numbers))


class Values:
    """The values of a run by location, for the block of :func:`record`."""

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
        *args: Positional arguments of the module.
        dynamic: As for ``torch.compile``: ``True`` for symbolic sizes.
        **kwargs: Keyword arguments of the module.

    Raises:
        torch._dynamo.exc.Unsupported: If the module breaks the graph.
        RuntimeError: If ``torch.compile`` runs functions as Python here: under a stance, or inside another compiled function.
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
            "and inside another compiled function: call `capture` outside."
        )
    return found[0]


def record(captured: CapturedCall, block: Callable[[Values], Any]) -> RecordedBlock:
    """Record ``block`` on the captured graph; then run the graph with the edits of the block.

    Args:
        captured: See :func:`capture`.
        block: A function of the values of the run: ``values[location]`` waits for a value, an assignment replaces it. Locations begin with
            ``model``, such as ``model.0.output``. The tensors that it returns, in any containers, are :attr:`RecordedBlock.results`.

    Raises:
        GraphBreakError: If the block needs the value of a tensor while it runs.
        TypeError: If the block returns an object that is neither a value of the graph nor computed from one.
        MissedProviderError: If the block waits for a location that the graph does not contain, or has passed.
    """
    results: list[ValueNumber | Input] = []

    def intervention() -> None:
        for leaf in pytree.tree_leaves(block(Values(mediator))):
            reference = recording.refer(leaf) if isinstance(leaf, torch.Tensor) else None
            if not isinstance(reference, (ValueNumber, Input)):
                raise TypeError(f"The block returned a {type(leaf).__name__} that is neither a value of the graph nor computed from one.")
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
        A graph that takes ``spliced.arguments(recorded.inputs)``, and returns the results of the block, then those of the captured graph.
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
        recorded: The recorded block; the graph is lowered for its inputs. With symbolic sizes, the function also takes other sizes.
        backend: As for ``torch.compile``.
        **options: ``mode`` and ``options``, as for ``torch.compile``.

    Returns:
        A function that takes ``spliced.arguments(recorded.inputs)``, or other values in their places, and returns a list.
    """
    graph, inputs = recorded.captured.graph, spliced.arguments(recorded.inputs)
    symbols = [symbol for _, symbol in graph.symbols]
    binding = (*graph.binding(recorded.captured.inputs), *recorded.numbers)
    lowered = lower_prepared(prepare(spliced.copy(), inputs, symbols, binding), resolve_backend(backend, **options))
    return lambda *arguments: list(lowered.function(*arguments))
