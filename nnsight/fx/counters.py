"""Counts and profiler ranges of the compiler's stages. Counts are process-wide; in a steady state only ``breaks`` and ``replays`` grow."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, fields
from typing import Any

import torch


@dataclass
class Counters:
    """How often each stage of the compiler ran in this process.

    Attributes:
        captures: Graphs that dynamo captured of wrapped models.
        recordings: Runs that recorded a new program. A run that follows a known program is not counted.
        splices: Programs written into captured graphs.
        compiles: Lowered graphs (plain or spliced), or regions of graphs.
        reuses: Regions that use the lowering of an equal region.
        loads: Graphs and regions whose code was found in Inductor's cache on disk.
        breaks: Cuts of a graph because a block needed a concrete value.
        replays: Runs whose blocks were replayed.
        reasons: Number of captures for each kind of reason (:class:`~nnsight.runtime.report.Capture`).
    """

    captures: int = 0
    recordings: int = 0
    splices: int = 0
    compiles: int = 0
    reuses: int = 0
    loads: int = 0
    breaks: int = 0
    replays: int = field(default=0, repr=False)
    reasons: dict[str, int] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, name: str) -> None:
        """Count one more ``name``."""
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def add_capture(self, kind: str) -> None:
        """Count a captured graph, and the kind of its reason."""
        with self._lock:
            self.captures += 1
            self.reasons[kind] = self.reasons.get(kind, 0) + 1

    def reset(self) -> None:
        """Set all counts to zero."""
        with self._lock:
            self.reasons.clear()
            for item in fields(self):
                if item.type == "int":
                    setattr(self, item.name, 0)


counters = Counters()

_NOTHING = contextlib.nullcontext()


def stage(name: str) -> Any:
    """Return a context that is the range ``nnsight::<name>`` (record, splice, lower, run) in a profile, if a profiler is active."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(f"nnsight::{name}")
    return _NOTHING
