"""Rows of the batch are found wherever they are: in another dimension, flattened, in caches; and not where sizes only look so."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from nnsight import LanguageModel, NNsight, fx
from nnsight.runtime.batched_containers import register_batched_container
from nnsight.runtime.errors import ReplacementShapeError
from nnsight.runtime.probing import counts

from ..conftest import Hooks, agree, assert_no_instrumentation, both, close, same


class Along(NNsight):
    """Joins the inputs of several invokes along the dimension ``along``."""

    def __init__(self, module: torch.nn.Module, along: int = 0) -> None:
        super().__init__(module, compile={"backend": "eager"})
        self.__dict__["along"] = along

    def _batch(self, batched: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        size = next(iter((*args, *kwargs.values()))).shape[self.along]
        if batched is None:
            return (args, kwargs), size
        joined = tuple(torch.cat(pair, self.along) for pair in zip(batched[0], args, strict=True))
        named = {name: torch.cat([batched[1][name], value], self.along) for name, value in kwargs.items()}
        return (joined, named), size


def rows(x: torch.Tensor, dim: int, *which: int) -> torch.Tensor:
    """Return rows of ``x`` by indexing, independently of what is tested."""
    return x[(slice(None),) * dim + (list(which),)]


# -- sequence first ---------------------------------------------------------------------------------------------------


class SequenceFirst(torch.nn.Module):
    """``[sequence, batch, width]`` throughout, as older code has it."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, heads)  # batch_first=False
        self.mlp = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        mixed, _ = self.attention(h, h, h)
        return self.mlp(x + mixed)


