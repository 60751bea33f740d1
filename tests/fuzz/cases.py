"""The strategy for cases."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .blocks import blocks
from .nets import specs
from .passages import passages_of
from .runner import ROUNDS, Case

#: Mostly the lowering that changes no bit.
BACKENDS = ("eager",) * 7 + ("aot_eager",)


@st.composite
def cases(draw: Any, backends: tuple[str, ...] = BACKENDS) -> Case:
    """Draw a model and up to eight blocks for it."""
    spec = draw(specs)
    ids = draw(st.booleans())
    returns = draw(st.sampled_from(["tensor", "tuple", "dict"]))
    grad = draw(st.booleans())
    backend = draw(st.sampled_from(backends))
    passages = passages_of(spec, ids, returns)
    drawn = [draw(blocks(passages, grad))]
    cheap = backend == "eager"
    # Many, as a capture costs more than a block; a smaller case has one.
    while len(drawn) < (8 if cheap else 2) and draw(st.integers(0, 7)):
        drawn.append(draw(blocks(passages, grad)))
    rounds = ROUNDS if cheap else draw(st.sampled_from([ROUNDS[:2], ROUNDS[:2], ROUNDS]))
    if not cheap and any(plan.cuts for plan in drawn):
        # A limit of the compiler, see docs/fuzzing.md: with symbolic sizes, ahead-of-time lowering gives copies of results that
        # share memory, and a block that is cut may edit one of them afterwards.
        drawn, rounds = [next(plan for plan in drawn if plan.cuts)], ROUNDS[:2]
    return Case(spec, ids, returns, grad, backend, tuple(drawn), rounds)
