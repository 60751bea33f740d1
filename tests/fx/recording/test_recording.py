"""Recording: every operation a block makes becomes part of the graph and means what it means eagerly.

Each operation is run three times on one small model: by a plain torch hook, by the eager driver and compiled. The
function under test is the same plain function in all three; it gets the hidden tensor and may return a replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nnsight
from nnsight import NNsight, fx

from ...conftest import Hooks


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.second = torch.nn.Linear(6, 6)
        self.third = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


@pytest.fixture(scope="module")
def small() -> NNsight:
    """One captured graph for all operations; blocks do not touch dynamo's cache."""
    torch.manual_seed(1)
    return NNsight(Small(), compile={"backend": "eager"})


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


VECTOR = torch.linspace(-1.0, 1.0, 6)
MATRIX = torch.linspace(-1.0, 1.0, 36).reshape(6, 6)
MASK = torch.tensor([True, False, True, True, False])
INDEX = torch.tensor([3, 0])


# -- operations -------------------------------------------------------------------------------------------------------


def _set(key: Any, value: Any) -> Callable[[torch.Tensor], None]:
    def function(h: torch.Tensor) -> None:
        h[key] = value

    return function


def in_place_arithmetic(h: Any) -> None:
    h += 1.0
    h[:, 1:3] -= VECTOR[1:3]
    h /= 2.0
    h **= 2
    h %= 0.5


def edits_of_views(h: Any) -> None:
    h.view(-1)[::3] = 0.5
    h.T[0] += 2.0
    h[h > 0] = -1.0
    h[MASK] = 0.25


def chained_views(h: Any) -> None:
    part = h[1:]
    inner = part[:, 2:4]
    inner.fill_(1.5)
    part[0] += inner.sum()


def view_seen_after_base_edit(h: Any) -> Any:
    row = h[0]
    h.mul_(2.0)
    return h + row


def topk(h: Any) -> Any:
    values, indices = torch.topk(h, 2, dim=-1)
    return torch.zeros_like(h).scatter(-1, indices, values)


def unbind(h: Any) -> Any:
    rows = list(h.unbind(0))
    rows[0] = rows[-1]
    return torch.stack(rows)


def in_place_functions(h: Any) -> None:
    h.copy_(h.flip(0))
    h.index_put_((INDEX,), torch.ones(2, 6))
    h.index_add_(0, INDEX, torch.ones(2, 6), alpha=0.5)


def out_argument(h: Any) -> Any:
    target = torch.empty_like(h)
    torch.mul(h, 2.0, out=target)
    return target


def no_grad_inside(h: Any) -> Any:
    with torch.no_grad():
        offset = h * 2.0
    return h + offset


def block_python(h: Any) -> Any:
    total = h * 0
    for row in range(h.shape[0]):
        for column in (0, 2):
            total = total + h[row, column]
    return total


