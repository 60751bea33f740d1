"""Loops over steps that go on as programs.

A block begins as Python. This shows which locations it asks for, in which order, and which values it gets. Once its loop has taken enough
stops that a recording pays off (:data:`STOPS`), one step is recorded (:mod:`.recording`), if its body is plain (:mod:`.plain`). The result
of the program is compared with the result of the Python in that step. From then on the block is *parked*: it waits where its next step
begins, and the program runs its steps, in one call for all requests with the same body.

Before its Python could notice the difference, the block is *resumed*, as if it had run these steps itself: it continues with the number of
the present step, and its lists have the values of the steps of the program. This happens before the last step of a bounded loop, at an
error, when a variable gets another value, and at the end of the request.

Steps with a prompt always run as Python. So do blocks that cannot be a program; :attr:`Steps.why` has the reason.
"""

from __future__ import annotations

import builtins
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...runtime.mediator import Mediator
from ...tracing import Block
from .plain import NotPlainError, check_apart, loop_of
from .recording import PartValue, StepProgram, compare, recorded

#: Stops of a block before it is recorded, summed over its requests. A stop costs about 0.05 ms, and recording a stop about 50 ms.
STOPS = 1000

#: Most programs that one block may have, for different values of variables that are no parameters.
_MAX_PROGRAMS = 8


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A recorded program, and the comparison key of the variables that it fits. ``objects`` are the objects among these variables."""

    program: Any
    found: Any
    objects: Sequence[weakref.ref[Any]]

    @property
    def is_alive(self) -> bool:
        return all(reference() is not None for reference in self.objects)


@dataclass(eq=False)
class _BlockState:
    """The state that all requests with one block share."""

    stops: int = 0
    why: str = ""  # why the block cannot be a program, if that is known
    programs: list[_Recorded] = field(default_factory=list)
    watcher: Steps | None = None  # the request whose values are watched in this step, for a recording


class BlockPrograms:
    """The programs of the blocks of an engine. ``convert`` turns a recorded program into the form that requests run."""

    def __init__(self, convert: Callable[[StepProgram], Any]) -> None:
        self.convert = convert
        self._known: weakref.WeakKeyDictionary[Block, _BlockState] = weakref.WeakKeyDictionary()

    def of(self, block: Block) -> _BlockState:
        return self._known.setdefault(block, _BlockState())


class Steps:
    """The steps of one request. Parks and resumes its ``block``, which ``mediator`` runs as ``function``.

    ``others`` are the blocks of the other requests of the trace. ``lists`` says whether lists may be filled late, on resuming the block.

    Attributes:
        program: The program that runs in place of the block; ``None`` while the block runs as Python.
        parameters: The values of the parameters of the program, by name.
        program_steps: The number of steps that a program has run.
        why: Why the block runs as Python, if that is known.
    """

    def __init__(
        self, programs: BlockPrograms, mediator: Mediator, block: Block, function: Any, others: Collection[Block], lists: bool
    ) -> None:
        self._programs, self._mediator, self._block, self._others, self._appends = programs, mediator, block, others, lists
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._globals = function.__globals__
        self._known = programs.of(block)
        self._recorded: StepProgram | None = None
        self._found: Any = None
        self._lists: dict[str, list[Any]] = {}
        self._taken: list[tuple[Mapping[str, torch.Tensor], int]] = []
        self._watched: dict[str, tuple[Any, Any]] | None = None  # the values before and after the block, by location
        self._since = 0
        self.program: Any = None
        self.parameters: dict[str, torch.Tensor] = {}
        self.program_steps = 0
        self.why = ""

    # -- at the beginning of a step --------------------------------------------------------------------------------------

    def settle(self, step: int, single: bool, alone: bool) -> bool:
        """Before a step, park or resume the block where that is due. Return whether that changed how the request runs.

        Args:
            step: The number of the step.
            single: Whether the step has one row of the request, right after the rows of earlier steps.
            alone: Whether no other block works on the values of the request.
        """
        if self.program is not None:
            if single and alone and not self._is_last(step) and not _is_followed() and self._key_of(self._recorded, True) == self._found:
                self.program_steps += 1
                return False
            self.resume(step)
            return True
        known, mediator, watcher = self._known, self._mediator, self._known.watcher
        if watcher is not None and watcher._watched:  # the watched step is over
            watcher._record()
        self.why = known.why
        if known.why or known.stops <= STOPS or not single or self._is_last(step):
            return False
        if mediator.waiting is None or mediator.waiting[1] != step or mediator.loops != 1 or not alone or _is_followed():
            self.why = "other Python reads its values or traces its lines"
            return False
        program = next((entry.program for entry in known.programs if self._fits(entry)), None)
        if program is None:
            if known.watcher is None and len(known.programs) <= _MAX_PROGRAMS:
                self._watched, known.watcher = {}, self
            return False
        if mediator.waiting[0] != next(iter(program.parts)):
            return False
        self._park(program)
        self.program_steps += 1
        return True

    def _is_last(self, step: int) -> bool:
        """Whether this is the last step of the loop. It runs as Python, because the block goes on after it."""
        steps = self._mediator.steps
        return isinstance(steps, range) and step >= steps.stop - 1

    def count_stop(self, value: Any) -> Any:
        """Count a stop of the block. If the step is watched, return a copy of ``value``, the value that the block gets."""
        self._known.stops += 1
        return None if self._watched is None else _copied(value)

    def note_result(self, location: str, before: Any, value: Any) -> None:
        """In a watched step, note the value that the block has left at ``location``. ``before`` is the value that it got."""
        if self._watched is not None:
            self._watched[location] = before, _copied(value)

    def unwatch(self) -> None:
        """Stop watching this step."""
        if self._watched is not None:
            self._watched = self._known.watcher = None

    def close(self) -> None:
        """Drop all references to variables of the block, which has ended. The attributes for the report stay."""
        self.unwatch()
        self._cells, self._globals, self._others, self.parameters = {}, {}, (), {}

    # -- programs --------------------------------------------------------------------------------------------------------

    def _variable(self, name: str) -> Any:
        cell = self._cells.get(name)
        if cell is None:
            return self._globals[name] if name in self._globals else vars(builtins)[name]
        try:
            return cell.cell_contents
        except ValueError:
            raise KeyError(name) from None

    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self) -> None:
        """Record a program of the watched step, or note why that is impossible."""
        known, mediator, watched = self._known, self._mediator, self._watched or {}
        self.unwatch()
        try:
            if not isinstance(mediator.steps, range) or mediator.steps.step != 1:
                raise NotPlainError("the loop skips steps")
            loop = loop_of(self._block, self._variable)
            known.programs[:] = [entry for entry in known.programs if entry.is_alive]
            if len(known.programs) == _MAX_PROGRAMS:
                raise NotPlainError(f"variables that are no parameters have had more than {_MAX_PROGRAMS} different values")
            values = {location: before for location, (before, _) in watched.items()}
            tree: Any = mediator.interleaver and mediator.interleaver.tree
            program = recorded(self._block, loop, self._globals, values, tree)
            if program.added and not self._appends:
                raise NotPlainError("it fills a list, and code that reads the stream could see the list in each step")
            check_apart(loop, program.parameters, self._block, self._others)
            compare(program, loop.used, watched)
            converted = self._programs.convert(program)
            if not converted.parts:
                raise NotPlainError("its steps have no effect")
        except NotPlainError as error:
            known.why = self.why = str(error)
            return
        read = program.others.read(self._variable)
        alive = [weakref.ref(item) for item in (*read.objects, *read.tensors) if type(item).__weakrefoffset__] if read else []
        known.programs.append(_Recorded(converted, self._key_of(program, False), alive))

    def _fits(self, entry: _Recorded) -> bool:
        """Whether a program fits the present values of the variables."""
        recorded = entry.program.recorded
        if (recorded.added and not self._appends) or self._key_of(recorded, False) != entry.found or not entry.is_alive:
            return False
        try:
            now = {name: self._variable(name) for name in recorded.loop.used}
            check_apart(recorded.loop._replace(used=now), recorded.parameters, self._block, self._others)
        except NotPlainError as error:
            self.why = str(error)
            return False
        return True

    def _key_of(self, program: StepProgram | None, exact: bool) -> Any:
        """Return a comparison key for the variables of a program, or ``None`` if one of them is missing or has another type.

        For tensors, the key has their identity and version. For parameters, it has only type and shape, unless it is ``exact``.
        """
        assert program is not None
        read = program.others.read(self._variable)
        if read is None:
            return None
        found: list[Any] = [*read.key, *(_identity(tensor) for tensor in read.tensors)]
        try:
            for name in program.added:
                value = self._variable(name)
                found.append(id(value) if exact else type(value))
            for name in program.parameters:
                value = self._variable(name)
                found.append(_identity(value) if exact else _kind(value))
        except KeyError:
            return None
        return found

    # -- parking ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _park(self, program: Any) -> None:
        mediator, recorded = self._mediator, program.recorded
        assert mediator.waiting is not None and mediator.interleaver is not None
        self.program, self._recorded, self._since = program, recorded, mediator.waiting[1]
        self._found = self._key_of(recorded, True)
        self._lists = {name: self._variable(name) for name in recorded.added}
        self.parameters = {name: torch.as_tensor(self._variable(name)).detach() for name in recorded.parameters}
        mediator.interleaver.waited.remove(mediator.waiting[0])

    def take(self, values: Mapping[str, torch.Tensor], row: int) -> None:
        """Keep the values of a step for the lists of the block. ``row`` is the row of this request in each of them."""
        if self._lists:
            self._taken.append((values, row))

    @torch.inference_mode(False)
    def resume(self, step: int) -> None:
        """Let the block go on as Python with ``step``, as if it had run all earlier steps itself."""
        program, mediator, self.program = self._recorded, self._mediator, None
        assert program is not None and mediator.waiting is not None and mediator.interleaver is not None
        location = mediator.waiting[0]
        mediator.interleaver.waited.add(location)
        mediator.waiting = location, step
        mediator.iteration = mediator.made = step
        if step > self._since:
            mediator.visited = program.last, step - 1
        taken, self._taken = self._taken, []
        for values, row in taken:
            fill = functools.partial(_row_of, values, row, {})
            for name, added in program.added.items():
                self._lists[name].extend(pytree.tree_map(fill, item) for item in added)
        self._lists, self._found = {}, None


def _row_of(values: Mapping[str, torch.Tensor], row: int, made: dict[str, torch.Tensor], leaf: Any) -> Any:
    """Return the row of the value for which the :class:`.PartValue` ``leaf`` stands, or another leaf itself. ``made`` caches rows."""
    if not isinstance(leaf, PartValue):
        return leaf
    if leaf.name not in made:
        made[leaf.name] = leaf.dressed(values[leaf.name][row].clone())
    return made[leaf.name]


def _is_followed() -> bool:
    """Whether a tracer follows each line, or a torch function mode each call of torch."""
    return sys.gettrace() is not None or bool(torch._C._len_torch_function_stack())


def _identity(value: Any) -> Any:
    """Return an identity for ``value`` that changes when it is edited in place. Edits of inference-mode tensors cannot be detected."""
    if not isinstance(value, torch.Tensor):
        return value
    return id(value), None if value.is_inference() else value._version


def _kind(value: Any) -> Any:
    """Return the properties in which all values of a parameter have to agree."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return type(value), value.shape, value.dtype, value.device, value.requires_grad, value.is_inference()


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)
