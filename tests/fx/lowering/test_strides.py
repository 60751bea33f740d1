"""Strides of tensors that one lowered graph hands to another."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nnsight import NNsight
from nnsight.fx.lowering.symbols import (
    Symbols,
    are_equal,
    is_contiguous,
    layout_of,
    strides_in,
    wanting_grad,
    with_strides,
)

FUSED = torch.randn(2, 5, 24)
TENSORS = [
    FUSED,
    FUSED.transpose(1, 2),
    FUSED.split(8, 2)[1],
    FUSED.split(8, 2)[1].view(2, 5, 4, 2).transpose(1, 2),
    FUSED[:1].transpose(0, 1),
    torch.randn(5, 1).expand(5, 3),
    torch.randn(()),
]


def test_a_layout_gives_the_strides_back() -> None:
    for tensor in TENSORS:
        layout = layout_of(tensor)
        assert layout is not None
        assert are_equal(tensor.shape, tensor.stride(), strides_in(layout, tensor.shape))
    assert layout_of(torch.randn(20).as_strided((3, 4), (5, 2))) is None, "strides that follow from no sizes"


def test_a_layout_holds_for_other_sizes() -> None:
    def keys(length: int) -> torch.Tensor:
        return torch.randn(2, length, 24).split(8, 2)[1].view(2, length, 4, 2).transpose(1, 2)

    layout = layout_of(keys(5))
    assert layout == layout_of(keys(9))
    assert layout is not None
    assert tuple(strides_in(layout, keys(9).shape)) == keys(9).stride()
    assert layout != layout_of(keys(5).contiguous())


def test_a_copy_has_the_strides_and_passes_gradients() -> None:
    tensor = torch.randn(3, 4, requires_grad=True)
    copied = with_strides(tensor, (1, 3))
    assert copied.stride() == (1, 3)
    assert with_strides(tensor, (4, 1)) is tensor
    copied.sum().backward()
    assert torch.equal(tensor.grad, torch.ones(3, 4))


def test_contiguous() -> None:
    assert is_contiguous((3, 1, 4), (4, 99, 1))
    assert not is_contiguous((3, 4), (1, 3))


def test_a_fake_that_stands_for_a_result_of_autograd_has_the_strides_of_the_tensor() -> None:
    """A clone of a view with gaps has none."""
    for tensor in TENSORS[:-1]:
        with FakeTensorMode():
            fake = wanting_grad(torch.empty_strided(tensor.shape, tensor.stride()), is_leaf=False)
        assert fake.requires_grad and not fake.is_leaf
        assert fake.stride() == tensor.stride()


def test_what_is_assumed_of_symbols_that_a_backend_makes() -> None:
    """Such a symbol may turn up in an assumption; it is none of the graph's, so it has no value in another call."""
    symbols = Symbols(["length"], (6,))
    (length,) = symbols.fresh.values()
    source = torch._dynamo.source.ConstantSource("made")
    environment = symbols.environment
    made = environment.create_symintnode(environment.create_symbol(3, source), hint=3, source=source)
    assert bool((length * 4) % made == 0)
    known = set(symbols.symbols)
    assert all(condition.free_symbols <= known for condition in symbols.conditions())


class Fused(torch.nn.Module):
    """Blocks that hand parts of one tensor on, with a concatenation that a backend may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            query, key, value = block(x).split(8, -1)
            key = torch.cat([torch.tensor([]), key.unflatten(-1, (4, 2)).transpose(1, 2)], -2)
            x = query + value * key.transpose(1, 2).flatten(-2).tanh()
        return x


@pytest.mark.slow
def test_pieces_hand_on_what_inductor_returns() -> None:
    """Several lengths, gradients on, and a cut in the middle: everything that crosses it has strides of its own."""
    torch.manual_seed(0)
    module = Fused()
    model = NNsight(module, compile=True)
    for length in (5, 9, 7):
        x = torch.randn(2, length, 8)
        with model.trace(x):
            hidden = model.blocks[1].output
            if hidden.sum() != 0:
                hidden[:, -1] = 0.0
            loss = model.output.pow(2).sum()
            with loss.backward():
                gradient = hidden.grad.save()
            out = loss.detach().save()
        seen: dict[str, torch.Tensor] = {}

        def edit(_: object, __: object, output: torch.Tensor, seen: dict[str, torch.Tensor] = seen) -> torch.Tensor:
            output[:, -1] = 0.0
            seen["hidden"] = output
            return output

        handle = module.blocks[1].register_forward_hook(edit)
        expected = module(x).pow(2).sum()
        handle.remove()
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, seen["hidden"])[0])


class Turned(torch.nn.Module):
    """What its first module returns is transposed, and the second keeps the strides of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tail = Transposing(), torch.nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.norm(x) * 2.0)


class Transposing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("ask", ["view", "stride", "is_contiguous", "reshape"])
def test_strides_behind_a_replacement_of_others(ask: str) -> None:
    """What the model computes from a contiguous replacement is contiguous, where the captured value was not."""
    model, x, given = NNsight(Turned(), compile={"backend": "eager"}), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for compile in (False, True, True):
        with model.trace(x, compile=compile) as tracer:
            assert not model.norm.output.is_contiguous()
            model.norm.output = given
            behind = model.tail.input
            found = (getattr(behind, ask)(-1) if ask in ("view", "reshape") else getattr(behind, ask)()).save()
            out = model.output.save()
        expected = given * 2.0
        wanted = expected.view(-1) if ask in ("view", "reshape") else getattr(expected, ask)()
        torch.testing.assert_close(found, wanted) if isinstance(wanted, torch.Tensor) else None
        assert isinstance(wanted, torch.Tensor) or found == wanted
        torch.testing.assert_close(out, expected.tanh())
        assert len(tracer.report.breaks) == (compile and ask != "reshape")
