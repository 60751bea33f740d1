"""Language models: every form of input means what it means to transformers, and padding changes nothing."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

import nnsight
from nnsight import LanguageModel, NNsightDeprecationWarning, demo_model

from ..conftest import CACHE

TEXT = "the cat sat on the mat"
SHORT = "a dog ran"
TEXTS = [TEXT, SHORT, "the dog"]
CHAT = [{"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": "on"}]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

Module = torch.nn.Module


def word_tokenizer(special: str, **names: str) -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *special.split()])
    tokenizer.train_from_iterator([*TEXTS, "user assistant"], trainer)
    if "[SEP]" in special:
        marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
        pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $0 [SEP]", pair, marks)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **names)


@pytest.fixture(scope="module")
def original_tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = word_tokenizer("<eos>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def tokenizer(original_tokenizer: Any) -> Any:
    """A tokenizer that pads on the right and has no pad token, as most do."""
    return copy.deepcopy(original_tokenizer)


@pytest.fixture(scope="module")
def bert_tokenizer() -> transformers.PreTrainedTokenizerFast:
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = word_tokenizer("[PAD] [CLS] [SEP]", **names)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


@pytest.fixture(scope="module")
def gpt2() -> Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def llama() -> Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


@pytest.fixture(scope="module")
def bert() -> Module:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def t5() -> Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=3,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.fixture(params=["gpt2", "llama"])
def decoder(request: pytest.FixtureRequest) -> Module:
    return request.getfixturevalue(request.param)


@pytest.fixture
def model(gpt2: Module, tokenizer: Any) -> LanguageModel:
    return LanguageModel(gpt2, tokenizer)


@pytest.fixture
def ids(tokenizer: Any) -> torch.Tensor:
    """Ids of ``TEXT``."""
    return torch.tensor([tokenizer(TEXT)["input_ids"]])


def logits_of(model: LanguageModel, *inputs: Any, **kwargs: Any) -> torch.Tensor:
    with model.trace(*inputs, **kwargs):
        logits = model.output.logits.save()
    return logits


def prepared(model: LanguageModel, *inputs: Any, **kwargs: Any) -> dict[str, Any]:
    args, arguments = model._prepare_input(*inputs, **kwargs)
    assert args == ()
    return arguments


# -- forms of input ----------------------------------------------------------------------------------------


ONE_PROMPT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "string": lambda _, ids: TEXT,
    "list of one string": lambda _, ids: [TEXT],
    "array of strings": lambda _, ids: np.array([TEXT]),
    "list of ids": lambda _, ids: ids[0].tolist(),
    "tuple of ids": lambda _, ids: tuple(ids[0].tolist()),
    "list of numpy integers": lambda _, ids: list(ids[0].numpy()),
    "list of lists": lambda _, ids: ids.tolist(),
    "list of tensors": lambda _, ids: [ids[0]],
    "1-D tensor": lambda _, ids: ids[0],
    "2-D tensor": lambda _, ids: ids,
    "int32 tensor": lambda _, ids: ids.int(),
    "1-D array": lambda _, ids: ids[0].numpy(),
    "2-D array": lambda _, ids: ids.numpy(),
    "uint16 array": lambda _, ids: ids.numpy().astype(np.uint16),
    "encoding of lists": lambda tokenizer, ids: tokenizer(TEXT),
    "encoding of tensors": lambda tokenizer, ids: tokenizer(TEXT, return_tensors="pt"),
    "encoding of arrays": lambda tokenizer, ids: tokenizer([TEXT], return_tensors="np"),
    "dict of lists": lambda _, ids: {"input_ids": ids.tolist(), "attention_mask": [[1] * ids.shape[1]]},
    "dict of flat tensors": lambda _, ids: {"input_ids": ids[0], "attention_mask": torch.ones_like(ids[0])},
    "dict without mask": lambda _, ids: {"input_ids": ids},
    "dict with text": lambda _, ids: {"input_ids": TEXT},
}


def test_one_prompt_in_every_form_equals_the_module(
    model: LanguageModel, gpt2: Module, tokenizer: Any, ids: torch.Tensor
) -> None:
    expected = gpt2(input_ids=ids).logits
    for form, make in ONE_PROMPT.items():
        prompt = make(tokenizer, ids)
        arguments = prepared(model, prompt)
        for name in ("input_ids", "attention_mask"):
            assert arguments[name].shape == ids.shape and arguments[name].dtype == torch.int64, form
        assert torch.equal(logits_of(model, prompt), expected), form


def test_a_trace_that_is_a_plain_call(model: LanguageModel, gpt2: Module, ids: torch.Tensor) -> None:
    assert torch.equal(model.trace(TEXT, trace=False).logits, gpt2(input_ids=ids).logits)
    assert torch.equal(model.trace(input_ids=ids, trace=False).logits, gpt2(input_ids=ids).logits)
    with model.edit() as edited:
        model.lm_head.output[:] = 0
    assert not edited.trace(TEXT, trace=False).logits.any()
    with model.trace(TEXT, trace=True):
        logits = model.output.logits.save()
    assert torch.equal(logits, gpt2(input_ids=ids).logits)
    with pytest.raises(ValueError, match="pass its input alone"):
        model.trace(TEXT, trace=False, scan=True)


def test_the_input_may_be_given_by_name(model: LanguageModel, gpt2: Module, tokenizer: Any, ids: torch.Tensor) -> None:
    expected = gpt2(input_ids=ids).logits
    for form in ("string", "list of ids", "2-D tensor", "2-D array"):
        assert torch.equal(logits_of(model, input_ids=ONE_PROMPT[form](tokenizer, ids)), expected)
    assert torch.equal(logits_of(model, **model.tokenizer(TEXT, return_tensors="pt")), expected)
    embeddings = gpt2.transformer.wte(ids)
    assert torch.equal(logits_of(model, inputs_embeds=embeddings), gpt2(inputs_embeds=embeddings).logits)


SEVERAL_PROMPTS: dict[str, Callable[[Any], Any]] = {
    "list of strings": lambda tokenizer: TEXTS,
    "tuple of strings": lambda tokenizer: tuple(TEXTS),
    "array of strings": lambda tokenizer: np.array(TEXTS),
    "list of lists": lambda tokenizer: tokenizer(TEXTS)["input_ids"],
    "list of tensors": lambda tokenizer: [torch.tensor(row) for row in tokenizer(TEXTS)["input_ids"]],
    "list of arrays": lambda tokenizer: [np.array(row) for row in tokenizer(TEXTS)["input_ids"]],
    "encoding of lists": lambda tokenizer: tokenizer(TEXTS),
    "encoding of tensors": lambda tokenizer: tokenizer(TEXTS, padding=True, return_tensors="pt"),
    "dict of lists": lambda tokenizer: {"input_ids": tokenizer(TEXTS)["input_ids"]},
}


def test_prompts_in_every_form_equal_the_module(model: LanguageModel, gpt2: Module) -> None:
    by_hand = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    positions = (by_hand["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    expected = gpt2(**by_hand, position_ids=positions).logits
    for form, make in SEVERAL_PROMPTS.items():
        assert torch.equal(logits_of(model, make(model.tokenizer)), expected), form


def test_further_arguments_reach_the_model(model: LanguageModel, gpt2: Module, ids: torch.Tensor) -> None:
    with model.trace(TEXT, use_cache=False, output_hidden_states=True):
        first = model.input.save()
        out = model.output.save()
    assert torch.equal(first, ids)
    assert out.past_key_values is None
    assert torch.equal(out.hidden_states[1], gpt2(ids, output_hidden_states=True).hidden_states[1])


def test_unknown_arguments_are_refused_by_the_model() -> None:
    class Strict(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    strict = LanguageModel(Strict())
    with strict.trace([1, 2]):
        ids = strict.output.save()
    assert ids.tolist() == [[1, 2]]
    with pytest.raises(TypeError, match="no_such_argument"), strict.trace([1, 2], no_such_argument=1):
        strict.output.save()


def test_continuing_a_cache_needs_no_mask(decoder: Module, ids: torch.Tensor) -> None:
    model = LanguageModel(decoder)
    cache = decoder(input_ids=ids[:, :-2], use_cache=True).past_key_values
    continued = logits_of(model, ids[:, -2:], **{CACHE: cache})
    torch.testing.assert_close(continued, decoder(input_ids=ids).logits[:, -2:])


def test_continuing_a_cache_leaves_positions_to_the_model(decoder: Module, tokenizer: Any) -> None:
    model = LanguageModel(decoder, tokenizer)
    whole = prepared(model, [TEXT])
    cache = decoder(input_ids=whole["input_ids"][:, :-2], use_cache=True).past_key_values
    arguments = {"attention_mask": whole["attention_mask"], CACHE: cache}
    assert "position_ids" not in prepared(model, whole["input_ids"][:, -2:], **arguments)
    continued = logits_of(model, whole["input_ids"][:, -2:], **arguments)
    torch.testing.assert_close(continued[:, -1], decoder(**whole).logits[:, -1])


def test_padding_is_masked_in_an_empty_cache_and_refused_behind_a_filled_one(decoder: Module, tokenizer: Any) -> None:
    model = LanguageModel(decoder, tokenizer)
    expected = logits_of(model, TEXTS)
    found = logits_of(model, TEXTS, **{CACHE: transformers.DynamicCache(config=decoder.config)})
    assert torch.equal(found, expected)
    cache = decoder(input_ids=torch.ones(2, 3, dtype=torch.int64), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="continue a cache, so a mask must hide their padding"):
        prepared(model, [TEXT, SHORT], **{CACHE: cache})
    with pytest.raises(ValueError, match="continue a cache, so a mask must hide their padding"), model.trace() as tracer:
        for prompt in (TEXT, SHORT):
            with tracer.invoke(prompt, **{CACHE: cache}):
                pass


def test_a_list_of_encodings_is_refused(model: LanguageModel) -> None:
    with pytest.raises(TypeError, match="contains a BatchEncoding, an encoding. Pass a string"):
        prepared(model, [model.tokenizer(TEXT), model.tokenizer(SHORT)])


@pytest.mark.parametrize("family", ["Bart", "T5"])
def test_an_encoder_decoder_that_classifies_starts_its_decoder_itself(family: str, tokenizer: Any) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"vocab_size": 64, "num_labels": 3, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    if family == "T5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **ends)
    model = LanguageModel(getattr(transformers, f"{family}ForSequenceClassification")(config).eval(), tokenizer)
    ids = torch.tensor([[5, 6, 7, 2], [8, 9, 3, 2]])
    expected = model._module(input_ids=ids, labels=torch.tensor([0, 2]))
    assert torch.equal(logits_of(model, ids), expected.logits)
    with model.trace(ids, labels=[0, 2]):
        loss = model.output.loss.save()
    assert torch.equal(loss, expected.loss)


# -- padding -----------------------------------------------------------------------------------------------


def test_a_row_of_a_decoder_equals_itself_run_alone(decoder: Module, tokenizer: Any) -> None:
    model = LanguageModel(decoder, tokenizer)
    together = logits_of(model, TEXTS)
    for row, text in enumerate(TEXTS):
        by_hand = decoder(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
        torch.testing.assert_close(together[row, -1], by_hand[-1], atol=1e-5, rtol=0)
        torch.testing.assert_close(together[row, -len(by_hand) :], by_hand, atol=1e-5, rtol=0)


def test_a_row_of_an_encoder_equals_itself_run_alone(bert: Module, t5: Module, bert_tokenizer: Any, tokenizer: Any) -> None:
    model = LanguageModel(bert, bert_tokenizer)
    together = logits_of(model, TEXTS)
    translator = LanguageModel(t5, tokenizer)
    translated = logits_of(translator, TEXTS)
    for row, text in enumerate(TEXTS):
        by_hand = bert(**bert_tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(together[row, : len(by_hand)], by_hand, atol=1e-5, rtol=0)
        torch.testing.assert_close(translated[row], logits_of(translator, text)[0], atol=1e-5, rtol=0)


def test_padding_of_a_given_mask_is_skipped_by_the_positions(decoder: Module) -> None:
    model = LanguageModel(decoder)
    padded = logits_of(model, [0, 0, 5, 6, 7], attention_mask=[0, 0, 1, 1, 1])
    alone = decoder(input_ids=torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(padded[:, 2:], alone, atol=1e-5, rtol=0)


def test_a_gap_in_a_mask_is_a_position(decoder: Module) -> None:
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 0, 1, 1]])
    model = LanguageModel(decoder)
    expected = decoder(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits_of(model, ids, attention_mask=mask), expected)
    two = prepared(model, ids.repeat(3, 1), attention_mask=torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]]))
    assert two["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_an_encoder_that_pads_left_counts_tokens(bert: Module, bert_tokenizer: Any) -> None:
    model = LanguageModel(bert, bert_tokenizer)
    bert_tokenizer.padding_side = "left"
    together = logits_of(model, TEXTS)
    bert_tokenizer.padding_side = "right"
    for row, text in enumerate(TEXTS):
        alone = bert(**bert_tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(together[row, -len(alone) :], alone, atol=1e-5, rtol=0)


def test_given_positions_are_kept(model: LanguageModel, gpt2: Module, ids: torch.Tensor) -> None:
    positions = torch.arange(ids.shape[1])[None] + 7
    expected = gpt2(input_ids=ids, position_ids=positions).logits
    assert torch.equal(logits_of(model, TEXT, position_ids=positions), expected)
    assert torch.equal(logits_of(model, TEXT, position_ids=positions[0].tolist()), expected)


def test_rows_of_several_lengths_need_a_pad_token_and_others_do_not(gpt2: Module, tokenizer: Any) -> None:
    tokenizer.pad_token = tokenizer.eos_token = None
    model = LanguageModel(gpt2, tokenizer)
    assert logits_of(model, [[1, 2], [3, 4]]).shape == (2, 2, 64)
    for unequal in (TEXTS, [[1, 2, 3], [4, 5]]):
        with pytest.raises(ValueError, match="differ in length, and the tokenizer has no pad token"):
            logits_of(model, unequal)
    with pytest.raises(ValueError, match=r"differ in length.*`model.tokenizer.pad_token"), model.trace() as tracer:
        with tracer.invoke([1, 2, 3]):
            model.output.save()
        with tracer.invoke([4, 5]):
            model.output.save()


def test_decoders_pad_left_with_the_end_of_sequence_token_or_as_chosen_later(model: LanguageModel) -> None:
    assert model.tokenizer.padding_side == "left" and model.tokenizer.pad_token == "<eos>"
    arguments = prepared(model, TEXTS)
    lengths = [len(model.tokenizer(text)["input_ids"]) for text in TEXTS]
    width = max(lengths)
    assert arguments["attention_mask"].tolist() == [[0] * (width - n) + [1] * n for n in lengths]
    assert (arguments["input_ids"][arguments["attention_mask"] == 0] == model.tokenizer.eos_token_id).all()
    model.tokenizer.padding_side = "right"
    together = logits_of(model, TEXTS)
    for row, text in enumerate(TEXTS):
        by_hand = logits_of(model, text)[0]
        torch.testing.assert_close(together[row, : len(by_hand)], by_hand, atol=1e-5, rtol=0)


def test_encoders_and_encoder_decoders_pad_right(bert: Module, t5: Module, bert_tokenizer: Any, tokenizer: Any) -> None:
    """Encoders as their tokenizer says, which is on the right by default."""
    tokenizer.padding_side = "left"
    for module, own in ((bert, bert_tokenizer), (t5, tokenizer)):
        mask = prepared(LanguageModel(module, own), TEXTS)["attention_mask"]
        assert mask[:, 0].all() and not mask.all()
        without_tokenizer = prepared(LanguageModel(module), [[5, 6, 7], [5]])
        assert without_tokenizer["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


# -- what goes with the ids --------------------------------------------------------------------------------


def test_token_types_reach_models_that_take_them(bert: Module, bert_tokenizer: Any) -> None:
    model = LanguageModel(bert, bert_tokenizer)
    pair = bert_tokenizer([TEXT], [SHORT], return_tensors="pt")
    assert pair["token_type_ids"].sum() > 0
    assert torch.equal(logits_of(model, pair), bert(**pair).logits)
    assert torch.equal(logits_of(model, bert_tokenizer(TEXT, SHORT)), bert(**pair).logits)


def test_what_tokenizers_add_is_kept_from_models_without_it(llama: Module, bert_tokenizer: Any) -> None:
    model = LanguageModel(llama)
    options = {"return_special_tokens_mask": True, "return_length": True, "return_tensors": "pt"}
    encoding = bert_tokenizer([TEXT], **options)
    assert {"token_type_ids", "special_tokens_mask", "length"} <= set(encoding)
    expected = llama(input_ids=encoding["input_ids"]).logits
    assert prepared(model, encoding).keys() == {"input_ids", "attention_mask", "position_ids"}
    assert torch.equal(logits_of(model, encoding), expected)
    assert torch.equal(logits_of(model, **encoding), expected)


def test_the_number_of_rows_of_each_argument(bert: Module, model: LanguageModel, t5: Module) -> None:
    with pytest.raises(ValueError, match="`attention_mask` has 1 rows, and there are 2 prompts"):
        logits_of(model, [[1, 2], [3, 4]], attention_mask=[[1, 1]])
    with pytest.raises(ValueError, match="`labels` has 3 rows, and there are 2 prompts"):
        logits_of(model, [[1, 2], [3, 4]], labels=[[1, 2], [3, 4], [5, 6]])
    types = LanguageModel(bert)
    assert prepared(types, [[1, 2], [3, 4]], token_type_ids=[0, 1])["token_type_ids"].tolist() == [[0, 1]] * 2
    assert prepared(model, inputs_embeds=torch.ones(3, 16))["inputs_embeds"].shape == (1, 3, 16)
    for label in (1, torch.tensor(1), [1]):
        assert prepared(types, [1, 2, 3], labels=label)["labels"].tolist() == [1]
    translator = LanguageModel(t5)
    with pytest.raises(ValueError, match="Only some of the invokes have `decoder_input_ids`"):
        with translator.trace() as tracer:
            with tracer.invoke([3, 4], decoder_input_ids=[0, 5]):
                translator.output.save()
            with tracer.invoke([3]):
                pass
    with translator.trace() as tracer:
        for prompt in ([3, 4], [3], [5]):
            with tracer.invoke(prompt):
                pass
        with tracer.invoke():
            logits = translator.output.logits.save()
    assert logits.shape[:2] == (3, 1)


def test_labels_are_padded_with_ignored_ones(model: LanguageModel, gpt2: Module, ids: torch.Tensor) -> None:
    rows = model.tokenizer(TEXTS)["input_ids"]
    arguments = prepared(model, TEXTS, labels=rows)
    labels, mask = arguments["labels"], arguments["attention_mask"]
    assert (labels[mask == 0] == -100).all()
    assert torch.equal(labels[mask == 1], arguments["input_ids"][mask == 1])
    with model.trace(TEXTS, labels=rows):
        loss = model.output.loss.save()
    assert torch.equal(loss, gpt2(**arguments).loss)
    for form in (list, torch.tensor, np.array):
        assert torch.equal(prepared(model, TEXT, labels=form(ids[0].tolist()))["labels"], ids)
    assert prepared(model, TEXTS, labels=[0, 1, 0])["labels"].tolist() == [0, 1, 0], "classes are no rows"


def test_labels_of_an_encoder_decoder_have_their_own_length(t5: Module, tokenizer: Any) -> None:
    model = LanguageModel(t5, tokenizer)
    arguments = prepared(model, TEXTS, labels=[[5], [5, 6], [7]])
    assert arguments["labels"].tolist() == [[5, -100], [5, 6], [7, -100]]
    assert "decoder_input_ids" not in arguments
    with model.trace(TEXTS, labels=[[5], [5, 6], [7]]):
        loss = model.output.loss.save()
    assert torch.equal(loss, t5(**arguments).loss)


def test_encoder_decoders_start_with_their_start_token_or_pad_token(
    t5: Module, tokenizer: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LanguageModel(t5, tokenizer)
    expected = t5(input_ids=ids, decoder_input_ids=torch.tensor([[3]])).logits
    assert torch.equal(logits_of(model, TEXT), expected)
    assert prepared(model, TEXTS)["decoder_input_ids"].tolist() == [[3], [3], [3]]
    assert "position_ids" not in prepared(model, TEXTS)
    expected = t5(input_ids=ids, decoder_input_ids=torch.tensor([[3, 9]])).logits
    assert torch.equal(logits_of(model, TEXT, decoder_input_ids=[[3, 9]]), expected)
    for config in (t5.config, t5.generation_config):
        monkeypatch.delattr(config, "decoder_start_token_id")
    assert prepared(model, TEXT)["decoder_input_ids"].tolist() == [[0]]


def test_tensors_go_to_the_device_of_the_model(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageModel, "_input_device", lambda _: torch.device("meta"))
    arguments = prepared(model, TEXTS, labels=[0, 1, 2], use_cache=False)
    assert {value.device.type for value in arguments.values() if isinstance(value, torch.Tensor)} == {"meta"}


# -- chats -------------------------------------------------------------------------------------------------


def test_chats_go_through_the_template(model: LanguageModel) -> None:
    asked, begun = prepared(model, CHAT[:1])["input_ids"], prepared(model, CHAT)["input_ids"]
    assert model.tokenizer.decode(asked[0]) == "user the cat sat assistant"
    assert model.tokenizer.decode(begun[0]) == "user the cat sat assistant on"
    arguments = prepared(model, [CHAT[:1], CHAT])
    assert arguments["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1], [1] * 6]
    torch.testing.assert_close(logits_of(model, [CHAT[:1], CHAT])[:1, 1:], logits_of(model, CHAT[:1]))


# -- mistakes ----------------------------------------------------------------------------------------------


def test_options_of_the_tokenizer_reach_it_for_each_invoke(model: LanguageModel, gpt2: Module, ids: torch.Tensor) -> None:
    assert torch.equal(logits_of(model, TEXT, truncation=True, max_length=3), gpt2(ids[:, :3]).logits)
    assert torch.equal(logits_of(model, TEXT, tokenizer_kwargs={"truncation": True, "max_length": 2}), gpt2(ids[:, :2]).logits)
    for of_trace, of_invoke in (({}, {"truncation": True, "max_length": 2}), ({"truncation": True, "max_length": 2}, {})):
        with model.trace(**of_trace) as tracer:
            with tracer.invoke(TEXT, **of_invoke):
                one = model.lm_head.output[:, -1].save()
            with tracer.invoke(TEXT):
                two = model.transformer.h[0].input.save()
        torch.testing.assert_close(one, gpt2(ids[:, :2]).logits[:, -1])
        assert two.shape[1] == (2 if of_trace else ids.shape[1])
    padded = prepared(model, TEXT, padding="max_length", max_length=20)
    assert padded["input_ids"].shape == (1, 20) and padded["attention_mask"].sum() == ids.shape[1]
    with pytest.raises(ValueError, match="`max_length`, `truncation`: such options|`truncation`, `max_length`: such options"):
        logits_of(model, ids, truncation=True, max_length=2)
    with pytest.raises(ValueError, match="`tools`: such options .* text and no chat"):
        logits_of(model, TEXT, tools=[dict])


def test_options_of_the_tokenizer_in_a_generation(model: LanguageModel, ids: torch.Tensor) -> None:
    with model.generate(TEXT, truncation=True, max_length=3, generate_kwargs={"max_new_tokens": 2}) as tracer:
        made = tracer.result.save()
    assert torch.equal(made[:, :3], ids[:, :3]) and made.shape[1] == 5
    width = ids.shape[1] + 3
    for prompt in (TEXT, ids):
        with model.generate(prompt, max_length=width, min_length=width) as tracer:
            made = tracer.result.save()
        assert torch.equal(made[:, : ids.shape[1]], ids) and made.shape[1] == width


def test_options_of_chats(model: LanguageModel, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": TEXT}]
    whole = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert prepared(model, chat, add_generation_prompt=False)["input_ids"].tolist() == [whole]
    assert prepared(model, chat, truncation=True, max_length=2)["input_ids"].tolist() == [whole[:2]]
    model.tokenizer.chat_template = "{{ word }}"
    assert prepared(model, chat, chat_template_kwargs={"word": "user"})["input_ids"].tolist() == [tokenizer("user")["input_ids"]]


def test_options_set_on_the_tokenizer(gpt2: Module, tokenizer: Any) -> None:
    model = LanguageModel(gpt2, tokenizer, tokenizer_kwargs={"padding_side": "right", "truncation_side": "left"})
    assert model.tokenizer.padding_side == "right"
    assert prepared(model, TEXT, truncation=True, max_length=2)["input_ids"].tolist() == [tokenizer(TEXT)["input_ids"][-2:]]
    with pytest.raises(TypeError, match="has no tokenizer"):
        LanguageModel(gpt2, tokenizer_kwargs={"padding_side": "right"})


def test_text_without_a_tokenizer_says_how_to_pass_one(gpt2: Module, ids: torch.Tensor) -> None:
    model = LanguageModel(gpt2)
    assert model.tokenizer is None
    for text in (TEXT, TEXTS, CHAT):
        with pytest.raises(AttributeError, match=r"Tokenizer not found.*tokenizer="):
            logits_of(model, text)
    assert torch.equal(logits_of(model, ids), gpt2(input_ids=ids).logits)
    assert torch.equal(logits_of(model, {"input_ids": ids.tolist()}), gpt2(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "The prompt is empty"),
        ([""], "The prompt is empty"),
        ([TEXT, ""], "Prompt 1 of 2 is empty"),
        ([], "list of prompts is empty"),
        ([[]], "The prompt is empty"),
        ([[1], []], "Prompt 1 of 2 is empty"),
        (torch.tensor([], dtype=torch.long), "no token ids"),
        (torch.empty(2, 0, dtype=torch.long), "no token ids"),
        (np.array([], dtype=np.int64), "no token ids"),
        (torch.tensor(3), r"shape is \(\)"),
    ],
)
def test_empty_or_misshapen_prompts_are_value_errors(prompt: Any, message: str, model: LanguageModel) -> None:
    with pytest.raises(ValueError, match=message):
        logits_of(model, prompt)


@pytest.mark.parametrize(
    "prompt",
    [3, None, b"the cat", {1, 2}, [1.5], [True, False], [TEXT, [1, 2]], [1, TEXT], [[TEXT]], {"text": TEXT}],
)
def test_wrong_types_name_the_accepted_forms(prompt: Any, model: LanguageModel) -> None:
    with pytest.raises(TypeError, match="Pass a string, a list of strings, token ids .* a list of chats"):
        prepared(model, prompt)


@pytest.mark.parametrize("prompt", [torch.ones(1, 3), torch.tensor([True]), np.ones(3)])
def test_ids_must_be_integers(prompt: Any, model: LanguageModel) -> None:
    with pytest.raises(TypeError, match=r"Token ids are integers, not torch\.\w+\. .*`inputs_embeds="):
        logits_of(model, prompt)


def test_the_wrong_number_of_inputs_and_what_is_no_model(model: LanguageModel, gpt2: Module, ids: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="takes one input, not 2"):
        logits_of(model, TEXT, SHORT)
    with pytest.raises(TypeError, match="given twice"):
        logits_of(model, TEXT, input_ids=ids)
    with pytest.raises(ValueError, match="did not execute: it was given no input"):
        logits_of(model, use_cache=False)
    with pytest.raises(TypeError, match="not an int"):
        LanguageModel(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="revision.*GPT2LMHeadModel is loaded already"):
        LanguageModel(gpt2, revision="main")


def test_arguments_of_the_tokenizer_in_the_form_of_early_releases(model: LanguageModel) -> None:
    with pytest.warns(NNsightDeprecationWarning, match="invoker_args") as caught:
        with model.trace(TEXT, invoker_args={"truncation": True, "max_length": 2}):
            named = list(model.inputs[1]).save()
            short = model.lm_head.output.save()
    assert caught[0].filename == __file__
    assert "invoker_args" not in named
    assert short.shape[1] == 2


# -- loading -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(gpt2: Module, original_tokenizer: Any, tmp_path: Path) -> Path:
    gpt2.save_pretrained(tmp_path)
    original_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_is_loaded_with_its_tokenizer(saved: Path, model: LanguageModel, gpt2: Module) -> None:
    for name in (str(saved), saved):
        loaded = LanguageModel(name)
        assert loaded.tokenizer.padding_side == "left" and loaded.tokenizer.pad_token == "<eos>"
        assert not loaded.training
        assert torch.equal(logits_of(loaded, TEXTS), logits_of(model, TEXTS))
    assert model.config is gpt2.config and model.device == torch.device("cpu")


def test_the_tokenizer_may_be_a_name_or_an_object(saved: Path, gpt2: Module, tokenizer: Any) -> None:
    named = LanguageModel(gpt2, str(saved))
    assert named.tokenizer(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert LanguageModel(str(saved), tokenizer=tokenizer).tokenizer is tokenizer


def test_the_class_that_loads_can_be_chosen(t5: Module, original_tokenizer: Any, tmp_path: Path) -> None:
    t5.save_pretrained(tmp_path)
    original_tokenizer.save_pretrained(tmp_path)
    model = LanguageModel(str(tmp_path), automodel=transformers.AutoModelForSeq2SeqLM)
    assert model.tokenizer.padding_side == "right"
    assert torch.equal(logits_of(model, TEXT), logits_of(LanguageModel(t5, original_tokenizer), TEXT))


def test_the_class_that_loads_by_its_name_and_options_of_the_tokenizer(saved: Path, ids: torch.Tensor) -> None:
    model = LanguageModel(str(saved), automodel="AutoModel", dispatch=True)
    assert type(model._module).__name__ == "GPT2Model"
    model = LanguageModel(str(saved), tokenizer_kwargs={"padding_side": "right", "model_max_length": 7})
    assert (model.tokenizer.padding_side, model.tokenizer.model_max_length) == ("right", 7)
    with pytest.raises(ValueError, match="automodel='NoSuchModel': transformers has no class"):
        LanguageModel(str(saved), automodel="NoSuchModel")


def test_a_folder_without_tokenizer_files_is_told_from_an_empty_prompt(saved: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        os.remove(saved / name)
    model = LanguageModel(str(saved))
    with pytest.raises(ValueError, match="files are missing from the model's folder"):
        logits_of(model, TEXT)


def test_the_demo_model_needs_no_network_and_knows_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model = demo_model()
    assert isinstance(model, LanguageModel) and not model.training
    with model.trace("The Eiffel Tower is in the city of"):
        logits = model.lm_head.output[:, -1].save()
    assert model.tokenizer.decode(logits.argmax(dim=-1)) == " Paris"


# -- compiled ----------------------------------------------------------------------------------------------


def edited(model: LanguageModel, layers: Any, *inputs: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    with model.trace(*inputs, **kwargs) as tracer:
        layers[0].output[:] *= 1.5
        logits = model.lm_head.output.save()
    return logits, tracer.report


def test_prompts_of_any_number_and_length_share_one_dynamic_graph(gpt2: Module, tokenizer: Any) -> None:
    model = LanguageModel(gpt2, tokenizer, compile={"backend": "eager"})
    counters = nnsight.fx.counters
    logits_of(model, TEXT)
    logits_of(model, SHORT)
    assert counters.captures <= 2  # as it came, then with a symbolic length; dynamo remembers earlier tests
    captures, compiles = counters.captures, counters.compiles
    for prompt in (TEXT, SHORT, "the cat", f"{TEXT} {TEXT}", [3, 4, 5, 6]):
        logits_of(model, prompt)
    assert (counters.captures, counters.compiles) == (captures, compiles)

    logits_of(model, TEXTS)
    captures, compiles = counters.captures, counters.compiles
    assert captures <= 3  # with a symbolic number of rows, too
    for prompts in (TEXTS, [TEXT, SHORT], [TEXT, TEXT], [SHORT] * 5):
        logits_of(model, prompts)
    assert (counters.captures, counters.compiles) == (captures, compiles)


@pytest.mark.slow
def test_traces_compiled_with_the_default_backend_equal_eager_ones(gpt2: Module, tokenizer: Any) -> None:
    model = LanguageModel(gpt2, tokenizer, compile=True)
    compiled, report = edited(model, model.transformer.h, TEXT)
    assert report.mode == "compiled" and report.graphs == 1 and not report.breaks
    eager, _ = edited(model, model.transformer.h, TEXT, compile=False)
    torch.testing.assert_close(compiled, eager)
