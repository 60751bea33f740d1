"""The run of one request.

Every request is a run of its own, so ``tracer.iter`` counts the tokens of this request alone, even if the engine puts other requests into
the same steps.

An error of a block ends only this run. The engine continues with the model's own values, the request is removed from it, and the trace
raises the error when the other requests have finished.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...compat import Interleaver
from ...runtime.errors import EarlyStopException, OutOfOrderError
from ...runtime.interleaver import active_run
from ...runtime.mediator import Mediator
from ..blocks.stepping import BlockPrograms, Steps
from ..steering.graph_functions import EditFunction
from ..steering.graph_programs import GraphProgram
from ..steering.tables import TABLES, Steering, edits_of, salt_of
from .request_rows import RequestReplacements, RequestRows, RowView, place_of, read_only
from .step_programs import ProgramUse

if TYPE_CHECKING:
    from .engine_taps import StopPrograms

#: Locations that belong to no module.
LOGITS, SAMPLES = "model.logits.output", "model.samples.output"


@dataclass(frozen=True)
class RequestLimits:
    """The abilities of an engine."""

    hidden: int  # channels of the hidden state
    locations: tuple[str, ...] | None = None  # locations at which it stops; `None` means all
    steered: tuple[str, ...] | None = None  # locations with tables for edits in its compiled graph; `None` if it is not compiled
    rank: int = 0  # most directions that an edit may remove
    captured: tuple[str, ...] = ()  # locations whose values can be read after the model has run, but not edited
    drafts: bool = False  # whether steps have draft tokens, some of which are discarded later
    functions: Mapping[str, EditFunction] = field(default_factory=dict)  # functions for its layers with tables, by name
    programs: Mapping[str, GraphProgram] = field(default_factory=dict)  # programs in its graph, by name
    stopping: StopPrograms | None = None  # makes the edits and programs that run where the engine stops
    blocks: BlockPrograms | None = None  # programs recorded from blocks; `None` on several devices
    vocabulary: int = 0  # number of token ids


class _NoSkips(dict[str, Any]):
    """The modules that blocks skip. It stays empty, because a skip raises ``NotImplementedError``."""

    def setdefault(self, *_: Any) -> Any:
        raise NotImplementedError(
            "A module cannot be skipped in a vLLM engine: all requests of a step share one call of it, and the call writes to the caches. "
            "Replace its output, as in `layer.output = value`."
        )


def _check_stop(stops: set[str], location: str) -> None:
    """Raise ``OutOfOrderError`` unless ``location`` is one of the ``stops`` of a compiled engine."""
    if location in stops or location.startswith("barrier("):
        return
    remedy = f"with `taps=[..., {place_of(location)!r}]`, or without taps, for an engine that stops between all modules."
    if ".source." in location:
        remedy = "without taps, for an engine that also stops at operations: operations cannot be tapped."
    tapped = ", ".join(f"`{found}`" for found in sorted(stops))
    raise OutOfOrderError(f"`{location}` is not tapped: this engine is compiled, and stops at {tapped} only. Make the model {remedy}")


class RequestRun(Interleaver):
    """The run of one request. ``mediators`` are the edits of the model, then the block that is written against the request."""

    def __init__(self, mediators: Iterable[Mediator], tracer: Any, tree: Any, name: str, limits: RequestLimits) -> None:
        super().__init__(mediators, tracer)
        self.tree, self.name, self.limits = tree, name, limits
        self.error: BaseException | None = None  # the reason of an early end: an error of a block, or `tracer.stop()`
        self.begun = False  # whether the request has gone to the engine
        self.steps = 0  # tokens that the engine has sampled for it, including that of the current step
        self.position = 0  # position of the first token that the current step computes for it
        self.seen = 0  # tokens whose values the block has seen; after a preemption, a step repeats earlier positions
        self.kept: dict[str, list[Any]] = {}  # captured values of the part of its prompt that has run, by location
        self.visited: dict[str, None] = {}  # locations at which blocks got values, in order
        self.steering: dict[str, Steering] = {}  # edits of the hidden state at every token, by location
        self.programs: list[ProgramUse] = []  # programs that are not in the graph
        self.stepping: Steps | None = None  # parks and resumes the block, if a program may replace it
        self.skips = _NoSkips()
        self.call_together: Callable[..., Any] | None = None  # calls a module on all devices; `None` while they do not listen
        self.check_replacement = RequestReplacements(limits.captured)
        if limits.locations is not None:
            stops = {*limits.locations, *limits.captured, LOGITS, SAMPLES, "result"}
            self.check_location = functools.partial(_check_stop, stops)

    @property
    def failed(self) -> BaseException | None:
        """The error of a block; ``None`` if there is no error, or if ``tracer.stop()`` ended the run."""
        return None if isinstance(self.error, EarlyStopException) else self.error

    @property
    def awaited(self) -> list[str]:
        """The locations of the model at which blocks wait.

        This excludes ``"result"``. A request whose block waits only for the result is like a plain request: it may share cached prefixes.
        """
        waiting = [mediator.waiting[0] for mediator in self.mediators if mediator.waiting is not None]
        return [location for location in waiting if location != "result"]

    @property
    def touches_model(self) -> bool:
        """Whether a block needs a value of the model."""
        return bool(self.observers or self.awaited)

    @property
    def tier(self) -> str:
        """How the blocks of the request run. ``"beside"`` is for blocks that need no value of the model."""
        if not self.touches_model and not self.steering and not self.programs:
            return "beside"
        where = "between modules" if self.limits.locations is None else "at taps of the compiled model"
        if self.programs and not self.touches_model:
            return f"{where}, as programs"
        if self.limits.locations is None:
            return where
        if not self.touches_model:
            return "in the compiled model, as parameters"
        captured = set(self.awaited).intersection(self.limits.captured)
        return "behind the compiled model, on values captured in it" if captured else where

    def steer(self, location: str, steering: Steering) -> None:
        """Apply ``steering`` to every hidden state at ``location``. Raise ``ValueError`` if that is not possible, or no longer possible."""
        limits = self.limits
        self._check_start()
        if limits.steered is not None and location not in limits.steered:
            named = location.removeprefix("model.").rpartition(".")[0]
            raise ValueError(
                f"`{location}` has no table for edits: this engine is compiled. Make the model with `edits=[..., {named!r}]`, "
                "or without taps and edits, for an engine that stops between all modules."
            )
        if limits.steered is not None and steering.rank > limits.rank:
            raise ValueError(
                f"steer(remove=...) has {steering.rank} directions, and this compiled engine has room for {limits.rank}: make the "
                f"model with `edits={{'modules': [...], 'rank': {steering.rank}}}`."
            )
        self._add(location, steering)

    def run_program(self, program: GraphProgram, parameters: Mapping[str, Any], start: int) -> None:
        """Run a program for every token from ``start`` on: in the engine's graph if the graph has it, otherwise where the engine stops.

        Raises:
            ValueError: As :meth:`steer`, or if the engine does not stop at a location of the program.
        """
        self._check_start()
        if self.limits.programs.get(program.name) is program:
            for location, steering in edits_of(program, parameters, start, self.limits.hidden).items():
                self._add(location, steering)
            return
        asked = program.parameters(parameters)
        for path in program.modules:
            location = f"model.{path}.output"
            if self.limits.locations is not None and location not in self.limits.locations:
                raise ValueError(
                    f"steer(program): `{location}` is not tapped, and this engine is compiled. Make the model with `taps=[..., {path!r}]`, "
                    "or put the program into the graph with `programs={...}`."
                )
        assert self.limits.stopping is not None
        self.programs.append(ProgramUse(self.limits.stopping.of_program(program), asked, start))

    @functools.cached_property
    def uses(self) -> list[ProgramUse]:
        """Programs that run where the engine stops: edits that are not in its graph, programs of the request, and that of a parked block.

        Read this only after the request has begun.
        """
        stopping, uses = self.limits.stopping, list[ProgramUse]()
        for location, steering in self.steering.items():
            if stopping is None or self.limits.steered is not None:
                break
            parts = steering.parts
            for name in (TABLES, *self.limits.functions):  # in the order of a compiled graph
                if name in parts:
                    uses.append(ProgramUse(stopping.of_edit(location, name, steering.rank), parts[name], steering.start))
        uses += self.programs
        if self.stepping is not None and self.stepping.program is not None:  # last, as a block comes after steering
            uses.append(ProgramUse(self.stepping.program, self.stepping.parameters, 0, self.stepping))
        return uses

    @functools.cached_property
    def stops(self) -> frozenset[str]:
        """The locations at which the engine stops for :attr:`uses`."""
        return frozenset(location for use in self.uses for location in use.program.parts)

    @property
    def salt(self) -> str:
        """The salt of cached prefixes, which is equal exactly for requests with the same edits. Empty for a request without edits."""
        edits = dict(self.steering)
        for number, use in enumerate(self.programs):
            asked = {use.program.digest: use.parameters}
            edits[f"program {number}"] = Steering.of(self.limits.hidden, None, None, None, use.start, asked)
        return salt_of(edits) if edits else ""

    def _check_start(self) -> None:
        if self.steps or self.begun:
            raise ValueError(
                "steer() is for all tokens of a request, so it stands at the top of the block, before the block reads a value of the model."
            )

    def _add(self, location: str, steering: Steering) -> None:
        known = self.steering.get(location)
        self.steering[location] = steering if known is None else known.plus(steering)
        if len({found.start for found in self.steering.values()}) > 1:
            raise ValueError("steer(start=...) has to be the same for all layers of a request.")

    def begin(self, mediators: Iterable[Mediator] = ()) -> None:
        """Add ``mediators``, and run each block that has not begun up to its first request."""
        self.mediators = [*mediators, *self.mediators]
        for mediator in list(self.mediators):
            if mediator.interleaver is None and self.error is None:
                self._guarded(self._start, mediator)

    def _start(self, mediator: Mediator) -> None:
        mediator.start(self)
        self.run_ready()
        self.end_if_stopped()

    def wants(self, location: str) -> bool:
        """Whether a block waits for the next occurrence of ``location``, or a program runs there."""
        if self.error is not None:
            return False
        return location in self.stops or self.is_waited(location)

    def meet(self, location: str, value: Any, rows: RequestRows) -> Any:
        """Run the blocks that wait at ``location`` on their ``rows`` of ``value``, and return the value with their changes.

        The caller has to be in :func:`~.request_rows.ordinary`.
        """
        if not self.is_waited(location):
            self.counts[location] = self.counts.get(location, 0) + 1
            return value
        self.visited[location] = None
        try:
            view = RowView(rows, location, value, self.kept.get(location, ()))
        except ValueError as error:
            self.fail(ValueError(f"`{location}`: {error}"))
            return value
        copied = None if self.stepping is None else self.stepping.count_stop(view.value)
        left = self._guarded(self.handle, location, view.value, otherwise=view)
        if left is view:
            return value
        if copied is not None and self.stepping is not None:
            self.stepping.note_result(location, copied, left)
        if location == SAMPLES and self.error is None and view.is_changed(left):
            self._guarded(self._check_tokens, left)
            if self.error is not None:
                return value
        if location not in self.limits.captured:
            return self._guarded(view.put_back, left, otherwise=value)
        if self.error is None and view.is_changed(left):
            self.fail(read_only(location))
        return value

    def _check_tokens(self, ids: Any) -> None:
        """End the run with a ``ValueError`` unless ``ids``, which the block left as the sampled tokens, are in the vocabulary."""
        most = self.limits.vocabulary
        if isinstance(ids, torch.Tensor) and not bool(((ids >= 0) & (ids < most)).all()):
            self.fail(ValueError(f"`{SAMPLES}` was given {ids.flatten().tolist()}, but the ids of tokens are 0 to {most - 1}."))

    def settle(self, single: bool) -> bool:
        """Park the block if a program can run its next step, or resume it if the program no longer fits. Return whether that changed it.

        ``single`` says whether the step has one row of the request, right after the rows that the block has seen.
        """
        if self.stepping is None or self.error is not None:
            return False
        alone = sum(mediator.alive for mediator in self.mediators) == 1 and not self.observers
        changed = self.stepping.settle(self.steps - 1, single and self.steps > 1, alone)
        if changed:
            self._forget_uses()
        return changed

    def _forget_uses(self) -> None:
        for name in ("uses", "stops"):
            self.__dict__.pop(name, None)

    def _resume(self) -> None:
        """Resume a parked block at the present step."""
        if self.stepping is not None and self.stepping.program is not None:
            self.stepping.resume(self.steps)
            self._forget_uses()

    def cancel(self) -> None:
        self._resume()
        super().cancel()
        if self.stepping is not None:
            self.stepping.close()

    def keep(self, location: str, value: Any, rows: RequestRows) -> None:
        """Keep the rows of a captured value until the rest of the prompt has run. ``value`` is ``None`` if it was not available."""
        self.kept.setdefault(location, []).append(None if value is None else RowView(rows, location, value).value)

    def conclude(self, result: Any) -> None:
        """Offer the result to the blocks, then end them."""
        self._resume()
        if self.error is None:
            self._guarded(self.handle, "result", result)
        if self.error is None:
            self._guarded(self.finish)
        self.cancel()

    def fail(self, error: BaseException) -> None:
        """End the run with ``error``, and raise it in the blocks, at the lines where they wait."""
        self._resume()
        for mediator in self.mediators:
            if mediator.waiting is not None and self.error is None:
                self._guarded(mediator.throw, error)
        if self.error is None:
            self._end(error)

    def _guarded(self, function: Any, *arguments: Any, otherwise: Any = None) -> Any:
        """Call ``function`` and return its result. If it raises, end the run and return ``otherwise``."""
        token = active_run.set(self)
        try:
            return function(*arguments)
        except Exception as error:
            self._end(error)
            return otherwise
        finally:
            active_run.reset(token)

    def _end(self, error: BaseException) -> None:
        self.error, self.failure = error, None
        self.cancel()
