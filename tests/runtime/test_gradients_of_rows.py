"""Gradients of the rows of an invoke, and reads of rows while gradients are enabled: as in a run of the invoke alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight.runtime.rows import gradient_sources

from ..conftest import Rows

modes = pytest.mark.parametrize("backend", [None, "aot_eager"])
#: With three dimensions, so that the output of a linear layer is a view for autograd.
FIRST, SECOND = torch.linspace(-1, 1, 16).view(2, 2, 4), torch.linspace(2, -1, 24).view(3, 2, 4)


class Block(torch.nn.Module):
    """A residual block. Its activation works in place, and `forward` ignores what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.up = torch.nn.Linear(4, 8)
        self.act = torch.nn.ReLU(inplace=True)
        self.down = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        self.act(hidden)
        return x + self.down(hidden)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.Linear(4, 4)
        self.block = Block()
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.start(x)))


def make(backend: str | None) -> Rows:
    torch.manual_seed(0)
    return Rows(Net(), compile=False if backend is None else {"backend": backend})


def assert_as_alone(backend: str | None, body: Callable[[Any], Any]) -> None:
    """Call ``body`` on the model in two invokes, and in a trace of its own for each input: the results have to be equal."""
    model, alone, together = make(backend), [], []
    for x in (FIRST, SECOND):
        with model.trace(x):
            alone.append(body(model))
    with model.trace() as tracer:
        with tracer.invoke(FIRST):
            together.append(body(model))
        with tracer.invoke(SECOND):
            together.append(body(model))
    torch.testing.assert_close(together, alone)


def with_block(model: Any, hidden: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    found = []
    with loss.backward(retain_graph=True):
        found.append(hidden.grad.clone())
    return found


def with_grad(model: Any, hidden: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [hidden, hidden], retain_graph=True))


def with_hook(model: Any, hidden: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.zeros(())]
    handles = [hidden.register_hook(lambda gradient: gradient * 3), hidden.register_hook(lambda gradient: found.append(gradient.clone()))]
    loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()
    return found


