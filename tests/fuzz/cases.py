"""The strategy for cases."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .blocks import blocks
from .nets import broken_specs, specs
from .passages import passages_of
from .runner import ROUNDS, Case

#: Mostly the lowering that changes no bit.
BACKENDS = ("eager",) * 7 + ("aot_eager",)


@st.composite
def cases(draw: Any, backends: tuple[str, ...] = BACKENDS, backward: bool = False) -> Case:
    """Draw a model and up to eight blocks for it; with ``backward`` each has a backward pass at its end."""
    broken = draw(st.sampled_from([False] * 9 + [True]))  # several graphs take long to capture
    spec = draw(broken_specs() if broken else specs)
    ids = draw(st.booleans())
    returns = draw(st.sampled_from(["tensor", "tuple", "dict"]))
    grad = backward or draw(st.booleans())
    backend = draw(st.sampled_from(backends))
    passages = passages_of(spec, ids, returns)
    kinds = blocks(passages, grad, backward)
    drawn = [draw(kinds)]
    cheap = backend == "eager"
    # Many, as a capture costs more than a block; a smaller case has one.
    while len(drawn) < (2 if broken or not cheap else 8) and draw(st.integers(0, 7)):
        drawn.append(draw(kinds))
    rounds = ROUNDS if cheap else draw(st.sampled_from([ROUNDS[:2], ROUNDS[:2], ROUNDS]))
    return Case(spec, ids, returns, grad, backend, tuple(drawn), rounds)
