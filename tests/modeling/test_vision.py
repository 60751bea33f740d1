"""Models of images and text, compared with the transformers model itself on what its processor makes of one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from nnsight import LanguageModel, TransformersModel, VisionLanguageModel

from ..conftest import Hooks, both

#: Models with several components: captured and generated with, they take minutes in all.
pytestmark = pytest.mark.slow

WORDS = (
    "<pad> <eos> <unk> <image> what is this a cat dog ? and <fake_token_around_image> <global-img> <end_of_utterance> "
    "<|vision_start|> <|vision_end|> <|image_pad|> user: assistant:"
).split()
TEXT: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
IMAGES = [
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (10, 12, 3), dtype=np.uint8)) for number in range(3)
]
QUESTION = "<image> what is this ?"


def tokenizer() -> Any:
    parts = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    parts.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [word for word in WORDS if word.startswith("<")][3:]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=parts, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", additional_special_tokens=marks
    )


def llava() -> tuple[Any, Any]:
    """All images of a batch are in the first dimension of its pixels."""
    torch.manual_seed(0)
    size = {"height": 8, "width": 8}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=size)
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(images, tokenizer(), patch_size=4, chat_template=TEMPLATE, **strategy)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=3,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).eval(), processor


def idefics3() -> tuple[Any, Any]:
    """Pixels have a row for each prompt."""
    torch.manual_seed(0)
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    edge = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = transformers.Idefics3Processor(images, tokenizer(), image_seq_len=4)
    config = transformers.Idefics3Config(
        vision_config={**VISION, "image_size": 16, "patch_size": 4},
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=3,
        scale_factor=2,
        pad_token_id=0,
    )
    return transformers.Idefics3ForConditionalGeneration(config).eval(), processor


@pytest.fixture(scope="module", params=[llava, idefics3])
def parts(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return request.param()


@pytest.fixture(scope="module")
def model(parts: tuple[Any, Any]) -> VisionLanguageModel:
    return VisionLanguageModel(*parts, compile={"backend": "eager"})


@pytest.fixture(scope="module")
def seeing() -> VisionLanguageModel:
    return VisionLanguageModel(*llava(), compile={"backend": "eager"})


def alone(model: VisionLanguageModel, text: str, images: Any = None) -> dict[str, torch.Tensor]:
    """Return what the processor makes of one prompt."""
    given = {"text": [text], "return_tensors": "pt", **({} if images is None else {"images": images})}
    return dict(model.processor(**given))


# -- one prompt -------------------------------------------------------------------------------------------------------


@both
def test_a_prompt_with_an_image(model: VisionLanguageModel, compile: bool) -> None:
    with model.trace(QUESTION, images=IMAGES[0], compile=compile) as tracer:
        hidden = model.model.output[0].save()
        logits = model.lm_head.output.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    expected = model._module(**alone(model, QUESTION, IMAGES[:1])).logits
    assert torch.equal(logits, expected)
    assert torch.equal(model._module.lm_head(hidden), expected)
    other = model._module(**alone(model, QUESTION, IMAGES[1:2])).logits
    assert not torch.equal(logits, other)


def test_a_prompt_by_name_and_options_of_the_processor(seeing: VisionLanguageModel) -> None:
    expected = seeing._module(**alone(seeing, QUESTION, IMAGES[:1])).logits
    given: list[tuple[Any, Any]] = [
        ((), {"text": QUESTION, "images": IMAGES[0]}),
        ((QUESTION,), {"image": IMAGES[0]}),
        (({"text": QUESTION, "images": IMAGES[0]},), {}),
    ]
    for args, kwargs in given:
        with seeing.trace(*args, **kwargs):
            logits = seeing.lm_head.output.save()
        assert torch.equal(logits, expected)
    width = expected.shape[1]
    cut = seeing._prepare_input(QUESTION, images=IMAGES[0], padding="max_length", max_length=width + 3)[1]
    assert cut["input_ids"].shape == (1, width + 3)
    with pytest.raises(ValueError, match="two prompts"), seeing.trace(QUESTION, text=QUESTION, images=IMAGES[0]):
        seeing.lm_head.output.save()


@both
def test_what_the_image_becomes_is_edited(seeing: VisionLanguageModel, compile: bool) -> None:
    with seeing.trace(QUESTION, images=IMAGES[0], compile=compile):
        patches = seeing.model.multi_modal_projector.output.clone().save()
        seeing.model.multi_modal_projector.output[:, 1] = 0
        logits = seeing.lm_head.output.save()

    def blank(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, 1] = 0
        return output

    reference = Hooks(seeing._module)
    reference.output("model.multi_modal_projector", reference.keep("patches"))
    reference.output("model.multi_modal_projector", blank)
    expected = reference(**alone(seeing, QUESTION, IMAGES[:1])).logits
    assert patches.shape == (1, 4, 16)
    assert torch.equal(patches, reference.seen["patches"])
    assert torch.equal(logits, expected)


def test_text_without_images_is_what_a_language_model_reads(seeing: VisionLanguageModel) -> None:
    text = "what is a cat ?"
    as_text = LanguageModel(seeing._module, tokenizer=seeing.tokenizer)
    for prompt in (text, [text, "a dog"], [4, 5, 6], torch.tensor([[4, 5]]), {"input_ids": [[7, 8]]}):
        with seeing.trace(prompt):
            logits = seeing.lm_head.output.save()
        with as_text.trace(prompt):
            expected = as_text.lm_head.output.save()
        assert torch.equal(logits, expected)


def test_images_are_scanned(model: VisionLanguageModel) -> None:
    """Though the model checks that there are as many image tokens as vectors of images, for which a scan has no values."""
    with model.scan(QUESTION, images=IMAGES[0]):
        logits = model.lm_head.output.shape.save()
    expected = model._module(**alone(model, QUESTION, IMAGES[0])).logits.shape
    assert logits == expected == model.lm_head._fake_output.shape
    ran = []
    with model.trace(QUESTION, images=IMAGES[0], validate=True):
        ran.append(1)
        logits = model.lm_head.output.shape.save()
    assert logits == expected
    with pytest.raises(IndexError), model.trace(QUESTION, images=IMAGES[0], validate=True):
        never = model.lm_head.output[:, 100]


def test_a_chat_with_an_image(seeing: VisionLanguageModel) -> None:
    def chat(image: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image", **image}, {"type": "text", "text": "what is this ?"}]}]

    rendered = "user: <image> what is this ? assistant:"
    expected = seeing._module(**alone(seeing, rendered, IMAGES[:1])).logits
    with seeing.trace(chat({"image": IMAGES[0]})):
        inside = seeing.lm_head.output.save()
    with seeing.trace(chat({}), images=IMAGES[0]):
        beside = seeing.lm_head.output.save()
    assert torch.equal(inside, expected)
    assert torch.equal(beside, expected)


@pytest.mark.parametrize("images", ["inside", "beside", "none"])
def test_each_chat_of_a_list_is_answered_or_continued(seeing: VisionLanguageModel, images: str) -> None:
    def chat(number: int, *begun: str) -> list[dict[str, Any]]:
        image = {"inside": [{"type": "image", "image": IMAGES[number]}], "beside": [{"type": "image"}], "none": []}[images]
        asked = {"role": "user", "content": [*image, {"type": "text", "text": "what is this ?"}]}
        return [asked, *({"role": "assistant", "content": [{"type": "text", "text": text}]} for text in begun)]

    mark = "" if images == "none" else "<image> "
    rendered = [f"user: {mark}what is this ? assistant:", f"user: {mark}what is this ? assistant: a cat"]
    pairs = zip(rendered, IMAGES[:2], strict=True)
    expected = [seeing._module(**alone(seeing, text, [image] if mark else None)).logits[:, -1] for text, image in pairs]
    with seeing.trace([chat(0), chat(1, "a cat")], **({"images": IMAGES[:2]} if images == "beside" else {})):
        logits = seeing.lm_head.output[:, -1].save()
    torch.testing.assert_close(logits, torch.cat(expected))


def test_the_start_of_a_rendered_chat_is_there_once() -> None:
    module, processor = llava()
    processor.tokenizer.add_special_tokens({"bos_token": "<eos>"})
    processor.tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<eos> $A", None, [("<eos>", 1)])
    processor.chat_template = "<eos> " + TEMPLATE
    model = VisionLanguageModel(module, processor)

    def ids(image: dict[str, Any], **kwargs: Any) -> list[int]:
        content = [{"type": "image", **image}, {"type": "text", "text": "what is this ?"}]
        found: list[int] = model._prepare_input([{"role": "user", "content": content}], **kwargs)[1]["input_ids"][0].tolist()
        return found

    assert ids({}, images=IMAGES[0]) == ids({"image": IMAGES[0]})
    assert ids({}, images=IMAGES[0]).count(1) == 1


def test_pixels_have_the_type_of_the_model() -> None:
    module, processor = llava()
    half = VisionLanguageModel(module.to(torch.bfloat16), processor)
    with half.trace(QUESTION, images=IMAGES[0]):
        pixels = half.model.vision_tower.input.save()
        logits = half.lm_head.output.save()
    assert pixels.dtype == logits.dtype == torch.bfloat16


# -- several prompts --------------------------------------------------------------------------------------------------


def test_each_row_is_what_it_is_alone(model: VisionLanguageModel) -> None:
    """With one image, with none, and with two; the prompts have different lengths."""
    text, double = "a cat and a dog and a cat", "<image> what is <image>"
    with model.trace(compile=False) as tracer:
        with tracer.invoke(QUESTION, images=IMAGES[0]):
            one = model.lm_head.output[:, -1].save()
        with tracer.invoke(text):
            none = model.lm_head.output[:, -1].save()
        with tracer.invoke(double, images=IMAGES[1:]):
            two = model.lm_head.output[:, -1].save()
    for found, given in ((one, (QUESTION, IMAGES[:1])), (none, (text,)), (two, (double, IMAGES[1:]))):
        expected = model._module(**alone(model, *given)).logits[:, -1]
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)


def test_each_invoke_edits_its_own_image(seeing: VisionLanguageModel) -> None:
    with seeing.trace() as tracer:
        with tracer.invoke(QUESTION, images=IMAGES[0]):
            seeing.model.multi_modal_projector.output[:] = 0
            edited = seeing.lm_head.output[:, -1].save()
        with tracer.invoke(QUESTION, images=IMAGES[1]):
            plain = seeing.lm_head.output[:, -1].save()
    blank = Hooks(seeing._module).output("model.multi_modal_projector", torch.zeros_like)
    torch.testing.assert_close(edited, blank(**alone(seeing, QUESTION, IMAGES[:1])).logits[:, -1])
    torch.testing.assert_close(plain, seeing._module(**alone(seeing, QUESTION, IMAGES[1:2])).logits[:, -1])


def test_positions_that_depend_on_images_are_left_to_the_model() -> None:
    """Qwen2-VL numbers the tokens of an image by row and column; its pixels are patches of all images."""
    torch.manual_seed(0)
    vision = {"embed_dim": 16, "hidden_size": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        vision_config={**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        text_config={**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        image_token_id=17,
        video_token_id=2,
        vision_start_token_id=15,
        vision_end_token_id=16,
    )
    module = transformers.Qwen2VLForConditionalGeneration(config).eval()
    model = VisionLanguageModel(module, tokenizer=tokenizer())

    def prepared(height: int, width: int, *words: int) -> dict[str, Any]:
        ids = torch.tensor([[15, *[17] * (height * width // 4), 16, *words]])
        pixels = torch.randn(height * width, 3 * 2 * 4 * 4)
        grid = torch.tensor([[1, height, width]])
        types = (ids == 17).long()
        mask = torch.ones_like(ids)
        return {
            "input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types
        }  # fmt: skip

    small, large = prepared(4, 4, 5, 6), prepared(4, 8, 7, 8, 9)
    with model.trace() as tracer:
        with tracer.invoke(small):
            one = model.lm_head.output[:, -1].save()
        with tracer.invoke("a cat"):
            none = model.lm_head.output[:, -1].save()
        with tracer.invoke(large):
            two = model.lm_head.output[:, -1].save()
    for found, inputs in ((one, small), (two, large)):
        torch.testing.assert_close(found, module(**inputs).logits[:, -1])
    torch.testing.assert_close(none, module(torch.tensor([[7, 8]])).logits[:, -1])


# -- generation -------------------------------------------------------------------------------------------------------


@both
def test_a_generation_about_an_image(seeing: VisionLanguageModel, compile: bool) -> None:
    model = seeing
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    expected = model._module.generate(**alone(model, QUESTION, IMAGES[:1]), **options)
    with model.generate(QUESTION, images=IMAGES[0], compile=compile, **options) as tracer:
        steps = [].save()
        for _ in tracer.iter[:3]:
            steps.append(model.lm_head.output[0, -1].argmax())
        ids = tracer.result.save()
    assert torch.equal(ids, expected)
    assert [int(step) for step in steps] == ids[0, -3:].tolist()
    assert torch.equal(model.generate(QUESTION, images=IMAGES[0], **options), expected)


def test_generations_of_several_invokes(seeing: VisionLanguageModel) -> None:
    model = seeing
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    with model.generate(**options) as tracer:
        with tracer.invoke(QUESTION, images=IMAGES[0]):
            one = tracer.result[:, -3:].save()
        with tracer.invoke("<image> a cat and a dog ?", images=IMAGES[1]):
            two = tracer.result[:, -3:].save()
    for found, text, image in ((one, QUESTION, IMAGES[0]), (two, "<image> a cat and a dog ?", IMAGES[1])):
        assert torch.equal(found, model._module.generate(**alone(model, text, [image]), **options)[:, -3:])


# -- loading and misuse -----------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_late_with_its_processor(tmp_path: Path) -> None:
    module, processor = llava()
    module.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    lazy = VisionLanguageModel(tmp_path)
    assert not lazy.dispatched
    assert type(lazy.processor) is type(processor)
    assert lazy.tokenizer is lazy.processor.tokenizer
    assert lazy.tokenizer.padding_side == "left"
    with lazy.trace(QUESTION, images=IMAGES[0]):
        logits = lazy.lm_head.output.save()
    assert lazy.dispatched
    assert torch.equal(
        logits, module(**dict(processor(text=[QUESTION], images=IMAGES[:1], return_tensors="pt"))).logits
    )


@pytest.mark.parametrize("prompt", [(), ([4, 5],), (torch.tensor([4, 5]),), ({"input_ids": [4]},)])
def test_images_without_text(seeing: VisionLanguageModel, prompt: Any) -> None:
    with pytest.raises(ValueError, match="There are images and no text"):
        with seeing.trace(*prompt, images=IMAGES[0]):
            seeing.output.save()


@both
def test_a_model_by_its_task(compile: bool) -> None:
    module, processor = llava()
    model = TransformersModel(module, processor=processor, compile={"backend": "eager"})
    assert model.task == "image-text-to-text" and model.tokenizer is processor.tokenizer and model.image_processor is None
    assert TransformersModel(module, task="any-to-any", processor=processor).task == "any-to-any"
    assert TransformersModel(module, tokenizer=processor.tokenizer).task == "text-generation"
    with model.trace(QUESTION, images=IMAGES[0], compile=compile):
        logits = model.lm_head.output.save()
    assert torch.equal(logits, module(**alone(model, QUESTION, IMAGES[:1])).logits)

    given = {"text": QUESTION, "images": IMAGES[0]}
    options = {"max_new_tokens": 3, "do_sample": False}
    ids = model.generate(QUESTION, images=IMAGES[0], **options)
    assert torch.equal(model.generate(**given, generate_kwargs=options), ids)
    assert torch.equal(model.generate("a cat", generate_kwargs=options), model.generate("a cat", **options))
    with model.pipe(**given, **options, compile=compile) as tracer:
        first = model.lm_head.output[:, -1].argmax(-1).save()
        records = tracer.result.save()
    assert records == model.pipeline(**given, **options) and first == ids[0, -3]
