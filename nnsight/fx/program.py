"""Programs: what a block does to one captured graph, as data.

A program is a sequence of events. ``Visit`` stops at a tap and names the tensors there as values; ``Call`` applies a
torch function to values, inputs of the graph, externals and constants, and names its results; ``Write`` replaces a
tensor of the tap where the block stands. Values are numbered in the order in which they appear, so two runs of a block that
do the same thing yield equal programs, whatever the tensors behind them.

The programs known for a captured graph form a tree of :class:`State`: one step per event. A run walks down this tree
while its block executes. As long as each event is known nothing needs to be computed, recorded or hashed
as a whole, and the state at the end holds the compiled variant. Only an event without an edge is recorded. The block's
own Python always runs, exactly once, so no assumption about its side effects is needed to reuse a program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Value(NamedTuple):
    """A tensor of this program, by number."""

    index: int
    tag: str = "value"  # named tuples compare as tuples: the tag tells the three references apart


class Input(NamedTuple):
    """An input of the captured graph, by position."""

    index: int
    tag: str = "input"


class External(NamedTuple):
    """A tensor from outside the graph, by order of first use; becomes an input of the spliced graph."""

    index: int
    tag: str = "external"


class Constant(NamedTuple):
    """A number with its type, because ``1 == 1.0 == True``."""

    kind: type
    value: Any


class Number(NamedTuple):
    """A Python number that varies between runs, by order of first use; becomes an input of the spliced graph."""

    index: int
    kind: type
    tag: str = "number"


class Nest(NamedTuple):
    """A container among the arguments of a call: a tuple, list or slice."""

    kind: str
    items: tuple[Any, ...]

    def build(self, items: list[Any]) -> Any:
        """Return the container with ``items`` in place of what they stand for."""
        return items if self.kind == "list" else slice(*items) if self.kind == "slice" else tuple(items)


class Visit(NamedTuple):
    """The block stops at tap number ``tap``; the leaves ``fresh`` become the next values."""

    tap: int
    fresh: tuple[int, ...]


class Symbol(NamedTuple):
    """A symbolic size of the captured graph, by position."""

    position: int
    tag: str = "symbol"


class Declare(NamedTuple):
    """The next external is a tensor like this.

    A size that equals one of the graph's symbolic sizes is taken to vary with it (torch calls this duck shaping), so
    noise of the shape of a hidden state is the same program for every prompt length. Any other size or stride that varies is a
    number of the program. ``stride`` is ``None`` for a contiguous tensor.
    """

    shape: tuple[int | Symbol | Number, ...]
    stride: tuple[int | Number, ...] | None
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: type


class Call(NamedTuple):
    """A torch function applied to values.

    ``grad`` is the block's grad mode when it differs from the graph's, else ``None``.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    grad: bool | None


class Results(NamedTuple):
    """The call before returned a container like this: how many tensors `unbind` gives depends on sizes, which may differ
    between runs of one graph.
    """

    structure: Any
    leaves: tuple[Any, ...]


class Write(NamedTuple):
    """Tensor number ``leaf`` at tap number ``tap`` is replaced by ``source``."""

    tap: int
    leaf: int
    source: Value | Input | External


class Skip(NamedTuple):
    """The nodes from tap number ``tap`` to tap number ``until`` are left out; ``sources`` stand for the tensor leaves of
    the latter, by number of the leaf.
    """

    tap: int
    until: int
    sources: tuple[tuple[int, Value | Input | External], ...]
    tag: str = "skip"


class Enter(NamedTuple):
    """A function begins that an operator will call; its arguments, which are like ``operands``, are the next values."""

    operands: tuple[Value | Input | External, ...]
    tag: str = "enter"


class Leave(NamedTuple):
    """The function that began last ends, and returns ``results``, or the only one of them itself."""

    results: tuple[Value | Input | External, ...]
    is_single: bool
    tag: str = "leave"


class Apply(NamedTuple):
    """An operator is called with the latest ``count`` functions and then ``groups`` of tensors, to the last of which comes what
    the functions use from around them; its results are the next values.
    """

    operator: Callable[..., Any]
    count: int
    groups: tuple[tuple[Value | Input | External, ...], ...]
    tag: str = "apply"

    @property
    def operands(self) -> tuple[Value | Input | External, ...]:
        """All tensors it is given itself."""
        return tuple(operand for group in self.groups for operand in group)


class Cut(NamedTuple):
    """The graph is cut at tap number ``tap``; the values ``returned`` are needed behind the cut."""

    tap: int
    returned: tuple[int, ...]
    tag: str = "cut"


Event = Visit | Declare | Call | Results | Write | Skip | Enter | Leave | Apply | Cut
Reference = Value | Input | External


@dataclass(frozen=True)
class Outcome:
    """What a call returned: a nest of tensors, the values that are new among them, and their fakes.

    Attributes:
        structure: ``TreeSpec`` of the result.
        leaves: For each leaf the number of its value, or a leaf that is no tensor wrapped in a one-element tuple, or, for an edit
            in place of a tensor from outside, the reference to that.
        paths: For each leaf the indices (or attribute names) that lead to it.
        fakes: Fake tensors of the new values, in order of their numbers.
        requires_grad: Whether they require gradients; ``None`` if that is not known before the graph runs.
        gains_grad: Whether the call edits a tensor in place so that it requires a gradient from here on; or ``None``.
    """

    structure: Any
    leaves: tuple[Any, ...]
    paths: tuple[tuple[Any, ...], ...]
    fakes: tuple[torch.Tensor, ...]
    requires_grad: tuple[bool | None, ...]
    gains_grad: bool | None = False

    @property
    def is_differentiated(self) -> bool:
        """Whether autograd may follow the call."""
        return any(wants is not False for wants in (*self.requires_grad, self.gains_grad))

    @property
    def results(self) -> Results:
        """What tells this outcome from others of the same call."""
        return Results(self.structure, self.leaves)


