"""A session as one job: the runs of all its traces. Values go from trace to trace without leaving the server.

The block of the session runs in this process, once, and each trace in it is recorded as a run of the job. Values that a trace read are fake
tensors in the variables of the session. A later trace that uses such a value refers to a node of the earlier run. The values that the
session saves arrive when all runs have ended. If Python between the traces needs a value, a cut sends a job of the runs so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from ...fx.recording.functions import ABOUT_BACKWARD, ABOUT_GRADIENTS, ABOUT_STRIDES, METADATA, edits_in_place
from ...modeling.tracing import session_backend
from ...program.format.errors import NotExpressibleError
from ...program.format.sizes import SIZE_METHODS
from ...program.record.binding import Recorded
from ...program.record.demands import tolist_as_one_call
from ...program.record.recorder import Recorder
from ...program.record.refusals import refused
from ...tracing import Backend
from ...tracing.saving import saves


class _TraceBackend(Backend):
    """Records each trace of a session."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._root: Any = None

    def __call__(self, tracer: Any) -> None:
        root = tracer._modules.root
        if self._root is not None and self._root is not root:
            raise refused("This session has traces of two models, but a job runs one model. Use a session for each model.")
        self._root = root
        self._recorder.run_trace(tracer, super().__call__(tracer))


class _BetweenTraces(TorchFunctionMode):
    """Handles torch calls on values of the model between the traces of a session.

    A cut gets the real values, and the call runs in this process. The first cut also fetches the values that the session has saved.
    """

    def __init__(self, recorder: Recorder, tracer: Any) -> None:
        super().__init__()
        self._recorder, self._tracer = recorder, tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = pytree.tree_leaves((args, kwargs))
        if self._recorder.running or not any(isinstance(leaf, FakeTensor) for leaf in known):
            return function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if function in METADATA or function in ABOUT_STRIDES or name in SIZE_METHODS:
            return function(*args, **(kwargs or {}))
        edits = edits_in_place(function) and isinstance(known[0], FakeTensor)
        refusal = (
            "Between the traces of a session, the values of the model are not available. Compute, edit and differentiate in the block "
            "of a trace."
        )
        if function in ABOUT_GRADIENTS or name in ABOUT_BACKWARD or edits or not self._recorder.runs:
            raise refused(refusal)
        return self._recorder.cuts.call(name, function, args, kwargs or {}, refusal, self._saved())

    def _saved(self) -> list[torch.Tensor]:
        """Return the fake tensors of the values that the session has saved."""
        marked = saves.get() or {}
        kept = [value for _, value in self._tracer.scope.items() if id(value) in marked]
        return [leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, FakeTensor) and leaf in self._recorder._refs]


def record_session(tracer: Any, function: Callable[[], None], send: Callable[[bytes], bytes] | None = None, cuts: int = 0) -> Recorded:
    """Run the block of a session with its traces on fake tensors, and return the traces as one job; see :func:`record`."""
    recorder = Recorder(send=send, cuts=cuts)
    token = session_backend.set(_TraceBackend(recorder))
    try:
        with tolist_as_one_call, _BetweenTraces(recorder, tracer):
            tracer.execute(function)
    finally:
        session_backend.reset(token)
    if not recorder.runs:
        raise NotExpressibleError("The session contains no trace, so there is nothing to run. Trace the model in its block.")
    return recorder.finished(tracer)
