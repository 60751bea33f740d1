"""Programs that the fuzzer found, each as small as it could be made; the names say what was wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight import NNsight, fx

from ..conftest import Rows

#: Lowerings: by default the quick one that does what Inductor does before it generates code.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]

#: For blocks with a part that runs operation by operation, so that autograd sees all of it.
UNCOMPILED = pytest.mark.filterwarnings("ignore:In this compiled trace:nnsight.UncompiledWarning")


class Twin(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _model() -> tuple[Twin, NNsight]:
    torch.manual_seed(0)
    net = Twin()
    return net, NNsight(net, compile={"backend": "eager"})


def test_a_call_may_return_another_number_of_tensors_for_another_size() -> None:
    net, model = _model()

    def run(x: torch.Tensor) -> tuple[Any, Any, Any]:
        with torch.no_grad(), model.trace(x) as tracer:
            hidden = model.body.output
            rows = [part * 2.0 for part in hidden.unbind(0)]
            first = rows[0].save()
            last = rows[-1].save()
            doubled = (hidden + 1.0).save()
        return (first, last, doubled), tracer, x

    for batch in (2, 3, 5, 3):
        found, _, x = run(torch.randn(batch, 4))
        with torch.no_grad():
            hidden = net.body(x)
        expected = (hidden[0] * 2.0, hidden[-1] * 2.0, hidden + 1.0)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
    fx.counters.reset()
    run(torch.randn(5, 4))
    assert fx.counters.recordings == fx.counters.compiles == 0, "the program of each size is known"


@pytest.mark.parametrize("compile", [False, True])
def test_the_gradient_of_an_unused_view_of_what_was_edited(compile: bool) -> None:
    """Registering a hook on such a view, untouched since the edit, ends the process, in torch itself."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    model = NNsight(net, compile={"backend": "eager"})
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="does not flow through this tensor"):
        with model.trace(x, compile=compile):
            hidden = model[0].output
            first = hidden[:2]
            hidden *= 2.0
            with model.output.sum().backward():
                first.grad.save()


