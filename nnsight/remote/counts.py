"""What remote execution did in this process, for tests and for watching a service: a steady state shows as numbers that stand still.

``recordings``: blocks that were run on fakes; ``repeats``: blocks whose recording served again; ``fake_models``: copies of models
with fakes in place of their tensors; ``fake_runs``: forward passes and generations of such copies; ``passages``: recordings and
rehearsals for which what such a run showed earlier served; ``rehearsals``: programs that were checked on fakes.
"""

from __future__ import annotations

from collections import Counter

counts: Counter[str] = Counter()
