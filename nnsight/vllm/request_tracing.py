"""A trace on an engine: its block, or each of its invokes, is a request.

As in other traces the block of the ``with`` statement starts first. All requests run together, and with all others of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ..runtime.mediator import Mediator
from ..runtime.report import Report
from ..runtime.tracer import InterleavingTracer
from ..tracing import Block
from ..tracing.saving import saves
from .blocks.stepping import Steps
from .prompts import prompt_of, sampling_of
from .samples import Request
from .worker.requests import RequestRun

if TYPE_CHECKING:
    from ..tracing import Backend
    from .model import VLLM


@dataclass(eq=False)
class EngineReport(Report):
    """Account of a trace on an engine."""

    tiers: list[str] = field(default_factory=list)  # for each request, how its block ran, see :attr:`RequestRun.tier`
    steps: list[int] = field(default_factory=list)  # and in how many steps it had rows; with several samples, those of the longest
    programs: list[int] = field(default_factory=list)  # and in how many of them a program did what the block does
    reasons: list[str] = field(default_factory=list)  # why it did not in others, if that was tried
    planned: bool = False  # whether nothing was run, see :meth:`~.model.VLLM.explain`

    def __str__(self) -> str:
        """Return a line for the trace and one for each request."""
        if self.mode != "engine":
            return super().__str__()
        lines = [f"trace: engine, {len(self.tiers)} request{'s' * (len(self.tiers) != 1)}"]
        for number, (tier, steps, made, why) in enumerate(zip_longest(self.tiers, self.steps, self.programs, self.reasons)):
            line = f"  request {number}: block {'would run' if self.planned else 'ran'} {tier}" + (f", in {steps} steps" if steps else "")
            line += f", {made} of them as a program" if made else f"; as Python, because {why}" if why else ""
            lines.append(line)
        return "\n".join([*lines, *(f"    {location}" for location in self.spliced)])


class RequestTracer(InterleavingTracer):
    """Runs requests in the engine of a model, with blocks reading and editing its internals.

    ``args`` are the prompt, unless invokes have one each; ``kwargs`` are sampling parameters for all requests.
    """

    awaits_steps = False  # nobody knows whether an engine goes on with a request before it does

    def __init__(self, model: VLLM, args: tuple[Any, ...], kwargs: dict[str, Any], backend: Backend | None = None) -> None:
        given: Any = (None, model, args, kwargs, backend, model)  # no driver: an engine calls its model itself
        super().__init__(*given)
        self.report: EngineReport = EngineReport()
        self._main: RequestRun | None = None

    def execute(self, function: Callable[[], None]) -> None:
        """Run the requests; ``function`` is the block of the only one, or opens the invokes."""
        self._execute(function)

    def _execute(self, function: Callable[[], None] | None = None) -> list[Request]:
        """Run the requests, unless this is a plan only, and return them; raise the first error of a block when all have finished."""
        requests: list[Request] = []
        try:
            requests = self.begin(function)
            if not self.report.planned:
                model: Any = self._model
                model._engine.run(requests)
        finally:
            for request in requests:
                request.cancel()
            self.end()
        self.conclude(requests)
        return requests

    def call(self) -> Any:
        """Run the request with the model's edits and no other block; return vLLM's output."""
        token = saves.set({})  # an edit may save values, as in a trace, though its names are not bound
        try:
            return self._execute()[0].output
        finally:
            saves.reset(token)
            self._close()

    def begin(self, function: Callable[[], None] | None = None) -> list[Request]:
        """Start the blocks, and return the requests of this trace; without ``function`` the one of a call."""
        assert self._call is not None
        _, _, args, sampling = self._call
        blocks: list[Mediator] = []
        if function is None:
            self._entered = True
        else:
            self.note_start()
            self._invokes = None if args else []
            blocks.append(self.make_mediator(function, self.info, "trace"))
        self._open_mentioned()
        run = self._main = self._run_of(blocks, "the request")
        run.begin()
        if run.failed is not None:
            raise run.failed
        if args and function is not None and self.info is not None:
            self._may_park(run, blocks[0], self.info, function, ())
        if args or function is None:
            requests = [self._begun(Request(prompt_of(args), sampling_of(sampling), run))]
        else:
            requests = self._invoked(run, sampling)
        self.report.mode = "engine"
        self.report.tiers = [request.sent[0].run.tier for request in requests]
        return requests

    def end(self) -> None:
        """Release what :meth:`begin` made."""
        if self._main is not None:
            self._main.cancel()
        for action in self._at_end:
            action()

    def _run_of(self, blocks: list[Mediator], name: str) -> RequestRun:
        model: Any = self._model
        model.dispatch()
        return RequestRun(blocks, self, model._tree, name, model._engine.limits)

    def _invoked(self, main: RequestRun, sampling: Mapping[str, Any]) -> list[Request]:
        """Start the blocks of the invokes that the block of a trace without a prompt has opened; return their requests."""
        invokes, self._invokes = self._invokes or [], None
        if not invokes and main.error is not None:
            return []
        if any(mediator.alive for mediator in main.mediators) or not invokes:
            raise ValueError(
                "The model did not execute: trace() was given no prompt. Pass one, as in `model.trace(prompt)`, or open "
                "`with tracer.invoke(prompt):` inside the block, and read values of the model in there."
            )
        requests = []
        for number, invoke in enumerate(invokes):
            if not invoke.args:
                raise ValueError(
                    "tracer.invoke() without a prompt: on an engine each invoke is a request of its own, and there is no "
                    "batch that one could see as a whole. Give it a prompt."
                )
            name = f"invoke {number}"
            mediator = self.make_mediator(invoke.function, None, name, publish=invoke.publish, explain=invoke.explain)
            run = self._run_of([mediator], name)
            others = [other.block for other in invokes if other is not invoke]
            self._may_park(run, mediator, invoke.block, invoke.function, others)
            requests.append(Request(prompt_of(invoke.args), sampling_of({**sampling, **invoke.kwargs}), run))
        return [self._begun(request) for request in requests]

    def _may_park(self, run: RequestRun, mediator: Mediator, block: Block, function: Any, others: Sequence[Block]) -> None:
        """Let a block go on as a program, if that is possible; ``others`` are those of the other requests."""
        model: Any = self._model
        if run.limits.blocks is not None:
            run.stepping = Steps(run.limits.blocks, mediator, block, function, others, lists=model._mode == "sync")

    def _begun(self, request: Request) -> Request:
        """Start the blocks of ``request``, and return it; it gets a request for each sample, if it is for several."""

        def of_edits(name: str) -> RequestRun:
            run = self._run_of([], name)
            run.begin(self._edits())
            return run

        request.run.begin(self._edits() if request.sampling.n == 1 else ())
        if request.sampling.n > 1:
            request.split(of_edits)
        return request

    def conclude(self, requests: list[Request]) -> None:
        """Report how the blocks ran, and raise the first of their errors."""
        report = self.report
        report.steps = [max(sent.run.steps for sent in request.sent) for request in requests]
        stepping = [request.run.stepping for request in requests]
        report.programs = [0 if each is None else each.made for each in stepping]
        report.reasons = ["" if each is None else each.why for each in stepping]
        visited = (location for request in requests for sent in request.sent for location in sent.run.visited)
        report.spliced = list(dict.fromkeys(visited))
        failures = [(request.run.name, request.run.failed) for request in requests if request.run.failed is not None]
        for name, failure in failures[1:]:
            failures[0][1].add_note(f"Another request of the trace failed, too, {name}: {type(failure).__name__}: {failure}")
        if failures:
            raise failures[0][1]
