"""Which rows of a step belong to which request.

A step of the engine runs the tokens of all its requests as one flat batch. vLLM has two model runners, the part of a worker that puts
this batch together, and each says in its own place who has which rows of it. Here both are read, and come out as *spans*; nothing
else of this package asks which runner an engine has, but where it is stopped (:mod:`.hooks`) and what it cannot do (:mod:`.runner`).

V1 keeps what it knows of a request from its first step to its last. V2 forgets a request that has to make room for others (preemption), and
takes it in again as if it were new. So that rows come again is told by their positions, for both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


def spans_of_v1(runner: Any, scheduler_output: Any, wanted: Collection[str]) -> Iterator[Span]:
    """Yield the rows of the requests ``wanted`` in the step that a model runner V1 is about to make.

    Args:
        runner: The runner, its batch being prepared.
        scheduler_output: What the scheduler asks of the step.
        wanted: Names of requests.
    """
    sizes, batch, start = scheduler_output.num_scheduled_tokens, runner.input_batch, 0
    for index, request in enumerate(batch.req_ids):
        size = sizes[request]
        if request in wanted:
            position = int(batch.num_computed_tokens_cpu[index])
            yield Span(request, index, start, size, position, position + size >= runner.requests[request].num_tokens)
        start += size


def spans_of_v2(batch: Any, wanted: Collection[str]) -> Iterator[Span]:
    """Yield the rows of the requests ``wanted`` in a batch of a model runner V2.

    Args:
        batch: The batch, as ``prepare_inputs`` of the runner returns it.
        wanted: Names of requests.
    """
    for index, request in enumerate(batch.req_ids):
        if request in wanted:
            start, size = int(batch.query_start_loc_np[index]), int(batch.num_scheduled_tokens[index])
            position = int(batch.num_computed_tokens_np[index])
            # Tokens that were there when the request was taken in; those that were sampled since have a step each.
            yield Span(request, index, start, size, position, position + size >= int(batch.prefill_len_np[index]))
