"""What a model returns beside tensors is there for blocks of compiled traces as for eager ones, although no graph contains it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from nnsight import NNsight, fx

from ...conftest import CACHE, both, close, same
from .. import small_gpt2

TEXT, TOKENS = "Paris is in the city of", 8


@pytest.fixture(scope="module")
def model() -> Any:
    return small_gpt2()


def expected(model: Any, text: str = TEXT) -> Any:
    return model._module(**model.tokenizer(text, return_tensors="pt"))


@both
def test_a_saved_output_has_its_cache(model: Any, compile: bool) -> None:
    due = expected(model)
    for _ in range(3):
        with model.trace(TEXT, compile=compile) as tracer:
            out = model.output.save()
        assert type(out) is type(due) and type(out.past_key_values) is DynamicCache
        close(out.past_key_values.layers[1].keys, due.past_key_values.layers[1].keys)
        assert not tracer.report.breaks
    ids = model.tokenizer(" the", return_tensors="pt").input_ids
    again = model._module(ids, **{CACHE: out.past_key_values}).logits
    close(again, model._module(ids, **{CACHE: due.past_key_values}).logits)


@both
def test_a_block_looks_into_the_cache_and_goes_on(model: Any, compile: bool) -> None:
    due = expected(model)
    for _ in range(3):
        with model.trace(TEXT, compile=compile):
            hidden = model.transformer.h[1].output
            length = model.output.past_key_values.get_seq_length()
            keys = model.output.past_key_values.layers[1].keys.save()
            logits = (model.output.logits * 2.0).save()
            norm = hidden.norm().save()
            kind = isinstance(model.output.past_key_values, DynamicCache)
            assert kind
            kept = [length].save()  # type: ignore[attr-defined]
        assert kept == [TOKENS]
        close(keys, due.past_key_values.layers[1].keys)
        close(logits, due.logits * 2.0)
        assert norm > 0.0


@pytest.mark.slow
@both
def test_a_cache_by_itself_is_saved_and_used_again(model: Any, compile: bool) -> None:
    with model.trace(TEXT, compile=compile):
        cache = model.output.past_key_values.save()
    assert type(cache) is DynamicCache and cache.get_seq_length() == TOKENS
    with model.trace(" the", **{CACHE: cache}, compile=compile):
        logits = model.output.logits.save()
    close(logits, expected(model, TEXT + " the").logits[:, -1:])


@both
def test_what_is_edited_behind_a_look_is_what_the_caller_gets(model: Any, compile: bool) -> None:
    with model.trace(TEXT, compile=compile) as tracer:
        out = model.output
        out.past_key_values.layers[0].keys[:] = 0.0
        out.logits = out.logits * 0.0
        result = tracer.result.save()
    assert result.logits.abs().sum() == 0.0
    assert result.past_key_values.layers[0].keys.abs().sum() == 0.0
    assert result.past_key_values.layers[1].keys.abs().sum() > 0.0


@both
def test_what_is_replaced_behind_a_look_is_what_the_caller_gets(model: Any, compile: bool) -> None:
    due = expected(model)
    with model.trace(TEXT, compile=compile) as tracer:
        if model.output.past_key_values.get_seq_length() == TOKENS:
            out = model.output
            out.logits = out.logits + 1.0
            model.output = out
        result = tracer.result.save()
    close(result.logits, due.logits + 1.0)


@pytest.mark.slow
@both
def test_each_step_of_a_generation_has_the_cache_of_its_time(model: Any, compile: bool) -> None:
    with model.generate(TEXT, max_new_tokens=3, compile=compile) as tracer:
        lengths = [].save()  # type: ignore[attr-defined]
        for _ in tracer.iter[:3]:
            lengths.append(model.output.past_key_values.get_seq_length())
        ids = tracer.result.save()
    assert lengths == [TOKENS, TOKENS + 1, TOKENS + 2]
    same(ids, model._module.generate(**model.tokenizer(TEXT, return_tensors="pt"), max_new_tokens=3, do_sample=False))


@both
def test_an_error_behind_a_look_comes_home(model: Any, compile: bool) -> None:
    with pytest.raises(ZeroDivisionError) as caught, model.trace(TEXT, compile=compile):
        model.output.past_key_values.get_seq_length() / 0
    assert caught.traceback[-1].path.name == "test_deferred_outputs.py"
    with model.trace(TEXT, compile=compile):
        logits = model.output.logits.save()
    close(logits, expected(model).logits)


def test_what_a_failed_run_leaves_says_what_it_is(model: Any) -> None:
    left: list[Any] = []
    with pytest.raises(ZeroDivisionError), model.trace(TEXT, compile=True):
        left.append(model.output)
        1 / 0  # noqa: B018
    cache = left[0].past_key_values
    assert repr(cache) == "<transformers.cache_utils.DynamicCache at model.output, not in the captured graph>"
    with pytest.raises(TypeError, match="cannot look inside"):
        cache.get_seq_length()


def test_a_look_is_no_cut_and_is_recorded_once(model: Any) -> None:
    def run() -> Any:
        with model.trace(TEXT, compile=True) as tracer:
            model.transformer.h[1].output[:] += 1.0
            keys = model.output.past_key_values.layers[0].keys.save()
        return keys, tracer.report

    first, report = run()
    assert report.graphs == 1 and not report.breaks
    fx.counters.reset()
    again, _ = run()
    same(again, first)
    assert fx.counters.recordings == fx.counters.compiles == fx.counters.captures == 0


@pytest.mark.slow
def test_rows_of_an_object_are_not_told_apart(model: Any) -> None:
    """Eagerly each invoke has a cache of its rows; a compiled trace refuses, where it would have to make several of one."""
    with pytest.raises(TypeError, match="cannot look inside"), model.trace(compile=True) as tracer:
        with tracer.invoke(TEXT):
            model.output.past_key_values.get_seq_length()
        with tracer.invoke("Rome is"):
            model.output.logits.save()


class Box:
    """Behaves like a function; holds a tensor only inside a list of a list, so that no module's value is looked into."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.held = [[hidden]]

    def __call__(self, factor: float) -> torch.Tensor:
        return self.held[0][0] * factor

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        return self.held[index]

    def __contains__(self, item: Any) -> bool:
        return item == "hidden"


class Narrow(Box):
    __slots__ = ()


class Boxed(torch.nn.Module):
    def __init__(self, kind: type[Box]) -> None:
        super().__init__()
        self.layer, self.kind = torch.nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.layer(x))


@both
@pytest.mark.parametrize("kind", [Box, Narrow])
def test_an_object_that_is_the_whole_output(kind: type[Box], compile: bool) -> None:
    net, x = Boxed(kind), torch.ones(2, 4)
    wrapped = NNsight(net, compile={"backend": "eager"})
    for _ in range(2):
        with wrapped.trace(x, compile=compile):
            box = wrapped.output
            asked = [len(box), "hidden" in box, next(iter(box[0])).shape[0], bool(box)].save()
            doubled = box(2.0).save()
            box.name = "mine"  # type: ignore[attr-defined]
            whole = wrapped.output.save()
        assert asked == [1, True, 2, True]
        close(doubled, net.layer(x) * 2.0)
        assert type(whole) is kind and whole.name == "mine"
        close(whole(1.0), net.layer(x))
