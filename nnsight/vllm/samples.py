"""Requests, and those for several samples of one prompt (``n=``).

A block is written against one sequence. Samples of a prompt part after their first token, so a value that a block reads or edits
differs between them, and occurs at different steps. Edits of the model, ``steer(...)``, and a block that wants only the result mean the
same for all samples. So each sample is a request of the engine, with a run of its own for the edits of the model and the same steering. The
block has a run beside them, which gets one result for all when the last of them has finished. A block that waits for a value of the model
is refused; it should open an invoke for each sample instead.

Samples are numbered as vLLM numbers them, and draw what vLLM's own would draw: with ``seed=s`` sample ``i`` has the seed ``s + i``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .steering.entries import Lease
from .worker.requests import RequestRun


@dataclass(eq=False)
class Request:
    """A request for the engine."""

    prompt: dict[str, Any]  # as vLLM takes it
    sampling: Any  # vLLM's sampling parameters
    run: RequestRun  # the blocks that are written against it
    whole: Request | None = None  # the request of which it is a sample
    samples: list[Request] = field(default_factory=list)  # the requests for one sample each that go to the engine in its place
    lease: Lease | None = None  # its entry of the tables, if it is steered in the graph
    name: str = ""  # in the engine, once it is there
    internal: str = ""  # the engine core's name of it
    latest: Any = None  # vLLM's latest output
    output: Any = None  # vLLM's last output
    on_output: Callable[[Any], None] | None = None  # called with each output of a step, the last one included

    @property
    def ended(self) -> bool:
        """Whether its blocks have ended before their time, or those of the request of which it is a sample."""
        return self.run.error is not None or (self.whole is not None and self.whole.run.error is not None)

    @property
    def sent(self) -> list[Request]:
        """The requests that are sent to the engine."""
        return self.samples or [self]

    def take(self, output: Any) -> None:
        """Note an output; conclude the blocks if it is the last."""
        self.latest = output
        if output.finished:
            self.output = output
            self.run.conclude(output)
        self.pass_on()

    def tell(self) -> None:
        """Pass the output of a step to the listener; conclude the blocks when all samples have finished."""
        if self.samples:
            finished = all(sample.output is not None for sample in self.samples)
            if finished or self.on_output is not None:
                self.latest = _joined([sample.latest for sample in self.samples], finished)
            if finished and self.run.error is None:
                self.output = self.latest
                self.run.conclude(self.output)
        if self.on_output is not None:
            self.on_output(self.latest)

    def fail(self, error: BaseException) -> None:
        """End the blocks with ``error``, and those of the request of which it is a sample."""
        if self.run.error is None:
            self.run.fail(error)
        self.pass_on()

    def pass_on(self) -> None:
        """Raise the error of a sample, if there is one, in the request of which it is a sample."""
        failed, whole = self.run.failed, self.whole
        if failed is not None and whole is not None and whole.run.error is None:
            failed.add_note(f"This was sample {whole.samples.index(self)} of {len(whole.samples)}.")
            whole.run.fail(failed)

    def cancel(self) -> None:
        """End the blocks."""
        for request in (self, *self.samples):
            request.run.cancel()

    def split(self, new_run: Callable[[str], RequestRun]) -> None:
        """Make a request for each sample, unless samples cannot share the block.

        ``new_run`` returns a run with the given name in which the edits of the model have begun.
        """
        count, run = self.sampling.n, self.run
        if run.touches_model:
            what = f"waits at `{run.awaited[0]}`" if run.awaited else "has a cache"
            why = (
                f"n={count}: the block {what}, and each of the {count} samples has values of its own there, at steps of its own. Open an "
                f"invoke for each, as in `for seed in range({count}):` `with tracer.invoke(prompt, seed=seed):`. With `n=`, a block may "
                "use `steer()` and `tracer.result`."
            )
            run.fail(ValueError(why))
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


def _joined(outputs: Sequence[Any], finished: bool) -> Any:
    """Return vLLM's outputs for samples, ``None`` for those that have none yet, as one output, as vLLM has it for ``n=``."""
    begun = [(number, output) for number, output in enumerate(outputs) if output is not None]
    whole = copy.copy(begun[0][1])
    whole.outputs = []
    for number, output in begun:
        (completion,) = output.outputs
        completion.index = number
        whole.outputs.append(completion)
    whole.finished = finished
    return whole
