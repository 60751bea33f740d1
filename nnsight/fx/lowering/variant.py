"""Variants: the compiled form of one program in one captured graph.

A variant is found by following a program, never by comparing programs, so finding it costs nothing beyond the steps of the
block itself. It holds the spliced graph, one lowering for each set of sizes that a backend would not treat alike, and the plan that
says which result goes where.

A lowering may come in two stages. The first is there soon: regions, most of which have been lowered before
(:mod:`~nnsight.fx.lowering.regions`), or the nodes one by one. The second is the whole graph in one, lowered in the background
(:mod:`~nnsight.fx.lowering.background`). It is asked for when the variant runs for the second time: a block that is tried
once is not worth it.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..capturing.graph import CapturedGraph
from ..counters import counters
from ..effects import Kind, edits_of_inputs, kind_of, may_fail, writes_to_inputs
from ..profiling import stage
from ..program import External, Input, Program, Value
from ..splicing.passes import copy_edited_values, copy_for_backward, replace_unseen_edits
from ..splicing.pieces import Piece, Result
from ..splicing.splice import splice
from . import background
from .backends import BackendCallable
from .gradient_borders import mark_borders, partial_results
from .lowering import Lowered, Placement, Prepared, lower_prepared, prepare, run_as_is, sharing_of
from .region_plan import Plan
from .regions import KnownRegions, lower_in_regions
from .repeated_modules import copy_stretches
from .strides import Layout, layout_of
from .symbols import Symbols

logger = logging.getLogger("nnsight.fx")

#: Why a graph runs node by node, and the remedy.
_SHOWS_ALL = "the block holds tensors whose gradients no compiled graph can show. Hold only those whose gradients are read."
_FAILED = "the backend cannot lower it ({}). Another backend may, and `trace(..., compile=False)` runs the trace eagerly."

#: For how many combinations of sizes and numbers the lowering is looked up rather than found by its conditions.
_KEPT_BINDINGS = 1024

#: How many lowerings of one program are kept: one that a number is a constant of is worth little when the number has gone.
_KEPT_LOWERINGS = 64


class Variant:
    """A program spliced into a piece of a captured graph.

    Args:
        graph: The captured graph.
        piece: Where the piece begins.
        program: What is spliced in.
        stop: Number of the first node that is left out.
        alive: Numbers of the values that become real tensors.
        wanted: What else is needed: references, captured nodes, or constants.
        observed: Whether autograd has to see every tensor that becomes real: it is cut behind each of them.
        unseen: Whether the outputs of the captured graph are left out of ``wanted``, because nobody is going to see them.

    Attributes:
        spliced: The spliced graph.
        positions: Position of each alive value among the graph's results.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        piece: Piece,
        program: Program,
        stop: int,
        alive: Sequence[int],
        wanted: Sequence[Any],
        observed: bool = False,
        unseen: bool = False,
    ) -> None:
        self.unseen = unseen
        results: dict[Result, int] = {}
        for item in (*(Value(index) for index in alive), *wanted):
            if isinstance(item, (Value, torch.fx.Node)):
                results.setdefault(item, len(results))
        self._graph = graph
        self._observed = observed and torch.is_grad_enabled()
        self.spliced = splice(graph, piece, program, stop, list(results))
        counters.add("splices")
        self.positions = {index: results[Value(index)] for index in alive}
        self._plan = [
            (0, results[item])
            if isinstance(item, (Value, torch.fx.Node))
            else (1, item.index)
            if isinstance(item, Input)
            else (2, item.index)
            if isinstance(item, External)
            else (3, item)
            for item in wanted
        ]
        taken = self.spliced.inputs
        #: Takes the inputs of the spliced graph out of those of the captured one.
        self.take: Callable[[Sequence[Any]], Sequence[Any]] = (
            operator.itemgetter(*taken) if len(taken) > 1 else lambda inputs: [inputs[index] for index in taken]
        )
        #: Positions of the inputs that come from the piece before. What dynamo passes has the strides that its guards say.
        self._carried = [place for place, index in enumerate(taken) if index >= len(graph.placeholders)]
        self._lowerings: list[Lowered] = []
        # Positions on which the choice of a lowering depends, and the choice for each of their values.
        self._known: tuple[tuple[int, ...], dict[Any, Lowered]] = ((), {})
        self._fixed: frozenset[type] = frozenset()  # kinds of numbers that the backend takes as constants only
        self._copies = False  # whether values are copied before they are edited, for a backward pass
        self._writes_to_inputs = writes_to_inputs(self.spliced.graph_module.graph)
        found = list(edits_of_inputs(self.spliced.graph_module.graph)) if self._writes_to_inputs else []
        self._edits_inputs = bool(found)
        self._edited = sorted({position for _, positions, follows in found if follows for position in positions})
        #: Whether autograd forbids one of these edits, by which inputs are leaves.
        self._forbidden: dict[tuple[int, ...], bool] = {}
        #: What runs until the whole graph is lowered.
        self._first_stages: dict[Any, Lowered] = {}
        self._asked = False

    def may_hide_errors(self) -> bool:
        """Whether a call that may fail is there for nothing that is needed: a backend might leave it out, and its error with it."""
        graph = self.spliced.graph_module.graph
        needed: set[torch.fx.Node] = set()
        for node in reversed(graph.nodes):
            if node in needed or node.op == "output" or kind_of(node) is Kind.EFFECT:
                needed.update(node.all_input_nodes)
            elif may_fail(node):
                return True
        return False

    def placement(self, arguments: Sequence[Any]) -> Placement:
        """Return what matters of how ``arguments`` lie in memory."""
        sharing = sharing_of(arguments) if self._writes_to_inputs else ()
        layouts = tuple([_layout(arguments[position]) for position in self._carried]) if self._carried else ()
        return Placement(sharing, layouts)

    def find(self, binding: tuple[int | float, ...], placement: Placement) -> Lowered | None:
        """Return the final lowering for these sizes and numbers, if there is one.

        Args:
            binding: Sizes of the captured graph's symbols, then the program's numbers.
            placement: How the arguments lie in memory, see :meth:`placement`.
        """
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
        """Whether ``lowered``, which :meth:`lowered_for` has returned, is sure to be returned again for what it was returned for."""
        return not self._writes_to_inputs and lowered in self._lowerings

    def lowered_for(self, binding: tuple[int | float, ...], arguments: Sequence[Any]) -> tuple[Lowered, int]:
        """Return what runs for these sizes and numbers, and how many graphs were compiled for it now; see :meth:`lower`."""
        if self._edited and self._is_forbidden(binding, arguments):
            return self.unlowered(), 0
        placement = self.placement(arguments)
        found = self.find(binding, placement)
        if found is not None:
            return found, 0
        with stage("lower"):
            return self.lower(binding, arguments)

    def unlowered(self) -> Lowered:
        """Return the spliced graph as it is: its nodes run one by one."""
        return Lowered(self.spliced.graph_module.forward, (), (), 0)

    def lower(self, binding: tuple[int | float, ...], arguments: Sequence[Any]) -> tuple[Lowered, int]:
        """Return a lowering for these sizes and numbers, and how many graphs were compiled for it now.

        Args:
            binding: Sizes of the captured graph's symbols, then the program's numbers.
            arguments: What the graph is about to be called with.
        """
        placement = self.placement(arguments)
        with self._graph.lock:
            found = self.find(binding, placement)
            if found is not None:
                return found, 0
            first = self._first_stages.get((binding, placement))
            if first is not None:
                if not self._asked:
                    self._asked = True
                    self._lower_later(binding, arguments, placement)
                return first, 0
            made = self._between_borders(binding, arguments, placement) if self._observed else None
            if made is not None:
                self._keep(made, binding)
                return made, made.compiles
            made = self._in_regions(binding, arguments, placement)
            if self._graph.background and (made is None or made.regions > 1):
                made = made or Lowered(self.spliced.graph_module.forward, (), (), 0, placement, self._partial())
                self._first_stages[binding, placement] = made
            else:
                made = made or self._as_a_whole(binding, arguments, placement)
                self._keep(made, binding)
            return made, made.compiles

    def _is_forbidden(self, binding: tuple[int | float, ...], arguments: Sequence[Any]) -> bool:
        """Whether autograd forbids an edit that the graph makes, because it is one of a leaf.

        Backends that trace autograd ahead of time do not tell. Such a graph runs node by node, so that autograd speaks for itself.
        """
        if not torch.is_grad_enabled():
            return False
        leaves = tuple(position for position in self._edited if _is_of_leaf(arguments[position]))
        if not leaves:
            return False
        forbidden = self._forbidden.get(leaves)
        if forbidden is None:
            with self._graph.lock:
                forbidden = self._forbidden[leaves] = self._fails_on_fakes(binding, arguments)
        return forbidden

    def _fails_on_fakes(self, binding: tuple[int | float, ...], arguments: Sequence[Any]) -> bool:
        try:
            prepared = self._prepared(binding, arguments, self.placement(arguments))
            with prepared.symbols.mode:
                prepared.with_all_inputs(prepared.graph_module.forward)(*prepared.fakes)
        except RuntimeError as error:
            return "leaf Variable that requires grad" in str(error)
        except Exception as error:  # which has its own place to be raised at
            logger.debug("a graph cannot be run on fakes: %s", _summary(error))
        return False

    def _keep(self, lowered: Lowered, binding: tuple[int | float, ...]) -> None:
        self._lowerings = [*self._lowerings[-_KEPT_LOWERINGS:], lowered]
        restricted = {position for known in self._lowerings for position in known.restricted()}
        self._known = (tuple(sorted(restricted)), {})
        self._first_stages.pop((binding, lowered.placement), None)

    def _prepared(
        self, binding: tuple[int | float, ...], arguments: Sequence[Any], placement: Placement
    ) -> Prepared:
        symbols = [symbol for _, symbol in self._graph.symbols]
        graph_module = self._copy(binding, arguments, placement)
        if self._copies:
            copy_edited_values(graph_module)
        return prepare(graph_module, arguments, symbols, binding, self._fixed, placement, self._graph.each_size)

    def _copy(
        self, binding: tuple[int | float, ...], arguments: Sequence[Any], placement: Placement
    ) -> torch.fx.GraphModule:
        """Return a copy of the spliced graph, in which a backward pass does not compute from inputs that have been edited by then."""
        graph_module = self.spliced.copy()
        if not (self._edits_inputs and torch.is_grad_enabled() and any(map(_wants_grad, arguments))):
            return graph_module
        symbols = [symbol for _, symbol in self._graph.symbols]
        tried = self.spliced.copy()
        try:
            places = Plan(prepare(tried, arguments, symbols, binding, (), placement)).copies_for_backward()
        except Exception as error:  # the backend runs the graph on fakes, too, and has its own place to fail at
            logger.debug("a graph cannot be run on fakes: %s", _summary(error))
            return graph_module
        same = dict(zip(tried.graph.nodes, graph_module.graph.nodes, strict=True))
        return copy_for_backward(graph_module, [(same[node], same[source]) for node, source in places])

    def _partial(self, made: Lowered | None = None) -> frozenset[int]:
        """What lacks a part of its gradient if the graph is lowered as a whole; node by node if it is not lowered at all."""
        sharing = () if made is None or made.node_by_node else made.placement.sharing
        return partial_results(self.spliced.graph_module.graph, sharing=sharing)

    def _between_borders(
        self, binding: tuple[int | float, ...], arguments: Sequence[Any], placement: Placement
    ) -> Lowered | None:
        """Lower with a border behind each tensor that is handed out and used further on; return ``None`` if there is no such tensor.

        Where no border is possible, the nodes run one by one, so that autograd sees all of them.
        """
        fixed = self._fixed | {float}  # no border may separate a float from the tensor that it is taken of
        symbols = [symbol for _, symbol in self._graph.symbols]
        how = (arguments, symbols, binding, fixed, placement, self._graph.each_size)
        known = self._graph.regions or KnownRegions()
        made: Lowered | None = None
        cut: Prepared | None = None
        reason = _SHOWS_ALL
        try:
            tried = prepare(replace_unseen_edits(self._copy(binding, arguments, placement)), *how)
            if not mark_borders(tried.graph_module, placement.sharing, Plan(tried)):
                return None
            prepared = prepare(replace_unseen_edits(self._copy(binding, arguments, placement)), *how)  # on which nothing has run
            copy_stretches(tried.graph_module.graph, prepared.graph_module.graph)
            cut = prepared
        except Exception as error:
            logger.info("a graph cannot be cut for gradients: %s", _summary(error))
        try:
            made = None if cut is None else lower_in_regions(cut, arguments, binding, self._graph.backend, known)
        except Exception as error:
            if self._lowers_each_size(error):
                return self._between_borders(binding, arguments, placement)
            self._graph.each_size = False
            logger.info("regions between borders cannot be lowered: %s", _summary(error))
            reason = _FAILED.format(_summary(error))
        if made is not None and not made.partial & set(self.positions.values()):
            return replace(made, placement=placement)
        logger.info("a graph runs node by node, because no lowering shows autograd the tensors whose gradients may be asked for")
        every = Symbols(symbols, binding).symbols
        return Lowered(self.spliced.graph_module.forward, (), every, 0, placement, node_by_node=True, uncompiled=reason)

    def _in_regions(
        self, binding: tuple[int | float, ...], arguments: Sequence[Any], placement: Placement
    ) -> Lowered | None:
        known = self._graph.regions
        if known is None or placement.sharing:
            return None
        try:
            prepared = self._prepared(binding, arguments, placement)
            made = lower_in_regions(prepared, arguments, binding, self._graph.backend, known)
            return made and replace(made, placement=placement)
        except Exception as error:
            if self._needs_copies(error):
                return self._in_regions(binding, arguments, placement)
            logger.warning("lowering a region failed, so the graph is lowered as a whole: %s", _summary(error))
            return None

    def _lowers_each_size(self, error: Exception) -> bool:
        """Whether a lowering for all sizes failed, and one for those of now may not: Inductor has no scan over a symbolic size, say."""
        if self._graph.each_size or not self._graph.symbols:
            return False
        logger.warning("The backend cannot lower a graph for all sizes, so it is asked for each size by itself: %s", _summary(error))
        self._graph.each_size = True
        return True

    def _needs_copies(self, error: Exception) -> bool:
        """Whether a lowering failed because a value is edited that the backward pass needs as it was, and copies may mend that."""
        if self._copies or "modified by an inplace operation" not in str(error):
            return False
        logger.debug("edited values are copied: %s", _summary(error))
        self._copies = True
        return True

    def _as_a_whole(
        self, binding: tuple[int | float, ...], arguments: Sequence[Any], placement: Placement
    ) -> Lowered:
        """Lower for all numbers of the program or, where the backend cannot, with those of now as constants."""
        kinds = frozenset(type(number) for number in binding[len(self._graph.symbols) :])
        while True:
            try:
                made = lower_prepared(self._prepared(binding, arguments, placement), self._graph.backend)
                return replace(made, partial=self._partial(made))
            except Exception as error:
                if self._needs_copies(error):
                    continue
                if kinds <= self._fixed:
                    if self._lowers_each_size(error):
                        return self._in_regions(binding, arguments, placement) or self._as_a_whole(binding, arguments, placement)
                    self._graph.each_size = False  # what is not lowered runs with all sizes
                    # A backend's own failure must not change what a trace computes.
                    logger.info("lowering failed, so this graph runs node by node: %s", _summary(error))
                    made = lower_prepared(self._prepared(binding, arguments, placement), run_as_is)
                    return replace(made, partial=self._partial(made), uncompiled=_FAILED.format(_summary(error)))
                self._fixed |= {float} if float in kinds - self._fixed else kinds
                logger.debug("numbers become constants: %s", _summary(error))

    def _lower_later(
        self, binding: tuple[int | float, ...], arguments: Sequence[Any], placement: Placement
    ) -> None:
        """Have the whole graph lowered in the background. The job holds fakes only, and gives up when the variant is gone."""
        try:
            prepared = self._prepared(binding, arguments, placement)
        except Exception as error:
            self._take_over(binding, placement, error)
            return
        wanted, backend = weakref.ref(self), self._graph.backend
        background.submit(lambda: _lower_in_background(wanted, prepared, backend, binding))

    def _take_over(
        self, binding: tuple[int | float, ...], placement: Placement, result: Lowered | Exception
    ) -> None:
        """Use the whole graph from now on, or keep to the first stage if that failed."""
        with self._graph.lock:
            self._asked = False
            if isinstance(result, Lowered):
                self._keep(replace(result, partial=self._partial(result)), binding)
                return
            if self._lowers_each_size(result):
                return  # the next call asks again
            logger.warning("lowering in the background failed, so this graph stays as it is: %s", _summary(result))
            first = self._first_stages[binding, placement]
            reason = "" if first.compiles else _FAILED.format(_summary(result))
            self._keep(replace(first, uncompiled=reason), binding)

    def deliver(self, computed: Sequence[Any], inputs: Sequence[Any], externals: Sequence[Any]) -> list[Any]:
        """Return the value of each wanted item."""
        sources = (computed, inputs, externals)
        return [item if source == 3 else sources[source][item] for source, item in self._plan]


def _layout(value: Any) -> Layout | tuple[Any, ...] | None:
    """What a lowering has to know of the strides of an input that another piece has computed."""
    if not isinstance(value, torch.Tensor):
        return None
    found = layout_of(value)
    return (tuple(value.shape), value.stride()) if found is None else found


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_of_leaf(value: Any) -> bool:
    """Whether a tensor is a leaf for autograd that requires a gradient, or a view of one."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    base = value._base if value._is_view() else value
    return base is not None and base.is_leaf


def _lower_in_background(
    wanted: weakref.ref[Variant], prepared: Prepared, backend: BackendCallable, binding: tuple[int | float, ...]
) -> None:
    if wanted() is None:
        return
    try:
        result: Lowered | Exception = lower_prepared(prepared, backend)
    except Exception as error:
        result = error
    variant = wanted()
    if variant is not None:
        variant._take_over(binding, prepared.placement, result)


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().split(chr(10), 1)[0]}"
