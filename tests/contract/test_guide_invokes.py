"""The user guide on several inputs: invokes, empty invokes, barriers, variables of other invokes, forms of input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import nnsight
from nnsight import LanguageModel, NNsight
from nnsight.intervention.interleaver import OutOfOrderError

from .guide import PARIS, ROME, both, close, encoded, hooked, ids, language_model, new_tower, same

SHORT = "The Eiffel Tower is"


def last_logits(prompt: str) -> torch.Tensor:
    return language_model()._module(**encoded(prompt)).logits[:, -1]


# -- each invoke on its own input -------------------------------------------------------------------------------------


@both
def test_each_invoke_reads_in_its_own_order(model: Any, compile: bool) -> None:
    one, other = ids(1), ids(2)
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(one):
            second = model.layers[1].output[0].save()
            third = model.layers[2].output[0].save()
        with tracer.invoke(other):
            first = model.layers[0].output[0].save()
    seen, seen_other = hooked(model, one)[1], hooked(model, other)[1]
    close((second, third), (seen["layers.1"][0], seen["layers.2"][0]))
    close(first, seen_other["layers.0"][0])


@both
def test_single_prompts_lists_and_the_whole_batch(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(compile=compile) as tracer:
        with tracer.invoke(PARIS):
            one = lm.lm_head.output[:, -1].save()
        with tracer.invoke([ROME, SHORT]):
            two = lm.lm_head.output[:, -1].save()
        with tracer.invoke():
            everything = lm.lm_head.output[:, -1].save()
        with tracer.invoke():
            again = lm.lm_head.output[:, -1].save()
    assert one.shape == (1, 1024) and two.shape == (2, 1024) and everything.shape == (3, 1024)
    close(one, last_logits(PARIS))
    close(two, torch.cat([last_logits(ROME), last_logits(SHORT)]))
    same(everything, torch.cat([one, two]))
    same(again, everything)


@both
def test_an_empty_invoke_reads_a_module_a_second_time(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids()):
            late = model.layers[2].output[0].save()
        with tracer.invoke():
            early = model.layers[0].output[0].save()
            again = model.layers[2].output[0].save()
    seen = hooked(model, ids())[1]
    same((early, late, again), (seen["layers.0"][0], seen["layers.2"][0], seen["layers.2"][0]))


@both
def test_one_input_and_empty_invokes_on_a_plain_model(compile: bool) -> None:
    plain = NNsight(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), compile={"backend": "eager"})
    x = torch.rand(3, 4)
    with plain.trace(compile=compile) as tracer:
        with tracer.invoke(x):
            first = plain[0].output.save()
        with tracer.invoke():
            plain[0].output[:] = 0
        with tracer.invoke():
            out = plain.output.save()
    assert not first.any(), "the edit in place reaches the tensor that the first invoke saved"
    same(out, plain._module[1](torch.zeros(3, 4)))


@both
def test_an_empty_invoke_needs_an_input_somewhere(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match="The model did not execute"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke():
                model.output.save()


@both
def test_an_invoke_out_of_order(model: Any, compile: bool) -> None:
    with pytest.raises(OutOfOrderError, match="Value was missed"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(ids(1)):
                model.layers[1].output[0].save()
            with tracer.invoke(ids(2)):
                model.layers[2].output[0].save()
                model.layers[1].output[0].save()


@both
def test_an_edit_stays_in_its_rows(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(compile=compile) as tracer:
        with tracer.invoke(PARIS):
            plain = lm.lm_head.output[:, -1].save()
        with tracer.invoke(PARIS):
            lm.transformer.h[1].mlp.output[:] = 0
            ablated = lm.lm_head.output[:, -1].save()
    edited, _ = hooked(lm, PARIS, transformer__h__1__mlp=torch.zeros_like)
    close(plain, last_logits(PARIS))
    close(ablated, edited.logits[:, -1])
    assert (plain - ablated).abs().mean() > 0.01


# -- variables of other invokes ---------------------------------------------------------------------------------------


@both
def test_embeddings_of_one_prompt_go_into_another(lm: LanguageModel, compile: bool) -> None:
    blank = torch.full_like(encoded(PARIS)["input_ids"], 63)
    with lm.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PARIS):
            embeddings = lm.transformer.wte.output
            barrier()
            source = lm.lm_head.output[:, -1].save()
        with tracer.invoke(blank):
            barrier()
            lm.transformer.wte.output = embeddings
            patched = lm.lm_head.output[:, -1].save()
    close(source, last_logits(PARIS))
    close(patched, last_logits(PARIS))
    assert (patched - lm._module(blank).logits[:, -1]).abs().max() > 0.01


@both
def test_a_value_of_an_earlier_location_needs_no_barrier(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            embeddings = model.embed.output
        with tracer.invoke(ids(2)):
            own = model.layers[0].input
            model.layers[0].input = embeddings
            out = model.output.save()
    close(out, model._module(ids(1)))


@both
def test_a_value_is_there_once_its_location_has_passed(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            embeddings = model.embed.output
        with tracer.invoke(ids(2)):
            own = model.embed.output
            model.embed.output = embeddings + 0 * own
            out = model.output.save()
    close(out, model._module(ids(1)))


@both
def test_without_a_barrier_the_value_of_the_same_module_has_no_name(model: Any, compile: bool) -> None:
    with pytest.raises(NameError):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(ids(1)):
                hidden = model.layers[1].output[0][:, -1, :]
            with tracer.invoke(ids(2)):
                model.layers[1].output[0][:, -1, :] = hidden


@both
def test_a_barrier_hands_over_the_value_of_the_same_module(model: Any, compile: bool) -> None:
    with model.trace(compile=compile) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(ids(1)):
            hidden = model.layers[1].output[0][:, -1, :]
            barrier()
        with tracer.invoke(ids(2)):
            barrier()
            model.layers[1].output[0][:, -1, :] = hidden
            patched = model.output.save()
    clean = hooked(model, ids(1))[1]["layers.1"][0][:, -1]

    def patch(value: Any) -> Any:
        changed = value[0].clone()
        changed[:, -1] = clean
        return changed, value[1]

    close(patched, hooked(model, ids(2), layers__1=patch)[0])
    assert (patched - model._module(ids(2))).abs().max() > 1e-3


@both
def test_isolated_invokes(model: Any, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnsight.CONFIG.APP, "CROSS_INVOKER", False)
    with pytest.raises(NameError):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(ids(1)):
                embeddings = model.embed.output
            with tracer.invoke(ids(2)):
                model.layers[0].input = embeddings


@both
def test_invokes_run_in_the_order_of_their_definition(model: Any, compile: bool) -> None:
    order: list[str] = []
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            order.append("one starts")
            model.layers[0].output  # noqa: B018
            order.append("one at 0")
            model.layers[1].output  # noqa: B018
            order.append("one at 1")
        order.append("between")
        with tracer.invoke(ids(2)):
            order.append("two starts")
            model.layers[0].output  # noqa: B018
            order.append("two at 0")
    assert order == ["between", "one starts", "two starts", "one at 0", "two at 0", "one at 1"]


@both
def test_stopping_one_invoke_stops_the_model(model: Any, compile: bool) -> None:
    calls: list[int] = []
    own = new_tower() if compile else model
    handle = own._module.head.register_forward_hook(lambda *_: calls.append(1))
    with own.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            first = own.layers[0].output[0].save()
            tracer.stop()
    handle.remove()
    assert not calls
    close(first, hooked(model, ids(1))[1]["layers.0"][0])


# -- forms of input ---------------------------------------------------------------------------------------------------

FORMS = ["text", "texts", "list", "lists", "one-dimensional", "two-dimensional", "numpy", "encoding", "dict", "keyword"]


def in_form(form: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    encoding = language_model().tokenizer(PARIS, return_tensors="pt")
    numbers = encoding["input_ids"]
    made = {
        "text": PARIS,
        "texts": [PARIS],
        "list": numbers[0].tolist(),
        "lists": numbers.tolist(),
        "one-dimensional": numbers[0],
        "two-dimensional": numbers,
        "numpy": np.asarray(numbers[0]),
        "encoding": encoding,
        "dict": {"input_ids": numbers, "attention_mask": torch.ones_like(numbers)},
    }
    return ((), {"input_ids": numbers}) if form == "keyword" else ((made[form],), {})


@both
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input_is_the_same_prompt(lm: LanguageModel, compile: bool, form: str) -> None:
    args, kwargs = in_form(form)
    with lm.trace(*args, compile=compile, **kwargs):
        logits = lm.lm_head.output.save()
    same(logits, lm._module(**encoded(PARIS)).logits)


@both
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_input_joins_others(lm: LanguageModel, compile: bool, form: str) -> None:
    args, kwargs = in_form(form)
    with lm.trace(compile=compile) as tracer:
        with tracer.invoke(SHORT):
            short = lm.lm_head.output[:, -1].save()
        with tracer.invoke(*args, **kwargs):
            long = lm.lm_head.output[:, -1].save()
    close(short, last_logits(SHORT))
    close(long, last_logits(PARIS))


def test_a_prompt_without_tokens(lm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        with lm.trace(""):
            lm.output.save()