@pytest.mark.parametrize("length", [4, 3, 6], ids=["other length", "as many as rows", "multiple of rows"])
def test_rows_in_the_middle_are_read_and_edited(length: int) -> None:
    torch.manual_seed(0)
    model = Along(SequenceFirst(), along=1)
    a, b = torch.randn(length, 1, 8), torch.randn(length, 2, 8)
    whole = torch.cat([a, b], 1)

    def edit(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[:, 0] = h[:, 0] * 2.0
        h[0, 1:] = 5.0
        return h

    hooks = Hooks(model._module)
    hooks.output("attention", hooks.keep("attention"))
    hooks.output("norm", edit)
    expected = hooks(whole)
    mixed, weights = hooks.seen["attention"]

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model.norm.output = model.norm.output * 2.0  # a replacement
                mine = [*model.attention.output].save()
                one = model.output.save()
            with tracer.invoke(b):
                model.norm.output[0] = 5.0  # in place
                theirs = [*model.attention.output].save()
                two = model.output.save()
            with tracer.invoke():
                all_of_it = model.output.save()
        return (mine, one, theirs, two, all_of_it), tracer

    expected_values = (
        [mixed[:, :1], weights[:1]],
        expected[:, :1],
        [mixed[:, 1:], weights[1:]],
        expected[:, 1:],
        expected,
    )
    agree(run, expected_values)


# -- sizes that look like rows ------------------------------------------------------------------------------------------


class Table(torch.nn.Module):
    """Returns a table of ``size`` entries, whatever the batch is."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(size, 4))

    def forward(self) -> torch.Tensor:
        return self.table * 1.0


class WithTable(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.positions = Table(size)
        self.heads = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads(x + self.positions()[: x.shape[1]])


@pytest.mark.parametrize("size", [3, 6], ids=["as many as rows", "multiple of rows"])
def test_a_tensor_without_rows_is_whole_though_its_size_looks_like_rows(size: int) -> None:
    torch.manual_seed(0)
    model = Along(WithTable(size))
    a, b = torch.randn(1, 3, 4), torch.randn(2, 3, 4)
    expected = Hooks(model._module).output("positions", lambda p: p + 1.0)(torch.cat([a, b]))
    table = model._module.positions()

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                seen = model.positions.output.save()
                one = model.output.save()
            with tracer.invoke(b):
                model.positions.output = model.positions.output + 1.0
                two = model.output.save()
        return (seen, one, two), tracer

    agree(run, (table, expected[:1], expected[1:]))


# -- several entries for each row ---------------------------------------------------------------------------------------


class Router(torch.nn.Module):
    """Flattens places and rows for a router, in one of two orders, as mixtures of experts do."""

    def __init__(self, sequence_first: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(4, 2)
        self.sequence_first = sequence_first

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = (x.transpose(0, 1) if self.sequence_first else x).reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        shape = (x.shape[1], x.shape[0], 2) if self.sequence_first else (*x.shape[:2], 2)
        scores = logits.view(shape)
        return logits, scores.transpose(0, 1) if self.sequence_first else scores


@pytest.mark.parametrize("sequence_first", [False, True], ids=["batch first", "sequence first"])
def test_flattened_rows_are_gathered_in_their_order(sequence_first: bool) -> None:
    torch.manual_seed(0)
    model = Along(Router(sequence_first))
    a, b = torch.randn(1, 5, 4), torch.randn(2, 5, 4)
    owner = (
        [row for _ in range(5) for row in range(3)] if sequence_first else [row for row in range(3) for _ in range(5)]
    )
    mine = torch.tensor([row == 0 for row in owner])

    def edit(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[mine, 0] = 7.0
        logits[~mine] = logits[~mine] * 2.0
        return logits

    hooked = Hooks(model._module)
    hooked.output("gate", hooked.keep("gate")).output("gate", edit)
    logits, scores = hooked(torch.cat([a, b]))
    gate = hooked.seen["gate"]

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                before = model.gate.output.clone().save()
                model.gate.output[:, 0] = 7.0  # in place
                one = model.output.save()
            with tracer.invoke(b):
                model.gate.output = model.gate.output * 2.0
                two = model.output.save()
        return (before, one, two), tracer

    agree(run, (gate[mine], (logits[mine], scores[:1]), (logits[~mine], scores[1:])))


class Grouped(torch.nn.Module):
    """Sorts tokens by the expert that is to have them, and brings their results back into order."""

    def __init__(self, scattered: bool) -> None:
        super().__init__()
        self.experts, self.head, self.scattered = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), scattered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 4)
        order = torch.sort(flat.argmax(-1)).indices
        if self.scattered:
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0])
        else:
            back = order.argsort()
        done = self.experts(flat[order])
        return self.head(done[back].view_as(x))


@torch.no_grad()
@pytest.mark.parametrize("scattered", [True, False])
def test_rows_that_were_sorted_and_brought_back_are_those_of_their_invokes(scattered: bool) -> None:
    torch.manual_seed(0)
    model = Along(Grouped(scattered))
    a, b = torch.randn(1, 5, 4), torch.randn(2, 5, 4)

    def edit(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:1] * 2.0, hidden[1:]])

    expected = Hooks(model._module).output("head", edit)(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model.head.output = model.head.output * 2.0
                one = model.output.save()
            with tracer.invoke(b):
                two = model.output.save()
        return (one, two), tracer

    agree(run, (expected[:1], expected[1:]))


class Doubled(torch.nn.Module):
    """Runs a batch twice over, as guidance without a classifier does, and repeats each row, as beams do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.beams = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(torch.cat([x, x * 0.5])).chunk(2)
        beams = self.beams(x.repeat_interleave(3, dim=0)).view(-1, 3, 4)
        return first + second + beams.sum(1)


def test_a_batch_that_is_doubled_and_rows_that_are_repeated() -> None:
    torch.manual_seed(0)
    model = Along(Doubled())
    a, b = torch.randn(2, 4), torch.randn(1, 4)
    first, beams = torch.tensor([0, 1, 3, 4]), slice(0, 6)

    def edit(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[first] += 1.0
        return h

    hooked = Hooks(model._module).output("inner", edit)
    hooked.output("beams", hooked.keep("beams"))
    expected = hooked(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model.inner.output += 1.0
                mine = model.beams.output.save()
                one = model.output.save()
            with tracer.invoke(b):
                theirs = model.beams.output.save()
                two = model.output.save()
        return (mine, theirs, one, two), tracer

    seen = hooked.seen["beams"]
    agree(run, (seen[beams], seen[6:], expected[:2], expected[2:]))


class Sorted(torch.nn.Module):
    """Sorts its rows by what they hold, like tokens by their expert, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()
        self.outer = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort()
        y = torch.zeros_like(x)
        return self.outer(y.index_put((order,), self.inner(x[order])))


@both
def test_rows_in_an_order_that_depends_on_their_values_are_whole(compile: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Along(Sorted())
    a, b = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 2.0], [2.0, 3.0]])
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(a):
            mixed = model.inner.output.save()
            mine = model.outer.output.save()
        with tracer.invoke(b):
            pass
    assert mixed.tolist() == [[1.0, 2.0], [2.0, 3.0], [3.0, 1.0]]
    assert mine.tolist() == a.tolist()
    [told] = [record.message for record in caplog.records if record.name == "nnsight.runtime"]
    assert told.startswith("Each invoke sees and edits all rows of the batch at `model.inner.output`")


class Masked(torch.nn.Module):
    """Applies a layer to the rows that a mask selects, like an adapter, and another one to numbers of its own that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()
        self.own = torch.nn.Identity()
        self.outer = torch.nn.Identity()
        self.register_buffer("numbers", torch.tensor([1.0, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 0
        y = torch.zeros_like(x)
        y[chosen] = self.inner(x[chosen] * 1) + self.own(self.numbers[self.numbers > 0])
        return self.outer(y)


def test_rows_that_a_mask_selects_are_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = Along(Masked())
    with model.trace(compile=False) as tracer:
        with tracer.invoke(torch.tensor([[3.0, 1.0]])):
            chosen = model.inner.output.save()
            own = model.own.output.save()
            first = model.outer.output.save()
        with tracer.invoke(torch.tensor([[-1.0, 2.0], [2.0, 3.0]])):
            second = model.outer.output.save()
    assert chosen.tolist() == [[3.0, 1.0], [2.0, 3.0]]
    assert own.tolist() == [1.0]
    assert (first.tolist(), second.tolist()) == ([[4.0, 2.0]], [[0.0, 0.0], [3.0, 4.0]])
    [told] = [record.message for record in caplog.records if record.name == "nnsight.runtime"]
    assert told.startswith("Each invoke sees and edits all rows of the batch at `model.inner.output`")


class Joined(torch.nn.Module):
    """Takes its batch apart by ``apart`` and joins what ``inner`` has made of it."""

    def __init__(self, apart: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.apart = apart
        self.outer = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.apart(x))


PARTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "split": (lambda x: torch.cat([part * 2 for part in x.split(1)]), True),
    "chunk": (lambda x: torch.cat([part.relu() for part in x.chunk(2)]), True),
    "slices": (lambda x: torch.cat([x[:1], x[1:]]), True),
    "items": (lambda x: torch.stack([row.view(1, -1)[0] for row in x]), True),
    "unbind": (lambda x: torch.cat([row[None] for row in x.unbind()]), True),
    "repeated": (lambda x: torch.stack([row for row in x for _ in range(2)]).view(-1, 2, 3)[:, 0], True),
    "reversed": (lambda x: torch.cat([x[at : at + 1] for at in reversed(range(len(x)))]), False),
    "rolled": (lambda x: torch.cat([x[1:], x[:1]]), False),
    # The index is the same for all rows, and repeats them in another order than the values do, as in ProphetNet.
    "gathered": (lambda x: x.repeat_interleave(2, 0).gather(1, (x[:, :2] < 0).long().repeat(2, 1)).view(-1, 2, 2)[:, 0], True),
    "gathered from rows": (lambda x: x.gather(0, x.argsort(0)), False),
}


@both
@pytest.mark.parametrize("name", PARTS)
def test_a_batch_that_is_taken_apart_and_joined(name: str, compile: bool) -> None:
    apart, is_in_order = PARTS[name]
    model = Along(Joined(apart))
    a, b = torch.rand(2, 3), torch.rand(3, 3)
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(a):
            size = len(model.outer.input).save()
            model.outer.input[:] = 0
        with tracer.invoke(b):
            out = model.output.save()
    assert size == (2 if is_in_order else 5)
    close(out, apart(b) if is_in_order else torch.zeros(5, 3))


class Apart(torch.nn.Module):
    """Returns a container with one item for each row."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        items = [row * 1 for row in x]
        return {"items": items, "all": (x, 3)} if self.kind is dict else self.kind(items)


class Together(torch.nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.apart = Apart(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.apart(x)
        return torch.stack(list(found["items"] if isinstance(found, dict) else found))


@both
@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_list_with_an_item_for_each_row(kind: type, compile: bool) -> None:
    model = Along(Together(kind))
    a, b = torch.rand(2, 3), torch.rand(3, 3)
    for _ in range(2):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                found = model.apart.output["items"] if kind is dict else model.apart.output
                seen = (len(found), type(found)).save()
                found[-1][:] = 0
            with tracer.invoke(b):
                if kind is dict:
                    model.apart.output["items"][0] = torch.ones(3)
                else:
                    model.apart.output = kind([torch.ones(3), *model.apart.output[1:]])
                out = model.output.save()
            with tracer.invoke():
                whole = model.output.save()
        assert seen == (2, list if kind is dict else kind)
        close(out, torch.cat([torch.ones(1, 3), b[1:]]))
        close(whole, torch.cat([a[:1], torch.zeros(1, 3), out]))
    with pytest.raises(ReplacementShapeError, match="has 3 items at `model.apart.output`"), model.trace(compile=compile) as tracer:
        with tracer.invoke(a):
            pass
        with tracer.invoke(b):
            if kind is dict:
                model.apart.output["items"].pop()
            else:
                model.apart.output = model.apart.output[1:]


@both
def test_flattened_rows_of_other_lengths_need_no_other_recording(compile: bool) -> None:
    model = Along(Router(False))
    for number, length in enumerate([4, 5, 6, 7, 8]):
        fx.counters.reset()
        a, b = torch.randn(1, length, 4), torch.randn(2, length, 4)
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                one = model.gate.output.save()
            with tracer.invoke(b):
                two = model.gate.output.save()
        close((one, two), (model._module(a)[0], model._module(b)[0]))  # a row of three is rounded as its machine likes
        if number > 1:
            assert fx.counters.captures == fx.counters.recordings == 0


# -- modules that are called several times --------------------------------------------------------------------------------


class Twice(torch.nn.Module):
    """Calls one module on something without rows, and then on the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.table).mean() + self.shared(x)


def test_each_call_of_a_module_has_rows_of_its_own() -> None:
    torch.manual_seed(0)
    model = Along(Twice())
    a, b = torch.randn(1, 4), torch.randn(2, 4)
    table = model._module.shared(model._module.table)
    expected = model._module.shared(torch.cat([a, b]))

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                first = model.shared.output.save()
                second = model.shared.next().output.save()
            with tracer.invoke(b):
                pass
        return (first, second), tracer

    agree(run, (table, expected[:1]))


# -- skips and gradients --------------------------------------------------------------------------------------------------


def test_what_invokes_return_for_a_skipped_module_is_joined_where_its_rows_are() -> None:
    torch.manual_seed(0)
    model = Along(SequenceFirst(), along=1)
    a, b = torch.randn(3, 1, 8), torch.randn(3, 2, 8)
    whole = torch.cat([a, b], 1)
    expected = Hooks(model._module).output("mlp", lambda _: torch.cat([a * 2.0, b * 3.0], 1))(whole)
    same(expected, torch.cat([a * 2.0, b * 3.0], 1))

    def run(compile: bool) -> tuple[Any, Any]:
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                model.mlp.skip(a * 2.0)
                one = model.output.save()
            with tracer.invoke(b):
                model.mlp.skip(b * 3.0)
                two = model.output.save()
            with tracer.invoke():
                all_of_it = model.output.save()
        return (one, two, all_of_it), tracer

    agree(run, (a * 2.0, b * 3.0, expected))


@both
def test_gradients_flow_to_the_rows_of_an_invoke(compile: bool) -> None:
    torch.manual_seed(0)
    with torch.enable_grad():
        model = Along(SequenceFirst(), along=1)
        a, b = torch.randn(3, 1, 8), torch.randn(3, 2, 8)
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(a):
                hidden = model.norm.output
                hidden.requires_grad_()
                with model.output.sum().backward():
                    mine = hidden.grad.save()
            with tracer.invoke(b):
                pass
        x = torch.cat([a, b], 1)
        seen: list[torch.Tensor] = []

        def keep(h: torch.Tensor) -> None:
            h.retain_grad()
            seen.append(h)

        out = Hooks(model._module).output("norm", keep)(x)
        out[:, :1].sum().backward()
    torch.testing.assert_close(mine, seen[0].grad[:, :1])


# -- the probe leaves no mark -----------------------------------------------------------------------------------------------


class Stateful(torch.nn.Module):
    """Keeps a running mean, a count, a log and a copy of its last output, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.calls: list[Any] = []
        self.last: Any = None
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        self.steps += 1
        self.calls.append(x.shape)
        self.last = self.drop(self.norm(x)) + torch.rand(4)
        return self.last if scale is None else self.last * scale


def test_the_model_and_the_random_numbers_are_as_if_nothing_had_been_probed() -> None:
    torch.manual_seed(0)
    module, plain = Stateful().train(), Stateful().train()
    plain.load_state_dict(module.state_dict())
    hooked: list[Any] = []
    module.register_forward_hook(lambda *_: hooked.append(1))
    model = Along(module)
    a, b = torch.randn(2, 4), torch.randn(3, 4)
    scale_a, scale_b = torch.randn(2, 4), torch.randn(3, 4)
    counts.clear()
    torch.manual_seed(1)
    with model.trace(compile=False) as tracer:
        with tracer.invoke(a, scale=scale_a):
            pass
        with tracer.invoke(b, scale=scale_b):
            two = model.output.save()
    after = torch.rand(3)
    torch.manual_seed(1)
    expected = plain(torch.cat([a, b]), torch.cat([scale_a, scale_b]))
    assert counts["probes"] == 1
    assert torch.equal(two, expected[2:])
    assert torch.equal(after, torch.rand(3))
    for name, value in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert module.calls == [torch.Size([5, 4])] and type(module.last) is torch.Tensor
    assert hooked == [1], "hooks of the user run with the model alone"


def test_a_model_is_probed_once_for_each_kind_of_input() -> None:
    model = Along(SequenceFirst(), along=1)

    def run(sizes: tuple[int, ...], length: int, compile: bool = False) -> int:
        counts.clear()
        with model.trace(compile=compile) as tracer:
            for size in sizes:
                with tracer.invoke(torch.randn(length, size, 8)):
                    out = model.attention.output[0].save()
                    assert out.shape == (length, size, 8)
        return counts["probes"]

    assert run((1, 2), 4) == 1
    assert [run((1, 2), 4), run((2, 2), 4), run((1, 1, 3), 7), run((1, 2), 3, compile=True)] == [0, 0, 0, 0]
    assert run((3,), 5) == 0, "one invoke has the whole batch"
    model._module.mlp = torch.nn.Linear(8, 5)
    assert run((1, 2), 4) == 1, "the modules have changed"
    model._module.eval()
    assert run((1, 2), 4) == 1
    assert run((1, 2), 4) == 0


class Unfakeable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.Linear(4, 4)
        self.after = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x.transpose(0, 1))
        return self.after(torch.from_numpy(h.detach().numpy() * 2.0).transpose(0, 1))


def test_a_model_that_cannot_run_on_fakes_is_told_of_once(caplog: Any) -> None:
    torch.manual_seed(0)
    model = Along(Unfakeable())
    a, b = torch.randn(1, 5, 4), torch.randn(2, 5, 4)
    whole = torch.cat([a, b])
    with caplog.at_level(logging.WARNING, "nnsight.runtime"):
        for _ in range(2):
            with model.trace(compile=False) as tracer:
                with tracer.invoke(a):
                    before = model.before.output.save()
                    one = model.after.output.save()
                with tracer.invoke(b):
                    two = model.output.save()
    same((one, two), (model._module(whole)[:1], model._module(whole)[1:]))
    same(before, model._module.before(whole.transpose(0, 1))[:, :1])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Not all batch axes of Unfakeable are known" in caplog.text
    assert_no_instrumentation(model._module)


class Choosing(torch.nn.Module):
    """Asks for values: a truth, a number, and the places where a condition holds."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.mix = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 100).any():
            raise ValueError("too large")
        flat = x.reshape(-1, 4)
        chosen = flat.argmax(-1) % 3
        out = torch.zeros_like(flat)
        for index in chosen.unique() if x.shape[0] < 0 else range(3):
            (places,) = torch.where(chosen == index)
            out.index_add_(0, places, self.experts[index](flat[chosen == index]))
        out = out * flat.abs().max().item()
        return self.mix(out.view_as(x).transpose(0, 1)).transpose(0, 1)


def test_a_model_that_asks_for_values_is_probed_with_guesses(caplog: Any) -> None:
    torch.manual_seed(0)
    model = Along(Choosing())
    a, b = torch.randn(1, 3, 4), torch.randn(2, 3, 4)
    whole = torch.cat([a, b])
    with caplog.at_level(logging.WARNING, "nnsight.runtime"):
        with model.trace(compile=False) as tracer:
            with tracer.invoke(a):
                one = model.mix.output.save()
            with tracer.invoke(b):
                two = model.output.save()
    assert not caplog.records
    expected = model._module(whole)
    same((one, two), (expected.transpose(0, 1)[:, :1], expected[1:]))


class Chosen(torch.nn.Module):
    """A number chooses the batch axis of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()

    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.inner(x.transpose(0, dim)).transpose(0, dim)


@both
def test_a_number_that_chooses_the_batch_axis(compile: bool) -> None:
    class Options(Along):
        def _batch(self, batched: Any, x: torch.Tensor) -> tuple[Any, int]:
            return super()._batch(batched, x)

    model, a, b = Options(Chosen()), torch.randn(2, 4), torch.randn(2, 4)
    for dim in (0, 1):
        with model.trace(dim=dim, compile=compile) as tracer:
            with tracer.invoke(a):
                one = model.inner.output.save()
            with tracer.invoke(b):
                two = model.inner.output.save()
        same((one, two), (a.transpose(0, dim), b.transpose(0, dim)))


# -- objects with rows in their attributes ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    table: torch.Tensor
    name: str


@register_batched_container
class State:
    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.layers = layers


class Plain:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Objects(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make = Make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, state, plain = self.make(x)
        assert result.name == "x"
        return result.hidden.transpose(0, 1) + state.layers[0] + plain.tensor


class Make(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[Result, State, Plain]:
        return Result(x.transpose(0, 1) * 2.0, torch.ones(3, 3), "x"), State([x, x + 1.0]), Plain(x * 0.0)


def test_objects_are_narrowed_by_their_attributes() -> None:
    model = Along(Objects())
    a, b = torch.randn(1, 3, 4), torch.randn(2, 3, 4)
    with model.trace(compile=False) as tracer:
        with tracer.invoke(a):
            result, state, plain = model.make.output
            seen = (result.hidden.clone(), result.table, [*state.layers], plain.tensor).save()
            result.hidden[:] = 1.0  # in place
            state.layers[0] = state.layers[0] * 5.0  # in a list of the object
            one = model.output.save()
        with tracer.invoke(b):
            result = model.make.output[0]
            result.hidden = result.hidden * 10.0  # an attribute
            two = model.output.save()
        with tracer.invoke():
            everything = model.make.output[0].hidden.save()
    whole = torch.cat([a, b])
    same(seen[:3], (a.transpose(0, 1) * 2.0, torch.ones(3, 3), [a, a + 1.0]))
    assert seen[3].shape[0] == 3, "an object of a class that is not registered is whole"
    same(one, torch.ones_like(a) + a * 5.0)
    same(two, b * 20.0 + b)
    same(everything, torch.cat([torch.ones_like(a), b * 20.0]).transpose(0, 1))
    assert whole.shape[0] == 3


class Flattened(torch.nn.Module):
    """Returns an object whose tensor has the rows of each token side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FlattenedInner()
        self.last = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x).hidden.unflatten(0, (x.shape[1], x.shape[0])).transpose(0, 1))


class FlattenedInner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Result:
        return Result(self.linear(x.transpose(0, 1).flatten(0, 1)), torch.ones(3, 3), "x")


@both
def test_scattered_rows_in_an_object_are_edited_in_place(compile: bool) -> None:
    """An invoke gets a copy of scattered rows, so its edits have to be written back."""
    model, b = Along(Flattened()), torch.randn(2, 5, 4)
    with torch.no_grad(), model.trace(compile=compile) as tracer:
        with tracer.invoke(torch.randn(2, 5, 4)):
            model.inner.output.hidden[:] = 0
            one = model.output.save()
        with tracer.invoke(b):
            two = model.output.save()
    same(one, model._module.last(torch.zeros(2, 5, 4)))
    close(two, model._module(b))


@both
def test_the_gradient_of_rows_in_an_object(compile: bool) -> None:
    model = Along(Flattened())
    a = torch.randn(2, 5, 4)
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(a):
            hidden = model.inner.output.hidden
            with model.output.pow(2).sum().backward():
                gradient = hidden.grad.save()
        with tracer.invoke(torch.randn(1, 5, 4)):
            pass
    by_hand = model._module.inner(a).hidden.detach().requires_grad_()
    (expected,) = torch.autograd.grad(model._module.last(by_hand).pow(2).sum(), by_hand)
    close(gradient, expected)


# -- caches of keys and values --------------------------------------------------------------------------------------------------

PROMPTS = ([5, 6, 7], [8, 9, 10])


@pytest.fixture(scope="module")
def llama_model() -> LanguageModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LanguageModel(transformers.LlamaForCausalLM(config).eval())


def cache_of(module: Any, ids: list[list[int]]) -> Any:
    return module(input_ids=torch.tensor(ids), use_cache=True).past_key_values


def test_an_invoke_sees_the_cache_of_its_rows(llama_model: LanguageModel) -> None:
    with llama_model.trace(use_cache=True) as tracer:
        with tracer.invoke(PROMPTS[0]):
            one = llama_model.output.past_key_values.save()
        with tracer.invoke(PROMPTS[1]):
            two = llama_model.output.past_key_values.save()
        with tracer.invoke():
            whole = llama_model.output.past_key_values.save()
    assert type(one) is type(whole) is transformers.DynamicCache
    expected = cache_of(llama_model._module, [*PROMPTS])
    for index, (mine, theirs) in enumerate(zip(one.layers, two.layers, strict=True)):
        same((mine.keys, mine.values), (expected.layers[index].keys[:1], expected.layers[index].values[:1]))
        same((theirs.keys, theirs.values), (expected.layers[index].keys[1:], expected.layers[index].values[1:]))
        assert whole.layers[index].keys.shape[0] == 2


def generated(
    model: LanguageModel, ids: list[list[int]], edit: Callable[[Any], None] | None = None, **kwargs: Any
) -> Any:
    """Tokens of transformers' own ``generate``, with ``edit`` applied to the cache after the first step."""
    steps: list[int] = []

    def hook(out: Any) -> None:
        steps.append(1)
        if edit is not None and len(steps) == 1:
            edit(out.past_key_values)

    ids_tensor = torch.tensor(ids)
    with Hooks(model._module).output("", hook).installed():
        return model._module.generate(ids_tensor, attention_mask=torch.ones_like(ids_tensor), max_new_tokens=6, **kwargs)


@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_edits_of_a_cache_change_what_its_own_row_generates(llama_model: LanguageModel, kind: str) -> None:
    def edit(cache: Any) -> None:
        cache.layers[0].keys[1:] *= -3.0
        cache.layers[1].values[1:] *= -5.0

    expected = generated(llama_model, [*PROMPTS], edit)
    plain = generated(llama_model, [*PROMPTS])
    with llama_model.generate(max_new_tokens=6, compile=False) as tracer:
        with tracer.invoke(PROMPTS[0]):
            pass
        with tracer.invoke(PROMPTS[1]):
            cache = llama_model.output.past_key_values
            if kind == "in place":
                cache.layers[0].keys *= -3.0
                cache.layers[1].values[:] = cache.layers[1].values * -5.0
            else:
                cache.layers[0].keys = cache.layers[0].keys * -3.0
                cache.layers[1].values = cache.layers[1].values * -5.0
        with tracer.invoke():
            found = tracer.result.save()
    assert torch.equal(found, expected)
    assert torch.equal(found[0], plain[0]) and not torch.equal(found[1], plain[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: setattr(cache.layers[0], "keys", cache.layers[0].keys[:, :, :1]),
        lambda cache: setattr(cache.layers[0], "keys", torch.zeros(2, 2, 3, 8)),
        lambda cache: cache.layers[0].update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)),
        lambda cache: cache.layers.pop(),
        lambda cache: cache.layers.__setitem__(0, None),
    ],
    ids=["shorter", "all rows", "longer", "fewer layers", "no layer"],
)
def test_a_change_of_a_cache_that_other_rows_cannot_follow_is_refused(
    llama_model: LanguageModel, change: Callable[[Any], Any]
) -> None:
    with pytest.raises(Exception, match="`model.output`") as caught:
        with llama_model.trace(use_cache=True) as tracer:
            with tracer.invoke(PROMPTS[0]):
                change(llama_model.output.past_key_values)
            with tracer.invoke(PROMPTS[1]):
                pass
    assert type(caught.value).__name__ == "ReplacementShapeError"


