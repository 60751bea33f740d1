"""Activation checkpoints and nested regions: locations inside of them, and the operator kept where nobody looks."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nnsight import LanguageModel, NNsight, fx

from ...conftest import Hooks, agree, assert_no_instrumentation

EAGER = {"backend": "eager"}  # changes no bit

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()  # its caches are kept by the code of the modules here, which many models share


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 8)
        self.down = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(torch.nn.Module):
    """Blocks, each called in a way of its own."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


class Twice(Stack):
    """A checkpoint around blocks that are checkpointed themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(super().forward, x)


def checkpointed(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def reentrant(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=True)


@torch.compiler.nested_compile_region
def region(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return function(x)


MODELS = {
    "checkpoint": lambda: Stack(checkpointed),
    "nested checkpoints": lambda: Twice(checkpointed),
    "region": lambda: Stack(region),
}

each = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@each
def test_locations_inside_are_read_and_edited(make: Callable[[], torch.nn.Module]) -> None:
    model = NNsight(make(), compile=EAGER)
    hooks = Hooks(model._module)
    hooks.output("blocks.0.up", lambda value: value + 1.0).output("blocks.1", lambda value: value * 2)
    hooks.output("blocks.2.up", hooks.keep("up")).output("blocks.2.down", torch.zeros_like)
    with torch.no_grad():
        expected = hooks(X), hooks.seen["up"]
    assert not torch.equal(expected[0], model._module(X))

    def run(compile: bool) -> tuple[Any, Any]:
        with torch.no_grad(), model.trace(X, compile=compile) as tracer:
            model.blocks[0].up.output += 1.0
            model.blocks[1].output = model.blocks[1].output * 2
            up = model.blocks[2].up.output.save()
            model.blocks[2].down.output[:] = 0
            output = model.output.save()
        return (output, up), tracer

    agree(run, expected)
    assert_no_instrumentation(model._module)


@each
def test_a_module_inside_is_skipped_and_a_value_inside_decides(make: Callable[[], torch.nn.Module]) -> None:
    """The second one cuts the graph in the middle of what was a graph of its own."""
    model = NNsight(make(), compile=EAGER)
    with torch.no_grad():
        skipped = Hooks(model._module).output("blocks.1", lambda _: torch.ones(3, 4))(X)
        decided = Hooks(model._module).output("blocks.1.up", lambda value: -value)(X)
        for compile in (False, True, True):
            fx.counters.reset()
            with model.trace(X, compile=compile):
                model.blocks[1].skip(torch.ones(3, 4))
                output = model.output.save()
            torch.testing.assert_close(output, skipped, rtol=0, atol=0)
            with model.trace(X, compile=compile) as tracer:
                up = model.blocks[1].up.output
                if (up == up).all():
                    model.blocks[1].up.output = -up
                output = model.output.save()
            torch.testing.assert_close(output, decided, rtol=0, atol=0)
            assert len(tracer.report.breaks) == int(compile)
        assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0


def test_a_checkpoint_saves_memory() -> None:
    """What the blocks compute inside is not kept for the backward pass."""

    def kept(call: Callable[..., Any]) -> int:
        model, tensors = NNsight(Stack(call), compile={"backend": "aot_eager_decomp_partition"}), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensors.append(tensor) or tensor, lambda tensor: tensor):
            with model.trace(X.clone().requires_grad_()):
                model.blocks[1].up.output *= 2.0
                out = model.output.save()
        out.sum().backward()
        return sum(tensor.shape == (3, 8) for tensor in tensors)

    assert kept(checkpointed) < kept(lambda block, x: block(x))


def test_checkpoints_are_lowered_once() -> None:
    model = NNsight(Stack(checkpointed), compile={"backend": "aot_eager", "regions": True})
    x = X.clone().requires_grad_()
    for _ in range(2):
        with model.trace(x):
            out = model.output.save()
        torch.testing.assert_close(out, model._module(x))
    assert (fx.counters.compiles, fx.counters.reuses) == (2, 1), "the first is given a leaf of autograd"


@each
def test_gradients_go_through(make: Callable[[], torch.nn.Module]) -> None:
    model = NNsight(make(), compile=EAGER)
    x = X.clone().requires_grad_()
    wanted = [x, *model._module.parameters()]
    plain = torch.autograd.grad(model._module(x).square().sum(), wanted)
    hook = model._module.blocks[1].down.register_forward_hook(lambda *values: values[-1] * 3)
    expected = torch.autograd.grad(model._module(x).square().sum(), wanted)  # with the hook in what is computed again
    hook.remove()
    assert not torch.allclose(plain[0], expected[0])
    model.compile(backend="aot_eager")
    for _ in range(2):
        with model.trace(x):
            model.blocks[1].down.output *= 3
            loss = model.output.square().sum().save()
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected)
    torch.testing.assert_close(torch.autograd.grad(model(x).square().sum(), wanted), plain)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("make", [MODELS["checkpoint"], MODELS["nested checkpoints"], lambda: Stack(reentrant)])
def test_an_eager_edit_that_is_not_made_again_is_warned_of(make: Callable[[], torch.nn.Module]) -> None:
    model = NNsight(make(), compile=EAGER)
    x = X.clone().requires_grad_()
    message = r"`model\.blocks\.1\.down\.output` was edited inside an activation checkpoint"
    with pytest.warns(UserWarning, match=message) as warned, model.trace(x, compile=False):
        model.blocks[1].down.output *= 3
    assert [linecache.getline(warning.filename, warning.lineno).strip() for warning in warned] == ["model.blocks[1].down.output *= 3"]
    with pytest.warns(UserWarning, match="checkpoint"), model.trace(x, compile=False):
        model.blocks[1].down.output = torch.zeros(3, 4)
    with torch.no_grad(), model.trace(x, compile=False):  # warnings are errors here
        model.blocks[1].down.output *= 3


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", [MODELS["checkpoint"], MODELS["nested checkpoints"]])
def test_what_a_block_computes_in_a_checkpoint_has_its_own_tensors(make: Callable[[], torch.nn.Module], compile: bool) -> None:
    """A loss on hidden values: a checkpoint would look for what the block computed when it computes the inside again."""
    model = NNsight(make(), compile=EAGER)
    x = X.clone().requires_grad_()
    wanted = [x, *model._module.parameters()]
    hooks = Hooks(model._module)
    norms: list[torch.Tensor] = []
    for path in ("blocks.0.up", "blocks.1.down"):
        hooks.output(path, lambda value: norms.append(value))  # noqa: PLW0108
    expected = torch.autograd.grad(hooks(x).square().sum() + sum(value.square().mean() for value in norms), wanted)
    with model.trace(x, compile=compile):
        loss = model.blocks[0].up.output.square().mean()
        loss = loss + model.blocks[1].down.output.square().mean()
        loss = (loss + model.output.square().sum()).save()
    torch.testing.assert_close(torch.autograd.grad(loss, wanted), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`use_cache=True` is incompatible")
def test_a_transformer_that_saves_memory(lm: LanguageModel) -> None:
    """As ``transformers`` checkpoints its layers while it trains."""
    module = copy.deepcopy(lm._module)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    module.train()
    ids = torch.arange(6)[None]

    def run(checkpoints: bool, compile: bool) -> tuple[torch.Tensor, ...]:
        if checkpoints:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        model = NNsight(module, compile={"backend": "aot_eager"})
        with model.trace(ids, use_cache=False, compile=compile) as tracer:
            model.transformer.h[0].mlp.output[:, -1] += 1.0
            hidden = model.transformer.h[1].attn.output[0].save()
            loss = model.output.logits.square().mean().save()
        assert tracer.report.mode == ("compiled" if compile else "eager")
        assert not tracer.report.breaks
        return hidden, loss, *torch.autograd.grad(loss, [module.transformer.wpe.weight, module.transformer.h[0].mlp.c_fc.weight])

    expected = run(checkpoints=False, compile=False)
    torch.testing.assert_close(run(checkpoints=True, compile=True), expected)
