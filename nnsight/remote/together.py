"""Jobs of several clients in one forward pass, each seeing only its own rows.

The inputs of the jobs are joined as those of invokes are, and the blocks of each job are bound to its rows
(:class:`~nnsight.runtime.batching.BatchGroup`). A program was checked against the sizes of its own input, and those are what it
gets: jobs go together only if their inputs differ in nothing but the number of rows, so nothing is padded.

Seeing only one's own rows is a promise here, and no convenience. A tensor in which no dimension has the rows is not handed out: it may be
a constant of the model, and it may be computed of all rows. Programs that ask for one, and those that skip modules, end the run or compute
gradients, are run alone; so is every job of a group that fails, for one program must not make another's fail.

What a model itself computes across rows (statistics of a batch, experts with a limited capacity) is not undone by this. A server of such a
model runs each job alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.batching import BatchGroup, View
from ..runtime.interleaver import Interleaver
from ..runtime.probing import find_batch_dims
from ..runtime.report import Report
from .draws import drops, generator_of
from .errors import ExecutionFailedError, InvalidProgramError
from .execution import execute, guard, interpreter_of, results_of
from .fake_runs import device_of
from .formats import limited
from .interpreter import Interpreter
from .limits import Limits
from .payload import Job, decode
from .validation import inputs_of, validate

if TYPE_CHECKING:
    from ..modeling.base import NNsight

_log = logging.getLogger("nnsight.remote")

#: What only a program that runs alone may do.
_ALONE = frozenset({"skip", "stop", "requires_grad", "backward"})


class _NotTogetherError(Exception):
    """A program asks for something that it can have only if it runs alone."""


@dataclass(frozen=True)
class Tenant(BatchGroup):
    """The rows of one job.

    Attributes:
        shared: Identities of the tensors without rows at the location where the model stands.
    """

    shared: set[int] = field(default_factory=set, compare=False)

    def view(self, location: str, occurrence: int, whole: Any) -> View:
        """Return ``whole`` as this job sees it."""
        self.shared.clear()
        return super().view(location, occurrence, whole)

    def rows_of(self, tensor: torch.Tensor, found: Any) -> Any:
        """Return where the rows of ``tensor`` are, and note if it has none."""
        rows = super().rows_of(tensor, found)
        if rows is None:
            self.shared.add(id(tensor))
        return rows


class _TenantInterpreter(Interpreter):
    """The blocks of one job among others."""

    def _leaf(self, mediator: Any, node: Any) -> torch.Tensor:
        leaf = super()._leaf(mediator, node)
        if id(leaf) in mediator.batch_group.shared:
            raise _NotTogetherError
        return leaf

    def _do(self, number: int, node: Any, along: Any) -> None:
        try:
            super()._do(number, node, along)
        except Exception as error:  # what is wrong, and whether anything is, is seen when the job runs alone
            raise _NotTogetherError from error


def kind_of(model: NNsight, payload: bytes, limits: Limits | None = None) -> Hashable | None:
    """Return what jobs have in common that can run as one batch; ``None`` for one that has to run alone.

    Raises:
        InvalidProgramError: If the payload is malformed.
    """
    from ..modeling.base import NNsight

    job = decode(payload, limits)
    joins = type(model)._batch is not NNsight._batch
    if not joins or model._compile_by_default or len(job.runs) != 1 or job.runs[0]["call"] != "trace":
        return None  # a compiled model would be compiled anew for each company in which a program finds itself
    if any(node["do"] in _ALONE for node in job.nodes):
        return None
    if drops(model._tree.paths):
        return None  # what is drawn for the batch would depend on who else is in it
    run = job.runs[0]
    described = [json.dumps(_described(run[part], job.tensors)) for part in ("args", "kwargs")]
    return None if any("scalar" in text for text in described) else "\n".join(described)


def execute_payloads(
    model: NNsight,
    payloads: Sequence[bytes],
    limits: Limits | None = None,
    logs: Sequence[Callable[[str], None]] | None = None,
) -> list[bytes | Exception]:
    """Run payloads of one kind (:func:`kind_of`) as one batch; return the result of each, or what is wrong with it alone.

    ``logs`` are called with the lines that each prints, after the batch has run: a batch that fails has printed nothing.

    The results are those of :func:`~.execution.execute_payload`, up to the rounding that comes with another size of batch.
    """
    limits = limits or Limits()
    outcomes: list[bytes | Exception | None] = [None] * len(payloads)
    jobs: dict[int, Job] = {}
    for index, payload in enumerate(payloads):
        try:
            jobs[index] = decode(payload, limits)
            validate(jobs[index], model, limits)
        except InvalidProgramError as error:
            jobs.pop(index, None)
            outcomes[index] = error
    if len(jobs) > 1:
        try:
            outcomes_together, lines = _execute_together(model, list(jobs.values()), limits)
            for index, outcome, printed in zip(list(jobs), outcomes_together, lines, strict=True):
                for line in printed if logs is not None else ():
                    logs[index](line)  # type: ignore[index]
                outcomes[index] = outcome
                del jobs[index]
        except Exception as error:  # whose fault it is shows when each runs alone
            _log.debug("jobs run one by one after all: %r", error)
    for index, job in jobs.items():
        try:
            outcomes[index] = execute(model, job, limits, None if logs is None else logs[index])
        except Exception as error:
            outcomes[index] = error
    return [outcome for outcome in outcomes if outcome is not None]


def _execute_together(
    model: NNsight, jobs: Sequence[Job], limits: Limits
) -> tuple[list[bytes | Exception], list[list[str]]]:
    if hasattr(model, "dispatch"):
        model.dispatch()
    device = device_of(model._module)
    on_write = guard(model._tree.paths)
    interpreters = [interpreter_of(model, job, limits, _TenantInterpreter, on_write) for job in jobs]
    lines: list[list[str]] = [[] for _ in jobs]
    for interpreter, printed in zip(interpreters, lines, strict=True):
        interpreter.generator = generator_of(interpreter.job.seed, device)
        interpreter.on_log = limited(printed.append, limits.log_characters)
    parts = [inputs_of(job.runs[0], job.tensors, device) for job in jobs]
    batched: Any = None
    sizes: list[int] = []
    for args, kwargs in parts:
        batched, size = model._batch(batched, *args, **kwargs)
        sizes.append(size)
    total = sum(sizes)
    if total > limits.rows:
        raise _NotTogetherError
    with torch.no_grad():
        dims = find_batch_dims(model._tree, getattr(model, "_call_on", None), batched, parts, sizes)
        mediators = []
        start = 0
        for interpreter, size in zip(interpreters, sizes, strict=True):
            interpreter.place_constants()
            for mediator in interpreter.mediators(0):
                mediator.batch_group = Tenant(start, size, total, dims)
                mediators.append(mediator)
            start += size
        interleaver = Interleaver(mediators)
        interleaver.tree = model._tree
        with interleaver:
            output = model._driver(False)(interleaver, batched[0], batched[1], Report())
            if interleaver.failure is not None:
                raise interleaver.failure
            interleaver.handle("result", output)
            for interpreter in interpreters:
                interpreter.finish(interleaver)
    return [_outcome(interpreter, limits) for interpreter in interpreters], lines


def _outcome(interpreter: Interpreter, limits: Limits) -> bytes | Exception:
    try:
        return results_of(interpreter, limits)
    except ExecutionFailedError as error:
        return error


def _described(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a tree of arguments with types in place of tensors, and sizes without that of the rows."""
    if type(tree) is dict and type(tree.get("tensor")) is str and len(tree) == 1:
        tensor = tensors[tree["tensor"]]
        return ["tensor" if tensor.dim() else "scalar", str(tensor.dtype), *tensor.shape[1:]]
    if type(tree) is dict:
        return {key: _described(value, tensors) for key, value in tree.items()}
    return [_described(item, tensors) for item in tree] if type(tree) is list else tree
