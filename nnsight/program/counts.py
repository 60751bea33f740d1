"""Counts what remote execution does in this process: tests and services see from them that nothing is computed twice.

``recordings``: blocks that were recorded; ``fake_models``: copies of models with fakes in place of their tensors; ``fake_runs``: forward
passes and generations of such copies; ``fake_steps``: the steps of these generations that ran; ``replays``: recordings and rehearsals
that reused the values of an earlier fake run; ``rehearsals``: programs that were checked on fakes; ``cuts``: jobs that were sent for a
value that a block needed.
"""

from __future__ import annotations

from collections import Counter

counts: Counter[str] = Counter()
