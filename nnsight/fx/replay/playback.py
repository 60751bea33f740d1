"""Replays the recorded effects of a block without executing it.

The :class:`Effects` of a block on one captured graph are the variant of its program, and the contents of the
:class:`~nnsight.fx.recording.journal.Journal` of a run: the calls on tensors from outside, and the structure of the saved values.
A :class:`Playback` repeats these calls, calls the variant, and builds the saved values.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ...runtime.report import Report
from ...runtime.rows.gradient_sources import refuse_gradient, share_gradient
from ...tracing.saving import saves
from ..block_events import Call, State
from ..effects import RANDOM
from ..lowering.variant import Variant
from ..recording.execution import refuse_edited
from ..recording.functions import DRAWN_LIKE, edits_in_place
from ..recording.journal import Journal
from ..show.explaining import RanPiece
from ..show.stages import run_lowered
from ..splicing.pieces import as_argument
from ..torch_compat import may_share
from .guards import is_constant, kind_of
from .names import Undetermined, is_method

if TYPE_CHECKING:
    from ..capturing.graph import CapturedGraph

#: Packages whose classes of outputs only hold values. Their methods and properties give the same result for the same values.
_TRUSTED = frozenset({"torch", "transformers", "diffusers", "nnsight", *sys.stdlib_module_names})

#: Methods that neither a call of a method by name, an attribute nor an item runs.
_UNUSED = frozenset("__init__ __new__ __eq__ __ne__ __hash__ __repr__ __str__ __setattr__ __delattr__ __reduce__ __reduce_ex__".split())

#: Second item of the pair that marks a leaf of a saved value as a constant.
_IS_CONSTANT = object()


class GuardFailed(Exception):
    """Dynamo has called a graph, or inputs, for which no effects are known. The replay has had no effect yet."""


class _Step(NamedTuple):
    """A call on tensors from outside: the leaves of its arguments, the slot of each tensor leaf, and the number of result leaves."""

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


class PythonEffects(NamedTuple):
    """The effects of a block that are not in its program.

    Attributes:
        steps: Calls on tensors from outside. Their results follow the tensors that the block reads, in numbered slots.
        saved: For each saved name, its leaves and their structure. A leaf is the number of a value, ``(slot,)`` for a tensor from
            outside, or ``(constant, _IS_CONSTANT)``.
        appended: The same for items appended to lists from outside, with the number of the list in place of the name.
    """

    steps: tuple[_Step, ...]
    saved: tuple[tuple[str, tuple[Any, ...], Any], ...]
    appended: tuple[tuple[int, tuple[Any, ...], Any], ...]

    def run_steps(self, slots: list[Any]) -> None:
        """Make the calls on tensors from outside, and append their results to ``slots``.

        Raises:
            GuardFailed: If a call fails, and the block can repeat the calls before it: then the error gets the line of the block.
        """
        made: list[Any] = []
        grad = torch.is_grad_enabled()
        try:
            for step in self.steps:
                step.run(slots)
                made.append(step.function)
        except Exception:
            torch.set_grad_enabled(grad)  # the calls may have switched the grad mode
            if any(edits_in_place(function) or getattr(function, "__name__", "") in RANDOM for function in made):
                raise
            raise GuardFailed from None


@dataclass(eq=False, slots=True)
class Effects:
    """The effects of a block on one captured graph with one set of sizes.

    Attributes:
        state: The state at the end of the program.
        stop: Number of the node at which the graph ends.
        externals: For each external, the number of its slot, or ``(tensor,)`` for a tensor that was made from a float.
        alive: Numbers of the values that become real tensors.
        edits: Whether a call of the block, or the model, edits a tensor in place.
        sharing: How tensors from outside share memory, see :func:`sharing_of`.
    """

    variant: Variant
    state: State
    stop: int
    python: PythonEffects
    externals: tuple[Any, ...]
    numbers: tuple[int | float, ...]
    alive: tuple[int, ...]
    edits: bool
    sharing: tuple[int, ...]
    spliced: tuple[str, ...]
    ran: RanPiece | None = None


class Playback:
    """One attempt to replay a block that reads ``tensors`` and appends to the lists ``filled``; the active run while the model runs."""

    def __init__(
        self,
        effects: dict[tuple[Any, tuple[int, ...]], Effects],
        tensors: list[torch.Tensor],
        filled: list[list[Any]],
        report: Report,
    ) -> None:
        self._filled = filled
        self._effects = effects
        self.report = report
        self._tensors = tensors
        self.found: Effects | None = None
        self.interceptions: list[object] = []  # as those of an `Interleaver`
        self._slots: list[Any] = []
        self._values: dict[int, torch.Tensor] = {}

    @property
    def current(self) -> Any:
        """Read by intercepted modules: dynamo does not call a known graph, but runs the model as Python. Nothing has happened yet."""
        raise GuardFailed

    def dispatch(self, graph: CapturedGraph, inputs: tuple[Any, ...]) -> list[Any]:
        """Run the variant for this graph; return the graph's outputs."""
        binding = graph.binding(inputs) if graph.symbols else ()
        effects = self._effects.get((graph, binding))
        assert self.found is None, "a whole graph is called once"
        if effects is None:
            raise GuardFailed
        tensors = self._tensors
        if tensors and sharing_of(tensors, inputs, effects.edits) != effects.sharing:
            raise GuardFailed
        variant = effects.variant
        self.found = effects
        externals: list[Any] = []
        if effects.externals or effects.python.steps or tensors:
            slots = self._slots = list(tensors)
            effects.python.run_steps(slots)
            externals = [slots[source] if type(source) is int else source[0] for source in effects.externals]
        report = self.report
        report.mode, report.graphs, report.replayed = "compiled", 1, True
        report.spliced += effects.spliced
        arguments = [*variant.take(inputs), *externals, *map(as_argument, effects.numbers)]
        ran = effects.ran
        if ran is None or not variant.still_runs(ran.lowered):
            lowered, made = variant.lowered_for(binding + effects.numbers, arguments)
            report.compiles += made
            if ran is None or ran.lowered is not lowered:
                ran = effects.ran = RanPiece(graph, effects.state, variant, lowered, binding, effects.stop, None)
        computed = run_lowered(report, ran, arguments)
        partial = ran.lowered.partial
        held = {*map(id, inputs), *map(id, externals)} if effects.alive else set()
        for index in effects.alive:
            position = variant.positions[index]
            real = computed[position]
            if id(real) in held:  # referred to elsewhere, so the block gets a new object, as a lazy tensor would be
                shared, real = real, real.view_as(real)
                if shared.requires_grad:
                    share_gradient(real, shared)
            held.add(id(real))
            if position in partial and real.requires_grad:
                real = real.view_as(real)  # as in a recording
                refuse_gradient(real)
            self._values[index] = real
        refuse_edited(arguments, partial)
        return graph.stand_ins(binding) if variant.unseen else variant.deliver(computed, inputs, externals)

    def saved(self) -> dict[str, Any]:
        """Build the saved values, by name, and append to the lists from outside."""
        assert self.found is not None
        table = saves.get()
        made: dict[str, Any] = {}
        for name, sources, structure in self.found.python.saved:
            single = structure is None and type(sources[0]) is int
            value = self._values[sources[0]] if single else put_together(sources, structure, self._values, self._slots)
            made[name] = value
            if table is not None:
                table[id(value)] = value
        for number, sources, structure in self.found.python.appended:
            self._filled[number].append(put_together(sources, structure, self._values, self._slots))
        return made


