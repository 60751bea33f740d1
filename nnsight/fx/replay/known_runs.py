"""Replays runs of a program on a compiled model.

A program contains no Python. So on one captured graph, with tensors of the same metadata, it always has the same effects. A journal is kept
of the first run, and later runs call the variant of that run with the present tensors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...runtime.interleaver import active_run
from ...runtime.report import Report
from ...runtime.switching.mode_stacks import unseen
from ...runtime.switching.modes import replay_state
from ..counters import counters
from ..recording.journal import EarlyCalls, Journal, kept_journal
from ..show import debug
from ..show.stages import note_position
from ..splicing.pieces import as_argument
from .names import Undetermined
from .playback import Effects, GuardFailed, Playback, effects_of, sharing_of

if TYPE_CHECKING:
    from ..capturing.graph import CapturedGraph
    from ..driver import CompiledDriver

logger = logging.getLogger("nnsight.fx")

#: Most combinations of metadata for which the effects of a program are kept.
_KEPT = 64


#: The report of a replay before it calls the graph.
_NO_REPORT = Report()


class _Plan(NamedTuple):
    """A call of a lowered graph that needs no checks before it."""

    effects: Effects
    function: Callable[[list[Any]], Any]
    numbers: tuple[Any, ...]
    alive: tuple[tuple[int, int], ...]  # number of each saved value, and its position among the results
    report: Report  # shared by all such calls


class _FastPlayback(Playback):
    """A replay that calls the lowered graph directly, if an earlier replay has shown that no checks are needed."""

    def __init__(self, known: _KnownEffects, tensors: list[torch.Tensor]) -> None:
        super().__init__(known.effects, tensors, [], _NO_REPORT)
        self._plans = known.plans

    def dispatch(self, graph: CapturedGraph, inputs: tuple[Any, ...]) -> list[Any]:
        """Run the variant for this graph; return the graph's outputs."""
        key = graph, graph.binding(inputs) if graph.symbols else ()
        plan = self._plans.get(key)
        if plan is None or debug.is_open() or torch.autograd.profiler._is_profiler_enabled:
            self.report = Report()
            outputs = super().dispatch(graph, inputs)
            assert self.found is not None
            made = None if plan is not None else self._plan_of(self.found, inputs)
            if made is not None:
                self._plans[key] = made
            return outputs
        effects = self.found = plan.effects
        variant = effects.variant
        slots = self._slots = list(self._tensors)
        effects.python.run_steps(slots)
        externals = [slots[source] for source in effects.externals]
        self.report = plan.report
        grad = torch.is_grad_enabled()
        try:
            with unseen(graph.has_subclasses):
                computed = plan.function([*variant.take(inputs), *externals, *plan.numbers])
        except BaseException as error:
            torch.set_grad_enabled(grad)
            if isinstance(error, Exception):
                note_position(error, variant.spliced)
            raise
        self._values = {index: computed[position] for index, position in plan.alive}
        return graph.stand_ins(key[1]) if variant.unseen else variant.deliver(computed, inputs, externals)

    def _plan_of(self, effects: Effects, inputs: tuple[Any, ...]) -> _Plan | None:
        """Return a plan for repeating this call; ``None`` if the call depends on more than the metadata of tensors."""
        variant, ran = effects.variant, effects.ran
        if ran is None or not variant.still_runs(ran.lowered) or ran.lowered.partial or ran.lowered.uncompiled:
            return None
        call, together = ran.lowered.direct.call, sharing_of(self._tensors, inputs, False)
        results = [self._values[index] for index in effects.alive]
        theirs = {*map(id, inputs), *map(id, self._tensors)}
        distinct = len({*map(id, self._tensors)}) == len(self._tensors) and all(place < 0 for place in together[: len(self._tensors)])
        own = all(type(source) is int for source in effects.externals)
        shown = any(id(result) in theirs or (result._is_view() and id(result._base) in theirs) for result in results)
        if call is None or variant.edits_inputs or not distinct or not own or shown:
            return None
        alive = tuple((index, variant.positions[index]) for index in effects.alive)
        report = Report(mode="compiled", graphs=1, replayed=True, spliced=list(effects.spliced), pieces=[ran])
        return _Plan(effects, call, tuple(map(as_argument, effects.numbers)), alive, report)


class _KnownEffects:
    """The effects on each captured graph, for tensors of one combination of metadata, with plans for repeating them."""

    def __init__(self) -> None:
        self.effects: dict[Any, Effects] = {}
        self.plans: dict[Any, _Plan] = {}


class KnownRuns:
    """The effects of one program on one model, by the metadata of its tensors."""

    def __init__(self) -> None:
        self._known: dict[Any, _KnownEffects] = {}

    def replay(
        self, driver: CompiledDriver, tensors: list[torch.Tensor], arguments: tuple[Any, dict[str, Any]]
    ) -> tuple[Any, dict[str, Any], Report] | None:
        """Replay the program on the model; return its output, the saved values and a report, or ``None`` without known effects."""
        state = replay_state()
        known = None if state is None else self._known.get((driver.tree.version, state, *_metadata(tensors)))
        if known is None:
            return None
        playback = _FastPlayback(known, tensors)
        outer = active_run.set(playback)  # type: ignore[arg-type]
        try:
            output = driver.call_known(*arguments)
        except GuardFailed:
            return None
        finally:
            active_run.reset(outer)
        counters.add("replays")
        return output, playback.saved(), playback.report

    def keeping_journal(self) -> contextlib.AbstractContextManager[Journal]:
        """Keep a journal of the run in this context. Its blocks must be wrapped by :func:`with_early_calls`."""
        return kept_journal()

    def learn(
        self, driver: CompiledDriver, journal: Journal, kept: dict[str, Any], tensors: list[torch.Tensor], report: Report
    ) -> None:
        """Keep the effects of the run, if it can be replayed."""
        try:
            graph, binding, effects = effects_of(journal, list(kept.items()), tensors, report.spliced)
        except Undetermined as reason:
            logger.debug("a program is interpreted in each call, because %s", reason)
            return
        if len(self._known) >= _KEPT:
            self._known.clear()
        known = self._known.setdefault((driver.tree.version, replay_state(), *_metadata(tensors)), _KnownEffects())
        known.effects[graph, binding] = effects
        known.plans.pop((graph, binding), None)


def with_early_calls(journal: Journal, function: Callable[[], None]) -> Callable[[], None]:
    """Return ``function``, the function of a block, such that the journal notes the calls before its first request."""
    return functools.partial(EarlyCalls(journal).run, function)


def _metadata(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the metadata on which the effects of a program depend, besides the captured graph."""
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors)
