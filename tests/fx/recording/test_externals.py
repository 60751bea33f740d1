"""What a block takes from outside: another value is the same program, and gives what it gives eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config

from nnsight import NNsight, fx, save

from ...conftest import Hooks

X = torch.linspace(-2.0, 2.0, 72).reshape(2, 9, 4)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(autouse=True)
def _nothing_on_disk() -> Iterator[None]:
    """Count what is compiled: code that an earlier process has left on disk is not to be found."""
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(params=["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> NNsight:
    torch._dynamo.reset()
    made = NNsight(Net(), compile={"backend": request.param})
    made.exact = request.param == "eager"
    return made


Edit = Callable[[torch.Tensor, Any], Any]


def agree(model: NNsight, edit: Edit, value: Any, x: torch.Tensor = X) -> Any:
    """Run one edit by hooks and compiled, compare, and return the report."""
    with torch.no_grad():
        expected = Hooks(model._module).output("first", lambda out: edit(out, value))(x)
        with model.trace(x) as tracer:
            hidden = model.first.output
            changed = edit(hidden, value)
            if changed is not None:
                model.first.output = changed
            found = model.output.save()
    tolerance = {"rtol": 0.0, "atol": 0.0} if model.__dict__["exact"] else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    return tracer.report


def set_position(h: torch.Tensor, i: int) -> None:
    h[:, i] = 1.5


def copy_position(h: torch.Tensor, i: int) -> None:
    h[:, i] = h[..., i - 1, :] * 2


def index_tensor(h: torch.Tensor, i: int) -> torch.Tensor:
    return h + h[:, torch.tensor(i)][:, None]


def shift(h: torch.Tensor, i: int) -> torch.Tensor:
    return torch.roll(h, i, 1)


def integer_coefficient(h: torch.Tensor, i: int) -> torch.Tensor:
    return h * i + i


def external_of_some_length(h: torch.Tensor, i: int) -> None:
    h[:, : i + 1] += torch.linspace(0.0, 1.0, i + 1)[:, None]


INTEGER_EDITS = [
    set_position, copy_position, index_tensor,
    shift, integer_coefficient, external_of_some_length,
]  # fmt: skip


@pytest.mark.parametrize("edit", INTEGER_EDITS, ids=lambda edit: edit.__name__)
def test_integers(model: NNsight, edit: Edit) -> None:
    """The first is a constant; from the second on they are inputs, but for what a backend must know of them."""
    for i in (3, 5, 2, 7, 4, 6, 8, 1, 0):
        assert not agree(model, edit, i).breaks
    assert fx.counters.recordings <= 2
    assert fx.counters.compiles <= 5
    before = str(fx.counters)
    for i in range(9):
        agree(model, edit, i)
    assert str(fx.counters) == before


@pytest.mark.parametrize("model", ["eager", pytest.param("inductor", marks=pytest.mark.slow)], indirect=True)
def test_a_loop_over_positions(model: NNsight) -> None:
    x = torch.randn(2, 12, 4)
    for i in range(12):
        agree(model, set_position, i, x)
    assert fx.counters.compiles <= 3
    for i in range(-12, 0):
        agree(model, set_position, i, x)
    assert fx.counters.compiles <= 4, "a negative index is another case for a backend"
    assert fx.counters.recordings == 2


def test_many_numbers_are_learned_at_once(model: NNsight) -> None:
    def edit(h: torch.Tensor, i: int) -> None:
        for part in range(8):
            h[:, (i + part) % 9, part] = 0.5

    for i in range(9):
        agree(model, edit, i)
    assert fx.counters.recordings == 2


def counted() -> tuple[int, ...]:
    """Return what a mistake adds nothing to; the graph in front of it is spliced, and runs node by node."""
    return fx.counters.captures, fx.counters.recordings, fx.counters.compiles, fx.counters.breaks


@pytest.mark.parametrize("index", [9, -10, 99])
def test_an_index_out_of_range_raises_at_its_line(model: NNsight, index: int) -> None:
    for i in (1, 2, 3):
        agree(model, set_position, i)
    before = counted()
    with torch.no_grad(), pytest.raises(IndexError, match="out of"):
        agree(model, copy_position, index)
    with torch.no_grad(), pytest.raises(IndexError, match="out of"):
        with model.trace(X):
            model.first.output[:, index] = 1.5
    agree(model, set_position, 4)
    assert counted() == before


def limit(h: torch.Tensor, m: float) -> torch.Tensor:
    return h.clamp(-m, max=m)


def choose(h: torch.Tensor, m: float) -> torch.Tensor:
    return torch.where(h > m, m, h)


def fill(h: torch.Tensor, m: float) -> torch.Tensor:
    return h.masked_fill(h < m, m)


def steer(h: torch.Tensor, m: float) -> torch.Tensor:
    return h + m * torch.ones(8)


@pytest.mark.parametrize("edit", [limit, choose, fill, steer], ids=lambda edit: edit.__name__)
def test_floats_are_inputs_from_the_first_time(model: NNsight, edit: Edit) -> None:
    for k in range(20):
        agree(model, edit, 0.1 * k)
    assert fx.counters.recordings == fx.counters.compiles == 1


def test_numbers_that_decide_the_structure_stay_constants(model: NNsight) -> None:
    def parts(h: torch.Tensor, n: int) -> torch.Tensor:
        return torch.cat(h.chunk(n, -1)[::-1], -1)

    for n in (1, 2, 4, 8, 2, 1):
        agree(model, parts, n)
    assert fx.counters.recordings == 4


def test_booleans_do_not_stand_for_numbers(model: NNsight) -> None:
    for value in (True, 1, 2, False, 0, 3):
        agree(model, lambda h, v: h * v, value)
        agree(model, lambda h, v: h.masked_fill(torch.tensor([[bool(v)]]), 0.5), value)


def test_modules_of_the_user(model: NNsight) -> None:
    """Optimizer steps are seen, and so is another parameter object."""
    probe = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for step in range(4):
        agree(model, lambda h, module: module(h), probe)
        probe(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        if step == 2:
            probe.weight = torch.nn.Parameter(torch.randn(8, 8))
    assert fx.counters.recordings == fx.counters.compiles == 1


def test_random_numbers_are_those_of_the_seed(model: NNsight) -> None:
    def noisy(h: torch.Tensor, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(seed)
        return h + torch.randn(8) + torch.rand_like(h) + torch.randn(h.shape, generator=own)

    for seed in (0, 1, 2, 0):
        agree(model, noisy, seed)
    assert fx.counters.recordings == fx.counters.compiles == 1


def test_a_generator_on_a_hidden_state_cuts_with_a_reason(model: NNsight) -> None:
    def drawn(h: torch.Tensor, seed: int) -> torch.Tensor:
        return torch.bernoulli(torch.sigmoid(h), generator=torch.Generator().manual_seed(seed))

    report = agree(model, drawn, 3)
    assert "Generator" in str(report.breaks[0])


def test_a_tensor_that_goes_into_the_model_is_one_input_of_the_graph() -> None:
    """What is asked about it to declare it is no call of the block."""
    model = NNsight(Net(), compile={"backend": "eager"})
    given = torch.ones(2, 9, 8)
    with torch.no_grad(), model.trace(X) as tracer:
        model.first.output = given
        out = model.output.save()
    torch.testing.assert_close(out, model.second(given.relu()), rtol=0.0, atol=0.0)
    assert tracer.report.code.count("external_0") > 0 and "external_1" not in tracer.report.code


def test_an_input_and_a_view_of_it_are_edited() -> None:
    """Behind a cut the hidden state is an input of the next graph, and a view of it that the block has made is no second input."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model = NNsight(net, compile={"backend": "aot_eager"})

    def run(x: torch.Tensor, compile: bool) -> Any:
        with model.trace(x, compile=compile) as tracer:
            hidden = model[0].output
            first = hidden.detach().norm().item()
            view = hidden[:, 1:]
            if first > 0:
                view *= 2.0
                hidden[:] += 1.0
                view.select(0, 0)[:] *= 3.0
            total = hidden.sum().item()
            out = model[2].output.save()
            save(first), save(total)
        out.sum().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        net.zero_grad()
        return tracer, (first, total, out.detach(), *gradients)

    for rows in (3, 5, 2, 5):
        x = torch.randn(rows, 4)
        fx.counters.reset()
        tracer, found = run(x, True)
        _, expected = run(x, False)
        torch.testing.assert_close(found, expected)
        assert tracer.report.notes == [], "everything is lowered"
    assert (fx.counters.captures, fx.counters.compiles) == (0, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_value_of_the_model_becomes_the_data_of_a_tensor_from_outside(backend: str) -> None:
    net = torch.nn.Linear(4, 4)
    model = NNsight(net, compile={"backend": backend})
    for x in (torch.ones(3, 4), torch.zeros(3, 4)):
        given, expected = torch.ones(2, 2), net(x).detach()
        with torch.no_grad(), model.trace(x) as tracer:
            given.data = model.output
            doubled = (given * 2).save()
        assert torch.equal(given, expected) and torch.equal(doubled, expected * 2)
        assert len(tracer.report.breaks) == 1
