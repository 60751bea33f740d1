"""Regional lowering: equal blocks are lowered once, and whatever crosses a border between regions is what it is eagerly."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import NNsight, fx
from nnsight.fx.lowering.backends import resolve_backend

from ...conftest import Case, Hooks

X = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)
WIDTH = 6


class Block(torch.nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(torch.nn.Module):
    """An embedding, equal blocks, a head."""

    def __init__(self, blocks: int = 5, kind: Callable[[], torch.nn.Module] = Block) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(kind() for _ in range(blocks))
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting:
    """A backend that notes the number of calls in each graph that it lowers with another one."""

    def __init__(self, backend: str = "eager") -> None:
        self._lower = resolve_backend(backend)
        self.lowered: list[int] = []

    def __call__(self, graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.lowered.append(sum(node.op.startswith("call") for node in graph_module.graph.nodes))
        return self._lower(graph_module, inputs)

    def take(self) -> int:
        """Return how many graphs were lowered since the last time."""
        count = len(self.lowered)
        self.lowered.clear()
        return count


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Counting:
    return Counting(getattr(request, "param", "eager"))


#: For tests about what ahead-of-time autograd makes of a region.
lowered = pytest.mark.parametrize("backend", ["aot_eager"], indirect=True)


@pytest.fixture(params=[False, True], ids=["no_grad", "grad"])
def grad(request: pytest.FixtureRequest) -> Any:
    with torch.set_grad_enabled(request.param):
        yield request.param


def wrapped(module: torch.nn.Module, backend: Any, **options: Any) -> NNsight:
    return NNsight(module, compile={"backend": backend, "regions": True, **options})


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-6, atol=1e-6)


# -- what is lowered --------------------------------------------------------------------------------------------------


def edit(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[:, 0] += 2.0
    return value


def test_an_edit_lowers_the_region_it_stands_in_and_the_same_edit_elsewhere_lowers_nothing(backend: Counting, grad: bool) -> None:
    net = Stack()
    model = wrapped(net, backend)
    close(model(X), net(X))
    assert backend.take() == 3  # before the blocks, a block, behind the blocks
    assert (fx.counters.compiles, fx.counters.reuses) == (3, 4)
    for block, compiles in ((1, 1), (3, 0), (1, 0)):
        with model.trace(X) as tracer:
            model.blocks[block].output[:, 0] += 2.0
            out = model.output.save()
        close(out, Hooks(net).output(f"blocks.{block}", edit)(X))
        assert backend.take() == tracer.report.compiles == compiles


def test_an_edit_inside_a_block_and_at_its_input_lowers_one_region(backend: Counting) -> None:
    net = Stack()
    model = wrapped(net, backend)
    with torch.no_grad():
        model(X)
        backend.take()
        with model.trace(X):
            model.blocks[2].up.output *= 0.5
            out = model.output.save()
        assert backend.take() == 1
        close(out, Hooks(net).output("blocks.2.up", lambda value: value * 0.5)(X))
        with model.trace(X):
            model.blocks[2].input = model.blocks[2].input * 0.5
            out = model.output.save()
        assert backend.take() == 1
        close(out, Hooks(net).input("blocks.2", lambda args, kwargs: ((args[0] * 0.5,), kwargs))(X))


@lowered
def test_other_sizes_lower_once_more_and_then_no_more(backend: Counting) -> None:
    net = Stack()
    model = wrapped(net, backend)

    def run(rows: int, block: int) -> None:
        x = torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)
        with model.trace(x):
            model.blocks[block].output[:, 0] = torch.arange(rows) + model.blocks[block].output.shape[1]
            out = model.output.save()

        def edit(value: torch.Tensor) -> torch.Tensor:
            value = value.clone()
            value[:, 0] = torch.arange(rows) + value.shape[1]
            return value

        close(out, Hooks(net).output(f"blocks.{block}", edit)(x))

    for rows in (4, 5):
        run(rows, 1)
    assert backend.take() == 8  # four regions with plain sizes, four with symbolic ones
    for rows, block in ((6, 1), (7, 2), (9, 3)):
        run(rows, block)
    assert backend.take() == 0


def test_captures_share_regions(backend: Counting) -> None:
    model = wrapped(Stack(), backend)
    with torch.no_grad():
        with model.trace(X):
            model.blocks[1].up.output.save()
            model.output.save()
        with model.trace(X):
            kept = model.blocks[1].source.torch_tanh_0.output.save()
            model.output.save()
        assert fx.counters.captures == 2
        assert backend.take() == 5  # the three kinds of regions, and the one that returns something in each trace
        close(kept, torch.tanh(model.blocks[1]._module.up(model.blocks[1]._module.norm(_until(model._module, 1)))))


def _until(net: Any, block: int) -> torch.Tensor:
    x = net.embed(X)
    for index in range(block):
        x = net.blocks[index](x)
    return x


class Scaled(torch.nn.Module):
    def __init__(self, scale: Any, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.inner, self.scale = Block(), scale
        self.inner.up, self.inner.down = torch.nn.Linear(WIDTH, width), torch.nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def test_regions_differ_by_constants_and_by_shapes_and_dtypes_of_parameters(backend: Counting) -> None:
    net = Stack()
    with torch.no_grad():
        for blocks, kinds in (([Scaled(scale) for scale in (2, 2, 3, 2.0, 2)], 3), ([Scaled(2, width) for width in (5, 7, 5, 7)], 2)):
            net.blocks = torch.nn.ModuleList(blocks)
            model = wrapped(net, backend)
            close(model(X), net(X))
            assert backend.take() == 2 + kinds
        net.double()
        close(model(X.double()), net(X.double()))
        assert backend.take() == 4


def test_a_module_that_is_called_again_and_again_is_a_block(backend: Counting, grad: bool) -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), torch.nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.block(x)
            return self.head(x)

    net = Recurrent()
    model = wrapped(net, backend)
    close(model(X), net(X))
    assert backend.take() == 2 + grad  # what the first call gets wants no gradient
    assert fx.counters.reuses == 3 - grad


@lowered
def test_tied_parameters_are_told_from_separate_ones(backend: Counting) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.one(x)) + torch.tanh(self.other(x))

    net = Stack(kind=Two)
    net.blocks[1].other.weight = net.blocks[1].one.weight
    net.blocks[3].other = net.blocks[3].one
    model = wrapped(net, backend)
    out = model(X)
    close(out, net(X))
    parameters = list(net.parameters())
    torch.testing.assert_close(torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(net(X).sum(), parameters))


def test_nothing_is_cut_without_repeated_modules_or_without_the_option(backend: Counting) -> None:
    net = torch.nn.Sequential(Block(), torch.nn.Linear(WIDTH, 4), torch.nn.GELU())
    with torch.no_grad():
        close(wrapped(net, backend)(X), net(X))
        assert backend.take() == 1
        NNsight(Stack(), compile={"backend": backend})(X)
        assert backend.take() == 1


def test_a_backend_that_fails_on_a_region_gets_the_whole_graph(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def picky(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(len(graph_module.graph.nodes))
        if max(seen) < 30:
            raise NotImplementedError("a small graph")
        return graph_module.forward

    net = Stack()
    model = wrapped(net, picky)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "nnsight.fx"):
        close(model(X), net(X))
    assert len(seen) == 2
    assert "as a whole: NotImplementedError: a small graph" in caplog.text


def test_regions_go_away_with_the_model(no_gc: None) -> None:
    net = Stack()
    model = wrapped(net, "eager")
    with torch.no_grad():
        model(X)
    gone = weakref.ref(model._compiled._regions)  # type: ignore[union-attr]
    del model, net
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


# -- effects across borders -------------------------------------------------------------------------------------------


@lowered
def test_an_earlier_value_is_edited_later(backend: Counting) -> None:
    """What block 0 returned is part of block 1's residual stream, and a kept view of it shows the edit."""
    net = Stack()
    model = wrapped(net, backend)
    with torch.no_grad():
        with model.trace(X):
            early = model.blocks[0].output
            row = early[1].save()
            early = early.save()
            kept = model.blocks[2].output.save()
            early[:] = 0.0
            after = (early + 1.0).save()
            out = model.output.save()
        close(row, torch.zeros(WIDTH))
        assert row.untyped_storage().data_ptr() == early.untyped_storage().data_ptr()
        close(after, torch.ones(4, WIDTH))
        close(out, net(X))  # all of block 1 was computed before
        close(kept, _until(net, 3))


