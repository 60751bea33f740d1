"""``torch.compile`` of the user's own code around wrapped models, compared with modules and hooks of plain torch."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters as dynamo_counters

import nnsight
from nnsight import NNsight
from nnsight.runtime.modules.eproperty import eproperty

from ..conftest import Case, Hooks, assert_no_instrumentation

X = torch.linspace(-1, 1, 12).view(2, 6)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Pair(torch.nn.Module):
    """A module that returns a tuple, called by keyword."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, x + scale


class WithPair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled, shifted = self.pair(self.linear(x), scale=x)
        return scaled - shifted


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo_counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Net())


def by_hand(
    model: NNsight,
    x: torch.Tensor = X,
    first: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
    second: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> torch.Tensor:
    """Return the forward pass written out, with what the two layers return replaced."""
    module = model._module
    return second(module.second(torch.relu(first(module.first(x)))))


class Compiled:
    """A function under ``torch.compile``, and how many graphs dynamo made of it."""

    def __init__(self, function: Callable[..., Any], backend: str = "eager", fullgraph: bool = True, **options: Any) -> None:
        self._counter = CompileCounterWithBackend(backend)
        self._function = torch.compile(function, backend=self._counter, fullgraph=fullgraph, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def graphs(self) -> int:
        return self._counter.frame_count

    @property
    def breaks(self) -> int:
        return sum(dynamo_counters["graph_break"].values())

    def targets(self) -> list[Any]:
        return [node.target for graph in self._counter.graphs for node in graph.graph.nodes]


def agrees(edited: NNsight, expected: torch.Tensor, x: torch.Tensor = X) -> None:
    """Assert that an edited model gives ``expected`` when called, and in one graph without a break."""
    assert not torch.equal(edited._module(x), expected), "the edit would be a no-op"
    assert torch.equal(edited(x), expected)
    compiled = Compiled(lambda x: edited(x) * 2)
    for _ in range(2):
        assert torch.equal(compiled(x), expected * 2)
    assert (compiled.graphs, compiled.breaks) == (1, 0)
    assert_no_instrumentation(edited._module)


# -- unedited -----------------------------------------------------------------------------------------------------------


def test_a_wrapped_model_is_one_graph(model: NNsight) -> None:
    """Called in a function, compiled by itself, or by its module; also after a trace. No operation is added to the model's."""
    plain = Compiled(model._module)
    assert torch.equal(plain(X), model._module(X))
    with model.trace(X):
        model.first.output[:] = 0
    for function in (lambda x: model(x), model, model._module, lambda x: model.second(torch.relu(model.first(x)))):  # noqa: PLW0108
        compiled = Compiled(function)
        assert torch.equal(compiled(X), model._module(X))
        assert (compiled.graphs, compiled.breaks) == (1, 0)
        calls = [target for target in compiled.targets() if callable(target)]
        assert calls == [target for target in plain.targets() if callable(target)]


def test_a_module_compiled_after_wrapping(model: NNsight) -> None:
    counter = CompileCounterWithBackend("eager")
    model._module.compile(backend=counter, fullgraph=True)
    assert torch.equal(model(X), model._module.forward(X))
    assert counter.frame_count == 1
    with model.trace(X):
        model.first.output[:] = 0
        out = model.output.save()
    assert torch.equal(out, by_hand(model, first=torch.zeros_like))
    with model.edit() as edited:
        model.first.output[:] = 0
    assert torch.equal(edited(X), out)
    assert torch.equal(model(X), model._module.forward(X))
    assert counter.frame_count == 1


# -- edited: what an edit can do ----------------------------------------------------------------------------------------


def test_an_edit_in_place(model: NNsight) -> None:
    vector = torch.ones(6)
    with model.edit() as edited:
        model.first.output[:] += vector
    agrees(edited, by_hand(model, first=lambda h: h + vector))
    with model.edit(inplace=True):
        model.second.output[:, 0] = 7

    def seven(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full((2, 1), 7.0), value[:, 1:]], dim=1)

    agrees(model, by_hand(model, second=seven))


def test_replacements_of_outputs_and_inputs() -> None:
    torch.manual_seed(0)
    model = NNsight(WithPair())
    with model.edit() as edited:
        model.linear.input = model.linear.input * 3
        args, kwargs = model.pair.inputs
        model.pair.inputs = (args[0] + 1,), {**kwargs, "scale": kwargs["scale"] * 2}
        scaled, shifted = model.pair.output
        model.pair.output = scaled * 5, shifted
    hidden = model._module.linear(X * 3) + 1
    agrees(edited, hidden * (X * 2) * 5 - (hidden + X * 2))


def test_arguments_edited_inside_their_containers() -> None:
    torch.manual_seed(0)
    model = NNsight(WithPair())
    with model.edit() as edited:
        model.pair.inputs[1]["scale"] = torch.full_like(X, 2.0)
        model.pair.inputs[0][0][:, 0] = 1
    hidden = model._module.linear(X).detach().clone()
    hidden[:, 0] = 1
    scale = torch.full_like(X, 2.0)
    with torch.no_grad():
        agrees(edited, hidden * scale - (hidden + scale))


def test_a_skipped_module_does_not_run(model: NNsight) -> None:
    with model.edit() as edited:
        model.first.skip(torch.ones(2, 6))
    agrees(edited, model._module.second(torch.ones(2, 6)))
    compiled = Compiled(edited)
    compiled(X)
    assert compiled.targets().count(torch._C._nn.linear) == 1


def test_edits_that_wait_for_each_others_modules(model: NNsight) -> None:
    """Two edits that are both half done while the model runs."""
    with model.edit() as edited:
        early = model.first.output
        model.second.output = model.second.output + early
    with edited.edit(inplace=True):
        early = model.first.input
        model.second.output = model.second.output * early
    agrees(edited, (by_hand(model) + model._module.first(X)) * X)


def test_an_edit_that_applies_modules(model: NNsight) -> None:
    adapter = torch.nn.Linear(6, 6)
    with model.edit() as edited:
        model.first.output = adapter(model.first.output) + model.second(model.first.output)
    agrees(edited, by_hand(model, first=lambda h: adapter(h) + model._module.second(h)))


def test_steps_next_and_saves(model: NNsight) -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    twice = NNsight(Twice())
    layer = twice._module.layer
    with twice.edit() as (tracer, edited):
        for step in tracer.iter[:2]:
            twice.layer.output = twice.layer.output * (step + 2)
            seen = twice.layer.output.save()
    agrees(edited, layer(layer(X) * 2) * 3)
    with twice.edit() as edited:
        twice.layer.next().output[:] = 1
    agrees(edited, torch.ones(2, 6))


def test_a_view_that_is_sent_back() -> None:
    class Halves(nnsight.Envoy):
        @eproperty(key="output")
        def left(self) -> torch.Tensor:
            """The first half of the columns, as a copy."""

        @left.preprocess
        def left(self, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @left.transform
        @staticmethod
        def left(view: torch.Tensor) -> torch.Tensor:
            return view * 10

    torch.manual_seed(0)
    model = NNsight(Net(), envoys=Halves)
    with model.edit() as edited:
        model.first.left[:, 0] = 5

    def by_tens(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:, 0] = 5
        return value * 10

    agrees(edited, by_hand(model, first=by_tens))


def test_without_gradients_in_the_edit_only(model: NNsight) -> None:
    """Grad mode of the block does not leak into the model, nor that of the model into the block."""
    with model.edit() as edited:
        with torch.no_grad():
            doubled = model.first.output * 2
            model.second.output  # noqa: B018 - the model runs while the block is under `no_grad`
            tripled = doubled * 1.5
        model.second.output = model.second.output + tripled
    compiled = Compiled(lambda x: edited(x).sum(), backend="aot_eager")
    module = model._module

    def expected() -> torch.Tensor:
        hidden = module.first(X)
        return (module.second(torch.relu(hidden)) + (hidden * 3).detach()).sum()

    for function in (lambda: edited(X).sum(), lambda: compiled(X)):
        found = torch.autograd.grad(function(), list(module.parameters()))
        wanted = torch.autograd.grad(expected(), list(module.parameters()))
        assert all(map(torch.allclose, found, wanted))
    torch.testing.assert_close(compiled(X), expected())
    assert torch.is_grad_enabled()
    assert compiled.graphs == 1


def test_effects_on_objects_happen_once_for_each_call(model: NNsight) -> None:
    held, calls = {"hidden": X}, [0]
    with model.edit() as edited:
        held["hidden"] = model.first.output
        model.first.output = model.first.output * 2
        calls.append(1)
    compiled = Compiled(edited)
    for x in (X, X + 1):
        calls.clear()
        assert torch.equal(compiled(x), by_hand(model, x, lambda h: h * 2))
        assert torch.equal(held["hidden"], model._module.first(x))
        assert calls == [1]
    assert compiled.graphs == 1


# -- edited: values, gradients, sizes -----------------------------------------------------------------------------------


def test_new_values_do_not_compile_again(model: NNsight) -> None:
    """A variable changed in place, an entry of a dictionary replaced, a parameter of a module assigned."""
    vector, held, sae = torch.ones(6), {"vector": torch.ones(6)}, torch.nn.Linear(6, 6)
    with model.edit() as edited:
        model.first.output = sae(model.first.output + vector) + held["vector"]
    compiled = Compiled(edited)
    before = None
    for change in (
        lambda: None,
        lambda: vector.mul_(3),
        lambda: held.update(vector=torch.full((6,), 5.0)),
        lambda: setattr(sae, "weight", torch.nn.Parameter(torch.eye(6))),
    ):
        change()
        expected = by_hand(model, first=lambda h: sae(h + vector) + held["vector"])
        assert before is None or not torch.equal(before, expected)
        assert torch.equal(compiled(X), expected)
        before = expected
    assert (compiled.graphs, compiled.breaks) == (1, 0)


def test_python_values_are_guarded_and_each_call_has_variables_of_its_own(model: NNsight) -> None:
    held, count = {"factor": 2, "on": True}, 1
    with model.edit() as edited:
        count += 1
        if held["on"]:
            model.first.output = model.first.output * held["factor"] * count
    compiled = Compiled(edited)
    for _ in range(3):
        assert torch.equal(compiled(X), by_hand(model, first=lambda h: h * 4))
    assert (count, compiled.graphs) == (1, 1)
    held["factor"] = 3
    assert torch.equal(compiled(X), by_hand(model, first=lambda h: h * 6))
    held["on"] = False
    assert torch.equal(compiled(X), by_hand(model))


def test_gradients_reach_what_the_edit_reads(model: NNsight) -> None:
    vector = torch.full((6,), 0.5, requires_grad=True)
    sae = torch.nn.Linear(6, 6)
    with model.edit() as edited:
        model.first.output = sae(model.first.output) + vector
    leaves = [vector, *sae.parameters(), *model._module.parameters()]
    expected = torch.autograd.grad(by_hand(model, first=lambda h: sae(h) + vector).pow(2).sum(), leaves)
    assert all(gradient.abs().sum() > 0 for gradient in expected)
    compiled = Compiled(lambda x: edited(x).pow(2).sum(), backend="aot_eager")
    for function in (lambda x: edited(x).pow(2).sum(), compiled):
        for found, wanted in zip(torch.autograd.grad(function(X), leaves), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    assert compiled.graphs == 1


def test_sizes_become_symbolic(model: NNsight) -> None:
    with model.edit() as edited:
        model.first.output[:, : model.first.output.shape[1] // 2] = 0

    def zeroed(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(hidden[:, :3]), hidden[:, 3:]], dim=1)

    compiled = Compiled(edited)
    for rows in (2, 3, 4, 5, 9):
        x = torch.randn(rows, 6)
        assert torch.equal(compiled(x), by_hand(model, x, zeroed))
    assert compiled.graphs == 2
    at_once = Compiled(edited, dynamic=True)
    for rows in (2, 3, 4):
        x = torch.randn(rows, 6)
        assert torch.equal(at_once(x), by_hand(model, x, zeroed))
    assert at_once.graphs == 1


# -- edited: edits come and go ------------------------------------------------------------------------------------------


def test_changed_edits_and_other_edited_models_are_noticed(model: NNsight) -> None:
    compiled = Compiled(lambda some, x: some(x))
    assert torch.equal(compiled(model, X), model._module(X))
    with model.edit(inplace=True):
        model.first.output[:] = 0
    assert torch.equal(compiled(model, X), by_hand(model, first=torch.zeros_like))
    with model.edit(inplace=True):
        model.second.output[:] = 7
    assert torch.equal(compiled(model, X), torch.full((2, 6), 7.0))
    model.clear_edits()
    assert torch.equal(compiled(model, X), model._module(X))
    assert compiled.graphs == 3
    for factor in (2.0, 3.0):
        with model.edit() as edited:
            model.first.output = model.first.output * factor
        assert torch.equal(compiled(edited, X), by_hand(model, first=lambda h, factor=factor: h * factor))


def test_a_compiled_function_keeps_no_edit_alive(model: NNsight) -> None:
    vector = torch.ones(6)
    with model.edit(inplace=True):
        model.first.output = model.first.output + vector
    compiled = Compiled(model)
    assert torch.equal(compiled(X), by_hand(model, first=lambda h: h + 1))
    reference = weakref.ref(vector)
    del vector
    model.clear_edits()
    gc.collect()
    assert reference() is None


def test_a_compiled_wrapper_is_traced_into_the_function_around_it(model: NNsight) -> None:
    model.compile(backend="eager")
    with model.edit() as edited:
        model.first.output[:] = 0
    expected = by_hand(model, first=torch.zeros_like)
    assert torch.equal(edited(X), expected)
    assert nnsight.fx.counters.captures == 1
    agrees(edited, expected)


# -- what cannot be traced ----------------------------------------------------------------------------------------------


def test_an_edit_that_needs_a_value(model: NNsight) -> None:
    """It breaks the graph around the call of the model; the rest of the function is compiled."""
    with model.edit() as edited:
        hidden = model.first.output
        if hidden.sum() > -1e6:
            model.first.output = hidden * 2
    expected = by_hand(model, first=lambda h: h * 2).sin()
    compiled = Compiled(lambda x: edited(x).sin(), fullgraph=False)
    for _ in range(2):
        assert torch.equal(compiled(X), expected)
    assert compiled.graphs == 1
    assert torch.sin in compiled.targets() or "sin" in compiled.targets()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Data-dependent") as raised:
        Compiled(edited)(X)
    assert "if hidden.sum() > -1e6:" in str(raised.value)
    assert torch.equal(edited(X), by_hand(model, first=lambda h: h * 2))
    assert_no_instrumentation(model._module)


def test_mistakes_are_those_of_an_eager_call(model: NNsight) -> None:
    with model.edit() as late:
        model.second.output  # noqa: B018
        model.first.output[:] = 0
    model.unused = torch.nn.Linear(6, 6)
    with model.edit() as never:
        model.unused.output[:] = 0
    with model.edit() as (tracer, stopped):
        model.first.output  # noqa: B018
        tracer.stop()
    other, paired = NNsight(Net()), NNsight(WithPair())
    with model.edit() as foreign:
        other.first.output[:] = 0
    with paired.edit() as single:
        paired.pair.output = torch.zeros(2, 6)
    for edited, kind, message in (
        (late, "OutOfOrderError", r"missed for model\.first\.output"),
        (never, "OutOfOrderError", r"`model\.unused\.output\.i0` was not provided"),
        (stopped, "ValueError", "has no output to return"),
        (foreign, "MissedProviderError", "does not run here"),
        (single, "ReplacementShapeError", "instead of a tuple"),
    ):
        for function in (edited, Compiled(edited, fullgraph=False)):
            with pytest.raises(ValueError, match=message) as raised:
                function(X)
            assert type(raised.value).__name__ == kind
        with pytest.raises((torch._dynamo.exc.Unsupported, ValueError)):
            Compiled(lambda x, edited=edited: edited(x))(X)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"missed for model\.first\.output"):
        Compiled(lambda x: late(x) * 1)(X)
    assert_no_instrumentation(model._module)
    assert torch.equal(Compiled(model)(X), model._module(X))


def test_a_function_with_a_trace_runs_as_python(model: NNsight) -> None:
    """What it calls is compiled all the same."""

    def normed(value: torch.Tensor) -> torch.Tensor:
        return value / value.norm()

    def traced(x: torch.Tensor, factor: float) -> torch.Tensor:
        x = normed(x)
        with model.trace(x) as tracer:
            model.first.output = model.first.output * factor
            out = model.output.save()
        assert tracer.report.mode == "eager"
        return normed(out)

    compiled = Compiled(traced, fullgraph=False)
    for factor in (2.0, 3.0):
        expected = by_hand(model, X / X.norm(), lambda h, factor=factor: h * factor)
        assert torch.equal(compiled(X, factor), expected / expected.norm())
        assert torch.equal(traced(X, factor), expected / expected.norm())
    assert compiled.graphs > 0
    assert_no_instrumentation(model._module)

    def around(x: torch.Tensor) -> torch.Tensor:
        return traced(x, 2.0) + 1

    expected = by_hand(model, X / X.norm(), lambda h: h * 2)
    assert torch.equal(Compiled(around, fullgraph=False)(X), expected / expected.norm() + 1)


def test_a_trace_of_a_compiled_model_in_a_compiled_function(model: NNsight) -> None:
    model.compile(backend="eager")

    def traced(x: torch.Tensor) -> torch.Tensor:
        with model.trace(x) as tracer:
            model.first.output[:] = 0
            out = model.output.save()
        assert (tracer.report.mode, tracer.report.graphs) == ("compiled", 1)
        return out

    assert torch.equal(Compiled(traced, fullgraph=False)(X), by_hand(model, first=torch.zeros_like))


def test_blocks_under_fullgraph_say_what_to_do(model: NNsight) -> None:
    def trace(x: torch.Tensor) -> torch.Tensor:
        with model.trace(x):
            out = model.output.save()
        return out

    def edit(x: torch.Tensor) -> torch.Tensor:
        with model.edit() as edited:
            model.first.output[:] = 0
        return edited(x)

    def scan(x: torch.Tensor) -> torch.Tensor:
        with model.scan(x):
            out = model.output.save()
        return out

    def session(x: torch.Tensor) -> torch.Tensor:
        with model.session():
            out = torch.ones(1).save()
        return out

    for function, name in ((trace, "trace"), (edit, "edit"), (scan, "scan"), (session, "session")):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"`model\.{name}\(.*fullgraph=True asks for one"):
            Compiled(function)(X)
    assert torch.equal(Compiled(edit, fullgraph=False)(X), by_hand(model, first=torch.zeros_like))


# -- other transformations ----------------------------------------------------------------------------------------------


def test_vmap_and_grad_of_plain_calls(model: NNsight) -> None:
    with model.edit() as edited:
        model.first.output = model.first.output * 2
    expected = by_hand(model, first=lambda h: h * 2)
    torch.testing.assert_close(torch.func.vmap(model)(X), model._module(X))
    torch.testing.assert_close(torch.func.vmap(edited)(X), expected)
    torch.testing.assert_close(Compiled(torch.func.vmap(edited))(X), expected)
    leaf = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(by_hand(model, leaf, lambda h: h * 2).sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: edited(x).sum())(X), wanted)


