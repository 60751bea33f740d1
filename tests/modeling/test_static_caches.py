"""Static caches of generations are made before the model runs, of all families that write keys and values."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config

from nnsight import LanguageModel, fx
from nnsight.modeling import static_caches
from nnsight.modeling.static_caches import static_cache

from ..zoo.models import specimens

STATIC = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
FAMILIES = dict.fromkeys(("gpt2", "llama", "gemma3", "mixtral", "deepseek-v3", "falcon"), True) | {"jamba": False, "mamba": False}


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(4, 60, (rows, length), generator=torch.Generator().manual_seed(10 * rows + length))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_generations_are_those_of_transformers(family: str) -> None:
    net: Any = specimens()[family].build()
    model = LanguageModel(net)
    assert (static_cache(net, 1, 8) is not None) == FAMILIES[family]
    for rows, length in ((1, 5), (2, 9), (1, 14)):  # 14 is longer than the windows that gemma3 looks at
        given = ids(rows, length)
        expected = net.generate(given, attention_mask=torch.ones_like(given), **STATIC)
        with model.generate(given, **STATIC) as tracer:
            found = tracer.result.save()
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mpt", "llama"])
def test_a_model_that_is_configured_without_a_cache_gets_none(family: str) -> None:
    net: Any = specimens()[family].build()  # MPT has no cache by default
    net.generation_config.use_cache = False
    given = ids(2, 5)
    expected = net.generate(given, attention_mask=torch.ones_like(given), **STATIC)
    with LanguageModel(net).generate(given, **STATIC) as tracer:
        found = tracer.result.save()
    assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize("length", [3, 25])
@pytest.mark.parametrize("options", [{}, {"max_length": 30}, {"max_new_tokens": 3, "max_cache_len": 64}], ids=["default", "length", "room"])
def test_a_cache_is_long_enough(length: int, options: dict[str, int]) -> None:
    net: Any = specimens()["llama"].build()
    net.generation_config.eos_token_id = None
    given = ids(1, length)
    with LanguageModel(net).generate(given, do_sample=False, cache_implementation="static", **options) as tracer:
        found = tracer.result.save()
    expected = net.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **options)
    assert torch.equal(found, expected)
    assert net._previous_max_cache_length >= max(found.shape[1] - 1, options.get("max_cache_len", 0))


@torch.no_grad()
def test_a_cache_has_the_dtype_of_the_model_and_of_autocast() -> None:
    net: Any = specimens()["llama"].build()
    model = LanguageModel(net)

    def dtypes() -> set[torch.dtype]:
        with model.generate(ids(1, 5), **STATIC, return_dict_in_generate=True) as tracer:
            made = tracer.result.save()
        cache = made.get("cache", made.get("past_key_values"))
        return {layer.values.dtype for layer in cache.layers}

    assert dtypes() == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes() == {torch.bfloat16}
    net.to(torch.float64)
    assert dtypes() == {torch.float64}


@pytest.mark.slow  # Inductor
@torch.no_grad()
def test_a_compiled_step_knows_the_addresses_of_its_cache(lowered: list[tuple[int, int]]) -> None:
    """A CUDA graph copies all other inputs at each step, and there is none if it edits one of them."""
    net: Any = specimens()["llama"].build()
    model = LanguageModel(net, compile={"mode": "reduce-overhead"})
    with functorch_config.patch(enable_autograd_cache=False):
        for _ in range(2):
            fx.counters.reset()
            with model.generate(ids(1, 5), **STATIC) as tracer:
                for _ in tracer.iter[:6]:
                    model.model.layers[0].output[:, -1] += 1.0
                tracer.result.save()
    assert fx.counters.captures == fx.counters.compiles == 0
    _, static = lowered[-1]
    # The parameters, the frequencies of the positions, and keys, values and length of each layer.
    assert static == len([*net.parameters()]) + 1 + 3 * len(net.model.layers)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiled", [False, {"backend": "aot_eager"}])
def test_the_memory_of_a_cache_is_used_again(family: str, compiled: Any) -> None:
    net: Any = specimens()[family].build()
    model = LanguageModel(net, compile=compiled)
    given, factor = ids(2, 9), float("nan")

    def generated(**options: Any) -> tuple[torch.Tensor, set[int]]:
        """Return the tokens, and where the keys of the layers lay in memory."""
        places: set[int] = set()
        with model.generate(given, **STATIC, **options) as tracer:
            model.model.layers[0].output[:] *= factor
            tokens = tracer.result.save()
        for _, layers in static_caches._last_caches.values():
            places |= {layer["keys"].storage.data_ptr() for layer in layers}
        return tokens, places

    def by_hand() -> torch.Tensor:
        times: list[int] = []

        def edit(layer: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            times.append(1)
            return output * factor if len(times) == 1 else output

        with net.model.layers[0].register_forward_hook(edit):
            found: torch.Tensor = net.generate(given, attention_mask=torch.ones_like(given), **STATIC)
        return found

    static_caches._last_caches.clear()
    _, first = generated()
    gc.collect()  # of a capture
    factor = 1.5  # what the last generation has left in the memory, no numbers here, has no effect on the next
    tokens, second = generated()
    assert second == first
    assert torch.equal(tokens, by_hand())
    result, third = generated(return_dict_in_generate=True)
    assert third == first
    kept = [layer.keys for layer in (result.get("cache") or result["past_key_values"]).layers]
    values = [keys.clone() for keys in kept]
    del result
    tokens, fourth = generated()
    assert fourth.isdisjoint(first), "memory of values that somebody has is not used again"
    assert torch.equal(tokens, by_hand())
    assert all(map(torch.equal, kept, values))
    assert generated()[1] == fourth
    given = ids(1, 9)
    tokens, _ = generated()
    assert torch.equal(tokens, by_hand())


@torch.no_grad()
def test_the_memory_of_a_cache_goes_with_the_model() -> None:
    net: Any = specimens()["llama"].build()
    with LanguageModel(net).generate(ids(1, 5), **STATIC):
        pass
    ((_, layers),) = [kept for module, kept in static_caches._last_caches.items() if module is net]
    storage = weakref.ref(layers[0]["keys"].storage)
    del net, layers, _
    gc.collect()
    assert storage() is None
