"""Requests, and requests for several samples of one prompt (``n=``).

A block is written against one sequence. Samples of a prompt diverge after their first token, so a value that a block reads or edits
differs between them, and occurs at different steps. Edits of the model, ``steer(...)``, and a block that wants only the result mean the
same for all samples. So each sample is a request of the engine, with the same steering and a run of its own for the edits of the model.
The block has a separate run, which gets one result for all samples when the last of them has finished. A block that waits for a value of
the model is refused: it should open an invoke for each sample instead.

Samples have the same numbers as in vLLM, and draw the same tokens: with ``seed=s``, sample ``i`` has the seed ``s + i``.
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
    parent: Request | None = None  # for a sample, the request with ``n=``
    samples: list[Request] = field(default_factory=list)  # with ``n=``, a request per sample; the engine gets these instead
    lease: Lease | None = None  # its entry of the tables, if it is steered in the graph
    name: str = ""  # its name in the engine, once it is there
    internal: str = ""  # its name in the engine core
    latest: Any = None  # vLLM's output of the latest step
    output: Any = None  # vLLM's final output
    on_output: Callable[[Any], None] | None = None  # called with the output of each step, including the last

    @property
    def ended(self) -> bool:
        """Whether its blocks, or the blocks of its parent, have ended early."""
        return self.run.error is not None or (self.parent is not None and self.parent.run.error is not None)

    @property
    def sent(self) -> list[Request]:
        """The requests that are sent to the engine."""
        return self.samples or [self]

    def take(self, output: Any) -> None:
        """Store an output. If it is the last one, conclude the blocks."""
        self.latest = output
        if output.finished:
            self.output = output
            self.run.conclude(output)
        self.fail_parent()

    def notify(self) -> None:
        """Pass the output of a step to ``on_output``. When all samples have finished, conclude the blocks."""
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
        """End its blocks, and the blocks of its parent, with ``error``."""
        if self.run.error is None:
            self.run.fail(error)
        self.fail_parent()

    def fail_parent(self) -> None:
        """If this sample has failed, end the blocks of its parent with the same error."""
        failed, parent = self.run.failed, self.parent
        if failed is not None and parent is not None and parent.run.error is None:
            failed.add_note(f"This was sample {parent.samples.index(self)} of {len(parent.samples)}.")
            parent.run.fail(failed)

    def cancel(self) -> None:
        """End the blocks."""
        for request in (self, *self.samples):
            request.run.cancel()

    def split(self, new_run: Callable[[str], RequestRun]) -> None:
        """Make a request for each sample, or fail if the block cannot be shared by samples.

        ``new_run`` returns a run with the given name, in which the edits of the model have begun.
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
            sample = Request(dict(self.prompt), sampling, new_run(f"{run.name}, sample {number}"), parent=self)
            self.samples.append(sample)
            sample.fail_parent()
            try:
                for location, steering in run.steering.items():
                    sample.run.steer(location, steering)
            except ValueError as error:
                sample.fail(error)


def _joined(outputs: Sequence[Any], finished: bool) -> Any:
    """Join vLLM's outputs for the samples, ``None`` for a sample without one, to an output as vLLM itself returns for ``n=``."""
    begun = [(number, output) for number, output in enumerate(outputs) if output is not None]
    whole = copy.copy(begun[0][1])
    whole.outputs = []
    for number, output in begun:
        (completion,) = output.outputs
        completion.index = number
        whole.outputs.append(completion)
    whole.finished = finished
    return whole
