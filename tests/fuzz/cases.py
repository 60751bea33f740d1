"""The strategy for cases."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from .blocks import blocks
from .nets import broken_specs, decoders, is_broken, specs, stock_specs
from .occurrences import occurrences_of
from .runner import ROUNDS, Case

#: Mostly the lowering that changes no bit: it is fast.
BACKENDS = ("eager",) * 7 + ("aot_eager",)
#: For runs that may take long.
LONG_BACKENDS = ("eager",) * 4 + ("aot_eager",) * 2 + ("inductor",) * 3


@st.composite
def cases(draw: Any, backends: tuple[str, ...] = BACKENDS, backward: bool = False, stock: bool = False) -> Case:
    """Draw a model and up to eight blocks for it.

    Args:
        backends: Lowerings to choose from.
        backward: Whether each block has a backward pass at its end.
        stock: Whether each model is a decoder, or has a stock part.
    """
    ids = draw(st.booleans())
    whole = ids and not draw(st.integers(0, 1 if stock else 7))
    broken = not whole and draw(st.sampled_from([False] * 9 + [True]))  # several graphs take long to capture
    usual = stock_specs() if stock else specs
    spec = draw(decoders if whole else broken_specs(stock) if broken else usual)
    returns = draw(st.sampled_from(["tensor", "tuple", "dict"]))
    grad = backward or draw(st.sampled_from([True, True, True, False]))
    backend = draw(st.sampled_from(backends))
    occurrences = occurrences_of(spec, ids, returns)
    kinds = blocks(occurrences, grad, backward)
    drawn = [draw(kinds)]
    cheap = backend == "eager"
    # Many, as a capture costs more than a block; a smaller case has one.
    while len(drawn) < (2 if is_broken(spec) or not cheap else 4 if whole else 8) and draw(st.integers(0, 7)):
        drawn.append(draw(kinds))
    rounds = ROUNDS if cheap else draw(st.sampled_from([ROUNDS[:3], ROUNDS[:3], ROUNDS]))
    return Case(spec, ids, returns, grad, backend, tuple(drawn), rounds)
