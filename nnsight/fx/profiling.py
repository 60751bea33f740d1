"""The stages of a compiled trace as ranges ``nnsight::record``, ``splice``, ``lower`` and ``run`` in a profile of ``torch.profiler``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


def stage(name: str) -> Any:
    """Return a context manager for a range of a profile, if there is a profiler."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"nnsight::{name}")
    return _NOTHING