def test_a_static_cache_and_the_cache_of_an_encoder_decoder(llama_model: LanguageModel) -> None:
    with llama_model.generate(max_new_tokens=3, cache_implementation="static", compile=False) as tracer:
        with tracer.invoke(PROMPTS[0]):
            static = llama_model.output.past_key_values.layers[0].keys.save()
        with tracer.invoke(PROMPTS[1]):
            pass
    assert static.shape[0] == 1
    torch.testing.assert_close(static[:, :, :3], cache_of(llama_model._module, [PROMPTS[0]]).layers[0].keys)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=3, pad_token_id=0
    )
    seq2seq = LanguageModel(transformers.T5ForConditionalGeneration(config).eval())
    with seq2seq.generate(max_new_tokens=3, compile=False) as tracer:
        with tracer.invoke(PROMPTS[0]):
            pass
        with tracer.invoke(PROMPTS[1]):
            encoded = seq2seq.encoder.block[0].output[0].save()
            cache = seq2seq.output.past_key_values.save()
    hooked = Hooks(seq2seq._module)
    hooked.output("encoder.block.0", hooked.keep("encoded", lambda value: value[0]))
    expected = hooked(input_ids=torch.tensor([PROMPTS[1]]), decoder_input_ids=torch.tensor([[3]])).past_key_values
    torch.testing.assert_close(encoded, hooked.seen["encoded"])
    for part in ("self_attention_cache", "cross_attention_cache"):
        torch.testing.assert_close(getattr(cache, part).layers[0].keys, getattr(expected, part).layers[0].keys)


