"""Loops over steps that go on as programs.

A block begins as Python, which shows that it asks for locations in the order of the model, and which values it gets there. When its loop
has taken so many stops that a recording pays (:data:`STOPS`), and its body can be a program (:mod:`.plain`), one step of it is recorded
(:mod:`.recording`), and compared with what its Python has left in that step. From then on the block is *parked*. It waits where its next
step begins, and the program does its steps, together with those of all other requests with the same body.

Before anything that its Python could notice, the block is *resumed*, as if it had made these steps itself: it has the number of the
present step, and its lists have the values of the others. That is so before the last step of a bounded loop, at an error, when a variable
has got another value, and at the end.

Steps of a prompt always run as Python, as does each block that cannot be a program; :attr:`Steps.why` says why.
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
from .recording import Made, StepProgram, compare, recorded

#: Stops of a block, of all its requests together, before it is recorded. A stop costs about 0.05 ms, and the recording of one about 50 ms.
STOPS = 1000

#: Most programs that one block may have, with other values of what is no parameter.
_MOST = 8


@dataclass(frozen=True, eq=False)
class _Entry:
    """A recorded program, for what the block found outside, see :func:`_look`; ``objects`` are the objects among that."""

    program: Any
    found: Any
    objects: Sequence[weakref.ref[Any]]

    @property
    def is_alive(self) -> bool:
        return all(reference() is not None for reference in self.objects)


@dataclass(eq=False)
class _Known:
    """What is known of a block: its recorded programs, each with what it found outside, or why there can be none."""

    stops: int = 0
    why: str = ""
    programs: list[_Entry] = field(default_factory=list)
    watcher: Steps | None = None  # the request that is watched in this step


class BlockPrograms:
    """The programs of the blocks of an engine; ``made`` makes what a request runs of a recorded program."""

    def __init__(self, made: Callable[[StepProgram], Any]) -> None:
        self.made = made
        self._known: weakref.WeakKeyDictionary[Block, _Known] = weakref.WeakKeyDictionary()

    def of(self, block: Block) -> _Known:
        return self._known.setdefault(block, _Known())


class Steps:
    """The steps of one request with one ``block``, run by ``mediator``, whose ``function`` has not begun.

    ``others`` are the blocks of the other requests of the trace. ``lists`` says whether lists may be filled when the block is resumed.

    Attributes:
        program: What the request runs in place of its block; ``None`` while the block runs.
        parameters: The values of its parameters, by name.
        made: In how many steps a program has run.
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
        self._watched: dict[str, tuple[Any, Any]] | None = None  # the values before and behind the block, by location
        self._since = 0
        self.program: Any = None
        self.parameters: dict[str, torch.Tensor] = {}
        self.made = 0
        self.why = ""

    # -- at the beginning of a step --------------------------------------------------------------------------------------

    def settle(self, step: int, single: bool, alone: bool) -> bool:
        """Park or resume the block before a step; return whether that changed what the request does.

        Args:
            step: The number of the step.
            single: Whether the step has one row of the request, behind those that it has had.
            alone: Whether no other block works on the values of the request.
        """
        if self.program is not None:
            if single and alone and not self._is_last(step) and not _is_followed() and self._look(self._recorded, True) == self._found:
                self.made += 1
                return False
            self.resume(step)
            return True
        known, mediator, watcher = self._known, self._mediator, self._known.watcher
        if watcher is not None and watcher._watched:  # the step is over
            watcher._record()
        self.why = known.why
        if known.why or known.stops <= STOPS or not single or self._is_last(step):
            return False
        if mediator.waiting is None or mediator.waiting[1] != step or mediator.loops != 1 or not alone or _is_followed():
            self.why = "other Python looks at its values, or follows it"
            return False
        program = next((entry.program for entry in known.programs if self._fits(entry)), None)
        if program is None:
            if known.watcher is None and len(known.programs) <= _MOST:
                self._watched, known.watcher = {}, self
            return False
        if mediator.waiting[0] != next(iter(program.parts)):
            return False
        self._park(program)
        self.made += 1
        return True

    def _is_last(self, step: int) -> bool:
        """Whether this is the last step of the loop, which runs as Python: behind it the block goes on."""
        steps = self._mediator.steps
        return isinstance(steps, range) and step >= steps.stop - 1

    def stopped(self, value: Any) -> Any:
        """Count a stop of the block with a value; return a copy of it if the step is watched."""
        self._known.stops += 1
        return None if self._watched is None else _copied(value)

    def left(self, location: str, before: Any, value: Any) -> None:
        """Note what the block has left at a location, in a step that is watched."""
        if self._watched is not None:
            self._watched[location] = before, _copied(value)

    def unwatch(self) -> None:
        """Watch this step no longer."""
        if self._watched is not None:
            self._watched = self._known.watcher = None

    def close(self) -> None:
        """Keep nothing of the block, which has ended, but the report."""
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
        """Record the step that was watched."""
        known, mediator, watched = self._known, self._mediator, self._watched or {}
        self.unwatch()
        try:
            if not isinstance(mediator.steps, range) or mediator.steps.step != 1:
                raise NotPlainError("the loop leaves steps out")
            loop = loop_of(self._block, self._variable)
            known.programs[:] = [entry for entry in known.programs if entry.is_alive]
            if len(known.programs) == _MOST:
                raise NotPlainError(f"it has had more than {_MOST} different values of what is no parameter")
            values = {location: before for location, (before, _) in watched.items()}
            tree: Any = mediator.interleaver and mediator.interleaver.tree
            program = recorded(self._block, loop, self._globals, values, tree)
            if program.added and not self._appends:
                raise NotPlainError("it fills a list, which a stream shows in each step")
            check_apart(loop, program.parameters, self._block, self._others)
            compare(program, loop.used, watched)
        except NotPlainError as error:
            known.why = self.why = str(error)
            return
        read = program.others.read(self._variable)
        alive = [weakref.ref(item) for item in (*read.objects, *read.tensors) if type(item).__weakrefoffset__] if read else []
        known.programs.append(_Entry(self._programs.made(program), self._look(program, False), alive))

    def _fits(self, entry: _Entry) -> bool:
        """Whether a program is for what the block finds outside now."""
        recorded = entry.program.recorded
        if (recorded.added and not self._appends) or self._look(recorded, False) != entry.found or not entry.is_alive:
            return False
        try:
            now = {name: self._variable(name) for name in recorded.loop.used}
            check_apart(recorded.loop._replace(used=now), recorded.parameters, self._block, self._others)
        except NotPlainError as error:
            self.why = str(error)
            return False
        return True

    def _look(self, program: StepProgram | None, exact: bool) -> Any:
        """Return what distinguishes the variables of a program from others; ``None`` if they are of other kinds.

        Tensors differ by their identity and version. Unless it is to be ``exact``, only the form of parameters matters.
        """
        assert program is not None
        read = program.others.read(self._variable)
        if read is None:
            return None
        found: list[Any] = [*read.key, *(_mark(tensor) for tensor in read.tensors)]
        try:
            for name in program.added:
                value = self._variable(name)
                found.append(id(value) if exact else type(value))
            for name in program.parameters:
                value = self._variable(name)
                found.append(_mark(value) if exact else _form(value))
        except KeyError:
            return None
        return found

    # -- parking ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _park(self, program: Any) -> None:
        mediator, recorded = self._mediator, program.recorded
        assert mediator.waiting is not None and mediator.interleaver is not None
        self.program, self._recorded, self._since = program, recorded, mediator.waiting[1]
        self._found = self._look(recorded, True)
        self._lists = {name: self._variable(name) for name in recorded.added}
        self.parameters = {name: torch.as_tensor(self._variable(name)).detach() for name in recorded.parameters}
        mediator.interleaver.waited.remove(mediator.waiting[0])

    def take(self, values: Mapping[str, torch.Tensor], row: int) -> None:
        """Keep the values of a step for the lists of the block; those of the request are a row of each."""
        if self._lists:
            self._taken.append((values, row))

    @torch.inference_mode(False)
    def resume(self, step: int) -> None:
        """Let the block go on with a step, as if it had made all steps before."""
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
            fill = functools.partial(_made, values, row, {})
            for name, added in program.added.items():
                self._lists[name].extend(pytree.tree_map(fill, item) for item in added)
        self._lists, self._found = {}, None


def _made(values: Mapping[str, torch.Tensor], row: int, made: dict[str, torch.Tensor], leaf: Any) -> Any:
    """Return a row of the value whose place is ``leaf``, the same for the same place; any other leaf as it is."""
    if not isinstance(leaf, Made):
        return leaf
    if leaf.name not in made:
        made[leaf.name] = leaf.dressed(values[leaf.name][row].clone())
    return made[leaf.name]


def _is_followed() -> bool:
    """Whether something follows each line, or each call of torch."""
    return sys.gettrace() is not None or bool(torch._C._len_torch_function_stack())


def _mark(value: Any) -> Any:
    """Return what is another one after an edit; that of a tensor of inference mode cannot be noticed."""
    if not isinstance(value, torch.Tensor):
        return value
    return id(value), None if value.is_inference() else value._version


def _form(value: Any) -> Any:
    """Return what the values of a parameter have in common."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return type(value), value.shape, value.dtype, value.device, value.requires_grad, value.is_inference()


def _copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)