def put_together(sources: tuple[Any, ...], structure: Any, values: Mapping[int, Any], slots: Sequence[Any]) -> Any:
    """Build a saved value from the leaves in ``values`` and ``slots``, and constants, see :class:`PythonEffects`."""
    leaves = [
        values[source] if type(source) is int else slots[source[0]] if len(source) == 1 else source[0]
        for source in sources
    ]
    return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)


def sharing_of(tensors: Sequence[torch.Tensor], inputs: Sequence[Any], edits: bool) -> tuple[int, ...]:
    """Return a key that tells which of ``tensors`` are the same object, or share memory, as others of them or inputs of a graph."""
    ids, of_inputs = list(map(id, tensors)), list(map(id, inputs))
    described = [of_inputs.index(number) if number in of_inputs else -1 for number in ids]
    if len(tensors) > 1 or edits:
        described += _firsts(ids)
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        described += _firsts(storages)
        if edits:
            shared: set[int] = set()
            if may_share(tensors, inputs):
                shared = {item.untyped_storage()._cdata for item in inputs if isinstance(item, torch.Tensor)}
            described += [storage in shared for storage in storages]
    return tuple(described)


def _firsts(numbers: Sequence[int]) -> list[int]:
    """Return, for each number, the position of its first occurrence."""
    seen: dict[int, int] = {}
    return [seen.setdefault(number, position) for position, number in enumerate(numbers)]


def _python_effects_of(
    journal: Journal, kept: Sequence[tuple[str, Any]], tensors: list[torch.Tensor]
) -> tuple[PythonEffects, dict[int, int]]:
    """Return the effects of a run that are not in its program, and the slot of each tensor by its identity in this run.

    Raises:
        Undetermined: If they cannot be replayed.
    """
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
            elif kind_of(leaf) != "constant":
                raise Undetermined(f"a call has an argument of type {type(leaf).__name__}")
        made = pytree.tree_leaves(result)
        _check_sizes(function, args, kwargs, made)
        for number, leaf in enumerate(made):
            slot_of.setdefault(id(leaf), filled + number)
        flat = not kwargs and all(child.is_leaf() for child in structure.child(0).children())
        steps.append(_Step(function, tuple(leaves), tuple(slots), structure, flat, len(made)))
        filled += len(made)
    appended = journal.appended
    saved = tuple((name, *_described(name, value, journal, slot_of)) for name, value in kept)
    fillings = tuple((number, *_described("a list", value, journal, slot_of)) for number, value in appended)
    containers: list[int] = []
    for _, value in (*kept, *appended):
        _collect_containers(value, containers)
    if len(containers) != len(set(containers)):
        raise Undetermined("a container is saved in two places")
    return PythonEffects(tuple(steps), saved, fillings), slot_of


