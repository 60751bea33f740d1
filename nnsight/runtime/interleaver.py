"""One run, in which a model and the blocks written against it take turns.

A *driver* runs the model and calls :meth:`Interleaver.handle` with the value at each location. ``handle`` gives the value to every
mediator that waits there, lets each run until it waits for something else, and returns the value with their edits. All effects of a block
on a run (reads, edits, replacements) happen inside this call. So a feature that is implemented here works under every driver: eager
modules, the taps of a captured graph, an inference engine.

The active run is in a context variable and never on the model, so two threads can trace one model at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import is_grad_enabled

from .errors import EarlyStopException, OutOfOrderError, never_reached_message, uncounted_message
from .rows.batching import join_rows

if TYPE_CHECKING:
    from .cache import Cache
    from .mediator import Mediator

#: Context variable with the run of this thread and context.
active_run: ContextVar[Interleaver | None] = ContextVar("nnsight_interleaver", default=None)

#: Returns the run of this thread and context, or ``None``. A bound method, because every module call of a run calls it.
active_interleaver = active_run.get

#: The location of a block that waits for a step. It stands for any location whose next occurrence has the step's number.
ANYWHERE = ""

#: Suffix for the location of an output: there, blocks that got a deferred output wait for the returned value.
RETURNED = " (returned)"


def split_requester(requester: str) -> tuple[str, int | None]:
    """Split ``x.i2`` into the location ``x`` and the occurrence 2; the occurrence of a ``requester`` without number is ``None``."""
    location, dot, number = requester.rpartition(".i")
    return (location, int(number)) if dot and number.isdecimal() else (requester, None)


class Waited(dict[str, int]):
    """Number of waiting mediators and observers by location. A driver offers values at these locations only."""

    __slots__ = ()

    def add(self, location: str) -> None:
        """Count one more waiting mediator or observer at ``location``."""
        self[location] = self.get(location, 0) + 1
        if location == ANYWHERE:
            self.__class__ = Everywhere

    def remove(self, location: str) -> None:
        """Count one waiting mediator or observer less at ``location``."""
        self[location] -= 1
        if not self[location]:
            del self[location]
            if location == ANYWHERE:
                self.__class__ = Waited


class Everywhere(Waited):
    """The class of :class:`Waited` while a block waits for a step, which any location can begin: drivers offer all values."""

    __slots__ = ()

    def __contains__(self, location: object) -> bool:
        return True


class Interleaver:
    """One run: the mediators of its blocks, and the state of the turn-taking with the model.

    As a context manager it starts the blocks and, at its exit, ends them. It suppresses the exception of ``tracer.stop()``. A stop takes
    effect after the location where it is called: other blocks that wait for the same occurrence still get it.

    Args:
        mediators: The blocks, in the order in which they were defined.
        tracer: The tracer of the run, for blocks and drivers; dropped at the end of the run.
        on_blocks_done: Called once all blocks have ended. The model may still be running.
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
        self.tree: Any = None  # the module tree of the model, if all locations of the run are locations of one model
        self.interceptions: list[object] = []  # identities of the interceptions of calls that drivers of this run have installed
        self.recorder: Any = None  # records the blocks as data, if they run elsewhere; see `nnsight.program.record.recorder`
        self.grad: bool | None = None  # the grad mode in which the model was called; `None` before
        self.stopped = False  # whether a block has called `tracer.stop()`
        self.failure: BaseException | None = None  # an error of a block or its value, kept in case the model's own code catches it
        #: Functions that see values as they leave a location, each with the mediator whose rows it sees.
        self.observers: dict[str, list[tuple[Mediator, Callable[[Any], None]]]] = {}
        self.caches: list[tuple[Mediator, Cache]] = []  # each with the mediator whose rows it keeps
        self.skips: dict[str, dict[Mediator, Any]] = {}  # values that skipped modules return, by location of the input and by mediator
        #: Intercepted calls call it in place of `handle`. A compiler replaces it, so that it does not compile the code of blocks.
        self.offer: Callable[[Interleaver, str, Any], Any] = Interleaver.handle
        #: Called with the location, the model's value and its replacement; raises to refuse the replacement.
        self.check_replacement: Callable[[str, Any, Any], None] | None = None
        #: Called with the path of a module or operation to skip, and the value to return instead; raises to refuse the skip.
        self.check_skip: Callable[[str, Any], None] | None = None
        #: Set by drivers that know which locations are still to come. Called with the location of a request; raises to refuse it.
        self.check_location: Callable[[str], None] | None = None
        #: The location that the result passes inside the graph, if nothing but the one block of the run can change the result after it.
        self.output_location: str | None = None
        self.returns = True  # whether the caller uses the model's return value; otherwise only blocks use it
        self.inputs: Sequence[Any] = ()  # external tensors: a compiler records calls on them instead of making the calls at once
        self.deferred_outputs: list[Any] | None = None  # deferred outputs that blocks got; `None` under a driver without deferred outputs
        self.uncounted: set[str] = set()  # paths of functions that ran before a block first mentioned their operations
        self._on_blocks_done = on_blocks_done
        self.waited = Waited()  # the locations for which a driver must call `handle`
        self.counts: Counter[str] = Counter()  # number of passes of each location; a driver counts those without a call of `handle`
        self.current: Mediator | None = None  # the mediator whose code is running; `None` while the model runs
        self.visits: list[tuple[str, int]] = []  # locations and occurrences that are being handled; a block can call modules in one
        self._lending: list[Mediator | None] = []  # blocks that have lent their turn to a module that they call
        self.ready: list[Mediator] = []  # blocks that a barrier has released; they run as soon as the running block waits
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

    def begin_call(self) -> bool:
        """Note the grad mode in which the model is called first; return whether blocks wait for its values."""
        if self.grad is None:
            self.grad = is_grad_enabled()
        return bool(self.waited)

    def handle(self, location: str, value: Any, iterate: bool = True) -> Any:
        """Offer ``value`` to the mediators that wait at ``location``, and return the value with which the model continues.

        If ``iterate`` is false, ``location`` may name its occurrence, as in ``x.i2``. Otherwise occurrences are counted.
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
        try:
            value = self._served(location, occurrence, value)
            for mediator, observer in self.observers.get(location, ()):
                group = mediator.batch_group
                observer(value if group is None else group.narrow(value, location, occurrence))
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.visits.pop()
        self.end_if_stopped()
        return value

    def _served(self, location: str, occurrence: int, value: Any) -> Any:
        """Let the mediators that wait at ``location`` visit it in turn; return ``value`` with their changes."""
        served = True
        while served and location in self.waited:  # after a visit, another block may ask for the same location
            served = False
            for mediator in self.mediators:
                if mediator.waits_at(location, occurrence):
                    value = mediator.visit(location, occurrence, value)
                    served = True
                    if self.ready:
                        self.run_ready()
        return value

    @property
    def at(self) -> tuple[str, int] | None:
        """The location and occurrence that is being handled, the innermost one."""
        return self.visits[-1] if self.visits else None

    def end_if_stopped(self) -> None:
        """Raise an :class:`EarlyStopException` if a block has stopped the run."""
        if self.stopped:
            raise EarlyStopException

    def handle_returned(self, location: str, value: Any) -> Any:
        """Offer the returned ``value`` to the mediators that got a deferred output at ``location`` and wait for its value."""
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
        """Resume the mediators that wait for the step that the next occurrence of ``location`` begins. They get no value."""
        begun = location, self.counts.get(location, 0)
        self.visits.append(begun)
        for mediator in self.mediators:
            if mediator.awaits_step and mediator.waits_at(*begun):
                mediator.proceed()
                self.run_ready()
        self.visits.pop()
        self.end_if_stopped()

    def observe(self, location: str, observer: Callable[[Any], None], mediator: Mediator | None = None) -> None:
        """Call ``observer`` with each later value that leaves ``location``, narrowed to the rows of ``mediator`` or the running one."""
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
        """Return ``(value,)`` if the module whose input is at ``location`` is skipped and returns ``value``; ``()`` if it runs.

        Raises:
            ValueError: If some invokes of the batch skip the module and others do not.
        """
        asked = self.skips.pop(location, None)
        if asked is None:
            return ()
        whole = [value for mediator, value in asked.items() if mediator.batch_group is None]
        if whole:
            return (whole[-1],)
        by_group = {mediator.batch_group: value for mediator, value in asked.items() if mediator.batch_group is not None}
        groups = sorted(by_group, key=lambda group: group.start)
        output = f"{location.removesuffix('.input')}.output"
        try:
            if sum(group.size for group in groups) != groups[0].total:
                raise ValueError(
                    f"`{location.removesuffix('.input')}` is skipped by some invokes and not by others. They run as one batch, "
                    "so skip it in all of them."
                )
            return (join_rows([by_group[group] for group in groups], groups, output, self.counts.get(output, 0)),)
        except Exception as error:
            self.failure = error
            raise

    def add(self, mediator: Mediator) -> None:
        """Add a block to the run and let it run to the first location it waits for."""
        self.mediators.append(mediator)
        mediator.start(self)
        self.run_ready()

    def lend_turn(self) -> None:
        """Let the modules inside a module call of the running block pass their locations, until :meth:`take_turn_back`."""
        self._lending.append(self.current)
        self.current = None

    def take_turn_back(self) -> None:
        """End the turn that :meth:`lend_turn` began."""
        self.current = self._lending.pop()

    def run_ready(self) -> None:
        """Resume the blocks that a barrier has released."""
        while self.ready:
            self.ready.pop(0).proceed()

    def is_waited(self, location: str) -> bool:
        """Whether a block or an observer waits for the next occurrence of ``location``."""
        if location not in self.waited:
            return False
        if location in self.observers:
            return True
        occurrence = self.counts.get(location, 0)
        for mediator in self.mediators:  # noqa: SIM110 - called for every module, and a generator would double its time
            if mediator.waits_at(location, occurrence):
                return True
        return False

    @property
    def awaited_steps(self) -> set[int]:
        """The steps that blocks wait for. Any location can begin them."""
        return {mediator.waiting[1] for mediator in self.mediators if mediator.waiting is not None and mediator.awaits_step}

    def release(self) -> None:
        """Call ``on_blocks_done`` if all blocks have ended. Drivers call this method before they decide which values to keep."""
        if self._on_blocks_done is not None and not any(mediator.alive for mediator in self.mediators):
            self._on_blocks_done()
            self._on_blocks_done = None

    def finish(self) -> None:
        """End the blocks that still wait after the model has returned or was stopped.

        A block in a loop over occurrences ends with a warning. After a stop, edits of the model end without error or warning.

        Raises:
            OutOfOrderError: At the user's line, for any other block that still waits for a location.
            AttributeError: Likewise, if the location is an operation that the called function does not have.
        """
        while waiting := [each for each in self.mediators if each.waiting is not None and not (self.stopped and each.is_edit)]:
            # A block that catches its error may wait again, or call the barrier in which another block waits: barriers come last.
            mediator = min(waiting, key=lambda each: each.asks == ("barrier",))
            assert mediator.waiting is not None
            if mediator.loops:
                mediator.leave_loop()
            else:
                location, occurrence = mediator.waiting
                calls, visited = self.counts.get(location, 0), mediator.last_visited
                unknown = None if self.tree is None else self.tree.unknown_operation(location)
                message = never_reached_message(location, occurrence, calls, visited, self.stopped)
                mediator.throw(AttributeError(unknown) if unknown else OutOfOrderError(message))
            self.run_ready()

    def end_blocks(self) -> None:
        """End all blocks that still wait, and run their ``finally`` clauses."""
        for mediator in self.mediators:
            mediator.cancel()

    def cancel(self) -> None:
        """End all blocks, and stop being the active run."""
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
