"""Programs of traces: ``trace(program=True)`` records the block and runs the program; blocks of other traces can be recorded later."""

from __future__ import annotations

from typing import Any

from ..modeling.generation import Generation
from ..modeling.reruns import GoneError, Rerun
from ..tracing import Backend
from ..tracing.saving import mount, saves
from .bound import BoundProgram
from .format.errors import NotExpressibleError
from .program import Program
from .record.recorder import record


class ProgramTrace(Backend):
    """Records the block of a trace on fakes, runs the program on the model, and binds the saved values.

    Gradients flow to the tensors of the user as in any trace. The program is ``tracer.program``.
    """

    def __call__(self, tracer: Any) -> Any:
        model = tracer._model
        driver = tracer._choose_driver()
        recorded = record(tracer, super().__call__(tracer), for_others=True)
        tracer.program = Program(recorded.job, recorded.fixed, tracer.info)
        bound = BoundProgram(recorded.job, model, (), recorded.tensors)
        args, kwargs = recorded.arguments
        tensors = bound.inputs.placed(anew=True)
        _, saves, made = bound.interpret(driver, args, kwargs, tensors, tracer.report)
        recorded.fill(saves, made)


def program_trace(function: Any) -> ProgramTrace:
    """Return the backend of a trace that calls ``function`` and has a program.

    Raises:
        ValueError: If the trace calls something else than a model.
    """
    if not (hasattr(function, "_module") or isinstance(function, Generation)):
        raise ValueError("program=True is for `model.trace(...)` and `model.generate(...)`: a function of yours is no part of a program.")
    return ProgramTrace()


def program_of(rerun: Rerun | None) -> Program:
    """Return the program of a trace that has run: its block runs once more, on fakes.

    Raises:
        NotExpressibleError: If the block needs Python that a program cannot have, or a value from outside that is gone.
        ValueError: If the trace has not run.
    """
    if rerun is None:
        raise ValueError("This trace has no program before it has run: look at `tracer.program` behind its block.")
    block = rerun.block
    if rerun.kind not in (None, Generation):
        where = f"{block.filename}:{block.line}"
        raise NotExpressibleError(f"{where}: only a trace of `model.trace(...)` or `model.generate(...)` has a program.")
    try:
        tracer = rerun.tracer()
    except GoneError as error:
        raise NotExpressibleError(
            f"{block.filename}:{block.line}: the program of this trace is recorded when it is first looked at, and {error} is gone by now. "
            "Look earlier, or trace with `program=True`, which records at once."
        ) from None
    mount()
    token = saves.set({})
    try:
        recorded = record(tracer, tracer.compile(), for_others=True)
    finally:
        saves.reset(token)
        tracer._close()
    return Program(recorded.job, recorded.fixed, block)
