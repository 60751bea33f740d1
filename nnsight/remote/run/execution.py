"""Runs payloads on a model of this process.

The program of a payload becomes the blocks of an ordinary run (:mod:`~nnsight.remote.run.interpreter`). It runs eagerly, or compiled
if the model was wrapped that way; edits of the model's owner do not run along. Autograd follows only programs with backward passes, which
run eagerly. No weight accumulates a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...modeling.generation import Generation
from ...runtime.interleaver import Interleaver
from ...runtime.report import Report
from ..wire.errors import ExecutionFailedError, InvalidProgramError, require
from ..wire.formats import limited
from ..wire.limits import Limits
from ..wire.payload import Job, decode_known
from ..wire.results import Tensors, pack_results
from .draws import Drawing, generator_of, samples
from .fake_runs import device_of
from .interpreter import Interpreter
from .validation import inputs_of, validate

if TYPE_CHECKING:
    from ...modeling.base import NNsight

R = TypeVar("R", bound=Interpreter)


def execute_payload(
    model: NNsight, payload: bytes, limits: Limits | None = None, log: Callable[[str], None] | None = None
) -> bytes:
    """Decode, validate and run a payload; return the results as a container (see :func:`~nnsight.remote.wire.results.decode_results`).

    ``log`` is called with each line that the program prints.

    Thread-safe: several threads may run payloads on one model. ``model`` is loaded (dispatched) if it is not.

    Raises:
        InvalidProgramError: Before the model is touched.
        ExecutionFailedError: If the program, or the model with it, fails.
    """
    limits = limits or Limits()
    job = decode_known(payload, limits)
    validate(job, model, limits)
    return execute(model, job, limits, log)


def execute(model: NNsight, job: Job, limits: Limits, log: Callable[[str], None] | None = None) -> bytes:
    """Run a validated job; as :func:`execute_payload`."""
    if hasattr(model, "dispatch"):
        model.dispatch()
    device = device_of(model._module)
    interpreter = interpreter_of(model, job, limits, Interpreter)
    interpreter.generator = generator_of(job.seed, device)
    interpreter.on_log = None if log is None else limited(log, limits.log_characters)
    with torch.set_grad_enabled(interpreter.differentiates):
        interpreter.place_constants()
        for number, run in enumerate(job.runs):
            try:
                _run(model, interpreter, number, *inputs_of(run, job.tensors, device))
            except (ExecutionFailedError, InvalidProgramError) as error:
                raise ExecutionFailedError(str(error)) from error
            except Exception as error:
                raise ExecutionFailedError(f"The model failed: {type(error).__name__}: {error}") from error
    return results_of(interpreter, limits)


def interpreter_of(
    model: NNsight, job: Job, limits: Limits, kind: type[R], on_write: Callable[[torch.Tensor], None] | None = None
) -> R:
    """Return an interpreter of a validated job for a loaded model; ``on_write`` is by default a :func:`guard`."""

    def apply(path: str, args: Any, kwargs: Any) -> Any:
        module = model._tree.module_at(path)
        assert module is not None
        return module.forward(*args, **kwargs)

    def weight(name: str) -> torch.Tensor:
        path, _, attribute = name.rpartition(".")
        found: torch.Tensor = getattr(model._module.get_submodule(path), attribute)
        return found if torch.is_grad_enabled() else found.detach()

    interpreter = kind(job, device_of(model._module), apply, weight, limits.seconds)
    interpreter.on_write = guard(model._tree.paths) if on_write is None else on_write
    return interpreter


def guard(modules: Iterable[torch.nn.Module]) -> Callable[[torch.Tensor], None]:
    """Return a function that raises for a tensor in the memory of a weight of ``modules``."""
    kept: set[int] = set()

    def check(tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor:  # in a compilation; the rehearsal has checked it
            return
        if not kept:
            for module in modules:
                for weight in (*module._parameters.values(), *module._buffers.values()):
                    if weight is not None:
                        kept.add(weight.untyped_storage()._cdata)
        written = tensor.untyped_storage()._cdata in kept
        require(not written, "The program would write to memory of the model that outlives the run.")

    return check


def _run(model: NNsight, interpreter: Interpreter, number: int, args: Any, kwargs: dict[str, Any]) -> None:
    generation: Any = Generation(model) if interpreter.job.runs[number]["call"] == "generate" else None  # type: ignore[arg-type]
    draws = samples(model._tree, interpreter.job.runs[number]["call"], kwargs)
    drawing = Drawing(interpreter.generator) if draws and interpreter.generator is not None else None
    driver = model._driver(False if interpreter.differentiates or draws else None, generation)
    interleaver = Interleaver(interpreter.mediators(number))
    interleaver.tree, interleaver.returns = model._tree, False
    with interleaver, drawing or contextlib.nullcontext():
        output = driver(interleaver, args, kwargs, Report())
        if interleaver.failure is not None:  # the model caught the error of a block
            raise interleaver.failure
        interleaver.handle("result", output)
        interpreter.finish(interleaver, interleaver.mediators)


def results_of(interpreter: Interpreter, limits: Limits) -> bytes:
    """Return the results of a program that has ended; raise an :class:`ExecutionFailedError` if they exceed a limit."""
    tensors = Tensors()
    saves = interpreter.saved(tensors.tree)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > limits.result_bytes:
        raise ExecutionFailedError(f"The job returns {size} bytes; the limit is {limits.result_bytes}.")
    return pack_results(saves, tensors)
