"""What a model returns is not computed for a trace in which nobody sees it; whoever sees it gets it, and so does what is stored of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nnsight import LanguageModel, NNsight, demo_model

from ...conftest import close, same
from .. import small_gpt2

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Answer(NamedTuple):
    hidden: torch.Tensor
    rows: int
    name: str


@dataclass
class Sum:
    value: torch.Tensor

    def __post_init__(self) -> None:
        if self.value.dim() != 2:
            raise ValueError("a matrix, please")


class Returning(torch.nn.Module):
    """Two layers, and what a subclass makes of the second one's output; each layer is a call that can be found in a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.table = torch.nn.Embedding(4, 4)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.hidden(x).exp()


class Storing(Returning):
    last: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.last = self.hidden(x)
        return self.last.exp()


class Counting(Returning):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.hidden(x).exp()


class Filling(Returning):
    def forward(self, x: torch.Tensor, store: list[Any]) -> Any:
        store.append(self.hidden(x) * 2)
        return store[-1].exp()


class Updating(Returning):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.hidden(x)
        self.total += hidden.sum(0)
        return hidden.exp()


class Structured(Returning):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.hidden(x)
        return {"answer": Answer(hidden.exp(), x.shape[0], "answer"), "sum": Sum(hidden + 1), "more": [x, None]}


