"""Groups: jobs of several clients in one forward pass. Each job sees only its own rows.

The inputs of the jobs are joined like the inputs of invokes, and the blocks of each job are bound to its rows
(:class:`~nnsight.runtime.rows.batching.BatchGroup`). The inputs of a group differ only in the number of rows. So nothing is padded, and
each program gets the sizes for which it was validated. For generations see :mod:`~nnsight.program.run.generations`.

No job may see the rows of another job. A tensor without a batch axis may be computed from all rows, so a program that reads one runs
alone. So does a program that reads a tensor whose rows are all in the same memory: an edit in place reaches every later use of that
memory. Programs that skip modules, end the run or compute gradients run alone, too. If a group fails, its jobs run one by one, so that no
program makes another one fail. A model that computes across rows (batch statistics, experts with a limited capacity) needs a server
without groups.

A compiled model is compiled for the blocks of a whole group. So its groups consist of equal programs with inputs of equal sizes, and they
have 2, 4, 8, ... jobs: copies of the last job fill up a smaller group, and their results are dropped. So a program has one variant for each
of these group sizes. Generations on compiled models run alone, because each combination of lengths would be another program.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..modeling.base import NNsight
from ..modeling.generation import Generation
from ..program.format.errors import ExecutionFailedError, InvalidProgramError
from ..program.format.limits import Limits
from ..program.format.payload import Job, decode_known, fact
from ..program.format.trees import ABSENT, read_tree
from ..program.run.draws import has_active_dropout
from ..program.run.execution import execute, prepared, results_of, run_blocks
from ..program.run.generations import RETURNED, ReturnedRows, Tokens, ends_of, joins
from ..program.run.interpreter import Interpreter
from ..program.run.validation import check_call, inputs_of, validate
from ..runtime.interleaver import Interleaver
from ..runtime.mediator import Mediator
from ..runtime.probing import find_batch_dims
from ..runtime.report import Report
from ..runtime.rows.batching import BatchGroup, View

_log = logging.getLogger("nnsight.remote")

#: Kinds of nodes that make a program run alone.
_ALONE = frozenset({"skip", "stop", "requires_grad", "backward"})


class _NotTogetherError(Exception):
    """Raised in the run of a group whose jobs must run alone."""


@dataclass(frozen=True)
class Tenant(BatchGroup):
    """The rows of one job."""

    shared: set[int] = field(default_factory=set, compare=False)  # identities of tensors without rows at the current location
    tokens: Tokens | None = field(default=None, compare=False)

    def view(self, location: str, occurrence: int, whole: Any) -> View:
        """Return the view of this job on ``whole``, the value at a location."""
        self.shared.clear()
        if self.tokens is not None and location in RETURNED:
            return ReturnedRows(self, location, occurrence, whole, self.tokens)
        return super().view(location, occurrence, whole)

    def rows_of(self, tensor: torch.Tensor, found: Any) -> Any:
        """Return the position of the rows of ``tensor``. A tensor without rows of its own for each job is added to :attr:`shared`."""
        rows = super().rows_of(tensor, found)
        if rows is None or self.share_memory(tensor, rows):
            self.shared.add(id(tensor))
            return None
        return rows


class _TenantMediator(Mediator):
    """A block of one job in a group. It waits at no location of the model after the end of its job's generation."""

    __slots__ = ()

    def waits_at(self, location: str, occurrence: int) -> bool:
        if not super().waits_at(location, occurrence):
            return False
        group: Any = self.batch_group
        return location in RETURNED or group.tokens is None or not group.tokens.ended(group)


class _TenantInterpreter(Interpreter):
    """Interprets the blocks of one job in a group. The run of the group fails if the job must run alone."""

    mediator = _TenantMediator

    def _leaf(self, mediator: Any, node: Any) -> torch.Tensor:
        leaf = super()._leaf(mediator, node)
        if id(leaf) in mediator.batch_group.shared:
            raise _NotTogetherError
        return leaf

    def _do(self, number: int, node: Any, along: Any) -> None:
        try:
            super()._do(number, node, along)
        except Exception as error:  # the job may fail only because of the group; if not, its run alone raises the error again
            raise _NotTogetherError from error


def kind_of(model: NNsight, payload: bytes, limits: Limits | None = None) -> Hashable | None:
    """Return a key that is equal for jobs that can run as one group; ``None`` for a job that must run alone.

    Raises:
        InvalidProgramError: If the payload is malformed.
    """
    job = _decoded(payload, limits or Limits())
    if type(model)._batch is NNsight._batch or hasattr(type(model), "_batch_size") or len(job.runs) != 1:
        return None
    run = job.runs[0]
    if model._compile_by_default and (run["call"] == "generate" or not job.header):
        return None
    described = fact(job, "described", lambda: _described_job(job))
    if not described:
        return None
    if has_active_dropout(model._tree.paths):
        return None  # random numbers of a job would depend on the other jobs
    if run["call"] == "generate":
        check_call(model, run, limits or Limits())
        # In a group, the result may be longer than the generation of this job, so it cannot be replaced. The streamed ids count its tokens.
        fixed = {*RETURNED, Generation.surplus}
        replaces = any(node["do"] == "write" and node["site"] in fixed for node in job.nodes)
        if replaces or not joins(model._module, _options(job)):
            return None
    masks = [
        job.tensors[tree["tensor"]]
        for name, tree in run["kwargs"]["dict"]
        if name == "attention_mask" and type(tree) is dict and "tensor" in tree
    ]
    padded = [f"padded: {not bool(mask.all())}" for mask in masks]  # models ignore masks that hide nothing
    program = [hashlib.sha256(job.header).hexdigest()] if model._compile_by_default else []
    return "\n".join([described, *padded, *program])


