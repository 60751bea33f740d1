"""Passes: what they remove, what they must not touch, and that no result changes by a bit."""

from __future__ import annotations

import copy
import logging
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight import NNsight
from nnsight.fx.effects import Kind, edited, kind_of
from nnsight.fx.splicing.passes import PASSES, copy_edited_values, drop_unused_calls, make_cuttable, run_passes

from ..test_driver import Net

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Builder:
    """Writes a graph by hand; each method adds a call and returns its node."""

    def __init__(self, inputs: int = 1) -> None:
        self.graph = torch.fx.Graph()
        self.inputs = [self.graph.placeholder(f"x{number}") for number in range(inputs)]

    def __getattr__(self, name: str) -> Callable[..., torch.fx.Node]:
        return lambda *args, **kwargs: self.graph.call_method(name, args, kwargs)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def item(self, node: torch.fx.Node, index: Any) -> torch.fx.Node:
        return self.call(operator.getitem, node, index)

    def returning(self, *nodes: Any) -> torch.fx.GraphModule:
        self.graph.output(nodes)
        return torch.fx.GraphModule({}, self.graph)


def targets(graph_module: torch.fx.GraphModule) -> list[str]:
    nodes = graph_module.graph.nodes
    return [getattr(node.target, "__name__", node.target) for node in nodes if node.op.startswith("call")]


# -- unneeded calls ----------------------------------------------------------------------------------------------------


def test_calls_that_nobody_needs_go_with_what_they_alone_needed_and_unused_inputs_stay() -> None:
    b = Builder(3)
    x = b.inputs[1]
    b.exp(b.call(torch.add, x, 1))
    b.call(torch.nn.functional.scaled_dot_product_attention, x, x, x)
    module = drop_unused_calls(b.returning(b.mul(x, 2)))
    assert targets(module) == ["mul"]
    assert torch.equal(module(X, X + 1, X)[0], (X + 1) * 2)


_library = torch.library.Library("nnsight_test_passes", "DEF")
_library.define("log(Tensor x) -> Tensor")
_library.impl("log", lambda x: x.clone(), "CompositeExplicitAutograd")


EFFECTS: list[Callable[..., torch.fx.Node]] = [
    lambda b, x: b.add_(x, 1),
    lambda b, x: b.add_(b.item(x, 0), 1),
    lambda b, x: b.call(operator.setitem, x, 0, 1.0),
    lambda b, x: b.call(operator.iadd, x, 1),
    lambda b, x: b.call(torch.relu_, x),
    lambda b, x: b.call(torch.relu, b.inputs[1], out=x),
    lambda b, x: b.call(torch.nn.functional.relu, x, inplace=True),
    lambda b, x: b.call(torch.nn.functional.relu, x, True),
    lambda b, x: b.call(torch.nn.functional.embedding, b.inputs[1], x, None, 1.0),
    lambda b, x: b.call(torch.ops.aten.add_.Tensor, x, x),
    lambda b, x: b.call(torch._foreach_add_, [x], 1),
    lambda b, x: b.copy_(x, x),
    lambda b, x: b.call(torch.nn.functional.batch_norm, b.inputs[1], x, x, None, None, True),
    lambda b, x: b.call(torch.batch_norm, b.inputs[1], None, None, x, x, True, 0.1, 1e-5, False),
    lambda b, x: b.call(torch.instance_norm, b.inputs[1], None, None, x, x, True, 0.1, 1e-5, False),
    lambda b, x: b.call(torch.randn, 3),
    lambda b, x: b.call(torch.bernoulli, x),
    lambda b, x: b.call(torch.nn.functional.dropout, x),
    lambda b, x: b.call(torch.nn.functional.dropout, x, 0.1, True),
    lambda b, x: b.call(torch.nn.functional.scaled_dot_product_attention, x, x, x, None, 0.1),
    lambda b, x: b.call(torch.nn.functional.fractional_max_pool2d, x, 2, output_ratio=0.5),
    lambda b, x: b.call(torch._C._set_grad_enabled, False),
    lambda b, x: b.call(print, x),
    lambda b, x: b.call(torch._assert_async, x),
    lambda b, x: b.call(torch.amp.autocast_mode._enter_autocast, "cpu", None, True, None),
    lambda b, x: b.call(torch.ops.nnsight_test_passes.log, x),
    lambda b, x: b.call(torch.manual_seed, 0),
]

NO_EFFECTS: list[Callable[..., torch.fx.Node]] = [
    lambda b, x: b.call(torch.nn.functional.dropout, x, 0.1, False),
    lambda b, x: b.call(torch.nn.functional.dropout, x, p=0.1, training=False),
    lambda b, x: b.call(torch.nn.functional.scaled_dot_product_attention, x, x, x, dropout_p=0.0),
    lambda b, x: b.call(torch.nn.functional.relu, x, inplace=False),
    lambda b, x: b.call(torch.ops.aten.add.Tensor, x, x),
    lambda b, x: b.call(torch.cat, [x, x]),
    lambda b, x: b.call(getattr, x, "T"),
    lambda b, x: b.float(x),
]

