"""Behaviour that scripts rely on, one test or more for each rule of the compatibility list."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers

import nnsight
from nnsight import LanguageModel, NNsight
from nnsight.intervention import interleaver
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import Mediator, MissedProviderError, OutOfOrderError

from ..modeling.test_language import CHAT, TEMPLATE, word_tokenizer
from .guide import PARIS, WIDTH, both, close, encoded, hooked, ids, new_tower, same, tower

# -- what comes back --------------------------------------------------------------------------------------------------


@both
def test_only_saved_names_come_back(model: Any, compile: bool) -> None:
    outer: dict[str, Any] = {}
    before = "untouched"
    with model.trace(ids(), compile=compile):
        lost = model.layers[0].output[0]
        kept = lost.save()
        same_object = nnsight.save(kept is lost and lost.save() is lost)
        outer["seen"] = model.layers[1].output[0]
        before = "changed inside"
        plain = 3
    assert same_object
    seen = hooked(model, ids())[1]
    same((kept, outer["seen"]), (seen["layers.0"][0], seen["layers.1"][0]))
    assert before == "untouched"
    with pytest.raises(NameError):
        plain  # noqa: B018


# -- one family of errors -----------------------------------------------------------------------------------------------


def late_then_early(model: Any) -> None:
    model.layers[2].output[0].sum()
    model.layers[0].output[0].sum()


def never_called(model: Any) -> None:
    model.layers.output.sum()


def child_of_a_skipped_module(model: Any) -> None:
    model.layers[1].skip(model.layers[0].output)
    model.layers[1].mlp.output.sum()


@both
@pytest.mark.parametrize("mistake", [late_then_early, never_called, child_of_a_skipped_module])
def test_values_that_never_come_are_one_kind_of_error(model: Any, compile: bool, mistake: Any) -> None:
    with pytest.raises(OutOfOrderError) as caught:
        with model.trace(ids(), compile=compile):
            mistake(model)
    assert isinstance(caught.value, MissedProviderError)
    assert isinstance(caught.value, Mediator.OutOfOrderError)
    assert interleaver.OutOfOrderError is Mediator.OutOfOrderError
    assert interleaver.MissedProviderError is Mediator.MissedProviderError


@both
def test_reading_where_no_model_runs(model: Any, compile: bool) -> None:
    with pytest.raises(ValueError, match="Cannot access .* outside of interleaving"):
        model.head.output  # noqa: B018
    with pytest.raises(ValueError, match="did not execute|outside of interleaving"):
        with model.trace(compile=compile):
            model.head.output.save()


# -- invokes ------------------------------------------------------------------------------------------------------------


@both
def test_bodies_run_to_their_first_access_before_the_model_starts(compile: bool) -> None:
    events: list[str] = []

    class Loud(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor and not torch.compiler.is_compiling():  # a probe on fakes is no run
                events.append("model")
            return x * 2

    from ..conftest import Rows

    model = Rows(torch.nn.Sequential(torch.nn.Identity(), Loud()), compile={"backend": "eager"})
    with model.trace(compile=compile) as tracer:
        with tracer.invoke(torch.ones(1, 2)):
            events.append("one")
            model.output  # noqa: B018
            events.append("one after")
        events.append("between")
        with tracer.invoke(torch.ones(1, 2)):
            events.append("two")
            model.output  # noqa: B018
            events.append("two after")
        events.append("last")
    assert [event for event in events if event != "model"] == [
        "between",
        "last",
        "one",
        "two",
        "one after",
        "two after",
    ]
    if not compile:
        assert events.index("two") < events.index("model") < events.index("one after")


@both
def test_invokes_share_a_scope_and_helpers_have_their_own(model: Any, compile: bool) -> None:
    def helper() -> int:
        shared = 100
        return shared

    with model.trace(compile=compile) as tracer:
        with tracer.invoke(ids(1)):
            shared = 1
            model.embed.output  # noqa: B018
        with tracer.invoke(ids(2)):
            model.layers[0].output  # noqa: B018
            seen = nnsight.save([shared, helper(), shared])
    assert seen == [1, 100, 1]


# -- edits, caches ------------------------------------------------------------------------------------------------------


@both
def test_an_edit_binds_the_copy(model: Any, compile: bool) -> None:
    with model.edit() as edited:
        model.head.output[:] = 0
    assert type(edited) is type(model) and edited._module is model._module
    with edited.trace(ids(), compile=compile):
        out = edited.output.save()
    assert not out.any()


@both
def test_keys_and_values_of_a_cache(model: Any, compile: bool) -> None:
    with model.trace(ids(), compile=compile) as tracer:
        cache = tracer.cache()
        model.embed.output[:] = 0
    assert {key.split(".")[0] for key in cache} == {"model"}
    assert set(cache) <= {f"model.{name}" if name else "model" for name, _ in model._module.named_modules()}
    embedded = cache["model.embed"].output
    assert not embedded.any() and not embedded.requires_grad and embedded.device.type == "cpu"


# -- generation, padding --------------------------------------------------------------------------------------------------


@both
def test_generated_ids_begin_with_the_prompt(lm: LanguageModel, compile: bool) -> None:
    with lm.generate(PARIS, max_new_tokens=2, do_sample=False, compile=compile) as tracer:
        text = tracer.result.save()
    prompt = encoded(PARIS)["input_ids"]
    assert text.shape[1] == prompt.shape[1] + 2
    same(text[:, :-2], prompt)


@both
def test_decoders_pad_left_and_every_row_is_what_it_is_alone(lm: LanguageModel, compile: bool) -> None:
    prompts = [PARIS, "The movie was", "The"]
    with lm.trace(prompts, compile=compile):
        given = lm.transformer.wte.input.save()
        logits = lm.lm_head.output[:, -1].save()
    assert lm.tokenizer.padding_side == "left"
    assert (given[2, :-1] == lm.tokenizer.pad_token_id).all()
    close(logits, torch.cat([lm._module(**encoded(prompt)).logits[:, -1] for prompt in prompts]))


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}


def bert() -> LanguageModel:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **SIZES)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return LanguageModel(transformers.BertForMaskedLM(config).eval(), word_tokenizer("[PAD] [CLS] [SEP]", **names))


def t5() -> LanguageModel:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=3, pad_token_id=0
    )
    module = transformers.T5ForConditionalGeneration(config).eval()
    return LanguageModel(module, word_tokenizer("<eos>", eos_token="<eos>"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [bert, t5])
def test_other_models_pad_right(make: Any) -> None:
    model = make()
    with model.trace(["the cat sat on the mat", "the dog"]):
        args, kwargs = model.inputs
        mask = kwargs["attention_mask"].save()
    assert model.tokenizer.padding_side == "right"
    assert mask[0].all() and mask[1, 0] == 1 and mask[1, -1] == 0


def test_a_chat_is_a_prompt() -> None:
    torch.manual_seed(0)
    tokenizer = word_tokenizer("<eos>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, num_key_value_heads=2, **SIZES)
    model = LanguageModel(transformers.LlamaForCausalLM(config).eval(), tokenizer)
    with model.trace(CHAT):
        found = model.lm_head.output.save()
    given = tokenizer.apply_chat_template(CHAT, continue_final_message=True, return_tensors="pt")
    given = given if isinstance(given, torch.Tensor) else given["input_ids"]
    same(found, model._module(given).logits)


def test_labels_are_padded_with_what_the_loss_ignores(lm: LanguageModel) -> None:
    texts = [PARIS, "The movie was"]
    labels = [encoded(text)["input_ids"][0].tolist() for text in texts]
    with lm.trace(compile=False) as tracer:
        for text, label in zip(texts, labels, strict=True):
            with tracer.invoke(text, labels=label):
                pass
        with tracer.invoke():
            given = lm.inputs[1]["labels"].save()
    missing = len(labels[0]) - len(labels[1])
    assert given[0].tolist() == labels[0]
    assert given[1].tolist() == [-100] * missing + labels[1]


@both
def test_an_index_far_out(lm: LanguageModel, compile: bool) -> None:
    with pytest.raises(IndexError):
        with lm.trace(PARIS, compile=compile):
            lm.transformer.h[999].output.save()


# -- gradients ------------------------------------------------------------------------------------------------------------


def test_backward_with_and_without_a_block() -> None:
    tower()  # tensors have such blocks from the first wrapped model on
    x = torch.rand(3, requires_grad=True)
    first = x * 2
    second = first**2
    with second.sum().backward(retain_graph=True):
        of_second = second.grad.save()
        first.grad = first.grad * 10
        of_first = first.grad.save()
    same((of_second, of_first), (torch.ones(3), (2 * first * 10).detach()))
    same(x.grad, (2 * first * 10 * 2).detach())
    x.grad = None
    second.sum().backward()
    same(x.grad, (2 * first * 2).detach())


# -- wrapping survives ------------------------------------------------------------------------------------------------------


def zeroed(model: Any, compile: bool | None = None) -> torch.Tensor:
    with model.trace(ids(), compile=compile):
        model.layers[0].output[0][:] = 0
        out = model.output.save()
    return out


def expected_zeroed() -> torch.Tensor:
    return hooked(tower(), ids(), layers__0=lambda value: (torch.zeros_like(value[0]), value[1]))[0]


def test_several_wrappers_copies_and_pickles() -> None:
    module = new_tower()._module
    first, second = NNsight(module), NNsight(module)
    for wrapper in (first, second, copy.deepcopy(first), pickle.loads(pickle.dumps(first)), first):
        same(zeroed(wrapper), expected_zeroed())


def test_a_module_compiled_by_torch() -> None:
    module = new_tower()._module
    same(zeroed(NNsight(torch.compile(module, backend="eager"))), expected_zeroed())


def test_hooks_of_accelerate_and_of_the_user_run_too() -> None:
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    module = new_tower()._module
    accelerate_hooks.add_hook_to_module(module.layers[0], accelerate_hooks.AlignDevicesHook(io_same_device=True))
    calls: list[int] = []
    handle = module.layers[1].register_forward_hook(lambda *_: calls.append(1))
    same(zeroed(NNsight(module)), expected_zeroed())
    handle.remove()
    assert calls == [1]


def test_a_forward_given_to_the_instance() -> None:
    module = new_tower()._module
    kind = type(module.layers[0])
    module.layers[0].forward = lambda x: kind.forward(module.layers[0], x * 2)
    with NNsight(module).trace(ids()) as tracer:
        out = tracer.result.save()
    reference = new_tower()._module
    hidden = reference.layers[0](reference.embed(ids()) * 2)[0]
    hidden = reference.layers[2](reference.layers[1](hidden)[0])[0]
    same(out, reference.head(reference.norm(hidden)))


def test_a_wrapper_goes_with_its_last_reference() -> None:
    gc.collect()
    gc.disable()
    try:
        model = new_tower()
        module = weakref.ref(model._module)
        out = zeroed(model, compile=False)
        gone = weakref.ref(model)
        del model
        assert gone() is None and module() is None
    finally:
        gc.enable()
    assert out.shape == (1, 5, 11)


def test_saved_values_are_all_that_a_trace_holds(model: Any) -> None:
    class Note:
        pass

    references: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        with model.trace(ids(), compile=False):
            note = Note()
            references.append(weakref.ref(note))
            hidden = model.layers[0].output[0]
            references.append(weakref.ref(hidden))
            kept = model.layers[1].output[0].detach().save()  # without the graph of autograd, which holds more
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    assert kept.shape == (1, 5, WIDTH)


def test_names_match_whole_components_of_a_path() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(3)
            self.prenorm = torch.nn.LayerNorm(3)

    model = NNsight(Two(), rename={"norm": "final"})
    assert model.final is model.norm
    assert [name for name in vars(model) if name.endswith("final")] == ["final"]
    assert isinstance(model.prenorm, Envoy)
