"""Sizes that change from trace to trace: every result is the model's, and nothing is compiled any more."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import nnsight
from nnsight import NNsight, fx

from ...conftest import Hooks, close, same
from ...contract.guide import new_tower

LENGTHS = list(range(2, 50, 5))
random.Random(0).shuffle(LENGTHS)
PATH = "layers.1"


@pytest.fixture(scope="module")
def small() -> Any:
    torch._dynamo.reset()
    return new_tower()


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(100 * batch + length))


# -- edits, each as it is written for a hook and for a block ----------------------------------------------------------


def front_half(h: torch.Tensor) -> None:
    h[:, : h.shape[1] // 2] *= 0.5


def mask_by_position(h: torch.Tensor) -> None:
    mask = torch.arange(h.shape[1]) % 2 == 0
    h[:] = torch.where(mask[None, :, None], h, h * 0.5)


def external_of_the_length(h: torch.Tensor) -> None:
    h += torch.linspace(0.0, 1.0, h.shape[1])[None, :, None]


def external_of_half_the_length(h: torch.Tensor) -> None:
    half = h.shape[1] // 2
    h[:, half:] += torch.linspace(0.0, 1.0, h.shape[1] - half)[:, None].expand(-1, h.shape[2])


def middle_token(h: torch.Tensor) -> None:
    h[:, h.shape[1] // 2] = h[:, 0] - h[:, -1]


def last_of_a_shorter_view(h: torch.Tensor) -> None:
    h[:, 1:] = h[:, 1:] + h[:, : h.shape[1] - 1]


def normalised_by_length(h: torch.Tensor) -> None:
    h -= h.sum(1, keepdim=True) / h.shape[1]


EDITS = [
    front_half, mask_by_position, external_of_the_length, external_of_half_the_length, middle_token,
    last_of_a_shorter_view, normalised_by_length,
]  # fmt: skip


def by_hooks(model: NNsight, edit: Any, tokens: torch.Tensor, path: str = PATH) -> tuple[torch.Tensor, torch.Tensor]:
    hooks = Hooks(model._module)

    def function(value: Any) -> None:
        edit(value[0] if isinstance(value, tuple) else value)

    hooks.output(path, function)
    hooks.output(path, hooks.keep("hidden", lambda value: value[0] if isinstance(value, tuple) else value))
    result = hooks(tokens)
    return hooks.seen["hidden"], getattr(result, "logits", result)


def by_trace(model: NNsight, edit: Any, tokens: torch.Tensor, path: str = PATH) -> tuple[Any, Any, Any]:
    layer = model.get(path)
    with model.trace(tokens) as tracer:
        value = layer.output
        hidden = value[0] if isinstance(value, tuple) else value
        edit(hidden)
        hidden = hidden.save()
        result = model.output.save()
    return hidden, getattr(result, "logits", result), tracer.report


def frames() -> int:
    """Return how many graphs dynamo has captured in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_many_lengths_reach_a_steady_state(small: Any, edit: Any) -> None:
    with torch.no_grad():
        for length in LENGTHS:
            *found, report = by_trace(small, edit, ids(2, length))
            assert not report.breaks
            same(found, [*by_hooks(small, edit, ids(2, length))])
        assert fx.counters.captures <= 2
        assert fx.counters.recordings <= 3
        assert fx.counters.compiles <= 5
        before, captured = str(fx.counters), frames()
        for length in LENGTHS[::3]:
            by_trace(small, edit, ids(2, length))
        assert (str(fx.counters), frames()) == (before, captured), "the second round finds everything"


def test_batches_of_one_and_of_many(small: Any) -> None:
    sizes = [(1, 5), (1, 9), (3, 7), (4, 6), (2, 2)]
    with torch.no_grad():
        for _ in range(3):  # in the second round, dynamo may prefer the capture for any length to the first one
            before, captured = str(fx.counters), frames()
            for batch, length in sizes:
                found = by_trace(small, front_half, ids(batch, length))
                same(found[:2], by_hooks(small, front_half, ids(batch, length)))
    assert (str(fx.counters), frames()) == (before, captured)
    assert fx.counters.captures <= 5


