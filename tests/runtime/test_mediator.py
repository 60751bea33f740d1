"""A mediator: the state a block and the model share, the state they do not, and how either ends."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

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
def test_no_grad_in_the_block_leaves_the_models_gradients_on(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile):
        with torch.no_grad():
            hidden = model[0].output
            doubled = (hidden * 2).save()
            inside = torch.is_grad_enabled().save()
            out = model[1].output.save()
        after = torch.is_grad_enabled().save()
    assert (inside, after) == (False, True)
    assert not doubled.requires_grad
    assert out.requires_grad
    out.sum().backward()
    assert model._module[0].weight.grad is not None
    assert torch.is_grad_enabled()


@both
def test_grad_in_the_block_does_not_switch_gradients_on_in_the_model(model: NNsight, compile: bool) -> None:
    with torch.no_grad():
        with model.trace(X, compile=compile):
            with torch.enable_grad():
                weight = torch.ones(3, requires_grad=True)
                hidden = model[0].output
                scaled = (hidden * weight).save()
            out = model[1].output.save()
        assert not torch.is_grad_enabled()
    assert not out.requires_grad
    assert scaled.requires_grad


@both
def test_grad_mode_is_restored_when_the_block_fails(model: NNsight, compile: bool) -> None:
    with pytest.raises(KeyError):
        with model.trace(X, compile=compile):
            torch.set_grad_enabled(False)
            model[0].output  # noqa: B018
            raise KeyError
    assert torch.is_grad_enabled()


@both
def test_a_block_that_leaves_grad_mode_off_does_not_leak_it(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile):
        torch.set_grad_enabled(False)
        out = model[1].output.save()
    assert torch.is_grad_enabled()
    assert out.requires_grad


@both
def test_a_failing_block_ends_the_run(model: NNsight, compile: bool) -> None:
    calls: list[int] = []
    handle = model._module[1].register_forward_hook(lambda *_: calls.append(1)) if not compile else None
    with pytest.raises(KeyError):
        with model.trace(X, compile=compile):
            model[0].output  # noqa: B018
            raise KeyError
    assert not calls
    if handle is not None:
        handle.remove()


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


@both
def test_the_block_is_released_by_reference_counting(model: NNsight, compile: bool, no_gc: None) -> None:
    class Marker:
        pass

    def run() -> weakref.ref[Any]:
        marker = Marker()
        with model.trace(X, compile=compile):
            holder = marker
            model[0].output  # noqa: B018
            assert holder is not None
        return weakref.ref(marker)

    run()
    assert run()() is None


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


@both
def test_contextvars_of_the_caller_are_visible_in_the_block(model: NNsight, compile: bool) -> None:
    import contextvars

    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    token = variable.set(7)
    with model.trace(X, compile=compile):
        before = [variable.get()]
        model[0].output  # noqa: B018
        seen = [*before, variable.get()].save()
    variable.reset(token)
    assert seen == [7, 7]


def test_a_request_after_the_run_is_an_error() -> None:
    mediator = Mediator(lambda: None)
    with pytest.raises(ValueError, match="after its trace had ended"):
        mediator.request("model.output")


@both
def test_a_function_that_escapes_the_block_says_so(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile):

        def later() -> torch.Tensor:
            return model[0].output

        later.save()
    with pytest.raises(ValueError, match="outside of interleaving"):
        later()


@both
def test_inference_mode_around_the_trace(model: NNsight, compile: bool) -> None:
    with torch.inference_mode(), model.trace(X, compile=compile):
        model[0].output[:] += 1.0
        out = model.output.save()
    with torch.no_grad():
        expected = model._module[1](model._module[0](X) + 1.0)
    assert torch.equal(out, expected)


@both
def test_autocast_around_the_trace(model: NNsight, compile: bool) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model._module[1](model._module[0](X) * 2)
        with model.trace(X, compile=compile):
            model[0].output = model[0].output * 2
            out = model.output.save()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)


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
