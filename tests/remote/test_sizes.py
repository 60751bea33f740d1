"""Programs are general in sizes: recorded at one size, they run at others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nnsight import NNsight, Program, save
from nnsight.program.format.operators import OPERATORS, is_composite, is_view
from nnsight.remote import InvalidProgramError, NotExpressibleError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.fixture(scope="module")
def net() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Block())


W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
V = W[0]
SIZES = [(1, 3), (2, 5), (3, 1)]  # batch and length: the first is that of the recording


def of_size(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(batch * 10 + length))


def recorded(net: NNsight, of: Callable[[Any], Any], batch: int, length: int) -> Program:
    with net.trace(of_size(batch, length), remote="program") as tracer:
        found = of(net.first.output).save()
    return tracer.program


def eager(net: NNsight, of: Callable[[Any], Any], batch: int, length: int) -> Any:
    with net.trace(of_size(batch, length)):
        found = of(net.first.output).save()
    return found


CALLS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda h: h @ W,
    "matmul of a vector": lambda h: h @ V,
    "matmul of two": lambda h: h @ h.transpose(1, 2),
    "einsum": lambda h: torch.einsum("btd,de->bte", h, W),
    "einsum of three": lambda h: torch.einsum("btd,de,bte->bt", h, W, h),
    "einsum of one": lambda h: torch.einsum("btd->bdt", h),
    "einsum with dots": lambda h: torch.einsum("...d,ed->...e", h, W),
    "tensordot": lambda h: torch.tensordot(h, W, dims=1),
    "inner": lambda h: torch.inner(h, W),
    "outer": lambda h: torch.outer(h[0, -1], V),
    "kron": lambda h: torch.kron(h[:, -1], V[None]),
    "linear": lambda h: F.linear(h, W, V),
    "vecdot": lambda h: torch.linalg.vecdot(h, V),
    "reshape": lambda h: h.reshape(-1, 2, 4),
    "reshape that copies": lambda h: h.transpose(1, 2).reshape(-1, 8),
    "view": lambda h: h.view(-1, 8),
    "reshape_as": lambda h: h.transpose(1, 2).contiguous().reshape_as(h),
    "view_as": lambda h: h[..., :4].contiguous().view_as(h[..., 4:]),
    "flatten": lambda h: h.flatten(1),
    "flatten of two": lambda h: h.flatten(0, 1).sum(0),
    "unflatten": lambda h: h.unflatten(-1, (2, -1)),
    "ravel": lambda h: h.ravel(),
    "contiguous": lambda h: h.transpose(1, 2).contiguous().view(-1, 8),
    "chunk": lambda h: torch.stack(h.chunk(2, dim=-1)),
    "tensor_split": lambda h: h.tensor_split(2, dim=-1)[1],
    "split": lambda h: h.split(4, dim=-1)[1],
    "narrow": lambda h: h.narrow(-1, 2, 3),
    "expand_as": lambda h: V.expand_as(h) + h,
    "expand": lambda h: h[:, :1].expand(-1, 4, -1),
    "broadcast_to": lambda h: h[:, :, None].broadcast_to(-1, -1, 2, -1),
    "movedim": lambda h: h.movedim(0, 1).movedim((0, 1), (1, 0)),
    "swapaxes": lambda h: h.swapaxes(0, 1).mT,
    "tile": lambda h: h.tile(1, 2, 1),
    "repeat": lambda h: h.repeat(1, 2, 1),
    "repeat_interleave": lambda h: h.repeat_interleave(3, dim=1),
    "squeeze": lambda h: h.sum(-1, keepdim=True).squeeze(-1),
    "softmax": lambda h: h.softmax(-1) + F.softmax(h, dim=1),
    "log_softmax": lambda h: F.log_softmax(h, dim=-1),
    "layer_norm": lambda h: F.layer_norm(h, (8,), V, V),
    "rms_norm": lambda h: F.rms_norm(h, (8,), V),
    "group_norm": lambda h: F.group_norm(h.transpose(1, 2), 2),
    "norm": lambda h: h.norm(dim=-1),
    "linalg.norm": lambda h: torch.linalg.norm(h) + torch.linalg.norm(h, dim=-1),
    "vector_norm": lambda h: torch.linalg.vector_norm(h, ord=1, dim=-1),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "cosine_similarity": lambda h: F.cosine_similarity(h, V, dim=-1),
    "pairwise_distance": lambda h: F.pairwise_distance(h, V),
    "cdist": lambda h: torch.cdist(h, W.expand(1, 8, 8)),
    "cross_entropy": lambda h: F.cross_entropy(h[:, -1], h[:, 0].argmax(-1)),
    "cross_entropy of positions": lambda h: F.cross_entropy(h.transpose(1, 2), h.argmax(-1)),
    "cross_entropy of flat positions": lambda h: F.cross_entropy(h.view(-1, 8), h.argmax(-1).view(-1), reduction="none"),
    "kl_div": lambda h: F.kl_div(h.log_softmax(-1), h.softmax(-1), reduction="sum"),
    "mse_loss": lambda h: F.mse_loss(h, V.expand_as(h)),
    "diff": lambda h: h.diff(dim=-1),
    "quantile": lambda h: torch.quantile(h, 0.9, dim=-1) + h.quantile(torch.tensor([0.1, 0.5]), dim=-1).sum(0),
    "nanquantile": lambda h: torch.nanquantile(h, 0.9, dim=-1) + h.nanquantile(torch.tensor([0.1, 0.5]), dim=-1).sum(0),
    "nll_loss": lambda h: F.nll_loss(h.transpose(1, 2).log_softmax(1), h.argmax(-1)),
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argmax(-1, keepdim=True), dim=-1),
    "diag": lambda h: torch.diag(h[0].T @ h[0]),
    "diagonal": lambda h: torch.linalg.diagonal(h.mT @ h),
    "conv1d": lambda h: F.conv1d(h.transpose(1, 2), W[:, :, None].repeat(1, 1, 3), padding=2),
    "conv2d": lambda h: F.conv2d(h[:, None], W[None, None, :3, :3], padding=1),
    "attention": lambda h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None]),
    "type_as": lambda h: h.double().type_as(h) + h.to(torch.bfloat16).float(),
    "stack": lambda h: torch.hstack([h, h]) + torch.cat([h, h], 1) + torch.vstack([h, h]).sum(0).sum(0),
    "std": lambda h: h.std(-1) + h.var(dim=(0, 2)).sum(),
    "argsort": lambda h: h.argsort(dim=1),
    "where": lambda h: torch.where(h > 0, h, 0.0),
    "in place": lambda h: h.clone().reshape(-1, 8).add_(1.0),
    "powers": lambda h: torch.square(h) / 2 + h**2 - 1 / (h + 3),
}


@pytest.mark.parametrize("of", CALLS.values(), ids=CALLS)
def test_a_program_of_composite_operators_runs_at_other_sizes(net: NNsight, of: Any) -> None:
    program = recorded(net, of, *SIZES[0])
    for size in SIZES:
        torch.testing.assert_close(program.run(net, of_size(*size))["found"], eager(net, of, *size), equal_nan=True)


@pytest.mark.parametrize("name", ["matmul", "einsum", "reshape that copies", "chunk", "cross_entropy of positions", "attention"])
def test_composite_operators_run_on_a_compiled_model(net: NNsight, name: str) -> None:
    program = recorded(net, CALLS[name], *SIZES[0])
    compiled = NNsight(net._module, compile={"backend": "eager"})
    for size in SIZES:
        torch.testing.assert_close(program.run(compiled, of_size(*size))["found"], eager(net, CALLS[name], *size))


@pytest.mark.parametrize(
    "of",
    [
        lambda h: h[:, h.shape[1] // 2],
        lambda h: F.kl_div(h.log_softmax(-1), h.softmax(-1), reduction="batchmean"),
        lambda h: torch.stack(h.chunk(2, dim=1)[:1]).sum(2),
        lambda h: h.mean(1) * len(h.split(2, dim=1)),
        lambda h: h.squeeze(0)[..., -1, :],
        lambda h: h.sum(-1, keepdim=True).squeeze().sum(-1),
    ],
)
def test_a_size_that_python_reads_belongs_to_the_program(net: NNsight, of: Any) -> None:
    program = recorded(net, of, *SIZES[0])
    torch.testing.assert_close(program.run(net, of_size(*SIZES[0]))["found"], eager(net, of, *SIZES[0]))
    with pytest.raises(InvalidProgramError, match=r"size, line \d+"):
        program.run(net, of_size(2, 5))


def edited_in_place(h: Any, change: Callable[[Any], Any]) -> Any:
    """Edit what is a view for some sizes and a copy for others."""
    changed = change(h)
    changed += 1.0
    return changed.sum(), h.sum()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.reshape(-1, 8),
        lambda h: h.flatten(1),
        lambda h: h.chunk(2, dim=-1)[1],
        lambda h: h.unflatten(-1, (2, 4)).movedim(1, 2).narrow(-1, 1, 2),
        lambda h: h.contiguous(),
        lambda h: h.expand_as(h),
        lambda h: h.clone().transpose(1, 2).reshape(-1, 8),
        lambda h: torch.einsum("btd->tbd", h),
        lambda h: torch.einsum("btd,d->tbd", h, V),
        lambda h: h @ W,
    ],
)
def test_an_edit_in_place_reaches_what_it_reaches_eagerly(net: NNsight, change: Any) -> None:
    def run(size: tuple[int, int], **where: Any) -> Any:
        with torch.no_grad(), net.trace(of_size(*size), **where) as tracer:
            made, hidden = edited_in_place(net.first.output, change)
            out = net.output.save()
            found = torch.stack([made, hidden]).save()
        return tracer.program if where else {"out": out, "found": found}

    program = run(SIZES[0], remote="program")
    for size in SIZES:
        with torch.no_grad():  # autograd forbids some of these edits
            found = program.run(net, of_size(*size))
        torch.testing.assert_close(found, run(size))


def test_what_is_a_view_for_other_sizes_only_is_edited_for_the_recorded_sizes_only(net: NNsight) -> None:
    def run(size: tuple[int, int], **where: Any) -> Any:
        with net.trace(of_size(*size), **where) as tracer:
            made, hidden = edited_in_place(net.first.output, lambda h: h.transpose(1, 2).reshape(-1, 8))
            found = torch.stack([made, hidden]).save()
        return tracer.program if where else found

    program = run((2, 4), remote="program")
    torch.testing.assert_close(program.run(net, of_size(2, 4))["found"], run((2, 4)))
    with pytest.raises(InvalidProgramError, match=r"size, line \d+"):
        program.run(net, of_size(2, 8))


def test_gradients_flow_through_composite_operators(net: NNsight) -> None:
    def run(size: tuple[int, int], **where: Any) -> Any:
        with net.trace(of_size(*size), **where) as tracer:
            hidden = net.first.output
            scores = torch.einsum("btd,de->bte", F.layer_norm(hidden, (8,)), W) @ V
            loss = F.cross_entropy(net.output.flatten(0, 1), net.output.argmax(-1).flatten()) + scores.softmax(-1).std()
            with loss.backward():
                gradient = hidden.grad.save()
        return tracer.program if where else gradient

    program = run(SIZES[0], remote="program")
    for size in [(1, 3), (2, 5), (3, 2)]:
        torch.testing.assert_close(program.run(net, of_size(*size))["gradient"], run(size))


class Parts(TorchDispatchMode):
    """Notes the operators that composite operators consist of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_composite(operator):
            with self:
                return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        self.names.add(str(operator))
        return operator(*args, **(kwargs or {}))


