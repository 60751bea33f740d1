"""Several invokes with barriers, drawn at random: compiled traces, programs and servers do what the eager trace does."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from ..conftest import close
from . import invokes
from .invokes import DEMAND, FORMS, compiled, observe, program

#: How many traces the slow tests draw in each form. One that AOTAutograd compiles takes ten seconds and more.
SEEDS = {"compiled": 4, "compiled by AOTAutograd": 2, "program": 12, "server": 12}


@functools.cache
def _models() -> dict[str, Any]:
    return invokes.models()


@functools.cache
def _expected(seed: int, differentiates: bool = False) -> tuple[Any, str | None]:
    return observe(compiled(seed, differentiates), _models()["eager"])


def _agree(form: str, seed: int) -> None:
    model, options = FORMS[form]
    expected, error = _expected(seed)
    found, other = observe(compiled(seed), _models()[model], **options)
    if form == "program" and DEMAND.partition("(")[0] in program(seed):
        assert (found, other) == (None, "NotExpressibleError")
        return
    assert other == error, program(seed)
    if error is None:
        assert found[2] == expected[2], program(seed)
        if expected[0] or expected[1]:
            close(found[:2], expected[:2])


@pytest.mark.filterwarnings("ignore:The loop ended at")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", ["program", "server"])
def test_invokes_agree_with_the_eager_trace(form: str, seed: int) -> None:
    _agree(form, seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loop ended at")
@pytest.mark.parametrize("form", FORMS)
def test_more_invokes_agree_with_the_eager_trace(form: str) -> None:
    for seed in range(100, 100 + SEEDS[form]):
        _agree(form, seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In this compiled trace the graph", "ignore:The loop ended at")
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_invokes_agree_with_the_eager_trace(form: str) -> None:
    """A program refuses some of the blocks. Blocks that edit what torch has kept for the backward pass are an error in an eager trace."""
    model, options = FORMS[form]
    compared = 0
    for seed in range(200, 200 + SEEDS[form]):
        expected, error = _expected(seed, differentiates=True)
        found, other = observe(compiled(seed, differentiates=True), _models()[model], **options)
        if error is None and (form.startswith("compiled") or other is None):
            assert other is None, program(seed, differentiates=True)
            close(found[:2], expected[:2])
            compared += 1
    assert compared