def iteration(h: Any) -> Any:
    total = 0
    for row in h:
        total = total + row.sum()
    first, *_ = h
    return h * total + first


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "split": lambda h: torch.cat(h.split(3, dim=-1)[::-1], dim=-1),
    "sort": lambda h: torch.sort(h, dim=-1).values - torch.sort(h, dim=-1)[1] + h.max(dim=-1, keepdim=True).indices,
    "svd": lambda h: torch.linalg.svd(h, full_matrices=False)[0] @ torch.linalg.svd(h, full_matrices=False).Vh,
    "lazy_index": lambda h: h[h[:, 0].argsort()],
    "masked_fill": lambda h: h.masked_fill(h.abs() < 0.2, 9.0),
    "chunk_and_stack": lambda h: torch.stack(h.chunk(3, dim=-1)).sum(0).repeat(1, 3),
    "einsum": lambda h: torch.einsum("ij,jk->ik", h, MATRIX),
    "where": lambda h: torch.where(h > 0, h, VECTOR),
    "factories": lambda h: h + torch.zeros_like(h) + torch.ones(6) + torch.arange(6) + torch.full_like(h, 0.5) + h.new_ones(6),
    "lazy_sized_factory": lambda h: h + torch.eye(h.shape[0], h.size(1)) * h.shape[-1] + len(h) + h.numel() + h.dim() + h.ndim,
    "functional": lambda h: F.softmax(h, dim=-1) + F.gelu(h) + F.layer_norm(h, (6,)) + F.linear(h, MATRIX, VECTOR),
    "reductions": lambda h: h - h.mean(-1, keepdim=True) + h.std() + h.sum() + h.amax() + h.norm(dim=-1, keepdim=True),
    "matmul_chain": lambda h: h @ MATRIX @ MATRIX.T,
    "reversed_operators": lambda h: 1.0 - h + (2 / (h + 10.0)) + (2.0**h) + (-h) + (3 * h) + abs(h),
    "integer_scalars": lambda h: h * 2 + 1 - 3,
    "boolean_algebra": lambda h: ((h > 0) & ~(h > 0.5) | (h < -0.5)).float() * h,
    "compare_chain": lambda h: (h >= VECTOR).to(h.dtype) + (h == h).float() + (h != 0).int(),
    "numpy_scalar": lambda h: h * np.float32(1.5) + np.float64(0.25),
    "range": lambda h: h[range(len(h))] * h[list(range(len(h)))],
    "numpy_external": lambda h: h + torch.from_numpy(np.arange(6, dtype=np.float32)),
    "dtype_round_trip": lambda h: h.double().to(torch.bfloat16).float() + h.half().to(h),
    "zero_dim_scalar": lambda h: h * (h.bfloat16().mean() * 0.1).float(),
    "index_tensor": lambda h: h[INDEX].repeat(3, 1)[:5] + h[INDEX, INDEX].sum(),
    "gather": lambda h: h.gather(1, h.argsort(dim=1)),
    "list_argument": lambda h: torch.cat([h[:2], torch.zeros(1, 6), h[3:]], dim=0),
    "ellipsis_and_none": lambda h: h[..., None, :][:, 0] * h[None][0, ..., :],
    "cumulative": lambda h: torch.cumsum(h, dim=0) + h.cumprod(-1),
    "reshape_permute": lambda h: h.reshape(5, 2, 3).permute(0, 2, 1).contiguous().view(5, 6),
    "expand": lambda h: h.mean(0, keepdim=True).expand(5, -1).clone(),
    "property_T": lambda h: (h.T @ h).mT[:5],
    "real_getter": lambda h: h.real * 2 + h.data * 0.5,
    "detach": lambda h: h.detach() * 2.0,
    "keyword_arguments": lambda h: torch.clamp(h, min=-0.3, max=0.3) + torch.add(input=h, other=h, alpha=2),
    "complex_numbers": lambda h: torch.fft.irfft(torch.fft.rfft(h, dim=-1) * 1.5j, n=6, dim=-1),
    "module_call": torch.nn.LayerNorm(6, elementwise_affine=False),
    **{
        function.__name__: function
        for function in (
            in_place_arithmetic, edits_of_views, chained_views, view_seen_after_base_edit, topk, unbind, in_place_functions,
            no_grad_inside, block_python, iteration,
        )
    },
}  # fmt: skip

SETITEMS: list[tuple[Any, Any]] = [
    (0, 1.0), (-1, 2), (slice(None), 0.5), (slice(1, 4, 2), 3.0), ((slice(None), -1), 0.0), ((slice(None), slice(None, 2)), 7.5),
    ((Ellipsis, 0), True), ([0, 2], 1.5), ((0, 1), 5.0), (None, 1.0), (MASK, 0.0), (INDEX, 4.0), ((INDEX, INDEX), 4.0),
    ((slice(None), INDEX), torch.ones(5, 2)), (slice(0, 2), VECTOR), (slice(0, 2), VECTOR.double()), (0, np.float64(2.5)),
]  # fmt: skip


