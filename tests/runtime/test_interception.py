"""Interception: installed for a run and gone after it, and what it sees is what a caller of the module sees."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

from nnsight import NNsight
from nnsight.runtime import Instrumentation

from ..conftest import Hooks, assert_no_instrumentation, both, close

X = torch.ones(2, 3)


class Keywords(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, flag: bool = True) -> dict[str, torch.Tensor]:
        return {"scaled": x * scale, "plain": x if flag else -x}


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.keywords = Keywords()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.keywords(self.linear(x), scale=x, flag=False)
        return out["scaled"], out["plain"]


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    return NNsight(Nested(), compile={"backend": "eager"})


@both
def test_arguments_and_results_by_keyword(model: NNsight, compile: bool) -> None:
    reference = Hooks(model._module)
    reference.input("keywords", lambda a, k: ((a[0] + 1,), {**k, "scale": k["scale"] * 3}))
    reference.output("keywords", lambda out: {**out, "plain": out["plain"] - 5})
    expected = reference(X)
    with model.trace(X, compile=compile):
        args, kwargs = model.keywords.inputs
        flag = kwargs["flag"].save()
        model.keywords.inputs = ((args[0] + 1,), {**kwargs, "scale": kwargs["scale"] * 3})
        out = model.keywords.output
        model.keywords.output = {**out, "plain": out["plain"] - 5}
        scaled, plain = model.output
        scaled.save(), plain.save()
    assert flag is False
    assert torch.equal(scaled, expected[0])
    assert torch.equal(plain, expected[1])
    assert not torch.equal(plain, model._module(X)[1])


@both
def test_input_of_a_module_called_by_keyword_only(compile: bool) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keywords = Keywords()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.keywords(x=x, scale=x)["scaled"]

    model = NNsight(Outer(), compile={"backend": "eager"})
    with model.trace(X, compile=compile):
        given = model.keywords.input.clone().save()
        model.keywords.input = model.keywords.input * 2
        out = model.output.save()
    assert torch.equal(given, X)
    assert torch.equal(out, X * 2)


def test_users_forward_hooks_are_part_of_the_module(model: NNsight) -> None:
    """A read sees what the caller of the module gets: after the user's hooks; inputs are as passed, before them."""
    linear = model._module.linear
    pre = linear.register_forward_pre_hook(lambda _, args: (args[0] * 10,))
    post = linear.register_forward_hook(lambda _, __, out: out + 100)
    expected = model._module(X)
    with model.trace(X, compile=False):
        given = model.linear.input.clone().save()
        value = model.linear.output.clone().save()
        out = model.output[1].save()
    assert torch.equal(given, X)
    assert torch.equal(value, linear.forward(X * 10) + 100)
    assert torch.equal(out, expected[1])
    assert len(linear._forward_hooks) == len(linear._forward_pre_hooks) == 1
    pre.remove()
    post.remove()


@both
def test_a_forward_set_on_the_instance(model: NNsight, compile: bool) -> None:
    """As accelerate and peft do."""
    linear = model._module.linear
    original = linear.forward
    linear.forward = lambda x: original(x) * 2  # type: ignore[method-assign]
    with model.trace(X, compile=compile):
        value = model.linear.output.save()
    assert torch.equal(value, original(X) * 2)
    del linear.forward
    assert_no_instrumentation(model._module)


@both
def test_several_wrappers_of_one_module(model: NNsight, compile: bool) -> None:
    other = NNsight(model._module, compile={"backend": "eager"})
    with model.trace(X, compile=compile):
        first = model.linear.output.save()
    with other.trace(X, compile=compile):
        other.linear.output[:] = 0
        second = other.output[1].save()
    with model.trace(X, compile=compile):
        third = model.linear.output.save()
    assert torch.equal(first, third)
    assert torch.equal(first, model._module.linear(X))
    assert torch.equal(second, torch.zeros(2, 3))


@both
def test_a_wrapper_of_a_part(model: NNsight, compile: bool) -> None:
    part = NNsight(model._module.keywords, compile={"backend": "eager"})
    with part.trace(X, scale=X, compile=compile):
        out = part.output["scaled"].save()
    assert torch.equal(out, X)
    assert part.path == "model"


@both
def test_deepcopy_and_pickle_after_a_trace(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile):
        model.output  # noqa: B018
    for made in (copy.deepcopy(model._module), pickle.loads(pickle.dumps(model._module))):
        assert torch.equal(made(X)[0], model._module(X)[0])
        assert_no_instrumentation(made)
        wrapped = NNsight(made)
        with wrapped.trace(X):
            wrapped.linear.output[:] = 1.0
            value = wrapped.output[1].save()
        assert torch.equal(value, -torch.ones(2, 3))


def test_entering_nests() -> None:
    module = torch.nn.Linear(3, 3)
    instrumentation = Instrumentation({"model": module})
    with instrumentation:
        with instrumentation:
            assert "_call_impl" in module.__dict__
        assert "_call_impl" in module.__dict__
        assert torch.equal(module(X), module.forward(X))
    assert_no_instrumentation(module)


