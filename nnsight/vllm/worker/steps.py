"""One step of the engine, for the interception of module calls.

While the engine runs the model, the active run is a :class:`EngineStep`. It is not a run with blocks itself: it hands each value on to the
runs of the requests that have rows in the step, which narrow it and count the passage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from ...runtime.interleaver import active_run
from .request_rows import RequestRows, ordinary
from .requests import RequestRun


class Part(NamedTuple):
    """What one request has in a step.

    Attributes:
        run: Its run.
        tokens: Its rows of the flat batch.
        request: Its row of what has one row for each request.
        ends: Whether these are the last tokens before the next one is sampled; else the rows are kept until those come.
    """

    run: RequestRun
    tokens: RequestRows
    request: RequestRows
    ends: bool = True


class EngineStep:
    """What an intercepted call takes for the active run.

    Args:
        parts: What requests with blocks have in it.

    Attributes:
        parts: Those whose blocks take part.
        kept: Those of requests whose other tokens come in later steps.
        keeps: Whether there are such requests.
        current: No block: the model runs.
        skips: Nothing can be skipped.
        counts: Counts a passage for all requests of the step.
        waited: The locations that one of them waits for.
    """

    current = None
    skips: dict[str, Any] = {}  # noqa: RUF012 - never written to

    def __init__(self, parts: Iterable[Part]) -> None:
        given = list(parts)
        self.parts = [part for part in given if part.ends]
        self.kept = [part for part in given if not part.ends]
        self.keeps = bool(self.kept)
        self.counts = _Counts(self.parts)
        self.waited: Any = _Waited(self.parts)
        self.offer = type(self).meet
        self._sampling = False

    def again(self) -> Self:
        """Return this step, to be made once more: with the same rows, one position further."""
        self._sampling = False
        return self

    @property
    def mediators(self) -> list[Any]:
        """The blocks of all requests."""
        return [mediator for part in self.parts for mediator in part.run.mediators]

    def rows_are_requests(self) -> None:
        """Say that from here on values have one row for each request."""
        self._sampling = True

    def meet(self, location: str, value: Any) -> Any:
        """Offer ``value`` to every request; return what they made of it."""
        if location not in self.waited:
            self.counts[location] = 1
            return value
        with ordinary():
            for run, tokens, request, _ in self.parts:
                if run.error is None:
                    value = run.meet(location, value, request if self._sampling else tokens)
        return value

    def keep(self, location: str, value: Any) -> None:
        """Keep the rows of a captured ``value`` for requests whose other tokens come in later steps; ``None`` if they cannot be had."""
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
    """The part of a dict that intercepted calls use to count: one more passage for every request."""

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
        self._waited += [part.run.steered_here for part in parts if part.run.steered_here]

    def __contains__(self, location: object) -> bool:
        for waited in self._waited:  # noqa: SIM110 - asked at every module, and a generator would take as long again
            if location in waited:
                return True
        return False
