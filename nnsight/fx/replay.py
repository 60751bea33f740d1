"""Replay: a block that is determined by what it reads is not run again, only its effects are had again.

A block that is traced for the thousandth time does what it did before, and yet all of it runs: a greenlet, a walk over the
taps, a look-up for each operation. For most blocks that can be left out. When

* the block's Python does nothing but compute (:mod:`nnsight.fx.determinate` proves it from the syntax tree),
* what it reads from outside is as it was: the same objects, equal numbers, tensors of the same metadata that share memory
  with each other and with the model's inputs in the same way, and the same settings of torch that calls depend on,
* and dynamo calls the same captured graph with the same sizes,

then it asks the same locations, makes the same calls and ends in the same program. So the variant found then is called
with the externals of now. The calls that the block made on tensors from outside, which are not part of the program, were
written down by a :class:`Journal`, and are made again, in their order. What the block saved is put together from
the results.

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
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..runtime.interleaver import active_interleaver, active_run
from ..runtime.report import Report
from ..tracing import Scope
from ..tracing.block import is_bound
from ..tracing.saving import saves
from .counters import counters
from .determinate import Root, Undetermined, kind_of, look_up, roots_of
from .explaining import RanPiece
from .functions import ABOUT_GRADIENTS, DRAWN_LIKE, METADATA, edits_in_place
from .program import Call, State
from .splice import as_argument
from .stages import run_lowered
from .variant import Variant

if TYPE_CHECKING:
    from ..tracing import Block
    from .driver import CompiledDriver
    from .graph import CapturedGraph
    from .recording import Recording

logger = logging.getLogger("nnsight.fx")

#: Most environments of one block that are remembered.
_KEPT = 64

#: Runs of one block that may be written down without a replay in between; then its environment is never the same twice.
_PATIENCE = 32

#: Methods that tell metadata, which is compared.
_TELLING = frozenset("__len__ dim size numel nelement stride ndimension is_floating_point is_complex is_contiguous".split())

#: Getters of what is compared beyond that.
_COMPARED = frozenset(getter for getter, name in ABOUT_GRADIENTS.items() if name != "grad_fn")

_ABSENT = object()


class _NotAsBefore(Exception):
    """The graph that is called is another one, or has other sizes; nothing has happened yet."""


class _NoRun:
    """Stands for a run while a block is replayed: nothing of the model may run outside of its graph."""

    @property
    def current(self) -> Any:
        """Asked for by the first module that dynamo does not run compiled any more, before anything has happened."""
        raise _NotAsBefore


_NO_RUN: Any = _NoRun()


class Journal:
    """What one run of a block did, as far as a replay has to do it again.

    Attributes:
        reason: Why the run cannot be replayed; empty if it can.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.recording: Recording | None = None
        self.variant: Variant | None = None
        self.alive: tuple[int, ...] = ()
        self.stop = 0
        self.numbers: dict[int, int] = {}
        self.externals: list[Any] = []
        self.inputs: list[Any] = []
        self._kept: list[Any] = []

    def spoil(self, reason: str) -> None:
        """Note that this run cannot be replayed."""
        self.reason = self.reason or reason

    def outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note a call on tensors from outside, which the block has just made."""
        if function in METADATA or function in _COMPARED or getattr(function, "__name__", "") in _TELLING:
            return
        if any(not isinstance(leaf, (torch.Tensor, type(None))) for leaf in pytree.tree_leaves(result)):
            self.spoil(f"the block looks at a value from outside, with `{getattr(function, '__name__', function)}`")
        self.calls.append((function, args, kwargs, result))

    def ran(self, recording: Recording, variant: Variant, alive: tuple[int, ...], stop: int) -> None:
        """Note that a piece of a graph is about to run."""
        if self.recording is not None or not recording.graph.is_whole:
            self.spoil("the graph was cut, or the model has several")
        if any(mediator.alive for mediator in recording.run.mediators):
            self.spoil("the block goes on behind the graph")
        self.recording, self.variant, self.alive, self.stop = recording, variant, alive, stop
        self.externals, self.inputs = list(recording.externals), list(recording.inputs)
        for index in alive:
            reference = recording.lazies[index]
            lazy = None if reference is None else reference()
            if lazy is not None:
                self._kept.append(lazy)
                self.numbers[id(lazy)] = index  # stays its identity when it becomes the real tensor


class _Listening(TorchFunctionMode):
    """Notes calls that a block makes before it first asks for a value; from there on the recording does."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._is_on = False

    def run(self, function: Callable[[], None]) -> None:
        """Run a block, and listen until it gives up its turn."""
        run = active_interleaver()
        assert run is not None and run.current is not None
        run.current._publish = self.stop
        self._is_on = True
        self.__enter__()
        try:
            function()
        finally:
            self.stop()

    def stop(self) -> None:
        """Do not listen any more."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._journal.outside(function, args, kwargs or {}, result)
        return result


#: The journal of the run of this context, if it is written down.
journal_of_run: ContextVar[Journal | None] = ContextVar("nnsight_fx_journal", default=None)

#: The replay that the graphs of this context are called for.
replay_of_run: ContextVar[Replay | None] = ContextVar("nnsight_fx_replay", default=None)


class _Step(NamedTuple):
    """A call on tensors from outside: leaves of its arguments, which of them are slots, and how many leaves it makes."""

    function: Any
    leaves: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]
    structure: Any
    is_flat: bool
    made: int

    def run(self, slots: list[Any]) -> None:
        leaves = list(self.leaves)
        for position, slot in self.slots:
            leaves[position] = slots[slot]
        if self.is_flat:
            result = self.function(*leaves)
        else:
            args, kwargs = pytree.tree_unflatten(leaves, self.structure)
            result = self.function(*args, **kwargs)
        if self.made == 1 and isinstance(result, torch.Tensor):
            slots.append(result)
        else:
            slots += pytree.tree_leaves(result)


@dataclass(eq=False, slots=True)
class _Effects:
    """What a block amounts to for one captured graph with one set of sizes.

    Attributes:
        variant: The compiled program.
        state: Where the program ends.
        stop: Number of the node at which the graph ends.
        steps: Calls on tensors from outside.
        externals: For each external the number of its slot, or the tensor itself in a tuple.
        numbers: The program's numbers.
        alive: Numbers of the values that are saved.
        saved: For each name its leaves, and how they nest. A leaf is the number of a value, or of a slot in a tuple, or a
            constant in a tuple of two.
        edits: Whether anything is edited in place.
        sharing: How tensors from outside share memory, see :func:`_sharing`.
        spliced: Locations for the report.
        ran: The latest run, for the report.
    """

    variant: Variant
    state: State
    stop: int
    steps: tuple[_Step, ...]
    externals: tuple[Any, ...]
    numbers: tuple[int | float, ...]
    alive: tuple[int, ...]
    saved: tuple[tuple[str, tuple[Any, ...], Any], ...]
    edits: bool
    sharing: tuple[int, ...]
    spliced: tuple[str, ...]
    ran: RanPiece | None = None


class Replay:
    """One attempt to replay a block.

    Args:
        effects: Known effects in this environment, by graph and sizes.
        tensors: The tensors among what the block reads.
        report: Of the trace.
    """

    def __init__(
        self, effects: dict[tuple[Any, tuple[int, ...]], _Effects], tensors: list[torch.Tensor], report: Report
    ) -> None:
        self._effects = effects
        self._report = report
        self._tensors = tensors
        self.found: _Effects | None = None
        self._slots: list[Any] = []
        self._values: dict[int, torch.Tensor] = {}

    def dispatch(self, graph: CapturedGraph, inputs: tuple[Any, ...]) -> list[Any]:
        """Run the variant for this graph; return the graph's outputs."""
        binding = graph.binding(inputs)
        effects = self._effects.get((graph, binding))
        assert self.found is None, "a whole graph is called once"
        if effects is None:
            raise _NotAsBefore
        tensors = self._tensors
        if tensors and _sharing(tensors, inputs, effects.edits) != effects.sharing:
            raise _NotAsBefore
        variant = effects.variant
        self.found = effects
        slots = self._slots = list(tensors)
        for step in effects.steps:
            step.run(slots)
        externals = [slots[source] if type(source) is int else source[0] for source in effects.externals]
        report = self._report
        report.mode, report.graphs, report.replayed = "compiled", 1, True
        report.spliced += effects.spliced
        arguments = [inputs[index] for index in variant.spliced.inputs]
        arguments += externals
        arguments += map(as_argument, effects.numbers)
        lowered, made = variant.lowered_for(binding + effects.numbers, arguments)
        report.compiles += made
        ran = effects.ran
        if ran is None or ran.lowered is not lowered:
            ran = effects.ran = RanPiece(graph, effects.state, variant, lowered, binding, effects.stop, None)
        computed = run_lowered(report, ran, arguments)
        if effects.alive:
            # A result that is an object somebody else holds gets one of its own, as a lazy tensor would.
            held = set(map(id, inputs))
            held.update(map(id, externals))
            for index in effects.alive:
                real = computed[variant.positions[index]]
                if id(real) in held:
                    real = real.view_as(real)
                self._values[index] = real
                held.add(id(real))
        return variant.deliver(computed, inputs, externals)

    def saved(self) -> dict[str, Any]:
        """Return the saved names of the block, with what was computed now."""
        assert self.found is not None
        table = saves.get()
        assert table is not None
        made: dict[str, Any] = {}
        for name, sources, structure in self.found.saved:
            leaves = [
                self._values[source]
                if type(source) is int
                else self._slots[source[0]]
                if len(source) == 1
                else source[0]
                for source in sources
            ]
            value = leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)
            made[name] = table[id(value)] = value
        return made


