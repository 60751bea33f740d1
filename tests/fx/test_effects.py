"""What the functions of torch are known to do with the memory of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from nnsight import NNsight
from nnsight.fx.effects import _NEW, Kind, kind_of

M = torch.arange(12.0).reshape(3, 4) / 7 + 1
SQUARE = torch.arange(9.0).reshape(3, 3) / 5 + 1

#: A call of each composite operator that is taken to return new memory, with arguments for which a view would do if one ever does.
CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "linear": lambda: (F.linear, M, torch.eye(4)),
    "matmul": lambda: (torch.matmul, M, torch.eye(4)),
    "outer": lambda: (torch.outer, M[0], torch.ones(1)),
    "layer_norm": lambda: (F.layer_norm, M, (4,)),
    "rms_norm": lambda: (F.rms_norm, M, (4,)),
    "group_norm": lambda: (F.group_norm, M, 2),
    "softmax": lambda: (torch.softmax, M[:, :1], 1),
    "log_softmax": lambda: (torch.log_softmax, M[:, :1], 1),
    "where": lambda: (torch.where, torch.ones(3, 4, dtype=torch.bool), M, M),
    "max": lambda: (torch.max, M, M),
    "min": lambda: (torch.min, M, M),
    "square": lambda: (torch.square, M),
    "absolute": lambda: (torch.absolute, M),
    "negative": lambda: (torch.negative, M),
    "clip": lambda: (torch.clip, M, 0.0),
    "multiply": lambda: (torch.multiply, M, 1),
    "subtract": lambda: (torch.subtract, M, 0),
    "divide": lambda: (torch.divide, M, 1),
    "true_divide": lambda: (torch.true_divide, M, 1),
    **{name: lambda name=name: (getattr(torch, name), M, 0) for name in ("greater", "greater_equal", "less", "less_equal", "not_equal")},
    "concat": lambda: (torch.concat, [M]),
    "concatenate": lambda: (torch.concatenate, [M]),
    **{name: lambda name=name: (getattr(torch, name), [M]) for name in ("hstack", "vstack", "dstack")},
    **{
        f"{kind}{n}d": lambda kind=kind, n=n: (getattr(F, f"{kind}{n}d"), torch.ones(1, 1, *[2] * n), torch.ones(1, 1, *[1] * n))
        for kind in ("conv", "conv_transpose")
        for n in (1, 2, 3)
    },
    "tensordot": lambda: (torch.tensordot, M, torch.ones(1), 0),
    "inner": lambda: (torch.inner, M, torch.ones(())),
    "kron": lambda: (torch.kron, M, torch.ones(1, 1)),
    "bilinear": lambda: (F.bilinear, M, torch.ones(3, 1), torch.ones(1, 4, 1)),
    "cosine_similarity": lambda: (F.cosine_similarity, M, M),
    "pairwise_distance": lambda: (F.pairwise_distance, M, M),
    "cdist": lambda: (torch.cdist, M, M),
    "cross": lambda: (torch.cross, SQUARE, SQUARE, 1),
    "std": lambda: (torch.std, M, 0),
    "var": lambda: (torch.var, M, 0),
    "repeat_interleave": lambda: (torch.repeat_interleave, M, 1, 0),
    "tile": lambda: (torch.tile, M, (1,)),
    "take_along_dim": lambda: (torch.take_along_dim, M, torch.zeros(3, 4, dtype=torch.long), 1),
    "lstm_cell": lambda: (torch.lstm_cell, SQUARE, [SQUARE, SQUARE], torch.zeros(12, 3), torch.zeros(12, 3)),
    **{
        name: lambda name=name, gates=gates: (getattr(torch, name), SQUARE, SQUARE, *[torch.zeros(gates * 3, 3)] * 2)
        for name, gates in {"gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}.items()
    },
    "prelu": lambda: (torch.prelu, M, torch.ones(1)),
    "selu": lambda: (F.selu, M),
    "relu6": lambda: (F.relu6, M),
    "log_sigmoid": lambda: (F.logsigmoid, M),
    "pad": lambda: (F.pad, M, (0, 0)),
    "avg_pool1d": lambda: (F.avg_pool1d, M, 1),
    "adaptive_avg_pool1d": lambda: (F.adaptive_avg_pool1d, M, 4),
    "_weight_norm": lambda: (torch._weight_norm, M, torch.ones(3, 1)),
}


def kind_of_call(function: Any, *args: Any) -> Kind:
    graph = torch.fx.Graph()

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(given, value))
        return graph.placeholder("x") if isinstance(value, torch.Tensor) else value

    return kind_of(graph.call_function(function, tuple(map(given, args))))


def memory_of(tree: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


@pytest.mark.parametrize("name", sorted(_NEW))
def test_what_is_known_to_make_new_memory_makes_it(name: str) -> None:
    function, *args = CALLS[name]()
    assert kind_of_call(function, *args) is Kind.NEW
    assert not memory_of(function(*args)) & memory_of(args)


@pytest.mark.parametrize("equation", ["ij,ij->ij", "ij,jk->ik", "ij,i->ij", "ij,->ij", "ij,ij->ji", "ij,kl->ijkl"])
def test_a_product_by_einsum_is_new_and_a_rearrangement_is_not(equation: str) -> None:
    shapes = {"": (), "i": (3,), "ij": (3, 4), "jk": (4, 1), "kl": (1, 1)}
    given = [torch.ones(shapes[letters]) for letters in equation.partition("->")[0].split(",")]
    assert kind_of_call(torch.einsum, equation, *given) is Kind.NEW
    result = torch.einsum(equation, *given)
    assert result.untyped_storage().data_ptr() not in [value.untyped_storage().data_ptr() for value in given]
    assert kind_of_call(torch.einsum, "ij->ji", M) is Kind.READ
    assert torch.einsum("ij->ji", M).untyped_storage().data_ptr() == M.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("error")
def test_a_product_with_a_parameter_is_edited_in_place_and_stays_compiled() -> None:
    """The product is no part of the parameter, so autograd allows the edit."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))
            self.last = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = torch.einsum("ni,io->no", x, self.weight)
            product *= 2.0
            return self.last(product)

    torch.manual_seed(0)
    module, probe, x = Net(), torch.nn.Parameter(torch.ones(4, 4)), torch.randn(3, 4)
    model = NNsight(module, compile={"backend": "aot_eager"})
    expected = module.last(torch.einsum("ni,io->no", x, module.weight) * 2.0)
    torch.testing.assert_close(model(x), expected)
    moved = torch.einsum("ni,io->no", expected, probe) + 1.0
    wanted = torch.autograd.grad(moved.sum(), [module.weight, probe])
    for compile in (False, True, True):
        with model.trace(x, compile=compile) as tracer:
            steered = torch.einsum("ni,io->no", model.last.output, probe)
            steered += 1.0
            model.last.output = steered
            out = model.output.save()
        assert not tracer.report.breaks
        torch.testing.assert_close(out, moved)
        for found, one in zip(torch.autograd.grad(out.sum(), [module.weight, probe]), wanted, strict=True):
            torch.testing.assert_close(found, one)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("part", [torch.nn.LSTMCell(4, 4), torch.nn.GRUCell(4, 4), torch.nn.RNNCell(4, 4), torch.nn.PReLU()])