# -- generation -------------------------------------------------------------------------------------------------------------------


def test_generation_probes_once_and_narrows_every_step(llama_model: LanguageModel) -> None:
    model = llama_model
    for number in range(2):
        counts.clear()
        hidden: list[Any] = []
        with model.generate(max_new_tokens=4, compile=False) as tracer:
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:4]:
                    hidden.append(model.model.layers[0].mlp.output)  # noqa: PERF401 - a location, each time anew
            with tracer.invoke(PROMPTS[1]):
                ids = tracer.result.save()
        if number:
            assert counts["probes"] == 0
    assert [tuple(h.shape) for h in hidden] == [(1, 3, 16)] + [(1, 1, 16)] * 3
    assert torch.equal(ids, generated(llama_model, [*PROMPTS])[1:, :7])


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=["beams", "several"]
)
def test_the_beams_of_a_row_belong_to_it(llama_model: LanguageModel, options: dict[str, int]) -> None:
    with llama_model.generate(max_new_tokens=3, compile=False, do_sample=False, **options) as tracer:
        with tracer.invoke(PROMPTS[0]):
            hidden = llama_model.model.layers[0].output.save()
            one = tracer.result.save()
        with tracer.invoke(PROMPTS[1]):
            two = tracer.result.save()
    ids = torch.tensor([*PROMPTS])
    expected = llama_model._module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **options
    )
    assert hidden.shape[0] == options["num_beams"]
    each = options.get("num_return_sequences", 1)
    assert torch.equal(one, expected[:each]) and torch.equal(two, expected[each:])
