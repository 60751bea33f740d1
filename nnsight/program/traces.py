"""``trace(program=True)``: the block is recorded as a program, and the program runs here."""

from __future__ import annotations

from typing import Any

from ..modeling.generation import Generation
from ..tracing import Backend
from .bound import BoundProgram
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
        tracer.program = Program(recorded.job, recorded.fixed)
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