class Looking(Returning):
    """Looks up what the second layer says, which may be out of range."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.table((self.second(torch.tanh(self.first(x))) * 0).long())


def wrapped(module: torch.nn.Module, backend: str = "aot_eager") -> NNsight:
    return NNsight(module, compile={"backend": backend})


def run(model: NNsight, *args: Any, compile: bool = True, times: int = 1) -> tuple[Any, Any]:
    """Save the edited output of the first layer, several times; return it, and the report."""
    for _ in range(times):
        with model.trace(*args, compile=compile) as tracer:
            model.first.output[:, 0] += 2.0
            hidden = model.first.output.save()
    return hidden, tracer.report


def edited(module: Returning, x: torch.Tensor = X) -> torch.Tensor:
    """Return the same by hand."""
    hidden = module.first(x)
    hidden[:, 0] += 2.0
    return hidden


def layers_in(report: Any) -> int:
    return str(report.code).count("linear(")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_nobody_sees_is_not_computed(backend: str) -> None:
    module = Returning()
    model = wrapped(module, backend)
    for number in range(3):
        found, report = run(model, X)
        same(found, edited(module))
        assert layers_in(report) == 1
        assert "exp" not in report.code
        assert report.replayed == (number > 0)


def test_a_block_that_waits_for_the_result_gets_it() -> None:
    module = Structured()
    model = wrapped(module)
    run(model, X)
    for _ in range(2):
        with model.trace(X):
            model.first.output[:, 0] += 2.0
            result = model.output.save()
        with model.trace(X) as tracer:
            model.first.output[:, 0] += 2.0
            whole = tracer.result.save()
    hidden = module.second(torch.tanh(edited(module)))
    for found in (result, whole):
        assert (found["answer"].rows, found["answer"].name) == (2, "answer")
        close([found["answer"].hidden, found["sum"].value, found["more"][0]], [hidden.exp(), hidden + 1, X])


def test_a_call_and_one_of_several_invokes_get_it() -> None:
    module = Returning()
    model = wrapped(module)
    with model.trace() as tracer:
        with tracer.invoke(X):
            model.first.output[:, 0] += 2.0
        with tracer.invoke():
            result = tracer.result.save()
    close(result, module.second(torch.tanh(edited(module))).exp())
    run(model, X)
    close(model(X), module(X))
    with model.edit(inplace=True):
        model.first.output[:, 0] += 2.0
    close(model(X), module.second(torch.tanh(edited(module))).exp())


def test_what_the_model_stores_in_itself_or_in_a_list_is_computed() -> None:
    module, filling, store = Storing(), Filling(), []
    model, filled = wrapped(module), wrapped(filling)
    for number in range(1, 4):
        found, _ = run(model, X + number)
        same(found, edited(module, X + number))
        close(module.last, module.second(torch.tanh(edited(module, X + number))))
        run(filled, X, store)
        assert len(store) == number
        close(store[-1], filling.second(torch.tanh(edited(filling))) * 2)


def test_what_a_hook_stores_is_computed() -> None:
    module, store = Returning(), []
    module.second.register_forward_hook(lambda module, args, output: store.append(output))
    run(wrapped(module), X)
    close(store[-1], module.second(torch.tanh(edited(module))))


def test_a_counter_counts_and_a_buffer_is_updated() -> None:
    module, updating = Counting(), Updating()
    _, report = run(wrapped(module), X, times=3)
    assert module.calls == 3
    assert layers_in(report) == 1
    run(wrapped(updating), X, times=2)
    close(updating.total, 2 * updating.second(torch.tanh(edited(updating))).sum(0))


def test_random_numbers_are_drawn_all_the_same() -> None:
    class Drawing(Returning):
        def forward(self, x: torch.Tensor) -> Any:
            return self.hidden(x) + torch.randn(2, 4)

    model, drawn = NNsight(Drawing(), compile={"backend": "eager"}), []
    for compile in (True, False):
        torch.manual_seed(1)
        run(model, X, compile=compile)
        drawn.append(torch.rand(3))
    same(drawn[0], drawn[1])


def test_sizes_may_change() -> None:
    module = Structured()
    model = wrapped(module)
    for rows in (2, 3, 5, 2, 7):
        x = torch.randn(rows, 4)
        found, report = run(model, x)
        same(found, edited(module, x))
        assert layers_in(report) == 1


@pytest.mark.parametrize("kind", [torch.float64, "meta", torch.complex64])
def test_what_the_rest_of_the_model_does_not_take_is_an_error(kind: Any) -> None:
    model = wrapped(Returning())
    messages = []
    for compile in (True, False):
        with pytest.raises((RuntimeError, NotImplementedError)) as caught, model.trace(X, compile=compile):
            model.first.output = model.first.output.to(kind)
            hidden = model.first.output.save()
        messages.append(type(caught.value))
    assert messages[0] is messages[1]


def test_a_view_that_the_rest_of_the_model_needs_is_an_error() -> None:
    class Viewing(Returning):
        def forward(self, x: torch.Tensor) -> Any:
            return self.first(x).view(-1)

    model = NNsight(Viewing(), compile={"backend": "eager"})
    for compile in (True, False):
        with pytest.raises(RuntimeError, match="view size is not compatible"), model.trace(torch.ones(4, 4), compile=compile):
            model.first.output = model.first.output.t()
            hidden = model.first.output.save()


def test_what_may_fail_by_values_is_computed() -> None:
    module = Looking()
    model = wrapped(module)
    _, report = run(model, X)
    assert layers_in(report) == 2
    for compile in (True, False):
        with pytest.raises((IndexError, RuntimeError)), model.trace(X, compile=compile):
            kept = model.first.output.save()
            model.table.input = model.table.input + 99


class Masking(torch.nn.Module):
    """Makes a mask, by a call in place on a new tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.ids, self.kind = torch.nn.Identity(), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.ids(x.argmax(-1, keepdim=True))
        mask = torch.zeros(x.shape)
        if self.kind == "scatter_":
            mask.scatter_(1, ids, 1.0)
        elif self.kind == "setitem":
            mask[:, ids[:, 0]] = 1.0
        else:
            mask = mask + ids // ids
        return x * mask


@pytest.mark.parametrize("kind", ["scatter_", "setitem", "floordiv"])
def test_a_backend_does_not_remove_an_edit_in_place_that_fails(kind: str) -> None:
    model = NNsight(Masking(kind), compile={"backend": "aot_eager"})
    for compile in (True, False):
        with pytest.raises((IndexError, RuntimeError)), model.trace(torch.ones(4, 4), compile=compile):
            kept = model.ids.output.save()
            model.ids.output = kept * 0 + (0 if kind == "floordiv" else 99)


@pytest.fixture(scope="module")
def small() -> LanguageModel:
    """A stock model with its defaults, and two layers."""
    return small_gpt2()


