"""Dynamo executes the calls of intercepted modules in a short way. It captures the graph that the code of the interception gives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.variables.lazy import LazyVariableTracker
from transformers.modeling_outputs import BaseModelOutput

from nnsight import NNsight
from nnsight.fx.capturing import traced_calls
from nnsight.fx.capturing.dynamo import capturing, new_caller
from nnsight.fx.capturing.taps import tapped_call
from nnsight.fx.torch_compat import VariableBuilder
from nnsight.runtime.modules.tree import ModuleTree

from ...conftest import Hooks
from ...zoo.models import specimens

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
SPECIMENS = specimens()


def graph_of(module: torch.nn.Module, *args: Any, **kwargs: Any) -> list[tuple[Any, ...]]:
    """Capture a call of ``module``; return the nodes of the graph, with their numbers in place of their names."""
    found: list[list[tuple[Any, ...]]] = []

    def keep(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        numbers = {node: f"%{number}" for number, node in enumerate(graph_module.graph.nodes) if node.op != "placeholder"}
        numbers |= {node: node.name for node in graph_module.graph.nodes if node.op == "placeholder"}

        def shown(value: Any) -> str:
            return str(torch.fx.node.map_arg(value, numbers.__getitem__))

        calls = [node for node in graph_module.graph.nodes if node.op != "placeholder"]
        found.append([(node.op, str(node.target), shown(node.args), shown(node.kwargs)) for node in calls])
        return graph_module.forward

    tree = ModuleTree(module, traced_call=tapped_call)
    torch._dynamo.reset()
    with tree.instrumentation, capturing():
        torch.compile(new_caller(module), backend=keep, fullgraph=True, dynamic=False)(module, args, kwargs)
    assert any("tap" in target for _, target, *_ in found[0])
    return found[0]


@contextlib.contextmanager
def executing_all_code(monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as changed:
        changed.setattr(traced_calls, "tapped_locations", lambda module: None)
        changed.delitem(VariableBuilder._id_dispatch(), id(tapped_call))
        yield


class Cache:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Attention(torch.nn.Module):
    """Takes and returns tensors, constants, containers and an object that is also in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any, *, scale: float, mask: Any = None, pair: Any = ()) -> Any:
        y = self.linear(x) * scale
        cache.seen.append(y)
        return y, None, cache, tuple(value + y for value in pair)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Attention(), Attention(), torch.nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor, cache: Any) -> Any:
        x = self.first(x, cache, scale=2.0)[0]
        x, _, cache, (pair,) = self.second(x, cache, scale=0.5, mask=None, pair=[x])
        found = self.last(x[None] + pair, x[None], x[None])
        return BaseModelOutput(last_hidden_state=found[0], hidden_states=(x, found[1]))


def test_containers_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    short = graph_of(Model(), X, Cache())
    with executing_all_code(monkeypatch):
        assert graph_of(Model(), X, Cache()) == short
    assert sum("tap" in target for _, target, *_ in short) == 2 * 6


@pytest.mark.parametrize("kind", ["forward", "pre", "kwargs", "global"])
def test_a_module_with_hooks_has_one_tap_for_its_input(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo executes the method of such a module, and not its ``forward`` at once."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    register: Any = {
        "forward": lambda: net[0].register_forward_hook(lambda module, args, output: output * 2),
        "pre": lambda: net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        "kwargs": lambda: net[0].register_forward_hook(lambda module, args, kwargs, output: output * 2, with_kwargs=True),
        "global": lambda: torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output * 2 if module is net[0] else None
        ),
    }[kind]
    handle = register()
    try:
        short = graph_of(net, X)
        with executing_all_code(monkeypatch):
            assert graph_of(net, X) == short
        assert sum("tap" in target for _, target, *_ in short) == 2 * 4
        model = NNsight(net, compile={"backend": "eager"})
        with model.trace(X):
            model[0].output += 1.0
            out = model.output.save()
        torch.testing.assert_close(out, Hooks(net).output("0", lambda value: value + 1.0)(X))
    finally:
        handle.remove()


def test_a_module_that_calls_itself() -> None:
    class Recursive(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.linear(x) if depth == 0 else self(x, depth - 1) * 2

    graph = graph_of(Recursive(), X)
    assert sum("tap" in target for _, target, *_ in graph) == 2 * (3 + 1)


SLOW = ["gpt2", "t5", "bloom", "falcon", "gemma3", "mixtral", "gpt-oss", "deepseek-v3", "whisper", "vit", "clip", "resnet", "encoder"]


@pytest.mark.parametrize("name", ["llama", "dicts", "shared", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo, for an autograd function
def test_models_have_the_same_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specimen = SPECIMENS[name]
    with torch.no_grad():
        short = graph_of(specimen.build(), **specimen.arguments(6, 2, 0))
        with executing_all_code(monkeypatch):
            assert graph_of(specimen.build(), **specimen.arguments(6, 2, 0)) == short


def test_dynamo_executes_and_wraps_little_more_than_for_a_plain_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(symbolic_convert.InstructionTranslatorBase, "step", "instructions")
    count(LazyVariableTracker, "__init__", "values")
    specimen = SPECIMENS["llama"]
    module, inputs = specimen.build(), specimen.arguments(6, 2, 0)
    with torch.no_grad():
        torch.compile(module, backend="eager")(**inputs)
        plain = counts.copy()
        counts.clear()
        torch._dynamo.reset()
        model = NNsight(module, compile={"backend": "eager"})
        with model.trace(**inputs):
            model.model.layers[1].output[:] *= 2
            model.lm_head.output.save()
    assert plain["instructions"] > 5000
    assert counts["instructions"] < 1.5 * plain["instructions"]
    assert counts["values"] < 3 * plain["values"]