class _Memory:
    """What is known about one block.

    Attributes:
        roots: What it reads from outside, with the kind of comparison; ``None`` if it must run each time.
        environments: Its effects, by what the roots are.
    """

    def __init__(self) -> None:
        self.roots: tuple[tuple[Root, str], ...] | None = ()
        self.environments: dict[Any, tuple[list[Callable[[], Any]], dict[Any, _Effects]]] = {}
        self.futile = 0

    def note_futile(self) -> None:
        """Count a run that was not replayed; after many in a row the block is not looked at any more."""
        self.futile += 1
        if self.futile > _PATIENCE:
            self.roots = None
            self.environments.clear()


class Replays:
    """The blocks that one compiled model can replay.

    Attributes:
        reasons: Why blocks are not replayed, for those that are not, by file and line.
    """

    def __init__(self) -> None:
        self._memories: weakref.WeakKeyDictionary[Block, _Memory] = weakref.WeakKeyDictionary()
        self.reasons: dict[tuple[str, int], str] = {}

    def prepare(self, block: Block, scope: Scope, module_globals: dict[str, Any], tracer: Any, version: int) -> Attempt | None:
        """Return what can be tried for a block that is about to run; ``None`` if it must run unobserved.

        Args:
            block: The block.
            scope: Its variables.
            module_globals: The globals it sees.
            tracer: What ``as`` binds.
            version: Of the tree of modules.
        """
        memory = self._memories.get(block)
        if memory is None:
            memory = self._memories[block] = _Memory()
        if memory.roots is None or sys.gettrace() is not None or torch._C._len_torch_function_stack():
            return None  # a debugger wants to see the block, or a mode its calls

        def variable(name: str) -> Any:
            cell = scope.cells.get(name)
            if cell is not None and is_bound(cell):
                return cell.cell_contents
            if name in module_globals:
                return module_globals[name]
            builtins = module_globals["__builtins__"]
            return (builtins if isinstance(builtins, dict) else builtins.__dict__)[name]

        read = None if memory.roots == () else _read(memory.roots, variable)
        key = None if read is None else (version, *_settings(), *read[0])
        if key not in memory.environments:  # the proof is about the objects of now, another function may do anything
            try:
                roots = tuple(roots_of(block, tracer, variable).items())
            except Undetermined as reason:
                self.reasons[block.filename, block.line] = str(reason)
                logger.debug("%s:%d: the block runs: %s", block.filename, block.line, reason)
                memory.note_futile()
                return None
            if roots != memory.roots:
                memory.roots = roots
                memory.environments.clear()  # what is known is about other roots
            read = _read(roots, variable)
            if read is None:
                return None
            key = (version, *_settings(), *read[0])
        assert read is not None and key is not None
        return Attempt(self, memory, block, key, read[1], read[2])


