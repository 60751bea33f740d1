"""``tracer.cache()``: activations of many modules, compared with plain torch hooks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight
from nnsight import LanguageModel, NNsight
from nnsight.runtime.cache import Cache

from ..conftest import Hooks, Rows, both

X = torch.linspace(-1, 1, 12).view(2, 6)


class Pair(torch.nn.Module):
    """Takes a keyword, returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.inner(x) * scale, {"input": x}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.pair = Pair()
        self.shared = torch.nn.Linear(6, 6)
        self.unused = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        x, _ = self.pair(x, scale=2.0)
        return self.shared(self.shared(x))


@pytest.fixture
def model() -> NNsight:
    torch.manual_seed(0)
    wrapped = NNsight(Net(), rename={"layers": "blocks", "pair": "both"})
    wrapped._make_driver({"backend": "eager"})
    return wrapped


def hooked(model: NNsight, path: str, replace: dict[str, Any] | None = None) -> list[Any]:
    """Return what the module at ``path`` returned at each call of the model, by plain torch hooks."""
    hooks, seen = Hooks(model._module), []
    for name, function in (replace or {}).items():
        hooks.output(name, function)
    hooks.output(path, seen.append)(X)
    return seen


# -- what is kept -----------------------------------------------------------------------------------------------------


