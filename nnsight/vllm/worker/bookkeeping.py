"""Which rows of a step are whose: for blocks, and for the tables of a compiled engine.

This runs in Python in every step of the engine, while the device has nothing to do. Most steps are as the one before: each request of the
batch has one token, its next one. Such a step is told from others by a few comparisons, and what was found out for the one before holds,
but for the positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .request_rows import RequestRows
from .requests import RequestRun
from .step_rows import Span, Spans
from .steps import EngineStep, Part

_CHUNKED = (
    "This request's prompt was split over several steps of the engine (chunked prefill), so no location sees all of it. Make the "
    "engine with `enable_chunked_prefill=False`, which is the default of `VLLM`, or raise `max_num_batched_tokens`."
)
_PREEMPTED = (
    "The engine ran out of key-value cache and computes this request anew; a block cannot run twice. Give the engine more memory "
    "(`kv_cache_memory_bytes=...`, `gpu_memory_utilization=...`), or trace fewer requests at once."
)


@dataclass
class _Decoding:
    """A step in which each request of the batch had one token, and another was sampled for it.

    Attributes:
        names: The requests of the batch.
        total: RequestRows of the flat batch.
        next_positions: Where the requests of the batch are if the next step is another of this kind.
        runs: The runs that had rows.
        step: The step.
    """

    names: list[str]
    total: int
    next_positions: list[int]
    runs: list[RequestRun]
    step: EngineStep | None


class Bookkeeping:
    """Says, step by step of one model runner, which rows are whose.

    Args:
        runner: The model runner.

    Attributes:
        runs: The runs of requests for which the engine stops, by what the engine core calls the request.
        slots: Entry of the tables, and the first position to which it applies, of requests that are steered in the graph, likewise.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._last: _Decoding | None = None
        self.runs: dict[str, RequestRun] = {}
        self.slots: dict[str, tuple[int, int]] = {}

    def add(self, request: str, run: RequestRun | None = None, slot: tuple[int, int] | None = None) -> None:
        """Attend to the rows of ``request`` from now on: for its ``run``, for its ``slot``, or for both."""
        self._last = None
        if run is not None:
            self.runs[request] = run
        if slot is not None:
            self.slots[request] = slot

    def remove(self, request: str) -> bool:
        """Forget all about ``request``; return whether it had a slot."""
        run, slot = self.runs.pop(request, None), self.slots.pop(request, None)
        if run is not None or slot is not None:
            self._last = None
        return slot is not None

    def use_slots(self, slots: Mapping[str, tuple[int, int]]) -> None:
        """Take over the ``slots`` of another process."""
        if slots != self.slots:
            self._last = None
            self.slots = dict(slots)

    @property
    def attends(self) -> bool:
        """Whether there is something to do in the next step: for a run, for a steered row, or for one of the last step to be forgotten."""
        tapped = self._runner.tapped
        return bool(self.runs or self.slots or (tapped is not None and tapped.rows.filled))

    def step(self, total: int, names: list[str], positions: list[int], size: int, spans: Spans) -> EngineStep | None:
        """Return the step that the runner is about to make, or ``None`` if nobody has to stop in it; let the tables know their rows.

        Args:
            total: RequestRows of the flat batch, those that only pad it included.
            names: The requests that have rows in it, in their order.
            positions: Of the first row of each, in the request.
            size: RequestRows of the batch without those that only pad it.
            spans: Returns the rows of the requests with the names that it is given.
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
        last.step = self._runner.link.step(self._runner, () if step is None else step.parts, step)
        return last.step

    def _another(self, total: int, names: list[str], positions: list[int], size: int, spans: Spans) -> EngineStep | None:
        """Return the next step, which is not as the one before."""
        runner, self._last = self._runner, None
        found = spans({*self.runs, *self.slots} if self.slots else self.runs)
        entries = _entries(self.slots, found)
        if runner.tapped is not None:
            runner.tapped.rows.fill(entries)
        # What is only read can be put together from several steps, and what was read before is left out where it comes again.
        patient = runner.tapped is not None and not runner.tapped.locations
        parts = _parts(self.runs, found, total, len(names), patient) if self.runs else []
        step: EngineStep | None = runner.link.step(runner, parts)
        steered = sum(span.request in self.slots for span in found)
        if size == len(names) and len(entries) == steered and all(map(_is_decoding, parts)):
            following = [position + 1 for position in positions]
            self._last = _Decoding(list(names), total, following, [part.run for part in parts], step)
        return step


def _is_decoding(part: Part) -> bool:
    """Whether a request has one token, of which its block has not had values before, and another is sampled for it."""
    return part.ends and part.tokens.size == 1 and part.run.seen == part.run.position + 1


def _parts(runs: Mapping[str, RequestRun], spans: list[Span], total: int, requests: int, patient: bool) -> list[Part]:
    """Return what requests with blocks have in a step.

    Args:
        runs: Their runs.
        spans: The rows of the requests that matter.
        total: RequestRows of the flat batch, those that only pad it included.
        requests: How many requests have rows in it.
        patient: Whether a prompt may come in parts.
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
