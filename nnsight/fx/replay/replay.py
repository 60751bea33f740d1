"""Replay: repeats the effects of a block without running its Python.

Most blocks do not need the greenlet, the walk over the taps and the look-up for each operation in every run. If

* the Python of the block only computes (:mod:`nnsight.fx.replay.determinate` proves it from the syntax tree),
* its guards hold: the same objects, equal numbers, tensors with the same metadata that share memory with each other and with the
  inputs of the model in the same way, and the same settings of torch,
* and dynamo calls the same captured graph with the same sizes,

then the block reads the same locations, makes the same calls and ends in the same program. So a replay calls the variant of that program
with the present externals. The calls on tensors from outside are not part of the program. A
:class:`~nnsight.fx.recording.journal.Journal` of the recorded run contains them, and the replay repeats them in order. It builds the saved
values from the results.

If a condition fails, the replay ends before it has had any effect. Then the block runs, and a new journal is kept.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...runtime.interleaver import active_run
from ...runtime.report import Report
from ...runtime.switching.modes import replay_state
from ...tracing import Scope
from ...tracing.block import is_bound
from ...tracing.saving import saves
from ..counters import counters
from ..recording.journal import EarlyCalls, Journal, kept_journal
from .determinate import guards_of
from .guards import GuardPath, GuardPlan, GuardValues
from .names import Undetermined
from .playback import Effects, GuardFailed, Playback, effects_of

if TYPE_CHECKING:
    from ...runtime.modules.tree import ModuleTree
    from ...tracing import Block
    from ..driver import CompiledDriver

logger = logging.getLogger("nnsight.fx")

#: Most environments, sets of values of the guards, for which the effects of one block are kept.
_KEPT = 64

#: After more runs of one block without a replay in between, its guards probably never hold, and no more journals are kept.
_PATIENCE = 32


class _GuardedEffects(GuardPlan):
    """The guards of a block, with its effects for each environment."""

    def __init__(self, guards: tuple[tuple[GuardPath, str], ...]) -> None:
        super().__init__(guards)
        self.environments: dict[Any, tuple[list[Callable[[], Any]], dict[Any, Effects]]] = {}


class _BlockState:
    """The known effects of one block.

    Attributes:
        reading: Its guards, with effects. With other constants, a block may take another path and have other guards.
        must_run: Whether replays of the block have been given up.
        futile: Number of runs since the last replay.
    """

    def __init__(self) -> None:
        self.reading: _GuardedEffects | None = None
        self.must_run = False
        self.futile = 0

    def note_futile(self) -> None:
        """Count a run that was not replayed. After many in a row, give up replays of the block."""
        self.futile += 1
        if self.futile > _PATIENCE:
            self.must_run, self.reading = True, None

    def found(self, settings: tuple[Any, ...], variable: Callable[[str], Any]) -> tuple[_GuardedEffects, Any, GuardValues] | None:
        """Return the guards, the key of the present environment and the values of the guards, if effects are known for it."""
        reading = self.reading
        read = None if reading is None else reading.read(variable)
        if reading is None or read is None:
            return None
        key = (*settings, *read.key)
        return (reading, key, read) if key in reading.environments else None

    def reading_of(self, guards: tuple[tuple[GuardPath, str], ...]) -> _GuardedEffects:
        """Return the effects for ``guards``; they replace the effects for other guards."""
        known = self.reading
        if known is None or known.guards != guards:
            known = self.reading = _GuardedEffects(guards)
        return known


class Replays:
    """The blocks that one compiled model can replay."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[Block, _BlockState] = weakref.WeakKeyDictionary()

    def prepare(
        self, block: Block, scope: Scope, module_globals: dict[str, Any], tracer: Any, modules: ModuleTree
    ) -> Attempt | None:
        """Return an attempt for a block that is about to run with these variables and globals; ``None`` if it cannot be replayed."""
        state = self._states.get(block)
        if state is None:
            state = self._states[block] = _BlockState()
        torch_state = replay_state()
        if state.must_run or sys.gettrace() is not None or torch_state is None:
            return None  # a debugger follows the block, or a torch mode sees its calls

        def variable(name: str) -> Any:
            cell = scope.cells.get(name)
            if cell is not None and is_bound(cell):
                return cell.cell_contents
            if name in module_globals:
                return module_globals[name]
            builtins = module_globals["__builtins__"]
            return (builtins if isinstance(builtins, dict) else builtins.__dict__)[name]

        settings = modules.version, *torch_state
        found = state.found(settings, variable)
        if found is None:  # the proof depends on the objects, such as the functions that the block calls
            try:
                guards = guards_of(block, tracer, modules, variable)
            except Undetermined as reason:
                logger.debug("%s:%d: the block cannot be replayed, because %s", block.filename, block.line, reason)
                state.note_futile()
                return None
            reading = state.reading_of(guards)
            read = reading.read(variable)
            if read is None:
                return None
            found = reading, (*settings, *read.key), read
        return Attempt(state, block, *found)


