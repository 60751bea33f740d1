"""Compiled code that an earlier process left behind.

Inductor keeps what it compiles on disk, in ``TORCHINDUCTOR_CACHE_DIR``, keyed by the text of the graph, the metadata of its
inputs, its own options, the version of torch and the machine. Spliced graphs and regions reach it as ordinary graphs with
names that are the same in every process, so a second process finds them there and generates no code. This module only tells the
two cases apart, so that counters and reports say what happened.

Entries that cannot be read, or belong to another version, are passed over by inductor, which compiles anew. Like any cache of
compiled code the folder holds code that is run: it must be writable by trusted people only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .torch_compat import dynamo_counters


@contextlib.contextmanager
def found_in_cache() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether all code of the lowerings in this context came from inductor's caches.

    To be used while holding the compile lock: the counts are those of the process.
    """
    hits, misses = _counts()
    after = hits, misses

    def found() -> bool:
        return after[0] > hits and after[1] == misses

    yield found
    after = _counts()


def _counts() -> tuple[int, int]:
    """Return how many graphs inductor has found in its caches, and how many not."""
    inductor, autograd = dynamo_counters["inductor"], dynamo_counters["aot_autograd"]
    hits = inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"]
    return hits, inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
