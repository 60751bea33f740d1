"""The rows of each request in a step, for blocks and for the tables of a compiled engine.

This Python code runs in every step of the engine, while the device is idle. Most steps are like the previous one: each request of the batch
has one token, its next one. A few comparisons recognize such a step. Then the result for the previous step is reused, with new positions.

A model runner is the part of a worker that prepares the flat batch of a step. vLLM has two, and each stores the rows of the requests in a
different form, so both forms are read into *spans*. V1 remembers a request from its first step to its last. V2 forgets a request that is
preempted, and later takes it in as a new one. So rows that are computed again are recognized by their positions, which works for both.
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
    "model with `enable_chunked_prefill=False`, which is the default of `VLLM`, or with a larger `max_num_batched_tokens`."
)
_PREEMPTED = (
    "The engine ran out of key-value cache and computes this request anew; a block cannot run twice. Give the engine more memory "
    "(`kv_cache_memory_bytes=...`, `gpu_memory_utilization=...`), or trace fewer requests at once."
)


class Span(NamedTuple):
    """The rows of one request in the flat batch of a step."""

    request: str  # the name of the request in the engine core
    row: int  # its row in values with one row per request
    start: int  # its first row in the flat batch
    size: int  # number of its rows
    position: int  # position of the first row in the request
    ends: bool  # whether a token is sampled after these rows


#: A function that returns the rows of the requests with the given names.
Spans = Callable[[Collection[str]], list[Span]]


def batch_of_v1(runner: Any, scheduler_output: Any) -> tuple[list[str], list[int], int, Spans]:
    """Return the batch that a model runner V1 is preparing for ``scheduler_output``: the names of its requests, in the order of their rows;
    the position of the first row of each request; the number of rows; and a function that returns spans."""
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
    """Return the same as :func:`batch_of_v1`, for a batch that ``prepare_inputs`` of a model runner V2 has returned."""
    names = batch.req_ids
    positions = batch.num_computed_tokens_np[: len(names)].tolist()

    def spans(wanted: Collection[str]) -> list[Span]:
        # The prefill has all tokens that the request had when V2 took it in. Every token that was sampled since then has its own step.
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
    """A step in which each request of the batch has one token, and a new token is sampled for each."""

    names: list[str]  # the requests of the batch
    total: int  # rows of the flat batch, including padding
    next_positions: list[int]  # positions of the requests in the next step, if that is a decoding step, too
    runs: list[RequestRun]
    step: EngineStep | None


class Bookkeeping:
    """Finds the rows of each request in each step of one model runner. Requests are named as in the engine core."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._last: _Decoding | None = None
        self.runs: dict[str, RequestRun] = {}  # runs of the requests for which the engine stops
        self.slots: dict[str, tuple[int, int]] = {}  # table entry and first steered position of the requests steered in the graph

    def add(self, request: str, run: RequestRun) -> None:
        """From now on, include the rows of ``request`` in steps, for its ``run``."""
        self._last = None
        self.runs[request] = run

    def remove(self, request: str) -> None:
        """Forget ``request``."""
        run, slot = self.runs.pop(request, None), self.slots.pop(request, None)
        if run is not None or slot is not None:
            self._last = None

    def follow(self, scheduler_output: Any) -> None:
        """Read from the scheduler's output the table entries of new requests, and the requests that have ended."""
        for request in scheduler_output.finished_req_ids:
            self.remove(request)
        for new in scheduler_output.scheduled_new_reqs:
            entry = ((new.sampling_params and new.sampling_params.extra_args) or {}).get(ENTRY)
            if entry is not None:
                self.slots[new.req_id] = tuple(entry)
                self._last = None

    @property
    def has_work(self) -> bool:
        """Whether the next step needs bookkeeping: for a run of this process or of the leader, or for rows of tables to set or clear."""
        tapped, link = self._runner.tapped, self._runner.link
        return bool(self.runs or self.slots or (tapped is not None and tapped.rows.filled) or link.attended)

    def step(self, total: int, names: list[str], positions: list[int], size: int, spans: Spans) -> EngineStep | None:
        """Return the step that the runner is about to make, or ``None`` if no request has to stop in it. Update the rows of the tables.

        ``total`` is the number of rows with padding, and ``size`` without. The other arguments are results of :func:`batch_of_v1`.
        """
        last = self._last
        if last is None or positions != last.next_positions or names != last.names or size != len(names) or total != last.total:
            return self._new_step(total, names, positions, size, spans)
        last.next_positions = [position + 1 for position in positions]
        for run in last.runs:
            run.position = run.seen
            run.seen += 1
            run.steps += 1
        step = last.step
        changed = step is not None and step.settle()
        last.step = self._runner.link.step(self._runner, () if step is None else step.parts, None if changed else step)
        return last.step

    def _new_step(self, total: int, names: list[str], positions: list[int], size: int, spans: Spans) -> EngineStep | None:
        """Return a step that is not like the previous one."""
        runner, self._last = self._runner, None
        found = spans({*self.runs, *self.slots} if self.slots else self.runs)
        entries = _entries(self.slots, found)
        if runner.tapped is not None:
            runner.tapped.rows.fill(entries)
        # Without taps, values are only read: rows of several steps are joined, and rows that are computed again are left out.
        patient = runner.tapped is not None and not runner.tapped.locations
        parts = _parts(self.runs, found, total, len(names), patient, runner.batched) if self.runs else []
        for part in parts:
            part.run.settle(part.tokens.size == 1 and part.ends)
        step: EngineStep | None = runner.link.step(runner, parts)
        steered = sum(span.request in self.slots for span in found)
        # Each request has one token that its block has not seen before, and a new token is sampled for it.
        decoding = all(part.ends and part.tokens.size == 1 and part.run.seen == part.run.position + 1 for part in parts)
        if size == len(names) and len(entries) == steered and decoding:
            following = [position + 1 for position in positions]
            self._last = _Decoding(list(names), total, following, [part.run for part in parts], step)
        return step


def _parts(
    runs: Mapping[str, RequestRun], spans: list[Span], total: int, requests: int, patient: bool, batched: bool = False
) -> list[Part]:
    """Return the parts of the requests with ``runs`` in a step of ``requests`` requests and ``total`` rows, including padding.

    With ``patient``, a prompt may be split over several steps, and rows may be computed again. Otherwise both are errors of runs whose
    blocks need values of the model. For ``batched`` see :class:`.RequestRows`.
    """
    parts: list[Part] = []
    one_each = total == requests and not batched  # values with one row per request are never batched
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
            rows = RequestRows(start, size, total, batched)
            if patient and seen > done:
                rows = RequestRows(start + seen - done, max(behind - seen, 0), total, batched)
            if behind > seen:
                run.seen = behind
            parts.append(Part(run, rows, rows if one_each else RequestRows(row, 1, requests), ends))
    return parts


def _entries(slots: Mapping[str, tuple[int, int]], spans: list[Span]) -> list[tuple[int, int, int]]:
    """Return first row, end row and table entry of each steered request in a step."""
    entries = []
    for request, _, start, size, position, _ in spans:
        if request in slots:
            slot, first = slots[request]
            skipped = max(first - position, 0)
            if skipped < size:
                entries.append((start + skipped, start + size, slot))
    return entries
