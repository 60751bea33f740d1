"""Counters of recordings and rehearsals in this process. With them, tests and services check that nothing is computed twice.

``recordings``: recorded blocks; ``fake_models``: copies of models with fake tensors; ``fake_runs``: forward passes and generations of
such copies; ``fake_steps``: steps of these generations in which the copy ran; ``replays``: recordings and rehearsals that reused the
values of an earlier fake run; ``rehearsals``: programs that were checked on fake tensors; ``cuts``: jobs that were sent to get a value
that a block needed.
"""

from __future__ import annotations

from collections import Counter

counts: Counter[str] = Counter()
