"""Gradients: blocks that run along with a backward pass, compared with autograd.grad and plain tensor hooks."""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nnsight import LanguageModel, NNsight, UncompiledWarning

from ..conftest import Hooks, Rows

X = torch.linspace(-1, 1, 12).view(2, 6)
PROMPT = "The Eiffel Tower is in the city of"
modes = pytest.mark.parametrize("backend", [None, "aot_eager"])
real_graph = pytest.mark.parametrize("backend", [None, "eager"])


class Net(torch.nn.Module):
    """A layer, a residual branch, a last layer: the sum hands one gradient to two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.branch = torch.nn.Linear(6, 6)
        self.norm = torch.nn.Tanh()
        self.last = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.last(self.norm(first + self.branch(first)))


def make(backend: str | None = None) -> NNsight:
    torch.manual_seed(0)
    return NNsight(Net(), compile=False if backend is None else {"backend": backend})


def by_hand(edit: Callable[[str, torch.Tensor], Any] = lambda _, gradient: None) -> dict[str, torch.Tensor]:
    """Run the model by hand with a tensor hook on each value; return gradients by name, parameters included."""
    module = make()._module
    found: dict[str, torch.Tensor] = {}

    def watch(name: str, value: torch.Tensor) -> torch.Tensor:
        def hook(gradient: torch.Tensor) -> Any:
            found[name] = gradient.clone()
            return edit(name, gradient)

        value.register_hook(hook)
        return value

    first = watch("first", module.first(X))
    branch = watch("branch", module.branch(first))
    norm = watch("norm", module.norm(first + branch))
    output = watch("output", module.last(norm))
    output.pow(2).sum().backward()
    return {**found, **{name: parameter.grad for name, parameter in module.named_parameters()}}


def assert_parameters(model: NNsight, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in model._module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@modes
def test_a_loss_without_gradient_is_an_error_before_the_block(backend: str | None) -> None:
    model = make(backend)
    reached: list[int] = []
    with pytest.raises(NotImplementedError, match="does not require grad"), torch.no_grad(), model.trace(X):
        loss = model.output.sum()
        with loss.backward():
            reached.append(1)
    with pytest.raises(NotImplementedError, match="does not require grad"), model.trace(X):
        with model.output.detach().sum().backward():
            reached.append(2)
    with pytest.raises(NotImplementedError, match="does not require grad"):
        with torch.ones(()).backward():
            reached.append(3)
    assert not reached


# -- in functions -----------------------------------------------------------------------------------------------------


def read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.grad.clone()


class Scaled:
    """A method that edits a gradient in place, and one that replaces it."""

    def twice(self, tensor: torch.Tensor) -> None:
        tensor.grad *= 2

    def zeroed(self, tensor: torch.Tensor) -> None:
        tensor.grad = torch.zeros_like(tensor)


@pytest.mark.parametrize("where", [{}, {"remote": "local"}, {"program": True}])
@pytest.mark.parametrize("edit", ["twice", "zeroed"])
@modes
def test_gradients_in_functions_that_the_block_calls(backend: str | None, edit: str, where: dict[str, Any]) -> None:
    model, factor = make(backend), {"twice": 2, "zeroed": 0}[edit]
    expected = by_hand(lambda name, gradient: gradient * factor if name == "norm" else None)
    with model.trace(X, **where):
        first = model.first.output
        norm = model.norm.output
        with model.output.pow(2).sum().backward():
            before = read(norm).save()
            getattr(Scaled(), edit)(norm)
            of_first = read(first).save()
    torch.testing.assert_close(before, by_hand()["norm"])
    torch.testing.assert_close(of_first, expected["first"])
    assert "grad" not in vars(torch.Tensor)


def test_an_optimizer_in_a_backward_block_and_another_thread_read_the_attribute() -> None:
    model, probe = make(), torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.5)
    probe.weight.grad, before = torch.ones(1, 6), probe.weight.detach().clone()
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(probe.weight.grad))
    with model.trace(X):
        norm = model.norm.output
        with model.output.sum().backward():
            optimizer.step()
            thread.start()
            thread.join()
            read(norm)
    torch.testing.assert_close(probe.weight.detach(), before - 0.5)
    assert seen[0] is probe.weight.grad


# -- reading ----------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("announced", [True, False])
def test_gradients_of_several_layers(backend: str | None, announced: bool) -> None:
    """A backward pass in the block shows autograd all tensors that the block still holds, also those without `requires_grad_`."""
    model, expected = make(backend), by_hand()
    for _ in range(2):
        model._module.zero_grad()
        with model.trace(X) as tracer:
            first = model.first.output
            if announced:
                first.requires_grad_()
            norm = model.norm.output
            if announced:
                norm.requires_grad_()
            loss = model.output.pow(2).sum()
            with loss.backward():
                of_norm = norm.grad.clone().save()
                of_first = first.grad.clone().save()
        assert tracer.report.mode == ("eager" if backend is None else "compiled")
        torch.testing.assert_close(of_norm, expected["norm"])
        torch.testing.assert_close(of_first, expected["first"])
        assert of_first.abs().sum() > 0
        assert_parameters(model, expected)
    if backend is not None and not announced:
        assert tracer.report.breaks == []
        assert tracer.report.compiles == 0, "the second run finds the parts of the first"


class Shared(torch.nn.Module):
    """Several modules take one tensor; what the last of them takes is asked for when the others have run."""

    def __init__(self) -> None:
        super().__init__()
        self.make = torch.nn.Linear(6, 6)
        self.early = torch.nn.Linear(6, 6)
        self.same = torch.nn.Identity()
        self.late = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.make(x)
        early = self.early(made).tanh()
        return early * self.late(self.same(made)) + made


def shared(backend: str | None) -> tuple[NNsight, Any]:
    """Return the model, and a function from an edit of the shared tensor to what its gradient is by hand."""
    torch.manual_seed(0)
    module = Shared()

    def by_autograd(edit: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        made = module.make(X)
        early = module.early(made).tanh()
        seen = edit(made)
        loss = (early * module.late(seen) + seen).pow(2).sum()
        return torch.autograd.grad(loss, seen)[0]

    return NNsight(module, compile=False if backend is None else {"backend": backend}), by_autograd


backends = pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])


@backends
@pytest.mark.parametrize("announced", [True, False])
def test_an_input_that_modules_took_before(backend: str | None, announced: bool) -> None:
    model, by_autograd = shared(backend)
    with model.trace(X):
        seen = model.late.input
        if announced:
            seen.requires_grad_()
        with model.output.pow(2).sum().backward():
            found = seen.grad.clone().save()
    torch.testing.assert_close(found, by_autograd(lambda made: made))


@backends
def test_a_gradient_that_is_replaced_flows_on_to_all(backend: str | None) -> None:
    model, _ = shared(backend)
    with model.trace(X):
        seen = model.late.input.requires_grad_()
        with model.output.pow(2).sum().backward():
            seen.grad = torch.ones(2, 6)
    (expected,) = torch.autograd.grad(model._module.make(X).sum(), model._module.make.weight)
    torch.testing.assert_close(model._module.make.weight.grad, expected)


@backends
def test_an_augmented_assignment_behind_requires_grad(backend: str | None) -> None:
    model, _ = shared(backend)
    with model.trace(X):
        made = model.make.output
        made.requires_grad_()
        made *= 2.0
        with model.output.pow(2).sum().backward():
            found = made.grad.clone().save()
    module = model._module
    made = module.make(X) * 2.0
    loss = (module.early(made).tanh() * module.late(made) + made).pow(2).sum()
    torch.testing.assert_close(found, torch.autograd.grad(loss, made)[0])


@backends
def test_an_edit_in_place_before_the_backward_pass(backend: str | None) -> None:
    model, _ = shared(backend)
    with model.trace(X):
        made = model.make.output
        made[:, 1:3] = made[:, 1:3] * 3.0
        part = made[:, :2]
        with model.output.pow(2).sum().backward():
            found = made.grad.clone().save()
    module = model._module
    made = module.make(X)
    made = torch.cat([made[:, :1], made[:, 1:3] * 3.0, made[:, 3:]], 1)
    loss = (module.early(made).tanh() * module.late(made) + made).pow(2).sum()
    torch.testing.assert_close(found, torch.autograd.grad(loss, made)[0])


@backends
def test_a_cut_before_the_backward_pass(backend: str | None) -> None:
    """Printing a value cuts the graph: what the block holds is shown to autograd there, too, because a backward pass comes later."""
    model, by_autograd = shared(backend)
    expected = by_autograd(lambda made: made)
    with model.trace(X):
        made = model.make.output
        late = model.late.output
        print(float(late.detach().sum()))
        with model.output.pow(2).sum().backward():
            found = made.grad.clone().save()
    torch.testing.assert_close(found, expected)


@backends
def test_a_backward_pass_that_the_text_of_the_block_does_not_show(backend: str | None) -> None:
    """What has gone into one piece by then, autograd cannot tell apart; the error says how to let it."""
    model, by_autograd = shared(backend)
    expected = by_autograd(lambda made: made)
    error = contextlib.nullcontext() if backend is None else pytest.raises(ValueError, match="cannot be computed")

    def gradient_of(tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        (found,) = torch.autograd.grad(loss, tensor)
        return found

    with error:
        with model.trace(X):
            made = model.make.output
            late = model.late.output
            print(float(late.detach().sum()))
            found = gradient_of(made, model.output.pow(2).sum()).save()
        torch.testing.assert_close(found, expected)


class Normalized(torch.nn.Module):
    """A layer, batch normalisation and a head: what the graph shows of the second is that it may edit what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.norm = torch.nn.BatchNorm2d(3)
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.parametrize("train", [False, True])
@modes
def test_batch_normalisation_behind_the_tensor(backend: str | None, train: bool) -> None:
    torch.manual_seed(0)
    module, x = Normalized().train(train), torch.randn(2, 2, 6, 6)
    seen: dict[str, torch.Tensor] = {}
    handle = module.conv.register_forward_hook(lambda _, __, out: seen.update(out=out))
    (expected,) = torch.autograd.grad(module(x)[:, 1].sum(), seen["out"])
    handle.remove()
    model = NNsight(module, compile=False if backend is None else {"backend": backend})
    with model.trace(x) as tracer:
        activation = model.conv.output
        with model.output[:, 1].sum().backward():
            found = activation.grad.save()
    torch.testing.assert_close(found, expected)
    assert not tracer.report.notes


