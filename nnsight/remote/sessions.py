"""A session as one job: the runs of all its traces, with values that go from one to the next without leaving the server.

The block of a session is Python that runs here, once. Each trace in it is recorded as a run of the same job instead of being sent; what it
read stands in the variables of the session as fakes, and a later trace that uses one refers to a node of the earlier run. What
the session saved comes back when all has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..modeling.tracing import session_backend
from ..tracing import Backend
from ..tracing.errors import user_position_now
from .errors import NotExpressibleError
from .recorder import Recorded, Recorder


class _Part(Backend):
    """Records a trace of a session.

    Args:
        recorder: Of the session.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._root: Any = None

    def __call__(self, tracer: Any) -> None:
        root = tracer._modules.root
        if self._root is not None and self._root is not root:
            raise NotExpressibleError(
                "{}:{}: This session has traces of two models; a job runs one. Use a session for each.".format(
                    *user_position_now()
                )
            )
        self._root = root
        self._recorder.run_trace(tracer, super().__call__(tracer))


def record_session(tracer: Any, function: Callable[[], None]) -> Recorded:
    """Run the block of a session, with its traces on fakes, and return all of them as one job.

    Args:
        tracer: The tracer of ``model.session(...)``.
        function: Its block.

    Raises:
        NotExpressibleError: If a trace cannot be sent, or there is none.
    """
    recorder = Recorder()
    token = session_backend.set(_Part(recorder))
    try:
        tracer.execute(function)
    finally:
        session_backend.reset(token)
    if not recorder.runs:
        raise NotExpressibleError(
            "The session has no trace in it, so there is nothing to run. Trace the model in its block."
        )
    return recorder.finished(tracer)
