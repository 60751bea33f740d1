"""The steps of the compiler as plain functions: what they make is what a hand-edited model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import nnsight.demo
from nnsight import fx
from nnsight.fx.pipeline import Values
from nnsight.fx.recording.execution import GraphBreakError
from nnsight.runtime.errors import OutOfOrderError

X = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


@pytest.fixture
def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))


def edited(net: torch.nn.Sequential, x: torch.Tensor, vector: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = net[0](x) + alpha * vector
    return hidden, net[2](net[1](hidden))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_steps_one_by_one(net: torch.nn.Sequential, backend: str, dynamic: bool) -> None:
    vector, alpha = torch.ones(5), 0.5

    def block(values: Values) -> Any:
        values["model.0.output"] = values["model.0.output"] + alpha * vector
        return values["model.0.output"]

    before = {path: set(vars(module)) for path, module in net.named_modules()}
    captured = fx.capture(net, X, dynamic=dynamic)
    assert captured.locations[0] == "model.input" and "model.0.output" in captured.locations
    recorded = fx.record(captured, block)
    assert {path: set(vars(module)) for path, module in net.named_modules()} == before, "nothing is left on the module"
    assert torch.equal(recorded.externals[0], alpha * vector) and "call add" in str(recorded.program)
    spliced = fx.splice(recorded)
    assert "test_pipeline.py" in spliced.code()
    function = fx.lower(spliced, recorded, backend=backend)
    with torch.no_grad():
        hidden, out = function(*spliced.arguments(recorded.inputs))
        want = edited(net, X, vector, alpha)
        assert torch.allclose(hidden, want[0]) and torch.allclose(out, want[1])
        assert torch.allclose(recorded.outputs[0], want[1])
        if dynamic:
            more = torch.cat([X, 2 * X])
            again = fx.record(fx.CapturedCall(captured.graph, _with_rows(captured.inputs, more)), block)
            assert again.program == recorded.program
            hidden, out = function(*spliced.arguments(again.inputs))
            want = edited(net, more, vector, alpha)
            assert torch.allclose(hidden, want[0]) and torch.allclose(out, want[1])


def _with_rows(inputs: tuple[Any, ...], x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x if value is X else len(x) if isinstance(value, int) else value for value in inputs)


def test_programs_of_one_block_are_equal(net: torch.nn.Sequential) -> None:
    captured = fx.capture(net, X)
    one, same, other = (
        fx.record(captured, lambda values, shift=shift: values["model.1.output"] * shift) for shift in (1.5, 1.5, 2.5)
    )
    assert one.program == same.program
    assert (other.program, other.results) == (one.program, one.results), "a number is an input"
    assert [float(one.externals[0]), float(other.externals[0])] == [1.5, 2.5]


def test_a_block_returns_values_of_the_graph(net: torch.nn.Sequential) -> None:
    captured = fx.capture(net, X)
    recorded = fx.record(captured, lambda values: [values["model.input"][0][0], values["model.0.output"]])
    spliced = fx.splice(recorded)
    x, hidden, out = fx.lower(spliced, recorded, backend="eager")(*spliced.arguments(recorded.inputs))
    assert x is X and torch.equal(hidden, net[0](X)) and torch.equal(out, net(X))
    for foreign in (3, torch.ones(2)):
        with pytest.raises(TypeError, match="neither a value of the graph"):
            fx.record(captured, lambda values, foreign=foreign: foreign)


def test_a_stock_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(Path(nnsight.demo.__file__).with_name("weights"))
    ids = torch.tensor([[5, 6, 7]])
    captured = fx.capture(model, input_ids=ids, use_cache=False)

    def block(values: Values) -> Any:
        values["model.transformer.h.1.mlp.output"] = values["model.transformer.h.1.mlp.output"] * 0
        return values["model.lm_head.output"]

    recorded = fx.record(captured, block)
    spliced = fx.splice(recorded)
    logits = fx.lower(spliced, recorded, backend="eager")(*spliced.arguments(recorded.inputs))[0]
    handle = model.transformer.h[1].mlp.register_forward_hook(lambda module, args, output: output * 0)
    want = model(input_ids=ids, use_cache=False).logits
    handle.remove()
    assert torch.allclose(logits, want, atol=1e-5)


def test_blocks_that_need_a_value_or_an_unknown_location_are_refused(net: torch.nn.Sequential) -> None:
    captured = fx.capture(net, X)
    with pytest.raises(GraphBreakError, match=r"test_pipeline\.py"):
        fx.record(captured, lambda values: bool(values["model.0.output"].sum() > 0))
    with pytest.raises(OutOfOrderError, match=r"model\.7\.output"):
        fx.record(captured, lambda values: values["model.7.output"])


def test_what_torch_does_not_compile_is_no_graph(net: torch.nn.Sequential) -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="captured no graph"):
        fx.capture(net, X)


def test_a_module_that_breaks_the_graph_is_refused() -> None:
    class Breaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(torch._dynamo.exc.Unsupported, match="ata-dependent"):
        fx.capture(Breaks(), X)
