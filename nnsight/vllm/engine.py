"""An engine of vLLM in this process, and requests in it.

The engine core runs in the caller's process and thread, so blocks and model take turns as they do elsewhere, and nothing has to
be sent anywhere. One thread uses the engine at a time; :mod:`~nnsight.vllm.asynchronous` has one of its own for that.
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
from .worker.engine_taps import HANDOFF, Layout, Stops
from .worker.requests import RequestLimits
from .worker.runner import SPECULATIVE, choose_runner
from .worker.step_programs import BlockProgram

WORKER = f"{__package__}.worker.worker.Worker"

ITSELF = (
    "A block cannot run its own engine: the engine stands still while the block runs. Trace before, or in an invoke of its own."
)
_DRAFTS = (
    f"The block waits for a value of the model, and this engine decodes speculatively: {SPECULATIVE}. Make the model without "
    "`speculative_config`; with it, a block may use `steer()` and `tracer.result`."
)


class VLLMEngine:
    """An engine with the model of a repository or folder; ``llm`` is vLLM's own object, made with ``options``.

    An empty ``layout`` is for an engine that stops between all modules; ``functions`` are those of layers with tables, by name, and
    ``programs`` those of the graph.
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

        choose_runner()  # again: the engine may be started long after the model was made
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
        _let_vllm_look_at_llvmlite()
        with set_env_var("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), groups.held(parallel):  # the core runs in this process
            self.llm = LLM(model=repo, worker_cls=WORKER, **options)
            client = self.llm.llm_engine.engine_core
            client._finalizer.detach()
            groups.used_by(client.engine_core, parallel)
        weakref.finalize(self, groups.shut_down, client.engine_core)
        self._runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._numbers = itertools.count()
        self._blocks = None if parallel else BlockPrograms(BlockProgram.of)
        self._stopping = Stops(self._runner, self.llm.llm_engine.model_config, self._functions)
        self._lock = threading.RLock()
        self._running = False
        self.pending: dict[str, Request] = {}  # the requests in the engine, by their names there

    @functools.cached_property
    def limits(self) -> RequestLimits:
        """What the engine can do."""
        hidden, tapped = self.llm.llm_engine.model_config.get_hidden_size(), self._runner.tapped
        if tapped is None:
            return RequestLimits(hidden, functions=self._functions, stopping=self._stopping, blocks=self._blocks)
        drafts = self.llm.llm_engine.vllm_config.speculative_config is not None
        locations, steered, captured = tuple(tapped.locations), tuple(tapped.steered), tuple(tapped.captured)
        places = (hidden, locations, steered, tapped.rank, captured, drafts)
        return RequestLimits(*places, self._functions, self._programs, self._stopping, self._blocks)

    def run(self, requests: Sequence[Request]) -> None:
        """Run ``requests`` until all have finished or failed. Errors of blocks stay with their runs; others raise ``ValueError``."""
        with self._lock:
            if self._running:
                raise ValueError(ITSELF)
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
                self.take_out(request)

    def admit(self, request: Request) -> None:
        """Send ``request`` to the engine, unless its blocks have ended already, or vLLM refuses it."""
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
        if (request.whole or request).on_output is None:  # nobody needs the outputs before the last
            sampling.output_kind = RequestOutputKind.FINAL_ONLY
        name = request.name = f"nnsight-{next(self._numbers)}"
        if run.touches_model:  # it has to see all of its own tokens, and shares no cached prefix
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
        """Return a lease of an entry with the parameters of ``steering``; raise ``ValueError`` if none is free."""
        lease = self.entries.take(salt_of(steering))
        if not lease.entry.written:
            asked = {location: found.parts for location, found in steering.items()}
            self.llm.llm_engine.model_executor.collective_rpc("nnsight_write", args=(lease.entry.slot, asked))
            lease.entry.written = True
        return lease

    def advance(self) -> None:
        """Make one step of the engine; take out what has finished or failed."""
        # A thread has OpenMP's number of threads until it first asks torch for its own. vLLM's attention on CPUs fails if the number
        # changes within a step.
        torch.get_num_threads()
        told: dict[Request, None] = {}
        for output in self.llm.llm_engine.step():
            request = self.pending.get(output.request_id)
            if request is None:
                continue
            if output.finished:
                del self.pending[request.name]
                self._detach(request)
            request.take(output)
            told[request.whole or request] = None
        for request in told:
            request.tell()
        for request in self.pending.values():
            request.pass_on()
        for request in [request for request in self.pending.values() if request.ended]:
            self.take_out(request)

    def _detach(self, request: Request) -> None:
        """Let the runner forget the request, and release its entry."""
        self._runner.bookkeeping.remove(request.internal)
        if request.lease is not None:
            request.lease.release()

    def take_out(self, request: Request) -> None:
        """End a request in the engine before its time."""
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
        # Replayed graphs run no Python, so they end at taps. This list replaces vLLM's own, and so has to repeat it.
        attention = [
            *CompilationConfig._attention_ops,
            "vllm::unified_kv_cache_update",
            "vllm::unified_mla_kv_cache_update",
        ]
        chosen = {"cudagraph_mode": "PIECEWISE", "splitting_ops": [*attention, HANDOFF]}
        made["compilation_config"] = {**chosen, **(made.get("compilation_config") or {})}
    return made


def _let_vllm_look_at_llvmlite() -> None:
    """Let an object of llvmlite, which numba uses, have no ``__dict__``, if numba has been imported.

    When vLLM makes a worker on a CPU, it reads the ``__dict__`` of every object in every module. This object stands for a library, and
    returns a function for any name, so vLLM would fail there.
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