@dataclass(eq=False)
class Family:
    """Events at one state that differ in numbers alone.

    Attributes:
        event: The first of them.
        values: Its numbers, in order.
        varying: Which of them have had other values; ``None`` if they must stay constants.
    """

    event: Event
    values: tuple[int | float, ...]
    varying: frozenset[int] | None = frozenset()


@dataclass(eq=False)
class State:
    """One step of a known program.

    Attributes:
        parent: The state before, ``None`` for the start.
        event: What led here.
        position: Number of the tap at which the event happened.
        edges: The states after, by event.
        outcomes: Result of the event's call, by the sizes the symbols of the graph and the integers of the program had.
        families: Events after this state that differ in numbers alone, by what they share.
        twin: The state of an earlier run that did the same with constants for numbers.
        stack_trace: The user's line, as torch shows it in graphs.
        variants: Compiled graphs of the program that ends here, by what they return.
        wanting: If a tap was visited, whether the new values require gradients; see :mod:`~nnsight.fx.recording.autograd_state`.
        behind: If the graph was cut here, the piece behind and what it takes.
    """

    parent: State | None = None
    event: Event | None = None
    position: int = -1
    edges: dict[Event, State] = field(default_factory=dict)
    outcomes: dict[tuple[int, ...], Outcome] = field(default_factory=dict)
    families: dict[Event, Family] = field(default_factory=dict)
    twin: State | None = None
    stack_trace: str = ""
    variants: dict[Any, Any] = field(default_factory=dict)
    wanting: tuple[bool | None, ...] | None = None
    behind: tuple[Any, tuple[Any, ...]] | None = None

    def program(self) -> Program:
        """Return the program that ends at this state and began at the start or the latest cut."""
        steps: list[Step] = []
        state: State | None = self
        results: Results | None = None
        while state is not None and state.event is not None and not isinstance(state.event, Cut):
            fitting = (outcome for outcome in state.outcomes.values() if results in (None, outcome.results))
            steps.append(Step(state.position, state.event, next(fitting, None), state.stack_trace))
            results = state.event if isinstance(state.event, Results) else None
            state = state.parent
        return Program(tuple(reversed(steps)))


class Step(NamedTuple):
    """An event of a program, the tap at which it happens, what a call returned, and the user's line."""

    position: int
    event: Event
    outcome: Outcome | None
    stack_trace: str

    def __str__(self) -> str:
        found = re.search(r'File "([^"]*)", line (\d+)', self.stack_trace) if isinstance(self.event, Call) else None
        return _shown(self.event) + (f"  # {found.group(1).rsplit('/', 1)[-1]}:{found.group(2)}" if found else "")


@dataclass(frozen=True)
class Program:
    """A block's effect on one captured graph.

    Two programs are equal if their events are; the lines of the user that led to them do not count.

    Attributes:
        steps: The events in order.
    """

    steps: tuple[Step, ...]

    def _events(self) -> tuple[Any, ...]:
        return tuple((type(step.event).__name__, step.position, step.event) for step in self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._events() == other._events()

    def __hash__(self) -> int:
        return hash(self._events())

    def __str__(self) -> str:
        return "\n".join(f"@{step.position} {_shown(step.event)}" for step in self.steps)


def _shown(event: Event) -> str:
    if isinstance(event, Call):
        name = getattr(event.function, "__name__", repr(event.function))
        parts = [_shown_argument(argument) for argument in event.args]
        parts += [f"{key}={_shown_argument(argument)}" for key, argument in event.kwargs]
        return f"call {name}({', '.join(parts)})"
    if isinstance(event, Write):
        return f"write leaf {event.leaf} = {_shown_argument(event.source)}"
    if isinstance(event, Skip):
        return f"skip to @{event.until}"
    if isinstance(event, (Enter, Leave, Apply)):
        tensors = ", ".join(map(_shown_argument, event.results if isinstance(event, Leave) else event.operands))
        return f"{event.operator if isinstance(event, Apply) else event.tag} {tensors}"
    if isinstance(event, Results):
        return f"results {len(event.leaves)}"
    if isinstance(event, Declare):
        sizes = ", ".join(_shown_argument(size) for size in event.shape)
        return f"external {event.dtype} [{sizes}] {event.device}"
    return "visit"


def _shown_argument(argument: Any) -> str:
    if isinstance(argument, Value):
        return f"%{argument.index}"
    if isinstance(argument, Input):
        return f"input {argument.index}"
    if isinstance(argument, External):
        return f"external {argument.index}"
    if isinstance(argument, Number):
        return f"number {argument.index}"
    if isinstance(argument, Symbol):
        return f"s{argument.position}"
    if isinstance(argument, Constant):
        return repr(argument.value)
    if isinstance(argument, Nest):
        return f"{argument.kind}({', '.join(_shown_argument(item) for item in argument.items)})"
    return repr(argument)
