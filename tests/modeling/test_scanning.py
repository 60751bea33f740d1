"""Scans: sizes and types as a real run has them, and no effect on anything."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import random
import threading
import traceback
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor

import nnsight
from nnsight import LanguageModel, NNsight

from ..conftest import CACHE, Case, Hooks

PROMPT = "The Eiffel Tower is in the city of"


class Net(torch.nn.Module):
    """Normalises with running statistics, counts its calls, keeps a buffer, and drops at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.second = torch.nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(4))
        self.calls = 0
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        self.total = self.total + hidden.detach().sum(0)
        self.calls += 1
        self.history.append(hidden)
        return self.second(self.drop(hidden))


@pytest.fixture
def model() -> NNsight:
    return NNsight(Net())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 3)


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return nnsight.demo_model()


def line_of(error: pytest.ExceptionInfo[Any]) -> str:
    """The last line of this file in a traceback."""
    return [entry.line or "" for entry in traceback.extract_tb(error.tb) if entry.filename == __file__][-1]


# -- what a scan shows -------------------------------------------------------------------------------------------------


def sizes(value: Any) -> Any:
    leaves, structure = torch.utils._pytree.tree_flatten(value)
    shown = [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]
    return shown, str(structure)


def test_every_module_has_the_sizes_and_types_of_a_real_run(case: Case) -> None:
    inputs, seen = case.inputs(6, 2), {}
    hooks = Hooks(case.module)
    for path, _ in case.module.named_modules():
        hooks.output(path, functools.partial(lambda path, out: seen.update({path: sizes(out)}), path))
    with torch.no_grad():
        hooks(**inputs)

    model = NNsight(case.module)
    with torch.no_grad(), model.scan(**inputs):
        pass
    found = {path: envoy._fake_output for path, envoy in paths_and_envoys(model) if envoy._fake_output is not None}
    assert {path: sizes(value) for path, value in found.items()} == seen
    for value in found.values():
        assert all(
            isinstance(leaf, FakeTensor)
            for leaf in torch.utils._pytree.tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        )


def paths_and_envoys(model: NNsight) -> list[tuple[str, Any]]:
    return [(path.removeprefix("model").removeprefix("."), envoy) for path, envoy in nnsight.Envoy.named_modules(model)]


def test_values_in_the_block_are_fakes_with_sizes(model: NNsight, x: torch.Tensor) -> None:
    with model.scan(x) as tracer:
        hidden = model.first.output.save()
        wide = torch.cat([hidden, torch.ones(5, 2)], dim=1).save()
        columns = model.second.input.shape[-1].save()
        result = tracer.result.save()
    assert isinstance(hidden, FakeTensor) and isinstance(wide, FakeTensor) and isinstance(result, FakeTensor)
    assert hidden.shape == (5, 4) and wide.shape == (5, 6) and columns == 4 and result.shape == (5, 2)
    assert tracer.report.mode == "scan"


def test_invokes_are_scanned_as_one_batch_of_which_each_sees_its_rows(demo: LanguageModel) -> None:
    with demo.scan() as tracer:
        with tracer.invoke("Hello"):
            first = demo.lm_head.output.shape.save()
        with tracer.invoke([PROMPT, "Hello"]):
            second = demo.lm_head.output.shape.save()
        with tracer.invoke():
            both = demo.lm_head.output.shape.save()
    assert (first[0], second[0], both[0]) == (1, 2, 3) and len({first[1], second[1], both[1]}) == 1
    assert demo.lm_head._fake_output.shape[0] == 3