def with_retain_grad(model: Any, hidden: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    hidden.retain_grad()
    hidden.retain_grad()
    for _ in range(2):
        loss.backward(retain_graph=True)
    return [hidden.grad.clone()]


def with_inputs(model: Any, hidden: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    loss.backward(retain_graph=True, inputs=[hidden])
    return [hidden.grad.clone()]


WAYS = [with_block, with_grad, with_hook, with_inputs, with_retain_grad]
PLACES: dict[str, Callable[[Any], torch.Tensor]] = {
    "an output": lambda model: model.start.output,
    "an input with a residual connection": lambda model: model.block.norm.input,
    "the input of a module in place": lambda model: model.block.act.input,
}


@modes
@pytest.mark.parametrize(
    ("place", "edited"),
    [
        ("an output", True),
        ("an input with a residual connection", False),
        ("the input of a module in place", False),
        pytest.param("an output", False, marks=pytest.mark.slow),
        pytest.param("an input with a residual connection", True, marks=pytest.mark.slow),
        pytest.param("the input of a module in place", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_rows(backend: str | None, place: str, edited: bool) -> None:
    def body(model: Any) -> list[torch.Tensor]:
        hidden = PLACES[place](model)
        if edited:
            hidden[0] = 0.5
        loss = model.output.pow(2).sum() + hidden.sin().sum()
        found = []
        for way in WAYS:
            found += way(model, hidden, loss)
            hidden.grad = None
        return found

    assert_as_alone(backend, body)


@modes
def test_an_edited_gradient_of_rows_flows_on(backend: str | None) -> None:
    def body(model: Any) -> list[torch.Tensor]:
        start, found = model.start.output, []
        hidden = model.block.up.output
        loss = model.output.pow(2).sum()
        with loss.backward(retain_graph=True):
            hidden.grad[0] *= 2
            hidden.grad = hidden.grad + 1
            found.append(start.grad.clone())
        return found

    assert_as_alone(backend, body)


@modes
def test_gradients_after_the_trace(backend: str | None) -> None:
    model, kept, expected = make(backend), [], []
    with model.trace() as tracer:
        for x in (FIRST, SECOND):
            with tracer.invoke(x):
                hidden = model.block.norm.input.requires_grad_()
                kept.append((hidden, model.output))
    for x in (FIRST, SECOND):
        before = model._module.start(x)
        after = model._module.head(model._module.block(before))
        expected += torch.autograd.grad(after.pow(2).sum() + before.sum(), before)
    for (hidden, output), wanted in zip(kept, expected, strict=True):
        loss = output.pow(2).sum() + hidden.sum()
        torch.testing.assert_close(torch.autograd.grad(loss, hidden, retain_graph=True)[0], wanted)
        with loss.backward(retain_graph=True):
            torch.testing.assert_close(hidden.grad, wanted)


@modes
@pytest.mark.parametrize("edited", ["head.input", "start.output"])
def test_an_edit_by_the_other_invoke(backend: str | None, edited: str) -> None:
    model, found = make(backend), []

    def gradient() -> torch.Tensor:
        hidden = model.head.input if edited == "head.input" else model.start.output
        return torch.autograd.grad(model.output.pow(2).sum() + hidden.sum(), hidden, retain_graph=True)[0]

    with model.trace(FIRST):
        alone = gradient().save()
    with model.trace() as tracer:
        with tracer.invoke(FIRST):
            found.append(gradient())
        with tracer.invoke(SECOND):
            (model.head.input if edited == "head.input" else model.start.output)[:, 0] = 0.5
    torch.testing.assert_close(found[0], alone)


@modes
def test_retain_grad_before_an_edit(backend: str | None) -> None:
    def body(model: Any) -> list[torch.Tensor]:
        hidden = model.start.output
        hidden.retain_grad()
        hidden[:, 0] *= 2
        with (model.output.pow(2).sum() + hidden.sin().sum()).backward(retain_graph=True):
            pass
        return [hidden.grad.clone()]

    assert_as_alone(backend, body)


@pytest.mark.parametrize("form", [None, "aot_eager", "program"])
def test_a_patch_of_a_copy_passes_its_gradient_on(form: str | None) -> None:
    model = make(None if form == "program" else form)
    with model.trace(**({"program": True} if form == "program" else {})) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(FIRST):
            hidden = model.start.output
            source = hidden[:1, -1]
            barrier()
            model.output.sum()
        with tracer.invoke(SECOND):
            barrier()
            new = model.start.output.clone()
            new[:, -1] = source
            model.start.output = new
            loss = model.output.pow(2).sum()
            with loss.backward():
                found = hidden.grad.clone().save()
    module = model._module
    start, new = module.start(FIRST), module.start(SECOND).clone()
    new[:, -1] = start[:1, -1]
    (expected,) = torch.autograd.grad(module.head(module.block(new)).pow(2).sum(), start)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_an_edit_of_what_another_invoke_needs_says_so(backend: str | None) -> None:
    model = make(backend)
    with pytest.raises(RuntimeError, match="All invokes of a trace share the tensors of one batched forward pass") as caught:
        with model.trace() as tracer:
            with tracer.invoke(FIRST):
                squares = model.start.output.pow(2).sum()
                (model.output.sum() + squares).backward()
            with tracer.invoke(SECOND):
                model.start.output[:] = 0.0
    assert str(caught.value).count("All invokes") == 1


def test_rows_of_rows() -> None:
    """Rows that an earlier trace has saved are the batch of this one."""
    model = make(None)
    with model.trace() as tracer:
        with tracer.invoke(FIRST):
            model.output.sum()
        with tracer.invoke(torch.cat([FIRST, SECOND])):
            saved = model.start.output.save()
    found = []
    with model.trace() as tracer:
        with tracer.invoke():
            model.block.input = saved
        for x in (FIRST, SECOND):
            with tracer.invoke(x):
                hidden = model.block.input
                found += torch.autograd.grad(model.output.sin().sum(), hidden, retain_graph=True)
    before = model._module.start(torch.cat([FIRST, SECOND]))
    (expected,) = torch.autograd.grad(model._module.head(model._module.block(before)).sin().sum(), before)
    torch.testing.assert_close(torch.cat(found), expected)


def test_hooks_of_rows_keep_nothing_alive(no_gc: None) -> None:
    model, held = make(None), []
    with model.trace() as tracer:
        for x in (FIRST, SECOND):
            with tracer.invoke(x):
                hidden = model.start.output
                hidden.register_hook(lambda gradient: gradient * 2)
                hidden.retain_grad()
                held.append(weakref.ref(hidden._base))
                model.output.sum().backward(retain_graph=True)
    assert [reference() for reference in held] == [None, None]


def test_functions_that_a_user_compiles() -> None:
    """Once rows are handed out, torch's methods are replaced; dynamo treats the new ones as it treats the old ones."""
    assert_as_alone(None, lambda model: [model.start.output.detach()])

    def double(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        y.retain_grad()
        return y.sin().sum(), y

    loss, y = torch.compile(double, backend="aot_eager")(torch.ones(3, requires_grad=True))
    loss.backward()
    torch.testing.assert_close(y.grad, torch.full((3,), 2.0).cos())


def test_a_gradient_edge_is_no_tensor() -> None:
    assert_as_alone(None, lambda model: [model.start.output.detach()])
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    (gradient,) = torch.autograd.grad(y.sum(), [torch.autograd.graph.get_gradient_edge(y)])
    torch.testing.assert_close(gradient, torch.ones(3))


def test_the_first_gradient_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy tensor has torch's own methods until rows are handed out, which is in the same call."""
    for name in ("register_hook", "retain_grad"):
        monkeypatch.setattr(torch.Tensor, name, getattr(gradient_sources, f"_plain_{name}"))

    def body(model: Any) -> list[torch.Tensor]:
        hidden = model.block.norm.input
        loss = model.output.pow(2).sum() + hidden.sin().sum()
        hidden.retain_grad()
        loss.backward(retain_graph=True)
        return [hidden.grad.clone()]

    assert_as_alone("eager", body)


@modes
def test_rows_are_the_tensor_of_the_model(backend: str | None) -> None:
    """The model goes on with its own tensor: modules that work in place, other names of it, and late edits see the same memory."""
    expected = make(None)._module(FIRST)
    model = make(backend)
    with model.trace() as tracer:
        with tracer.invoke(FIRST):
            hidden = model.block.act.input.save()
            output = model.output.save()
        with tracer.invoke(SECOND):
            start = model.start.output
            up = model.block.up.output.save()
            start += 1  # after the norm has read it: only the residual connection sees the edit
            edited = model.output.save()
    torch.testing.assert_close([output, hidden], [expected, hidden.relu()])
    module = model._module
    before = module.start(SECOND)
    after = module.block(before) + 1
    torch.testing.assert_close([edited, up], [module.head(after), module.block.up(module.block.norm(before)).relu()])
    assert tracer.report.graphs == (0 if backend is None else 1)
    assert not tracer.report.breaks


@pytest.mark.parametrize(
    ("mode", "cut"),
    [
        ("eager", ""),
        ("program", ""),
        ("aot_eager", ""),
        # After the cut, a part runs operation by operation.
        pytest.param("aot_eager", "before the edit", marks=pytest.mark.filterwarnings("ignore:In this compiled trace")),
        pytest.param("aot_eager", "after the edit", marks=pytest.mark.filterwarnings("ignore:In this compiled trace")),
    ],
)
def test_the_gradient_of_rows_that_another_invoke_has_copied_in_place(mode: str, cut: str) -> None:
    """The edit has made a new version of the tensor, and the way through the copy is not part of the gradient of that version."""
    model = make("aot_eager" if mode == "aot_eager" else None)
    with pytest.raises(ValueError, match="another invoke has edited their tensor in place"):
        with model.trace(**{"program": True} if mode == "program" else {}) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(FIRST):
                hidden = model.start.output
                source = hidden[:1, -1] * 1
                barrier()
                model.output.sum()
            with tracer.invoke(SECOND):
                barrier()
                if cut == "before the edit":
                    model.start.output.detach().sum().item()
                model.start.output[:, -1] = source
                if cut == "after the edit":
                    model.block.output.detach().sum().item()
                with model.output.pow(2).sum().backward():
                    hidden.grad.save()


@pytest.mark.parametrize("mode", ["eager", "aot_eager", "program"])
def test_the_gradient_of_rows_beside_in_place_edits_of_another_invoke(mode: str) -> None:
    """No gradient flows from the other invoke to these rows. Their own edit counts as that of a tensor without autograd's views."""

    def gradient_of(model: Any) -> torch.Tensor:
        hidden = model.start.output
        if mode != "program":  # a program refuses the gradient of a copy in whose memory another invoke works
            hidden *= 2
        return with_block(model, hidden, model.output.pow(2).sum())[0]

    model = make("aot_eager" if mode == "aot_eager" else None)
    with model.trace(FIRST):
        alone = gradient_of(model).save()
    with model.trace(**{"program": True} if mode == "program" else {}) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(FIRST):
            source = model.start.output[:1, -1].detach().clone()
            barrier()
            together = gradient_of(model).save()
        with tracer.invoke(SECOND):
            barrier()
            model.start.output[:, -1] = source
            output = model.output.save()
    torch.testing.assert_close(together, alone)
    module = model._module
    before = module.start(SECOND)
    before[:, -1] = module.start(FIRST)[:1, -1]
    torch.testing.assert_close(output, module.head(module.block(before)))


class Sided(torch.nn.Module):
    """Returns a second value, on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.side, self.head = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.start(x)
        return self.head(x), self.side(x).mean(-1)


@pytest.mark.parametrize("inputs", [[FIRST], [FIRST, SECOND]])
@modes
def test_a_hook_is_not_called_without_a_gradient(backend: str | None, inputs: list[torch.Tensor]) -> None:
    """Autograd passes None to the hooks of those results of a compiled graph that the loss does not depend on."""
    model: Any = Rows(Sided(), compile=False if backend is None else {"backend": backend})
    seen: list[Any] = []
    with model.trace() as tracer:
        for x in inputs:
            with tracer.invoke(x):
                start = model.start.output
                head = model.head.output
                side = model.side.output
                last = model.output[1]
                held = {"start": start, "side": side, "last": last}
                note = [lambda gradient, name=name: seen.append((name, gradient.shape)) for name in held]
                handles = [tensor.register_hook(hook) for tensor, hook in zip(held.values(), note, strict=True)]
                head.sum().backward(retain_graph=True)
                for handle in handles:
                    handle.remove()
    assert seen == [("start", x.shape) for x in inputs]
