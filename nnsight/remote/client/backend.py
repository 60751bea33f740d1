"""Backends that record a block as a program and run the program elsewhere."""

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ...config import CONFIG
from ...program.format.errors import ExecutionFailedError, InvalidProgramError
from ...program.format.limits import Limits
from ...program.program import Program
from ...program.record.binding import Recorded
from ...program.record.recorder import record
from ...program.run.descriptions import facts_of
from ...program.run.execution import execute_payload
from ...runtime.tracer import InterleavingTracer
from ...tracing import Backend, Block
from ...tracing.errors import user_position_now
from .session_jobs import record_session


class ProgramBackend(Backend):
    """Records the block of a trace or a session, runs it with :meth:`send`, and binds the saved values.

    Subclasses override :meth:`send`, or :meth:`submit` if they do not wait for the results. If a block needs a value in Python, a cut sends
    the part before it with :meth:`send`, before the whole program is submitted. Without :meth:`send`, such a block is refused.

    Attributes:
        cuts: Maximum number of cuts in one trace or session; ``None`` for ``CONFIG.API.CUTS``. With 0, a block that needs one is refused.
    """

    cuts: int | None = None

    def __call__(self, tracer: Any) -> Any:
        send = None if type(self).send is ProgramBackend.send else self.send
        cuts = CONFIG.API.CUTS if self.cuts is None else self.cuts
        try:
            function = super().__call__(tracer)
            if isinstance(tracer, InterleavingTracer):
                return self.submit(record(tracer, function, send=send, cuts=cuts))
            return self.submit(record_session(tracer, function, send, cuts))
        except (ExecutionFailedError, InvalidProgramError) as error:
            if CONFIG.APP.DEBUG or tracer.info is None:
                raise
            raise _with_line(error, tracer.info) from None

    def submit(self, recorded: Recorded) -> Any:
        """Run the job and bind its results."""
        recorded.bind(self.send(recorded.payload()))

    def send(self, payload: bytes) -> bytes:
        """Run a payload and return its results, see :func:`~nnsight.program.run.execution.execute_payload`."""
        raise NotImplementedError


class LocalBackend(ProgramBackend):
    """``remote="local"``: runs the payload in this process, exactly as a server does.

    Args:
        model: The model of the trace.
        limits: Upper bounds for the job.
        cuts: See :class:`ProgramBackend`.
    """

    def __init__(self, model: Any, limits: Limits | None = None, cuts: int | None = None) -> None:
        self._model, self._limits, self.cuts = model, limits, cuts

    def submit(self, recorded: Recorded) -> None:
        warn_of_differences(recorded.facts, facts_of(self._model._module))
        super().submit(recorded)

    def send(self, payload: bytes) -> bytes:
        return execute_payload(self._model, payload, self._limits, print)


class RecordingBackend(ProgramBackend):
    """``remote="program"``: records the block as ``tracer.program``, and runs nothing."""

    def __call__(self, tracer: Any) -> Any:
        recorded = record(tracer, Backend.__call__(self, tracer), for_other_inputs=True)
        recorded.forget()
        tracer.program = Program(recorded.job, recorded.fixed, tracer.info)


def warn_of_differences(here: Mapping[str, str], there: Any) -> None:
    """Warn if a server runs a model with other facts (:func:`.facts_of`) than the model that was recorded."""
    told = there if isinstance(there, dict) else {}
    differing = [f"{name}={told[name]} (here {here[name]})" for name in here if told.get(name, here[name]) != here[name]]
    if differing:
        text = (
            f"The server runs this model with {' and '.join(differing)}. The block was recorded with the model here: a dtype that it "
            "read is the one here, and values that only one of the models has are missing. Give the model here the options of the server."
        )
        warnings.warn_explicit(text, UserWarning, *user_position_now())


_LINE = re.compile(r", line (\d+)(?= failed:|: )")


def _with_line(error: Exception, block: Block) -> Exception:
    """Return ``error`` without its causes. If its message names a line of ``block``, add the file and the text of that line."""
    message = str(error)
    found = _LINE.search(message)
    kind = InvalidProgramError if isinstance(error, InvalidProgramError) else ExecutionFailedError
    if found is None or not block.line <= int(found[1]) <= block.last_line:  # a line of a function that the block calls
        return kind(message)
    text = linecache.getline(block.filename, int(found[1])).strip()
    message = f"{message[: found.end()]} of {block.filename}{message[found.end() :]}"
    return kind(f"{message}\n    {text}" if text else message)