class Broken(torch.nn.Module):
    """Two parts with a break of the graph between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x).tanh())
        torch._dynamo.graph_break()
        return self.three(x.tanh())


@modes
def test_a_model_of_several_graphs(backend: str | None) -> None:
    torch.manual_seed(0)
    module = Broken()
    one = module.one(X)
    two = module.two(one.tanh())
    expected = torch.autograd.grad(module.three(two.tanh()).pow(2).sum(), [one, two])
    model = NNsight(module, compile=False if backend is None else {"backend": backend})
    with model.trace(X):
        first, second = model.one.output, model.two.output
        with model.output.pow(2).sum().backward():
            of_second = second.grad.save()
            of_first = first.grad.save()
    torch.testing.assert_close((of_first, of_second), expected)


@modes
def test_a_backward_pass_in_an_invoke_behind_a_cut(backend: str | None) -> None:
    """The text that shows the backward pass is that of the invoke."""
    model, module = make(backend), make()._module
    first = module.first(X)
    hidden = module.norm(first + module.branch(first))
    (expected,) = torch.autograd.grad(module.last(hidden).pow(2).sum(), first)
    with model.trace() as tracer:
        with tracer.invoke(X):
            early = model.first.output
            late = model.norm.output
            print(float(late.detach().sum()))
            with model.output.pow(2).sum().backward():
                found = early.grad.clone().save()
    torch.testing.assert_close(found, expected)


@modes
def test_an_edit_of_what_a_backward_pass_would_need(
    backend: str | None, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """ReLU keeps its result for the backward pass. Without that pass the edit is allowed, and the graph is lowered.

    The first attempt to trace the backward pass fails, which nobody needs to see.
    """
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6))
    model = NNsight(module, compile=False if backend is None else {"backend": backend})
    with model.trace(X):
        model[1].output[:, 0] = 0.0
        out = model.output.save()
    hidden = module[1](module[0](X)).detach().clone()
    hidden[:, 0] = 0.0
    torch.testing.assert_close(out, module[2](hidden))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not [one for one in recwarn if "Error detected" in str(one.message)]
    assert not [each for each in warnings.filters if "Error detected" in str(each)]


@modes
def test_frozen_parameters_and_a_tensor_made_to_require_gradients(backend: str | None) -> None:
    """Without gradients of parameters the tensor is a leaf, where the graph of autograd begins."""
    model = make(backend)
    model._module.requires_grad_(False)
    with model.trace(X):
        first = model.first.output
        first.requires_grad_(True)
        with model.output.pow(2).sum().backward():
            found = first.grad.clone().save()
    torch.testing.assert_close(found, by_hand()["first"])
    assert all(parameter.grad is None for parameter in model._module.parameters())


@real_graph
def test_gradient_of_the_loss_and_of_a_parameter(backend: str | None) -> None:
    model = make(backend)
    with model.trace(X):
        out = model.output.requires_grad_()
        loss = out.pow(2).sum()
        weight = model.first.weight
        with loss.backward():
            of_loss = loss.grad.save()
            of_out = out.grad.save()
            of_weight = weight.grad.save()
    expected = by_hand()
    assert of_loss.item() == 1.0
    assert torch.equal(of_out, expected["output"])
    assert torch.equal(of_weight, expected["first.weight"])


@modes
def test_an_outer_tensor_that_a_block_added(backend: str | None) -> None:
    model = make(backend)
    vector = torch.full((6,), 0.5, requires_grad=True)
    with model.trace(X):
        model.first.output = model.first.output + vector
        with model.output.sum().backward():
            found = vector.grad.clone().save()
    module = model._module
    other = vector.detach().clone().requires_grad_()
    first = module.first(X) + other
    (expected,) = torch.autograd.grad(module.last(module.norm(first + module.branch(first))).sum(), other)
    torch.testing.assert_close(found, expected)


@modes
def test_two_passes_with_retain_graph(backend: str | None) -> None:
    model = make(backend)
    with model.trace(X):
        first = model.first.output
        first.requires_grad_()
        loss = model.output.pow(2).sum()
        with loss.backward(retain_graph=True):
            once = first.grad.clone().save()
        with (loss * 3).backward():
            thrice = first.grad.clone().save()
    expected = by_hand()
    torch.testing.assert_close(once, expected["first"])
    torch.testing.assert_close(thrice, 3 * expected["first"])
    torch.testing.assert_close(model._module.first.weight.grad, 4 * expected["first.weight"])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@modes
@pytest.mark.parametrize("by", ["grad", "backward"])
def test_the_gradient_of_a_gradient(backend: str | None, by: str) -> None:
    """A penalty on a gradient, as energy models and Jacobian probes have it."""
    model = make(backend)
    warned = contextlib.nullcontext() if backend is None else pytest.warns(UncompiledWarning, match="`create_graph`, and no compiled graph")
    with warned, model.trace(X):
        first = model.first.output
        loss = model.output.pow(3).sum()
        if by == "grad":
            (slope,) = torch.autograd.grad(loss, first, create_graph=True)
        else:
            with loss.backward(create_graph=True, inputs=[first]):
                slope = first.grad
        with slope.pow(2).sum().backward():
            found = first.grad.clone().save()
    module = model._module
    start = module.first(X)
    (slope,) = torch.autograd.grad(module.last(module.norm(start + module.branch(start))).pow(3).sum(), start, create_graph=True)
    (expected,) = torch.autograd.grad(slope.pow(2).sum(), start)
    torch.testing.assert_close(found, expected)


@modes
def test_a_block_of_its_own_after_the_trace(backend: str | None) -> None:
    model = make(backend)
    with model.trace(X):
        first = model.first.output.requires_grad_().save()
        out = model.output.save()
    with out.pow(2).sum().backward():
        found = first.grad.clone().save()
        dropped = first.grad.clone()
    torch.testing.assert_close(found, by_hand()["first"])
    with pytest.raises(UnboundLocalError):
        print(dropped)


@real_graph
def test_arguments_reach_backward(backend: str | None) -> None:
    model = make(backend)
    weights = torch.linspace(0, 1, 12).view(2, 6)
    with model.trace(X):
        first = model.first.output.requires_grad_()
        out = model.output
        with out.backward(weights, inputs=[first]):
            found = first.grad.save()
    module = model._module
    assert module.first.weight.grad is None, "only `inputs` accumulate"
    leaf = module.first(X).detach().requires_grad_()
    (expected,) = torch.autograd.grad(module.last(module.norm(leaf + module.branch(leaf))), leaf, weights)
    assert torch.equal(found, expected)


def test_code_after_the_block_sees_its_variables() -> None:
    model = make()
    with model.trace(X):
        first = model.first.output
        out = model.output
        with out.sum().backward():
            inner = first.grad.norm()
        doubled = (inner * 2).save()
        same = model.output.save()
    module = make()._module
    found = module.first(X)
    (expected,) = torch.autograd.grad(module.last(module.norm(found + module.branch(found))).sum(), found)
    assert torch.equal(doubled, expected.norm() * 2)
    assert torch.equal(same, module(X))


@real_graph
def test_the_trace_goes_on_after_the_block(backend: str | None) -> None:
    """A backward pass in the middle of the forward pass; what it found steers the rest."""
    model = make(backend)
    with model.trace(X):
        first = model.first.output.requires_grad_()
        with first.pow(2).sum().backward(retain_graph=True):
            slope = first.grad.clone()
        model.norm.output = model.norm.output - slope
        out = model.output.save()
    module = model._module
    hidden = module.first(X)
    assert torch.equal(out, module.last(module.norm(hidden + module.branch(hidden)) - 2 * hidden))


def test_a_block_in_each_invoke() -> None:
    torch.manual_seed(0)
    model = Rows(Net())
    with model.trace() as tracer:
        with tracer.invoke(X[:1]):
            one = model.first.output.requires_grad_()
            with model.output.pow(2).sum().backward(retain_graph=True):
                of_one = one.grad.save()
        with tracer.invoke(X[1:]):
            two = model.norm.output
            with model.output.pow(2).sum().backward():
                of_two = two.grad.save()
    assert of_one.shape == (1, 6)
    expected = by_hand()
    torch.testing.assert_close(of_one, expected["first"][:1])
    torch.testing.assert_close(of_two, expected["norm"][1:])


# -- editing ----------------------------------------------------------------------------------------------------------


@modes
def test_an_assigned_gradient_flows_on(backend: str | None) -> None:
    model = make(backend)
    with model.trace(X):
        first = model.first.output.requires_grad_()
        norm = model.norm.output.requires_grad_()
        with model.output.pow(2).sum().backward():
            norm.grad = norm.grad * 2
            found = first.grad.clone().save()
    expected = by_hand(lambda name, gradient: gradient * 2 if name == "norm" else None)
    torch.testing.assert_close(found, expected["first"])
    assert not torch.equal(found, by_hand()["first"])
    assert_parameters(model, expected)


@modes
def test_a_gradient_edited_in_place(backend: str | None) -> None:
    model = make(backend)
    with model.trace(X):
        norm = model.norm.output.requires_grad_()
        with model.output.pow(2).sum().backward():
            norm.grad[:, :3] = 0
    expected = by_hand(lambda name, g: torch.cat([g[:, :3] * 0, g[:, 3:]], 1) if name == "norm" else None)
    assert_parameters(model, expected)
    assert not torch.equal(expected["first.weight"], by_hand()["first.weight"])


def test_editing_one_gradient_in_place_leaves_its_twin_alone() -> None:
    """The backward of a sum hands one tensor to both its terms; only the one that was edited may change."""
    model = make()
    with model.trace(X):
        branch = model.branch.output
        with model.output.pow(2).sum().backward():
            branch.grad[:] = 0
    expected = by_hand(lambda name, gradient: torch.zeros_like(gradient) if name == "branch" else None)
    assert expected["first.weight"].abs().sum() > 0
    assert_parameters(model, expected)


def test_an_expanded_gradient_can_be_edited_in_place() -> None:
    """The gradient of a sum is one number, expanded."""
    model = make()
    with model.trace(X):
        out = model.output
        with out.sum().backward():
            out.grad[:, 0] = 0
    expected = torch.tensor([0.0, 2, 2, 2, 2, 2])
    assert torch.equal(model._module.last.bias.grad, expected)


# -- language models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_gradients_of_the_residual_stream(lm: LanguageModel, compile: bool) -> None:
    answer = lm.tokenizer.encode(" Paris")[0]
    with lm.trace(PROMPT, compile=compile):
        hidden = lm.transformer.h[1].output
        hidden.requires_grad_()
        logits = lm.lm_head.output
        with logits[0, -1, answer].backward():
            found = hidden.grad.clone().save()

    hooks = Hooks(lm._module)
    hooks.output("transformer.h.1", lambda out: hooks.seen.update(hidden=out))
    logits = hooks(lm.tokenizer(PROMPT, return_tensors="pt").input_ids).logits
    (expected,) = torch.autograd.grad(logits[0, -1, answer], hooks.seen["hidden"])
    lm._module.zero_grad()
    assert expected.abs().sum() > 0
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


# -- plain use --------------------------------------------------------------------------------------------------------


def test_grad_outside_of_backward_blocks_is_the_attribute() -> None:
    class Holder:
        grad = 3

    model = make()
    leaf = torch.ones(2, 6, requires_grad=True)
    (leaf * 2).sum().backward()
    with model.trace(X):
        found = leaf.grad.save()
        leaf.grad = None
        other = [Holder().grad].save()
        out = model.output
        with out.sum().backward():
            inside = [Holder().grad].save()
    assert torch.equal(found, torch.full((2, 6), 2.0))
    assert leaf.grad is None
    assert (other, inside) == ([3], [3])


# -- misuse -----------------------------------------------------------------------------------------------------------


def lines_of(error: BaseException) -> tuple[str, str | None]:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.line


def assert_clean(model: NNsight, *tensors: torch.Tensor) -> None:
    for module in model._module.modules():
        assert "_call_impl" not in module.__dict__
        assert "_compiled_call_impl" not in module.__dict__
        assert not module._forward_hooks
        assert not module._backward_hooks
    for tensor in (*tensors, *model._module.parameters()):
        assert not tensor._backward_hooks


@modes
def test_forward_order_is_out_of_order(backend: str | None) -> None:
    model = make(backend)
    with pytest.raises(ValueError, match="was (missed|not provided)") as raised:
        with model.trace(X):
            first = model.first.output.requires_grad_().save()
            norm = model.norm.output.requires_grad_().save()
            with model.output.sum().backward():
                first.grad.clone()
                norm.grad.clone()
    assert type(raised.value).__name__ == "OutOfOrderError"
    assert "reverse" in str(raised.value), "the message names the cause for gradients"
    assert lines_of(raised.value) == (__file__, "norm.grad.clone()")
    assert_clean(model, first, norm)


def test_results_of_one_compiled_graph_outside_of_the_trace() -> None:
    """A trace that knows nothing of a backward pass is one graph, in which autograd sees no tensor but its results."""
    model = make("aot_eager")
    with model.trace(X):
        first = model.first.output.save()
        out = model.output.save()
    with pytest.raises(ValueError, match=r"cannot be computed.*requires_grad_\(\)") as raised:
        with (out.sum() + first.sum()).backward():  # the gradient of the second part alone would be wrong
            first.grad.save()
    assert lines_of(raised.value) == (__file__, "first.grad.save()")
    assert_clean(model, first)
    with model.trace(X):  # and the model still works
        first = model.first.output.requires_grad_()
        with model.output.pow(2).sum().backward():
            found = first.grad.clone().save()
    torch.testing.assert_close(found, by_hand()["first"])


def retained(loss: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    tensor.retain_grad()
    loss.backward()
    return tensor.grad


def hooked(loss: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    tensor.register_hook(seen.append)
    loss.backward()
    return seen[0]


#: Ways to ask torch for the gradient of a loss with respect to a tensor.
ASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "grad": lambda loss, tensor: torch.autograd.grad(loss, tensor)[0],
    "allow_unused": lambda loss, tensor: torch.autograd.grad(loss, tensor, allow_unused=True)[0],
    "edge": lambda loss, tensor: torch.autograd.grad(torch.autograd.graph.get_gradient_edge(loss), tensor)[0],
    "inputs": lambda loss, tensor: (loss.backward(inputs=[tensor]), tensor.grad)[1],  # type: ignore[func-returns-value]
    "retain_grad": retained,
    "hook": hooked,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("added", [False, True], ids=["other results", "all"])
def test_torch_gives_no_part_of_a_gradient(ask: str, added: bool) -> None:
    """After the trace, autograd sees the way from the tensor to the loss outside of the graph, but not the way inside."""
    model = make("aot_eager")
    for _ in range(3):  # the third is a replay
        with model.trace(X):
            first = model.first.output.save()
            out = model.output.save()
        with pytest.raises(ValueError, match=r"cannot be computed.*requires_grad_\(\)"):
            ASKS[ask](out.sum() + first.sum() if added else out.sum(), first)
    with model.trace(X):
        first = model.first.output.requires_grad_().save()
        out = model.output.save()
    torch.testing.assert_close(ASKS[ask](out.pow(2).sum(), first), by_hand()["first"])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("ask", ASKS)
def test_torch_gives_a_gradient_that_is_complete(ask: str) -> None:
    """The loss depends on the tensor alone."""
    model = make("aot_eager")
    with model.trace(X):
        first = model.first.output.save()
        model.output.save()
    torch.testing.assert_close(ASKS[ask](first.pow(2).sum(), first), 2 * first.detach())


def test_torch_gives_the_gradient_of_a_tensor_that_was_edited_after_the_trace() -> None:
    """No result of the graph depends on the edited values."""
    model = make("aot_eager")
    with model.trace(X):
        first = model.first.output.save()
        out = model.output.save()
    first.mul_(2)
    (found,) = torch.autograd.grad(out.sum() + first.pow(2).sum(), first)
    torch.testing.assert_close(found, 2 * first.detach())


def test_a_replayed_trace_refuses_the_same() -> None:
    model = make("aot_eager")
    for turn in range(3):
        with model.trace(X) as tracer:
            first = model.first.output.save()
            out = model.output.save()
        assert tracer.report.replayed == (turn > 0)
        with pytest.raises(ValueError, match="cannot be computed"):
            with out.sum().backward():
                first.grad.save()


@modes
def test_locations_of_the_model_inside_the_block(backend: str | None) -> None:
    model = make(backend)
    with pytest.raises(ValueError, match=r"Cannot request `model\.output` in a backwards tracer") as raised:
        with model.trace(X):
            first = model.first.output.requires_grad_().save()
            with first.sum().backward():
                model.output.save()
    assert lines_of(raised.value) == (__file__, "model.output.save()")
    assert_clean(model, first)


@modes
def test_an_exception_in_the_block(backend: str | None) -> None:
    model = make(backend)
    with pytest.raises(ZeroDivisionError) as raised:
        with model.trace(X):
            first = model.first.output.requires_grad_().save()
            norm = model.norm.output.requires_grad_().save()
            out = model.output.save()
            with out.sum().backward():
                kept = norm.grad.clone().save()
                first.grad / (1 // 0)
    assert lines_of(raised.value) == (__file__, "first.grad / (1 // 0)")
    text = "".join(traceback.format_exception(raised.value))
    assert "mediator" not in text
    assert "_SkipBody" not in text
    assert kept.shape == (2, 6)
    assert_clean(model, first, norm, out)


@modes
def test_hooks_go_with_the_block(backend: str | None) -> None:
    model = make(backend)
    with model.trace(X):
        first = model.first.output.requires_grad_().save()
        loss = model.output.pow(2).sum().save()
        with loss.backward(retain_graph=True):
            first.grad = first.grad * 0
    assert_clean(model, first, loss)
    model._module.zero_grad()
    loss.backward()  # plain torch: nothing is edited any more
    assert_parameters(model, by_hand())


def test_nothing_keeps_the_tensors_alive(no_gc: None) -> None:
    model = make()
    with model.trace(X):
        first = model.first.output.save()
        with model.output.sum().backward():
            found = first.grad.save()
    references = [weakref.ref(first), weakref.ref(found)]
    del first, found
    assert [reference() for reference in references] == [None, None]
    gc.collect()


def test_two_threads() -> None:
    model = make()
    expected = by_hand()["first"]
    found: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                with model.trace(X):
                    first = model.first.output
                    with (model.output.pow(2).sum() * number).backward():
                        value = first.grad.save()
                found[number] = value
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for number in (1, 2):
        torch.testing.assert_close(found[number], number * expected)


def test_backward_with_and_without_a_block() -> None:
    """Also of tensors that no model has made."""
    make()  # tensors have such blocks from the first wrapped model on
    x = torch.rand(3, requires_grad=True)
    first = x * 2
    second = first**2
    with second.sum().backward(retain_graph=True):
        of_second = second.grad.save()
        first.grad = first.grad * 10
        of_first = first.grad.save()
    assert torch.equal(of_second, torch.ones(3))
    assert torch.equal(of_first, (2 * first * 10).detach())
    assert torch.equal(x.grad, (2 * first * 10 * 2).detach())
    x.grad = None
    assert second.sum().backward() is None
    assert torch.equal(x.grad, (2 * first * 2).detach())


@real_graph
@pytest.mark.parametrize("later", [{}, {"retain_graph": True}])
@pytest.mark.parametrize("block", ["with", "call", "grad"])
def test_invokes_that_need_the_graph_of_another(backend: str | None, later: dict[str, Any], block: str) -> None:
    """Autograd's own error does not say that invokes share a graph."""
    model = Rows(Net(), compile=False if backend is None else {"backend": backend})

    def differentiate(**how: Any) -> None:
        if block == "call":
            model.output.sum().backward(**how)
            return
        hidden = model.first.output
        if block == "grad":
            torch.autograd.grad(model.output.sum(), hidden, **how)
            return
        with model.output.sum().backward(**how):
            hidden.grad.clone()

    with pytest.raises(RuntimeError, match=r"share one autograd graph.*`retain_graph=True`.*torch\.autograd: Trying to backward"):
        with model.trace() as tracer:
            with tracer.invoke(X):
                differentiate()
            with tracer.invoke(X):
                differentiate(**later)


@real_graph
def test_rows_of_a_frozen_model_that_require_gradients(backend: str | None) -> None:
    """The model continues with the rows for which an invoke has called `requires_grad_`."""
    torch.manual_seed(0)
    model = Rows(Net().requires_grad_(False), compile=False if backend is None else {"backend": backend})
    with model.trace() as tracer:
        with tracer.invoke(X[:1]):
            first = model.first.output.requires_grad_()
            with model.output.sum().backward(retain_graph=True):
                one = first.grad.save()
        with tracer.invoke(X):
            other = model.first.output.requires_grad_()
            with model.output.pow(2).sum().backward():
                two = other.grad.save()
    net = model._module
    for x, found, loss in ((X[:1], one, lambda y: y.sum()), (X, two, lambda y: y.pow(2).sum())):
        hidden = net.first(x).requires_grad_()
        (expected,) = torch.autograd.grad(loss(net.last(net.norm(hidden + net.branch(hidden)))), hidden)
        torch.testing.assert_close(found, expected)
