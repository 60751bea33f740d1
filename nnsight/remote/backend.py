"""Backends that send a block elsewhere as data."""

from __future__ import annotations

from typing import Any

from ..tracing import Backend
from .execution import execute_payload
from .limits import Limits
from .recorder import Recorded, record


class ProgramBackend(Backend):
    """Records the block of a trace, has it run by :meth:`send`, and binds what it saved.

    Subclasses override :meth:`send`, or :meth:`submit` if they do not wait for the results.
    """

    def __call__(self, tracer: Any) -> Any:
        recorded = record(tracer, super().__call__(tracer))
        return self.submit(recorded)

    def submit(self, recorded: Recorded) -> Any:
        """Have the job run and bind its results."""
        recorded.bind(self.send(recorded.payload()))

    def send(self, payload: bytes) -> bytes:
        """Return the results of a payload, see :func:`.execution.execute_payload`."""
        raise NotImplementedError


class LocalBackend(ProgramBackend):
    """``remote="local"``: runs the payload in this process, exactly as a server does.

    Args:
        model: The model of the trace.
        limits: What the job may cost.
    """

    def __init__(self, model: Any, limits: Limits | None = None) -> None:
        self._model, self._limits = model, limits

    def send(self, payload: bytes) -> bytes:
        return execute_payload(self._model, payload, self._limits)
