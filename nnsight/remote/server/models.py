"""Loads served models, and makes their engines."""

from __future__ import annotations

from typing import Any

from ..protocol import ModelKey
from ..run.execution import execute_payload
from ..run.together import execute_payloads, kind_of
from ..wire.limits import Limits
from .engine import Engine, ThreadEngine


def engine_of(model: Any, limits: Limits | None = None, name: str = "nnsight-engine") -> Engine:
    """Return the engine of a model in this process.

    Args:
        model: The model; the first job loads it, if it is lazy.
        limits: Limits of one job.
        name: Name of its thread.
    """
    return ThreadEngine(
        lambda payload, log: execute_payload(model, payload, limits, log),
        name,
        run_together=lambda payloads, logs: execute_payloads(model, payloads, limits, logs),
        kind_of=lambda payload: kind_of(model, payload, limits),
    )


def load(name: str, revision: str = "main", dispatch: bool = True, **options: Any) -> tuple[ModelKey, Any]:
    """Return a language model and the key under which it is served.

    Args:
        name: As for :class:`~nnsight.LanguageModel`.
        revision: Branch, tag or commit.
        dispatch: Load its weights.
        **options: Further ones of :class:`~nnsight.LanguageModel`.

    Raises:
        OSError: If it cannot be loaded.
    """
    from ... import LanguageModel

    if revision != "main":
        options["revision"] = revision
    return ModelKey(name, revision), LanguageModel(name, dispatch=dispatch, **options)
