"""The turn-taking between a model and the blocks written against it.

A *driver* walks the model and calls :meth:`Interleaver.handle` with the value at each location. ``handle`` gives the value to every
mediator that waits there, lets each run until it waits for something else, and returns the value as they left it. All effects of a block on
a run (reads, edits, replacements) happen inside this call, so a feature implemented here works under every driver: eager modules, the taps
of a captured graph, an inference engine.

One interleaver is one run. The active one is in a context variable and never on the model, so two threads can trace one model at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .errors import EarlyStopException, OutOfOrderError, never_reached_message, uncounted_message
from .rows.batching import join_rows

if TYPE_CHECKING:
    from .cache import Cache
    from .mediator import Mediator

#: The run of this thread and context, to be set.
active_run: ContextVar[Interleaver | None] = ContextVar("nnsight_interleaver", default=None)

#: The run of this thread and context, or ``None``. Bound method: called once for every module call of a run.
active_interleaver = active_run.get

#: The location of a block that waits for a step: whichever location occurs next with a certain number.
ANYWHERE = ""

#: Appended to the location of an output: the returned value, for blocks that were given a deferred output there.
RETURNED = " (returned)"


def split_requester(requester: str) -> tuple[str, int | None]:
    """Return the location and the occurrence that ``requester`` names, as in ``x.i2``; ``None`` if it names no occurrence."""
    location, dot, number = requester.rpartition(".i")
    return (location, int(number)) if dot and number.isdecimal() else (requester, None)


class Waited(dict[str, int]):
    """Number of waiting mediators and observers by location. A driver offers values at these locations only."""

    __slots__ = ()

    def add(self, location: str) -> None:
        """Count one more at ``location``."""
        self[location] = self.get(location, 0) + 1
        if location == ANYWHERE:
            self.__class__ = Everywhere

    def remove(self, location: str) -> None:
        """Count one less at ``location``."""
        self[location] -= 1
        if not self[location]:
            del self[location]
            if location == ANYWHERE:
                self.__class__ = Waited


class Everywhere(Waited):
    """The same while a block waits for a step, which any location can begin."""

    __slots__ = ()

    def __contains__(self, location: object) -> bool:
        return True


class Interleaver:
    """One run: a model, the mediators of its blocks, and whose turn it is.

    As a context manager it starts the blocks and, in the end, ends them; ``tracer.stop()`` in a block is not an error then. A stop takes
    effect behind the location where it is called: others that wait for the same occurrence still get it.

    Args:
        mediators: The blocks, in the order in which they were defined.
        tracer: The tracer that makes the run, for blocks and drivers that ask, while the run lasts.
        on_blocks_done: Called once no block has code left to run, while the model may still have to.
    """

    def __init__(
        self,
        mediators: Iterable[Mediator] = (),
        tracer: Any = None,
        *,
        on_blocks_done: Callable[[], None] | None = None,
    ) -> None:
        self.mediators = list(mediators)
        self.tracer = tracer
        self.tree: Any = None  # the modules whose locations occur in this run, if they are those of one model
        self.recorder: Any = None  # records the blocks as data, if they run elsewhere; see `nnsight.program.record.recorder`
        self.stopped = False  # whether a block has called `tracer.stop()`
        self.failure: BaseException | None = None  # what a block raised, kept in case the model's own code catches it
        #: Functions that see values as they leave a location, each with the mediator whose rows it sees.
        self.observers: dict[str, list[tuple[Mediator, Callable[[Any], None]]]] = {}
        self.caches: list[tuple[Mediator, Cache]] = []  # each with the mediator whose rows it keeps
        self.skips: dict[str, dict[Mediator, Any]] = {}  # what modules return unrun, by location of the input and by mediator
        #: How intercepted calls call `handle`; a compiler sets it to keep itself out of the blocks' code.
        self.offer: Callable[[Interleaver, str, Any], Any] = Interleaver.handle
        #: Called with location, the model's value and the replacement; raises to refuse it.
        self.check_replacement: Callable[[str, Any, Any], None] | None = None
        #: Called with the path of a module or operation to skip, and what it returns instead; raises to refuse it.
        self.check_skip: Callable[[str, Any], None] | None = None
        #: Set by a driver that knows which locations can still come; called with the location of a request.
        self.check_location: Callable[[str], None] | None = None
        #: Where the run's result passes, if only its one block can change it after that: there the block's operations join the graph.
        self.output_location: str | None = None
        self.returns = True  # whether the caller uses what the model returns; otherwise only blocks do
        self.inputs: Sequence[Any] = ()  # tensors from outside whose calls a compiler records, and does not make at once
        self.deferred_outputs: list[Any] | None = None  # deferred outputs that blocks were given; `None` under a driver without them
        self.uncounted: set[str] = set()  # functions whose operations the run passed before a block mentioned one of them
        self._on_blocks_done = on_blocks_done
        self.waited = Waited()  # number of mediators waiting, by location; a driver calls `handle` for these
        self.counts: Counter[str] = Counter()  # how often the run has passed each location; a driver counts the others itself
        self.current: Mediator | None = None  # the mediator whose code is running; `None` while the model runs
        self.visits: list[tuple[str, int]] = []  # locations and occurrences that are being handled; a block can call modules in one
        self._lending: list[Mediator | None] = []  # blocks that have lent their turn to a module that they call
        self.ready: list[Mediator] = []  # those that can go on as soon as the running one waits
        self._token: Any = None

    def __enter__(self) -> Interleaver:
        """Make this the active run and let every block run to the first location it waits for."""
        self._token = active_run.set(self)
        try:
            for mediator in self.mediators:
                mediator.start(self)
                self.run_ready()
            self.end_if_stopped()
        except BaseException:
            self.cancel()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.cancel()
        return isinstance(error, EarlyStopException)

    @property
    def interleaving(self) -> bool:
        """Whether this run is active."""
        return self._token is not None

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        """Offer ``value`` to the mediators waiting at ``location``.

        Returns the value with which the model continues. Only if ``iterate`` is false may ``location`` have a number, as in ``x.i2``.
        """
        if not iterate:
            location, given = split_requester(location)
            if given is not None:
                self.counts[location] = given
        occurrence = self.counts.get(location, 0)
        self.counts[location] = occurrence + 1
        if location not in self.waited:
            return value
        self.visits.append((location, occurrence))
        served = True
        while served and location in self.waited:  # one visit can lead another block to ask for the same location
            served = False
            for mediator in self.mediators:
                if mediator.waits_at(location, occurrence):
                    value = mediator.visit(location, occurrence, value)
                    served = True
                    if self.ready:
                        self.run_ready()
        if self.observers:
            for mediator, observer in self.observers.get(location, ()):
                group = mediator.batch_group
                observer(value if group is None else group.narrow(value, location, occurrence))
        self.visits.pop()
        self.end_if_stopped()
        return value

    @property
    def at(self) -> tuple[str, int] | None:
        """The location and occurrence that is being handled, the innermost one."""
        return self.visits[-1] if self.visits else None

    def end_if_stopped(self) -> None:
        """End the run, by an :class:`EarlyStopException`, if a block has stopped it."""
        if self.stopped:
            raise EarlyStopException

    def handle_returned(self, location: str, value: Any) -> Any:
        """Offer the returned output at ``location`` to the mediators that got a deferred output there and wait for the value."""
        occurrence = self.counts[location] - 1
        self.visits.append((location, occurrence))
        for mediator in self.mediators:
            while mediator.waits_at(location + RETURNED, occurrence):
                value = mediator.visit(location, occurrence, value)
                self.run_ready()
        self.visits.pop()
        self.end_if_stopped()
        return value

    def begin_step(self, location: str) -> None:
        """Let the mediators go on that wait for the step that the next occurrence of ``location`` begins, without its value."""
        begun = location, self.counts.get(location, 0)
        self.visits.append(begun)
        for mediator in self.mediators:
            if mediator.awaits_step and mediator.waits_at(*begun):
                mediator.proceed()
                self.run_ready()
        self.visits.pop()
        self.end_if_stopped()

    def observe(self, location: str, observer: Callable[[Any], None], mediator: Mediator | None = None) -> None:
        """Call ``observer`` with each later value that leaves ``location``: the rows of ``mediator``, by default the running one."""
        mediator = mediator or self.current
        assert mediator is not None
        self.observers.setdefault(location, []).append((mediator, observer))
        self.waited.add(location)

    def check_request(self, location: str) -> None:
        """Raise if this run can never offer ``location``."""
        if self.uncounted and location.rpartition(".source.")[0] in self.uncounted:
            raise OutOfOrderError(uncounted_message(location))
        if self.check_location is not None:
            self.check_location(location)

    def take_skip(self, location: str) -> tuple[Any, ...]:
        """Return, in a tuple, the value that the module whose input is at ``location`` returns unrun; an empty tuple if it runs.

        Raises:
            ValueError: If some invokes skip the module and others, in the same batch, do not.
        """
        asked = self.skips.pop(location, None)
        if asked is None:
            return ()
        whole = [value for mediator, value in asked.items() if mediator.batch_group is None]
        if whole:
            return (whole[-1],)
        by_group = {mediator.batch_group: value for mediator, value in asked.items() if mediator.batch_group is not None}
        groups = sorted(by_group, key=lambda group: group.start)
        if sum(group.size for group in groups) != groups[0].total:
            raise ValueError(
                f"`{location.removesuffix('.input')}` is skipped by some invokes and not by others. They run as one batch, "
                "so skip it in all of them."
            )
        output = f"{location.removesuffix('.input')}.output"
        return (join_rows([by_group[group] for group in groups], groups, output, self.counts.get(output, 0)),)

    def add(self, mediator: Mediator) -> None:
        """Add a block to the run and let it run to the first location it waits for."""
        self.mediators.append(mediator)
        mediator.start(self)
        self.run_ready()

    def lend_turn(self) -> None:
        """Let calls of modules pass their locations although a block makes them, up to :meth:`take_turn_back`."""
        self._lending.append(self.current)
        self.current = None

    def take_turn_back(self) -> None:
        """End what :meth:`lend_turn` began."""
        self.current = self._lending.pop()

    def run_ready(self) -> None:
        """Let the blocks go on that a barrier has released."""
        while self.ready:
            self.ready.pop(0).proceed()

    def is_waited(self, location: str) -> bool:
        """Whether a block or an observer waits for the next occurrence of ``location``."""
        if location not in self.waited:
            return False
        if location in self.observers:
            return True
        occurrence = self.counts.get(location, 0)
        for mediator in self.mediators:  # noqa: SIM110 - asked at every module, and a generator would take as long again
            if mediator.waits_at(location, occurrence):
                return True
        return False

    @property
    def awaited_steps(self) -> set[int]:
        """The steps that blocks wait for to begin, which any location can do."""
        return {mediator.waiting[1] for mediator in self.mediators if mediator.waiting is not None and mediator.awaits_step}

    def release(self) -> None:
        """Drop what only finished blocks could still have used. Drivers call it before they decide what to keep."""
        if self._on_blocks_done is not None and not any(mediator.alive for mediator in self.mediators):
            self._on_blocks_done()
            self._on_blocks_done = None

    def finish(self) -> None:
        """End the blocks after the model has returned, or was stopped; one in a loop over occurrences ends with a warning.

        Edits of the model that wait for what lies behind a stop end without one.

        Raises:
            OutOfOrderError: At the user's line, for a block that still waits for a location.
            AttributeError: Likewise, if there is no such operation in a function that only the run could tell.
        """
        for mediator in self.mediators:
            request = mediator.waiting
            if self.stopped and mediator.is_edit:
                continue
            if request is not None and mediator.loops:
                mediator.leave_loop()
            elif request is not None:
                location, occurrence = request
                calls, visited = self.counts.get(location, 0), mediator.last_visited
                unknown = None if self.tree is None else self.tree.unknown_operation(location)
                message = never_reached_message(location, occurrence, calls, visited, self.stopped)
                mediator.throw(AttributeError(unknown) if unknown else OutOfOrderError(message))

    def end_blocks(self) -> None:
        """End the blocks that still run, where they wait; their ``finally`` clauses run."""
        for mediator in self.mediators:
            mediator.cancel()

    def cancel(self) -> None:
        """End whatever still runs and stop being the active run."""
        self.end_blocks()
        if self._token is not None:
            active_run.reset(self._token)
            self._token = None
        self.mediators = []
        self.tracer = self.tree = self.recorder = None
        self.observers.clear()
        self.caches.clear()
        self.check_replacement = self.check_skip = self.check_location = self.deferred_outputs = None
        self.waited.clear()
        self._on_blocks_done = None
