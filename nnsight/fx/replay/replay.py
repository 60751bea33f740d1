"""Replay: the effects of a block that is determined by what it reads, without running the block.

For most blocks the greenlet, the walk over the taps and the look-up for each operation can be left out. When

* the block's Python does nothing but compute (:mod:`nnsight.fx.replay.determinate` proves it from the syntax tree),
* what it reads from outside is as it was: the same objects, equal numbers, tensors of the same metadata that share memory
  with each other and with the model's inputs in the same way, and the same settings of torch that calls depend on,
* and dynamo calls the same captured graph with the same sizes,

then it asks the same locations, makes the same calls and ends in the same program. So the variant found then is called with the externals
of now. The calls that the block made on tensors from outside, which are not part of the program, were written down by a
:class:`~nnsight.fx.recording.journal.Journal`, and are made again, in their order. What the block saved is put together from the results.

If a condition does not hold, the block runs, before anything else has happened, and its run is written down anew.
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
from ..recording.journal import EarlyCalls, Journal, journal_of_run
from .determinate import guards_of
from .guards import GuardPath, GuardPlan, Read
from .names import Undetermined
from .playback import Effects, NotAsBefore, Playback, effects_of

if TYPE_CHECKING:
    from ...runtime.modules.tree import ModuleTree
    from ...tracing import Block
    from ..driver import CompiledDriver

logger = logging.getLogger("nnsight.fx")

#: Most environments of one block that are remembered.
_KEPT = 64

#: Runs of one block that may be written down without a replay in between; then its environment is never the same twice.
_PATIENCE = 32


class _Known(GuardPlan):
    """The guards of a block, with its effects by what the guards are."""

    def __init__(self, guards: tuple[tuple[GuardPath, str], ...]) -> None:
        super().__init__(guards)
        self.environments: dict[Any, tuple[list[Callable[[], Any]], dict[Any, Effects]]] = {}


class _Memory:
    """What is known about one block.

    Attributes:
        reading: What it reads from outside; with other constants it may take other ways, and read others.
        must_run: Whether it is not looked at any more.
    """

    def __init__(self) -> None:
        self.reading: _Known | None = None
        self.must_run = False
        self.futile = 0

    def note_futile(self) -> None:
        """Count a run that was not replayed; after many in a row the block is not looked at any more."""
        self.futile += 1
        if self.futile > _PATIENCE:
            self.must_run, self.reading = True, None

    def found(self, settings: tuple[Any, ...], variable: Callable[[str], Any]) -> tuple[_Known, Any, Read] | None:
        """Return what is known for the environment of now: the reading, what the guards are, and the objects among them."""
        reading = self.reading
        read = None if reading is None else reading.read(variable)
        if reading is None or read is None:
            return None
        key = (*settings, *read.key)
        return (reading, key, read) if key in reading.environments else None

    def reading_of(self, guards: tuple[tuple[GuardPath, str], ...]) -> _Known:
        """Return what is known of the block where it reads ``guards``."""
        known = self.reading
        if known is None or known.guards != guards:
            known = self.reading = _Known(guards)
        return known


class Replays:
    """The blocks that one compiled model can replay."""

    def __init__(self) -> None:
        self._memories: weakref.WeakKeyDictionary[Block, _Memory] = weakref.WeakKeyDictionary()

    def prepare(
        self, block: Block, scope: Scope, module_globals: dict[str, Any], tracer: Any, modules: ModuleTree
    ) -> Attempt | None:
        """Return an attempt for a block that is about to run with these variables and globals; ``None`` if it must run unobserved."""
        memory = self._memories.get(block)
        if memory is None:
            memory = self._memories[block] = _Memory()
        state = replay_state()
        if memory.must_run or sys.gettrace() is not None or state is None:
            return None  # a debugger wants to see the block, or a mode its calls

        def variable(name: str) -> Any:
            cell = scope.cells.get(name)
            if cell is not None and is_bound(cell):
                return cell.cell_contents
            if name in module_globals:
                return module_globals[name]
            builtins = module_globals["__builtins__"]
            return (builtins if isinstance(builtins, dict) else builtins.__dict__)[name]

        settings = modules.version, *state
        found = memory.found(settings, variable)
        if found is None:  # the proof is about the objects of now, another function may do anything
            try:
                guards = guards_of(block, tracer, modules, variable)
            except Undetermined as reason:
                logger.debug("%s:%d: the block runs: %s", block.filename, block.line, reason)
                memory.note_futile()
                return None
            reading = memory.reading_of(guards)
            read = reading.read(variable)
            if read is None:
                return None
            found = reading, (*settings, *read.key), read
        return Attempt(memory, block, *found)


class Attempt:
    """A block that is about to run, or to be replayed.

    Attributes:
        tensors: The tensors among what the block reads.
        filled: The lists that it appends to.
    """

    def __init__(self, memory: _Memory, block: Block, reading: _Known, key: tuple[Any, ...], read: Read) -> None:
        self._memory, self._block, self._reading = memory, block, reading
        self._key, self._objects = key, read.objects
        self.tensors, self.filled = read.tensors, read.filled

    def _known(self) -> dict[Any, Effects] | None:
        """Return what is remembered of the block in this environment: effects, by what else they depend on."""
        objects, known = self._reading.environments.get(self._key, ((), None))
        return None if any(reference() is None for reference in objects) else known

    def replay(
        self, driver: CompiledDriver, arguments: tuple[tuple[Any, ...], dict[str, Any]], report: Report
    ) -> Playback | None:
        """Call the model with the effects of the block if they are known; return ``None`` if nothing was done."""
        known = self._known()
        if known is None:
            return None
        playback = Playback(known, self.tensors, self.filled, report)
        outer = active_run.set(playback)  # type: ignore[arg-type]
        try:
            driver.call_known(*arguments)
        except NotAsBefore:
            return None
        finally:
            active_run.reset(outer)
        assert playback.found is not None, "a model whose whole call is a graph has called it"
        self._memory.futile = 0
        counters.add("replays")
        return playback

    @contextlib.contextmanager
    def written_down(self, function: Callable[[], None]) -> Iterator[tuple[Journal, Callable[[], None]]]:
        """Write down the run that is made in this context; yields the journal, and what is to run as ``function``."""
        journal = Journal(self.filled)
        token = journal_of_run.set(journal)
        try:
            yield journal, functools.partial(EarlyCalls(journal).run, function)
        finally:
            journal_of_run.reset(token)
            journal.close()

    def learn(self, journal: Journal, scope: Scope, spliced: Sequence[str]) -> None:
        """Remember what the run did, if it can be replayed."""
        self._memory.note_futile()
        if self._memory.must_run:
            return
        try:
            marked = saves.get() or {}
            kept = [(name, value) for name, value in scope.items() if name in self._block.stored and id(value) in marked]
            graph, binding, effects = effects_of(journal, kept, self.tensors, spliced)
        except Undetermined as reason:
            logger.debug("%s:%d: this run cannot be replayed: %s", self._block.filename, self._block.line, reason)
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