class Attempt:
    """A block that is about to be replayed or, if no effects are known, to run with a journal.

    Attributes:
        tensors: The tensors among its guards.
        filled: The lists from outside to which it appends.
    """

    def __init__(self, state: _BlockState, block: Block, reading: _GuardedEffects, key: tuple[Any, ...], read: GuardValues) -> None:
        self._state, self._block, self._reading = state, block, reading
        self._key, self._objects = key, read.objects
        self.tensors, self.filled = read.tensors, read.filled

    def _known(self) -> dict[Any, Effects] | None:
        """Return the effects of the block in this environment, by graph and sizes; ``None`` if there are none."""
        objects, known = self._reading.environments.get(self._key, ((), None))
        return None if any(reference() is None for reference in objects) else known

    def replay(
        self, driver: CompiledDriver, arguments: tuple[tuple[Any, ...], dict[str, Any]], report: Report
    ) -> Playback | None:
        """Call the model with the effects of the block, if they are known. If the result is ``None``, there was no effect."""
        known = self._known()
        if known is None:
            return None
        playback = Playback(known, self.tensors, self.filled, report)
        outer = active_run.set(playback)  # type: ignore[arg-type]
        try:
            driver.call_known(*arguments)
        except GuardFailed:
            return None
        finally:
            active_run.reset(outer)
        assert playback.found is not None, "a model whose whole call is a graph has called it"
        self._state.futile = 0
        counters.add("replays")
        return playback

    @contextlib.contextmanager
    def keeping_journal(self, function: Callable[[], None]) -> Iterator[tuple[Journal, Callable[[], None]]]:
        """Keep a journal of the run in this context. Yields the journal, and the function to run in place of ``function``."""
        with kept_journal(self.filled) as journal:
            yield journal, functools.partial(EarlyCalls(journal).run, function)

    def learn(self, journal: Journal, scope: Scope, spliced: Sequence[str]) -> None:
        """Keep the effects of the run, if it can be replayed."""
        self._state.note_futile()
        if self._state.must_run:
            return
        try:
            marked = saves.get() or {}
            kept = [(name, value) for name, value in scope.items() if name in self._block.stored and id(value) in marked]
            graph, binding, effects = effects_of(journal, kept, self.tensors, spliced)
        except Undetermined as reason:
            logger.debug("%s:%d: the run cannot be replayed, because %s", self._block.filename, self._block.line, reason)
            return
        environments, known = self._reading.environments, self._known()
        if known is None:
            known = {}
            _drop_oldest(environments)
            environments[self._key] = [_reference(item) for item in self._objects], known
        _drop_oldest(known)
        known[graph, binding] = effects


def _drop_oldest(table: dict[Any, Any]) -> None:
    if len(table) >= _KEPT:
        table.pop(next(iter(table)))


def _reference(item: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(item)
    except TypeError:  # a built-in function
        return lambda: item
