"""One step of the engine, as the active run of intercepted module calls.

While the engine runs the model, the active run is an :class:`EngineStep`. A step has no blocks of its own. It passes each value to the runs
of the requests that have rows in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from ...runtime.interleaver import active_run
from .request_rows import RequestRows, ordinary
from .requests import RequestRun
from .step_programs import StepPrograms


class Part(NamedTuple):
    """The part of one request in a step."""

    run: RequestRun
    tokens: RequestRows  # its rows of the flat batch
    request: RequestRows  # its row of values with one row per request
    ends: bool = True  # whether a token is sampled after these rows; if not, captured rows are kept until a later step has the rest


class EngineStep:
    """The active run of intercepted calls during a step. ``parts`` are the parts of the requests with blocks."""

    current = None  # the model runs, and no block
    skips: dict[str, Any] = {}  # noqa: RUF012 - never written to, because no module can be skipped

    def __init__(self, parts: Iterable[Part]) -> None:
        given = list(parts)
        self.parts = [part for part in given if part.ends]
        #: Parts of requests whose remaining tokens come in later steps. Followers have no parts: the leader sends them ``keeps``.
        self.kept = [part for part in given if not part.ends]
        self.keeps = bool(self.kept)
        self.programs = StepPrograms(part for part in given if part.run.uses)
        self.counts = _Counts(self.parts)
        self.waited: Any = _Waited(self.parts)
        self.offer = type(self).meet
        self.interceptions: list[object] = []  # as those of an `Interleaver`
        self._sampling = False

    def again(self) -> Self:
        """Reuse this step as the next one, with the same rows one position further."""
        self._sampling = False
        self.programs.begin()
        return self

    def settle(self) -> bool:
        """Park blocks whose next step a program can run, and resume other parked blocks. Return whether any block has changed."""
        return any([part.run.settle(part.tokens.size == 1 and part.ends) for part in self.parts])  # noqa: C419 - every part has to settle

    @property
    def mediators(self) -> list[Any]:
        """The blocks of all requests."""
        return [mediator for part in self.parts for mediator in part.run.mediators]

    def rows_are_requests(self) -> None:
        """From now on, values have one row per request."""
        self._sampling = True

    def meet(self, location: str, value: Any) -> Any:
        """Offer ``value`` to every request, and return it with their changes."""
        if location not in self.waited:
            self.counts[location] = 1
            return value
        with ordinary():
            if location in self.programs.locations:
                value = self.programs.run(location, value, self._sampling)
            for run, tokens, request, _ in self.parts:
                if run.error is None:
                    value = run.meet(location, value, request if self._sampling else tokens)
        return value

    def keep(self, location: str, value: Any) -> None:
        """Keep the rows of a captured ``value`` (``None`` if unavailable) for requests whose remaining tokens come in later steps."""
        for part in self.kept:
            part.run.keep(location, value, part.tokens)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this step the active run inside of this context."""
        token = active_run.set(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            active_run.reset(token)


class _Counts:
    """A stand-in for the dict of counts that intercepted calls update. Each assignment counts one occurrence for every request."""

    def __init__(self, parts: list[Part]) -> None:
        self._counts = [part.run.counts for part in parts]

    def get(self, location: str, default: int) -> int:
        return default

    def __setitem__(self, location: str, _: int) -> None:
        for counts in self._counts:
            counts[location] = counts.get(location, 0) + 1


class _Waited:
    """The locations at which the engine has to stop for a request: its block waits there, or a program runs there."""

    def __init__(self, parts: list[Part]) -> None:
        self._waited: list[Any] = [part.run.waited for part in parts]
        self._waited += [part.run.stops for part in parts if part.run.stops]

    def __contains__(self, location: object) -> bool:
        for waited in self._waited:  # noqa: SIM110 - called at every module, and a generator takes twice as long
            if location in waited:
                return True
        return False