class Attempt:
    """A block that is about to run, or to be replayed.

    Args:
        replays: What it belongs to.
        memory: What is known about the block.
        block: The block.
        key: What the roots and the settings are.
        tensors: The tensors among the roots.
        objects: The other objects.
    """

    def __init__(
        self,
        replays: Replays,
        memory: _Memory,
        block: Block,
        key: tuple[Any, ...],
        tensors: list[torch.Tensor],
        objects: list[Any],
    ) -> None:
        self._replays, self._memory, self._block = replays, memory, block
        self._key, self._tensors, self._objects = key, tensors, objects

    def replay(
        self, driver: CompiledDriver, arguments: tuple[tuple[Any, ...], dict[str, Any]], report: Report
    ) -> Replay | None:
        """Call the model with the effects of the block if they are known; return ``None`` if nothing was done.

        Args:
            driver: Calls the compiled model.
            arguments: Of the model.
            report: Of the trace.
        """
        known = self._memory.environments.get(self._key)
        if known is None:
            return None
        for reference in known[0]:
            if reference() is None:
                return None
        replay = Replay(known[1], self._tensors, report)
        token, outer = replay_of_run.set(replay), active_run.set(_NO_RUN)
        try:
            driver.call_captured(*arguments)
        except _NotAsBefore:
            return None
        finally:
            active_run.reset(outer)
            replay_of_run.reset(token)
        assert replay.found is not None, "a model whose whole call is a graph has called it"
        self._memory.futile = 0
        counters.add("replays")
        return replay

    @contextlib.contextmanager
    def written_down(self, function: Callable[[], None]) -> Iterator[tuple[Journal, Callable[[], None]]]:
        """Write down the run that is made in this context; yields the journal, and what is to run as ``function``."""
        journal = Journal()
        token = journal_of_run.set(journal)
        try:
            yield journal, functools.partial(_Listening(journal).run, function)
        finally:
            journal_of_run.reset(token)

    def learn(self, journal: Journal, scope: Scope, spliced: Sequence[str]) -> None:
        """Remember what the run did, if it can be replayed."""
        memory = self._memory
        memory.note_futile()
        if memory.roots is None:
            return
        try:
            graph, binding, effects = _effects(journal, self._block, scope, self._tensors, spliced)
        except Undetermined as reason:
            self._replays.reasons[self._block.filename, self._block.line] = str(reason)
            logger.debug("%s:%d: this run cannot be replayed: %s", self._block.filename, self._block.line, reason)
            return
        known = memory.environments.get(self._key)
        if known is None or any(reference() is None for reference in known[0]):
            while len(memory.environments) >= _KEPT:
                memory.environments.pop(next(iter(memory.environments)))
            known = memory.environments[self._key] = ([_reference(item) for item in self._objects], {})
        if len(known[1]) >= _KEPT:
            known[1].pop(next(iter(known[1])))
        known[1][graph, binding] = effects


