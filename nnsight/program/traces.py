"""Programs of traces: ``trace(program=True)`` records its block at once, any other trace at the first use of ``tracer.program``."""

from __future__ import annotations

from typing import Any

from ..config import CONFIG
from ..modeling.generation import Generation
from ..modeling.reruns import GoneError, Rerun
from ..runtime.rows.fakes import same_generators
from ..tracing import Backend
from ..tracing.saving import mount, saves
from .bound import BoundProgram
from .format.errors import NotExpressibleError
from .format.limits import Limits
from .program import Program
from .record.recorder import record
from .run.execution import execute_payload


class ProgramTrace(Backend):
    """Records the block of a trace on fake tensors, runs the program on the model, and binds the saved values.

    Gradients flow to the user's tensors, as in any trace. The program is stored as ``tracer.program``.
    """

    def __call__(self, tracer: Any) -> Any:
        model = tracer._model
        driver = tracer._choose_driver()
        recorded = record(tracer, super().__call__(tracer), for_other_inputs=True)
        tracer.program = Program(recorded.program, recorded.fixed, tracer.info)
        bound = BoundProgram(recorded.job, model, (), recorded.tensors)
        args, kwargs = recorded.arguments
        tensors = bound.inputs.placed(anew=True)
        _, saves, made = bound.interpret(driver, args, kwargs, tensors, tracer.report)
        recorded.fill(saves, made)


def program_trace(function: Any) -> ProgramTrace:
    """Return the backend of ``trace(program=True)``, for a trace that calls ``function``.

    Raises:
        ValueError: If ``function`` is neither a model nor its generation.
    """
    if not (hasattr(function, "_module") or isinstance(function, Generation)):
        raise ValueError("program=True is for `model.trace(...)` and `model.generate(...)`: a program cannot contain a function of yours.")
    return ProgramTrace()


def program_of(rerun: Rerun | None, ran_here: bool) -> Program:
    """Return the program of a trace that has run. Its block runs once more, on fake tensors.

    If the trace ``ran_here`` and its inputs still exist, the model computes values that the block needs, and each is a hole in the program.

    Raises:
        NotExpressibleError: If the block needs Python that a program cannot contain, or an outside value that no longer exists.
        ValueError: If the trace has not run.
    """
    if rerun is None:
        raise ValueError("This trace has no program because it has not run yet: use `tracer.program` after its block.")
    block = rerun.block
    if rerun.kind not in (None, Generation):
        where = f"{block.filename}:{block.line}"
        raise NotExpressibleError(f"{where}: only a trace of `model.trace(...)` or `model.generate(...)` has a program.")
    try:
        tracer = rerun.tracer()
    except GoneError as error:
        raise NotExpressibleError(
            f"{block.filename}:{block.line}: the program of a trace is recorded when `tracer.program` is first used, and {error} no longer "
            "exists, or was too large to be kept. Use it earlier, or trace with `program=True`, which records the block at once."
        ) from None
    report = tracer.report
    model: Any = tracer._model

    def run(payload: bytes) -> bytes:
        return execute_payload(model, payload, Limits(seconds=float("inf")))

    mount()
    token = saves.set({})
    try:
        send = run if ran_here and rerun.has_inputs else None
        with same_generators():  # a property draws no random numbers
            recorded = record(tracer, tracer.compile(), for_other_inputs=True, send=send, cuts=CONFIG.API.CUTS)
    finally:
        saves.reset(token)
        tracer._close()
    return Program(recorded.program, recorded.fixed, block, report.breaks)
