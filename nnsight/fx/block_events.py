"""The events of a block: its effects on one captured graph, as data.

The events of a run are the block's program for that graph. (A :class:`nnsight.program.Program` is another kind: it knows locations but no
graph.) ``Visit`` stops at a tap and numbers the tensors there as values. ``Call`` applies a torch function to values, inputs of the graph,
externals and constants, and numbers its results. ``Write`` replaces a tensor of the current tap. Values are numbered in order, so two runs
that do the same thing yield equal programs, whatever tensors they use.

The programs known for a captured graph form a tree of :class:`State`, with one edge per event. A run walks down this tree while its block
executes. Only an event without an edge is recorded, and the last state holds the compiled variant. In such a run the Python of the block
executes exactly once, so reusing a program assumes nothing about side effects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class ValueNumber(NamedTuple):
    """A tensor of this program, by number."""

    index: int
    tag: str = "value"  # named tuples compare as tuples: the tag keeps references of different types unequal


class Input(NamedTuple):
    """An input of the captured graph, by position."""

    index: int
    tag: str = "input"


class External(NamedTuple):
    """A tensor from outside the graph, numbered by first use. It becomes an input of the spliced graph."""

    index: int
    tag: str = "external"


class Constant(NamedTuple):
    """A Python constant with its type, because ``1 == 1.0 == True``."""

    kind: type
    value: Any


class Number(NamedTuple):
    """A Python number that varies between runs, numbered by first use. It becomes an input of the spliced graph."""

    index: int
    kind: type
    tag: str = "number"


class Nest(NamedTuple):
    """A container among the arguments of a call: a tuple, list or slice."""

    kind: str
    items: tuple[Any, ...]

    def build(self, items: list[Any]) -> Any:
        """Return the container with ``items`` as its items."""
        return items if self.kind == "list" else slice(*items) if self.kind == "slice" else tuple(items)


class Visit(NamedTuple):
    """The block stops at tap number ``tap``. Its leaves with the numbers ``fresh`` become the next values."""

    tap: int
    fresh: tuple[int, ...]


class Symbol(NamedTuple):
    """A symbolic size of the captured graph, by its position in ``CapturedGraph.symbols``."""

    position: int
    tag: str = "symbol"


class Declare(NamedTuple):
    """The metadata of the next external.

    A size that equals one of the graph's symbolic sizes varies with it (duck shaping in torch). So noise in the shape of a hidden state is
    the same program for every prompt length. Any other size or stride that varies is a number of the program. ``stride`` is ``None`` for a
    contiguous tensor.
    """

    shape: tuple[int | Symbol | Number, ...]
    stride: tuple[int | Number, ...] | None
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    kind: type


class Call(NamedTuple):
    """A torch function applied to values; ``grad`` is the block's grad mode if it differs from the graph's, else ``None``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    grad: bool | None

    def arguments(self, item_of: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with ``item_of(item)`` in place of each reference and number."""
        args = tuple(given(argument, item_of) for argument in self.args)
        return args, {name: given(argument, item_of) for name, argument in self.kwargs}


def given(argument: Any, item_of: Callable[[Any], Any]) -> Any:
    """Return ``argument`` with ``item_of(item)`` for references and numbers. No closure: a recursive one would keep ``item_of`` alive."""
    if isinstance(argument, (ValueNumber, Input, External, Number)):
        return item_of(argument)
    if isinstance(argument, Constant):
        return argument.value
    if isinstance(argument, Nest):
        return argument.build([given(item, item_of) for item in argument.items])
    return argument


class Results(NamedTuple):
    """The container that the preceding call returned. It can depend on sizes, as for `unbind`."""

    structure: Any
    leaves: tuple[Any, ...]


class Write(NamedTuple):
    """Leaf number ``leaf`` at tap number ``tap`` is replaced by ``source``."""

    tap: int
    leaf: int
    source: ValueNumber | Input | External


class Skip(NamedTuple):
    """The nodes between the taps ``tap`` and ``until`` are left out. ``sources`` pair each tensor leaf of ``until`` with its value."""

    tap: int
    until: int
    sources: tuple[tuple[int, ValueNumber | Input | External], ...]
    tag: str = "skip"


class Cut(NamedTuple):
    """The graph is cut at tap number ``tap``. The values ``returned`` become real tensors there."""

    tap: int
    returned: tuple[int, ...]
    tag: str = "cut"


Event = Visit | Declare | Call | Results | Write | Skip | Cut
Reference = ValueNumber | Input | External


@dataclass(frozen=True)
class Outcome:
    """The result of a call: a container of tensors, with the numbers and the fakes of the new values in it.

    Attributes:
        structure: ``TreeSpec`` of the result.
        leaves: For each leaf the number of its value. For an in-place edit of an external or an input: the reference to that tensor.
            A leaf that is not a tensor is wrapped in a one-element tuple.
        paths: For each leaf the indices (or attribute names) that lead to it.
        fakes: Fake tensors of the new values, in the order of their numbers.
        requires_grad: For each new value, whether it requires a gradient; ``None`` if this is not known before the graph runs.
        gains_grad: Whether an in-place edit makes a tensor require a gradient from here on; ``None`` if this is not known.
    """

    structure: Any
    leaves: tuple[Any, ...]
    paths: tuple[tuple[Any, ...], ...]
    fakes: tuple[torch.Tensor, ...]
    requires_grad: tuple[bool | None, ...]
    gains_grad: bool | None = False

    @property
    def results(self) -> Results:
        """The part of the outcome that can differ between runs of the same call."""
        return Results(self.structure, self.leaves)


@dataclass(eq=False)
class Family:
    """Events after one state that differ only in their numbers: the first ``event``, and its numbers in order.

    ``varying`` has the positions of the numbers that changed since; ``None`` if all of them must stay constants.
    """

    event: Event
    values: tuple[int | float, ...]
    varying: frozenset[int] | None = frozenset()


@dataclass(eq=False)
class State:
    """One step of a known program: a node in the tree of programs.

    Attributes:
        parent: The preceding state, ``None`` for the start.
        event: The event that led here.
        position: Number of the tap at which the event happened.
        edges: The following states, by event.
        outcomes: Results of the event's call, by the sizes of the graph's symbols and the integers of the program.
        families: Families of the events after this state, by the form that the events of a family share.
        twin: The state that an earlier run reached by the same events, with constants in place of numbers.
        stack_trace: The user's line, as torch shows it in graphs.
        variants: Variants of the program that ends here, by their end and their results.
        requires_grad: For a visit, whether each new value requires a gradient; see :mod:`~nnsight.fx.recording.autograd_state`.
        next_piece: For a cut, the next piece, and its inputs from earlier pieces.
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
    requires_grad: tuple[bool | None, ...] | None = None
    next_piece: tuple[Any, tuple[Any, ...]] | None = None

    @property
    def does_work(self) -> bool:
        """Whether the program that ends at this state calls, replaces or skips something, and does not only read locations."""
        state: State | None = self
        while state is not None and state.event is not None and not isinstance(state.event, Cut):
            if isinstance(state.event, (Call, Write, Skip)):
                return True
            state = state.parent
        return False

    def program(self) -> BlockEvents:
        """Return the program that ends at this state. It begins at the start or the latest cut."""
        steps: list[Step] = []
        state: State | None = self
        results: Results | None = None
        while state is not None and state.event is not None and not isinstance(state.event, Cut):
            fitting = (outcome for outcome in state.outcomes.values() if results in (None, outcome.results))
            steps.append(Step(state.position, state.event, next(fitting, None), state.stack_trace))
            results = state.event if isinstance(state.event, Results) else None
            state = state.parent
        return BlockEvents(tuple(reversed(steps)))


class Step(NamedTuple):
    """An event of a program, the number of the tap at which it happens, the outcome of a call, and the user's line."""

    position: int
    event: Event
    outcome: Outcome | None
    stack_trace: str

    def __str__(self) -> str:
        found = re.search(r'File "([^"]*)", line (\d+)', self.stack_trace) if isinstance(self.event, Call) else None
        return _shown(self.event) + (f"  # {found.group(1).rsplit('/', 1)[-1]}:{found.group(2)}" if found else "")


@dataclass(frozen=True)
class BlockEvents:
    """The program of a block for one captured graph: its steps in order. Objects with equal events are equal, whatever the user's lines."""

    steps: tuple[Step, ...]

    def _events(self) -> tuple[Any, ...]:
        return tuple((type(step.event).__name__, step.position, step.event) for step in self.steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockEvents) and self._events() == other._events()

    def __hash__(self) -> int:
        return hash(self._events())

    def __str__(self) -> str:
        return "\n".join(f"@{step.position} {_shown(step.event)}" for step in self.steps)


def _shown(event: Event) -> str:
    def listed(arguments: Iterable[Any]) -> str:
        return ", ".join(map(_shown_argument, arguments))

    match event:
        case Call():
            named = [f"{key}={_shown_argument(argument)}" for key, argument in event.kwargs]
            name = getattr(event.function, "__name__", repr(event.function))
            return f"call {name}({', '.join([*map(_shown_argument, event.args), *named])})"
        case Write():
            return f"write leaf {event.leaf} = {_shown_argument(event.source)}"
        case Skip():
            return f"skip to @{event.until}"
        case Results():
            return f"results {len(event.leaves)}"
        case Declare():
            return f"external {event.dtype} [{listed(event.shape)}] {event.device}"
    return "visit"


def _shown_argument(argument: Any) -> str:
    match argument:
        case ValueNumber():
            return f"%{argument.index}"
        case Input() | External() | Number():
            return f"{argument.tag} {argument.index}"
        case Symbol():
            return f"s{argument.position}"
        case Nest():
            return f"{argument.kind}({', '.join(map(_shown_argument, argument.items))})"
    return repr(argument.value if isinstance(argument, Constant) else argument)