def _reference(item: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(item)
    except TypeError:  # a built-in function
        return lambda: item


def _settings() -> tuple[Any, ...]:
    """What calls of torch depend on besides their arguments."""
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()


def _read(
    roots: tuple[tuple[Root, str], ...], variable: Callable[[str], Any]
) -> tuple[tuple[Any, ...], list[torch.Tensor], list[Any]] | None:
    """Return what the roots are now: something to compare, the tensors, the other objects; ``None`` if one is of another kind."""
    key: list[Any] = []
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []
    for (name, attributes), kind in roots:
        try:
            value = variable(name)
            for attribute in attributes:
                value = look_up(value, attribute)
        except (KeyError, AttributeError):
            return None
        if kind == "object":
            key.append(id(value))
            objects.append(value)
        elif kind_of(value) != kind:
            return None
        elif kind == "items":
            entries = list(value.items()) if type(value) is dict else list(enumerate(value))
            key.append((type(value), len(entries)))
            for index, item in entries:
                key.append((type(index), index))
                _add_item(item, key, tensors)
        else:
            _add_item(value, key, tensors)
    return tuple(key), tensors, objects


def _add_item(value: Any, key: list[Any], tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key.append(
            (type(value), value.shape, value.stride(), value.dtype, value.device, value.layout, value.requires_grad, value.is_leaf)
        )
    else:
        key.append(_constant_key(value))


def _constant_key(value: Any) -> Any:
    """Return what is equal for equal constants of equal types: ``1 == 1.0 == True``, ``0.0 == -0.0``."""
    if type(value) is tuple:
        return tuple(map(_constant_key, value))
    if type(value) in (float, complex, slice, range):
        return type(value), repr(value)
    return type(value), value


def _sharing(tensors: Sequence[torch.Tensor], inputs: Sequence[Any], edits: bool) -> tuple[int, ...]:
    """Describe which of ``tensors`` are one object, or share memory, with each other and with the inputs of a graph."""
    ids = list(map(id, tensors))
    positions = {id(item): position for position, item in enumerate(inputs)}
    described = [positions.get(number, -1) for number in ids]
    if len(tensors) > 1 or edits:
        described += map(ids.index, ids)
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        described += map(storages.index, storages)
        if edits:
            of_inputs = {item.untyped_storage()._cdata for item in inputs if isinstance(item, torch.Tensor)}
            described += [storage in of_inputs for storage in storages]
    return tuple(described)


def _effects(
    journal: Journal, block: Block, scope: Scope, tensors: list[torch.Tensor], spliced: Sequence[str]
) -> tuple[CapturedGraph, tuple[int, ...], _Effects]:
    """Return what a run amounts to, and for which graph and sizes.

    Raises:
        Undetermined: If it cannot be replayed.
    """
    if journal.reason or journal.recording is None or journal.variant is None:
        raise Undetermined(journal.reason or "no graph was called")
    recording = journal.recording
    slot_of: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        slot_of.setdefault(id(tensor), number)
    steps: list[_Step] = []
    filled = len(tensors)
    for function, args, kwargs, result in journal.calls:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        slots: list[tuple[int, int]] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                slots.append((position, _slot(leaf, slot_of)))
                leaves[position] = None
            elif callable(leaf) and leaf in DRAWN_LIKE:
                continue
            elif kind_of(leaf) != "constant" or (isinstance(leaf, slice) and not _plain_slice(leaf)):
                raise Undetermined(f"a call with a {type(leaf).__name__}")
        made = pytree.tree_leaves(result)
        for number, leaf in enumerate(made):
            slot_of.setdefault(id(leaf), filled + number)
        flat = not kwargs and all(child.is_leaf() for child in structure.child(0).children())
        steps.append(_Step(function, tuple(leaves), tuple(slots), structure, flat, len(made)))
        filled += len(made)
    lifted = {id(tensor) for tensor in recording.lifted}
    externals = [
        (external,) if id(external) in lifted else _slot(external, slot_of) for external in journal.externals
    ]
    calls = [step.event for step in recording.state.program().steps if isinstance(step.event, Call)]
    edits = any(map(edits_in_place, [*(call.function for call in calls), *(step.function for step in steps)]))
    saved = tuple(
        (name, *_described(name, value, journal, slot_of)) for name, value in _saved(block, scope)
    )
    containers: list[int] = []
    for _, value in _saved(block, scope):
        _collect_containers(value, containers)
    if len(containers) != len(set(containers)):
        raise Undetermined("a container is saved in two places")
    effects = _Effects(
        journal.variant,
        recording.state,
        journal.stop,
        tuple(steps),
        tuple(externals),
        recording.numbers,
        journal.alive,
        saved,
        edits,
        _sharing(tensors, journal.inputs, edits) if tensors else (),
        tuple(spliced),
    )
    return recording.graph, recording.binding, effects


def _plain_slice(value: slice) -> bool:
    return all(kind_of(part) == "constant" for part in (value.start, value.stop, value.step))


def _slot(tensor: torch.Tensor, slot_of: dict[int, int]) -> int:
    slot = slot_of.get(id(tensor))
    if slot is None:
        raise Undetermined("a tensor from outside came in unseen")
    return slot


def _saved(block: Block, scope: Scope) -> list[tuple[str, Any]]:
    marked = saves.get() or {}
    return [(name, value) for name, value in scope.items() if name in block.stored and id(value) in marked]


def _described(name: str, value: Any, journal: Journal, slot_of: dict[int, int]) -> tuple[tuple[Any, ...], Any]:
    """Return how a saved value is put together, see :class:`_Effects`."""
    if type(value) in (list, tuple, dict) or not (isinstance(value, torch.Tensor) or kind_of(value) == "constant"):
        leaves, structure = pytree.tree_flatten(value)
        if structure.is_leaf():
            raise Undetermined(f"`{name}` is saved, a {type(value).__name__}")
    else:
        leaves, structure = [value], None
    sources: list[Any] = []
    for leaf in leaves:
        if id(leaf) in journal.numbers:
            sources.append(journal.numbers[id(leaf)])
        elif isinstance(leaf, torch.Tensor):
            sources.append((_slot(leaf, slot_of),))
        elif kind_of(leaf) == "constant":
            sources.append((leaf, _ABSENT))
        else:
            raise Undetermined(f"`{name}` holds a {type(leaf).__name__}")
    return tuple(sources), structure


def _collect_containers(value: Any, found: list[int]) -> None:
    if isinstance(value, (list, dict)):
        found.append(id(value))
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _collect_containers(item, found)
