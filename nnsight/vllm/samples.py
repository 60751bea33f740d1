"""Requests, and those for several samples of one prompt (``n=``).

A block is written against one sequence. Samples of a prompt part after their first token, so what a block would read or edit is
another value in each of them, at another step. Still, much of what is said to a request holds for all of its samples alike: edits of
the model, ``steer(...)``, and a block that wants no more than the result. So each sample is a request of the engine, with a run of its
own for the edits of the model and the same steering; the block has a run beside them, which gets one result for all when the last of
them has finished. A block that waits for a value of the model is refused, and told to open an invoke for each sample instead.

Samples are numbered as vLLM numbers them, and draw what vLLM's own would draw: with ``seed=s`` sample ``i`` has the seed ``s + i``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .worker.requests import RequestRun


@dataclass(eq=False)
class Request:
    """A request for the engine.

    Attributes:
        prompt: What vLLM takes for a prompt, as a dict.
        sampling: vLLM's sampling parameters.
        run: The blocks that are written against it.
        output: What vLLM returned in the end.
        on_output: Called with what vLLM returns before that, step by step.
        internal: What the engine core calls it, once it is there.
        samples: The requests for one sample each that are sent to the engine in its place.
        whole: The request of which it is a sample.
        latest: What vLLM returned last.
    """

    prompt: dict[str, Any]
    sampling: Any
    run: RequestRun
    output: Any = None
    on_output: Callable[[Any], None] | None = None
    internal: str = ""
    samples: list[Request] = field(default_factory=list)
    whole: Request | None = None
    latest: Any = None
    _latest: Any = None

    @property
    def ended(self) -> bool:
        """Whether its blocks have ended before their time, or those of the request of which it is a sample."""
        return self.run.error is not None or (self.whole is not None and self.whole.run.error is not None)

    @property
    def runs(self) -> list[RequestRun]:
        """The runs of what is sent to the engine."""
        return [sample.run for sample in self.samples] or [self.run]

    def take(self, output: Any) -> None:
        """Note what vLLM returned; at the end, conclude the blocks."""
        self.latest = output
        if output.finished:
            self.output = output
            self.run.conclude(output)
        self.pass_on()

    def tell(self) -> None:
        """Say what a step has brought to whoever listens; with samples, conclude the blocks when all samples have finished."""
        if self.samples:
            finished = all(sample.output is not None for sample in self.samples)
            if finished or self.on_output is not None:
                self.latest = _joined([sample.latest for sample in self.samples], finished)
            if finished and self.run.error is None:
                self.output = self.latest
                self.run.conclude(self.output)
        if self.output is None and self.on_output is not None:
            self.on_output(self.latest)

    def fail(self, error: BaseException) -> None:
        """End the blocks with ``error``; those of the request of which it is a sample, too."""
        if self.run.error is None:
            self.run.fail(error)
        self.pass_on()

    def pass_on(self) -> None:
        """Let the error of a sample, if there is one, be that of the request of which it is a sample."""
        failed, whole = self.run.failed, self.whole
        if failed is not None and whole is not None and whole.run.error is None:
            failed.add_note(f"This was sample {whole.samples.index(self)} of {len(whole.samples)}.")
            whole.run.fail(failed)

    def cancel(self) -> None:
        """End the blocks."""
        for run in (self.run, *(sample.run for sample in self.samples)):
            run.cancel()

    def split(self, new_run: Callable[[str], RequestRun]) -> None:
        """Make a request for each sample, unless the block is one that samples cannot share.

        Args:
            new_run: Returns a run of this name in which the edits of the model have begun.
        """
        count, run = self.sampling.n, self.run
        if run.touches_model:
            run.fail(ValueError(_NOT_SHARED.format(count=count, what=_waited(run))))
        for number in range(count):
            if run.error is not None:
                return
            sampling = self.sampling.clone()
            sampling.n = 1
            if sampling.seed is not None:
                sampling.seed += number
            sample = Request(dict(self.prompt), sampling, new_run(f"{run.name}, sample {number}"), whole=self)
            self.samples.append(sample)
            sample.pass_on()
            try:
                for location, steering in run.steering.items():
                    sample.run.steer(location, steering)
            except ValueError as error:
                sample.fail(error)


_NOT_SHARED = (
    "n={count}: the block {what}, and each of the {count} samples has values of its own there, at steps of its own. Open an invoke "
    "for each, as in `for seed in range({count}):` `with tracer.invoke(prompt, seed=seed):`. With `n=`, a block may use `steer()` and "
    "`tracer.result`."
)


def _waited(run: RequestRun) -> str:
    """Say what the blocks of ``run`` want of the model."""
    waiting = [mediator.waiting[0] for mediator in run.mediators if mediator.waiting is not None]
    wanted = [location for location in waiting if location != "result"]
    return f"waits at `{wanted[0]}`" if wanted else "has a cache"


def _joined(outputs: Sequence[Any], finished: bool) -> Any:
    """Return what vLLM returned for samples, ``None`` for those that wait yet, as one output, as vLLM has it for ``n=``."""
    begun = [(number, output) for number, output in enumerate(outputs) if output is not None]
    whole = copy.copy(begun[0][1])
    whole.outputs = []
    for number, output in begun:
        (completion,) = output.outputs
        completion.index = number
        whole.outputs.append(completion)
    whole.finished = finished
    return whole