def effects_of(
    journal: Journal, kept: Sequence[tuple[str, Any]], tensors: list[torch.Tensor], spliced: Sequence[str]
) -> tuple[CapturedGraph, tuple[int, ...], Effects]:
    """Return the graph of a run, its sizes, and the effects on it; ``kept`` are the saved values by name.

    Raises:
        Undetermined: If the run cannot be replayed.
    """
    if journal.reason or journal.recording is None or journal.variant is None:
        raise Undetermined(journal.reason or "no graph was called")
    for kind in {kind for structure in journal.structures for kind in _classes_in(structure)}:
        if _has_code_of_user(kind):
            raise Undetermined(f"the model computes a {kind.__name__}, whose class has methods or properties of its own")
    recording = journal.recording
    python, slot_of = _python_effects_of(journal, kept, tensors)
    lifted = {id(tensor) for tensor in recording.lifted}
    externals = [
        (external,) if id(external) in lifted else _slot(external, slot_of) for external in journal.externals
    ]
    calls = [step.event for step in recording.state.program().steps if isinstance(step.event, Call)]
    functions = [*(call.function for call in calls), *(step.function for step in python.steps)]
    edits = journal.variant.edits_inputs or any(map(edits_in_place, functions))
    effects = Effects(
        journal.variant,
        recording.state,
        journal.stop,
        python,
        tuple(externals),
        recording.numbers,
        journal.alive,
        edits,
        sharing_of(tensors, journal.inputs, edits) if tensors else (),
        tuple(spliced),
    )
    return recording.graph, recording.binding, effects


def _classes_in(structure: pytree.TreeSpec) -> Iterator[type]:
    """Yield the classes of the containers in a value."""
    if not structure.is_leaf():
        yield structure.context if isinstance(structure.context, type) else structure.type  # the class of a namedtuple is its context
        for child in structure.children():
            yield from _classes_in(child)


def _has_code_of_user(kind: type) -> bool:
    """Whether an attribute, a method or an operator that the analysis allows may run code of the user on an object of a class."""
    for base in kind.__mro__:
        if _is_trusted(base):
            continue
        for name, found in vars(base).items():
            if isinstance(found, (types.FunctionType, staticmethod, classmethod)):
                if name == "__getattr__" or (is_method(name) and name not in _UNUSED):
                    return True
            elif hasattr(found, "__get__") and (isinstance(found, (property, functools.cached_property)) or not _is_trusted(type(found))):
                return True
    return False


def _is_trusted(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _TRUSTED


def _check_sizes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Any]) -> None:
    """Check on fakes that the sizes of a call's results follow from the sizes of its arguments, because the block may have read them.

    Raises:
        Undetermined: If they depend on values, as for ``mask.nonzero()``, or cannot be determined.
    """
    mode = FakeTensorMode()
    try:
        with mode, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            found = _shapes(pytree.tree_leaves(function(*args, **kwargs)))
    except Exception as error:
        raise Undetermined(f"the size of a result of `{getattr(function, '__name__', function)}` is not known: {error}") from None
    if found != _shapes(made):
        raise Undetermined(f"the size of a result of `{getattr(function, '__name__', function)}` differs on fakes")


def _shapes(leaves: Sequence[Any]) -> list[Any]:
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


def _slot(tensor: torch.Tensor, slot_of: dict[int, int]) -> int:
    slot = slot_of.get(id(tensor))
    if slot is None:
        raise Undetermined("it uses a tensor from outside that is neither a guard nor the result of a recorded call")
    return slot


def _described(name: str, value: Any, journal: Journal, slot_of: dict[int, int]) -> tuple[tuple[Any, ...], Any]:
    """Return the leaves and the structure of a saved value, see :class:`PythonEffects`."""
    if type(value) in (list, tuple, dict) or not (isinstance(value, torch.Tensor) or kind_of(value) == "constant"):
        leaves, structure = pytree.tree_flatten(value, is_leaf=lambda part: isinstance(part, torch.Size))  # a Size is no tuple
        if structure.is_leaf():
            raise Undetermined(f"it saves `{name}`, a {type(value).__name__}")
    else:
        leaves, structure = [value], None
    sources: list[Any] = []
    for leaf in leaves:
        if id(leaf) in journal.numbers:
            sources.append(journal.numbers[id(leaf)])
        elif isinstance(leaf, torch.Tensor):
            sources.append((_slot(leaf, slot_of),))
        elif kind_of(leaf) == "constant":
            sources.append((leaf, _IS_CONSTANT))
        else:
            raise Undetermined(f"`{name}` contains a {type(leaf).__name__}")
    return tuple(sources), structure


def _collect_containers(value: Any, found: list[int]) -> None:
    if isinstance(value, dict) and not all(map(is_constant, value)):
        raise Undetermined("it saves a dict with keys that are tensors or other objects")
    if isinstance(value, (list, dict)):
        found.append(id(value))
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _collect_containers(item, found)