class Composites(TorchDispatchMode):
    """Checks the composite operators of the table that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, set[str]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(operator) not in OPERATORS or not is_composite(operator):
            return operator(*args, **(kwargs or {}))
        with Parts() as parts:
            made = operator(*args, **(kwargs or {}))
        self.parts.setdefault(str(operator), set()).update(parts.names)
        given = [leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        lent = isinstance(made, torch.Tensor) and made.untyped_storage()._cdata in given
        assert is_view(str(operator)) or not lent or operator is torch.ops.aten.einsum.default, operator
        return made


def test_composite_operators_consist_of_allowed_ones_and_make_new_memory(net: NNsight) -> None:
    with torch.no_grad(), Composites() as composites:
        for of in CALLS.values():
            for size in [*SIZES, (1, 1)]:
                with torch._C._AutoDispatchBelowAutograd():
                    of(of_size(*size))
    named = {name for name, operator in OPERATORS.items() if is_composite(operator)}
    assert named <= composites.parts.keys()
    more = {name for names in composites.parts.values() for name in names} - OPERATORS.keys()
    assert more == {  # kernels of allowed operators, and views in place of what was just made
        "aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.nll_loss2d_forward.default", "aten.diagonal_copy.default",
        "aten.squeeze_.dim", "aten.transpose_.default", "aten.unsqueeze_.default",
    }  # fmt: skip


# -- sizes that depend on values ---------------------------------------------------------------------------------------

SELECTED: dict[str, Callable[[Any], Any]] = {
    "mask": lambda h: h[h > 0.1],
    "mean of a mask": lambda h: h[h > 0.1].mean(),
    "rows": lambda h: h[h[..., 0] > 0] @ W,
    "mask of a dimension": lambda h: h[..., torch.tensor([True, False] * 4)],
    "nonzero": lambda h: h.gt(0.1).nonzero(),
    "nonzero as a tuple": lambda h: h.gt(0.1).nonzero(as_tuple=True)[2],
    "nonzero of nonzero": lambda h: h[h > 0.1].gt(0.3).nonzero(),
    "where": lambda h: h[:, torch.where(h[0, :, 0] > 0)[0]],
    "squeezed": lambda h: h[:, (h[0, :, 0] > 0).nonzero().squeeze(-1)].sum(1),
    "masked_select": lambda h: torch.masked_select(h, h[0, 0] > 0),
    "argwhere": lambda h: torch.argwhere(h > 0.1),
    "unique": lambda h: torch.unique(h.argmax(-1)),
    "unique with counts": lambda h: torch.unique(h.argmax(-1), return_inverse=True, return_counts=True),
    "unique rows": lambda h: torch.unique(h.round(), dim=1, return_inverse=True),
    "unique_consecutive": lambda h: torch.unique_consecutive(h.argmax(-1), return_counts=True),
    "bincount": lambda h: torch.bincount(h.argmax(-1).flatten()),
    "bincount with weights": lambda h: torch.bincount(h.argmax(-1).flatten(), h[..., 0].flatten(), minlength=20),
    "repeat_interleave": lambda h: h.repeat_interleave(h[0, :, 0].gt(0).long(), dim=1),
    "cat": lambda h: torch.cat([h[h > 0.1], h[h < 0]]).sort().values,
    "two of one mask": lambda h: (h[h > 0.1] * h.abs()[h > 0.1]).sum(),
    "comparison": lambda h: (h[h > 0.1] > 0.5).sum(),
    "written back": lambda h: h.clone().index_put_((h > 0.1,), h[h > 0.1] * 2),
    "in place": lambda h: h[h > 0.1].add_(1).std(),
    "width": lambda h: h[h[..., 0] > 0].sum(0) / h[h[..., 0] > 0].shape[-1],
    "composites": lambda h: F.layer_norm(h[h[..., 0] > 0], (8,)).reshape(-1, 2, 4).softmax(-1),
    "similarity": lambda h: F.cosine_similarity(h[h[..., 0] > 0], V, dim=-1),
    "einsum": lambda h: torch.einsum("nd,de->ne", h[h[..., 0] > 0], W),
    "topk": lambda h: h[h > -100].topk(2).values,
    "ones": lambda h: torch.ones_like(h[h > 0.1]).sum() + h[h > 0.1].quantile(0.5),
}


@pytest.mark.parametrize("of", SELECTED.values(), ids=SELECTED)
def test_a_selection_by_values_is_that_of_an_eager_block(net: NNsight, of: Any) -> None:
    program = recorded(net, of, 2, 3)
    compiled = NNsight(net._module, compile={"backend": "eager"})
    with net.trace(of_size(2, 3), remote="local"):
        found = of(net.first.output).save()
    torch.testing.assert_close(found, eager(net, of, 2, 3))
    for size in [(2, 3), (1, 6)]:
        expected = eager(net, of, *size)
        torch.testing.assert_close(program.run(net, of_size(*size))["found"], expected)
        torch.testing.assert_close(program.run(compiled, of_size(*size))["found"], expected)


def test_a_module_is_applied_to_selected_rows(net: NNsight) -> None:
    def of(h: Any) -> Any:
        return net.second(h[h[..., 0] > 0])

    torch.testing.assert_close(recorded(net, of, 2, 3).run(net, of_size(1, 6))["found"], eager(net, of, 1, 6))


@pytest.mark.parametrize(
    "of",
    [
        lambda h: len(h[h > 0.1]),
        lambda h: h.sum() / h[h > 0.1].shape[0],
        lambda h: h if h[h > 0.1].numel() else -h,
        lambda h: [row for row in h[h > 0.1]],  # noqa: C416 - the loop is the question
        lambda h: h[h > 0.1].shape == (3,),
        lambda h: torch.zeros(h[h > 0.1].shape),
        lambda h: h.flatten()[: h[h > 0.1].size()[0]],
        lambda h: torch.arange(h[h > 0.1].size(0)),
        lambda h: h[h > 0.1].split(2),
        lambda h: F.pad(h[h > 0.1], (0, 1)),
    ],
)
def test_a_size_that_depends_on_values_is_asked_for(net: NNsight, of: Any) -> None:
    refused = pytest.raises(NotExpressibleError, match=r"test_sizes.py:\d+: .* size that depends on values")
    with refused, net.trace(of_size(2, 3), remote="program"):
        of(net.first.output)

    def run(**where: Any) -> Any:
        torch.manual_seed(0)
        with torch.no_grad(), net.trace(of_size(2, 3), **where):
            found = save(of(net.first.output))
        return found

    torch.testing.assert_close(run(remote="local"), run())


def test_a_function_of_torch_that_computes_with_a_size_that_depends_on_values(net: NNsight) -> None:
    refused = pytest.raises(NotExpressibleError, match="`kl_div` computes with a size that depends on values")
    with refused, net.trace(of_size(2, 3), remote="local"):
        hidden = net.first.output
        F.kl_div(hidden[hidden[..., 0] > 0], hidden[hidden[..., 0] > 0], reduction="batchmean")


def test_what_depends_on_values_in_size_does_not_go_into_the_model(net: NNsight) -> None:
    refused = pytest.raises(NotExpressibleError, match=r"test_sizes.py:\d+: .* size that depends on values|whose size depends on values")
    with refused, net.trace(of_size(2, 3), remote="local"):
        hidden = net.first.output
        net.first.output = hidden[hidden[..., 0] > 0]
    with refused, net.trace(of_size(2, 3), remote="local"):
        hidden = net.first.output
        net.second.skip(hidden[hidden[..., 0] > 0])


def test_a_size_that_would_have_to_be_known_is_refused_before_the_model_runs(net: NNsight) -> None:
    with pytest.raises(InvalidProgramError, match="checked as the largest possible one"), net.trace(of_size(2, 3), remote="local"):
        hidden = net.first.output
        found = (hidden[hidden > 0.1] + torch.ones(2)).save()


@pytest.mark.parametrize(
    "loss",
    [
        lambda h: h[h > 0.1].mean(),
        lambda h: torch.masked_select(h, h > 0.1).pow(2).sum(),
        lambda h: (h[h[..., 0] > 0] @ W).softmax(-1).std(),
        lambda h: h.clone().index_put((h > 0,), h[h > 0] * 2).pow(2).sum(),
        lambda h: h[0, 0].repeat_interleave(h[0, 0].gt(0).long()).pow(2).sum(),
    ],
)
def test_gradients_flow_through_selections(net: NNsight, loss: Any) -> None:
    def run(size: tuple[int, int], **where: Any) -> Any:
        with net.trace(of_size(*size), **where) as tracer:
            hidden = net.first.output
            with loss(hidden).backward():
                gradient = hidden.grad.save()
        return tracer.program if where else gradient

    program = run((2, 3), remote="program")
    for size in [(2, 3), (1, 6)]:
        torch.testing.assert_close(program.run(net, of_size(*size))["gradient"], run(size))
