"""``trace(program=True)``: the block as a program that runs here, with the values, gradients and errors of any trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nnsight import NNsight
from nnsight.remote import NotExpressibleError

from ..conftest import Hooks
from .test_bound import stack


@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}])
def test_a_trace_has_its_program(compile: Any) -> None:
    net, x = stack(), torch.randn(3, 6)
    direction, alpha = torch.randn(6, requires_grad=True), 2.0
    model = NNsight(net, compile=compile)
    kept: list[torch.Tensor] = []
    with model.trace(x, program=True) as tracer:
        model[1].output[:] += alpha * direction
        kept.append(model[2].output)
        out = model[3].output.save()
    expected = Hooks(net).output("1", lambda value: value + alpha * direction)(x)
    torch.testing.assert_close(out, expected)
    assert [item.shape for item in kept] == [(3, 6)]
    out.sum().backward()
    ours, direction.grad = direction.grad, None
    expected.sum().backward()
    torch.testing.assert_close(ours, direction.grad)
    assert sorted(tracer.program.inputs) == ["alpha", "direction"]
    assert tracer.report.mode == ("compiled" if compile else "eager")
    y = torch.randn(5, 6)
    found = tracer.program.bind(model, inputs=["alpha"])(y, alpha=0.5)["out"]
    torch.testing.assert_close(found, Hooks(net).output("1", lambda value: value + 0.5 * direction)(y))


def test_parameters_of_a_module_of_ones_own_are_trained() -> None:
    net, x, probe = stack(), torch.randn(3, 6), nn.Linear(6, 2)
    model = NNsight(net)
    with model.trace(x, program=True):
        loss = probe(model[2].output).square().mean().save()
    loss.backward()
    ours = probe.weight.grad.clone()
    probe.weight.grad = None
    hooks = Hooks(net)
    hooks.output("2", hooks.keep("hidden"))(x)
    probe(hooks.seen["hidden"]).square().mean().backward()
    torch.testing.assert_close(ours, probe.weight.grad)


def test_a_generation_has_its_program(model: Any) -> None:
    direction = torch.randn(model.config.n_embd)
    with model.generate("Hello", max_new_tokens=3, do_sample=False, program=True) as tracer:
        for _ in tracer.iter[:3]:
            model.transformer.h[1].output[:, -1] += direction
        tokens = tracer.result.save()
    with model.generate("Hello", max_new_tokens=3, do_sample=False) as plain:
        for _ in plain.iter[:3]:
            model.transformer.h[1].output[:, -1] += direction
        expected = plain.result.save()
    assert torch.equal(tokens, expected)
    assert "direction" in tracer.program.inputs


def test_what_is_no_program_is_refused_at_its_line() -> None:
    model, x = NNsight(stack()), torch.randn(3, 6)
    with pytest.raises(NotExpressibleError, match="needs values"), model.trace(x, program=True):
        if model[1].output.sum() > 0:
            model[2].output[:] = 0.0
    with pytest.raises(ValueError, match="leave out remote= and backend="), model.trace(x, program=True, remote="local"):
        model[1].output.save()
    with pytest.raises(ValueError, match="a function of yours is no part of a program"), model.trace(x, program=True, fn=model._module):
        model[1].output.save()
