"""A block that was recorded is not recorded again: its program is sent with the values of now.

When a block is replayed, and when it is not, is decided as for compiled models (:mod:`nnsight.fx.replay.replay`): its Python does nothing
but compute, and what it reads from outside is as it was, except for the values of tensors. In place of a captured graph there is what a
recording depends on besides: a description of the model (:mod:`~nnsight.remote.run.likeness`), and the sizes and plain values of its input.

A :class:`Template` is what such a recording leaves: the nodes, the calls on tensors from outside (which are made again, in their order),
which of their results are constants of the program, and how saved values are put together. New fakes stand for tensors of the model in
the user's variables until results come, as they do after a recording.

Where a rule does not hold, the block is recorded, before anything else has happened.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...fx.recording.journal import Journal
from ...fx.replay.abstract_values import Undetermined
from ...fx.replay.playback import Python, put_together, python_of, sharing_of
from ...fx.replay.replay import Attempt, Replays
from ...tracing.saving import saves
from ..counts import counts
from ..record.recorder import Recorded, Recorder
from ..record.taking import called_by, input_tree
from ..run.draws import drawn_seed
from ..run.likeness import describe, key_of
from ..run.occurrences import fake_like
from ..wire.binding import Binding
from ..wire.payload import Job
from ..wire.trees import write_tree

if TYPE_CHECKING:
    from ...modeling.tracing import ModelTracer

_known: weakref.WeakKeyDictionary[torch.nn.Module, Replays] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def recorded_of(tracer: Any, compile_block: Callable[[Any], Callable[[], None]]) -> Recorded:
    """Return the block of a trace as data: from memory if that is the same, else recorded.

    Args:
        tracer: Of the trace.
        compile_block: Returns the block as a function.

    Raises:
        NotExpressibleError: If the block needs values or Python that cannot be sent.
    """
    known = _remembered(tracer)
    if known is None:
        return _record(tracer, compile_block(tracer))
    return known.repeated(tracer) or known.recorded(tracer, compile_block(tracer))


def _record(
    tracer: Any, function: Callable[[], None], journal: Journal | None = None, prepared: Any = None
) -> Recorded:
    recorder = Recorder(journal)
    recorder.run_trace(tracer, function, prepared)
    return recorder.finished(tracer)


@dataclass(eq=False, slots=True)
class Template:
    """What a block comes down to in one environment.

    Attributes:
        job: The program, without inputs and constants.
        python: What the block did besides.
        constants: The constants of the program, by name, as numbers of slots.
        names: The names of the lists that the block appends to, by their number.
        fakes: The like of what stands for tensors of the model in the user's variables.
        references: Node and output that each of them stands for.
        sharing: How tensors from outside share memory.
    """

    job: Job
    python: Python
    constants: dict[str, int]
    names: dict[int, str]
    fakes: list[Any]
    references: list[tuple[int, int]]
    sharing: tuple[int, ...]


class _Remembered:
    """A block that is about to run, of which something may be remembered.

    Args:
        attempt: What is remembered, by environment.
        call: How the model is called.
        prepared: Its arguments.
        key: What the recording depends on besides the environment.
    """

    def __init__(self, attempt: Attempt, call: str, prepared: Any, key: Hashable) -> None:
        self._attempt, self._call, self._prepared, self._key = attempt, call, prepared, key
        inputs = [leaf for leaf in pytree.tree_leaves(prepared) if isinstance(leaf, torch.Tensor)]
        self._inputs_in_memory_of = {tensor.untyped_storage()._cdata for tensor in inputs}

    def repeated(self, tracer: ModelTracer) -> Recorded | None:
        """Return what the block comes down to, if that is known; nothing has happened otherwise."""
        template: Template | None = (self._attempt.known() or {}).get(self._key)
        tensors = self._attempt.tensors
        if template is None or sharing_of(tensors, (), True) != template.sharing or self._obstacle(tracer):
            return None
        self._attempt.note_use()
        counts["repeats"] += 1
        tracer._deferred = False
        tracer.note_start()
        tracer.report.mode, tracer.report.replayed = "remote", True
        slots: list[Any] = list(tensors)
        with torch.no_grad():
            for step in template.python.steps:
                step.run(slots)
        content: dict[str, torch.Tensor] = {}  # the input first, as in a recording: both have the same header
        args, kwargs = (input_tree(part, content) for part in self._prepared)
        content |= {name: slots[slot] for name, slot in template.constants.items()}
        run = {**template.job.runs[0], "args": args, "kwargs": kwargs}
        fakes = [fake_like(fake) for fake in template.fakes]
        references = dict(zip(map(id, fakes), template.references, strict=True))
        values = self._values(template, fakes, slots, tracer)

        def leaf(value: Any) -> Any:
            reference = references.get(id(value))
            return {"absent": type(value).__name__[:100]} if reference is None else {"ref": list(reference)}

        trees = {name: write_tree(value, leaf) for name, value in values.items()}
        binding = Binding(values, {id(fake): fake for fake in fakes}, references, trees, tracer.scope)
        seed = None if template.job.seed is None else drawn_seed()
        return Recorded(Job([run], template.job.nodes, trees, content, seed=seed), binding)

    def _values(
        self, template: Template, known: list[torch.Tensor], slots: list[Any], tracer: ModelTracer
    ) -> dict[str, Any]:
        """Bind what the block saves, as the block does, and return it by name."""
        scope, table = tracer.scope, saves.get()
        assert scope is not None and table is not None
        fakes = dict(enumerate(known))
        values: dict[str, Any] = {}
        for name, sources, structure in template.python.saved:
            value = values[name] = put_together(sources, structure, fakes, slots)
            scope.cells[name].cell_contents = value
            table[id(value)] = value
        for number, sources, structure in template.python.appended:
            filled = values[template.names[number]] = self._attempt.filled[number]
            filled.append(put_together(sources, structure, fakes, slots))
        return values

    def recorded(self, tracer: ModelTracer, function: Callable[[], None]) -> Recorded:
        """Record the block, and remember that."""
        journal = Journal(self._attempt.filled)
        sharing = sharing_of(self._attempt.tensors, (), True)  # before the block changes anything
        recorded = _record(tracer, function, journal, self._prepared)
        if self._attempt.note_run():
            try:
                template = self._template(tracer, journal, recorded, sharing)
            except Undetermined as reason:
                self._attempt.refuse(reason)
            else:
                self._attempt.remember(self._key, template)
        return recorded

    def _template(
        self, tracer: ModelTracer, journal: Journal, recorded: Recorded, sharing: tuple[int, ...]
    ) -> Template:
        """Return what a recording leaves.

        Raises:
            Undetermined: If it may not be the same another time.
        """
        assert tracer.info is not None and tracer.scope is not None
        job, binding = recorded.job, recorded.binding
        if obstacle := self._obstacle(tracer):
            raise Undetermined(obstacle)
        journal.numbers = {identity: number for number, identity in enumerate(binding.fakes)}
        python = python_of(journal, tracer.info, tracer.scope, self._attempt.tensors)
        names = {}
        for number, _, _ in python.appended:
            filled = self._attempt.filled[number]
            names[number] = next((name for name, value in binding.values.items() if value is filled), "")
        if {*names.values(), *(name for name, _, _ in python.saved)} != binding.values.keys():
            raise Undetermined(
                "values come home in something else than names of the block and lists that it appends to"
            )
        constants = {}
        for name, tensor in job.tensors.items():
            if not name.startswith("i"):
                constants[name] = python.slot_of[id(tensor)]
        saved = {
            source for _, sources, _ in (*python.saved, *python.appended) for source in sources if type(source) is int
        }
        numbers = {old: new for new, old in enumerate(sorted(saved))}
        fakes = [fake for number, fake in enumerate(binding.fakes.values()) if number in saved]
        kept = Python(python.steps, {}, _numbered(python.saved, numbers), _numbered(python.appended, numbers))
        references = [binding.references[id(fake)] for fake in fakes]
        return Template(Job(job.runs, job.nodes, seed=job.seed), kept, constants, names, fakes, references, sharing)

    def _obstacle(self, tracer: ModelTracer) -> str:
        """Return why the tensors from outside do not allow a repetition; empty if they do."""
        tensors, modules = self._attempt.tensors, tracer._modules
        if any(tensor.untyped_storage()._cdata in self._inputs_in_memory_of for tensor in tensors):
            return "a tensor from outside shares memory with the input"
        assert modules is not None
        weights = {id(weight) for module in modules.paths for weight in _tensors_of(module)} if tensors else ()
        return "a weight of the model is read from outside" if any(id(tensor) in weights for tensor in tensors) else ""


def _remembered(tracer: ModelTracer) -> _Remembered | None:
    """Return what may be remembered of the block of a trace; ``None`` if it is one that has to be recorded each time."""
    call, root = called_by(tracer)
    assert tracer._call is not None and tracer._modules is not None
    _, model, args, kwargs = tracer._call
    named = tracer._model
    if named is None or named.edits or not tracer.owns_scope or not (args or kwargs):
        return None
    root._sync()
    tree = tracer._modules
    with _lock:
        replays = _known.get(tree.root)
        if replays is None:
            replays = _known[tree.root] = Replays()
    assert tracer.info is not None and tracer.scope is not None and tracer._frame is not None
    attempt = replays.prepare(tracer.info, tracer.scope, tracer._frame.f_globals, tracer, named.modules)
    if attempt is None:
        return None
    prepared = model._prepare_input(*args, **kwargs)[:2]
    try:
        key = call, key_of(prepared), describe(tree.paths)
    except TypeError:
        return None
    return _Remembered(attempt, call, prepared, key)


def _numbered(saved: tuple[Any, ...], numbers: dict[int, int]) -> tuple[Any, ...]:
    """Return how saved values are put together, with the numbers of their tensors replaced."""
    return tuple(
        (name, tuple(numbers.get(source, source) if type(source) is int else source for source in sources), structure)
        for name, sources, structure in saved
    )


def _tensors_of(module: torch.nn.Module) -> list[Any]:
    return [*module._parameters.values(), *module._buffers.values()]
