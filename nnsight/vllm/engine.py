"""A vLLM engine in this process, and the requests in it.

The engine core runs in the caller's process and thread. So blocks and model take turns as in other traces, and no value has to be sent to
another process. One thread uses the engine at a time; :mod:`~nnsight.vllm.asynchronous` starts a thread for this.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .blocks.stepping import BlockPrograms
from .groups import groups
from .prompts import config_of, refusals
from .samples import Request
from .stack_room import with_room
from .steering.entries import ENTRY, Entries, Lease
from .steering.graph_functions import EditFunction, register
from .steering.graph_programs import GraphProgram
from .steering.tables import Steering, salt_of
from .worker.engine_taps import HANDOFF, Layout, StopPrograms
from .worker.requests import RequestLimits
from .worker.runner import SPECULATIVE, choose_runner
from .worker.step_programs import BlockProgram

WORKER = f"{__package__}.worker.worker.Worker"

OWN_ENGINE = (
    "A block cannot run its own engine: the engine waits while the block runs. Run the other trace before, or as an invoke of its own."
)
_DRAFTS = (
    f"The block waits for a value of the model, and this engine decodes speculatively: {SPECULATIVE}. Make the model without "
    "`speculative_config`. With it, a block may use only `steer()` and `tracer.result`."
)


class VLLMEngine:
    """An engine with the model of a repository or folder. Its attribute ``llm`` is vLLM's own object, made with ``options``.

    With an empty ``layout``, the engine stops between all modules. ``functions`` (for layers with tables) and ``programs``, both by name,
    become parts of the graph.
    """

    def __init__(
        self,
        repo: str,
        options: Mapping[str, Any],
        layout: Layout,
        functions: Mapping[str, Callable[..., Any]],
        programs: Mapping[str, GraphProgram],
    ) -> None:
        from vllm import LLM
        from vllm.utils.system_utils import set_env_var

        choose_runner()  # again: the environment may have changed since the model was made
        config: Any = config_of(repo, options).model_config if functions else None
        self._functions = {
            name: EditFunction.of(name, function, config.get_hidden_size(), config.dtype) for name, function in functions.items()
        }
        self._programs = programs
        full = f"The engine has room for {layout.slots} different edits at a time, and all are in use. Make the model with more, as in "
        self.entries = Entries(layout.slots, full + "`edits={'modules': [...], 'slots': 32}`, or trace fewer requests at once.")
        if layout.modules:
            digests = [tuple(map(register, found)) for found in (self._functions.values(), self._programs.values())]
            options = _with_layout(options, replace(layout, functions=digests[0], programs=digests[1]))
        parallel = options["tensor_parallel_size"] > 1
        groups.check_alone(parallel)
        if parallel:
            from .worker.parallel import ParallelExecutor

            options = {**options, "distributed_executor_backend": ParallelExecutor}
        _hide_llvmlite_dict()
        with set_env_var("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), groups.held(parallel):  # the core runs in this process
            self.llm = LLM(model=repo, worker_cls=WORKER, **options)
            client = self.llm.llm_engine.engine_core
            client._finalizer.detach()
            groups.used_by(client.engine_core, parallel)
        weakref.finalize(self, groups.shut_down, client.engine_core)
        self._runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._numbers = itertools.count()
        self._blocks = None if parallel else BlockPrograms(BlockProgram.of)
        self._stopping = StopPrograms(self._runner, self.llm.llm_engine.model_config, self._functions)
        self._lock = threading.RLock()
        self._running = False
        self.pending: dict[str, Request] = {}  # the requests in the engine, by their names in the engine

    @functools.cached_property
    def limits(self) -> RequestLimits:
        """The abilities of this engine."""
        config, tapped = self.llm.llm_engine.model_config, self._runner.tapped
        hidden, vocabulary = config.get_hidden_size(), config.get_vocab_size()
        if tapped is None:
            return RequestLimits(
                hidden, functions=self._functions, stopping=self._stopping, blocks=self._blocks, vocabulary=vocabulary
            )
        drafts = self.llm.llm_engine.vllm_config.speculative_config is not None
        locations, steered, captured = tuple(tapped.locations), tuple(tapped.steered), tuple(tapped.captured)
        places = (hidden, locations, steered, tapped.rank, captured, drafts)
        return RequestLimits(*places, self._functions, self._programs, self._stopping, self._blocks, vocabulary)

    def run(self, requests: Sequence[Request]) -> None:
        """Run ``requests`` until all have finished or failed. Errors of blocks are stored in their runs. Raise ``ValueError`` if a block
        of this engine calls it, or if vLLM refuses a request."""
        with self._lock:
            if self._running:
                raise ValueError(OWN_ENGINE)
            self._running = True
            try:
                with_room(self._run_all, requests)
            finally:
                self._running = False

    def _run_all(self, requests: Sequence[Request]) -> None:
        try:
            for request in requests:
                self.admit(request)
            while self.pending:
                self.advance()
        finally:
            for request in list(self.pending.values()):
                self.abort(request)

    def admit(self, request: Request) -> None:
        """Send ``request`` to the engine, unless its blocks have ended already. Raise ``ValueError`` if vLLM refuses it."""
        from vllm.sampling_params import RequestOutputKind

        request.run.begun = True
        if request.ended:
            return
        if request.samples:
            for sample in request.samples:
                self.admit(sample)
            return
        run, sampling = request.run, request.sampling
        if run.touches_model and run.limits.drafts:
            request.fail(ValueError(_DRAFTS))
            return
        if (request.parent or request).on_output is None:  # only the last output is needed
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
        name = request.name = f"nnsight-{next(self._numbers)}"
        if run.touches_model:  # the block must see every token, so the request shares no cached prefix
            request.prompt["cache_salt"] = name
            sampling.skip_reading_prefix_cache = True
        elif run.salt:
            request.prompt["cache_salt"] = run.salt
        entry = None
        if run.steering and self._runner.tapped is not None:
            try:
                request.lease = self._leased(run.steering)
            except ValueError as error:
                request.fail(error)
                return
            entry = (request.lease.entry.slot, next(iter(run.steering.values())).start)
        if entry is not None or sampling.extra_args:
            sampling.extra_args = {**(sampling.extra_args or {}), ENTRY: entry}
        try:
            with refusals():
                request.internal = self.llm.llm_engine.add_request(name, request.prompt, sampling)
        except BaseException:
            self._detach(request)
            raise
        self.pending[name] = request
        if run.touches_model or run.uses:
            self._runner.bookkeeping.add(request.internal, run)

    def _leased(self, steering: Mapping[str, Steering]) -> Lease:
        """Return a lease of a table entry with the parameters of ``steering``. Raise ``ValueError`` if no entry is free."""
        lease = self.entries.take(salt_of(steering))
        if not lease.entry.written:
            asked = {location: found.parts for location, found in steering.items()}
            self.llm.llm_engine.model_executor.collective_rpc("nnsight_write", args=(lease.entry.slot, asked))
            lease.entry.written = True
        return lease

    def advance(self) -> None:
        """Make one step of the engine, and remove finished and failed requests."""
        # The first call in a thread replaces OpenMP's number of threads by torch's. vLLM's attention on CPUs fails if the number changes
        # within a step, so the first call has to come before it.
        torch.get_num_threads()
        notified: dict[Request, None] = {}
        for output in self.llm.llm_engine.step():
            request = self.pending.get(output.request_id)
            if request is None:
                continue
            if output.finished:
                del self.pending[request.name]
                self._detach(request)
            request.take(output)
            notified[request.parent or request] = None
        for request in notified:
            request.notify()
        for request in self.pending.values():
            request.fail_parent()
        for request in [request for request in self.pending.values() if request.ended]:
            self.abort(request)

    def _detach(self, request: Request) -> None:
        """Remove the request from the runner's bookkeeping, and release its table entry."""
        self._runner.bookkeeping.remove(request.internal)
        if request.lease is not None:
            request.lease.release()

    def abort(self, request: Request) -> None:
        """Remove an unfinished request from the engine."""
        del self.pending[request.name]
        self._detach(request)
        self.llm.llm_engine.abort_request([request.internal], internal=True)


