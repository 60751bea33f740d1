"""Which rows of a step belong to which request.

A step of the engine runs the tokens of all its requests as one flat batch. vLLM has two model runners, the part of a worker that puts this
batch together, and each says in its own place who has which rows of it. Here both are read, and come out as *spans*; nothing else of this
package asks which runner an engine has, but where it is stopped (:mod:`~nnsight.vllm.worker.hooks`) and what it cannot do
(:mod:`~nnsight.vllm.worker.runner`).

V1 keeps what it knows of a request from its first step to its last. V2 forgets a request that has to make room for others (preemption), and
takes it in again as if it were new. So that rows come again is told by their positions, for both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class Span(NamedTuple):
    """The rows of one request in the flat batch of a step.

    Attributes:
        request: What the engine core calls the request.
        row: Its row of what has one row for each request.
        start: The first of its rows.
        size: How many.
        position: Position of the first in the request.
        ends: Whether these are the last tokens before the next one is sampled.
    """

    request: str
    row: int
    start: int
    size: int
    position: int
    ends: bool


#: Returns the rows of the requests with the names that it is given.
Spans = Callable[[Collection[str]], list[Span]]


def batch_of_v1(runner: Any, scheduler_output: Any) -> tuple[list[str], list[int], int, Spans]:
    """Return the batch of the step that a model runner V1 is about to make: the names of the requests that have rows in it, in their
    order, the positions of the first row of each, how many rows it has, and what returns who has which.

    Args:
        runner: The runner, its batch being prepared.
        scheduler_output: What the scheduler asks of the step.
    """
    batch = runner.input_batch
    names = batch.req_ids
    positions = batch.num_computed_tokens_cpu[: len(names)].tolist()

    def spans(wanted: Collection[str]) -> list[Span]:
        sizes, known = scheduler_output.num_scheduled_tokens, runner.requests
        found, start = [], 0
        for row, (request, position) in enumerate(zip(names, positions, strict=True)):
            size = sizes[request]
            if request in wanted:
                found.append(Span(request, row, start, size, position, position + size >= known[request].num_tokens))
            start += size
        return found

    return names, positions, scheduler_output.total_num_scheduled_tokens, spans


def batch_of_v2(batch: Any) -> tuple[list[str], list[int], int, Spans]:
    """Return the same of a batch of a model runner V2, as ``prepare_inputs`` of the runner returns it."""
    names = batch.req_ids
    positions = batch.num_computed_tokens_np[: len(names)].tolist()

    def spans(wanted: Collection[str]) -> list[Span]:
        # The last are the tokens that were there when the request was taken in; those that were sampled since have a step each.
        arrays = (batch.query_start_loc_np, batch.num_scheduled_tokens, batch.prefill_len_np)
        columns = [array[: len(names)].tolist() for array in arrays]
        return [
            Span(request, row, start, size, position, position + size >= first)
            for row, (request, position, start, size, first) in enumerate(zip(names, positions, *columns, strict=True))
            if request in wanted
        ]

    return names, positions, batch.num_tokens, spans
