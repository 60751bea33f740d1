"""The user guide, first half: tracing, saving, reading and changing activations, and the mistakes it warns of."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import nnsight
from nnsight import LanguageModel, NNsight, demo
from nnsight.intervention.interleaver import OutOfOrderError

from ..conftest import assert_no_instrumentation
from .guide import (
    HEADS,
    LAYERS,
    PARIS,
    WIDTH,
    Hooks,
    both,
    encoded,
    hooked,
    ids,
    language_model,
    same,
    tower,
    zero_hidden,
)

# -- wrapping and tracing ---------------------------------------------------------------------------------------------


@both
def test_any_module_is_traced(compile: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Linear(10, 2))
    x = torch.rand(1, 5)
    wrapped = NNsight(net, compile={"backend": "eager"})
    with wrapped.trace(x, compile=compile):
        middle = wrapped[0].output.save()
        out = wrapped.output.save()
    same(middle, net[0](x))
    same(out, net(x))


@both
def test_an_early_layer_is_zeroed_and_the_last_one_read(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.layers[0].output[0][:] = 0
        last = model.layers[-1].output[0].save()
    _, seen = hooked(model, ids(), layers__0=zero_hidden)
    same(last, seen["layers.2"][0])
    _, plain = hooked(model, ids())
    assert not torch.equal(last, plain["layers.2"][0])


@both
def test_an_early_layer_of_a_language_model_is_zeroed_and_the_last_one_read(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        lm.transformer.h[0].output[:] = 0
        last = lm.transformer.h[-1].output.save()
    _, seen = hooked(lm, PARIS, transformer__h__0=torch.zeros_like)
    same(last, seen["transformer.h.2"])


@both
def test_what_a_block_has_is_tensors(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        hidden = model.layers[-1].output[0]
        assert isinstance(hidden, torch.Tensor)
        assert hidden.shape == (1, 5, WIDTH)
        like = torch.zeros(hidden.shape)
        total = torch.sum(hidden + like).save()
        hidden = hidden.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    assert type(hidden) is torch.Tensor
    _, seen = hooked(model, ids())
    same(hidden, seen["layers.2"][0])
    same(total, seen["layers.2"][0].sum())


@both
def test_one_input_is_one_invoke(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        short = lm.output.logits.save()
    with lm.trace(compile=compile) as tracer:
        with tracer.invoke(PARIS):
            long = lm.output.logits.save()
    expected = lm._module(**encoded(PARIS)).logits
    same(short, expected)
    same(long, expected)


@both
def test_a_tracer_stops_the_model(model: Any, compile: bool, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    handle = model._module.layers[2].register_forward_hook(lambda *_: calls.append(1))
    with model.trace(ids(), compile=compile) as tracer:
        print("shape:", tuple(model.layers[1].output[0].shape))
        early = model.layers[1].output[0].save()
        tracer.stop()
        print("never printed")
    handle.remove()
    assert capsys.readouterr().out == f"shape: (1, 5, {WIDTH})\n"
    assert not calls
    _, seen = hooked(model, ids())
    same(early, seen["layers.1"][0])


def test_a_printed_model_shows_its_modules(lm: LanguageModel) -> None:
    assert str(lm) == str(lm._module)
    assert "(h): ModuleList(" in str(lm) and "(lm_head)" in str(lm)
    assert str(lm.transformer.h[0]) == str(lm._module.transformer.h[0])


def test_attributes_of_modules_are_found_on_envoys(lm: LanguageModel, model: Any) -> None:
    assert lm.transformer.h[0].attn.num_heads == lm._module.transformer.h[0].attn.num_heads
    assert lm.config is lm._module.config
    assert model.layers[0].attn.num_heads == HEADS
    assert model.head.weight is model._module.head.weight
    assert len(model.layers) == LAYERS
    assert [layer.path for layer in model.layers] == [f"model.layers.{index}" for index in range(LAYERS)]


# -- language models --------------------------------------------------------------------------------------------------


def test_a_name_loads_model_and_tokenizer() -> None:
    loaded = LanguageModel(demo.path(), device_map="cpu", dispatch=True)
    with loaded.trace(PARIS):
        answer = loaded.lm_head.output[0, -1].argmax().save()
    assert loaded.tokenizer.decode(answer) == " Paris"


def test_keyword_arguments_reach_the_loading_function() -> None:
    loaded = LanguageModel(demo.path(), torch_dtype=torch.float16, attn_implementation="eager", dispatch=True)
    assert loaded.lm_head.weight.dtype == torch.float16
    assert loaded.config._attn_implementation == "eager"


@both
def test_a_loaded_model_is_wrapped_with_its_tokenizer(compile: bool) -> None:
    loaded = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=32, vocab_size=1024)).eval()
    wrapped = LanguageModel(loaded, tokenizer=AutoTokenizer.from_pretrained(demo.path()), compile={"backend": "eager"})
    assert wrapped._module is loaded
    with wrapped.trace(PARIS, compile=compile):
        logits = wrapped.lm_head.output.save()
    same(logits, loaded(**encoded(PARIS)).logits)


@both
def test_text_needs_a_tokenizer(compile: bool) -> None:
    bare = LanguageModel(language_model()._module, compile={"backend": "eager"})
    with pytest.raises(AttributeError, match="Tokenizer not found"):
        with bare.trace(PARIS, compile=compile):
            bare.output.save()


# -- reading ----------------------------------------------------------------------------------------------------------


@both
def test_outputs_of_layers_attention_mlp_and_head(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        attention = model.layers[0].attn.output[0].save()
        mlp = model.layers[0].mlp.output.save()
        middle = model.layers[1].output[0].save()
        logits = model.head.output.save()
    out, seen = hooked(model, ids())
    same((attention, mlp), (seen["layers.0.attn"][0], seen["layers.0.mlp"]))
    same((middle, logits), (seen["layers.1"][0], out))


@both
def test_outputs_inside_a_language_model(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        attention = lm.transformer.h[0].attn.output[0].save()
        mlp = lm.transformer.h[0].mlp.output.save()
        last = lm.transformer.h[2].output.save()
        first_row = lm.transformer.h[2].output[0].save()
        logits = lm.lm_head.output.save()
    out, seen = hooked(lm, PARIS)
    same((attention, mlp), (seen["transformer.h.0.attn"][0], seen["transformer.h.0.mlp"]))
    same((last, first_row, logits), (seen["transformer.h.2"], seen["transformer.h.2"][0], out.logits))


@both
def test_the_first_input_and_all_inputs(model: Any, lm: LanguageModel, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        first = model.layers[1].input.save()
        args, kwargs = model.layers[1].mlp.inputs
        args, kwargs = nnsight.save(args), nnsight.save(kwargs)
    _, seen = hooked(model, ids())
    same(first, seen["layers.0"][0])
    same(args, (seen["layers.0"][0] + seen["layers.1.attn"][0],))
    assert kwargs == {}

    kept: dict[str, Any] = {}

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.update(kwargs)

    Hooks(lm._module).input("transformer.h.1.attn", note)(**encoded(PARIS))
    with lm.trace(PARIS, compile=compile):
        _, named = lm.transformer.h[1].attn.inputs
        positions, names = nnsight.save(named["position_ids"]), nnsight.save(list(named))
    assert names == list(kept)
    same(positions, kept["position_ids"])


# -- saving -----------------------------------------------------------------------------------------------------------


@both
def test_a_value_that_is_not_saved_is_gone(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        lost = model.layers[-1].output[0]
        kept = model.head.output.save()
    with pytest.raises(NameError):
        lost  # noqa: B018
    assert kept.shape == (1, 5, 11)


@both
def test_both_ways_to_save(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        hidden = model.layers[0].output[0]
        by_function = nnsight.save(hidden)
        by_method = hidden.save()
        size = nnsight.save(hidden.shape[-1])
        sizes = nnsight.save({"batch": hidden.shape[0], "both": [hidden.shape[0], hidden.shape[1]]})
        assert by_function is hidden and by_method is hidden
    same(by_function, by_method)
    assert (size, sizes) == (WIDTH, {"batch": 1, "both": [1, 5]})


@both
def test_an_object_with_a_save_of_its_own(model: Any, compile: bool) -> None:
    class Report:
        def __init__(self) -> None:
            self.calls = 0

        def save(self) -> str:
            self.calls += 1
            return "saved to disk"

    with model.trace(ids(), compile=compile):
        report = nnsight.save(Report())
        answer = nnsight.save(report.save())
        model.output.save()
    assert (answer, report.calls) == ("saved to disk", 1)


@both
def test_a_list_is_saved_and_then_filled(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        hidden = list().save()  # noqa: C408 - as it is written in the documents
        for layer in model.layers:
            hidden.append(layer.output[0])
    _, seen = hooked(model, ids())
    same(hidden, [seen[f"layers.{index}"][0] for index in range(LAYERS)])


@both
def test_outer_objects_are_changed_without_saving(model: Any, compile: bool) -> None:
    outer: list[torch.Tensor] = []
    with model.trace(ids(), compile=compile):
        for layer in model.layers:
            outer.append(layer.output[0])  # noqa: PERF401
    _, seen = hooked(model, ids())
    same(outer, [seen[f"layers.{index}"][0] for index in range(LAYERS)])


# -- changing ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("where", "number"), [((...,), 0), ((slice(None), -1, slice(None)), 0), ((slice(None), slice(None), 0), 1)]
)
def test_in_place_edits(model: Any, lm: LanguageModel, compile: bool, where: Any, number: int) -> None:
    def edit(value: Any) -> Any:
        hidden = (value[0] if isinstance(value, tuple) else value).clone()
        hidden[where] = number
        return (hidden, *value[1:]) if isinstance(value, tuple) else hidden

    with model.trace(ids(), compile=compile):
        model.layers[0].output[0][where] = number
        out = model.output.save()
    same(out, hooked(model, ids(), layers__0=edit)[0])
    assert not torch.equal(out, model._module(ids()))

    with lm.trace(PARIS, compile=compile):
        lm.transformer.h[0].output[where] = number
        logits = lm.lm_head.output.save()
    same(logits, hooked(lm, PARIS, transformer__h__0=edit)[0].logits)


@both
def test_an_output_is_replaced(model: Any, lm: LanguageModel, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.embed.output = model.embed.output * 0.5
        out = model.output.save()
    same(out, hooked(model, ids(), embed=lambda value: value * 0.5)[0])

    with lm.trace(PARIS, compile=compile):
        hidden = lm.transformer.h[0].output.clone()
        hidden = hidden * 2
        lm.transformer.h[0].output = hidden
        logits = lm.lm_head.output.save()
    same(logits, hooked(lm, PARIS, transformer__h__0=lambda value: value * 2)[0].logits)


@both
def test_an_input_is_replaced(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        model.layers[1].input = model.layers[1].input * 3
        model.norm.inputs = ((model.norm.input + 1,), {})
        out = model.output.save()

    reference = Hooks(model._module)
    reference.input("layers.1", lambda args, kwargs: ((args[0] * 3,), kwargs))
    reference.input("norm", lambda args, kwargs: ((args[0] + 1,), kwargs))
    same(out, reference(ids()))


@both
def test_a_tuple_is_replaced_by_a_new_one(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        whole = model.layers[0].output
        assert isinstance(whole, tuple) and len(whole) == 2
        model.layers[0].output = (torch.zeros_like(model.layers[0].output[0]), *model.layers[0].output[1:])
        out = model.output.save()
    same(out, hooked(model, ids(), layers__0=zero_hidden)[0])
    assert not torch.equal(out, model._module(ids()))


@both
def test_an_element_of_a_tuple_cannot_be_assigned(model: Any, compile: bool) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        with model.trace(ids(), compile=compile):
            model.layers[0].output[0] = torch.zeros(1, 5, WIDTH)


@both
def test_a_row_of_a_tensor_is_assigned(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        lm.transformer.h[0].output[0] = torch.zeros_like(lm.transformer.h[0].output[0])
        logits = lm.lm_head.output.save()
    same(logits, hooked(lm, PARIS, transformer__h__0=torch.zeros_like)[0].logits)


@both
def test_a_copy_shows_what_was_there_before(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        before = model.layers[0].output[0].clone().save()
        model.layers[0].output[0][:] = 0
        after = model.layers[0].output[0].save()
        out = model.output.save()
    same(before, hooked(model, ids())[1]["layers.0"][0])
    assert not after.any()
    same(out, hooked(model, ids(), layers__0=zero_hidden)[0])
    assert not torch.equal(out, model._module(ids()))


@both
def test_without_a_copy_both_names_are_one_tensor(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile):
        before = model.layers[0].output[0].save()
        model.layers[0].output[0][:] = 0
        after = model.layers[0].output[0].save()
        out = model.output.save()
    assert not before.any() and not after.any()
    same(out, hooked(model, ids(), layers__0=zero_hidden)[0])
    assert before.data_ptr() == after.data_ptr()


@both
def test_noise_goes_to_the_device_of_the_activations(model: Any, compile: bool) -> None:
    noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(5))
    with model.trace(ids(), compile=compile):
        device = model.layers[0].output[0].device
        model.layers[0].output[0][:, -1, :] += noise.to(device)
        out = model.output.save()

    def add(value: Any) -> Any:
        hidden = value[0].clone()
        hidden[:, -1, :] += noise
        return hidden, value[1]

    same(out, hooked(model, ids(), layers__0=add)[0])


# -- conditions and loops ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("limit", [100_000.0, -1.0], ids=["taken", "not taken"])
def test_python_decides_on_values(model: Any, compile: bool, limit: float) -> None:
    with model.trace(ids(), compile=compile):
        first = model.layers[0].output[0]
        if torch.all(first < limit):
            model.layers[-1].output[0][:] = 0
        last = model.layers[-1].output[0].save()
        out = model.output.save()
    assert bool(last.any()) == (limit < 0)
    expected, seen = hooked(model, ids(), **({} if limit < 0 else {"layers__2": zero_hidden}))
    same((last, out), (seen["layers.2"][0], expected))
    assert torch.equal(out, model._module(ids())) == (limit < 0)


@both
def test_many_layers_in_one_trace(lm: LanguageModel, compile: bool) -> None:
    with lm.trace(PARIS, compile=compile):
        hidden = []
        for layer in lm.transformer.h:
            hidden.append(layer.output.save())  # noqa: PERF401
        hidden = nnsight.save(hidden)
    _, seen = hooked(lm, PARIS)
    same(hidden, [seen[f"transformer.h.{index}"] for index in range(LAYERS)])


@both
def test_a_trace_in_a_loop_is_new_each_time(model: Any, compile: bool) -> None:
    found = []
    for index in range(LAYERS):
        with model.trace(ids(index), compile=compile):
            found.append(model.layers[index].output[0].save())
    same(found, [hooked(model, ids(index))[1][f"layers.{index}"][0] for index in range(LAYERS)])


@both
def test_print_shows_values(model: Any, compile: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with model.trace(ids(), compile=compile):
        hidden = model.layers[0].output[0]
        print("shape:", hidden.shape)
        print("mean:", f"{hidden.mean():.4f}")
    expected = hooked(model, ids())[1]["layers.0"][0]
    assert capsys.readouterr().out == f"shape: {expected.shape}\nmean: {expected.mean():.4f}\n"


def test_a_breakpoint_stops_inside_the_block(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    seen: list[Any] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys._getframe(1).f_locals["hidden"].shape))
    with model.trace(ids()):
        hidden = model.layers[0].output[0]
        breakpoint()
    assert seen == [(1, 5, WIDTH)]


# -- wrapping twice, leaving no trace ---------------------------------------------------------------------------------


@both
def test_two_wrappers_of_one_model_do_not_add_up(compile: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    x = torch.rand(1, 4)
    expected = module[1](module[0](x) + 1)
    one, two = NNsight(module, compile={"backend": "eager"}), NNsight(module, compile={"backend": "eager"})
    with two.trace(x, compile=compile):
        two[0].output += 1
        changed = two.output.save()
    with one.trace(x, compile=compile):
        one[0].output += 1
        again = one.output.save()
    same(changed, expected)
    same(again, expected)
    assert_no_instrumentation(module)


def test_a_wrapped_model_called_plainly_is_the_model() -> None:
    loaded = AutoModelForCausalLM.from_pretrained(demo.path())
    expected = loaded(**encoded(PARIS)).logits
    wrapped = LanguageModel(loaded)
    same(loaded(**encoded(PARIS)).logits, expected)
    same(wrapped(**encoded(PARIS)).logits, expected)
    assert_no_instrumentation(loaded)


# -- documented errors ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("prefix", ["output", "input"])
def test_layers_in_the_wrong_order(model: Any, compile: bool, prefix: str) -> None:
    with pytest.raises(OutOfOrderError, match=rf"Value was missed for model\.layers\.0\.{prefix}\.i0"):
        with model.trace(ids(), compile=compile):
            late = model.layers[2].output[0].save()
            early = getattr(model.layers[0], prefix).save()


@both
def test_a_change_in_the_wrong_order(model: Any, compile: bool) -> None:
    with pytest.raises(OutOfOrderError, match="model.layers.0.output.i0"):
        with model.trace(ids(), compile=compile):
            model.layers[-1].output[0].save()
            model.layers[0].output[0][:] = 0


@both
def test_a_module_that_is_never_called(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match=r"Execution complete but .*model\.layers\.output.* was not provided"):
        with model.trace(ids(), compile=compile):
            model.layers.output.save()


@both
def test_a_trace_without_input(lm: LanguageModel, model: Any, compile: bool) -> None:
    for wrapped in (lm, model):
        with pytest.raises(ValueError, match="The model did not execute|outside of interleaving"):
            with wrapped.trace(compile=compile):
                wrapped.output.save()


def test_a_value_outside_a_trace(model: Any) -> None:
    for read in ("output", "input", "inputs"):
        with pytest.raises(ValueError, match="Cannot access .* outside of interleaving"):
            getattr(model.layers[0], read)
    with pytest.raises(ValueError, match="Cannot access .* outside of interleaving"):
        model.layers[0].output = torch.zeros(1)


@both
def test_an_invoke_inside_an_invoke(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match="Cannot invoke during an active model execution"):
        with model.trace(compile=compile) as tracer:
            with tracer.invoke(ids()):
                with tracer.invoke(ids()):
                    model.output.save()


@both
def test_several_inputs_without_batching(compile: bool) -> None:
    plain = NNsight(tower()._module, compile={"backend": "eager"})
    with pytest.raises(NotImplementedError, match="Batching is not implemented"):
        with plain.trace(compile=compile) as tracer:
            with tracer.invoke(ids()):
                plain.output.save()
            with tracer.invoke(ids()):
                plain.output.save()


@both
def test_a_name_that_is_no_module(model: Any, compile: bool) -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        model.laiers  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute"):
        with model.trace(ids(), compile=compile):
            model.layers[0].nothing.output.save()


@both
def test_an_index_that_is_too_large_keeps_its_type(lm: LanguageModel, compile: bool) -> None:
    caught = None
    try:
        with lm.trace(PARIS, compile=compile):
            lm.transformer.h[100].output.save()
    except IndexError as error:
        caught = error
    assert caught is not None and "100" in str(caught)


@both
def test_an_error_in_a_block_points_at_the_users_line(model: Any, compile: bool) -> None:
    with contextlib.suppress(IndexError), model.trace(ids(), compile=compile):
        model.layers[9].output.save()
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(ids(), compile=compile):
            model.layers[0].output[0].save()
            1 / 0  # noqa: B018
    last = caught.traceback[-1]
    assert str(last.path) == __file__
    assert "1 / 0" in str(last.statement)
    assert not any("/nnsight/runtime/" in str(entry.path) for entry in caught.traceback)


def test_debug_shows_the_frames_of_the_package(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nnsight.CONFIG.APP, "DEBUG", True)
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(ids()):
            1 / 0  # noqa: B018
    assert any("/nnsight/runtime/" in str(entry.path) for entry in caught.traceback)


@both
def test_other_activations_than_gradients_in_a_backward_pass(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match="in a backwards tracer"):
        with model.trace(ids(), compile=compile):
            hidden = model.layers[1].output[0]
            hidden.requires_grad_(True)
            loss = model.output.sum()
            with loss.backward():
                model.layers[1].output.save()
