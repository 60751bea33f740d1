"""Variants: the compiled form of one program in one captured graph.

A recording finds its variant at the end of its path through the tree of programs, so the look-up costs nothing extra. A variant has the
spliced graph, a list of the sources of its results, and its lowerings: one for each group of sizes that the backend distinguishes.

A lowering may have two stages. The first stage is fast to make: regions, most of which have been lowered before
(:mod:`~nnsight.fx.lowering.regions`), or the nodes one by one. The second stage is the whole graph. It is lowered in the background
(:mod:`~nnsight.fx.lowering.background`) when the variant runs for the second time.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..block_events import BlockEvents, External, Input, ValueNumber
from ..capturing.graph import CapturedGraph
from ..counters import counters, stage
from ..effects import Kind, Memory, edited, edits_of_inputs, kind_of, may_fail, requires_grad, writes_to_inputs
from ..splicing.passes import Pass, copy_edited_values, copy_for_backward, make_cuttable, replace_unseen_edits
from ..splicing.pieces import Piece, Result
from ..splicing.splice import splice
from . import background
from .backends import BackendCallable
from .early_results import with_hand_overs
from .gradient_borders import mark_borders, partial_results, patched_rows
from .lowering import Lowered, Placement, Prepared, lower_prepared, prepare, run_as_is, sharing_of
from .region_plan import Plan, copy_stretches
from .regions import KnownRegions, lower_in_regions
from .symbols import Layout, Symbols, layout_of

logger = logging.getLogger("nnsight.fx")

#: Reasons why a graph runs node by node, each with the remedy.
_SHOWS_ALL = "the block holds tensors whose gradients no compiled graph can show. Hold only those whose gradients are read."
_FAILED = "the backend cannot lower it ({}). Another backend may, and `trace(..., compile=False)` runs the trace eagerly."
_EDITS_LEAF = "it edits a parameter, or another leaf of autograd, in place. Edit it under `torch.no_grad()`, or edit a copy."

#: Most combinations of sizes and numbers for which a dictionary has the lowering, so that no conditions are evaluated.
_KEPT_BINDINGS = 1024

#: Most lowerings of one program that are kept. Those with a number as a constant are seldom used again.
_KEPT_LOWERINGS = 64


class _Run(NamedTuple):
    """A run for which a lowering is needed: the values of symbols and numbers, and the arguments with their placement."""

    binding: tuple[int | float, ...]
    arguments: Sequence[Any]
    placement: Placement

    @property
    def key(self) -> Any:
        return self.binding, self.placement

    def without_arguments(self) -> _Run:
        return self._replace(arguments=())


class Variant:
    """A program spliced into a piece of a captured graph.

    Args:
        piece: The piece of the captured graph in which the program was recorded.
        stop: Number of the first node that is left out.
        alive: Numbers of the values that become real tensors.
        wanted: Further results: references, captured nodes, or constants.
        observed: Whether autograd has to see every tensor that becomes real. The graph is then cut after each of them.
        unseen: Whether the outputs of the captured graph are left out of ``wanted``, because nobody sees them.
        rows: Which alive values are rows of an invoke, each with the number of its whole tensor, which is alive, too.

    Attributes:
        positions: Position of each alive value among the graph's results.
        patched_rows: The values among ``rows`` with incomplete gradients, see :func:`~nnsight.fx.lowering.gradient_borders.patched_rows`.
        edits_inputs: Whether the spliced graph edits one of its inputs.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        piece: Piece,
        program: BlockEvents,
        stop: int,
        alive: Sequence[int],
        wanted: Sequence[Any],
        observed: bool = False,
        unseen: bool = False,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        self.unseen = unseen
        results: dict[Result, int] = {}
        for item in (*(ValueNumber(index) for index in alive), *wanted):
            if isinstance(item, (ValueNumber, torch.fx.Node)):
                results.setdefault(item, len(results))
        self._graph = graph
        self._observed = observed and torch.is_grad_enabled()
        self.spliced = splice(graph, piece, program, stop, list(results))
        counters.add("splices")
        self.positions = {index: results[ValueNumber(index)] for index in alive}
        returned: Any = self.spliced.graph_module.graph.output_node().args[0]
        nodes = {index: (returned[self.positions[index]], returned[self.positions[whole]]) for index, whole in (rows or {}).items()}
        self.patched_rows = patched_rows(self.spliced, nodes)
        self._plan = [
            (0, results[item])
            if isinstance(item, (ValueNumber, torch.fx.Node))
            else (1, item.index)
            if isinstance(item, Input)
            else (2, item.index)
            if isinstance(item, External)
            else (3, item)
            for item in wanted
        ]
        taken = self.spliced.inputs
        #: Selects the inputs of the spliced graph from those of the captured one.
        self.take: Callable[[Sequence[Any]], Sequence[Any]] = (
            operator.itemgetter(*taken) if len(taken) > 1 else lambda inputs: [inputs[index] for index in taken]
        )
        #: Positions of the inputs that an earlier piece has computed. The strides of the others are known from dynamo's guards.
        self._carried = [place for place, index in enumerate(taken) if index >= len(graph.placeholders)]
        self._lowerings: list[Lowered] = []
        # The positions in a binding on which the choice of a lowering depends, and the lowering for each combination of their values.
        self._known: tuple[tuple[int, ...], dict[Any, Lowered]] = ((), {})
        self._fixed: frozenset[type] = frozenset()  # types of numbers that the backend accepts only as constants
        self._copies: Pass | None = None  # a pass that copies values before they are edited, if a backward pass needs it
        self._writes_to_inputs = writes_to_inputs(self.spliced.graph_module.graph)
        found = list(edits_of_inputs(self.spliced.graph_module.graph)) if self._writes_to_inputs else []
        self.edits_inputs = bool(found)
        self._edited = sorted({position for _, positions, follows in found if follows for position in positions})
        self._first_stages: dict[Any, Lowered] = {}  # the lowerings that run until the whole graph is lowered
        self._requested = False  # whether a job in the background lowers the whole graph

    def may_hide_errors(self) -> bool:
        """Whether the result of a call that may fail is unused, so that a backend may remove the call together with its error."""
        graph = self.spliced.graph_module.graph
        memory = Memory(graph)
        needed: set[torch.fx.Node] = set()
        memories = {memory.group("inputs")}  # whose edits have an effect
        for node in reversed(graph.nodes):
            source = edited(node)
            has_effect = kind_of(node) is Kind.EFFECT and (source is None or memory.group(source) in memories)
            if node in needed or has_effect:
                needed.update(node.all_input_nodes)
                memories.update(map(memory.group, node.all_input_nodes))
            elif may_fail(node):
                return True
        return False

    def placement(self, arguments: Sequence[Any]) -> Placement:
        """Return the placement of ``arguments``."""
        sharing = sharing_of(arguments) if self._writes_to_inputs else ()
        layouts = tuple([_layout(arguments[position]) for position in self._carried]) if self._carried else ()
        return Placement(sharing, layouts)

    def find(self, binding: tuple[int | float, ...], placement: Placement) -> Lowered | None:
        """Return the final lowering for these sizes and numbers; ``None`` if there is none yet."""
        restricted, by_binding = self._known
        key = (tuple(binding[position] for position in restricted), placement)
        found = by_binding.get(key)
        if found is None:
            fitting = (lowered for lowered in self._lowerings if lowered.placement == placement)
            found = next((lowered for lowered in fitting if lowered.accepts(binding)), None)
            if found is not None:
                if len(by_binding) >= _KEPT_BINDINGS:
                    by_binding.clear()
                by_binding[key] = found
        return found

    def still_runs(self, lowered: Lowered) -> bool:
        """Whether :meth:`lowered_for` surely returns ``lowered`` again for the same sizes and numbers."""
        return not self._writes_to_inputs and lowered in self._lowerings

    def lowered_for(self, binding: tuple[int | float, ...], arguments: Sequence[Any]) -> tuple[Lowered, int]:
        """Return the lowering for these sizes and numbers, and the number of graphs that were compiled for it by this call.

        Args:
            binding: Sizes of the captured graph's symbols, then the program's numbers.
            arguments: The inputs with which the graph is about to be called.
        """
        if self._edited and torch.is_grad_enabled() and any(_is_of_leaf(arguments[position]) for position in self._edited):
            return self.unlowered(_EDITS_LEAF), 0  # unlike backends, autograd then raises its error if it forbids the edit
        run = _Run(binding, arguments, self.placement(arguments))
        found = self.find(binding, run.placement)
        if found is not None:
            return found, 0
        with stage("lower"), self._graph.lock:
            found = self.find(binding, run.placement)
            return (found, 0) if found is not None else self._lower(run)

    def unlowered(self, uncompiled: str = "") -> Lowered:
        """Return a lowering that runs the nodes of the spliced graph one by one."""
        graph_module = with_hand_overs(self.spliced.graph_module) if self._observed else self.spliced.graph_module
        return Lowered(graph_module.forward, (), (), 0, uncompiled=uncompiled)

    def _lower(self, run: _Run) -> tuple[Lowered, int]:
        first = self._first_stages.get(run.key)
        if first is not None:
            if not self._requested:
                self._requested = True
                self._lower_later(run)
            return first, 0
        made = self._between_borders(run) if self._observed else None
        if made is not None:
            self._keep(made, run)
            return made, made.compiles
        made = self._in_regions(run)
        if self._graph.background and (made is None or made.regions > 1):
            made = made or replace(self.unlowered(), placement=run.placement, partial=self._partial())
            self._first_stages[run.key] = made
        else:
            made = made or self._as_a_whole(run)
            self._keep(made, run)
        return made, made.compiles

    def _keep(self, lowered: Lowered, run: _Run) -> None:
        self._lowerings = [*self._lowerings[-_KEPT_LOWERINGS:], lowered]
        restricted = {position for known in self._lowerings for position in known.restricted()}
        self._known = (tuple(sorted(restricted)), {})
        self._first_stages.pop(run.key, None)

    def _prepared(self, run: _Run, rewrite: Pass | None = None, fixed: frozenset[type] = frozenset()) -> Prepared:
        """Return a copy of the spliced graph with fakes. It copies the values that its backward pass needs before they are edited."""
        graph_module = self.spliced.copy()
        if self.edits_inputs and torch.is_grad_enabled() and any(map(requires_grad, run.arguments)):
            graph_module = self._with_copies(run)
        if rewrite is not None:
            rewrite(graph_module)
        symbols = [symbol for _, symbol in self._graph.symbols]
        every = (self._fixed | fixed, run.placement, self._graph.each_size)
        return prepare(graph_module, run.arguments, symbols, run.binding, *every)

    def _with_copies(self, run: _Run) -> torch.fx.GraphModule:
        """Return a copy of the spliced graph that copies edited inputs for its backward pass."""
        symbols = [symbol for _, symbol in self._graph.symbols]
        graph_module, tried = self.spliced.copy(), self.spliced.copy()
        try:
            places = Plan(prepare(tried, run.arguments, symbols, run.binding, (), run.placement)).copies_for_backward()
        except Exception as error:  # the backend will run the graph on fakes, too, and raise its own error
            logger.debug("a graph cannot be run on fakes: %s", _summary(error))
            return graph_module
        same = dict(zip(tried.graph.nodes, graph_module.graph.nodes, strict=True))
        return copy_for_backward(graph_module, [(same[node], same[source]) for node, source in places])

    def _partial(self, made: Lowered | None = None) -> frozenset[int]:
        """Return the places of tensors with incomplete gradients, in ``made`` or, without it, if the whole graph runs node by node."""
        sharing = () if made is None or made.node_by_node else made.placement.sharing
        return partial_results(self.spliced.graph_module.graph, sharing=sharing)

    def _between_borders(self, run: _Run) -> Lowered | None:
        """Lower with a gradient border after each result that the graph also uses; return ``None`` if there is no such result.

        If a border is not possible, the nodes run one by one, so that autograd sees each operation.
        """
        reason = _SHOWS_ALL
        try:
            fixed = frozenset({float})  # a float is the item of a tensor, and no border may separate the two
            plan = Plan(self._prepared(run, None, fixed))
            rewrite: Pass = replace_unseen_edits
            if plan.has_backward():  # copies would hide an error of autograd
                rewrite = partial(make_cuttable, fakes={node.name: value for node, value in plan.values.items()})
            how = (run, rewrite, fixed)
            tried = self._prepared(*how)
            if not mark_borders(tried.graph_module, run.placement.sharing, Plan(tried)):
                return None
            cut = self._prepared(*how)  # a second copy, because the run on fakes has changed the fakes of the first
            copy_stretches(tried.graph_module.graph, cut.graph_module.graph)
        except Exception as error:
            logger.info("a graph cannot be cut for gradients: %s", _summary(error))
        else:
            try:
                known = self._graph.regions or KnownRegions()
                made = lower_in_regions(cut, run.arguments, run.binding, self._graph.backend, known, early=True)
                if made is not None and not made.partial & set(self.positions.values()):
                    return replace(made, placement=run.placement)
            except Exception as error:
                if self._lowers_each_size(error):
                    return self._between_borders(run)
                self._graph.each_size = False
                logger.info("regions between borders cannot be lowered: %s", _summary(error))
                reason = _FAILED.format(_summary(error))
        logger.info("a graph runs node by node, because no lowering shows autograd the tensors whose gradients may be requested")
        symbols = Symbols([symbol for _, symbol in self._graph.symbols], run.binding).symbols
        return replace(self.unlowered(reason), symbols=symbols, placement=run.placement, node_by_node=True)

    def _in_regions(self, run: _Run) -> Lowered | None:
        known = self._graph.regions
        if known is None or run.placement.sharing:
            return None
        try:
            made = lower_in_regions(self._prepared(run, self._copies), run.arguments, run.binding, self._graph.backend, known)
            return made and replace(made, placement=run.placement)
        except Exception as error:
            if self._needs_copies(error):
                return self._in_regions(run)
            logger.warning("lowering a region failed, so the graph is lowered as a whole: %s", _summary(error))
            return None

    def _lowers_each_size(self, error: Exception) -> bool:
        """Give up symbolic sizes after a failure, such as Inductor's for a scan over one. Returns ``False`` if they are plain already."""
        if self._graph.each_size or not self._graph.symbols:
            return False
        logger.warning("The backend cannot lower a graph with symbolic sizes, so each size is lowered separately: %s", _summary(error))
        self._graph.each_size = True
        return True

    def _needs_copies(self, error: Exception) -> bool:
        """Whether a lowering failed because a value is edited that the backward pass needs. If so, later lowerings edit copies."""
        if self._copies is not None or "modified by an inplace operation" not in str(error):
            return False
        logger.debug("edited values are copied: %s", _summary(error))
        self._copies = copy_edited_values
        return True

    def _as_a_whole(self, run: _Run) -> Lowered:
        """Lower with symbolic numbers or, if the backend fails, with the present numbers as constants."""
        kinds = frozenset(type(number) for number in run.binding[len(self._graph.symbols) :])
        while True:
            try:
                made = lower_prepared(self._prepared(run, self._copies), self._graph.backend)
                return replace(made, partial=self._partial(made))
            except Exception as error:
                if self._needs_copies(error):
                    continue
                if kinds <= self._fixed:
                    if self._lowers_each_size(error):
                        return self._in_regions(run) or self._as_a_whole(run)
                    self._graph.each_size = False  # a graph that is not lowered runs with all sizes
                    # A failure of the backend must not change the results of a trace.
                    logger.info("lowering failed, so this graph runs node by node: %s", _summary(error))
                    made = lower_prepared(self._prepared(run, self._copies), run_as_is)
                    return replace(made, partial=self._partial(made), uncompiled=_FAILED.format(_summary(error)))
                self._fixed |= {float} if float in kinds - self._fixed else kinds
                logger.debug("numbers become constants: %s", _summary(error))

    def _lower_later(self, run: _Run) -> None:
        """Lower the whole graph in the background. The job refers only to fakes, and gives up if the variant no longer exists."""
        try:
            prepared = self._prepared(run, self._copies)
        except Exception as error:
            self._take_over(run.without_arguments(), error)
            return
        background.submit(partial(_lower_in_background, weakref.ref(self), prepared, self._graph.backend, run.without_arguments()))

    def _take_over(self, run: _Run, result: Lowered | Exception) -> None:
        """Use the lowering of the whole graph from now on, or keep the first stage if ``result`` is an error."""
        with self._graph.lock:
            self._requested = False
            if isinstance(result, Lowered):
                self._keep(replace(result, partial=self._partial(result)), run)
            elif not self._lowers_each_size(result):  # otherwise the next call requests it again
                logger.warning("lowering in the background failed, so this graph keeps its first lowering: %s", _summary(result))
                first = self._first_stages[run.key]
                self._keep(replace(first, uncompiled="" if first.compiles else _FAILED.format(_summary(result))), run)

    def deliver(self, computed: Sequence[Any], inputs: Sequence[Any], externals: Sequence[Any]) -> list[Any]:
        """Return the value of each item of ``wanted``, in order."""
        sources = (computed, inputs, externals)
        return [item if source == 3 else sources[source][item] for source, item in self._plan]


def _layout(value: Any) -> Layout | tuple[Any, ...] | None:
    """Return the layout of an input that an earlier piece has computed; its sizes and strides if it has no layout."""
    if not isinstance(value, torch.Tensor):
        return None
    found = layout_of(value)
    return (tuple(value.shape), value.stride()) if found is None else found


def _is_of_leaf(value: Any) -> bool:
    """Whether a tensor is an autograd leaf that requires a gradient, or a view of such a leaf."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    base = value._base if value._is_view() else value
    return base is not None and base.is_leaf


def _lower_in_background(wanted: weakref.ref[Variant], prepared: Prepared, backend: BackendCallable, run: _Run) -> None:
    if wanted() is None:
        return
    try:
        result: Lowered | Exception = lower_prepared(prepared, backend)
    except Exception as error:
        result = error
    variant = wanted()
    if variant is not None:
        variant._take_over(run, result)


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10), 1)[0]}"
