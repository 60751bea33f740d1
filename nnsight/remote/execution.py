"""Runs payloads on a model of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .limits import Limits

if TYPE_CHECKING:
    from ..modeling.base import NNsight


def execute_payload(model: NNsight, payload: bytes, limits: Limits | None = None) -> bytes:
    """Decode, validate and run a payload; return the results as a container (see :func:`.results.decode_results`).

    Thread-safe: several threads may run payloads on one model. ``model`` is loaded (dispatched) if it is not.

    Raises:
        InvalidProgramError: Before the model is touched.
        ExecutionFailedError: If the program, or the model with it, fails.
    """
    raise NotImplementedError
