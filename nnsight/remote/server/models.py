"""Loads the models that a server serves, and creates their engines."""

from __future__ import annotations

from typing import Any

from ...program.format.limits import Limits
from ...program.run.descriptions import facts_of
from ...program.run.engine import Engine
from ..protocol import ModelKey
from ..together import execute_payloads, kind_of
from .engine import ThreadEngine


def engine_of(model: Any, limits: Limits | None = None, name: str = "nnsight-engine") -> Engine:
    """Return an engine that runs a model in this process. If the model is lazy, the first job loads it. ``limits`` apply to each job."""
    return ThreadEngine(
        lambda payloads, logs: execute_payloads(model, payloads, limits, logs),
        name,
        lambda payload: kind_of(model, payload, limits),
        lambda: facts_of(model._module),
    )


def load(name: str, revision: str = "main", dispatch: bool = True, **options: Any) -> tuple[ModelKey, Any]:
    """Return a language model, and the key under which it is served.

    The arguments are those of :class:`~nnsight.LanguageModel`; ``revision`` is a branch, tag or commit. Raises an ``OSError`` if the model
    cannot be loaded.
    """
    from ... import LanguageModel

    if revision != "main":
        options["revision"] = revision
    model = LanguageModel(name, dispatch=dispatch, **options)
    return ModelKey(name, revision, task=model.task), model
