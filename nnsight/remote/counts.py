"""The counts of :mod:`nnsight.program.counts`, under an earlier name."""

from __future__ import annotations

from ..program.counts import counts

__all__ = ["counts"]
