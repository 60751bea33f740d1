"""Functions of torch that the user has overridden, and tangents of forward-mode AD: a compiled model runs uncompiled, and says so."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from nnsight import NNsight, UncompiledWarning
from nnsight.fx.recording.execution import GraphBreakError

from ...conftest import close

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Identity())


class Plus(TorchFunctionMode):
    """Adds one to the results of two functions: one that the model calls, and one that the block calls."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made + 1 if function in (torch.nn.functional.relu, torch.sin) else made


@BACKENDS
def test_a_function_mode_sees_each_call_once(backend: str) -> None:
    model = NNsight(net(), compile={"backend": backend})
    expected = torch.tanh(torch.sin(torch.relu(X) + 1) + 1)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncompiledWarning)
            with Plus(), model.trace(X) as tracer:
                model[0].output = torch.sin(model[0].output)
                out = model.output.save()
        close(out, expected)
        assert ["`Plus` would not see" in cut.reason for cut in tracer.report.breaks] == [True]
        with Plus():
            close(model(X), torch.tanh(torch.relu(X) + 1))
    with model.trace(X) as tracer:
        out = model.output.save()
    assert not tracer.report.breaks
    close(out, torch.tanh(torch.relu(X)))


class Capped(torch.Tensor):
    """Sums are at most one."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(function, types, args, kwargs or {})
        return made.clamp(max=1.0) if function is torch.add else made


def test_a_tensor_subclass_sees_the_calls_of_the_block() -> None:
    model = NNsight(net(), compile={"backend": "eager"})
    with pytest.warns(UncompiledWarning, match="the tensor subclass `Capped`"), model.trace(X.as_subclass(Capped)):
        model[1].output = torch.add(model[1].output, 5.0)
        out = model.output.save()
    assert type(out) is Capped
    assert torch.equal(torch.Tensor(out), torch.ones(2, 4))


@BACKENDS
def test_tangents_of_forward_mode(backend: str) -> None:
    model = NNsight(net(), compile={"backend": backend})
    with pytest.warns(UncompiledWarning, match="tangents"), forward_ad.dual_level(), model.trace(X):
        model[0].output = forward_ad.make_dual(model[0].output, torch.ones(2, 4))
        tangent = forward_ad.unpack_dual(model.output).tangent.save()
    close(tangent, 1 - torch.tanh(torch.relu(X)) ** 2)
    with model.trace(X) as tracer:
        tangent = torch.func.jvp(torch.tanh, (model[0].output,), (torch.ones(2, 4),))[1].save()
    assert not tracer.report.breaks
    torch.testing.assert_close(tangent, 1 - torch.tanh(torch.relu(X)) ** 2)


def test_one_graph_is_demanded() -> None:
    """With ``fullgraph=True`` these calls are errors, before anything has run; other calls of the model stay compiled."""
    model = NNsight(net(), compile={"backend": "eager", "fullgraph": True})
    cases = (Plus(), X, "`Plus` would"), (nullcontext(), X.as_subclass(Capped), "`Capped` would"), (forward_ad.dual_level(), X, "tangents")
    for context, x, reason in cases:
        with pytest.raises(GraphBreakError, match=f"fullgraph=True, and this call must run uncompiled: .*{reason}"):
            with context, model.trace(x):
                model[0].output.save()
    with model.trace(X) as tracer:
        out = model.output.save()
    close(out, torch.tanh(torch.relu(X)))
    assert not tracer.report.breaks