def test_invokes_of_several_prompts(small: Any) -> None:
    """Each invoke has rows of its own; their numbers and lengths change, the program does not."""
    layer = small.get(PATH)
    plans = [(2, 1, 6), (3, 2, 9), (2, 3, 12), (4, 2, 7)]

    def run(first: int, second: int, length: int) -> list[torch.Tensor]:
        with small.trace() as tracer:
            with tracer.invoke(ids(first, length)):
                hidden = layer.output[0]
                hidden[:, : hidden.shape[1] // 2] *= 0.5
                one = small.output.save()
            with tracer.invoke(ids(second, length)):
                two = small.output.save()
        assert not tracer.report.breaks
        return [one, two]

    with torch.no_grad():
        for round_number in range(3):
            if round_number == 2:  # an invoke of one row is a lowering of its own, also of the program for any number
                before, captured = str(fx.counters), frames()
            for first, second, length in plans:
                expected = by_hooks(small, front_half, ids(first, length))[1], by_hooks(small, lambda h: None, ids(second, length))[1]
                close(run(first, second, length), [*expected])
    assert (str(fx.counters), frames()) == (before, captured)
    assert fx.counters.compiles <= 8, fx.counters


@pytest.mark.slow
def test_inductor_reaches_a_steady_state() -> None:
    """A stock model with its defaults: gradients enabled, and the key-value cache on."""
    torch._dynamo.reset()
    model = nnsight.demo_model(compile=True)
    for length in (6, 9, 12, 17, 13):
        before = str(fx.counters)
        found = by_trace(model, front_half, ids(2, length), "transformer.h.1")
        close(found[:2], by_hooks(model, front_half, ids(2, length), "transformer.h.1"))
        assert length != 13 or str(fx.counters) == before
    assert fx.counters.splices <= 4
    assert fx.counters.compiles <= 5 * fx.counters.splices, "of each, the different regions"


class Scaled(torch.nn.Module):
    """Called with a number, of which dynamo makes a symbol once it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return self.second(self.first(x) * factor)


def test_a_number_given_to_the_model_may_be_one_or_zero() -> None:
    module = Scaled()
    model = NNsight(module, compile={"backend": "aot_eager"})
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for factor in (3, 4):
            model(x, factor)
        captures = fx.counters.captures
        for factor in (1, 0, 5, 1):
            with model.trace(x, factor):
                model.first.output += factor + 1
                out = model.output.save()
            torch.testing.assert_close(out, module.second((module.first(x) + factor + 1) * factor))
    assert fx.counters.captures == captures == 2


# -- sizes of what goes on behind a cut --------------------------------------------------------------------------------


class Conv(torch.nn.Module):
    """Makes its shape from that of its input, as the layers of GPT-2 do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(-1, x.size(-1)) @ self.weight).view((*x.size()[:-1], 4))