class Counted(torch.nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        return x * self.calls


def test_a_module_that_rebinds_a_buffer_in_place_can_be_skipped() -> None:
    net = torch.nn.Sequential(Counted(), torch.nn.Tanh())
    model = NNsight(net, compile={"backend": "eager"})
    x = torch.randn(2, 4)
    for compile in (False, True, True):
        with torch.no_grad(), model.trace(x, compile=compile):
            model[0].skip(x * 3.0)
            out = model.output.save()
        torch.testing.assert_close(out, torch.tanh(x * 3.0), rtol=0.0, atol=0.0)
        assert net[0].calls == 0.0, "it did not run"
    with torch.no_grad(), model.trace(x):
        model.output.save()
    assert net[0].calls == 1.0


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Tanh()
        self.right = torch.nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(x)


def test_an_edit_behind_a_cut_of_a_view_from_before() -> None:
    """The piece behind the cut gets the value and the view as two inputs that share memory."""
    model = NNsight(Product(), compile={"backend": "aot_eager"})
    with torch.no_grad():
        for rows in (3, 7, 8):
            model(torch.rand(rows, 4))  # sizes are symbolic from here on
        for rows in (5, 6, 5):
            x = torch.rand(rows, 4) + 1.0
            with model.trace(x):
                model.input = model.input.cumsum(1)
                part = model.left.input[:3]
                if part.sum() > 0:
                    part.add_(100.0)
                seen = model.right.input.clone().save()
                out = model.output.save()
            expected = x.cumsum(1)
            expected[:3] += 100.0
            torch.testing.assert_close(seen, expected, rtol=0.0, atol=0.0)
            torch.testing.assert_close(out, torch.tanh(expected) * torch.sigmoid(expected))


def test_an_external_that_is_a_view_of_the_input_and_is_edited() -> None:
    """Which tensors share memory decides what a lowering may be used for."""
    model = NNsight(Product(), compile={"backend": "aot_eager"})

    def run(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        with model.trace(x):
            value = model.left.input
            other += value[:2].sum()
            seen = model.right.input.clone().save()
        return seen

    with torch.no_grad():
        for shared in (False, True, False, True):
            x = torch.ones(4, 4)
            other = x[:2] if shared else torch.zeros(2, 4)
            expected = torch.ones(4, 4)
            if shared:
                expected[:2] += 8.0
            torch.testing.assert_close(run(x, other), expected, rtol=0.0, atol=0.0)


class Counts(torch.nn.Module):
    """Counts its calls in a buffer, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        self.calls += 1
        hidden = torch.tanh(hidden) * 2.0
        torch._dynamo.graph_break()
        return self.second(hidden)


def test_an_edit_of_what_comes_from_another_graph_into_one_that_edits_a_buffer() -> None:
    """A lowered graph would return the buffer in the place of the hidden state."""
    torch.manual_seed(0)
    net, x = Counts(), torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    model = NNsight(net, compile={"backend": "aot_eager"})
    for count in (1, 2, 3):
        with model.trace(x) as tracer:
            model.first.output.mul_(2.0)
            hidden = model.second.input.save()
            out = model.output.save()
        expected = torch.tanh(net.first(x) * 2.0) * 2.0
        torch.testing.assert_close(hidden, expected)
        torch.testing.assert_close(out, net.second(expected))
        assert net.calls == count and tracer.report.mode == "compiled"


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda model: model.no_such_module, AttributeError),
        (lambda model: model.first[999], (IndexError, TypeError)),
        (lambda model: model[999].output.save(), IndexError),
        (lambda model: model.first.source.no_such_call_0, (AttributeError, ValueError)),
    ],
    ids=["attribute", "index", "index of the model", "operation"],
)
def test_what_a_block_did_before_a_mistake_in_a_path_is_done(mistake: Any, error: Any, compile: bool) -> None:
    """The path is followed when the block gets there, and not when the block is looked through before."""
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), compile={"backend": "eager"}, rename={"0": "first"})
    for _ in range(2):
        done: list[str] = []
        with pytest.raises(error), model.trace(torch.ones(2, 4), compile=compile):
            done.append("begun")
            model[1].output.save()
            mistake(model)
        assert done == ["begun"]


class Adds(torch.nn.Module):
    """Adds what its child makes of its argument; perhaps breaks the graph."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.inner, self.breaks = torch.nn.Tanh(), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + y


@pytest.mark.filterwarnings("ignore:torch._dynamo hit")
@pytest.mark.parametrize("breaking", [{1}, set(range(6))], ids=["one", "all"])
def test_modules_of_one_class_around_a_break_keep_their_paths(breaking: set[int]) -> None:
    """Dynamo captures each of them by itself, and took the graph of one for another."""
    torch._dynamo.reset()
    net = torch.nn.Sequential(*(Adds(number in breaking) for number in range(6)))
    model = NNsight(net, compile={"backend": "eager"})
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    with torch.no_grad():
        for reads in (range(6), (5,), (2, 4)):
            kept: dict[int, torch.Tensor] = {}
            with model.trace(x):
                for number in reads:
                    model[number].inner.output += number
                    kept[number] = model[number].inner.output
                out = model.output.save()
            hidden = x
            for number in range(6):
                y = net[number].inner(hidden)
                if number in reads:
                    y = y + number
                    assert torch.equal(kept[number], y)
                hidden = hidden + y
            assert torch.equal(out, hidden)


class Passes(torch.nn.Module):
    """Several modules are given one tensor, and one of them returns it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.drop = torch.nn.Tanh(), torch.nn.Identity(), torch.nn.Dropout(0.5)
        self.again = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        same, again = self.same(x), self.again(x)
        return same + self.first(again) * self.drop(again)


@pytest.mark.parametrize("compile", [False, True])
def test_a_tensor_that_goes_on_under_several_names_behind_a_cut(compile: bool) -> None:
    """The graph behind the cut takes it once, and knows it by each of its names."""
    model = NNsight(Passes().eval(), compile={"backend": "eager"})
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    with torch.no_grad(), model.trace(x, compile=compile):
        model.first.input = torch.ones(2, 4)
        hidden = model.drop.input
        if hidden.sum() < 100:
            hidden += 1.0
        out = model.output.save()
    edited = x * 2 + 1
    torch.testing.assert_close(out, edited + torch.ones(2, 4).tanh() * edited)


def _edits_a_vector(model: Any, vector: torch.Tensor) -> None:
    vector.add_(model[0].output.detach().sum(0))


def _edits_a_view(model: Any, vector: torch.Tensor) -> None:
    hidden = model[0].output.detach()
    vector[:2].mul_(hidden[0, :2])


def _edits_unseen(model: Any, vector: torch.Tensor) -> None:
    hidden = model[0].output.detach()
    with torch.no_grad():
        vector.add_(hidden[0])


@pytest.mark.parametrize("block", [_edits_a_vector, _edits_a_view, _edits_unseen])
def test_autograd_forbids_the_edit_of_a_leaf(block: Any) -> None:
    """Backends that lower ahead of time made the edit."""
    found: list[tuple[str, torch.Tensor]] = []
    for compile in (False, True, True):
        torch.manual_seed(0)
        model = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), compile={"backend": "aot_eager"})
        vector, message = torch.ones(4, requires_grad=True), ""
        try:
            with model.trace(torch.ones(3, 4), compile=compile):
                block(model, vector)
        except RuntimeError as error:
            message = str(error).splitlines()[0]
        found.append((message, vector.detach()))
    assert ("leaf Variable that requires grad" in found[0][0]) == (block is not _edits_unseen)
    for message, vector in found[1:]:
        assert message == found[0][0]
        assert torch.equal(vector, found[0][1])


def test_the_same_block_edits_a_leaf_or_what_comes_from_one() -> None:
    """They differ in nothing that the program of a block is found by."""
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), compile={"backend": "aot_eager"})

    def add_to(vector: torch.Tensor) -> None:
        with model.trace(torch.ones(3, 4)):
            vector.add_(model[0].output.detach().sum(0))

    leaf = torch.ones(4, requires_grad=True)
    for _ in range(2):
        vector = leaf * 2
        expected = vector + model._module[0](torch.ones(3, 4)).sum(0)
        add_to(vector)
        torch.testing.assert_close(vector, expected)
        vector.sum().backward()
        assert leaf.grad is not None
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            add_to(leaf)
        assert torch.equal(leaf, torch.ones(4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_view_and_what_was_detached_from_it_are_results_of_one_graph(backend: str) -> None:
    """Ahead-of-time autograd made the one of the other by the view functions, so ``x.T.detach()`` was ``x``."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = NNsight(module, compile={"backend": backend})
    x = torch.randn(4, 4)
    for _ in range(2):
        with model.trace(x):
            turned = (model[0].output * 2).T.save()
            kept = turned.detach().save()
            rows = model[1].output.relu()[1:3].save()
            kept_rows = rows.detach().save()
        hidden = module[0](x)
        torch.testing.assert_close(turned, hidden.T * 2)
        torch.testing.assert_close(kept, hidden.detach().T * 2)
        torch.testing.assert_close(kept_rows, module[1](hidden).relu()[1:3].detach())
        assert rows.requires_grad and not kept.requires_grad and not kept_rows.requires_grad
        found = torch.autograd.grad(turned[0].square().sum() + rows.sum(), module[0].weight)
        expected = torch.autograd.grad((hidden.T * 2)[0].square().sum() + module[1](hidden).relu()[1:3].sum(), module[0].weight)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_that_is_used_on_both_sides_of_an_edit_gives_its_gradients(backend: str) -> None:
    """Ahead-of-time autograd computes what comes behind the edit again, from the edited input: in plain torch, too."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Tanh(), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * self.second(x)

    torch.manual_seed(0)
    net = Net()
    x, one = torch.randn(3, 4), torch.ones(4)
    (torch.tanh(x) * net.second(x + one)).pow(2).sum().backward()
    expected = net.second.weight.grad
    model = NNsight(net, compile={"backend": backend})
    for _ in range(2):
        net.zero_grad()
        given = x.clone()
        with model.trace(given):
            model.second.input.add_(one)
            out = model.output.save()
        out.pow(2).sum().backward()
        torch.testing.assert_close(net.second.weight.grad, expected)
        assert torch.equal(given, x + one)


class Crossing(torch.nn.Module):
    """One tensor goes into two modules, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.left, self.right, self.head = (torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        return self.head(torch.tanh(self.left(hidden)) * self.right(hidden))


@UNCOMPILED
@pytest.mark.parametrize("view", [lambda h: h[:, 0], lambda h: h.diagonal(dim1=0, dim2=1)], ids=["select", "diagonal"])
def test_the_gradient_of_a_tensor_whose_view_was_taken_before_a_cut_and_edited_behind_it(view: Any) -> None:
    """The graph behind the cut edits one of several inputs that share memory; what it computes of the others comes from the edit.

    The gradient lacked the part of the first module. It is whole now, or refused where no border is possible.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Crossing()
    model = NNsight(net, compile={"backend": "aot_eager"})
    x = torch.randn(3, 4)

    hidden = net.embed(x)
    hidden.retain_grad()
    edited = hidden * 1.0
    view(edited).mul_(0.5)
    edited.retain_grad()
    net.head(torch.tanh(net.left(edited)) * net.right(edited)).sum().backward()

    def run() -> torch.Tensor:
        with model.trace(x):
            before = model.left.input.requires_grad_()
            view(before).mul_(0.5)
            behind = model.right.input.requires_grad_()
            with model.output.sum().backward():
                found = behind.grad.save()
        return found

    for _ in range(2):
        try:
            torch.testing.assert_close(run(), edited.grad)
        except ValueError as error:
            assert "cannot be computed" in str(error)  # noqa: PT017 - either is right


class Breaks(torch.nn.Module):
    """Goes one way or another by the values it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Identity()), torch.nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.first(x))
        if hidden.detach().sum() > 0:
            return self.last(hidden) * 0.5
        return self.last(hidden) + 0.5


@pytest.mark.filterwarnings("ignore:torch._dynamo hit")
@pytest.mark.parametrize("compile", [False, True])
def test_an_input_of_a_graph_behind_a_break_of_the_model_requires_a_gradient(compile: bool) -> None:
    """It is a tensor with a value there, and was answered for by its fake, which has no gradient."""
    torch._dynamo.reset()
    model = NNsight(torch.nn.Sequential(Breaks(), torch.nn.Linear(4, 4)), compile={"backend": "eager"})
    for _ in range(2):
        with model.trace(torch.ones(2, 4), compile=compile):
            hidden = model[0].last.input
            hidden[:, -1] = 0.0
            asked = [hidden.requires_grad, hidden.is_leaf, model[1].input.requires_grad].save()  # type: ignore[attr-defined]
        assert asked == [True, False, True]


def test_the_model_edits_behind_a_cut_what_the_block_read_before_it() -> None:
    """The edit waits for its graph, and a call on the tensor, or on a view of it, did not wait for the edit."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4))
    model, x = NNsight(net, compile={"backend": "aot_eager"}), torch.randn(3, 4)
    relu = net[0](x).relu()
    for _ in range(2):
        with torch.no_grad(), model.trace(x):
            hidden = model[0].output
            part = hidden[:2]
            assert hidden.sum() > -1e9
            before = (part * 2.0).save()
            model[1].output  # noqa: B018 - waits for it
            whole, rows = (hidden * 2.0).save(), (part * 2.0).save()
            model[2].input = hidden + 1.0
            out = model.output.save()
        torch.testing.assert_close(before, net[0](x)[:2] * 2.0)
        torch.testing.assert_close(whole, relu * 2.0)
        torch.testing.assert_close(rows, relu[:2] * 2.0)
        torch.testing.assert_close(out, net[2](relu + 1.0))


def test_the_gradient_of_a_tensor_that_a_function_edits_in_place_behind_a_cut() -> None:
    """`relu(x, inplace=True)` edits like `x.relu_()`, which is the one that was known to."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4))
    model, x = NNsight(net, compile={"backend": "aot_eager"}), torch.randn(3, 4)
    hidden = net[0](x)
    edited = net[1](hidden * 1.0).detach().requires_grad_()
    net[2](edited).pow(2).sum().backward()
    for _ in range(2):
        with model.trace(x):
            kept = model[0].output.requires_grad_()
            with model.output.pow(2).sum().backward():
                found = kept.grad.save()
        torch.testing.assert_close(found, edited.grad)


def _tanh_is_edited(model: NNsight, x: torch.Tensor) -> torch.Tensor:
    with model.trace(x):
        hidden = model[1].output
        hidden.mul_(2.0)
        with model.output.sum().backward():
            found = hidden.grad.save()
    return found


def _a_strided_view_is_edited(model: NNsight, x: torch.Tensor) -> torch.Tensor:
    with model.trace(x):
        hidden = model[1].output
        part = torch.as_strided(hidden, (2, 2), (4, 1))
        square = part * part
        hidden.view(-1).add_(1.0)
        with (model.output.sum() + square.sum()).backward():
            found = hidden.grad.save()
    return found


def _a_result_is_edited_after_its_use(model: NNsight, x: torch.Tensor) -> torch.Tensor:
    with model.trace(x):
        hidden = model[1].output.requires_grad_()
        power = torch.exp(hidden)
        total = power.sum()
        power.mul_(2.0)
        with (total + power.sum()).backward():
            found = hidden.grad.save()
    return found


def _behind_the_trace(model: NNsight, x: torch.Tensor) -> Any:
    with model.trace(x):
        model[1].output.mul_(2.0)
        out = model.output.save()
    out.sum().backward()
    return model._module[0].weight.grad


@UNCOMPILED
@pytest.mark.parametrize("block", [_tanh_is_edited, _a_strided_view_is_edited, _a_result_is_edited_after_its_use])
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_a_backward_pass_that_torch_refuses_is_made_by_no_backend(block: Any) -> None:
    """A tensor that the pass needs was edited, and the block shows that there will be such a pass.

    Behind the trace, a graph that was lowered ahead of time has edited a copy: see the next test.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    model = NNsight(net, compile={"backend": "aot_eager"})
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError), match="modified by an inplace operation|cannot be computed"):
            block(model, torch.randn(3, 4))


def test_an_edit_of_what_a_backward_pass_needs_has_the_gradient_of_an_edited_copy() -> None:
    torch.manual_seed(0)
    net, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)), torch.randn(3, 4)
    found = _behind_the_trace(NNsight(net, compile={"backend": "aot_eager"}), x)
    (expected,) = torch.autograd.grad(net[2](net[1](net[0](x)) * 2.0).sum(), net[0].weight)
    torch.testing.assert_close(found, expected)


class Summed(torch.nn.Module):
    """Adds up two tensors, of which a block edits one through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.sum = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.last(self.sum(first + self.second(first)))


def test_a_view_of_what_a_graph_computes_from_inputs_that_share_memory_can_be_used() -> None:
    """Ahead-of-time autograd takes a view's base from a wrong place if inputs share memory that the graph edits."""
    torch.manual_seed(0)
    net = Summed()
    model, x = NNsight(net, compile={"backend": "aot_eager"}), torch.randn(5, 4)
    first = net.first(x)
    second = net.second(first)
    total = first + torch.cat([second[:3] + 1.0, second[3:]])
    for _ in range(2):
        with model.trace(x):
            second = model.second.output
            rows = second[:3]
            assert second.sum() > -1e9
            rows.add_(1.0)
            hidden = model.sum.output
            columns, later = hidden[:, :2].save(), hidden[1:].save()
            assert hidden.sum() > -1e9
            hidden.mul_(2.0)
        torch.testing.assert_close(columns * 1.0, total[:, :2] * 2.0)
        torch.testing.assert_close(later * 1.0, total[1:] * 2.0)
        (found,) = torch.autograd.grad((columns * later[0, 0]).sum(), [net.first.weight], retain_graph=True)
        (due,) = torch.autograd.grad(((total * 2.0)[:, :2] * (total * 2.0)[1, 0]).sum(), [net.first.weight], retain_graph=True)
        torch.testing.assert_close(found, due)


@pytest.mark.parametrize("compile", [False, True])
def test_tensors_that_are_only_like_another_one_require_no_gradient(compile: bool) -> None:
    net, model = _model()
    with model.trace(torch.randn(3, 4), compile=compile) as tracer:
        hidden = model.body.output
        made = torch.zeros_like(hidden)
        alone = [made.requires_grad, hidden.new_ones(3).requires_grad, torch.detach(hidden).requires_grad].save()  # type: ignore[attr-defined]
        leaf = torch.ones_like(hidden, requires_grad=True).requires_grad.save()  # type: ignore[attr-defined]
        model.body.output = made.scatter(-1, hidden.topk(2, dim=-1).indices, 1.0)
        before = model.head.input.requires_grad.save()  # type: ignore[attr-defined]
        model.head.input.add_(hidden)
        behind = model.head.input.requires_grad.save()  # type: ignore[attr-defined]
        out = model.output.save()
    assert alone == [False, False, False] and leaf and not before and behind and out.requires_grad
    # Behind an edit that brings gradients in, the graph has to run first; the other questions need no cut.
    assert len(tracer.report.breaks) == compile


class Batched(torch.nn.Module):
    """Calls ``torch.vmap``, as the scan of a compiled Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.vmap(torch.tanh)(self.body(x)))


def test_gradients_are_asked_for_behind_a_vmap_of_the_model() -> None:
    """The graph could not be cut for gradients, and the attempt left the block inside of the ``vmap``."""
    net = Batched()
    model = NNsight(net, compile={"backend": "aot_eager"})
    x = torch.randn(3, 4)
    for _ in range(2):
        with model.trace(x):
            hidden = model.head.input.requires_grad_()
            with model.output.square().sum().backward():
                gradient = hidden.grad.save()
        hidden = torch.tanh(net.body(x)).detach().requires_grad_()
        (expected,) = torch.autograd.grad(net.head(hidden).square().sum(), hidden)
        torch.testing.assert_close(gradient, expected)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(x)
        return self.head(hidden), hidden


@UNCOMPILED
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_an_assignment_by_a_mask_behind_a_matrix_product(backend: str, grad: bool) -> None:
    """Inductor lets the matrix product read the values from behind the assignment; so it does in plain torch 2.13."""
    torch.manual_seed(0)
    net = Normed()
    model, x = NNsight(net, compile={"backend": backend}), torch.randn(5, 3, 4)
    with torch.set_grad_enabled(grad):
        hidden = net.norm(x)
        expected = net.head(hidden)
        for mask in (hidden > 0.5, hidden[..., 0] > 0.5):
            with model.trace(x) as tracer:
                out, seen = model.output
                chosen = seen > 0.5 if mask.ndim == 3 else seen[..., 0] > 0.5
                seen[chosen] = 0.25
                result = tracer.result.save()
            edited = hidden.clone()
            edited[mask] = 0.25
            torch.testing.assert_close(result, (expected, edited))
            assert grad or not tracer.report.notes  # autograd keeps what is edited, so backends that trace it refuse


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_behind_an_edit_of_the_rows_of_one_invoke(backend: str) -> None:
    """Behind a cut, the rows and the batch are inputs that share memory. Inductor fused the edit with a read of other rows."""

    class Ways(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.way, self.head = torch.nn.LayerNorm(4), torch.nn.Tanh(), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, edited: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.norm(x)
            left = torch.tanh(hidden)
            if edited:
                hidden = torch.cat([hidden[:3] - 1.0, hidden[3:]])
            hidden = left * torch.sigmoid(torch.tanh(self.way(hidden)))
            return self.head(hidden), hidden

    torch.manual_seed(0)
    net, x = Ways(), torch.randn(5, 5, 4)
    model = Rows(net, compile={"backend": backend})
    with model.trace() as tracer:
        with tracer.invoke(x[:3]):
            rows = model.way.input
            if rows.detach().sum() > -100.0:
                rows.sub_(1.0)
        with tracer.invoke(x[3:]):
            pass
        with tracer.invoke():
            result = tracer.result.save()
    assert len(tracer.report.breaks) == 1 and not tracer.report.notes
    expected = net(x, edited=True)
    parameters = tuple(net.parameters())
    found = torch.autograd.grad(sum(one.square().sum() for one in result), parameters)
    by_hand = torch.autograd.grad(sum(one.square().sum() for one in expected), parameters)
    torch.testing.assert_close((result, found), (expected, by_hand))


class Doubled(Normed):
    """Autograd keeps the product, and a compiled backward pass may keep what it is made of."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * 2.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_where_an_input_is_used_and_then_edited(backend: str) -> None:
    """A compiled backward pass kept the input, and computed from it again when it had been edited."""
    torch.manual_seed(0)
    net, x = Doubled(), torch.randn(5, 3, 4)
    model = NNsight(net, compile={"backend": backend})
    given = x.clone()
    with model.trace(given) as tracer:
        entering = model.input
        out, _ = model.output
        entering[:, 1:] += 1.0
        out = out.save()
    assert not tracer.report.breaks and not tracer.report.notes
    (found,) = torch.autograd.grad(out.square().sum(), net.norm.weight)
    (expected,) = torch.autograd.grad(net(x)[0].square().sum(), net.norm.weight)
    torch.testing.assert_close(found, expected)
    x[:, 1:] += 1.0
    torch.testing.assert_close(given, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trained_factor_is_multiplied_in_place_behind_a_cut(backend: str) -> None:
    """The backward pass kept the tensor that came into the graph behind the cut, and autograd found it edited."""
    torch.manual_seed(0)
    net, factor = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), torch.nn.Parameter(torch.randn(4))
    model = NNsight(net, compile={"backend": backend})
    for length in (5, 7):
        x = torch.randn(length, 4)
        with model.trace(x) as tracer:
            hidden = model[0].output
            before = hidden.tanh().save()
            if hidden.sum() > -1e9:
                hidden[1:].mul_(factor)
            out = (model.output * (hidden * factor).sigmoid()).save()
        assert len(tracer.report.breaks) == 1 and not tracer.report.notes
        start = net[0](x)
        edited = torch.cat([start[:1], start[1:] * factor])
        expected = (start.tanh(), net[1](edited) * (edited * factor).sigmoid())
        torch.testing.assert_close((before, out), expected)
        wanted = [factor, *net.parameters()]
        found = torch.autograd.grad(before.sum() + out.square().sum(), wanted)
        torch.testing.assert_close(found, torch.autograd.grad(expected[0].sum() + expected[1].square().sum(), wanted))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_behind_an_edit_by_the_model_stays_a_copy(backend: str) -> None:
    """With symbolic sizes, Inductor returned one tensor for both, which had no gradient; so it does in plain torch 2.13."""

    class Edits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(x) * 1.0
            hidden[:, 1:].mul_(0.5)
            return hidden

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), Edits())
    model = NNsight(net, compile={"backend": backend})
    for length in (5, 7):
        x = torch.randn(2, length, 4)
        with model.trace(x) as tracer:
            cache = tracer.cache()
            copy = model[1].output.detach().clone().save()
            repeated = model[1].output.repeat(1, 1, 1)[:, 0].save()
            first = model[1].output.clone()[0].save()
            out = model.output.save()
        expected = net(x)
        kept = cache["model.1"].output
        results = (copy, kept, first, repeated, out)
        torch.testing.assert_close(results, (expected.detach(), expected.detach(), expected[0], expected[:, 0], expected))
        assert [tensor.requires_grad for tensor in results] == [False, False, True, True, True]
        assert len({tensor.untyped_storage().data_ptr() for tensor in results}) == 5
        weight = net[0].weight
        found = torch.autograd.grad(out.sum() + first.sum(), weight)
        torch.testing.assert_close(found, torch.autograd.grad(expected.sum() + expected[0].sum(), weight))
