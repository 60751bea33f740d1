"""Runs a captured graph with the recorded program, piece by piece: a cut runs one piece, and the block continues with real values."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _len_torch_function_stack
from torch.utils import _pytree as pytree

from ...runtime.interleaver import Interleaver
from ...runtime.report import Break, Report
from ...runtime.rows.gradient_sources import PATCHED, note_rows, note_turn, refuse_gradient, share_gradient
from ...runtime.rows.gradient_sources import call as call_torch
from ...runtime.switching.mode_stacks import unseen
from ...tracing.block import Block
from ...tracing.saving import saves
from ..block_events import Cut, External, Input, ValueNumber
from ..capturing.graph import CapturedGraph, Tap
from ..counters import counters, stage
from ..effects import Kind, kind_of
from ..lowering.early_results import Take, taking
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


#: Why a graph runs node by node: ahead-of-time autograd has no backward pass of a backward pass.
_TWICE = "the block asks for `create_graph`, and no compiled graph can be differentiated twice. Use `trace(..., compile=False)`."


class GraphBreakError(RuntimeError):
    """A trace must be one graph (``fullgraph=True``), and a block needed a concrete value, or the call must run uncompiled."""


class PieceRunner(CallRecorder):
    """Runs ``graph`` piece by piece, and turns lazy tensors into its results. With ``fullgraph``, a call that needs a value raises."""

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
        self.suspended_in: int | None = None  # the thread in which a nested run is active
        self.failed_to_run = False  # whether a piece raised an error; its side effects must not happen a second time
        blocks = [mediator.info.code for mediator in run.mediators if isinstance(mediator.info, Block)]
        # If the code of a block mentions `backward`, autograd has to see the tensors of the block.
        self._differentiates = any("backward" in code.co_names for code in blocks)
        # The names of the keyword arguments of a call are a tuple among the constants of a code.
        self._twice = any("create_graph" in names for code in blocks for names in code.co_consts if isinstance(names, tuple))
        self.as_captured = True  # whether the model continues with tensors of the captured metadata: only values have changed
        self._ended: tuple[Break, str] | None = None  # an unreported cut for a backward pass, after the last computation of the model
        if graph.whole is None:
            graph.whole = Piece.of(graph, 0)
        self._begin(graph.whole)

    def _begin(self, piece: Piece) -> None:
        """Start a piece of the graph without any recorded events."""
        self.piece = piece
        self.random = False
        self.used += self.run.inputs
        self._edits = iter(self.graph.edits_in(piece))
        self._next_edit = next(self._edits, None)  # the model's next edit of an input, after the current tap
        self.value_of: dict[torch.fx.Node, int] = {}
        self.writes: dict[tuple[int, int], ValueNumber | Input | External] = {}
        self.substitutes: dict[torch.fx.Node, ValueNumber | Input | External] = {}

    def resolve(self, node: torch.fx.Node) -> ValueNumber | Input | External | torch.fx.Node:
        """Return the reference to the present value of a captured node, or the node that computes it if the program has no reference."""
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
        """Return the tensor that the block gets for ``reference``."""
        if isinstance(reference, ValueNumber):
            return self.lazy(reference.index)
        tensor = (self.inputs if isinstance(reference, Input) else self.externals)[reference.index]
        self.used.append(tensor)
        return tensor

    def demand(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
        """Cut the graph at the current tap, and then call ``function`` on real tensors."""
        assert self.tap is not None
        self.as_captured = False  # the call may change the shape of its argument
        if self.journal is not None:
            self.journal.spoil("it needs a value before the graph has run")
        pending = LazyTensor in map(type, args) or any(
            isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves((args, kwargs))
        )
        at_start = self.graph.order[self.tap.node] == self.piece.start
        if pending or not at_start or (self.state.event is not None and not isinstance(self.state.event, Cut)):
            name = name_of(function)
            self.cut(reason or f"`{name}` needs a concrete value", instead_of(name), self.grad_enabled and name in ABOUT_BACKWARD)
        if self.filled:
            args, kwargs = pytree.tree_map(real_of, (args, kwargs))
        result = call_torch(function, args, kwargs)
        self.note_exported(function, result)
        return result

    def _shows_edits(self, tap: Tap) -> bool:
        """Whether the model, between the start of the piece and ``tap``, may edit memory that code outside of torch sees."""
        if not self.is_memory_exported:
            return False
        nodes = self.graph.nodes[self.piece.start : self.graph.order[tap.node]]
        return any(
            kind_of(node) is Kind.EFFECT and node not in self.graph.tap_number and node.op != "placeholder" for node in nodes
        )

    def cut(self, reason: str, instead: str, observed: bool = False) -> None:
        """Run the graph up to the current tap, so that all lazy tensors become real tensors.

        With ``observed``, autograd has to see each of these tensors, because the block will request gradients with respect to them.
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
        if self.state.next_piece is None:  # it is the same for each run that reaches this state
            piece = Piece.of(self.graph, stop)
            piece = piece.without_duplicates([self.resolve(node) for node in piece.inputs])
            self.state.next_piece = piece, piece.inputs[len(self.graph.placeholders) :]
        behind, wanted = self.state.next_piece
        alive, carried = self._run_piece(stop, wanted, cut, observed)
        self.state = self.step(Cut(self.tap.index, alive))
        self.start_tables([*self.inputs[: len(self.graph.placeholders)], *carried])
        self._begin(behind)

    def _report(self, cut: Break, instead: str) -> None:
        """Report that the graph is cut; with ``fullgraph``, raise a :class:`GraphBreakError` instead."""
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
        """Report a backward pass after the last computation of the model as a cut, if the block computes anything after it."""
        if self._ended is not None and self.state.does_work:
            ended, self._ended = self._ended, None
            self._report(*ended)

    def compute_for_nested(self) -> None:
        """Cut the graph, because the block of a nested run uses a lazy tensor of this one.

        Raises:
            GraphBreakError: If this run was compiled with ``fullgraph=True``.
            RuntimeError: If this run has failed, or runs in another thread.
        """
        if self.closed:
            raise RuntimeError(NEVER_COMPUTED)
        if self.suspended_in != threading.get_ident():
            raise RuntimeError(
                "This tensor belongs to a compiled trace that is still running in another thread, and has no value yet. "
                "Use it after that trace."
            )
        with suspended():  # suspends the recording of the nested run
            reason = "a trace inside the block uses a tensor of this one"
            self.cut(reason, "one trace after the other, with `.save()` between them")

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Record nothing in this context. Code in it may still request values, by :meth:`compute_for_nested`."""
        outer, self.suspended_in = self.suspended_in, threading.get_ident()
        try:
            with torch.overrides._pop_mode_temporarily():
                yield
        finally:
            self.suspended_in = outer

    def finish(self) -> list[Any]:
        """Run the rest of the graph. Returns the outputs of the captured graph, or stand-ins if nobody sees the outputs."""
        self.settle_end()
        _, outputs = self._run_piece(len(self.graph.nodes) - 1, self.graph.outputs)
        return outputs

    def _is_output_unseen(self) -> bool:
        """Whether nobody sees the output of the model, and computing it would raise no error.

        Nobody sees the output if it is returned to no caller, and no block waits for a location after the graph. The rest of the model
        raises no error if blocks have changed only values, because it ran on the same metadata during the capture.
        """
        run = self.run
        unseen = self.graph.may_stand_in and not run.returns and not run.waited and self.state is not self.graph.start
        return unseen and self.as_captured and not any(output.is_referenced for output in run.deferred_outputs or ())

    def _compute_live_tensors(self) -> None:
        """Run the graph node by node up to the tap where a block failed: the user may hold tensors from before, as in an eager trace."""
        if self.failed_to_run:
            return
        self.journal = None
        stop = len(self.graph.nodes) - 1 if self.tap is None else self.graph.order[self.tap.node]
        try:
            self._run_piece(stop, [], lower=False)
        except Exception as error:
            logger.warning("tensors that a block held when it failed cannot be computed: %s: %s", type(error).__name__, error)

    def _run_piece(
        self, stop: int, wanted: Sequence[Any], cut: Break | None = None, observed: bool = False, lower: bool = True
    ) -> tuple[tuple[int, ...], list[Any]]:
        """Run a piece in the modes of the model; see :meth:`_run_in_modes`."""
        if self.modes.hold and (cut is None or self.stacks.have_their_lengths):
            with self.modes.keys():  # a value may be requested inside an operator, where torch excludes some dispatch keys
                return self._run_in_modes(stop, wanted, cut, observed, lower)
        # The block has switched some modes, or requests the value in another thread.
        with self.modes.entered(), self.stacks.entered():
            return self._run_in_modes(stop, wanted, cut, observed, lower)

    def _run_in_modes(
        self, stop: int, wanted: Sequence[Any], cut: Break | None, observed: bool, lower: bool
    ) -> tuple[tuple[int, ...], list[Any]]:
        """Run the graph from the piece's start up to node number ``stop``, lowered or node by node.

        Returns:
            The numbers of the values that became real tensors, and the value of each captured node (or constant) in ``wanted``. If
            ``wanted`` are the outputs of the model and nobody sees them, stand-ins.
        """
        observed = self.grad_enabled and (observed or self._differentiates)
        held_rows = self._rows_with_wholes(observed or cut is not None)
        alive = tuple(index for index in range(len(self.lazies)) if self.held(index) is not None)
        # The length of `wanted` is part of the key: a stopped trace wants nothing, a cut one the inputs of the rest of the graph.
        unseen = wanted is self.graph.outputs and self._is_output_unseen()
        key = (stop, alive, -1 if unseen else len(wanted), observed)
        variant = self.state.variants.get(key)
        if variant is None:
            with stage("splice"), self.graph.lock:
                variant = self.state.variants.get(key)
                if variant is None:
                    resolved = [self.resolve(item) if isinstance(item, torch.fx.Node) else item for item in wanted]
                    program = self.state.program()
                    what = (self.graph, self.piece, program, stop, alive)
                    wholes = {index: whole._index for _, index, whole, *_ in held_rows if isinstance(whole, LazyTensor)}
                    variant = Variant(*what, () if unseen else resolved, observed, unseen, wholes)
                    if unseen and variant.may_hide_errors():
                        variant = Variant(*what, resolved, observed, rows=wholes)
                    self.state.variants[key] = variant
        if self.journal is not None:
            self.journal.runs(self, variant, alive, stop)
        arguments = [*variant.take(self.inputs), *self.externals, *map(as_argument, self.numbers)]
        sizes = self.binding + self.numbers
        if lower and not (observed and self._twice):
            lowered, compiles = variant.lowered_for(sizes, arguments)
        else:
            lowered, compiles = variant.unlowered(_TWICE if lower else ""), 0
        self.report.compiles += compiles
        ran = RanPiece(self.graph, self.state, variant, lowered, self.binding, stop, cut)
        self.failed_to_run = True
        taken: set[int] = set()
        with taking(self._taker(alive, variant.positions, taken) if observed else None):
            computed = run_lowered(self.report, ran, arguments)
        self.failed_to_run = False
        self._fill(alive, computed, variant.positions, lowered.partial, taken)
        for given, index, whole, *place in held_rows:
            if index in variant.patched_rows and given.requires_grad:
                refuse_gradient(given, PATCHED)
            elif whole is not None:
                for tensor in (given, real_of(given)):  # two, if the lazy tensor could not become the real one
                    note_rows(tensor, real_of(whole), *place)
                    note_turn(tensor, real_of(whole))  # later edits by the block of these rows call it again
            elif given.requires_grad:
                refuse_gradient(given)
        refuse_edited(arguments, lowered.partial)
        return alive, self.graph.stand_ins(self.binding) if variant.unseen else variant.deliver(computed, self.inputs, self.externals)

    def _rows_with_wholes(self, observed: bool) -> list[tuple[Any, ...]]:
        """Return the rows of invokes that the block holds, each with its number, its whole tensor, group and place.

        A whole tensor becomes a result of the graph only if gradients may be requested before the run ends. Otherwise it is ``None``.
        """
        if not self.grad_enabled:
            return []
        found: list[tuple[Any, ...]] = []
        for index, (whole, *place) in self.rows.items():
            given = self.held(index)
            if given is not None:
                known = whole if isinstance(whole, torch.Tensor) else self.lazy(whole) if observed else None
                found.append((given, index, known, *place))
        return found

    def _taker(self, alive: tuple[int, ...], positions: dict[int, int], taken: set[int]) -> Take:
        """Return a function that turns the lazy tensors ``alive`` into results while the graph runs, and adds their ids to ``taken``."""
        held = {*map(id, self.inputs), *map(id, self.externals)}
        indices = {positions[index]: index for index in reversed(alive)}

        def take(position: int, real: torch.Tensor) -> torch.Tensor:
            index = indices.get(position)
            lazy = None if index is None else self.held(index)
            if index is None or lazy is None or id(real) in held or id(real) in taken:
                return real
            self.lazies[index] = None  # torch does not swap a tensor with a weak reference
            if not become(lazy, real, early=True):
                self.lazies[index] = weakref.ref(lazy)
                return real
            taken.add(id(lazy))
            return lazy

        return take

    def _fill(
        self, alive: tuple[int, ...], computed: list[Any], positions: dict[int, int], partial: frozenset[int], taken: set[int]
    ) -> None:
        """Turn the lazy tensors ``alive`` into their computed tensors, but for those ``taken`` while the graph ran.

        Gradients at the positions ``partial`` are incomplete.
        """
        if not alive:
            return
        # Objects that are referred to elsewhere: the inputs of the graph, and tensors that it returns in several places.
        held = {*map(id, self.inputs), *map(id, self.externals), *taken}
        places: dict[int, list[int]] = {}
        for position, real in enumerate(computed):
            places.setdefault(id(real), []).append(position)
        for index in alive:
            lazy, self.lazies[index] = self.held(index), None
            if lazy is None:  # also if it was taken
                continue
            real = known = computed[positions[index]]
            if id(real) in held:
                real = real.view_as(real)
                computed[positions[index]] = lazy
            elif positions[index] in partial and real.requires_grad:
                real = real.view_as(real)  # so that torch reports a tensor without a gradient, instead of a part of it
            else:
                for position in places[id(real)]:
                    computed[position] = lazy
            if become(lazy, real):
                held.add(id(lazy))
                if positions[index] in partial and lazy.requires_grad:
                    refuse_gradient(lazy)
                elif known is not real and known.requires_grad:
                    share_gradient(lazy, known)
            else:
                self.filled.append(lazy)

    def _abandon(self) -> None:
        """Remove the save marks of lazy tensors that were not computed, so that no name is bound to a tensor without a value."""
        marked = saves.get()
        for lazy in map(self.held, range(len(self.lazies))):
            if lazy is not None and marked is not None:
                marked.pop(id(lazy), None)


def refuse_edited(arguments: Sequence[Any], partial: frozenset[int]) -> None:
    """Refuse gradients of the arguments of a graph that it has edited, at the places ``~n`` among ``partial``: they are incomplete."""
    for place in partial:
        if place < 0 and isinstance(arguments[~place], torch.Tensor) and arguments[~place].requires_grad:
            refuse_gradient(arguments[~place])


def suspended(*values: Any) -> contextlib.AbstractContextManager[None]:
    """Suspend the active recording during a call that must not be recorded, such as a run of another model.

    If ``values``, the arguments of the call, contain lazy tensors, the graph is cut first.
    """
    mode = torch.overrides._get_current_function_mode()
    if not isinstance(mode, PieceRunner):
        return contextlib.nullcontext()
    if any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves(values)):
        mode.cut("a compiled model was called", "one trace after the other, with `.save()` between them")
    return mode.set_aside()


def run_plain(graph: CapturedGraph, inputs: tuple[Any, ...]) -> list[Any]:
    """Run a captured graph without a program. If it is lowered, this costs a few dictionary look-ups more than a plain call."""
    variant = graph.start.variants.get((len(graph.nodes) - 1, (), len(graph.outputs), False))
    lowered = None if variant is None else variant.find(graph.binding(inputs), variant.placement(inputs))
    if variant is None or lowered is None:
        return PieceRunner(graph, inputs, Interleaver([]), Report(), False).finish()
    with unseen(graph.has_subclasses) if _len_torch_function_stack() else contextlib.nullcontext():
        return variant.deliver(lowered.function(*inputs), inputs, ())
