"""Traces on an engine. The block of a trace, or each of its invokes, is a request.

As in other traces, the block of the ``with`` statement starts first. All requests share the steps of the engine, also with other traces.
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
    """Report of a trace on an engine. The lists have one item for each request."""

    tiers: list[str] = field(default_factory=list)  # how the block ran, see :attr:`RequestRun.tier`
    steps: list[int] = field(default_factory=list)  # number of steps with rows of the request; of several samples, the largest number
    programs: list[int] = field(default_factory=list)  # number of these steps in which a program ran in place of the block
    reasons: list[str] = field(default_factory=list)  # why the block ran as Python, if a program was tried; else empty
    planned: bool = False  # whether the requests were only explained, and not run, see :meth:`~.model.VLLM.explain`

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
    """Runs requests in the engine of a model. Their blocks read and edit the model's internals.

    ``args`` has the prompt, or is empty if each invoke has its own. ``kwargs`` are sampling parameters for all requests.
    """

    awaits_steps = False  # whether a request has another step is known only when the step begins

    def __init__(self, model: VLLM, args: tuple[Any, ...], kwargs: dict[str, Any], backend: Backend | None = None) -> None:
        given: Any = (None, model, args, kwargs, backend, model)  # `None`: an engine calls its model itself, without a driver
        super().__init__(*given)
        self.report: EngineReport = EngineReport()
        self._main: RequestRun | None = None

    def execute(self, function: Callable[[], None]) -> None:
        """Run the requests. ``function`` is the block of the only request, or opens the invokes."""
        self._execute(function)

    def _execute(self, function: Callable[[], None] | None = None) -> list[Request]:
        """Run the requests, or only start their blocks if ``report.planned``, and return them. When all have finished, raise the first
        error of a block."""
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
        """Run the request with the model's edits and no other block. Return vLLM's output."""
        token = saves.set({})  # an edit may save values as in a trace, although no name is bound to them
        try:
            return self._execute()[0].output
        finally:
            saves.reset(token)
            self._close()

    def begin(self, function: Callable[[], None] | None = None) -> list[Request]:
        """Start the blocks, and return the requests of this trace. Without ``function``, this is the request of a call without a block."""
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
            self._allow_program(run, blocks[0], self.info, function, ())
        if args or function is None:
            requests = [self._started(Request(prompt_of(args), sampling_of(sampling), run))]
        else:
            requests = self._requests_of_invokes(run, sampling)
        self.report.mode = "engine"
        self.report.tiers = [request.sent[0].run.tier for request in requests]
        return requests

    def end(self) -> None:
        """End the blocks, and run the actions that are due at the end of a trace."""
        if self._main is not None:
            self._main.cancel()
        for action in self._at_end:
            action()

    def _run_of(self, blocks: list[Mediator], name: str) -> RequestRun:
        model: Any = self._model
        model.dispatch()
        return RequestRun(blocks, self, model._tree, name, model._engine.limits)

    def _requests_of_invokes(self, main: RequestRun, sampling: Mapping[str, Any]) -> list[Request]:
        """Start the blocks of the invokes that the block of the trace has opened, and return their requests."""
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
                    "tracer.invoke() without a prompt: on an engine each invoke is a request of its own, and no invoke can see "
                    "the whole batch. Give it a prompt."
                )
            name = f"invoke {number}"
            mediator = self.make_mediator(invoke.function, None, name, publish=invoke.publish, explain=invoke.explain)
            run = self._run_of([mediator], name)
            others = [other.block for other in invokes if other is not invoke]
            self._allow_program(run, mediator, invoke.block, invoke.function, others)
            requests.append(Request(prompt_of(invoke.args), sampling_of({**sampling, **invoke.kwargs}), run))
        return [self._started(request) for request in requests]

    def _allow_program(self, run: RequestRun, mediator: Mediator, block: Block, function: Any, others: Sequence[Block]) -> None:
        """Let a program replace the block where that is possible. ``others`` are the blocks of the other requests of the trace."""
        model: Any = self._model
        if run.limits.blocks is not None:
            run.stepping = Steps(run.limits.blocks, mediator, block, function, others, lists=model._mode == "sync")

    def _started(self, request: Request) -> Request:
        """Start the blocks of ``request``, and return it. With ``n=`` above 1, also make a request for each sample."""

        def run_of_edits(name: str) -> RequestRun:
            run = self._run_of([], name)
            run.begin(self._edits())
            return run

        request.run.begin(self._edits() if request.sampling.n == 1 else ())
        if request.sampling.n > 1:
            request.split(run_of_edits)
        return request

    def conclude(self, requests: list[Request]) -> None:
        """Fill in the report, and raise the first error of a block."""
        report = self.report
        report.steps = [max(sent.run.steps for sent in request.sent) for request in requests]
        stepping = [request.run.stepping for request in requests]
        report.programs = [0 if each is None else each.program_steps for each in stepping]
        report.reasons = ["" if each is None else each.why for each in stepping]
        visited = (location for request in requests for sent in request.sent for location in sent.run.visited)
        report.spliced = list(dict.fromkeys(visited))
        failures = [(request.run.name, request.run.failed) for request in requests if request.run.failed is not None]
        for name, failure in failures[1:]:
            failures[0][1].add_note(f"Another request of the trace failed, too, {name}: {type(failure).__name__}: {failure}")
        if failures:
            raise failures[0][1]
