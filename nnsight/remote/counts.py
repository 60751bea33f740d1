"""Earlier import path of :mod:`nnsight.program.counts`."""

from __future__ import annotations

from ..program.counts import counts

__all__ = ["counts"]
