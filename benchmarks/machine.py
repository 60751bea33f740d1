"""The time of fixed work on this machine, which is stored with the figures of a benchmark.

Machines differ in speed, and the speed of a shared machine changes: the same commit has given figures twice as high. Ratios of one
run are not affected. Compare milliseconds only together with these times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def machine_check(times: int = 7) -> dict[str, float]:
    """Return the median milliseconds of writing 100 MB of fresh memory, and of a million additions in Python."""
    work: dict[str, Callable[[], object]] = {
        "fill_100_mb": lambda: torch.ones(25_000_000),
        "million_additions": lambda: _add(1_000_000),
    }
    return {name: round(statistics.median(_milliseconds(function) for _ in range(times)), 1) for name, function in work.items()}


def _add(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def _milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)