def run(small: NNsight, x: torch.Tensor, operation: Callable[[Any], Any], compile: bool) -> tuple[Any, ...]:
    with small.trace(x, compile=compile) as tracer:
        hidden = small.second.output
        changed = operation(hidden)
        if changed is not None:
            small.second.output = changed
        after = small.second.output.save()
        out = small.output.save()
    return after, out, tracer


def by_hooks(small: NNsight, x: torch.Tensor, operation: Callable[[Any], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    kept: list[torch.Tensor] = []

    def edit(hidden: torch.Tensor) -> torch.Tensor:
        changed = operation(hidden)
        kept.append(hidden if changed is None else changed)
        return kept[0]

    out = Hooks(small._module).output("second", edit)(x)
    return kept[0], out


def check(small: NNsight, x: torch.Tensor, operation: Callable[[Any], Any], breaks: int = 0) -> None:
    expected_after, expected = by_hooks(small, x, operation)
    assert not torch.allclose(expected, small._module(x)), "the operation changes nothing: the test proves nothing"
    for compile in (False, True):
        after, out, tracer = run(small, x, operation, compile)
        assert torch.equal(after, expected_after), f"compile={compile}"
        assert torch.equal(out, expected), f"compile={compile}"
        assert type(out) is torch.Tensor
        assert out.requires_grad == expected.requires_grad
        assert after.requires_grad == expected_after.requires_grad
    assert tracer.report.mode == "compiled"
    assert len(tracer.report.breaks) == breaks, tracer.report
    assert tracer.report.graphs == 1
    run(small, x, operation, True)
    fx.counters.reset()
    *_, again = run(small, x, operation, True)
    assert fx.counters.recordings == fx.counters.compiles == 0, "the same block was recorded or compiled again"
    if not breaks:
        assert tracer.report.code
        assert again.report.spliced == ["model.second.output", "model.output"]


@pytest.mark.parametrize("name", [*OPERATIONS, "out_argument"])
def test_operation(small: NNsight, x: torch.Tensor, name: str) -> None:
    if name in OPERATIONS:
        check(small, x, OPERATIONS[name])
    with torch.no_grad():
        check(small, x, OPERATIONS.get(name, out_argument))


@pytest.mark.parametrize(("key", "value"), SETITEMS, ids=str)
def test_setitem(small: NNsight, x: torch.Tensor, key: Any, value: Any) -> None:
    check(small, x, _set(key, value))


@pytest.mark.slow
def test_every_operation_lowered_by_inductor_at_once(small: NNsight, x: torch.Tensor) -> None:
    """Functions that do not draw on data-dependent shapes, in one block and one graph."""
    model = NNsight(small._module, compile={"backend": "inductor"})
    chosen = "chained_views topk split einsum where functional in_place_functions".split()

    def everything(h: Any) -> Any:
        for name in chosen:
            changed = OPERATIONS[name](h)
            h = h if changed is None else changed
        return h

    with torch.no_grad():
        expected_after, expected = by_hooks(small, x, everything)
        after, out, tracer = run(model, x, everything, True)
    torch.testing.assert_close(after, expected_after)
    torch.testing.assert_close(out, expected)
    assert not tracer.report.breaks


# -- tensors from outside ------------------------------------------------------------------------------------------


def test_an_external_edited_before_its_use(small: NNsight, x: torch.Tensor) -> None:
    for compile in (False, True):
        external = torch.zeros(6)
        with small.trace(x, compile=compile):
            hidden = small.second.output
            external += 1.0
            hidden += external
            after = hidden.save()
        assert torch.equal(external, torch.ones(6))
        assert torch.equal(after, by_hooks(small, x, lambda h: h + torch.ones(6))[0]), compile


def test_an_external_edited_after_its_use(small: NNsight, x: torch.Tensor) -> None:
    expected = by_hooks(small, x, lambda h: h + VECTOR)[0]
    for compile in (False, True):
        external = VECTOR.clone()
        with small.trace(x, compile=compile):
            hidden = small.second.output
            moved = hidden + external
            external.zero_()
            again = (hidden + external).save()
            small.second.output = moved
            after = small.second.output.save()
        assert torch.equal(external, torch.zeros(6)), compile
        assert torch.equal(after, expected), compile
        assert torch.equal(again, by_hooks(small, x, lambda h: h.clone())[0]), compile


def test_editing_the_models_input_in_the_block(small: NNsight, x: torch.Tensor) -> None:
    expected = small._module(x * 2)
    for compile in (False, True):
        mine = x.clone()
        with small.trace(mine, compile=compile):
            small.input[:] *= 2
            out = small.output.save()
        assert torch.equal(out, expected), compile
        assert torch.equal(mine, x * 2), f"the edit of the argument is visible outside, compile={compile}"


def test_the_models_parameters_in_the_block(small: NNsight, x: torch.Tensor) -> None:
    check(small, x, lambda h: h @ small._module.second.weight + small._module.third.weight[0])
    weight = small.third.weight
    with torch.no_grad():
        for compile in (False, True):
            with small.trace(x, compile=compile):
                logits = (small.second.output @ weight.T).save()
            assert torch.equal(logits, by_hooks(small, x, lambda h: h.clone())[0] @ weight.T)


def test_modules_called_on_hidden_states(small: NNsight, x: torch.Tensor) -> None:
    """A logit lens: the model's own last layer and a module from outside, applied to a hidden state."""
    probe = torch.nn.Sequential(torch.nn.Linear(6, 2), torch.nn.Softmax(-1))
    state = torch.tanh(by_hooks(small, x, lambda h: h.clone())[0])
    for compile in (False, True):
        with small.trace(x, compile=compile) as tracer:
            hidden = torch.tanh(small.second.output)
            lens = small.third(hidden).save()
            probed = probe(hidden).save()
            out = small.output.save()
        assert torch.equal(lens, small._module.third(state)), compile
        assert torch.equal(lens, out)
        assert torch.equal(probed, probe(state)), compile
    assert not tracer.report.breaks


# -- results that are not tensors ----------------------------------------------------------------------------------


def test_metadata_is_real(small: NNsight, x: torch.Tensor) -> None:
    eager_seen: list[Any] = []
    for compile in (False, True):
        with small.trace(x, compile=compile) as tracer:
            hidden = small.second.output
            seen = [
                hidden.shape, hidden.size(), hidden.size(0), hidden.dtype, hidden.device, hidden.ndim, len(hidden),
                hidden.numel(), hidden.is_contiguous(), hidden.stride(), hidden.is_floating_point(), hidden.dim(),
                hidden.element_size(), hidden.requires_grad, hidden.T.shape, hidden.layout, hidden.is_cuda,
                isinstance(hidden, torch.Tensor), torch.is_tensor(hidden), hidden.get_device(), hidden.is_leaf,
                torch.is_floating_point(hidden), hidden.nelement(), hidden.storage_offset(),
            ].save()  # fmt: skip
        assert seen[0] == torch.Size([5, 6])
        if compile:
            assert seen == eager_seen
            assert not tracer.report.breaks
        eager_seen = seen


def test_lazies_become_tensors_wherever_they_are(small: NNsight, x: torch.Tensor) -> None:
    class Holder:
        pass

    holder = Holder()
    outer: list[Any] = []
    with small.trace(x, compile=True):
        hidden = small.second.output
        outer.append(hidden)
        holder.value = {"deep": [hidden * 2]}  # type: ignore[attr-defined]
        nested = {"a": (hidden + 1, [hidden - 1])}.save()
    expected = by_hooks(small, x, lambda h: h.clone())[0]
    for value, wanted in (
        (outer[0], expected),
        (holder.value["deep"][0], expected * 2),  # type: ignore[attr-defined]
        (nested["a"][0], expected + 1),
        (nested["a"][1][0], expected - 1),
    ):
        assert type(value) is torch.Tensor
        assert torch.equal(value, wanted)


def test_keys_and_identity_survive(small: NNsight, x: torch.Tensor) -> None:
    """A tensor used as a key of a dict, or compared with ``is``, stays the same object when it gets its value."""
    with small.trace(x, compile=True):
        hidden = small.second.output.save()
        table = {hidden: "mine"}.save()
        same = (small.second.output is hidden).save()
        seen = [hidden].save()
    assert table[hidden] == "mine"
    assert same
    assert seen[0] is hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_float_scalars_round_as_eagerly(dtype: torch.dtype) -> None:
    """A Python float becomes an input of the graph without a change in any bit."""
    model = NNsight(torch.nn.Sequential(torch.nn.Identity()).to(dtype), compile={"backend": "eager"})
    values = torch.randn(64, dtype=torch.float64).to(dtype)

    def run(compile: bool, scalar: float) -> list[torch.Tensor]:
        with model.trace(values, compile=compile):
            h = model[0].output
            results = [h * scalar, h + scalar, h - scalar, scalar - h, h / scalar, scalar / h, scalar * h].save()
            mean = h.mean()
            results += [mean * scalar, scalar + mean, h + mean * scalar]
        return results

    for scalar in (0.1, 1e-3, 3.0, 1e10, float("inf")):
        for eager, compiled in zip(run(False, scalar), run(True, scalar), strict=True):
            assert eager.dtype == compiled.dtype
            torch.testing.assert_close(compiled, eager, rtol=0.0, atol=0.0, equal_nan=True)


def test_what_one_block_does_to_a_value_is_unknown_to_the_next(x: torch.Tensor) -> None:
    """Metadata that is kept for a captured value is not the one an earlier block edited in place."""
    torch.manual_seed(0)
    model = NNsight(Small().requires_grad_(False), compile={"backend": "eager"})
    vector = torch.ones(6, requires_grad=True)

    def look() -> bool:
        with model.trace(x):
            found = model.second.output.requires_grad.save()
        return found

    assert look() is False
    with model.trace(x):
        model.second.output[:] += vector
        inside = model.second.output.requires_grad.save()
    assert inside is True
    assert look() is False


class Counting(torch.nn.Module):
    """Edits its buffers in place, as caches and statistics are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.count += 1
        self.rows[:1].add_(x.sum())
        return self.second(self.norm(x)) * self.count


def _reads_buffers(model: Any, net: Counting, x: torch.Tensor, compile: bool) -> tuple[Any, Any]:
    with model.trace(x, compile=compile) as tracer:
        model.first.output.relu_()
        before = ((net.count + 0), net.rows.sum(), net.norm.running_mean.clone()).save()
        hidden = model.second.input
        between = ((net.count + 0), net.rows[0] * hidden[0], net.norm.running_mean.clone(), net.norm.running_var * 2).save()
        out = (model.output + net.count).save()
    return (before, between, out), tracer


def _needs_buffers(model: Any, net: Counting, x: torch.Tensor, compile: bool) -> tuple[Any, Any]:
    found: list[float] = []
    with model.trace(x, compile=compile) as tracer:
        model.first.output.relu_()
        found.append(net.count.item())
        model.second.input[:] *= 2.0
        found += [net.count.item(), *net.rows[:, 0].tolist()]
        if net.count > 1:
            model.second.output[:] += 1.0
        out = model.output.save()
    return (found, out), tracer


@pytest.mark.parametrize("block", [_reads_buffers, _needs_buffers])
def test_buffers_that_the_model_edits(block: Any) -> None:
    """Where a block stands they are as the model has edited them by then, though no location hands them over."""
    expected, found = [], []
    for results, compile in ((expected, False), (found, True)):
        torch.manual_seed(0)
        net = Counting()
        model = NNsight(net, compile={"backend": "aot_eager"})
        for scale in (1.0, 2.0, 3.0):
            values, tracer = block(model, net, scale * torch.linspace(-1.0, 1.0, 8).reshape(2, 4), compile)
            results.append((values, {name: value.clone() for name, value in net.named_buffers()}))
            assert bool(tracer.report.breaks) == (compile and block is _needs_buffers)
    torch.testing.assert_close(found, expected)
    assert expected[0][1]["count"] == 1.0
    assert not torch.equal(expected[0][1]["rows"], torch.zeros(2, 4)), "the effect is there"


class Masked(Small):
    """Makes a mask of a size. Dynamo writes ``&`` as ``operator.and_``, which is no edit in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        mask = torch.ones(x.shape[0], 1).bool().view(x.shape[0], 1) & (hidden > 0)
        mask |= hidden < -1
        return self.second(hidden) * mask


@pytest.mark.parametrize("in_place", [False, True])
def test_masks_that_the_model_makes_of_a_size(in_place: bool) -> None:
    net = Masked()
    model = NNsight(net, compile={"backend": "aot_eager"})
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        with model.trace(x):
            if in_place:
                model.second.output *= 2
            else:
                model.second.output = model.second.output * 2
            out = model.output.save()
        torch.testing.assert_close(out, 2 * net(x))


def test_a_sparse_replacement_is_an_error_at_its_line() -> None:
    """No graph can contain it; in an eager trace, it is for the model to accept it or not."""
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), torch.ones(2, 3)
    model, zeros = NNsight(net, compile={"backend": "eager"}), torch.zeros(2, 3).to_sparse()
    message = "The replacement of `model.0.output` has the layout torch.sparse_coo, which the captured graph cannot contain"
    with pytest.raises(TypeError, match=message), model.trace(x):
        model[0].output = zeros
    with pytest.raises(TypeError, match=message), model.trace(x):
        model[0].output = (model[0].output * 2).to_sparse()
    with pytest.raises(TypeError, match=message), model.trace(x):
        model[0].skip(zeros)
    with model.trace(x):
        model[0].output = zeros.to_dense()
        out = model.output.save()
    assert torch.equal(out, torch.zeros(2, 3))


# -- arguments that are one tensor --------------------------------------------------------------------------------------


class Comparing(torch.nn.Module):
    """Does something else if its arguments are one object, as attention does."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query * 2 if query is key else query + key * 10


class Asking(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Comparing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, key=x)


def test_arguments_that_are_one_tensor_are_replaced_together_or_not_at_all() -> None:
    model, x = NNsight(Asking(), compile={"backend": "eager"}), torch.ones(2, 3)
    with model.trace(x):
        new = model.inner.input * 3
        model.inner.inputs = (new,), {"key": new}
        out = model.output.save()
    assert torch.equal(out, x * 6)
    with pytest.raises(ValueError, match="one of several arguments that are the same tensor"), model.trace(x):
        model.inner.input = model.inner.input * 3
        out = model.output.save()
    with model.trace(x, compile=False):
        model.inner.input = model.inner.input * 3
        out = model.output.save()
    assert torch.equal(out, x * 3 + x * 10)


@pytest.mark.parametrize("compile", [False, True])
def test_arguments_that_are_one_tensor_are_one_for_each_invoke(compile: bool) -> None:
    class Rows(NNsight):
        def _batch(self, batched: Any, x: torch.Tensor) -> Any:
            return ((x if batched is None else torch.cat([batched[0][0], x]),), {}), len(x)

    model, weight = Rows(Asking(), compile={"backend": "eager"}), torch.ones(3, requires_grad=True)
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(torch.ones(1, 3) * weight):
            args, kwargs = model.inner.inputs
            same = nnsight.save(args[0] is kwargs["key"])
        with tracer.invoke(torch.ones(2, 3) * weight):
            model.inner.input[:] *= 5
            out = model.output.save()
    assert same
    assert torch.equal(out, torch.full((2, 3), 10.0))


def test_a_negative_zero_is_another_number_than_zero() -> None:
    """Both are equal in Python."""
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), compile={"backend": "eager"})
    x = torch.ones(1, 2)
    for sign in (0.0, -0.0, 1.0, -0.0, 0.0):
        with model.trace(x):
            out = torch.copysign(model[0].output, sign).save()
        assert torch.equal(out, torch.copysign(model._module[0](x), sign))