class InPlace(Block):
    """Adds to what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.down(torch.tanh(self.up(self.norm(0.5 * x))))  # autograd keeps nothing of what is written to
        return x


@lowered
def test_blocks_that_write_to_their_input(backend: Counting, grad: bool) -> None:
    net = Stack(kind=InPlace)
    model = wrapped(net, backend)
    with model.trace(X):
        first = model.blocks[0].output.clone().save()
        early = model.blocks[0].output.save()
        out = model.output.save()
    close(out, net(X))
    close(early, Hooks(torch.nn.Sequential(net.embed, *net.blocks))(X))  # the same memory all along
    close(first, net.blocks[0](net.embed(X)))
    if grad:
        found = torch.autograd.grad(out.sum(), [net.embed.weight, net.blocks[1].up.weight])
        expected = torch.autograd.grad(net(X).sum(), [net.embed.weight, net.blocks[1].up.weight])
        for mine, other in zip(found, expected, strict=True):
            close(mine, other)


class Writing(torch.nn.Module):
    """Blocks that write to rows of a tensor from outside, through views made before the first of them or in each."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.through = through
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.write = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        before = cache.view(-1) if self.through == "early view" else cache
        total = x.new_zeros(())
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.through == "early view":
                before[index * WIDTH : (index + 1) * WIDTH] = x[0]
                total = total + cache[index].sum()
            elif self.through == "index_copy":
                cache.index_copy_(0, torch.tensor([index]), x[:1])
                total = total + cache.sum()
            else:
                cache[index].copy_(x[0])
                total = total + before[: index + 1].sum()
        return x, total, before[1:]


