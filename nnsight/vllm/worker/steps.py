"""One step of the engine, for the interception of module calls.

While the engine runs the model, the active run is an :class:`EngineStep`. It has no blocks itself: it hands each value on to the
runs of the requests that have rows in the step.
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
    tokens: RequestRows  # of the flat batch
    request: RequestRows  # of values that have one row for each request
    ends: bool = True  # whether these are the last tokens before the next one is sampled; else the rows are kept until those come


class EngineStep:
    """The active run of intercepted calls, in a step with these parts of requests with blocks."""

    current = None  # no block runs: the model does
    skips: dict[str, Any] = {}  # noqa: RUF012 - no module can be skipped, so it is never written to

    def __init__(self, parts: Iterable[Part]) -> None:
        given = list(parts)
        self.parts = [part for part in given if part.ends]
        #: Parts of requests whose other tokens come in later steps. Followers have none; the leader tells them whether there are any.
        self.kept = [part for part in given if not part.ends]
        self.keeps = bool(self.kept)
        self.programs = StepPrograms(part for part in given if part.run.uses)
        self.counts = _Counts(self.parts)
        self.waited: Any = _Waited(self.parts)
        self.offer = type(self).meet
        self.interceptions: list[object] = []  # as those of an `Interleaver`
        self._sampling = False

    def again(self) -> Self:
        """Return this step for the next one, with the same rows one position further."""
        self._sampling = False
        self.programs.begin()
        return self

    def settle(self) -> bool:
        """Let blocks go on as programs, or as Python again; return whether one has changed."""
        return any([part.run.settle(part.tokens.size == 1 and part.ends) for part in self.parts])  # noqa: C419 - each of them is to settle

    @property
    def mediators(self) -> list[Any]:
        """The blocks of all requests."""
        return [mediator for part in self.parts for mediator in part.run.mediators]

    def rows_are_requests(self) -> None:
        """Say that the following values have one row for each request."""
        self._sampling = True

    def meet(self, location: str, value: Any) -> Any:
        """Offer ``value`` to every request; return it with their changes."""
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
        """Keep the rows of a captured ``value`` for requests whose other tokens come in later steps; ``None`` if it is not available."""
        for part in self.kept:
            part.run.keep(location, value, part.tokens)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let intercepted calls find this step."""
        token = active_run.set(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            active_run.reset(token)


class _Counts:
    """The part of a dict that intercepted calls use to count: an assignment counts one more occurrence for every request."""

    def __init__(self, parts: list[Part]) -> None:
        self._counts = [part.run.counts for part in parts]

    def get(self, location: str, default: int) -> int:
        return default

    def __setitem__(self, location: str, _: int) -> None:
        for counts in self._counts:
            counts[location] = counts.get(location, 0) + 1


class _Waited:
    """The locations for which one of the requests waits, or where it is steered."""

    def __init__(self, parts: list[Part]) -> None:
        self._waited: list[Any] = [part.run.waited for part in parts]
        self._waited += [part.run.stops for part in parts if part.run.stops]

    def __contains__(self, location: object) -> bool:
        for waited in self._waited:  # noqa: SIM110 - asked at every module, and a generator takes twice as long
            if location in waited:
                return True
        return False
