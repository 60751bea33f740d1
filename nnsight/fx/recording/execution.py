"""Runs the pieces of a captured graph with the recorded program: a cut runs one, and the block goes on with real values."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...runtime import gradients
from ...runtime.interleaver import Interleaver
from ...runtime.report import Break, Report
from ...tracing.block import Block
from ...tracing.saving import saves
from ..block_events import Cut, External, Input, ValueNumber
from ..capturing.graph import CapturedGraph, Tap
from ..counters import counters, stage
from ..effects import Kind, kind_of
from ..lowering.variant import Variant
from ..show.explaining import RanPiece
from ..show.stages import run_lowered
from ..splicing.pieces import Piece, as_argument
from .calls import NEVER_COMPUTED, CallRecorder
from .events import user_position
from .functions import ABOUT_BACKWARD, instead_of, name_of
from .lazy import LazyTensor, become, real_of

if TYPE_CHECKING:
    from .journal import Journal

logger = logging.getLogger("nnsight.fx")


class GraphBreakError(RuntimeError):
    """A block needed a concrete value in a trace that must be one graph (``fullgraph=True``)."""


class PieceRunner(CallRecorder):
    """Runs ``graph`` piece by piece, and turns lazy tensors into its results; with ``fullgraph`` a needed value is an error."""

    def __init__(
        self,
        graph: CapturedGraph,
        inputs: tuple[Any, ...],
        run: Interleaver,
        report: Report,
        fullgraph: bool,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(graph, inputs, journal)
        self.run = run
        self.report = report
        self.fullgraph = fullgraph
        self.suspended_in: int | None = None  # the thread in which a run inside this one is under way
        self.failed_to_run = False  # whether a piece raised an error: what it has done by then must not be done again
        self._differentiates = any(_mentions_backward(mediator.info) for mediator in run.mediators)
        self.as_captured = True  # whether what the model goes on with is, but for its values, what was captured
        self._ended: tuple[Break, str] | None = None  # where a backward pass is run behind all that the model computes
        if graph.whole is None:
            graph.whole = Piece.of(graph, 0)
        self._begin(graph.whole)

    def _begin(self, piece: Piece) -> None:
        """Start a piece of the graph with nothing recorded in it."""
        self.piece = piece
        self.used += self.run.inputs
        self._edits = iter(self.graph.edits_in(piece))
        self._next_edit = next(self._edits, None)  # of an input by the model, which the walk has not come to
        self.value_of: dict[torch.fx.Node, int] = {}
        self.writes: dict[tuple[int, int], ValueNumber | Input | External] = {}
        self.substitutes: dict[torch.fx.Node, ValueNumber | Input | External] = {}

    def resolve(self, node: torch.fx.Node) -> ValueNumber | Input | External | torch.fx.Node:
        """Return what stands for a captured node now: a reference, or the node itself if nobody has seen it."""
        while True:
            index = self.piece.input_index.get(node)
            if index is not None:
                return Input(index)
            known = self.value_of.get(node)
            if known is not None:
                return ValueNumber(known)
            substitute = self.substitutes.get(node)
            if substitute is not None:
                return substitute
            if node in self.graph.identities:
                node = self.graph.identities[node]
                continue
            tapped = self.graph.tapped.get(node)
            if tapped is None:
                return node
            written = self.writes.get(tapped)
            if written is not None:
                return written
            node = self.graph.taps[tapped[0]].leaves[tapped[1]]

    def _object(self, reference: ValueNumber | Input | External) -> torch.Tensor:
        """Return the tensor the block gets for ``reference``."""
        if isinstance(reference, ValueNumber):
            return self.lazy(reference.index)
        tensor = (self.inputs if isinstance(reference, Input) else self.externals)[reference.index]
        self.used.append(tensor)
        return tensor

    def demand(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
        """Make values concrete and then call ``function`` on them."""
        assert self.tap is not None
        self.as_captured = False  # the call may be one that changes the shape of what it is called on
        if self.journal is not None:
            self.journal.spoil("a value is needed")
        pending = LazyTensor in map(type, args) or any(
            isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves((args, kwargs))
        )
        at_start = self.graph.order[self.tap.node] == self.piece.start
        if pending or not at_start or (self.state.event is not None and not isinstance(self.state.event, Cut)):
            name = name_of(function)
            self.cut(reason or f"`{name}` needs a concrete value", instead_of(name), self.grad_enabled and name in ABOUT_BACKWARD)
        if self.filled:
            args, kwargs = pytree.tree_map(real_of, (args, kwargs))
        if function is torch.autograd.grad:
            args = (args[0], tuple(map(gradients.known_to_autograd, args[1])), *args[2:])
        result = function(*args, **kwargs)
        self.note_shown(function, result)
        return result

    def _shows_edits(self, tap: Tap) -> bool:
        """Whether an edit of the model between the start of the piece and ``tap`` may be seen out of sight of torch."""
        if not self.shows_memory:
            return False
        nodes = self.graph.nodes[self.piece.start : self.graph.order[tap.node]]
        return any(
            kind_of(node) is Kind.EFFECT and node not in self.graph.tap_number and node.op != "placeholder" for node in nodes
        )

    def cut(self, reason: str, instead: str, observed: bool = False) -> None:
        """Run the graph up to the current tap; every lazy tensor becomes real.

        ``observed`` is whether autograd has to see all those tensors, because gradients for them will be asked for.
        """
        assert self.tap is not None
        filename, line = user_position()
        location = self.tap.location
        cut = Break(location, reason, filename, line)
        stop = self.graph.order[self.tap.node]
        self.settle_end()
        if observed and stop > self.graph.last_work:
            self._ended = cut, instead
        else:
            self._report(cut, instead)
        self.as_captured = False
        if self.state.behind is None:  # the state decides the tap, and all that is resolved
            piece = Piece.of(self.graph, stop)
            piece = piece.without_duplicates([self.resolve(node) for node in piece.inputs])
            self.state.behind = piece, piece.inputs[len(self.graph.placeholders) :]
        behind, wanted = self.state.behind
        alive, carried = self._run_piece(stop, wanted, cut, observed)
        self.state = self.step(Cut(self.tap.index, alive))
        self.start_tables([*self.inputs[: len(self.graph.placeholders)], *carried])
        self._begin(behind)

    def _report(self, cut: Break, instead: str) -> None:
        """Report that the graph is cut, or raise if it must not be."""
        if self.fullgraph:
            raise GraphBreakError(
                f"{cut.filename}:{cut.line}: {cut.reason} at `{cut.location}`, and this trace was compiled with fullgraph=True. "
                f"Instead, use {instead}; or compile without fullgraph to let the graph be cut here."
            )
        self.report.breaks.append(cut)
        counters.add("breaks")
        if cut not in self.graph.cuts:
            self.graph.cuts.add(cut)
            logger.info("graph cut: %s", cut)

    def settle_end(self) -> None:
        """Report a backward pass behind all that the model computes as a cut, if the block goes on to compute behind it."""
        if self._ended is not None and self.state.does_work:
            ended, self._ended = self._ended, None
            self._report(*ended)

    def compute_for_nested(self) -> None:
        """Make the lazy tensors real, because the block of a run inside this one uses one of them.

        Raises:
            GraphBreakError: If this run was compiled with ``fullgraph=True``.
            RuntimeError: If this run failed, or is not around the one that asks but beside it, in another thread.
        """
        if self.closed:
            raise RuntimeError(NEVER_COMPUTED)
        if self.suspended_in != threading.get_ident():
            raise RuntimeError(
                "This tensor belongs to a compiled trace that is still running in another thread, and has no value yet. "
                "Use it after that trace."
            )
        with suspended():  # the recording of the nested run
            reason = "a trace inside the block uses a tensor of this one"
            self.cut(reason, "one trace behind the other, with `.save()` between them")

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Record nothing meanwhile; what runs may still ask for values, by :meth:`compute_for_nested`."""
        outer, self.suspended_in = self.suspended_in, threading.get_ident()
        try:
            with torch.overrides._pop_mode_temporarily():
                yield
        finally:
            self.suspended_in = outer

    def finish(self) -> list[Any]:
        """Run the rest of the graph; return what the captured graph returns, or stand-ins if nobody sees them."""
        self.settle_end()
        _, outputs = self._run_piece(len(self.graph.nodes) - 1, self.graph.outputs)
        return outputs

    def _is_output_unseen(self) -> bool:
        """Whether nobody sees what the model returns, and computing it would raise no error.

        Nobody sees it if it is returned to no caller, and no block waits for something behind the graph. No error is raised as long as
        blocks have changed nothing but values: the rest of the model fits them as it did when it was captured.
        """
        run = self.run
        unseen = self.graph.may_stand_in and not run.returns and not run.waited and self.state is not self.graph.start
        return unseen and self.as_captured and not any(output.is_wanted for output in run.deferred_outputs or ())

    def _compute_what_is_held(self) -> None:
        """Run the graph up to where a block failed, node by node: the user may hold tensors from before, as in an eager trace."""
        if self.failed_to_run:
            return
        self.journal = None
        stop = len(self.graph.nodes) - 1 if self.tap is None else self.graph.order[self.tap.node]
        try:
            self._run_piece(stop, [], lower=False)
        except Exception as error:
            logger.warning("what a block held when it failed cannot be computed: %s: %s", type(error).__name__, error)

    def _run_piece(
        self, stop: int, wanted: Sequence[Any], cut: Break | None = None, observed: bool = False, lower: bool = True
    ) -> tuple[tuple[int, ...], list[Any]]:
        """Run a piece in the modes of the model; see :meth:`_run_in_modes`."""
        if self.modes.hold and (cut is None or self.stacks.have_their_lengths):
            with self.modes.keys():  # a value may be asked for in the middle of an operator
                return self._run_in_modes(stop, wanted, cut, observed, lower)
        # The block has switched some of them, or asks from a thread of its own.
        with self.modes.entered(), self.stacks.entered():
            return self._run_in_modes(stop, wanted, cut, observed, lower)

    def _run_in_modes(
        self, stop: int, wanted: Sequence[Any], cut: Break | None, observed: bool, lower: bool
    ) -> tuple[tuple[int, ...], list[Any]]:
        """Run the graph from the piece's start up to node number ``stop``, lowered or node by node.

        Returns:
            The numbers of the values that became real tensors, and the value of each captured node (or constant) in ``wanted``, or
            stand-ins if nobody sees them.
        """
        alive = tuple(index for index in range(len(self.lazies)) if self.held(index) is not None)
        observed = self.grad_enabled and (observed or self._differentiates)
        # A trace that stops here wants nothing; one that is cut here wants what the rest of the graph needs.
        unseen = wanted is self.graph.outputs and self._is_output_unseen()
        key = (stop, alive, -1 if unseen else len(wanted), observed)
        variant = self.state.variants.get(key)
        if variant is None:
            with stage("splice"), self.graph.lock:
                variant = self.state.variants.get(key)
                if variant is None:
                    resolved = [self.resolve(item) if isinstance(item, torch.fx.Node) else item for item in wanted]
                    program = self.state.program()
                    variant = Variant(self.graph, self.piece, program, stop, alive, () if unseen else resolved, observed, unseen)
                    if unseen and variant.may_hide_errors():
                        variant = Variant(self.graph, self.piece, program, stop, alive, resolved, observed)
                    self.state.variants[key] = variant
        if self.journal is not None:
            self.journal.ran(self, variant, alive, stop)
        arguments = [*variant.take(self.inputs), *self.externals, *map(as_argument, self.numbers)]
        sizes = self.binding + self.numbers
        lowered, made = variant.lowered_for(sizes, arguments) if lower else (variant.unlowered(), 0)
        self.report.compiles += made
        ran = RanPiece(self.graph, self.state, variant, lowered, self.binding, stop, cut)
        self.failed_to_run = True
        computed = run_lowered(self.report, ran, arguments)
        self.failed_to_run = False
        self._fill(alive, computed, variant.positions, lowered.partial)
        for place in lowered.partial:
            if place < 0 and isinstance(arguments[~place], torch.Tensor) and arguments[~place].requires_grad:
                gradients.refuse(arguments[~place])
        return alive, self.graph.stand_ins(self.binding) if variant.unseen else variant.deliver(computed, self.inputs, self.externals)

    def _fill(
        self, alive: tuple[int, ...], computed: list[Any], positions: dict[int, int], partial: frozenset[int]
    ) -> None:
        """Turn the lazy tensors into what was computed for them; those at the positions ``partial`` lack gradients."""
        if not alive:
            return
        # Objects that somebody else holds too: the graph's inputs, and a tensor it returns in several places.
        held = {*map(id, self.inputs), *map(id, self.externals)}
        places: dict[int, list[int]] = {}
        for position, real in enumerate(computed):
            places.setdefault(id(real), []).append(position)
        for index in alive:
            lazy, self.lazies[index] = self.held(index), None
            if lazy is None:
                continue
            real = known = computed[positions[index]]
            if id(real) in held:
                real = real.view_as(real)
                computed[positions[index]] = lazy
            else:
                for position in places[id(real)]:
                    computed[position] = lazy
            if become(lazy, real):
                held.add(id(lazy))
                if known is not real and known.requires_grad:
                    gradients.stand_for(lazy, known)
                if positions[index] in partial and lazy.requires_grad:
                    gradients.refuse(lazy)
            else:
                self.filled.append(lazy)

    def _abandon(self) -> None:
        """Unmark saved tensors that were not computed, so that no name is bound to a tensor without a value."""
        marked = saves.get()
        for lazy in map(self.held, range(len(self.lazies))):
            if lazy is not None and marked is not None:
                marked.pop(id(lazy), None)


def _mentions_backward(block: Any) -> bool:
    """Whether a block mentions a backward pass, for which autograd has to see the tensors of the block."""
    return isinstance(block, Block) and "backward" in block.code.co_names


def suspended(*values: Any) -> contextlib.AbstractContextManager[None]:
    """Leave the active recording for a call that must not be recorded, such as a run of another model.

    Lazy tensors among ``values``, which the call uses, are made real first.
    """
    mode = torch.overrides._get_current_function_mode()
    if not isinstance(mode, PieceRunner):
        return contextlib.nullcontext()
    if any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves(values)):
        mode.cut("a compiled model was called", "one trace behind the other, with `.save()` between them")
    return mode.set_aside()


def run_plain(graph: CapturedGraph, inputs: tuple[Any, ...]) -> list[Any]:
    """Run a captured graph without any program in it; a few dictionary look-ups over calling it."""
    variant = graph.start.variants.get((len(graph.nodes) - 1, (), len(graph.outputs), False))
    lowered = None if variant is None else variant.find(graph.binding(inputs), variant.placement(inputs))
    if variant is None or lowered is None:
        return PieceRunner(graph, inputs, Interleaver([]), Report(), False).finish()
    return variant.deliver(lowered.function(*inputs), inputs, ())
