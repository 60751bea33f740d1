"""Mistakes that fakes do not see, or see where there is none, are the errors of an eager trace, at the same line."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nnsight import NNsight
from nnsight.fx.block_events import Call, ValueNumber
from nnsight.fx.recording.failing_calls import error_on_values

NO_SUCH_KERNELS: list[Callable[[torch.Tensor], Any]] = [
    lambda hidden: hidden.bitwise_not(),
    lambda hidden: hidden & 1,
    lambda hidden: (hidden > 0) @ torch.ones(4, 4),
    lambda hidden: torch.bitwise_left_shift(hidden, 1),
    lambda hidden: hidden.expand(2, *hidden.shape).add_(1.0),
]


@pytest.fixture(scope="module")
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), compile={"backend": "eager"})


@pytest.mark.parametrize("number", range(len(NO_SUCH_KERNELS)))
def test_a_call_that_no_kernel_makes(model: NNsight, number: int) -> None:
    call = NO_SUCH_KERNELS[number]

    def run(compile: bool, catches: bool) -> tuple[list[str], str]:
        notes: list[str] = []
        try:
            with model.trace(torch.ones(3, 4), compile=compile):
                hidden = model[0].output
                notes.append("before")
                try:
                    call(hidden)
                    notes.append("no error")
                except (RuntimeError, NotImplementedError) as error:
                    if not catches:
                        raise
                    notes.append(type(error).__name__)
                notes.append("behind")
        except RuntimeError as error:
            return notes, type(error).__name__
        return notes, ""

    for catches in (True, False):
        expected = run(False, catches)
        assert "no error" not in expected[0]
        assert run(True, catches) == run(True, catches) == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_call_that_only_values_make(model: NNsight) -> None:
    """Fakes of sparse tensors have no strides."""
    for compile in (False, True, True):
        with model.trace(torch.ones(3, 4), compile=compile) as tracer:
            sparse = (model[0].output * 0.0 + torch.eye(3, 4)).to_sparse_csr()
            layout = sparse.layout.save()
            model[1].input = sparse.to_dense()
            out = model.output.save()
        assert layout is torch.sparse_csr
        torch.testing.assert_close(out, torch.eye(3, 4).tanh())
        assert len(tracer.report.breaks) == compile


def test_a_mistake_that_is_caught_keeps_nothing_alive(model: NNsight) -> None:
    """What is alive when the graph runs is computed and returned, so the same block would be another graph now and then."""
    alive: list[bool] = []
    gc.disable()
    try:
        for compile in (False, True, True):
            with model.trace(torch.ones(3, 4), compile=compile):
                doubled = model[0].output * 2.0
                known = weakref.ref(doubled)
                try:
                    doubled[:, 0] = torch.ones(7)
                except RuntimeError:
                    doubled = doubled + 1.0
                alive.append(known() is not None)
                model[1].input = doubled
    finally:
        gc.enable()
    assert alive == [False, False, False]


def test_operators_of_others_are_not_tried(model: NNsight) -> None:
    """They may do more than compute."""
    called: list[tuple[int, ...]] = []
    with torch.library._scoped_library("trials_test", "FRAGMENT") as library:
        library.define("noted(Tensor x) -> Tensor")
        library.impl("noted", lambda x: called.append(tuple(x.shape)) or x * 2.0, "CPU")
        library.impl("noted", torch.empty_like, "Meta")
        for _ in range(2):
            with model.trace(torch.ones(3, 4)):
                doubled = torch.ops.trials_test.noted(model[0].output).save()
            torch.testing.assert_close(doubled, model._module[0](torch.ones(3, 4)) * 2.0)
    assert called == [(3, 4)] * 2


def test_a_mistake_on_a_gpu_has_the_words_of_an_eager_call() -> None:
    """The call is tried on the CPU, unless a constant of the call is on the GPU."""
    numbers = [ValueNumber(0), ValueNumber(1)]
    add = Call(torch.add, tuple(numbers), (), None)

    def words(*sizes_and_devices: tuple[tuple[int, ...], str], call: Call = add) -> str:
        with FakeTensorMode():
            fakes = [torch.ones(sizes, device=device) for sizes, device in sizes_and_devices]
        with pytest.raises(RuntimeError) as raised:
            torch.add(*fakes)
        tried, error = error_on_values(call, numbers, fakes, raised.value)
        return str(error) if tried else "not tried"

    gpu, other = ((2, 4), "cuda"), ((9,), "cuda")
    assert words(gpu, other).startswith("The size of tensor a (4) must match the size of tensor b (9)")
    assert words(gpu, ((2, 4), "cpu")).startswith("Expected all tensors to be on the same device")
    assert words(gpu, other, call=Call(torch.cat, ([torch.ones(2, 4), torch.ones(2, 4, device="meta")],), (), None)) == "not tried"
