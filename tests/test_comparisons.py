"""The comparisons that other tests assert with: they fail where they should."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnsight import fx

from .conftest import agree, close, same

ONE = torch.tensor([1.0, 2.0])

EQUAL: dict[str, tuple[Any, Any]] = {
    "tensors": (ONE.clone(), ONE),
    "containers": ({"a": (ONE.clone(), None), "b": [1, "text"]}, {"a": (ONE, None), "b": [1, "text"]}),
    "numbers": (3, 3),
    "zeros": (torch.zeros(2), torch.zeros(2)),
    "booleans": (torch.tensor([True, False]), torch.tensor([True, False])),
    "infinities": (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf])),
}

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "values": (ONE, ONE + 0.01),
    "small values": (torch.full((2,), 2e-5), torch.full((2,), 1e-5)),
    "small and zero": (torch.full((2,), 1e-5), torch.zeros(2)),
    "shapes": (ONE, ONE[None]),
    "shapes that broadcast": (ONE[:1], torch.ones(2)),
    "dtypes": (ONE, ONE.double()),
    "not a number": (torch.tensor(torch.nan), torch.tensor(torch.nan)),
    "a number for a tensor": (1.0, torch.tensor(1.0)),
    "a tensor for a number": (torch.tensor(1.0), 1.0),
    "a parameter": (torch.nn.Parameter(ONE), ONE),
    "types of numbers": (True, 1),
    "integer and float": (1, 1.0),
    "nothing for a tensor": (None, ONE),
    "a tensor for nothing": (ONE, None),
    "fewer": ([ONE], [ONE, ONE]),
    "more": ([ONE, ONE], [ONE]),
    "none": ([], [ONE]),
    "types of containers": ((ONE, ONE), [ONE, ONE]),
    "keys": ({"a": ONE}, {"b": ONE}),
    "further keys": ({"a": ONE, "b": ONE}, {"a": ONE}),
    "nesting": ((ONE, (ONE,)), ((ONE,), ONE)),
    "one of several": ((ONE, ONE), (ONE, ONE * 2)),
}

NOTHING: dict[str, Any] = {
    "lists": [],
    "dicts": {},
    "tensors without elements": torch.empty(0, 3),
    "nones": None,
    "containers of nothing": (None, [], {"a": ()}),
}


@pytest.mark.parametrize("compare", [same, close])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_pass(compare: Any, name: str) -> None:
    compare(*EQUAL[name])


@pytest.mark.parametrize("compare", [same, close])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_fail(compare: Any, name: str) -> None:
    with pytest.raises(AssertionError):
        compare(*DIFFERENT[name])


@pytest.mark.parametrize("compare", [same, close])
@pytest.mark.parametrize("name", NOTHING)
def test_a_comparison_of_nothing_fails(compare: Any, name: str) -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        compare(NOTHING[name], NOTHING[name])


def test_only_close_forgives_rounding() -> None:
    close(ONE * (1 + 1e-6), ONE)
    with pytest.raises(AssertionError):
        same(ONE * (1 + 1e-6), ONE)


def tracer(mode: str, graphs: int, breaks: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(report=SimpleNamespace(mode=mode, graphs=graphs, breaks=breaks))


def known(compile: bool) -> Any:
    return ONE, tracer("compiled", 1) if compile else tracer("eager", 0)


def recorded_again(compile: bool) -> Any:
    fx.counters.add("recordings")
    return known(compile)


RUNS = {
    "another value": lambda compile: (ONE + 1.0, known(compile)[1]),
    "another value compiled": lambda compile: (ONE + compile, known(compile)[1]),
    "never compiled": lambda compile: known(False),
    "always compiled": lambda compile: known(True),
    "in parts": lambda compile: (ONE, tracer("compiled", 2) if compile else tracer("eager", 0)),
    "with a cut": lambda compile: (ONE, tracer("compiled", 1, ("cut",)) if compile else tracer("eager", 0)),
    "recorded again": recorded_again,
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_that_do_not_agree_fail(name: str) -> None:
    agree(known, ONE)
    with pytest.raises(AssertionError):
        agree(RUNS[name], ONE)
