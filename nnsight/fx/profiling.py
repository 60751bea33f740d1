"""The stages of a compiled trace as ranges in a profile of ``torch.profiler``.

They are ``nnsight::record``, ``nnsight::splice``, ``nnsight::lower`` and ``nnsight::run``. Without a profiler they cost one look at a flag.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


def stage(name: str) -> Any:
    """Return a context manager that makes a range of a profile, if there is a profiler."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"nnsight::{name}")
    return _NOTHING
