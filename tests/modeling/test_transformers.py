"""Models of transformers by task: what is loaded, the forms of inputs, batches and pipelines, compared with the modules themselves."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import nnsight
from nnsight import LanguageModel, TransformersModel, VisionLanguageModel
from nnsight.modeling.mixins import LoadingError
from nnsight.modeling.transformers import tasks
from nnsight.remote.protocol import ModelKey

from ..conftest import both
from .tiny_tasks import TEXT, TINY, WORDS, image, images, sound, tokenizer

#: Like :data:`tests.conftest.both`: captures take seconds.
eager_and_slow = pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])

SHORT, LONG = "the cat sat", "a dog ran on the red mat"


def wrapped(name: str, **options: Any) -> TransformersModel:
    """Return a small model that runs eagerly, unless it is asked to run compiled."""
    tiny = TINY[name]
    model = TransformersModel(tiny.module(), task=tiny.task, **{**tiny.preprocessors(), **options})
    model._make_driver({"backend": "eager"})
    return model


@pytest.fixture(scope="module")
def classifier() -> TransformersModel:
    return wrapped("text-classification")


@pytest.fixture(scope="module")
def filler() -> TransformersModel:
    return wrapped("fill-mask")


@pytest.fixture(scope="module")
def writer() -> TransformersModel:
    return wrapped("text-generation")


@pytest.fixture(scope="module")
def viewer() -> TransformersModel:
    return wrapped("image-classification")


def logits_of(model: TransformersModel, *args: Any, **kwargs: Any) -> torch.Tensor:
    found: torch.Tensor = model.trace(*args, **kwargs, trace=False).logits
    return found


def alone(model: TransformersModel, text: str) -> torch.Tensor:
    logits: torch.Tensor = model._module(**model.tokenizer(text, return_tensors="pt")).logits
    return logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# -- tasks and loading -------------------------------------------------------------------------------------------------


def test_a_task_by_name_and_by_alias() -> None:
    model = TransformersModel("nnsight/demo", task="text-generation")
    assert (model.task, model.repo_id, model.revision, model.dispatched) == ("text-generation", "nnsight/demo", "main", False)
    assert model.attn_implementation == model.config._attn_implementation == "sdpa"
    assert TransformersModel(TINY["text-classification"].module(), task="sentiment-analysis").task == "text-classification"
    assert type(TransformersModel("nnsight/demo", task="text-classification")._module) is t.GPT2ForSequenceClassification
    assert LanguageModel("nnsight/demo").task == "text-generation" and issubclass(VisionLanguageModel, TransformersModel)
    for name in ("nonsense", "question-answering"):
        with pytest.raises(ValueError, match=name):
            TransformersModel("nnsight/demo", task=name)
    with pytest.raises(ValueError, match=r"No model of the task 'audio-classification' .* takes a GPT2Config"):
        config = t.GPT2Config(n_layer=1)
        TransformersModel("nnsight/demo", task="audio-classification", config=config)


def test_the_task_of_a_loaded_module_or_a_folder(tmp_path: Path) -> None:
    names = ["text-classification", "token-classification", "fill-mask", "image-classification", "audio-classification", "text-generation"]
    assert [TransformersModel(TINY[name].module()).task for name in names] == names
    with pytest.raises(ValueError, match="class BertModel is not known"):
        TransformersModel(TINY["feature-extraction"].module())
    assert TransformersModel("nnsight/demo").task == "text-generation"
    TINY["fill-mask"].module().save_pretrained(tmp_path / "mask")
    tokenizer().save_pretrained(tmp_path / "mask")
    assert TransformersModel(tmp_path / "mask").task == "fill-mask"
    TINY["feature-extraction"].module().save_pretrained(tmp_path / "features")
    with pytest.raises(ValueError, match="pass it, as in `task="):
        TransformersModel(tmp_path / "features")


def test_the_task_of_a_repository_is_that_of_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def get_task(name: str, token: Any = None) -> str:
        asked.append((name, token))
        if name == "somebody/encoder":
            raise RuntimeError("This model is meant to be used with sentence-transformers not with transformers")
        return "sentiment-analysis"

    monkeypatch.setattr("transformers.pipelines.get_task", get_task)
    assert tasks.task_of_repository("somebody/classifier", t.BertConfig(), "token") == "text-classification"
    assert asked == [("somebody/classifier", "token")]
    assert tasks.task_of_repository("somebody/encoder", t.BertConfig(architectures=["BertForMaskedLM"])) == "fill-mask"
    with pytest.raises(ValueError, match=r"'somebody/encoder' is not known: pass it, as in `task=.*sentence-transformers"):
        tasks.task_of_repository("somebody/encoder", t.BertConfig(architectures=["BertModel"]))


def test_preprocessors_are_those_of_the_task(viewer: TransformersModel, classifier: TransformersModel) -> None:
    assert viewer.tokenizer is None and viewer.processor is None and viewer.image_processor is not None
    assert classifier.tokenizer is not None and classifier.image_processor is None and classifier.feature_extractor is None
    own = tokenizer()
    assert TransformersModel(TINY["fill-mask"].module(), tokenizer=own).tokenizer is own
    module = t.AutoModelForCausalLM.from_pretrained(nnsight.demo.path())
    assert TransformersModel(module).tokenizer.vocab_size == LanguageModel(module, tokenizer="nnsight/demo").tokenizer.vocab_size
    with pytest.raises(LoadingError, match="image processor"):
        TransformersModel("nnsight/demo", task="image-classification")


def test_the_side_of_the_padding_follows_the_model(writer: TransformersModel, classifier: TransformersModel) -> None:
    assert writer.tokenizer.padding_side == "left" and classifier.tokenizer.padding_side == "right"
    assert wrapped("fill-mask", tokenizer=tokenizer(padding_side="left")).tokenizer.padding_side == "left"
    assert writer.pipeline and writer.tokenizer.padding_side == "left"


def test_options_of_loading() -> None:
    for device in ("cpu", -1, torch.device("cpu")):
        assert TransformersModel("nnsight/demo", device=device, dispatch=True).device == torch.device("cpu")
    assert TransformersModel(TINY["fill-mask"].module(), device="cpu").device == torch.device("cpu")
    assert TransformersModel("nnsight/demo", torch_dtype=torch.float16).config.dtype == torch.float16
    assert TransformersModel("nnsight/demo", attn_implementation="eager").attn_implementation == "eager"
    with pytest.raises(ValueError, match="contradict"):
        TransformersModel("nnsight/demo", device="cpu", device_map="auto")
    with pytest.raises(TypeError, match="options for loading"):
        TransformersModel(TINY["fill-mask"].module(), dtype="float16")


def test_the_key_of_a_model_says_its_task() -> None:
    model = TransformersModel("nnsight/demo", task="text-classification")
    key = model.to_model_key()
    assert key == (
        'nnsight.modeling.transformers.TransformersModel:{"repo_id": "nnsight/demo", "revision": "main", "task": "text-classification"}'
    )
    again = TransformersModel.from_model_key(key, attn_implementation="eager")
    assert again.to_model_key() == key and again.attn_implementation == "eager"
    assert '"trust_remote_code": true' in TransformersModel("nnsight/demo", trust_remote_code=True).to_model_key()
    assert LanguageModel.from_model_key(LanguageModel("nnsight/demo").to_model_key()).task == "text-generation"
    named = ModelKey.parse(key)
    assert named.matches(ModelKey("nnsight/demo")) and not named.matches(ModelKey("nnsight/demo", task="text-generation"))
    with pytest.raises(ValueError, match="model key"):
        TransformersModel.from_model_key("a:{b")


def test_copies_and_release(filler: TransformersModel, no_gc: None) -> None:
    model = TransformersModel("nnsight/demo")
    assert model.pipeline.model is model._module
    again = pickle.loads(pickle.dumps(model))
    assert (again.task, again.pipeline.task, copy.deepcopy(again).repo_id) == (model.task, model.task, "nnsight/demo")
    other = wrapped("fill-mask")
    other.pipe("the [MASK] sat")
    with other.trace("the [MASK] sat") as tracer:
        result = tracer.result.save()
    module = weakref.ref(other._module)
    del other, tracer
    assert module() is None and result.logits is not None


# -- inputs ------------------------------------------------------------------------------------------------------------


@eager_and_slow
def test_texts_of_several_invokes_are_one_batch(classifier: TransformersModel, compile: bool) -> None:
    ids = classifier.tokenizer(SHORT)["input_ids"]
    with classifier.trace(compile=compile) as tracer:
        with tracer.invoke(SHORT):
            one = classifier.classifier.output.save()
        with tracer.invoke([LONG, SHORT]):
            two = classifier.classifier.output.save()
        with tracer.invoke(ids):
            three = classifier.classifier.output.save()
    close(torch.cat([one, two, three]), torch.cat([alone(classifier, text) for text in (SHORT, LONG, SHORT, SHORT)]))


def test_options_of_the_preprocessing_reach_it(classifier: TransformersModel) -> None:
    assert torch.equal(logits_of(classifier, LONG, truncation=True, max_length=4), alone(classifier, "a dog"))
    pair = classifier._module(**classifier.tokenizer("a dog", "the cat", return_tensors="pt")).logits
    assert torch.equal(logits_of(classifier, {"text": "a dog", "text_pair": "the cat"}), pair)
    assert torch.equal(logits_of(classifier, "a dog", text_pair="the cat"), pair)
    with classifier.trace(truncation=True, max_length=4) as tracer:
        with tracer.invoke(LONG):
            cut = classifier.classifier.output.save()
        with tracer.invoke(SHORT, max_length=3):
            pass
    close(cut, alone(classifier, "a dog"))


def test_labels_are_classes_however_they_are_written(classifier: TransformersModel) -> None:
    loss = classifier._module(**classifier.tokenizer(SHORT, return_tensors="pt"), labels=torch.tensor([2])).loss
    for labels in (2, [2], torch.tensor(2), torch.tensor([2])):
        assert torch.equal(classifier.trace(SHORT, labels=labels, trace=False).loss, loss)
        assert torch.equal(classifier.trace([2, 5, 6, 7, 3], labels=labels, trace=False).loss, loss)
    with classifier.trace() as tracer:
        with tracer.invoke(SHORT, labels=2):
            output = tracer.result.save()
        with tracer.invoke(LONG):
            pass
    close(output.loss, loss)
    three = torch.tensor([[2, 5, 3], [2, 6, 3], [2, 7, 3]])  # as many prompts as tokens
    loss = classifier._module(input_ids=three, labels=torch.tensor([2, 1, 0])).loss
    close(classifier.trace(three, labels=[2, 1, 0], trace=False).loss, loss)
    with pytest.raises(ValueError, match="`labels` has 3 rows, and there are 2 prompts"):
        classifier.trace([SHORT, LONG], labels=[2, 1, 0], trace=False)
    with pytest.raises(ValueError, match="Only some of the invokes have `labels`"), classifier.trace() as tracer:
        with tracer.invoke(SHORT, labels=[0.5]):
            pass
        with tracer.invoke(LONG):
            pass


def test_one_number_for_each_row() -> None:
    torch.manual_seed(0)
    module = t.BertForQuestionAnswering(t.BertConfig(**TEXT)).eval()
    model = TransformersModel(module, task="feature-extraction", tokenizer=tokenizer())
    with model.trace() as tracer:
        with tracer.invoke(SHORT, start_positions=1, end_positions=torch.tensor(2)):
            output = tracer.result.save()
        with tracer.invoke(LONG, start_positions=[1], end_positions=[2]):
            pass
    places = {"start_positions": torch.tensor([1, 1]), "end_positions": torch.tensor([2, 2])}
    close(output.loss, module(**model.tokenizer([SHORT, LONG], return_tensors="pt", padding=True), **places).loss)


def test_fields_that_only_some_invokes_have(classifier: TransformersModel, writer: TransformersModel) -> None:
    types = {"input_ids": [2, 5, 6, 3], "token_type_ids": [0, 0, 1, 1]}
    with classifier.trace() as tracer:
        with tracer.invoke(types):
            one = classifier.classifier.output.save()
        with tracer.invoke([2, 5, 6, 7, 8, 3]):
            two = classifier.classifier.output.save()
    close(one, logits_of(classifier, types))
    close(two, logits_of(classifier, [2, 5, 6, 7, 8, 3]))
    with writer.trace() as tracer:
        with tracer.invoke([5, 6, 7], position_ids=[4, 5, 6], labels=[5, 6, 7]):
            one = writer.lm_head.output.save()
        with tracer.invoke([2, 5, 6, 7, 8]):
            two = writer.lm_head.output.save()
    close(one[:, -3:], logits_of(writer, [5, 6, 7], position_ids=[4, 5, 6]))
    close(two, logits_of(writer, [2, 5, 6, 7, 8]))


def test_embeddings_and_choices(writer: TransformersModel) -> None:
    embeds = torch.randn(4, 16)
    with writer.trace() as tracer:
        with tracer.invoke(inputs_embeds=embeds):
            pass
        with tracer.invoke(inputs_embeds=embeds[:2]):
            two = writer.lm_head.output.save()
    close(two[:, -2:], writer._module(inputs_embeds=embeds[None, :2]).logits)
    torch.manual_seed(0)
    module = t.BertForMultipleChoice(t.BertConfig(**TEXT)).eval()
    model = TransformersModel(module, task="feature-extraction", tokenizer=tokenizer())
    ids = torch.randint(5, 20, (2, 3, 4))
    for form in (ids, ids.tolist()):
        assert torch.equal(logits_of(model, form), module(input_ids=ids).logits)
    with model.trace() as tracer:
        with tracer.invoke(ids):
            one = model.classifier.output.save()
        with tracer.invoke(ids[:1, :, :2]):
            two = model.classifier.output.save()
    close(torch.cat([one, two]), torch.cat([module(input_ids=ids).logits, module(input_ids=ids[:1, :, :2]).logits]).reshape(-1, 1))


def test_an_encoder_that_the_tokenizer_pads_on_the_left() -> None:
    model = wrapped("fill-mask", tokenizer=tokenizer(padding_side="left"))
    with model.trace(["the [MASK] sat", "a dog ran on the [MASK] mat"]):
        rows = model.cls.predictions.decoder.output.save()
    close(rows[:1, -5:], alone(model, "the [MASK] sat"))


def test_the_task_checks_its_input(filler: TransformersModel) -> None:
    with pytest.raises(Exception, match="No mask_token"):
        filler.trace(SHORT, trace=False)
    assert filler.trace([2, 5, 6, 3], trace=False).logits.shape == (1, 4, len(WORDS))
    with pytest.raises(ValueError, match="candidate_labels"):
        wrapped("zero-shot-classification").trace(SHORT, trace=False)
    for name, message in (("fill-mask", "Tokenizer not found"), ("image-classification", "Image processor not found")):
        bare = TransformersModel(TINY[name].module())
        for run in (bare.pipe, functools.partial(bare.trace, trace=False)):
            with pytest.raises(AttributeError, match=message):
                run(TINY[name].given)
    segmenter = TransformersModel(TINY["image-classification"].module(), task="mask-generation", image_processor=images())
    with pytest.raises(NotImplementedError, match=r"mask-generation.*model\.pipe"):
        segmenter.trace(image(), trace=False)


@eager_and_slow
def test_a_pipeline_that_calls_the_model_for_each_question(tmp_path: Path, compile: bool) -> None:
    pytest.importorskip("transformers.decision").DecisionConfig(labels={"noul": ["A", "B"]}).save_pretrained(tmp_path)
    demo = nnsight.demo_model()
    net, tokenizer = demo._module, demo.tokenizer
    net.config._name_or_path = net.name_or_path = str(tmp_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    questions = {name: {"type": "noul", "instructions": f"Is it in {name}?"} for name in ("France", "Italy")}
    request = {"state": "The Eiffel Tower is in Paris.", "questions": questions}
    plain = t.pipeline("decision", model=net, tokenizer=tokenizer)
    model = TransformersModel(net, tokenizer=tokenizer, task="decision", compile={"backend": "eager"})
    with torch.no_grad():
        assert model.pipe(request, compile=compile) == plain(request)
        with model.pipe(request, compile=compile) as tracer:
            for _ in tracer.iter[:2]:
                model.transformer.h[1].output[:] *= 0.5
            found = tracer.result.save()
        hook = net.transformer.h[1].register_forward_hook(lambda module, args, output: 0.5 * output)
        expected = plain(request)
        hook.remove()
    assert found == expected != plain(request)
    with pytest.raises(NotImplementedError, match=r"decision.*once for each question.*model\.pipe"):
        model.trace(request, trace=False)


@eager_and_slow
def test_a_pipeline_of_pairs_of_images(compile: bool) -> None:
    torch.manual_seed(0)
    detector = t.SuperPointConfig(
        encoder_hidden_sizes=[8] * 4, decoder_hidden_size=8, descriptor_decoder_dim=8, max_keypoints=8, keypoint_threshold=0.0,
        border_removal_distance=0,
    )  # fmt: skip
    config = t.SuperGlueConfig(
        keypoint_detector_config=detector, hidden_size=8, keypoint_encoder_sizes=[8, 8], gnn_layers_types=["self", "cross"],
        num_attention_heads=2, sinkhorn_iterations=3, matching_threshold=0.0,
    )  # fmt: skip
    net = t.SuperGlueForKeypointMatching(config).eval()
    processor = t.SuperGlueImageProcessorPil(size={"height": 32, "width": 32})
    pair = [image(0, 32), image(1, 32)]
    plain = t.pipeline("keypoint-matching", model=net, image_processor=processor)
    model = TransformersModel(net, task="keypoint-matching", image_processor=processor, compile={"backend": "eager"})
    assert model.pipe(pair, compile=compile) == plain(pair)
    with torch.no_grad(), model.pipe(pair, compile=compile) as tracer:
        model.final_projection.output[:] *= 3.0
        found = tracer.result.save()
    hook = net.final_projection.register_forward_hook(lambda module, args, output: 3.0 * output)
    expected = plain(pair)
    hook.remove()
    assert found == expected != plain(pair)
    with pytest.raises(NotImplementedError, match=r"keypoint-matching.*pairs of images.*model\.pipe"):
        model.trace(pair, trace=False)


def segmenter() -> tuple[t.SamModel, dict[str, Any]]:
    """Return a model that makes masks, and sizes for its image processor."""
    torch.manual_seed(0)
    common = {"hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 32}
    image_encoder = {"output_channels": 16, "num_hidden_layers": 2, "global_attn_indexes": [1], "window_size": 4, "num_pos_feats": 8}
    patches = {"image_size": 64, "patch_size": 8}
    config = t.SamConfig(
        vision_config={**common, **patches, **image_encoder},
        prompt_encoder_config={**patches, "hidden_size": 16, "mask_input_channels": 4},
        mask_decoder_config={**common, "num_hidden_layers": 1, "iou_head_hidden_dim": 16},
    )
    sizes = {"size": {"longest_edge": 64}, "pad_size": {"height": 64, "width": 64}}
    sizes |= {"mask_size": {"longest_edge": 16}, "mask_pad_size": {"height": 16, "width": 16}}
    return t.SamModel(config).eval(), sizes


@eager_and_slow
def test_tensors_of_a_model_that_makes_masks(compile: bool) -> None:
    net, _ = segmenter()
    model = TransformersModel(net, task="mask-generation", compile={"backend": "aot_eager"})
    given = {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.tensor([[[[20.0, 20.0]]]])}
    hook = net.vision_encoder.layers[1].register_forward_hook(lambda module, args, output: output * 0.5)
    expected = net(**given)
    (wanted,) = torch.autograd.grad(expected.pred_masks.sum(), net.vision_encoder.layers[0].mlp.lin2.weight)
    hook.remove()
    with model.trace(**given, compile=compile) as tracer:
        model.vision_encoder.layers[1].output *= 0.5
        output = model.output.save()
    assert tracer.report.mode == ("compiled" if compile else "eager") and not tracer.report.breaks
    close(output.pred_masks, expected.pred_masks)
    close(output.iou_scores, expected.iou_scores)
    (found,) = torch.autograd.grad(output.pred_masks.sum(), net.vision_encoder.layers[0].mlp.lin2.weight)
    close(found, wanted)


@pytest.mark.slow
@both
def test_the_pipeline_that_makes_masks(compile: bool) -> None:
    """It needs torchvision."""
    pytest.importorskip("torchvision")
    net, sizes = segmenter()
    processor, options = t.SamImageProcessor(**sizes), {"points_per_crop": 4, "pred_iou_thresh": -10.0, "stability_score_thresh": -1.0}
    model = TransformersModel(net, task="mask-generation", image_processor=processor, compile={"backend": "aot_eager"})
    plain = t.pipeline("mask-generation", model=net, image_processor=processor)

    def masks(found: dict[str, Any]) -> list[Any]:
        return [np.asarray(mask).tolist() for mask in found["masks"]]

    assert masks(model.pipe(image(0, 48), compile=compile, **options)) == masks(plain(image(0, 48), **options)) != []
    scores: list[torch.Tensor] = []
    hook = net.mask_decoder.register_forward_hook(lambda module, args, output: scores.append(output[1] + 1) or (output[0], output[1] + 1))
    expected = plain(image(0, 48), **options)
    hook.remove()
    with torch.no_grad(), model.pipe(image(0, 48), compile=compile, **options) as tracer:
        model.mask_decoder.output[1][:] += 1
        edited = model.mask_decoder.output[1].save()
        found = tracer.result.save()
    close(edited, scores[0])
    assert masks(found) == masks(expected)
    close(found["scores"], expected["scores"])


@eager_and_slow
def test_images_of_several_invokes_are_one_batch(viewer: TransformersModel, compile: bool) -> None:
    with viewer.trace(compile=compile) as tracer:
        with tracer.invoke(image(0)):
            one = viewer.classifier.output.save()
        with tracer.invoke([image(1), image(2, width=20)]):
            two = viewer.classifier.output.save()
    expected = [viewer._module(**viewer.image_processor(image(n, 20 if n == 2 else 12), return_tensors="pt")).logits for n in range(3)]
    close(torch.cat([one, two]), torch.cat(expected))


def test_files_and_arrays_of_text(viewer: TransformersModel, classifier: TransformersModel, tmp_path: Path) -> None:
    image().save(tmp_path / "image.png")
    for path in (tmp_path / "image.png", str(tmp_path / "image.png")):
        assert torch.equal(logits_of(viewer, path), logits_of(viewer, image()))
        assert viewer.pipe(path) == viewer.pipe(image())
    for texts in ([SHORT, LONG], (SHORT, LONG), np.array([SHORT, LONG])):
        close(logits_of(classifier, texts), torch.cat([alone(classifier, SHORT), alone(classifier, LONG)]))


def test_tensors_go_to_the_model_as_they_are(viewer: TransformersModel) -> None:
    encoding = viewer.image_processor(image(), return_tensors="pt")
    expected = viewer._module(**encoding).logits
    for given in (image(), encoding, dict(encoding), encoding["pixel_values"], viewer.image_processor(image())):
        assert torch.equal(logits_of(viewer, given), expected)
    for name in ("image", "images", "inputs"):
        assert torch.equal(logits_of(viewer, **{name: image()}), expected)
    assert torch.equal(logits_of(viewer, **encoding), expected)
    assert viewer.trace(image(), labels=1, trace=False).loss is not None
    with pytest.raises(ValueError, match="two inputs"):
        viewer.trace(image(), images=image(), trace=False)
    for first, second in ((encoding, image()), (image(), encoding)):
        with pytest.raises(NotImplementedError, match="`pixel_values`.*does not support batching"), viewer.trace() as tracer:
            with tracer.invoke(first):
                pass
            with tracer.invoke(second):
                pass


# -- tasks that split an input, and inputs that share no batch ---------------------------------------------------------------


def test_windows_of_a_long_text_are_rows() -> None:
    model = wrapped("token-classification", tokenizer=tokenizer(model_max_length=6))
    options = {"stride": 1, "aggregation_strategy": "simple"}
    with model.trace(LONG, **options):
        model.bert.encoder.layer[0].intermediate.output[:] = 0
        logits = model.classifier.output.save()
    assert logits.shape == (2, 6, 3)
    with model.trace() as tracer:
        with tracer.invoke("the cat"):
            one = model.classifier.output.save()
        with tracer.invoke("a"):
            two = model.classifier.output.save()
    close(one, alone(model, "the cat"))
    close(two[:, :3], alone(model, "a"))


@pytest.mark.parametrize(
    ("name", "inputs", "options"),
    [
        ("token-classification", (LONG, SHORT), {"stride": 1, "aggregation_strategy": "simple"}),
        ("zero-shot-classification", (SHORT, LONG), {"candidate_labels": ["red", "blue"]}),
        ("zero-shot-image-classification", (image(0), image(1)), {"candidate_labels": ["red"]}),
    ],
)
def test_such_inputs_share_no_batch(name: str, inputs: tuple[Any, Any], options: dict[str, Any]) -> None:
    model = wrapped(name, **({"tokenizer": tokenizer(model_max_length=6)} if name.startswith("token") else {}))
    with pytest.raises(NotImplementedError, match="does not support batching"), model.trace(**options) as tracer:
        with tracer.invoke(inputs[0]):
            pass
        with tracer.invoke(inputs[1]):
            pass
    with pytest.raises(NotImplementedError, match="alone|one input at a time"):
        model.trace(list(inputs), **options, trace=False)


def test_sounds_of_different_lengths() -> None:
    model = wrapped("automatic-speech-recognition")
    with model.trace([sound(400), sound(300)]):
        rows = model.lm_head.output.save()
    single = model.trace(sound(300), trace=False).logits
    assert rows.shape[0] == 2 and single.shape[1] < rows.shape[1]
    heard = model.trace({"raw": sound(400), "sampling_rate": 16000}, trace=False).logits
    assert torch.equal(heard, model.trace(audio=sound(400), trace=False).logits)
    deaf = wrapped("audio-classification", feature_extractor=t.Wav2Vec2FeatureExtractor(return_attention_mask=False))
    with pytest.raises(NotImplementedError, match="no mask"):
        deaf.trace([sound(400), sound(300)], trace=False)


# -- pipelines -----------------------------------------------------------------------------------------------------------


@eager_and_slow
def test_a_pipeline_is_traced_with_every_pass(writer: TransformersModel, compile: bool) -> None:
    model = nnsight.TransformersModel("nnsight/demo", dispatch=True)
    model._make_driver({"backend": "eager"})
    prompt, options = "The Eiffel Tower is in the city of", {"max_new_tokens": 2, "do_sample": False}
    expected = model.pipeline(prompt, **options)
    assert expected[0]["generated_text"].endswith(" Paris.") and model.pipe(prompt, **options) == expected
    with model.pipe(prompt, **options, compile=compile) as tracer:
        chosen = [].save()
        streamed = model.generator.streamer.output.shape.save()
        for _ in tracer.iter[:2]:
            chosen.append(model.lm_head.output[0, -1].argmax())
        records = tracer.result.save()
    assert records == expected and model.tokenizer.decode(torch.stack(chosen)) == " Paris." and len(streamed) == 2
    with model.pipe(prompt, **options, compile=compile) as tracer:
        model.lm_head.output[:, -1, 5] = 1e6
        edited = tracer.result.save()
    assert edited != expected


def test_a_pipeline_has_the_preprocessors_that_the_model_has_now() -> None:
    model = nnsight.TransformersModel("nnsight/demo", dispatch=True)
    pipeline, former = model.pipeline, model.tokenizer
    assert model.pipeline is pipeline
    model.tokenizer = copy.deepcopy(former)
    assert model.pipeline.tokenizer is model.tokenizer is not former


@eager_and_slow
def test_texts_of_several_invokes_are_one_pipeline(filler: TransformersModel, compile: bool) -> None:
    texts = ["the [MASK] sat", "a [MASK]", "the red [MASK] ran"]
    with filler.pipe(top_k=1, compile=compile) as tracer:
        with tracer.invoke(texts[0]):
            one = filler.cls.predictions.decoder.output.save()
            first = tracer.result.save()
        with tracer.invoke(texts[1:]):
            two = filler.cls.predictions.decoder.output.save()
            others = tracer.result.save()
    close(one[0, :5], alone(filler, texts[0])[0])
    assert len(two) == 2

    def fills(records: Any) -> list[str]:
        return [record["token_str"] for record in records]

    assert fills(first) == fills(filler.pipe(texts[0], top_k=1))
    with pytest.raises(ValueError, match="3 texts of the invokes run as one batch"), filler.pipe(batch_size=2, compile=compile) as tracer:
        with tracer.invoke(texts[0]):
            pass
        with tracer.invoke(texts[1:]):
            pass
    assert [fills(found) for found in others] == [fills(found) for found in filler.pipe(texts[1:], top_k=1)]


def test_inputs_of_pipelines_that_share_no_batch(viewer: TransformersModel) -> None:
    expected = viewer.pipeline(image(), top_k=1)
    assert viewer.pipe(image(), top_k=1) == expected
    with viewer.pipe(image(), top_k=1) as tracer:
        logits = viewer.classifier.output.save()
        records = tracer.result.save()
    assert records == expected and torch.equal(logits, logits_of(viewer, image()))
    zero_shot = wrapped("zero-shot-classification")
    refused: list[tuple[TransformersModel, Any, dict[str, Any]]] = [
        (viewer, image(), {}),
        (zero_shot, SHORT, {"candidate_labels": ["red", "blue"]}),
    ]
    for model, given, options in refused:
        with pytest.raises(NotImplementedError, match="has to be the only"), model.pipe(**options) as tracer:
            with tracer.invoke(given):
                pass
            with tracer.invoke(given):
                pass
    with pytest.raises(ValueError, match="remote"):
        viewer.pipe(image(), remote=True)
    tagger = wrapped("token-classification")
    with tagger.pipe() as tracer:
        with tracer.invoke(SHORT):
            one = tagger.classifier.output.save()
        with tracer.invoke(LONG):
            two = tagger.classifier.output.save()
            tags = tracer.result.save()
    close(one[:, :5], alone(tagger, SHORT))
    close(two, alone(tagger, LONG))
    assert [tag["word"] for tag in tags] == [tag["word"] for tag in tagger.pipe(LONG)]


def test_edits_run_in_pipelines(filler: TransformersModel) -> None:
    with filler.edit() as edited:
        filler.cls.predictions.decoder.output[..., 9] = 1e6
    assert [record["token"] for record in edited.pipe("the [MASK] sat", top_k=1)] == [9]
    assert [record["token"] for record in filler.pipe("the [MASK] sat", top_k=1)] != [9]


def test_blocks_are_recorded_as_programs(classifier: TransformersModel, viewer: TransformersModel) -> None:
    with classifier.trace(SHORT, remote="local"):
        classifier.bert.encoder.layer[0].intermediate.output[:] = 0
        logits = classifier.classifier.output.save()
    with classifier.trace(SHORT):
        classifier.bert.encoder.layer[0].intermediate.output[:] = 0
        expected = classifier.classifier.output.save()
    close(logits, expected)
    with viewer.trace(image(), remote="local"):
        logits = viewer.classifier.output.save()
    close(logits, logits_of(viewer, image()))
