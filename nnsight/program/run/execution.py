"""Runs payloads on a model of this process.

The program of a payload becomes the blocks of an ordinary run (:mod:`~nnsight.program.run.interpreter`). The run is compiled if the model
was wrapped that way, else eager. Edits of the model do not take part. Autograd is active only for programs with backward passes, which
run eagerly. Weights never accumulate gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...modeling.base import NNsight
from ...modeling.generation import Generation
from ...runtime.errors import EarlyStopException
from ...runtime.interleaver import Interleaver
from ...runtime.report import Report
from ..format.errors import ExecutionFailedError, InvalidProgramError
from ..format.formats import limited
from ..format.limits import Limits
from ..format.payload import Job, decode_known
from ..format.results import Tensors, pack_results
from .draws import Drawing, generator_of, may_draw
from .interpreter import Interpreter
from .validation import inputs_of, validate

R = TypeVar("R", bound=Interpreter)


def execute_payload(
    model: NNsight, payload: bytes, limits: Limits | None = None, log: Callable[[str], None] | None = None
) -> bytes:
    """Decode, validate and run a payload. Return a container for :func:`~nnsight.program.format.results.decode_results`.

    ``log`` is called with each line that the program prints. The function is thread-safe: several threads may run payloads on one model.
    The weights of ``model`` are loaded (dispatched) first if necessary.

    Raises:
        InvalidProgramError: Before the model is touched.
        ExecutionFailedError: If the program, or the model with it, fails.
    """
    limits = limits or Limits()
    job = decode_known(payload, limits)
    validate(job, model, limits)
    return execute(model, job, limits, log)


def execute(model: NNsight, job: Job, limits: Limits, log: Callable[[str], None] | None = None) -> bytes:
    """Run a validated job, as :func:`execute_payload` does."""
    interpreter = prepared(Interpreter, model, job, limits, log)
    with torch.set_grad_enabled(interpreter.differentiates):
        interpreter.place_constants()
        for number, run in enumerate(job.runs):
            try:
                _run(interpreter, number, *inputs_of(run, job.tensors, interpreter.device))
            except (ExecutionFailedError, InvalidProgramError) as error:
                raise ExecutionFailedError(str(error)) from error
            except Exception as error:
                raise ExecutionFailedError(f"The model failed: {type(error).__name__}: {error}") from error
    return results_of(interpreter)


def prepared(kind: type[R], model: NNsight, job: Job, limits: Limits, log: Callable[[str], None] | None) -> R:
    """Return an interpreter of class ``kind`` for a validated job, with the generator of the job. Load the model if necessary."""
    if hasattr(model, "dispatch"):
        model.dispatch()
    interpreter = kind(model, job, limits)
    interpreter.generator = generator_of(job.seed, interpreter.device)
    interpreter.on_log = None if log is None else limited(log, limits.log_characters)
    return interpreter


def _run(interpreter: Interpreter, number: int, args: Any, kwargs: dict[str, Any]) -> None:
    model, call = interpreter.model, interpreter.job.runs[number]["call"]
    generation: Any = Generation(model) if call == "generate" else None  # type: ignore[arg-type]
    draws = may_draw(model._tree, call, kwargs)
    drawing = Drawing(interpreter.generator) if draws and interpreter.generator is not None else None
    driver = model._driver(False if interpreter.differentiates or draws else None, generation)
    interleaver = Interleaver(interpreter.mediators(number))
    interleaver.returns = False
    with drawing or contextlib.nullcontext():
        run_blocks(interleaver, [interpreter], lambda: driver(interleaver, args, kwargs, Report()))


def run_blocks(interleaver: Interleaver, interpreters: Sequence[Interpreter], call: Callable[[], Any]) -> None:
    """Run the blocks of interpreters during ``call()``, which calls the model."""
    interleaver.tree = interpreters[0].model._tree
    with contextlib.suppress(EarlyStopException), interleaver:  # a block may stop before its first request
        output = call()
        if interleaver.failure is not None:  # code of the model has caught the error of a block
            raise interleaver.failure
        interleaver.handle("result", output)
        for interpreter in interpreters:
            interpreter.finish(interleaver)


def results_of(interpreter: Interpreter) -> bytes:
    """Return the results of a completed program. Raise an :class:`ExecutionFailedError` if they exceed a limit."""
    tensors = Tensors()
    saves = interpreter.saved(tensors.tree)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    most = interpreter.limits.result_bytes
    if size > most:
        raise ExecutionFailedError(f"The job returns {size} bytes; the limit is {most}.")
    return pack_results(saves, tensors)