def test_export_of_the_module_and_of_an_edited_model(model: NNsight) -> None:
    """The module exports without the edits of its wrapper, a module that calls the wrapper with them."""
    vector = torch.ones(6)
    with model.edit(inplace=True):
        model.first.output = model.first.output + vector
    assert torch.equal(torch.export.export(model._module, (X,)).module()(X), model._module(X))

    class Steered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model._module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return model(x)

    exported = torch.export.export(Steered(), (X,))
    assert torch.equal(exported.module()(X), by_hand(model, first=lambda h: h + 1))
    assert {f"net.{name}" for name, _ in model._module.named_parameters()} <= set(exported.state_dict)


# -- plain calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_plain_call_runs_the_edits(model: NNsight, compile: bool) -> None:
    if compile:
        model.compile(backend="eager")
    with model.edit() as edited:
        model.first.output[:] = 0
        kept = model.second.output.save()
    assert torch.equal(edited(X), by_hand(model, first=torch.zeros_like))
    assert torch.equal(model(X), model._module(X))
    edited.clear_edits()
    assert torch.equal(edited(X), model._module(X))
    assert_no_instrumentation(model._module)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_an_edited_model_called_in_a_block(model: NNsight, compile: bool) -> None:
    """In a block of another model it is the edited model; in one of its own it is applied without passing locations."""
    with model.edit() as edited:
        model.first.output = model.first.output * 2
    other = NNsight(torch.nn.Linear(6, 6), compile={"backend": "eager"})
    with other.trace(X, compile=compile):
        out = edited(other.output).save()
    assert torch.equal(out, by_hand(model, other._module(X), lambda h: h * 2))
    with edited.trace(X):
        again = edited(edited.output).save()
    assert torch.equal(again, model._module(by_hand(model, first=lambda h: h * 2)))