@pytest.mark.slow
def test_the_cache_of_keys_and_values_is_left_out(small: LanguageModel) -> None:
    model = small
    with model.trace("The Eiffel Tower") as tracer:
        model.transformer.h[1].output[:] += 1.0
        logits = model.lm_head.output.save()
    assert "keys" not in tracer.report.code.rpartition("return")[2]
    with model.trace("The Eiffel Tower", compile=False):
        model.transformer.h[1].output[:] += 1.0
        expected = model.lm_head.output.save()
    close(logits, expected)
    with model.trace("The Eiffel Tower") as tracer:
        model.transformer.h[1].output[:] += 1.0
        result = tracer.result.save()
    close(result.logits, expected)
    assert result.past_key_values.get_seq_length() == expected.shape[1]


@pytest.mark.slow
def test_generation_sees_what_its_model_returns(small: LanguageModel) -> None:
    tokens = []
    for compile in (True, False):
        with small.generate("The Eiffel Tower", max_new_tokens=3, do_sample=False, compile=compile) as tracer:
            small.transformer.h[1].output[:] += 1.0
            tokens.append(tracer.result.save())
    same(tokens[0], tokens[1])


def tensor_peak(function: Callable[[], Any]) -> int:
    """Return how many bytes tensors take at most during a call, more than before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    handed_out = (event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(itertools.accumulate(handed_out), default=0)


@pytest.mark.slow
def test_a_trace_that_saves_nothing_extra_takes_no_more_memory() -> None:
    """Than the plain compiled model, which has one set of activations at a time, too."""
    model = demo_model(compile=True)
    inputs = model.tokenizer("The Eiffel Tower is in the city of", return_tensors="pt")
    plain = torch.compile(model._module)

    def steer() -> None:
        with model.trace(**inputs):
            model.transformer.h[2].output[:, -1] += 1.0
            model.lm_head.output.save()

    def call() -> None:
        plain(**inputs)

    for function in (steer, steer, call, call):
        function()
    assert 0 < tensor_peak(steer) <= 1.02 * tensor_peak(call)


def _edited_then_viewed(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with model.trace(x):
        model.input.mul_(2)
        view = model.input.transpose(0, 1).save()
        model.output.save()
    return view, x.transpose(0, 1)


def _viewed_then_edited(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with model.trace(x):
        view = model.input.chunk(2, -1)[1].save()
        model.input.add_(1)
        model.output.save()
    return view, x[:, 3:]


def _from_outside(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), model.trace(torch.ones(3, 6)):
        result = model.output
        x += result
        view = x.T.unsqueeze(0).save()
    return view, x.T[None]


def _perhaps_copied(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    due = x.reshape(-1)
    with model.trace(x):
        found = model.input.reshape(-1).save()
        model.input.mul_(2)
        model.output.save()
    return found, due


def _by_sizes(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with model.trace(x):
        value = model.input
        value.mul_(2)
        view = value.view_as(value)[: value.shape[0] - 1].T.save()
        model.output.save()
    return view, x[:2].T


def _by_list(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with model.trace(x):
        value = model.input
        value.mul_(2)
        found = value[[0, 1]].save()
        model.output.save()
    return found, x[[0, 1]]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", [_edited_then_viewed, _viewed_then_edited, _from_outside, _perhaps_copied, _by_sizes, _by_list])
def test_views_of_edited_inputs_wherever_these_are_in_memory(block: Any, backend: str) -> None:
    def tensors() -> list[torch.Tensor]:
        whole = torch.arange(36.0)
        return [whole[:18].view(3, 6), whole[6:24].view(3, 6), whole.view(3, 12)[:, :6], whole[18:].view(3, 6)]

    net = torch.nn.Linear(6, 6)
    for first in range(3):
        model = NNsight(net, compile={"backend": backend})
        block(model, tensors()[first])
        for number in range(4):
            x = tensors()[number]
            found, due = block(model, x)
            assert torch.equal(found, due)
            memory, *shared = (one.untyped_storage()._cdata for one in (x, found, due))
            assert shared[0] == shared[1] or memory not in shared
