"""A small seeded model, its preprocessors and an input for each task of transformers' pipelines."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import transformers as t
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat and dog ran fast red blue this example is photo of sound . | ?".split()
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": len(WORDS), "max_position_embeddings": 64, "pad_token_id": 0}
PATCHES: dict[str, Any] = {**SIZES, "image_size": 8, "patch_size": 4}
SOUND: dict[str, Any] = {**SIZES, "vocab_size": len(WORDS), "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
                         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
                         "pad_token_id": 0, "classifier_proj_size": 8, "mask_time_prob": 0.0, "layerdrop": 0.0}  # fmt: skip
FILES = tempfile.TemporaryDirectory()  # removed with the process
LABELS = {"id2label": {0: "O", 1: "ANIMAL", 2: "ENTAILMENT"}, "label2id": {"O": 0, "ANIMAL": 1, "ENTAILMENT": 2}}


def tokenizer(**options: Any) -> Any:
    """Return a tokenizer of words that frames texts and pairs as BERT does."""
    parts = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    parts.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    marks = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")}
    return t.PreTrainedTokenizerFast(tokenizer_object=parts, **marks, **{"model_max_length": 64, **options})


def image(number: int = 0, width: int = 12) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (10, width, 3), dtype=np.uint8))


def sound(length: int = 400) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=length).astype(np.float32)


@functools.cache
def video() -> str:
    """Return the path of a film of six pictures."""
    path = f"{FILES.name}/film.mp4"
    with av.open(path, "w") as film:
        stream = film.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for number in range(6):
            film.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((16, 16, 3), number * 30, dtype=np.uint8), format="rgb24")))
        film.mux(stream.encode())
    return path


def images(**options: Any) -> Any:
    return t.ViTImageProcessorPil(**{"size": {"height": 8, "width": 8}, **options})


@dataclass
class Tiny:
    """A model of a task."""

    task: str
    architecture: str
    config: Callable[[], Any]
    layer: str  # a module that runs once
    given: Any  # an input
    parts: dict[str, Callable[[], Any]]  # its preprocessors
    options: dict[str, Any] = field(default_factory=dict)  # of the input
    rows: int = 1  # of the input in one forward pass
    generates: bool = False  # whether the pipeline generates

    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)
        made: torch.nn.Module = getattr(t, self.architecture)(self.config()).eval()
        return made

    def preprocessors(self) -> dict[str, Any]:
        return {name: make() for name, make in self.parts.items()}


_TEXTS: dict[str, Callable[[], Any]] = {"tokenizer": tokenizer}
_IMAGES: dict[str, Callable[[], Any]] = {"image_processor": images}
_SOUNDS: dict[str, Callable[[], Any]] = {"feature_extractor": functools.partial(t.Wav2Vec2FeatureExtractor, return_attention_mask=True)}


def _bert(**options: Any) -> Callable[[], Any]:
    return functools.partial(t.BertConfig, **TEXT, **options)


def _clip() -> Any:
    text = {**TEXT, "eos_token_id": 3, "bos_token_id": 2}
    return t.CLIPConfig(text_config=text, vision_config=PATCHES, projection_dim=8)


def _owl() -> Any:
    text = {**TEXT, "eos_token_id": 3, "bos_token_id": 2, "max_position_embeddings": 16}
    return t.OwlViTConfig(text_config=text, vision_config=PATCHES, projection_dim=16)


def _clap() -> Any:
    audio = {"num_mel_bins": 8, "spec_size": 16, "patch_size": 4, "patch_stride": [4, 4], "patch_embeds_hidden_size": 8, "depths": [1, 1],
             "num_attention_heads": [2, 2], "window_size": 2, "num_hidden_layers": 2, "projection_dim": 8, "hidden_size": 16,
             "enable_fusion": False}  # fmt: skip
    return t.ClapConfig(text_config={**TEXT, "type_vocab_size": 2}, audio_config=audio, projection_dim=8)


def _whisper() -> Any:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
             "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 50,
             "max_target_positions": 32}  # fmt: skip
    ids = {"decoder_start_token_id": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "suppress_tokens": None,
           "begin_suppress_tokens": None}  # fmt: skip
    return t.WhisperConfig(vocab_size=len(WORDS), **sizes, **ids)


def _tapas_tokenizer() -> Any:
    words = Path(FILES.name) / "words.txt"
    words.write_text("\n".join([*WORDS[:5], "[EMPTY]", *WORDS[5:]]))
    return t.TapasTokenizer(str(words), model_max_length=64)


def _mels(**options: Any) -> Any:
    return t.WhisperFeatureExtractor(feature_size=8, chunk_length=1, **options)


def _claps() -> Any:
    sizes = {"max_length_s": 1, "nb_max_samples": 800, "hop_length": 50, "sampling_rate": 800, "fft_window_size": 64}
    return t.ClapFeatureExtractor(feature_size=8, truncation="rand_trunc", padding="repeatpad", frequency_max=400, **sizes)


def _vits() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16, "flow_size": 16, "spectrogram_bins": 9,
             "upsample_initial_channel": 16, "upsample_rates": [2], "upsample_kernel_sizes": [4], "resblock_kernel_sizes": [3],
             "resblock_dilation_sizes": [[1]], "prior_encoder_num_flows": 1, "prior_encoder_num_wavenet_layers": 1,
             "posterior_encoder_num_wavenet_layers": 1, "wavenet_kernel_size": 3, "duration_predictor_filter_channels": 16}  # fmt: skip
    return t.VitsConfig(vocab_size=len(WORDS), **sizes, use_stochastic_duration_prediction=False, noise_scale=0.0)


ZERO_SHOT = {"candidate_labels": ["red", "blue", "fast"]}

BERT_LAYER = "bert.encoder.layer.0.intermediate"
SQUARE = {"height": 8, "width": 8}
_vit = functools.partial(t.ViTConfig, **PATCHES)

TINY = {
    made.task + ("" if made.architecture != "WhisperForConditionalGeneration" else " (seq2seq)"): made
    for made in [
        Tiny("text-classification", "BertForSequenceClassification", _bert(num_labels=3), BERT_LAYER, "the cat sat", _TEXTS),
        Tiny("token-classification", "BertForTokenClassification", _bert(**LABELS), BERT_LAYER, "the cat sat", _TEXTS),
        Tiny("fill-mask", "BertForMaskedLM", _bert(), BERT_LAYER, "the [MASK] sat", _TEXTS),
        Tiny("feature-extraction", "BertModel", _bert(), "encoder.layer.0.intermediate", "the cat sat", _TEXTS),
        Tiny("zero-shot-classification", "BertForSequenceClassification", _bert(**LABELS), BERT_LAYER, "the cat sat",
             _TEXTS, ZERO_SHOT, rows=3),
        Tiny("image-classification", "ViTForImageClassification", _vit, "vit.layers.0", image(), _IMAGES),
        Tiny("image-feature-extraction", "ViTModel", _vit, "layers.0", image(), _IMAGES),
        Tiny("depth-estimation", "DPTForDepthEstimation",
             functools.partial(t.DPTConfig, **{**PATCHES, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3],
                               neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, is_hybrid=False),
             "dpt.encoder.layer.0.layernorm_before", image(), {"image_processor": functools.partial(t.DPTImageProcessorPil, size=SQUARE)}),
        Tiny("image-segmentation", "SegformerForSemanticSegmentation",
             functools.partial(t.SegformerConfig, hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2],
                               decoder_hidden_size=8),
             "segformer.stages.0.blocks.0", image(),
             {"image_processor": functools.partial(t.SegformerImageProcessorPil, size={"height": 32, "width": 32})}),
        Tiny("object-detection", "YolosForObjectDetection",
             functools.partial(t.YolosConfig, **{**SIZES, "image_size": [8, 8], "patch_size": 4}, num_detection_tokens=3),
             "vit.encoder.layer.0.intermediate", image(), {"image_processor": functools.partial(t.YolosImageProcessorPil, size=SQUARE)}),
        Tiny("zero-shot-image-classification", "CLIPModel", _clip, "text_model.encoder.layers.0", image(),
             {"tokenizer": tokenizer, "image_processor": images}, ZERO_SHOT, rows=3),
        Tiny("zero-shot-object-detection", "OwlViTForObjectDetection", _owl, "owlvit.text_model.encoder.layers.0",
             {"image": image(), "candidate_labels": ["red", "blue"]},
             {"tokenizer": tokenizer, "image_processor": functools.partial(t.OwlViTImageProcessorPil, size=SQUARE)}, rows=2),
        Tiny("audio-classification", "Wav2Vec2ForSequenceClassification", functools.partial(t.Wav2Vec2Config, **SOUND, num_labels=3),
             "wav2vec2.encoder.layers.0", sound(), _SOUNDS),
        Tiny("automatic-speech-recognition", "Wav2Vec2ForCTC", functools.partial(t.Wav2Vec2Config, **SOUND),
             "wav2vec2.encoder.layers.0", sound(), {**_SOUNDS, "tokenizer": tokenizer}),
        Tiny("automatic-speech-recognition", "WhisperForConditionalGeneration", _whisper, "model.encoder.layers.0", sound(16000),
             {"feature_extractor": _mels, "tokenizer": tokenizer}, generates=True),
        Tiny("zero-shot-audio-classification", "ClapModel", _clap, "text_model.encoder.layer.0.intermediate", sound(800),
             {"feature_extractor": _claps, "tokenizer": tokenizer}, ZERO_SHOT, rows=3),
        Tiny("text-to-audio", "VitsModel", _vits, "text_encoder.encoder.layers.0", "the cat sat", _TEXTS),
        Tiny("document-question-answering", "LayoutLMForQuestionAnswering", functools.partial(t.LayoutLMConfig, **TEXT),
             "layoutlm.encoder.layer.0.intermediate",
             {"image": None, "question": "the cat ?", "word_boxes": [("a", [0, 0, 9, 9]), ("mat", [10, 0, 19, 9])]}, _TEXTS),
        Tiny("table-question-answering", "TapasForQuestionAnswering",
             functools.partial(t.TapasConfig, **{**TEXT, "vocab_size": len(WORDS) + 1}, type_vocab_sizes=[3, 256, 256, 2, 256, 256, 10],
                               max_num_rows=8, max_num_columns=4),
             "tapas.encoder.layer.0.intermediate",
             {"table": {"this": ["cat", "dog"], "example": ["red", "blue"]}, "query": "the dog ?"}, {"tokenizer": _tapas_tokenizer}),
        Tiny("video-classification", "VideoMAEForVideoClassification",
             functools.partial(t.VideoMAEConfig, **PATCHES, num_frames=2, tubelet_size=2), "videomae.encoder.layer.0.intermediate", video(),
             {"image_processor": functools.partial(t.VideoMAEImageProcessorPil, size={"shortest_edge": 8}, crop_size=SQUARE)}),
        Tiny("text-generation", "GPT2LMHeadModel",
             functools.partial(t.GPT2Config, vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=64,
                               bos_token_id=2, eos_token_id=3),
             "transformer.h.0", "the cat sat", _TEXTS, generates=True),
    ]
}  # fmt: skip