def test_operations_behind_source_break_the_graph_around_the_call(model: NNsight) -> None:
    with model.edit() as edited:
        model.source.torch_relu_0.output[:] += 1
        operation = model.second.source.F_linear_0
        operation.input = operation.input * 2
    compiled, module = Compiled(lambda x: edited(x) * 1, fullgraph=False), model._module
    assert torch.equal(compiled(X), module.second((torch.relu(module.first(X)) + 1) * 2))
    module.forward = lambda x: torch.relu(module.second(x))  # type: ignore[method-assign]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"An edit uses `\.source`"):
        Compiled(lambda x: edited(x) * 1)(X)


# -- language models ----------------------------------------------------------------------------------------------------


def test_steered_transformers_are_one_graph(gpt2: Case) -> None:
    case = gpt2
    vector, hooks = torch.randn(32), Hooks(case.module)
    model = NNsight(case.module)
    hooks.output(case.layer(1), lambda out: out + vector)
    project = "c_proj"  # what comes right behind the attention
    hooks.input(f"{case.layer(2)}.{case.attention}.{project}", lambda args, kwargs: ((args[0] * 1.5,), kwargs))
    hooks.output(f"{case.layer(2)}.{case.attention}", lambda out: (out[0] * 0.5, *out[1:]))
    with model.edit() as edited:
        layers = edited.get(case.layers)
        layers[1].output = layers[1].output + vector
        attention = layers[2].get(case.attention)
        projection = attention.get(project)
        projection.input = projection.input * 1.5
        attention.output = (attention.output[0] * 0.5, *attention.output[1:])
    compiled = Compiled(lambda **inputs: edited(**inputs, use_cache=False).logits)
    with torch.no_grad():
        for _ in range(2):
            expected = hooks(**case.inputs(), use_cache=False).logits
            assert not torch.equal(expected, case.module(**case.inputs(), use_cache=False).logits)
            assert torch.equal(edited(**case.inputs(), use_cache=False).logits, expected)
            torch.testing.assert_close(compiled(**case.inputs()), expected)
            vector.add_(1)
    assert (compiled.graphs, compiled.breaks) == (1, 0)


@pytest.mark.slow
def test_inductor_compiles_model_and_edit_together(model: NNsight) -> None:
    vector = torch.full((6,), 0.5, requires_grad=True)
    with model.edit() as edited:
        model.first.output[:] += vector
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = Compiled(lambda x: edited(x).pow(2).sum(), backend="inductor")
        found = compiled(X)
        gradients = torch.autograd.grad(found, [vector, *model._module.parameters()])
    expected = by_hand(model, first=lambda h: h + vector).pow(2).sum()
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, [vector, *model._module.parameters()])
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert compiled.graphs == 1
