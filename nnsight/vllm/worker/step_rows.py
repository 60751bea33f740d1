"""Which rows of a step belong to which request.

vLLM has two model runners, the part of a worker that puts the flat batch of a step together, and each keeps the rows of the requests in a
place of its own. The functions here read both into *spans*. The rest of this package does not ask which runner an engine has, except for
where it stops (:mod:`~nnsight.vllm.worker.hooks`) and what it refuses (:mod:`~nnsight.vllm.worker.runner`).

V1 remembers a request from its first step to its last. V2 forgets a request that has to make room for others (preemption), and takes it in
again as if it were new. So, for both, rows that come again are recognized by their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class Span(NamedTuple):
    """The rows of one request in the flat batch of a step."""

    request: str  # the engine core's name of the request
    row: int  # its row of values that have one row for each request
    start: int  # the first of its rows
    size: int
    position: int  # of the first row in the request
    ends: bool  # whether these are the last tokens before the next one is sampled


#: Returns the rows of the requests with the given names.
Spans = Callable[[Collection[str]], list[Span]]


def batch_of_v1(runner: Any, scheduler_output: Any) -> tuple[list[str], list[int], int, Spans]:
    """Return the batch that a model runner V1 is preparing for ``scheduler_output``: names of the requests that have rows in it, in their
    order, the position of the first row of each, the number of rows, and a function that returns spans."""
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
    """Return the same of a batch that ``prepare_inputs`` of a model runner V2 has returned."""
    names = batch.req_ids
    positions = batch.num_computed_tokens_np[: len(names)].tolist()

    def spans(wanted: Collection[str]) -> list[Span]:
        # A request's prompt has the tokens that were there when it was taken in. Each token that was sampled since has a step of its own.
        arrays = (batch.query_start_loc_np, batch.num_scheduled_tokens, batch.prefill_len_np)
        columns = [array[: len(names)].tolist() for array in arrays]
        return [
            Span(request, row, start, size, position, position + size >= first)
            for row, (request, position, start, size, first) in enumerate(zip(names, positions, *columns, strict=True))
            if request in wanted
        ]

    return names, positions, batch.num_tokens, spans
