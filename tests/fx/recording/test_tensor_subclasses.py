"""Models with parameters of a subclass of tensors, as those of quantised models are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight


class Seeing(torch.nn.Parameter):
    """A parameter that sees the calls with it, as those of quantised models do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


inductor = pytest.param("inductor", marks=pytest.mark.slow)


@pytest.mark.parametrize("backend", ["eager", inductor])
def test_calls_of_a_block_are_seen_where_the_graph_hides_those_of_tensor_subclasses(backend: str) -> None:
    """Dynamo puts what subclasses do into a graph, and calls the graph without asking them again."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    net[0].weight = Seeing(net[0].weight.detach().clone())
    model, x = NNsight(net, compile={"backend": backend}), torch.randn(3, 4)
    for _ in range(3):
        with model.trace(x) as tracer:
            hidden = model[1].output
            loss = hidden.square().sum().save()
            loss.backward()
        assert tracer.report.mode == "compiled" and loss.requires_grad
        found, net[0].weight.grad = net[0].weight.grad, None
        net[1](net[0](x)).square().sum().backward()
        torch.testing.assert_close(found, net[0].weight.grad)
        net.zero_grad()
    with model.trace(x) as tracer:
        hidden = model[1].output
        if hidden.sum() > -100:
            hidden[:] = net[0](hidden)
        logits = model[2].output.save()
    assert tracer.report.mode == "compiled" and len(tracer.report.breaks) == 1
    torch.testing.assert_close(logits, net[2](net[0](net[1](net[0](x)))))


class Quantised(torch.Tensor):
    """Weights of which linear layers are all that knows a way, as those of torchao."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Quantised({self.codes}, {self.scale})"  # torch 2.11 prints it

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = args
            return torch.nn.functional.linear(x, weight.codes.to(x.dtype), bias) * weight.scale
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(f"{func} of quantised weights")


def quantised() -> torch.nn.Sequential:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    for layer in (net[0], net[2]):
        codes = torch.randint(-8, 8, layer.weight.shape, dtype=torch.int8)
        layer.weight = torch.nn.Parameter(Quantised(codes, torch.tensor(0.1)), requires_grad=False)
    return net


@pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])
@pytest.mark.parametrize("grad", [True, False])
def test_weights_that_do_linear_layers_their_own_way(backend: str, grad: bool) -> None:
    net = quantised()
    model = NNsight(net, compile={"backend": backend})
    with torch.set_grad_enabled(grad):
        for rows in (3, 3, 3, 5):
            x = torch.randn(rows, 4)
            with model.trace(x) as tracer:
                hidden = model[1].output.save()
                model[1].output = hidden * 2
                again = model[2](hidden).save()
                logits = model[2].output.save()
            assert tracer.report.mode == "compiled"
            assert [cut.reason for cut in tracer.report.breaks] == ["`linear` needs a concrete value"]  # where the block calls it
            plain = net[1](net[0](x))
            for found, expected in ((hidden, plain), (again, net[2](plain)), (logits, net[2](plain * 2))):
                torch.testing.assert_close(found, expected)
                assert found.requires_grad == expected.requires_grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager", inductor])
def test_a_repeated_trace_over_such_weights_is_replayed(backend: str) -> None:
    net = quantised()
    model = NNsight(net, compile={"backend": backend})
    for call in range(6):
        x = torch.randn(3, 4)
        with model.trace(x) as tracer:
            model[1].output = model[1].output * 2
            logits = model[2].output.save()
        assert tracer.report.mode == "compiled" and not tracer.report.breaks
        assert tracer.report.replayed == (call > 0)
        torch.testing.assert_close(logits, net[2](net[1](net[0](x)) * 2))