def _with_layout(options: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return ``options`` for an engine with ``layout``."""
    from vllm.config import CompilationConfig
    from vllm.platforms import current_platform

    made = dict(options)
    made["additional_config"] = {**(made.get("additional_config") or {}), "nnsight": layout.description}
    if layout.taps and not made.get("enforce_eager") and not current_platform.is_cpu():
        # Replayed graphs run no Python, so they have to end at taps. This list replaces vLLM's own list, so it repeats its items.
        attention = [
            *CompilationConfig._attention_ops,
            "vllm::unified_kv_cache_update",
            "vllm::unified_mla_kv_cache_update",
        ]
        chosen = {"cudagraph_mode": "PIECEWISE", "splitting_ops": [*attention, HANDOFF]}
        made["compilation_config"] = {**chosen, **(made.get("compilation_config") or {})}
    return made


def _hide_llvmlite_dict() -> None:
    """If llvmlite (a part of numba) has been imported, make its library object raise ``AttributeError`` for ``__dict__``.

    When vLLM makes a worker on a CPU, it reads the ``__dict__`` of every object in every module. llvmlite's library object returns a
    function for any name, even for this one, and vLLM would fail with it.
    """
    module: Any = sys.modules.get("llvmlite.binding.ffi")
    if module is None or hasattr(module._lib_wrapper, "nnsight_looked_at"):
        return
    known = module._lib_wrapper.__getattr__

    def without_dict(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return known(self, name)

    module._lib_wrapper.__getattr__ = without_dict
    module._lib_wrapper.nnsight_looked_at = True
