"""Which rows of a step belong to which request.

A step of the engine runs the tokens of all its requests as one flat batch. vLLM has two model runners, the part of a worker that puts
this batch together, and each says in its own place who has which rows of it. Here both are read, and come out as *spans*; nothing
else of this package asks which runner an engine has, but where it is stopped (:mod:`.hooks`) and what it cannot do (:mod:`.runner`).

V1 keeps what it knows of a request from its first step to its last. V2 forgets a request that has to make room for others (preemption), and
takes it in again as if it were new. So that rows come again is told by their positions, for both.
"""

from __future__ import annotations

from collections.abc import Collection
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


def spans_of_v1(runner: Any, scheduler_output: Any, wanted: Collection[str]) -> list[Span]:
    """Return the rows of the requests ``wanted`` in the step that a model runner V1 is about to make.

    Args:
        runner: The runner, its batch being prepared.
        scheduler_output: What the scheduler asks of the step.
        wanted: Names of requests.
    """
    sizes, batch, known = scheduler_output.num_scheduled_tokens, runner.input_batch, runner.requests
    names = batch.req_ids
    positions = batch.num_computed_tokens_cpu[: len(names)].tolist()
    spans, start = [], 0
    for row, (request, position) in enumerate(zip(names, positions, strict=True)):
        size = sizes[request]
        if request in wanted:
            spans.append(Span(request, row, start, size, position, position + size >= known[request].num_tokens))
        start += size
    return spans


def spans_of_v2(batch: Any, wanted: Collection[str]) -> list[Span]:
    """Return the rows of the requests ``wanted`` in a batch of a model runner V2.

    Args:
        batch: The batch, as ``prepare_inputs`` of the runner returns it.
        wanted: Names of requests.
    """
    names = batch.req_ids
    # The last are the tokens that were there when the request was taken in; those that were sampled since have a step each.
    arrays = (batch.query_start_loc_np, batch.num_scheduled_tokens, batch.num_computed_tokens_np, batch.prefill_len_np)
    columns = [array[: len(names)].tolist() for array in arrays]
    return [
        Span(request, row, start, size, position, position + size >= first)
        for row, (request, start, size, position, first) in enumerate(zip(names, *columns, strict=True))
        if request in wanted
    ]