def test_an_output_of_a_module_that_is_one_operator_is_edited_in_place_and_stays_compiled(part: torch.nn.Module) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.last = part, torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(tree_leaves(self.part(x))[0])

    model, x = NNsight(Net(), compile={"backend": "aot_eager"}), torch.randn(3, 4)
    with model.trace(x) as tracer:
        tree_leaves(model.part.output)[0].mul_(0.5)
        out = model.output.save()
    assert not tracer.report.breaks
    expected = model._module.last(tree_leaves(part(x))[0] * 0.5)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(result.sum(), [*part.parameters()]) for result in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@pytest.mark.parametrize("grad", [True, False])
def test_a_block_sees_the_weight_that_an_embedding_scales(kind: Any, grad: bool) -> None:
    """With ``max_norm`` an embedding edits its weight in place: blocks read it before and after, as an eager trace does."""
    found = []
    for compile in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(kind(5, 4, max_norm=0.5), torch.nn.Linear(4, 4))
        model = NNsight(net, compile={"backend": "aot_eager"})
        with torch.set_grad_enabled(grad), model.trace(torch.tensor([[0, 1], [2, 3]]), compile=compile) as tracer:
            model[0].input  # noqa: B018 - the block waits for it
            before = (net[0].weight * 1.0).save()
            hidden = model[0].output
            after = (net[0].weight * 1.0).save()
            out = (model.output + hidden.sum()).save()
        assert not tracer.report.notes and not tracer.report.breaks and not torch.equal(before, after)
        found.append((before, after, out))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)