FAILING: list[Callable[..., torch.fx.Node]] = [
    lambda b, x: b.item(x, b.inputs[1]),
    lambda b, x: b.item(x, (slice(None), [9])),
    lambda b, x: b.gather(x, 0, b.inputs[1]),
    lambda b, x: b.call(torch.nn.functional.embedding, b.inputs[1], x),
    lambda b, x: b.call(torch.nn.functional.softmax, x, 9),
    lambda b, x: b.call(torch.linalg.inv, x),
    lambda b, x: b.call(torch.quantile, x, b.inputs[1]),
    lambda b, x: b.call(torch.ops.aten.index.Tensor, x, [b.inputs[1]]),
    lambda b, x: b.call(operator.floordiv, b.inputs[1], b.call(torch.zeros, 1, dtype=torch.long)),
]


def test_calls_with_effects_and_calls_that_may_fail_stay() -> None:
    for write in (*EFFECTS, *FAILING):
        b = Builder(2)
        node = write(b, b.inputs[0])
        assert write in FAILING or kind_of(node) in (Kind.EFFECT, Kind.RANDOM)
        module = drop_unused_calls(b.returning(b.inputs[1]))
        assert node in module.graph.nodes
        if write in FAILING:
            with pytest.raises((IndexError, RuntimeError)):
                module(X, torch.full((1, 1), 9))
    for write in NO_EFFECTS:
        b = Builder()
        write(b, b.inputs[0])
        assert targets(drop_unused_calls(b.returning(b.inputs[0]))) == []


# -- all of them -------------------------------------------------------------------------------------------------------


CALLS: dict[int, Callable[[Builder, torch.fx.Node, torch.fx.Node], torch.fx.Node]] = {
    3: lambda b, x, y: b.mul(x, 2),
    4: lambda b, x, y: b.add(x, y),
    5: lambda b, x, y: b.clone(x),
    6: lambda b, x, y: b.reshape(x, 3, 4),
    7: lambda b, x, y: b.contiguous(b.call(getattr, b.call(getattr, x, "T"), "T")),
    8: lambda b, x, y: b.add(x, b.call(torch.rand, 3, 4)),
    9: lambda b, x, y: b.item(x, slice(None)),
}


@st.composite
def graphs(draw: st.DrawFn) -> torch.fx.GraphModule:
    """Graphs of reads, views, calculations, copies, edits in place and draws of random numbers, with repetitions."""
    b = Builder(2)
    nodes = list(b.inputs)
    for _ in range(draw(st.integers(1, 14))):
        x, y = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
        kind = draw(st.integers(0, 9))
        if kind == 0:
            b.call(operator.iadd, b.item(x, draw(st.sampled_from([slice(None), slice(0, 2), None]))), 1.5)
            if draw(st.booleans()):
                b.call(operator.setitem, x, draw(st.sampled_from([slice(None), slice(0, 2)])), 0.25)
            continue
        if kind == 1:
            view = b.item(x, slice(0, 1))
            b.call(operator.imul, view, 2)
            b.call(operator.setitem, x, slice(0, 1), view)
            continue
        if kind == 2:
            b.add_(x, 1)
            continue
        nodes.append(CALLS[kind](b, x, y))
    kept = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
    return b.returning(*kept)


def outcome(module: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Return what a graph returns, what it leaves in its inputs, and the random number after it."""
    inputs = [X.clone(), X.flip(0).clone()]
    torch.manual_seed(3)
    results = module(*inputs)
    return [*(result.clone() for result in results), *inputs, torch.rand(1)]


@given(graphs())
@settings(max_examples=120, deadline=None)
def test_no_pass_changes_a_bit(module: torch.fx.GraphModule) -> None:
    expected = outcome(module)
    run_passes(module)
    assert all(torch.equal(one, other) for one, other in zip(outcome(module), expected, strict=True))


# -- in traces ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Net(), compile={"backend": "eager"})


@torch.no_grad()
def test_a_stop_and_a_skip_compute_what_is_kept_and_what_has_effects(model: NNsight) -> None:
    with model.trace(X) as tracer:
        first = model.first.output.save()
        (first * 3).exp()
        model.second.input  # noqa: B018
        tracer.stop()
    assert ".exp()" not in tracer.report.code
    assert "add_" in tracer.report.code
    assert torch.equal(first, model._module.first(X))
    assert model._module.calls == 1
    replacement = torch.ones(3, 6)
    with model.trace(X) as tracer:
        model.second.skip(replacement)
        out = model.output.save()
    assert tracer.report.code.count("linear(") == 1
    assert torch.equal(out, model._module.third(torch.relu(replacement)))


def test_each_pass_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    b = Builder()
    b.exp(b.inputs[0])
    with caplog.at_level(logging.DEBUG, "nnsight.fx.splicing.passes"):
        _, runs = run_passes(b.returning(b.mul(b.inputs[0], 2)))
    assert [run.name for run in runs] == [function.__name__ for function in PASSES] == ["drop_unused_calls"]
    assert "pass drop_unused_calls: 4 nodes before, 3 after\n" in caplog.text and "def forward(" in caplog.text


# -- logs --------------------------------------------------------------------------------------------------------------

_PROGRAM = """
{imports}
import torch
from nnsight import NNsight
model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), compile={{"backend": "eager"}})
with model.trace(torch.ones(1, 2)):
    hidden = model[0].output
    hidden * 3
    if hidden.sum() > 100:
        pass
    model.output.save()