@both
def test_outputs_of_all_modules(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    for path in ("layers.0", "layers.1", "pair.inner", ""):
        (expected,) = hooked(model, path)
        assert torch.equal(cache[f"model.{path}".rstrip(".")].output, expected)
    called = [name for name, module in model._module.named_modules() if name not in ("layers", "unused")]
    assert set(cache) == {f"model.{name}".rstrip(".") for name in called}
    assert len(cache) == len(called)
    assert "model.pair" in cache
    assert "model.nonsense" not in cache


@both
def test_values_are_those_after_interventions(model: NNsight, compile: bool) -> None:
    def double(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache()
        model.layers[0].output = model.layers[0].output * 2
        model.layers[1].output[:] = 0
    (plain,) = hooked(model, "layers.0")
    assert torch.equal(cache["model.layers.0"].output, plain * 2)
    assert torch.equal(cache["model.layers.1"].output, torch.zeros(2, 6))
    replace = {"layers.0": double, "layers.1": torch.zeros_like}
    assert torch.equal(cache["model"].output, hooked(model, "", replace)[0])


@both
def test_later_edits_in_place_do_not_reach_the_cache(model: NNsight, compile: bool) -> None:
    """The next module is handed the same tensor; what a block does to it there is not the first module's output."""
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache()
        kept = model.pair.output
        kept[0][:] += 1
        model.shared.input[:] = 0
    (plain,) = hooked(model, "pair")
    assert torch.equal(cache["model.pair"].output[0], plain[0] + 1)


@both
def test_structures_are_kept(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(include_inputs=True)
    ((value, extras),) = hooked(model, "pair")
    found = cache["model.pair"].output
    assert isinstance(found, tuple)
    assert torch.equal(found[0], value)
    assert torch.equal(found[1]["input"], extras["input"])
    args, kwargs = cache["model.pair"].inputs
    assert torch.equal(args[0], extras["input"])
    assert kwargs == {"scale": 2.0}
    assert torch.equal(cache["model.pair"].input, extras["input"])


@both
def test_inputs_without_outputs(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(include_inputs=True, include_output=False)
        model.layers[0].input = X * 3
    assert torch.equal(cache["model.layers.0"].input, X * 3)
    args, kwargs = cache["model.layers.0"].inputs
    assert torch.equal(args[0], X * 3)
    assert kwargs == {}
    assert cache["model.layers.0"].output is None


@both
def test_several_calls_are_a_list(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(include_inputs=True)
    expected = hooked(model, "shared")
    entry = cache["model.shared"]
    assert isinstance(entry.output, list)
    assert len(expected) == 2
    assert all(torch.equal(found, value) for found, value in zip(entry.output, expected, strict=True))
    assert torch.equal(entry.input[1], expected[0])
    assert torch.equal(entry.inputs[1][0][0], expected[0])
    assert repr(entry) == "CacheEntry(model.shared: 2 input, 2 output)"
    assert isinstance(entry, list)
    assert entry.path == "model.shared"
    assert not isinstance(cache["model.layers.0"], list)
    assert len(entry) == 2
    assert [call.output is value for call, value in zip(entry, entry.output, strict=True)] == [True, True]
    assert entry[-1].output is entry.output[1]
    assert entry[1].input is entry.input[1]
    assert len(cache["model.layers.0"]) == 1
    assert (len(cache.shared), len(cache.layers[0])) == (2, 1)
    with pytest.raises(IndexError):
        entry[2]


@both
def test_a_choice_of_modules(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(modules=[model.layers[1], "model.pair.inner", model.both])
    assert set(cache) == {"model.layers.1", "model.pair.inner", "model.pair"}
    assert torch.equal(cache["model.layers.1"].output, hooked(model, "layers.1")[0])
    with pytest.raises(KeyError, match=r"`model\.layers\.0` is not in the cache"):
        cache["model.layers.0"]


@both
@pytest.mark.parametrize("access", ["read", "write"])
def test_a_cache_made_after_an_access(model: NNsight, compile: bool, access: str) -> None:
    """It could miss modules that have run."""
    with pytest.raises(ValueError, match=r"after the block had stopped at `model\.layers\.1\.input\.i0`"):
        with model.trace(X, compile=compile) as tracer:
            if access == "read":
                model.layers[1].input  # noqa: B018
            else:
                model.layers[1].input = torch.zeros(2, 6)
            tracer.cache()


@both
def test_a_module_that_is_not_cached(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(modules=[model.layers[1]])
    assert "model.layers.0" not in cache
    with pytest.raises(KeyError, match=r"`model\.layers\.0` is not in the cache"):
        cache["model.layers.0"]
    assert torch.equal(cache["model.layers.1"].output, hooked(model, "layers.1")[0])


@both
def test_a_skipped_module(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache()
        model.pair.skip((torch.ones(2, 6), {"input": torch.zeros(2, 6)}))
    assert torch.equal(cache["model.pair"].output[0], torch.ones(2, 6))
    assert torch.equal(cache["model.shared"].output[0], model._module.shared(torch.ones(2, 6)))
    with pytest.raises(AttributeError, match="did not run"):
        cache["model.pair.inner"].output  # noqa: B018


# -- how tensors are kept ---------------------------------------------------------------------------------------------


@both
def test_tensors_are_detached_copies_of_their_dtype(model: NNsight, compile: bool) -> None:
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache()
    kept = cache["model.layers.0"].output
    assert not kept.requires_grad
    assert kept.dtype is torch.float32
    assert kept.device == torch.device("cpu")


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_flow_into_values_that_are_not_detached(model: NNsight, backend: str | None) -> None:
    if backend is not None:
        model._make_driver({"backend": backend})
    with model.trace(X, compile=backend is not None) as tracer:
        cache = tracer.cache(detach=False, device=None)
    cache["model.layers.1"].output.pow(2).sum().backward()
    found = model._module.layers[0].weight.grad
    (value,) = hooked(model, "layers.1")
    (expected,) = torch.autograd.grad(value.pow(2).sum(), model._module.layers[0].weight)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(found, expected)


@both
def test_only_floating_point_tensors_change_their_dtype(compile: bool) -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 1.5, x.argsort(-1)

    model = NNsight(torch.nn.Sequential(Mixed()), compile={"backend": "eager"})
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache(dtype=torch.bfloat16)
    value, order = cache["model.0"].output
    assert torch.equal(value, (X * 1.5).bfloat16())
    assert value.dtype is torch.bfloat16
    assert torch.equal(order, X.argsort(-1))
    assert order.dtype is torch.int64


def test_a_device_of_ones_own(model: NNsight) -> None:
    with model.trace(X) as tracer:
        cache = tracer.cache(device="meta")
    assert cache["model.layers.0"].output.is_meta
    assert cache["model.layers.0"].output.shape == (2, 6)


def test_the_cache_holds_nothing_of_the_run(model: NNsight, no_gc: None) -> None:
    import weakref

    with model.trace(X) as tracer:
        cache = tracer.cache(modules=[model.layers[0]])
    reference = weakref.ref(cache)
    kept = weakref.ref(cache["model.layers.0"].output)
    del cache
    assert reference() is None
    assert kept() is None


# -- how it reads -----------------------------------------------------------------------------------------------------


def test_by_attributes_and_indices(model: NNsight) -> None:
    with model.trace(X) as tracer:
        cache = tracer.cache(include_inputs=True)
    view = cache.model.layers[0]
    assert view.output is cache["model.layers.0"].output
    assert view.input is cache["model.layers.0"].input
    assert view.inputs is cache["model.layers.0"].inputs
    assert cache.model.pair.inner.output is cache["model.pair.inner"].output
    assert cache.model.output is cache["model"].output
    assert "model.layers.0" in repr(view)
    assert cache.layers[0].output is view.output and list(cache.layers) == ["model.layers.0", "model.layers.1"]
    assert cache.keys() == list(cache)


def test_further_names_of_modules(model: NNsight) -> None:
    with model.trace(X) as tracer:
        cache = tracer.cache(non_blocking=True)
    assert cache["model.blocks.1"].output is cache["model.layers.1"].output
    assert cache.model.blocks[1].output is cache["model.layers.1"].output
    assert cache.model.both.inner.output is cache.both.inner.output is cache["model.pair.inner"].output
    assert "model.blocks.1" in cache and cache.model["both"].output is cache["model.pair"].output


# -- invokes and generations ------------------------------------------------------------------------------------------


@both
def test_an_invoke_caches_its_rows(model: NNsight, compile: bool) -> None:
    batching = Rows(model._module)
    batching._make_driver({"backend": "eager"})
    with batching.trace(compile=compile) as tracer:
        with tracer.invoke(X[:1]):
            one = tracer.cache(include_inputs=True)
        with tracer.invoke(X[1:]):
            two = tracer.cache()
            batching.layers[0].output[:] = 0
        with tracer.invoke():
            whole = tracer.cache()
    (plain,) = hooked(model, "layers.0")
    assert torch.equal(one["model.layers.0"].output, plain[:1])
    assert torch.equal(one["model.layers.0"].input, X[:1])
    assert torch.equal(two["model.layers.0"].output, torch.zeros(1, 6))
    assert torch.equal(whole["model.layers.0"].output, torch.cat([plain[:1], torch.zeros(1, 6)]))


@both
def test_before_the_invokes_it_caches_the_batch(model: NNsight, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        cache = tracer.cache()
        with tracer.invoke(X):
            model.layers[0].output = model.layers[0].output * 2
    assert torch.equal(cache["model.layers.0"].output, hooked(model, "layers.0")[0] * 2)


def test_each_token_of_a_generation(demo: LanguageModel) -> None:
    prompt = "The Eiffel Tower is in the city of"
    with demo.generate(prompt, max_new_tokens=3, do_sample=False, compile=False) as tracer:
        cache = tracer.cache(modules=[demo.transformer.h[0]])
        ids = tracer.result.save()
    seen: list[torch.Tensor] = []
    handle = demo._module.transformer.h[0].register_forward_hook(lambda _, __, out: seen.append(out))
    prepared = demo.tokenizer(prompt, return_tensors="pt")
    try:
        expected = demo._module.generate(**prepared, max_new_tokens=3, do_sample=False, pad_token_id=0)
    finally:
        handle.remove()
    assert torch.equal(ids, expected)
    found = cache["model.transformer.h.0"].output
    assert len(found) == len(seen) == 3
    assert all(torch.equal(one, other) for one, other in zip(found, seen, strict=True))


# -- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", ["layers.0", "model.layers.9", "model.blocks.0.nonsense"])
def test_unknown_paths(model: NNsight, unknown: str, clean: Any) -> None:
    with pytest.raises(ValueError, match=f"no module of this model has the path '{unknown}'"):
        with model.trace(X) as tracer:
            tracer.cache(modules=[unknown])
    clean(model._module)


def test_missing_entries(model: NNsight) -> None:
    with model.trace(X) as tracer:
        cache = tracer.cache()
    with pytest.raises(KeyError, match=r"`model\.nonsense` is not in the cache"):
        cache["model.nonsense"]
    with pytest.raises(KeyError, match=r"model\.layers\.7"):
        cache.model.layers[7].output  # noqa: B018
    for missing, kind in (
        (lambda: cache.model.layers[7], IndexError),
        (lambda: cache.model.layers["0.weight"], KeyError),
        (lambda: cache.model.unknown, AttributeError),
    ):
        with pytest.raises(kind, match="has no module at"):
            missing()
    with pytest.raises(KeyError, match=r"nothing of `model\.unused`.*did not run"):
        cache["model.unused"]
    with pytest.raises(AttributeError, match=r"nothing of `model\.unused`.*did not run"):
        cache.model.unused.output  # noqa: B018
    assert cache.get("model.unused") is None
    assert cache["model.layers.0"].inputs is None
    assert cache.model.layers[0].input is None


@both
def test_the_modules_of_a_cache_are_those_that_ran(model: NNsight, compile: bool) -> None:
    """Containers such as a ModuleList are never called: a loop over the cache does not meet them."""
    with model.trace(X, compile=compile) as tracer:
        cache = tracer.cache()
    shapes = {path: entry.output for path, entry in cache.items() if path.startswith("model.layers")}
    assert list(shapes) == ["model.layers.0", "model.layers.1"]
    assert list(cache)[-1] == "model"  # in the order in which they returned
    assert list(cache.model.layers) == list(shapes)
    assert len(cache.model.layers) == 2
    assert cache.model.layers.keys() == list(shapes) and cache.blocks[1].keys() == ["model.layers.1"]
    assert "0" in cache.model.layers
    assert "model.layers.0" in cache.model.layers
    assert "model.pair" not in cache.model.layers
    assert "model.layers" not in cache
    assert list(cache.model.blocks) == list(shapes)


def test_a_cache_on_disk(model: NNsight, tmp_path: Path) -> None:
    with model.trace(X) as tracer:
        cache = tracer.cache()
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert list(loaded) == list(cache)
    assert torch.equal(loaded.model.layers[1].output, cache["model.layers.1"].output)


def test_the_input_of_a_module_without_arguments() -> None:
    class Constant(torch.nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(2)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = Constant()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.constant()

    model = NNsight(Net())
    with model.trace(torch.zeros(2)) as tracer:
        cache = tracer.cache(include_inputs=True)
    assert cache["model.constant"].inputs == ((), {})
    assert cache["model.constant"].input is None


@both
def test_saving_a_cache_once_more_returns_it(model: NNsight, compile: bool) -> None:
    for _ in range(3):
        with model.trace(X, compile=compile) as tracer:
            cache = tracer.cache().save()
            again = nnsight.save(cache)
        assert again is cache
        assert isinstance(cache, Cache)
        assert set(cache) == {module.path for module in model.modules()} - {"model.layers", "model.unused"}
        torch.testing.assert_close(cache["model"].output, model._module(X), rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match="outside a trace"):
        cache.save()


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    name: str


class Returning(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Result:
        return Result(x * 2, "x")


class EditsResult(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Returning()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.inner(x)
        result.hidden.add_(1)
        return result.hidden


@both
def test_tensors_of_a_dataclass_are_copied(compile: bool) -> None:
    model, x = NNsight(EditsResult(), compile={"backend": "eager"}), torch.ones(2, 3)
    with model.trace(x, compile=compile) as tracer:
        cache = tracer.cache(modules=[model.inner], dtype=torch.float64)
    kept = cache["model.inner"].output
    assert isinstance(kept, Result) and kept.name == "x"
    torch.testing.assert_close(kept.hidden, x.double() * 2)