class Experts(torch.nn.Module):
    """The products of a mixture of experts, for which fakes of torch take bfloat16 only."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = torch.nn.functional.grouped_mm
        several = x.expand(2, *x.shape).contiguous()
        one, other = product(x, weights, offs=ends), product(x.T, x, offs=ends)
        return one, other, product(several, weights), product(several, weights[0], offs=ends * 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_a_generation_that_names_no_length_makes_as_many_tokens(demo: LanguageModel) -> None:
    end, demo._module.generation_config.eos_token_id = demo._module.generation_config.eos_token_id, None
    try:
        made = []
        for scan in (True, False):
            with demo.generate("Rome is", scan=scan, compile=False) as tracer:
                made.append(tracer.result.save().shape)
        assert made[0] == made[1]
    finally:
        demo._module.generation_config.eos_token_id = end


def test_experts_in_float32_are_scanned() -> None:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    model, given = NNsight(Experts()), (torch.randn(8, 16), torch.randn(2, 16, 24), torch.tensor([3, 8], dtype=torch.int32))
    expected = model._module(*given[:2], given[2])
    with model.scan(*given):
        pass
    assert sizes(model._fake_output) == sizes(expected)


def test_a_skipped_module_returns_the_replacement_and_nothing_inside_runs(x: torch.Tensor) -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 4)), torch.nn.LazyLinear(2)))
    model._module(x)
    with model.scan(x):
        model[0].skip(torch.zeros(7, 4))
        out = model.output.shape.save()
    assert out == (7, 2) and model[0]._fake_output.shape == (7, 4)
    assert model[0][0]._fake_output is None


def test_a_scan_can_be_stopped(model: NNsight, x: torch.Tensor) -> None:
    with model.scan(x) as tracer:
        hidden = model.norm.output.shape.save()
        tracer.stop()
    assert hidden == (5, 4)
    assert model.first._fake_output.shape == (5, 4) and model.second._fake_output is None


def test_scans_of_a_session_can_use_each_others_fakes(model: NNsight, x: torch.Tensor) -> None:
    with model.session():
        with model.scan(x):
            hidden = model.first.output
        with model.scan(torch.ones(1, 3)):
            model.first.output = model.first.output + hidden
            out = model.second.output.shape.save()
    assert out == (5, 2)


def test_a_fake_can_be_the_input_of_another_scan(model: NNsight, x: torch.Tensor) -> None:
    with model.scan(x):
        wide = torch.cat([model.first.input] * 2).save()
    found: list[Any] = []

    def scan() -> None:
        with model.scan(wide):
            found.append(model.output.shape)

    scan()
    thread = threading.Thread(target=scan)  # fakes of another thread belong to another mode
    thread.start()
    thread.join()
    assert found == [(10, 2)] * 2


def test_a_forward_set_on_the_instance_is_followed(x: torch.Tensor) -> None:
    net = Net()
    original = net.forward
    net.forward = lambda x: torch.cat([original(x)] * 2)  # type: ignore[method-assign]
    net.first.forward = functools.partial(torch.nn.Linear.forward, net.first)  # type: ignore[method-assign]
    model = NNsight(net)
    with model.scan(x):
        inner = model.first.output.shape.save()
        out = model.output.shape.save()
    assert inner == (5, 4) and out == (10, 2) and net.calls == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_forward_that_converts_a_module_is_scanned_and_recorded(x: torch.Tensor, dtype: torch.dtype) -> None:
    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Sequential(torch.nn.Linear(x.shape[-1], 4), torch.nn.GRU(4, 4), torch.nn.Identity())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.part = self.part.to(dtype)
            return self.part[1](self.part[0](x.to(dtype)))[0] * 2

    net = Router()
    model = NNsight(net)
    for _ in range(2):
        with model.scan(x):
            found = nnsight.save((model.part[0].output.dtype, model.part[1].input.shape))
        assert found == (dtype, (*x.shape[:-1], 4))
    assert net.part[0].weight.dtype == torch.float32
    for _ in range(2):
        with model.trace(x, program=True) as tracer:
            model.part[0].output += model.part[0].bias
            out = model.output.save()
    part = net.part.to(dtype)
    expected = part[1](part[0](x.to(dtype)) + part[0].bias)[0] * 2
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(tracer.program.run(model, x)["out"], expected)


@pytest.mark.filterwarnings("ignore")  # quantisation is deprecated
def test_a_dynamically_quantised_model_is_scanned_and_recorded_again_and_again(x: torch.Tensor) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(x.shape[-1], 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    net = torch.ao.quantization.quantize_dynamic(layers, {torch.nn.Linear}, dtype=torch.qint8)
    model = NNsight(net)
    for _ in range(3):
        with model.scan(x):
            shape = model[0].output.shape.save()
        with model.trace(x, program=True) as tracer:
            model[0].output = model[0].output * 0.5
            out = model.output.save()
        assert shape == (5, 4)
        torch.testing.assert_close(out, net[2](net[0](x).mul(0.5).relu()))
        torch.testing.assert_close(tracer.program.run(model, x[:2])["out"], net[2](net[0](x[:2]).mul(0.5).relu()))


def test_operations_of_source_are_scanned(x: torch.Tensor) -> None:
    model = NNsight(Net())
    with model.scan(x):
        hidden = model.source.self_norm_0.output.shape.save()
    assert hidden == (5, 4)


def test_gradients_have_sizes_too(model: NNsight, x: torch.Tensor) -> None:
    with model.scan(x):
        hidden = model.first.output
        with model.output.sum().backward():
            gradient = hidden.grad.shape.save()
    assert gradient == (5, 4)
    assert all(weight.grad is None for weight in model.parameters())


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_an_index_out_of_range_is_raised_at_its_line(model: NNsight, x: torch.Tensor) -> None:
    with pytest.raises(IndexError, match="out of bounds") as error:
        with model.scan(x):
            hidden = model.first.output
            hidden[:, 10] = 0
    assert line_of(error) == "hidden[:, 10] = 0"


class Counting(torch.nn.Module):
    """Looks at values: it checks them, and cuts by one of them."""

    def __init__(self, cuts: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.cuts = cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > -10, lambda: "too small")
        if self.cuts:
            x = torch.cat(x.split([1, int((x[:, 0] > 0).sum()), 1]))
        return self.layer(x)


def test_what_a_model_checks_holds_in_a_scan() -> None:
    model = NNsight(Counting(cuts=False))
    with model.scan(torch.ones(5, 3)):
        shape = model.layer.output.shape.save()
    assert shape == (5, 2)
    with pytest.raises(RuntimeError, match="too small"), model.trace(torch.full((5, 3), -20.0)):
        never = model.layer.output


def test_an_error_after_a_guess_says_that_there_was_one() -> None:
    model = NNsight(Counting(cuts=True))
    with model.trace(torch.ones(5, 3)[:3].index_fill(0, torch.tensor([0, 1]), -1.0)):
        shape = model.layer.output.shape.save()
    assert shape == (3, 2)
    with pytest.raises(RuntimeError, match="split") as caught, model.scan(torch.ones(5, 3)):
        never = model.layer.output
    assert "got guesses" in caught.value.__notes__[0]


# -- no effects --------------------------------------------------------------------------------------------------------


def test_nothing_of_the_model_changes(model: NNsight, x: torch.Tensor, clean: Any) -> None:
    net = model._module.train()
    before, buffers = copy.deepcopy(net.state_dict()), dict(net.named_buffers())
    original = x.clone()
    with model.scan(x):
        model.first.input[:] = 0
        model.norm.running_mean[:] = 7
        model.output.shape.save()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(buffers[name] is value for name, value in net.named_buffers())
    assert net.calls == 0 and net.history == []
    assert torch.equal(x, original)
    clean(net)


def test_random_number_generators_are_left_alone(model: NNsight, x: torch.Tensor) -> None:
    model._module.train()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with model.scan(x):
        torch.manual_seed(random.randint(0, 9) + np.random.randint(9))
        noise = torch.randn(4)
        model.first.output[:] += noise + torch.rand(4)
        model.output.shape.save()
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_a_cache_given_as_input_is_not_filled(gpt2: Case) -> None:
    inputs = gpt2.inputs(4)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        gpt2.module(**inputs, **{CACHE: cache})
    before = [layer.keys.clone() for layer in cache.layers]
    model = NNsight(gpt2.module)
    with model.scan(input_ids=torch.tensor([[3]]), **{CACHE: cache}):
        hidden = model.transformer.h[0].attn.output[0].shape.save()
    assert hidden == (1, 1, 32)
    assert [layer.keys.shape for layer in cache.layers] == [keys.shape for keys in before]
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
    assert not any(isinstance(layer.keys, FakeTensor) for layer in cache.layers)


def test_weights_have_no_gradients_of_a_scan(model: NNsight, x: torch.Tensor) -> None:
    with model.scan(x):
        loss = model.output.sum().save()
    loss.backward()
    assert all(weight.grad is None for weight in model.parameters())


def test_a_run_in_another_thread_does_not_notice(x: torch.Tensor) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model, expected, wrong = NNsight(net), net(x), []

    def trace() -> None:
        for _ in range(50):
            with model.trace(x):
                out = model.output.save()
            if isinstance(out, FakeTensor) or not torch.equal(out, expected):
                wrong.append(out)

    thread = threading.Thread(target=trace)
    thread.start()
    for _ in range(10):
        with model.scan(x):
            out = model.output.save()
        assert isinstance(out, FakeTensor)
    thread.join()
    assert wrong == []


# -- fakes outside of traces -------------------------------------------------------------------------------------------


def test_fakes_of_modules_nobody_asked_for_are_kept(model: NNsight, x: torch.Tensor) -> None:
    assert model.norm._fake_output is None and model.norm._fake_inputs is None
    with model.scan(x):
        model.first.output.shape.save()
    assert model.norm._fake_output.shape == (5, 4)
    args, kwargs = model.second._fake_inputs
    assert args[0].shape == (5, 4) and kwargs == {}
    with model.scan(torch.ones(2, 3)):
        pass
    assert model.norm._fake_output.shape == (2, 4)


def test_outside_of_a_run_properties_show_what_the_scan_saw(model: NNsight, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="outside of interleaving"):
        model.norm.output  # noqa: B018
    with model.scan(x):
        pass
    assert model.norm.output.shape == (5, 4)
    assert model.first.input.shape == (5, 3) and model.first.inputs[0][0].shape == (5, 3)
    with pytest.raises(ValueError, match="outside of interleaving"):
        model.norm.output = torch.zeros(1)
    with model.trace(x):
        real = model.norm.output.save()
    assert not isinstance(real, FakeTensor)


def test_kept_fakes_keep_no_weights_alive(no_gc: None) -> None:
    net = Net()
    model = NNsight(net)
    with model.scan(torch.ones(5, 3)):
        pass
    output = model._fake_output
    weight, root = weakref.ref(net.first.weight), weakref.ref(net)
    del net, model
    assert output.shape == (5, 2) and weight() is None and root() is None


def test_a_scanned_model_is_copied_and_pickled(model: NNsight, x: torch.Tensor) -> None:
    with model.scan(x):
        pass
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.first._fake_output is None
        with copied.scan(torch.ones(2, 3)):
            pass
        assert copied.first._fake_output.shape == (2, 4)
    assert model.first._fake_output.shape == (5, 4)
    gc.collect()


# -- trace(scan=, validate=) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_validation_raises_before_the_model_runs(x: torch.Tensor, compiled: bool) -> None:
    net = Net()
    model = NNsight(net, compile={"backend": "eager"} if compiled else False)
    with pytest.raises(IndexError) as error:
        with model.trace(x, scan=True, validate=True):
            model.second.output[:, 1000] = 0
    assert line_of(error) == "model.second.output[:, 1000] = 0"
    assert net.calls == 0 and nnsight.fx.counters.captures == 0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{"scan": True}, {"validate": True}, {"scan": True, "validate": True}])
def test_a_valid_block_runs_for_real_afterwards(x: torch.Tensor, options: dict[str, bool], compiled: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = NNsight(net, compile={"backend": "eager"} if compiled else False)
    with model.trace(x, **options) as tracer:
        model[0].output[:] *= 2
        out = model.output.save()
    expected = Hooks(net).output("0", lambda value: value * 2)(x)
    assert torch.equal(out, expected) and tracer.report.mode == ("compiled" if compiled else "eager")
    assert isinstance(model[1]._fake_output, FakeTensor) and model[1]._fake_output.shape == (5, 2)


class CountRuns:
    """An object of the user's, which a rehearsal cannot keep apart."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