"""


def stderr(imports: str, logs: str, tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM.format(imports=imports), encoding="utf-8")
    environment = {**os.environ, "TORCH_LOGS": logs}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=300, check=True
    )
    return done.stderr


@pytest.mark.slow
def test_torch_logs_shows_each_pass(tmp_path: Path) -> None:
    printed = stderr("from nnsight.fx import explain", "+nnsight", tmp_path)
    counts = re.findall(r"pass (\w+): (\d+) nodes before, (\d+) after", printed)
    assert [name for name, _, _ in counts] == [function.__name__ for function in PASSES] * 2
    assert any(int(before) > int(after) for _, before, after in counts)
    assert "def forward(" in printed
    assert "graph cut: " in printed
    printed = stderr("import nnsight", "nnsight", tmp_path)
    assert "graph cut: " in printed
    assert "pass drop" not in printed


@pytest.mark.parametrize(("function", "copied"), [(torch.topk, "getitem"), (torch.chunk, "exp")])
def test_what_is_copied_before_an_item_of_several_results_is_edited(function: Callable[..., Any], copied: str) -> None:
    """The item, or the tensor that it is a view of, which sees the edit; never the tuple."""
    build = Builder()
    made = build.call(torch.exp, build.inputs[0])
    found = build.call(function, made, 2)
    item = build.item(found, 0)
    edited = build.mul_(item, 2.0)
    results = function(X.exp(), 2)
    base = X.exp() if copied == "getitem" else results[0]._base
    for node, example in ((build.inputs[0], X), (made, base), (found, results), (item, results[0]), (edited, results[0])):
        node.meta["example_value"] = example
    graph_module = build.returning(made, edited)
    expected = [result.clone() for result in graph_module(X)]
    copy_edited_values(graph_module)
    (clone,) = graph_module.graph.find_nodes(op="call_method", target="clone")
    assert clone.args[0].target.__name__ == copied
    for one, other in zip(graph_module(X), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "known"), [("add_.Tensor", True), ("copy_.default", True), ("set_.source_Tensor", False), ("add.Tensor", False)]
)
def test_the_schema_of_an_operator_says_what_it_edits(name: str, known: bool) -> None:
    graph = torch.fx.Graph()
    target, source = graph.placeholder("target"), graph.placeholder("source")
    packet, overload = name.split(".")
    node = graph.call_function(getattr(getattr(torch.ops.aten, packet), overload), (target, source))
    assert edited(node) is (target if known else None)


def test_edits_are_made_on_copies_before_which_a_graph_can_be_cut() -> None:
    """Aliases that are used later become those of the copy. An edit that autograd does not see keeps its tensor."""
    builder = Builder()
    hidden = builder.call(torch.mul, *builder.inputs, 2)
    heads = builder.view(hidden, 2, 2, 2)
    result = builder.relu(hidden)
    first, half = builder.call(operator.getitem, heads, (slice(None), 0)), builder.call(operator.getitem, result, (slice(None), slice(2)))
    builder.call(operator.iadd, first, half)
    product = builder.call(torch.mul, heads, 3)
    builder.call(operator.setitem, hidden, (slice(None), 1), builder.sum(product, (1, 2)))
    builder.call(torch._C._set_grad_enabled, False)
    builder.mul_(hidden, 3)
    builder.call(torch._C._set_grad_enabled, True)
    builder.graph.output(([result, product, builder.sum(heads), hidden, first],))
    module = torch.fx.GraphModule(torch.nn.Module(), builder.graph)
    x = torch.randn(2, 4, requires_grad=True)
    (expected,) = copy.deepcopy(module)(x)
    (found,) = make_cuttable(module, {})(x)
    assert [node.target for node in module.graph.nodes].count("clone") == 2
    torch.testing.assert_close(found, expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(*(torch.autograd.grad(value.sum(), x, retain_graph=True) for value in (one, other)))
