"""vLLM's worker with a model runner that knows the runs of requests.

vLLM is told the class by name (``worker_cls``). The worker makes its own model runner, whose class is then replaced by a subclass
that stops at three places: around the model's forward pass, where the flat batch is known; before sampling, with the logits; and after
it, with the tokens. A step without blocks runs as it would without this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.platforms import current_platform

from .ranks import Alone
from .requests import LOGITS, RequestRun
from .rows import Rows
from .runner import check
from .steering import Steering
from .steps import Part
from .taps import Layout, tap


def _platform_worker() -> Any:
    """Return vLLM's worker for this machine."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


_Base: Any = _platform_worker()

_CHUNKED = (
    "This request's prompt was split over several steps of the engine (chunked prefill), so no location sees all of it. Make the "
    "engine with `enable_chunked_prefill=False`, which is the default of `VLLM`, or raise `max_num_batched_tokens`."
)
_PREEMPTED = (
    "The engine ran out of key-value cache and computes this request anew; a block cannot run twice. Give the engine more memory "
    "(`kv_cache_memory_bytes=...`, `gpu_memory_utilization=...`), or trace fewer requests at once."
)


class Worker(_Base):  # type: ignore[misc]
    """A worker whose model runner offers the values of a step to the requests' blocks."""

    def init_device(self) -> None:
        description = self.vllm_config.additional_config.get("nnsight")
        check(self.vllm_config, bool(description) and Layout.described(description).only_tables)
        super().init_device()
        runner = self.model_runner
        runner.__class__ = type(type(runner).__name__, (type(runner),), dict(_hooks(type(runner))))
        runner.runs = {}
        runner.tree = None
        runner.link = Alone()
        runner.step = None
        runner.slots = {}
        runner.tapped = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        description = self.vllm_config.additional_config.get("nnsight")
        if description and self.vllm_config.compilation_config.mode != CompilationMode.NONE:
            runner, config = self.model_runner, self.vllm_config.model_config
            rows = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=self.device)
            layout = Layout.described(description)
            runner.tapped = tap(runner.get_model(), layout, rows, config.get_hidden_size(), config.dtype)

    def write_slot(self, slot: int, steering: Mapping[str, Steering]) -> None:
        """Write what another rank has taken a slot for to the tables of this one."""
        self.model_runner.tapped.slots.write(slot, steering)


def _hooks(base: Any) -> dict[str, Any]:
    """Return the methods that a model runner of the class ``base`` gets."""

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.step = None
        if not (self.runs or self.slots or _steered(self) or self.link.attended):
            return base.execute_model(self, scheduler_output, *args, **kwargs)
        self.scheduled = scheduler_output
        with ExitStack() as self.stack:
            return base.execute_model(self, scheduler_output, *args, **kwargs)

    def _model_forward(self: Any, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.slots or _steered(self):
            self.tapped.rows.fill(_entries(self))
        first: Any = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        self.step = self.link.step(self, _parts(self, first.shape[0]) if self.runs else [])
        if self.step is not None:
            if self.tapped is None:
                self.stack.enter_context(self.tree.instrumentation)
            else:
                self.stack.enter_context(self.tapped.captures.filling())
            self.stack.enter_context(self.step.active())
        output = base._model_forward(self, input_ids, positions, *args, **kwargs)
        if self.step is not None:
            if self.tapped is not None:
                self.tapped.captures.hand_out(self.step, first.shape[0])
            self.step.rows_are_requests()
        return output

    def _dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model to see what it needs, or to record graphs; what these copy goes to the buffers of captures."""
        with ExitStack() as stack:
            if self.tapped is not None:
                stack.enter_context(self.tapped.captures.filling())
            return base._dummy_run(self, *args, **kwargs)

    def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        step, self.step = self.step, None
        if step is not None and logits is not None:
            logits = step.meet(LOGITS, logits)
        sampled = base._sample(self, logits, spec_decode_metadata)
        if logits is not None:
            sampled.sampled_token_ids = self.link.sampled(step, sampled.sampled_token_ids)
        return sampled

    hooks = (execute_model, _model_forward, _dummy_run, _sample)
    return {hook.__name__: hook for hook in hooks}


def _parts(runner: Any, total: int) -> list[Part]:
    """Return what requests with blocks have in the step that ``runner`` is about to make.

    Args:
        runner: The model runner, its inputs being prepared.
        total: Rows of the flat batch.
    """
    scheduled, batch = runner.scheduled, runner.input_batch
    resumed = getattr(scheduled.scheduled_cached_reqs, "resumed_req_ids", ())
    parts: list[Part] = []
    start = 0
    # What is only read can be put together from several steps, and what was read before is left out where it comes again.
    patient = runner.tapped is not None and not runner.tapped.locations and runner.link.alone
    for index, request in enumerate(batch.req_ids):
        size = scheduled.num_scheduled_tokens[request]
        run: RequestRun | None = runner.runs.get(request)
        if run is not None and run.error is None:
            done = int(batch.num_computed_tokens_cpu[index])
            first = max(done, run.seen) if patient else done
            ends = done + size >= runner.requests[request].num_tokens  # and a token is sampled
            if run.touches_model and not patient and request in resumed:
                run.fail(RuntimeError(_PREEMPTED))
            elif run.touches_model and (done > run.seen or not (ends or patient)):
                run.fail(ValueError(_CHUNKED))
            else:
                run.steps += ends
                run.seen = max(done + size, run.seen)
                rows = Rows(start + first - done, max(done + size - first, 0), total, first)
                parts.append(Part(run, rows, Rows(index, 1, len(batch.req_ids)), ends))
        start += size
    return parts


def _steered(runner: Any) -> bool:
    """Whether rows of the last step were steered, of whom the tables are to forget."""
    return runner.tapped is not None and bool(runner.tapped.rows.filled)


def _entries(runner: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of steered requests in the step that ``runner`` is about to make, and their entries of the tables."""
    sizes, batch = runner.scheduled.num_scheduled_tokens, runner.input_batch
    start = 0
    for index, request in enumerate(batch.req_ids):
        size = sizes[request]
        found = runner.slots.get(request)
        if found is not None:
            slot, first = found
            skipped = max(first - int(batch.num_computed_tokens_cpu[index]), 0) if first else 0
            if slot and skipped < size:
                yield start + skipped, start + size, slot
        start += size
