"""Replay: a block that is determined by what it reads is not run again, only its effects are had again.

A block that is traced for the thousandth time does what it did before, and yet all of it runs: a greenlet, a walk over the
taps, a look-up for each operation. For most blocks that can be left out. When

* the block's Python does nothing but compute (:mod:`nnsight.fx.replay.determinate` proves it from the syntax tree),
* what it reads from outside is as it was: the same objects, equal numbers, tensors of the same metadata that share memory
  with each other and with the model's inputs in the same way, and the same settings of torch that calls depend on,
* and dynamo calls the same captured graph with the same sizes,

then it asks the same locations, makes the same calls and ends in the same program. So the variant found then is called with the externals
of now. The calls that the block made on tensors from outside, which are not part of the program, were written down by a
:class:`~nnsight.fx.recording.journal.Journal`, and are made again, in their order. What the block saved is put together from the results.

If one of the conditions does not hold, the block runs as always, before anything else has happened, and its run is written down
anew. A replay is therefore never guessed: whatever no rule covers runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...runtime.interleaver import active_run
from ...runtime.report import Report
from ...tracing import Scope
from ...tracing.block import is_bound
from ..counters import counters
from ..recording.journal import Journal, Listening, journal_of_run
from .abstract_values import Undetermined
from .determinate import roots_of
from .guard_checks import GuardPlan, Read
from .guards import Root
from .playback import Effects, NotAsBefore, Playback, effects_of

if TYPE_CHECKING:
    from ...runtime.probing import Modules
    from ...tracing import Block
    from ..driver import CompiledDriver

logger = logging.getLogger("nnsight.fx")

#: Most environments of one block that are remembered.
_KEPT = 64

#: Most sets of roots of one block that are remembered.
_READINGS = 4

#: Runs of one block that may be written down without a replay in between; then its environment is never the same twice.
_PATIENCE = 32


class _Known:
    """What is known about one block, if it reads these roots.

    Attributes:
        roots: What it reads from outside, with the kind of comparison.
        plan: How they are read.
        environments: Its effects, by what the roots are.
    """

    def __init__(self, roots: tuple[tuple[Root, str], ...]) -> None:
        self.roots = roots
        self.plan = GuardPlan(roots)
        self.environments: dict[Any, tuple[list[Callable[[], Any]], dict[Any, Effects]]] = {}


class _Memory:
    """What is known about one block.

    Attributes:
        readings: What it reads from outside, the latest first: with other constants it may take other ways, and read others.
        must_run: Whether it is not looked at any more.
    """

    def __init__(self) -> None:
        self.readings: list[_Known] = []
        self.must_run = False
        self.futile = 0

    def note_futile(self) -> None:
        """Count a run that was not replayed; after many in a row the block is not looked at any more."""
        self.futile += 1
        if self.futile > _PATIENCE:
            self.must_run = True
            self.readings = []

    def found(self, settings: tuple[Any, ...], variable: Callable[[str], Any]) -> tuple[_Known, Any, Read] | None:
        """Return what is known for the environment of now: the reading, what the roots are, and the objects among them."""
        for place, reading in enumerate(self.readings):
            read = reading.plan.read(variable)
            key = None if read is None else (*settings, *read.key)
            if read is not None and key in reading.environments:
                if place:  # a new list: other threads may be going over this one
                    self.readings = [reading, *(other for other in self.readings if other is not reading)]
                return reading, key, read
        return None

    def reading_of(self, roots: tuple[tuple[Root, str], ...]) -> _Known:
        """Return what is known of the block where it reads ``roots``."""
        known = next((reading for reading in self.readings if reading.roots == roots), None)
        if known is None:
            known = _Known(roots)
            self.readings = [known, *self.readings][:_READINGS]
        return known


class Replays:
    """The blocks that one compiled model can replay.

    Attributes:
        reasons: Why blocks are not replayed, for those that are not, by file and line.
    """

    def __init__(self) -> None:
        self._memories: weakref.WeakKeyDictionary[Block, _Memory] = weakref.WeakKeyDictionary()
        self.reasons: dict[tuple[str, int], str] = {}

    def prepare(
        self, block: Block, scope: Scope, module_globals: dict[str, Any], tracer: Any, modules: Modules
    ) -> Attempt | None:
        """Return what can be tried for a block that is about to run; ``None`` if it must run unobserved.

        Args:
            block: The block.
            scope: Its variables.
            module_globals: The globals it sees.
            tracer: What ``as`` binds.
            modules: Of the model.
        """
        memory = self._memories.get(block)
        if memory is None:
            memory = self._memories[block] = _Memory()
        if memory.must_run or sys.gettrace() is not None or torch._C._len_torch_function_stack():
            return None  # a debugger wants to see the block, or a mode its calls

        def variable(name: str) -> Any:
            cell = scope.cells.get(name)
            if cell is not None and is_bound(cell):
                return cell.cell_contents
            if name in module_globals:
                return module_globals[name]
            builtins = module_globals["__builtins__"]
            return (builtins if isinstance(builtins, dict) else builtins.__dict__)[name]

        settings = modules.version, *_settings()
        found = memory.found(settings, variable)
        if found is None:  # the proof is about the objects of now, another function may do anything
            try:
                roots = roots_of(block, tracer, modules, variable)
            except Undetermined as reason:
                self.reasons[block.filename, block.line] = str(reason)
                logger.debug("%s:%d: the block runs: %s", block.filename, block.line, reason)
                memory.note_futile()
                return None
            reading = memory.reading_of(roots)
            read = reading.plan.read(variable)
            if read is None:
                return None
            found = reading, (*settings, *read.key), read
        return Attempt(self, memory, block, *found)


class Attempt:
    """A block that is about to run, or to be replayed.

    Args:
        replays: What it belongs to.
        memory: What is known about the block.
        block: The block.
        reading: What is known about it if it reads what it reads now.
        key: What the roots and the settings are.
        read: The objects among the roots.
    """

    def __init__(
        self,
        replays: Replays,
        memory: _Memory,
        block: Block,
        reading: _Known,
        key: tuple[Any, ...],
        read: Read,
    ) -> None:
        self._replays, self._memory, self._block, self._reading = replays, memory, block, reading
        self._key, self._read = key, read

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among what the block reads."""
        return self._read.tensors

    @property
    def filled(self) -> list[list[Any]]:
        """The lists that it appends to."""
        return self._read.filled

    def known(self) -> dict[Any, Any] | None:
        """Return what is remembered of the block in this environment: effects, by what else they depend on."""
        known = self._reading.environments.get(self._key)
        if known is None or None in [reference() for reference in known[0]]:
            return None
        return known[1]

    def remember(self, under: Any, effects: Any) -> None:
        """Remember effects of the block in this environment."""
        environments = self._reading.environments
        known = environments.get(self._key)
        if known is None or any(reference() is None for reference in known[0]):
            while len(environments) >= _KEPT:
                environments.pop(next(iter(environments)))
            known = environments[self._key] = ([_reference(item) for item in self._read.objects], {})
        if len(known[1]) >= _KEPT:
            known[1].pop(next(iter(known[1])))
        known[1][under] = effects

    def note_use(self) -> None:
        """Note that what is remembered was of use."""
        self._memory.futile = 0

    def note_run(self) -> bool:
        """Count a run of the block; whether it is worth writing it down."""
        self._memory.note_futile()
        return not self._memory.must_run

    def refuse(self, reason: Undetermined) -> None:
        """Note why this run cannot be replayed."""
        self._replays.reasons[self._block.filename, self._block.line] = str(reason)
        logger.debug("%s:%d: this run cannot be replayed: %s", self._block.filename, self._block.line, reason)

    def replay(
        self, driver: CompiledDriver, arguments: tuple[tuple[Any, ...], dict[str, Any]], report: Report
    ) -> Playback | None:
        """Call the model with the effects of the block if they are known; return ``None`` if nothing was done.

        Args:
            driver: Calls the compiled model.
            arguments: Of the model.
            report: Of the trace.
        """
        known = self.known()
        if known is None:
            return None
        playback = Playback(known, self._read.tensors, self._read.filled, report)
        outer = active_run.set(playback)  # type: ignore[arg-type]
        try:
            driver.call_known(*arguments)
        except NotAsBefore:
            return None
        finally:
            active_run.reset(outer)
        assert playback.found is not None, "a model whose whole call is a graph has called it"
        self.note_use()
        counters.add("replays")
        return playback

    @contextlib.contextmanager
    def written_down(self, function: Callable[[], None]) -> Iterator[tuple[Journal, Callable[[], None]]]:
        """Write down the run that is made in this context; yields the journal, and what is to run as ``function``."""
        journal = Journal(self._read.filled)
        token = journal_of_run.set(journal)
        try:
            yield journal, functools.partial(Listening(journal).run, function)
        finally:
            journal_of_run.reset(token)
            journal.close()

    def learn(self, journal: Journal, scope: Scope, spliced: Sequence[str]) -> None:
        """Remember what the run did, if it can be replayed."""
        if not self.note_run():
            return
        try:
            graph, binding, effects = effects_of(journal, self._block, scope, self._read.tensors, spliced)
        except Undetermined as reason:
            self.refuse(reason)
            return
        self.remember((graph, binding), effects)


def _reference(item: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(item)
    except TypeError:  # a built-in function
        return lambda: item


def _settings() -> tuple[Any, ...]:
    """What calls of torch depend on besides their arguments."""
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()