def test_an_interception_of_another_library_is_put_back() -> None:
    module = torch.nn.Linear(3, 3)
    calls: list[int] = []
    original = module._call_impl

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    module._call_impl = theirs  # type: ignore[method-assign]
    with Instrumentation({"model": module}):
        module(X)
    assert calls == [1]
    assert module.__dict__["_call_impl"] is theirs


@both
def test_an_encoder_that_torch_computes_in_one_kernel(compile: bool) -> None:
    """Without gradients torch passes by the modules of an encoder's layer, unless they have hooks; a trace sees them as hooks do."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    net, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 5, 8)
    seen: list[torch.Tensor] = []
    handle = net.layers[1].linear1.register_forward_hook(lambda _, __, out: seen.append(out))
    model = NNsight(net, compile={"backend": "eager"} if compile else False)
    with torch.no_grad():
        net(x)
        handle.remove()
        with model.trace(x):
            found = model.layers[1].linear1.output.save()
    close(found, seen[0])
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_module_compiled_by_torch(model: NNsight) -> None:
    wrapped = NNsight(torch.compile(model._module, backend="eager"))
    with wrapped.trace(X):
        wrapped.linear.output[:] = 1.0
        out = wrapped.output[1].save()
    assert torch.equal(out, -torch.ones(2, 3))


@pytest.mark.parametrize("compiled", [None, "eager", "aot_eager"])
def test_a_submodule_compiled_by_torch(compiled: str | None) -> None:
    """The compiled submodule and the modules inside it occur in eager and in compiled runs; outside of runs it is compiled as before."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), torch.nn.Linear(3, 2))
    inner = net[1]
    net[1] = torch.compile(inner, backend="eager")
    forward = net[1].__dict__["forward"]
    model = NNsight(net, compile={"backend": compiled, "fullgraph": True} if compiled else False)
    for rows in (2, 5):
        x = torch.randn(rows, 3)
        with model.trace(x):
            hidden = model[1]._orig_mod[0].output
            model[1]._orig_mod[0].output = hidden * 2
            model[1].output = model[1].output + 1
            out = model.output.save()
            with out.sum().backward():
                gradient = hidden.grad.save()
        before = net[0](x)
        held = inner[0](before)
        expected = net[2](inner[1](held * 2) + 1)
        close(out, expected)
        close(gradient, torch.autograd.grad(expected.sum(), held)[0])
        with model.trace(x):
            model[1].skip(model[1].input)
            out = model.output.save()
        close(out, net[2](before))
    assert net[1].__dict__["forward"] is forward
    assert_no_instrumentation(net)


class Gate(torch.nn.Module):
    """Waits twice for another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.barrier.wait()
        self.barrier.wait()
        return x + 1


@pytest.mark.parametrize("whole_ends_first", [True, False])
def test_runs_of_a_model_and_of_a_part_of_it_in_two_threads(whole_ends_first: bool) -> None:
    """Their trees intercept the calls of the same module; the run of the model reaches it while that of the part is active."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), Gate(), torch.nn.Linear(3, 3))
    gate: Any = net[1]
    whole, part = NNsight(net), NNsight(net[2])
    seen: list[torch.Tensor] = []

    def run() -> None:
        with whole.trace(X):
            whole[2].input[:] = 2.0
            seen.append(whole[2].output.save())

    worker = threading.Thread(target=run)
    worker.start()
    gate.barrier.wait()
    with part.trace(X):
        mine = part.output.save()
        if whole_ends_first:
            gate.barrier.wait()
            worker.join()
        part.output[:] = 0.0
    if not whole_ends_first:
        gate.barrier.wait()
        worker.join()
    assert torch.equal(seen[0], net[2](torch.full((2, 3), 2.0)))
    assert torch.equal(mine, torch.zeros(2, 3))
    assert_no_instrumentation(net)
    for again in (whole[2], part):
        with again.trace(X) as tracer:
            out = tracer.result.save()
        assert torch.equal(out, net[2](X))


class Sourced(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize("change", [False, True], ids=["of a model and of a part", "before and after a change of the model"])
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_runs_that_open_one_function_in_two_threads(first_ends_first: bool, change: bool) -> None:
    """Each rewrites the function for its own operations, and neither leaves its version on the module."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), Gate(), Sourced())
    gate: Any = net[1]
    whole = NNsight(net)
    part: Any = NNsight(net[2])
    seen: list[torch.Tensor] = []

    def run() -> None:
        with whole.trace(X):
            whole[2].source.torch_tanh_0.input[:] = 2.0
            seen.append(whole[2].output.save())

    def finish() -> None:
        gate.barrier.wait()
        worker.join()

    worker = threading.Thread(target=run)
    worker.start()
    gate.barrier.wait()
    if change:
        net[2].extra = torch.nn.Linear(3, 3)
    other = part if not change else whole[2]
    with other.trace(X):
        mine = other.source.torch_tanh_0.output.save()
        again: Any = NNsight(net[2], path="again")
        with again.trace(X):
            third = again.source.torch_tanh_0.output.save()
        if first_ends_first:
            finish()
    if not first_ends_first:
        finish()
    assert torch.equal(seen[0], torch.full((2, 3), 2.0).tanh())
    assert torch.equal(mine, X.tanh()) and torch.equal(third, X.tanh())
    assert_no_instrumentation(net)
    assert "forward" not in vars(net[2])