#: Decoded jobs between :func:`kind_of` and their run. A run removes its job, because the tensors of a job are for one run.
_waiting: dict[tuple[bytes, Limits], Job] = {}
_MAX_WAITING, _MAX_WAITING_BYTES = 128, 2**16


def _decoded(payload: bytes, limits: Limits) -> Job:
    """Decode a payload, and keep a small job for its run."""
    job = decode_known(payload, limits)
    if len(payload) <= _MAX_WAITING_BYTES:
        with contextlib.suppress(KeyError, RuntimeError, StopIteration):  # another thread may remove entries at the same time
            while len(_waiting) >= _MAX_WAITING:
                del _waiting[next(iter(_waiting))]
        _waiting[payload, limits] = job
    return job


def _described_job(job: Job) -> str:
    """Return a description of a job's call without values and numbers of rows; an empty string if the job must run alone."""

    def leaf(kind: str, name: str) -> Any:
        tensor = job.tensors[name]
        return ["tensor" if tensor.dim() else "scalar", str(tensor.dtype), *tensor.shape[1:]]

    run = job.runs[0]
    described = [run["call"], *(repr(read_tree(run[part], leaf)) for part in ("args", "kwargs"))]
    alone = any(node["do"] in _ALONE for node in job.nodes) or any("scalar" in text for text in described)
    return "" if alone else "\n".join(described)


def _options(job: Job) -> dict[str, Any]:
    """Return the options of a generation, except for tensors."""
    given = read_tree(job.runs[0]["kwargs"], lambda kind, content: ABSENT)
    return {name: value for name, value in given.items() if value is not ABSENT}


def execute_payloads(
    model: NNsight,
    payloads: Sequence[bytes],
    limits: Limits | None = None,
    logs: Sequence[Callable[[str], None]] | None = None,
) -> list[bytes | Exception]:
    """Run payloads with the same key (:func:`kind_of`) as one group. Returns the result, or the error, of each payload.

    ``logs`` are called with the lines that each job prints, once the group has run. If the group fails, its lines are dropped, and each job
    runs alone. The results equal those of :func:`~.execution.execute_payload`, except for rounding that depends on the batch size.
    """
    limits = limits or Limits()
    outcomes: list[bytes | Exception | None] = [None] * len(payloads)
    jobs: dict[int, Job] = {}
    for index, payload in enumerate(payloads):
        try:
            job = _waiting.pop((payload, limits), None) or decode_known(payload, limits)
            validate(job, model, limits)
            jobs[index] = job
        except InvalidProgramError as error:
            outcomes[index] = error
    if len(jobs) > 1:
        company = list(jobs.values())
        if model._compile_by_default:  # decoded again, because tensors that two jobs share would be another program
            more = (1 << (len(company) - 1).bit_length()) - len(company)
            company += [decode_known(payloads[max(jobs)], limits) for _ in range(more)]
        try:
            for index, (outcome, lines) in zip(list(jobs), _execute_together(model, company, limits), strict=False):
                for line in lines if logs is not None else ():
                    logs[index](line)  # type: ignore[index]
                outcomes[index] = outcome
                del jobs[index]
        except Exception as error:  # the runs of the single jobs show which of them fails
            _log.debug("jobs run one by one after all: %r", error)
    for index, job in jobs.items():
        try:
            outcomes[index] = execute(model, job, limits, None if logs is None else logs[index])
        except Exception as error:
            outcomes[index] = error
    return [outcome for outcome in outcomes if outcome is not None]


def _execute_together(model: NNsight, jobs: Sequence[Job], limits: Limits) -> list[tuple[bytes | Exception, list[str]]]:
    """Run ``jobs`` as one group. Returns the outcome of each job, and the lines that it prints."""
    lines: list[list[str]] = [[] for _ in jobs]
    interpreters = [prepared(_TenantInterpreter, model, job, limits, printed.append) for job, printed in zip(jobs, lines, strict=True)]
    parts = [inputs_of(job.runs[0], job.tensors, interpreters[0].device) for job in jobs]
    batched: Any = None
    sizes: list[int] = []
    for args, kwargs in parts:
        batched, size = model._batch(batched, *args, **kwargs)
        sizes.append(size)
    total = sum(sizes)
    if total > limits.rows:
        raise _NotTogetherError
    generation: Any = None
    tokens: Tokens | None = None
    if jobs[0].runs[0]["call"] == "generate":
        # Checked again: the model of the gateway has no weights, and may have other generation options.
        if not joins(model._module, _options(jobs[0])):
            raise _NotTogetherError
        generation, tokens = Generation(model), Tokens(ends_of(model._module, batched[1]))  # type: ignore[arg-type]
    with torch.no_grad():
        dims = find_batch_dims(model._tree, getattr(generation or model, "_call_on", None), batched, parts, sizes)
        if tokens is not None:
            batched[1]["streamer"] = tokens
        start = 0
        mediators: list[Mediator] = []
        for interpreter, size in zip(interpreters, sizes, strict=True):
            interpreter.check_write = interpreters[0].check_write
            interpreter.place_constants()
            for mediator in interpreter.mediators(0):
                mediator.batch_group = Tenant(start, size, total, dims, tokens=tokens)
                mediators.append(mediator)
            start += size
        interleaver, driver = Interleaver(mediators), model._driver(None, generation)
        run_blocks(interleaver, interpreters, lambda: driver(interleaver, batched[0], batched[1], Report()))
    outcomes: list[bytes | Exception] = []
    for interpreter in interpreters:
        try:
            outcomes.append(results_of(interpreter))
        except ExecutionFailedError as error:
            outcomes.append(error)
    return list(zip(outcomes, lines, strict=True))