OUTER: dict[str, list[Any]] = {"states": []}


def test_validation_works_on_copies_of_variables_and_containers(model: NNsight, x: torch.Tensor) -> None:
    states, nested, alias, number, runs = [], {"a": [[]]}, [], 1, CountRuns()
    alias.append(states)
    with model.trace(x, validate=True):
        states.append(model.first.output)
        nested["a"][0].append(len(alias[0]))
        OUTER["states"].append(model.norm.output)
        number = nnsight.save(number + 1)
        runs.add()
    assert len(states) == 1 and not isinstance(states[0], FakeTensor)
    assert nested == {"a": [[1]]} and number == 2
    assert len(OUTER["states"]) == 1 and not isinstance(OUTER["states"].pop(), FakeTensor)
    assert runs.count == 2  # as documented


def test_validation_of_invokes(demo: LanguageModel) -> None:
    shapes: list[Any] = []
    with demo.trace(validate=True) as tracer:
        with tracer.invoke("Hello"):
            shapes.append(demo.lm_head.output.shape)
        with tracer.invoke(PROMPT):
            demo.transformer.h[0].output[:] = 0
            logits = demo.lm_head.output.save()
    assert len(shapes) == 1 and not isinstance(logits, FakeTensor)
    with pytest.raises(IndexError):
        with demo.trace(validate=True) as tracer:
            with tracer.invoke("Hello"):
                demo.lm_head.output[:, 1000] = 0
            with tracer.invoke(PROMPT):
                pass


def test_validation_in_a_session_and_with_edits(model: NNsight, x: torch.Tensor) -> None:
    with model.edit() as edited:
        edited.first.output[:] *= 2
    net = copy.deepcopy(model._module).eval()
    model._module.eval()
    with edited.session():
        with edited.trace(x, validate=True):
            hidden = edited.first.output
        with edited.trace(x, validate=True):
            edited.first.output = hidden * 1
            out = edited.output.save()
    assert torch.equal(out, Hooks(net).output("first", lambda value: value * 2)(x))
