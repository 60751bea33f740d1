"""Which rows of a step are whose: for blocks, and for the tables of a compiled engine.

This runs in Python in every step of the engine, while the device has nothing to do. Most steps are like the one before: each request of the
batch has one token, its next one. A few comparisons recognize such a step, and the result for the step before holds,
except for the positions.

vLLM has two model runners, the part of a worker that puts the flat batch of a step together, and each keeps the rows of the requests in a
place of its own: both are read into *spans*. V1 remembers a request from its first step to its last. V2 forgets a request that has to make
room for others (preemption), and takes it in again as if it were new. So, for both, rows that come again are recognized by their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..steering.entries import ENTRY
from .request_rows import RequestRows
from .requests import RequestRun
from .steps import EngineStep, Part

_CHUNKED = (
    "This request's prompt was split over several steps of the engine (chunked prefill), so no location sees all of it. Make the "
    "engine with `enable_chunked_prefill=False`, which is the default of `VLLM`, or raise `max_num_batched_tokens`."
)
_PREEMPTED = (
    "The engine ran out of key-value cache and computes this request anew; a block cannot run twice. Give the engine more memory "
    "(`kv_cache_memory_bytes=...`, `gpu_memory_utilization=...`), or trace fewer requests at once."
)


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


@dataclass
class _Decoding:
    """A step in which each request of the batch had one token, and another was sampled for it."""

    names: list[str]  # the requests of the batch
    total: int  # rows of the flat batch, padding included
    next_positions: list[int]  # of the requests, if the next step is another of this kind
    runs: list[RequestRun]
    step: EngineStep | None


class Bookkeeping:
    """Says, step by step of one model runner, which rows are whose. Requests have the engine core's names."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._last: _Decoding | None = None
        self.runs: dict[str, RequestRun] = {}  # of requests for which the engine stops
        self.slots: dict[str, tuple[int, int]] = {}  # table entry, and first steered position, of requests steered in the graph

    def add(self, request: str, run: RequestRun) -> None:
        """Attend to the rows of ``request`` for its ``run``."""
        self._last = None
        self.runs[request] = run

    def remove(self, request: str) -> None:
        """Forget all about ``request``."""
        run, slot = self.runs.pop(request, None), self.slots.pop(request, None)
        if run is not None or slot is not None:
            self._last = None

    def follow(self, scheduler_output: Any) -> None:
        """Learn from the scheduler which new requests have which table entry, and which requests have ended."""
        for request in scheduler_output.finished_req_ids:
            self.remove(request)
        for new in scheduler_output.scheduled_new_reqs:
            entry = ((new.sampling_params and new.sampling_params.extra_args) or {}).get(ENTRY)
            if entry is not None:
                self.slots[new.req_id] = tuple(entry)
                self._last = None

    @property
    def attends(self) -> bool:
        """Whether the next step has something to do: for a run here or where this process follows, for a steered row, or to clear one."""
        tapped, link = self._runner.tapped, self._runner.link
        return bool(self.runs or self.slots or (tapped is not None and tapped.rows.filled) or link.attended)

    def step(self, total: int, names: list[str], positions: list[int], size: int, spans: Spans) -> EngineStep | None:
        """Return the step that the runner is about to make, or ``None`` if nobody has to stop in it; give the tables their rows.

        ``total`` rows are with padding, ``size`` rows without; the other arguments are as :func:`batch_of_v1` returns them.
        """
        last = self._last
        if last is None or positions != last.next_positions or names != last.names or size != len(names) or total != last.total:
            return self._another(total, names, positions, size, spans)
        last.next_positions = [position + 1 for position in positions]
        for run in last.runs:
            run.position = run.seen
            run.seen += 1
            run.steps += 1
        step = last.step
        changed = step is not None and step.settle()
        last.step = self._runner.link.step(self._runner, () if step is None else step.parts, None if changed else step)
        return last.step

    def _another(self, total: int, names: list[str], positions: list[int], size: int, spans: Spans) -> EngineStep | None:
        """Return the next step, which is unlike the one before."""
        runner, self._last = self._runner, None
        found = spans({*self.runs, *self.slots} if self.slots else self.runs)
        entries = _entries(self.slots, found)
        if runner.tapped is not None:
            runner.tapped.rows.fill(entries)
        # Values that are only read can be joined over several steps, and rows that come again after a preemption are left out.
        patient = runner.tapped is not None and not runner.tapped.locations
        parts = _parts(self.runs, found, total, len(names), patient) if self.runs else []
        for part in parts:
            part.run.settle(part.tokens.size == 1 and part.ends)
        step: EngineStep | None = runner.link.step(runner, parts)
        steered = sum(span.request in self.slots for span in found)
        # Each request has one token, of which its block has had no values before, and another is sampled for it.
        decoding = all(part.ends and part.tokens.size == 1 and part.run.seen == part.run.position + 1 for part in parts)
        if size == len(names) and len(entries) == steered and decoding:
            following = [position + 1 for position in positions]
            self._last = _Decoding(list(names), total, following, [part.run for part in parts], step)
        return step


def _parts(runs: Mapping[str, RequestRun], spans: list[Span], total: int, requests: int, patient: bool) -> list[Part]:
    """Return the parts of the requests with ``runs`` in a step of ``requests`` requests and ``total`` rows, padding included.

    If it is ``patient``, a prompt may be split over several steps.
    """
    parts: list[Part] = []
    one_each = total == requests
    for request, row, start, size, done, ends in spans:
        run = runs.get(request)
        if run is None or run.error is not None:
            continue
        seen, behind = run.seen, done + size
        if done < seen and not patient and run.touches_model:
            run.fail(RuntimeError(_PREEMPTED))
        elif (done > seen or not (ends or patient)) and run.touches_model:
            run.fail(ValueError(_CHUNKED))
        else:
            run.steps += ends
            run.position = done
            rows = RequestRows(start, size, total)
            if patient and seen > done:
                rows = RequestRows(start + seen - done, max(behind - seen, 0), total)
            if behind > seen:
                run.seen = behind
            parts.append(Part(run, rows, rows if one_each else RequestRows(row, 1, requests), ends))
    return parts


def _entries(slots: Mapping[str, tuple[int, int]], spans: list[Span]) -> list[tuple[int, int, int]]:
    """Return the rows of steered requests in a step, and their entries of the tables."""
    entries = []
    for request, _, start, size, position, _ in spans:
        if request in slots:
            slot, first = slots[request]
            skipped = max(first - position, 0)
            if skipped < size:
                entries.append((start + skipped, start + size, slot))
    return entries