@lowered
@pytest.mark.parametrize("through", ["early view", "index_copy", "row"])
def test_blocks_that_write_to_a_cache(backend: Counting, through: str) -> None:
    net = Writing(through)
    model = wrapped(net, backend)
    with torch.no_grad():
        expected_cache, cache = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)
        expected = net(X, expected_cache)
        for _ in range(2):
            cache.zero_()
            found = model(X, cache)
            close(cache, expected_cache)
            for mine, other in zip(found, expected, strict=True):
                close(mine, other)
        assert found[2].untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


@lowered
def test_a_tensor_of_the_user_is_written_in_one_block_and_read_in_another(backend: Counting) -> None:
    net = Stack()
    model = wrapped(net, backend)
    board = torch.zeros(4, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            board.zero_()
            view = board[2:]
            with model.trace(X):
                board[:2] += model.blocks[1].output[:2]
                view += model.blocks[2].output[2:]
                model.blocks[3].output += board
                out = model.output.save()
            expected = torch.cat([_until(net, 2)[:2], _until(net, 3)[2:]])
            close(board, expected)
            close(out, Hooks(net).output("blocks.3", lambda value, expected=expected: value + expected)(X))


# -- state across borders ---------------------------------------------------------------------------------------------


class Frozen(Stack):
    """Some blocks run without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        with torch.no_grad():
            x = self.blocks[2](self.blocks[1](x))
        for block in self.blocks[3:]:
            x = block(x)
        return self.head(x)


def test_grad_mode_that_spans_blocks(backend: Counting, grad: bool) -> None:
    net = Frozen(6)
    model = wrapped(net, backend)
    for _ in range(2):
        out = model(X)
        close(out, net(X))
        assert torch.is_grad_enabled() == grad
    if grad:
        out.sum().backward()
        assert net.blocks[0].up.weight.grad is None
        assert net.blocks[3].up.weight.grad is not None


def test_autocast_that_spans_blocks(backend: Counting) -> None:
    class Cast(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.embed(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for block in self.blocks[1:4]:
                    x = block(x)
            return self.head(self.blocks[4](x.float()))

    net = Cast()
    model = wrapped(net, backend)
    with torch.no_grad():
        with model.trace(X):
            inner = model.blocks[2].up.output.save()
            out = model.output.save()
        assert inner.dtype == torch.bfloat16
        torch.testing.assert_close(out, net(X), rtol=0.02, atol=0.02)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = model(X)
            torch.testing.assert_close(again, net(X), rtol=0.02, atol=0.02)
        assert again.dtype == torch.bfloat16


def test_random_numbers_come_in_order_and_inference_mode(backend: Counting) -> None:
    class Dropping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)

    net = Stack(kind=Dropping).train()
    model = wrapped(net, "eager")
    for _ in range(2):
        torch.manual_seed(3)
        found = model(X)
        torch.manual_seed(3)
        assert torch.equal(found, net(X))
    model = wrapped(net.eval(), backend)
    with torch.inference_mode():
        for _ in range(2):
            with model.trace(X):
                model.blocks[1].output *= 2.0
                out = model.output.save()
            close(out, Hooks(net).output("blocks.1", lambda value: value * 2.0)(X))
    with torch.no_grad():
        close(model(X), net(X))


# -- pieces, gradients, real models -------------------------------------------------------------------------------------


def test_pieces_between_cuts_are_made_of_regions(backend: Counting) -> None:
    net = Stack()
    model = wrapped(net, backend)
    with torch.no_grad():
        model(X)
        backend.take()
        with model.trace(X) as tracer:
            hidden = model.blocks[1].output
            if hidden.sum() > -1e9:
                hidden[:] = 1.0
            out = model.output.save()
        assert len(tracer.report.breaks) == 1
        assert backend.take() == 2  # what computes the sum, and the edit behind the cut; all else is known
        close(out, Hooks(net).output("blocks.1", torch.ones_like)(X))


def test_skips_and_stops_use_known_regions(backend: Counting) -> None:
    net = Stack()
    model = wrapped(net, backend)
    with torch.no_grad():
        model(X)
        backend.take()
        with model.trace(X):
            model.blocks[2].skip(model.blocks[1].output)
            out = model.output.save()
        assert backend.take() == 0
        close(out, Hooks(net).output("blocks.2", lambda _: _until(net, 2))(X))
        with model.trace(X) as tracer:
            hidden = model.blocks[2].output.save()
            tracer.stop()
        assert backend.take() == 0
        close(hidden, _until(net, 3))


@lowered
def test_gradients_flow_through_regions(backend: Counting) -> None:
    net = Stack()
    model = wrapped(net, backend)
    for _ in range(2):
        net.zero_grad()
        with model.trace(X):
            early = model.blocks[0].output.requires_grad_()
            late = model.blocks[3].output.requires_grad_()
            with model.output.square().sum().backward():
                late_grad = late.grad.save()
                early_grad = early.grad.save()
        found = net.blocks[1].up.weight.grad
        net.zero_grad()
        hooks = Hooks(net)
        tensors: dict[str, torch.Tensor] = {}

        def keep(name: str, tensors: dict[str, torch.Tensor] = tensors) -> Callable[[torch.Tensor], None]:
            def function(value: torch.Tensor) -> None:
                value.retain_grad()
                tensors[name] = value

            return function

        hooks.output("blocks.0", keep("early")).output("blocks.3", keep("late"))(X).square().sum().backward()
        close(early_grad, tensors["early"].grad)  # type: ignore[arg-type]
        close(late_grad, tensors["late"].grad)  # type: ignore[arg-type]
        close(found, net.blocks[1].up.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_models_of_transformers_are_cut_at_their_layers(cases: dict[str, Case], name: str) -> None:
    """With the same edit in two layers, bit for bit."""
    case = cases[name]
    with torch.no_grad():
        backend = Counting()
        model = wrapped(case.module, backend)
        reference = NNsight(case.module, compile=False)
        counts = []
        for length, index in ((5, 1), (5, 0)):
            found, expected = (_edited(which, case, index, length) for which in (model, reference))
            assert torch.equal(found, expected)
            counts.append(backend.take())
        assert counts[1] < counts[0]
        assert fx.counters.reuses > 0, "of equal layers one is lowered for several"


def _edited(model: NNsight, case: Case, index: int, length: int) -> torch.Tensor:
    with model.trace(**case.inputs(length)):
        mlp = model.get(f"{case.layer(index)}.{case.mlp}")
        out = mlp.nns_output if "output" in mlp._children else mlp.output
        (out[0] if isinstance(out, tuple) else out)[:, -1] *= 1.5
        result = model.output[0].save()
    return result


@pytest.mark.slow
def test_inductor_lowers_regions() -> None:
    net = Stack()
    backend = Counting("inductor")
    model = wrapped(net, backend)
    for block, compiles in ((1, 4), (3, 0)):
        with model.trace(X):
            model.blocks[block].output[:, 0] += 2.0
            out = model.output.save()
        expected = Hooks(net).output(f"blocks.{block}", edit)(X)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert backend.take() == compiles
    (found,) = torch.autograd.grad(out.sum(), [net.embed.weight])
    (wanted,) = torch.autograd.grad(expected.sum(), [net.embed.weight])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
