"""The run of one request.

Every request is a run of its own: an :class:`~nnsight.runtime.interleaver.Interleaver` with the edits of the model and one
block. So passages are counted for each request, whatever other requests the engine puts into the same step, and ``tracer.iter``
counts the tokens of the request.

An error of a block ends this run only. The engine goes on with the model's own values, the request is taken out of it, and
the trace raises the error once the other requests have finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...runtime.errors import OutOfOrderError
from ...runtime.interleaver import Interleaver, _active
from ...runtime.mediator import EarlyStopException, Mediator
from .rows import RequestReplacements, Rows, RowView

#: Locations of what is not a module's.
LOGITS, SAMPLES = "model.logits.output", "model.samples.output"

_NO_SKIP = (
    "A module cannot be skipped in a vLLM engine: the requests of a step share its run, and its caches are written to inside. "
    "Replace what it returns, as in `layer.output = value`."
)


class _NoSkips(dict[str, Any]):
    """What blocks want to skip: nothing may be put in."""

    def setdefault(self, *_: Any) -> Any:
        raise NotImplementedError(_NO_SKIP)


class _OnlyAt:
    """Refuses requests for locations at which a compiled engine does not stop."""

    def __init__(self, locations: Iterable[str]) -> None:
        self._locations = {*locations, LOGITS, SAMPLES, "result"}

    def __call__(self, location: str) -> None:
        if location not in self._locations and not location.startswith("barrier("):
            tapped = ", ".join(f"`{found}`" for found in sorted(self._locations))
            raise OutOfOrderError(
                f"`{location}` is not tapped: this engine is compiled, and stops at {tapped} only. Make the model with "
                f"`taps=[..., {location.removeprefix('model.').rpartition('.')[0]!r}]`, or without taps, for an engine that stops "
                "between all modules. Only outputs can be tapped."
            )


class RequestRun(Interleaver):
    """A request with the blocks written against it.

    Args:
        mediators: The edits of the model, then the block.
        tracer: The tracer that makes the run.
        tree: The modules of the model.
        name: What messages call the request.
        locations: Where the engine can stop; ``None`` for everywhere.

    Attributes:
        name: As given.
        error: What ended the run before its time, if anything did: an error of a block, or ``tracer.stop()``.
        steps: How many steps of the engine have had rows of the request.
        visited: Locations at which a block was served, in order, each once.
    """

    def __init__(
        self,
        mediators: Iterable[Mediator],
        tracer: Any,
        tree: Any,
        name: str,
        locations: Iterable[str] | None = None,
    ) -> None:
        super().__init__(mediators, tracer)
        self.tree = tree
        self.name = name
        self.error: BaseException | None = None
        self.steps = 0
        self.visited: dict[str, None] = {}
        self.skips = _NoSkips()
        self.check_replacement = RequestReplacements()
        if locations is not None:
            self.check_location = _OnlyAt(locations)

    @property
    def failed(self) -> BaseException | None:
        """The error of a block; ``None`` where there was none, or the block stopped the request on purpose."""
        return None if isinstance(self.error, EarlyStopException) else self.error

    @property
    def touches_model(self) -> bool:
        """Whether a block waits for a value of the model, so that the engine has to stop there.

        A block that waits for the result only leaves the request as any other: it may share what the engine has cached.
        """
        waiting = (mediator.waiting[0] for mediator in self.mediators if mediator.waiting is not None)
        return bool(self.observers) or any(location != "result" for location in waiting)

    def begin(self, mediators: Iterable[Mediator] = ()) -> None:
        """Add ``mediators`` and let each block that has not begun run to the first location it waits for."""
        self.mediators = [*mediators, *self.mediators]
        for mediator in list(self.mediators):
            if mediator.interleaver is None and self.error is None:
                self._guarded(self._start, mediator)

    def _start(self, mediator: Mediator) -> None:
        mediator.start(self)
        self.run_ready()

    def meet(self, location: str, value: Any, rows: Rows) -> Any:
        """Let the blocks that wait at ``location`` work on their rows of ``value``; return what they made of it."""
        if not self.is_waited(location):
            self.counts[location] = self.counts.get(location, 0) + 1
            return value
        self.visited[location] = None
        view = RowView(rows, location, value)
        with torch.inference_mode(False), torch.no_grad():
            left = self._guarded(self.handle, location, view.value, otherwise=view)
        if left is view:
            return value
        return self._guarded(view.put_back, left, otherwise=value)

    def conclude(self, result: Any) -> None:
        """Offer the result, and end the blocks."""
        if self.error is None:
            self._guarded(self.handle, "result", result)
        if self.error is None:
            self._guarded(self.finish)
        self.cancel()

    def fail(self, error: BaseException) -> None:
        """End the run with ``error``, raised in the blocks at the lines where they wait."""
        for mediator in self.mediators:
            if mediator.waiting is not None and self.error is None:
                self._guarded(mediator.throw, error)
        if self.error is None:
            self._end(error)

    def _guarded(self, function: Any, *arguments: Any, otherwise: Any = None) -> Any:
        """Return what ``function`` returns; if it raises, end the run and return ``otherwise``."""
        token = _active.set(self)
        try:
            return function(*arguments)
        except Exception as error:
            self._end(error)
            return otherwise
        finally:
            _active.reset(token)

    def _end(self, error: BaseException) -> None:
        self.error, self.failure = error, None
        self.cancel()
