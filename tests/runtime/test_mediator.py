"""A mediator: the state a block and the model share, the state they do not, and how either ends."""

from __future__ import annotations

import ctypes
import weakref

import pytest
import torch

from nnsight import NNsight
from nnsight.runtime import Mediator

from ..conftest import both

X = torch.ones(2, 3)


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), compile={"backend": "eager"})


@both
def test_a_block_that_leaves_grad_mode_off_does_not_leak_it(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile):
        torch.set_grad_enabled(False)
        out = model[1].output.save()
    assert torch.is_grad_enabled()
    assert out.requires_grad


class Swallows(torch.nn.Module):
    """Model code that catches everything its layers raise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        except Exception:
            return x


@both
def test_model_code_that_swallows_exceptions(compile: bool) -> None:
    model = NNsight(Swallows(), compile={"backend": "eager"})
    with pytest.raises(KeyError, match="mine"):
        with model.trace(X, compile=compile):
            model.inner.output  # noqa: B018
            raise KeyError("mine")


def test_values_are_freed_while_the_model_runs(no_gc: None) -> None:
    """A block that has moved on holds no activation of the layers behind it; compiled graphs free their own."""
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    class Watch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            alive.append(sum(reference() is not None for reference in references))
            return x + 1

    model = NNsight(torch.nn.Sequential(torch.nn.Linear(3, 3), Watch(), Watch(), Watch()))
    with torch.no_grad(), model.trace(X):
        references.append(weakref.ref(model[0].output))
        model[1].output  # noqa: B018
    assert alive == [1, 0, 0]


def test_a_request_after_the_run_is_an_error() -> None:
    mediator = Mediator(lambda: None)
    with pytest.raises(ValueError, match="after its trace had ended"):
        mediator.request("model.output")


def addresses_seen(most: int) -> int:
    """How many return addresses a walk over the C stack finds, of at most ``most``."""
    return ctypes.CDLL(None).backtrace((ctypes.c_void_p * most)(), most)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "backtrace"), reason="this C library cannot walk its stack")
@both
def test_a_walk_over_the_c_stack_as_torch_makes_for_every_error_ends_inside_the_block(model: NNsight, compile: bool) -> None:
    # `c10::Error` collects 64 addresses and leaves out two; what is below the first frame of a greenlet is not its own.
    counts = []
    for _ in range(2):  # in a new greenlet, and in one that has run a block
        with model.trace(X, compile=compile):
            counts.append(addresses_seen(66))
            _ = model[0].output
            counts.append(addresses_seen(66))
            with model.trace(X, compile=False):
                _ = model[1].output
                counts.append(addresses_seen(66))
            _ = model[1].output
            counts.append(addresses_seen(66))
    assert counts == [66] * 8