def test_a_piece_behind_a_cut_serves_all_lengths() -> None:
    """Two of its inputs share memory, which matters only if it writes to them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(Conv(), Conv(), Conv())
    model = NNsight(net, compile={"backend": "aot_eager"})

    def run(length: int) -> None:
        x = torch.randn(1, length, 4)
        with torch.no_grad(), model.trace(x) as tracer:
            hidden = model[0].output
            first = hidden[:, :1]
            if hidden.sum() > -1e9:
                model[0].output = hidden * 2.0
            model[1].output += first
            model[2].output += hidden
            out = model.output.save()
        assert len(tracer.report.breaks) == 1
        with torch.no_grad():
            hidden = net[0](x)
            expected = net[2](net[1](hidden * 2.0) + hidden[:, :1]) + hidden
        torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0)

    for length in (6, 7, 8, 7, 6):
        run(length)
    fx.counters.reset()
    for length in (5, 8, 11):
        run(length)
    assert fx.counters.captures == fx.counters.recordings == fx.counters.compiles == 0


class Reshaped(torch.nn.Module):
    """Is given numbers that the model computes from its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        return self.linear(x.reshape(count, 4)).reshape(x.shape) / scale


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Reshaped() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0] * x.shape[1]
        scale = math.sqrt(count) + count / 3
        for layer in self.layers:
            x = layer(x, count, scale)
        return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_of_the_model_are_computed_again_behind_a_cut(backend: str) -> None:
    """A symbolic float cannot be an input of a piece; and a backend knows the symbols if it is given them, not their product."""
    torch.manual_seed(0)
    net = Layers()
    model = NNsight(net, compile={"backend": backend, "dynamic": True, "regions": False})
    for length in (5, 6, 7):
        x = torch.randn(2, length, 4)
        with torch.no_grad(), model.trace(x) as tracer:
            for layer in model.layers[:2]:
                if layer.output.sum() > -1e9:
                    layer.output *= 2.0
            out = model.output.save()
        hooks = Hooks(net).output("layers.0", lambda value: value * 2.0).output("layers.1", lambda value: value * 2.0)
        with torch.no_grad():
            close(out, hooks(x))
        assert len(tracer.report.breaks) == 2 and tracer.report.compiles == (3 if length == 5 else 0)
        for piece in tracer.report.pieces:
            inputs = piece.variant.spliced.graph_module.graph.find_nodes(op="placeholder")
            sizes = [node.meta["example_value"] for node in inputs if isinstance(node.meta.get("example_value"), torch.SymInt)]
            assert all(size.node.expr.is_symbol for size in sizes)


# -- a backend that lowers no symbolic sizes ---------------------------------------------------------------------------


def only_plain_sizes(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
    """Lower as Inductor does a scan, for which it needs sizes that are numbers."""
    sizes = [size for value in inputs if isinstance(value, torch.Tensor) for size in value.shape]
    if any(isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None for size in sizes):
        raise TypeError("cannot determine truth value of Relational: 1 < s40")
    return lookup_backend("aot_eager")(graph_module, inputs)


def test_where_a_backend_needs_plain_sizes_each_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)))
    model = NNsight(net, compile={"backend": only_plain_sizes, "regions": True})

    def run(rows: int) -> int:
        x = torch.randn(rows, 4)
        with model.trace(x) as tracer:
            hidden = model[1].output
            pairs = hidden.reshape(hidden.shape[0], 2, 2).sum(-1).save()
            out = model.output.save()
            with out.sum().backward():
                gradient = hidden.grad.save()
        expected = net[:2](x)
        expected.retain_grad()
        net[2](expected).sum().backward()
        torch.testing.assert_close([pairs, gradient, out], [expected.reshape(rows, 2, 2).sum(-1), expected.grad, net(x)])
        assert not tracer.report.notes
        return tracer.report.compiles

    compiles = [run(rows) for rows in (2, 3, 5)]
    assert 0 not in compiles, "each size"
    assert [run(rows) for rows in (5, 3)] == [0, 0], "each size, once"
    assert ["each size is lowered separately" in record.message for record in caplog.records].count(True) == 1


def test_the_background_lowers_each_size_where_a_backend_needs_plain_ones() -> None:
    lowered = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        function = only_plain_sizes(graph_module, inputs)
        lowered.append(next(int(value.shape[0]) for value in inputs if isinstance(value, torch.Tensor) and not value.requires_grad))
        return function

    model = NNsight(torch.nn.Linear(4, 4), compile={"backend": backend, "regions": False, "background": True})
    for rows in (2, 3, 3, 3, 5, 5):
        with model.trace(torch.randn(rows, 4)):
            model.output.save()
        assert fx.wait(60)
    assert lowered == [3, 5], "what runs a second time"


@pytest.mark.filterwarnings("ignore::nnsight.runtime.errors.UncompiledWarning")
def test_where_a_backend_lowers_nothing_no_further_size_is_tried() -> None:
    tried = []

    def fails(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        tried.append(inputs)
        raise TypeError("nothing can be lowered")

    model = NNsight(torch.nn.Linear(4, 4), compile={"backend": fails})
    for rows in (2, 3, 5, 7):
        with model.trace(torch.randn(rows, 4)) as tracer:
            model.output.save()
        assert "nothing can be lowered" in tracer.report.notes[0]
    assert len(tried) == 3, "the first size, all sizes, and the second one by itself"
