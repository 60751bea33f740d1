"""Models of transformers that are no decoders: encoders, encoder-decoders, vision and sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

from .models import GROUPED, SMALL, make
from .specimen import VOCABULARY, Operation, Specimen, masked, translated

IMAGE_TOKEN = VOCABULARY - 1
IMAGE = 16
FRAMES = 16


def images(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make images of one size; patches are embedded with positions of that size."""
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE, generator=generator)}


def sized_images(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make images as large as ``length`` says."""
    return {"pixel_values": torch.randn(batch, 3, 4 * length, 32, generator=generator)}


def pairs(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make texts and as many images."""
    return {**masked(length, batch, generator), **images(length, batch, generator)}


def illustrated(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make texts that begin with the places of an image."""
    text = masked(length + 4, batch, generator)
    text["input_ids"][:, :4] = IMAGE_TOKEN
    return {**text, **images(length, batch, generator)}


def sound(length: int, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Make the features of a sound, and the beginnings of what is said."""
    return {
        "input_features": torch.randn(batch, 8, 2 * FRAMES, generator=generator),
        "decoder_input_ids": torch.randint(3, VOCABULARY - 2, (batch, length), generator=generator),
    }


def _encoder(
    name: str, kind: str, architecture: str, config: Any, layers: str, parts: dict[str, str], **given: Any
) -> Specimen:
    """Describe a model; paths of parts are below its first layer."""
    places = {kind: f"{layers}.0.{path}" for kind, path in parts.items()}
    attention = given.pop("interface", places["attention"])
    operation = given.pop("operation", Operation(attention, "attention_interface_0"))
    inputs = given.pop("inputs", masked)
    return Specimen(
        name, kind, make(architecture, config), inputs, (f"{layers}.0", f"{layers}.1"), places, operation, **given
    )


def _texts() -> list[Specimen]:
    bert = {"norm": "output.LayerNorm", "attention": "attention.self", "mlp": "intermediate", "linear": "output.dense"}
    distil = {"norm": "sa_layer_norm", "attention": "attention", "mlp": "ffn", "linear": "ffn.lin1"}
    modern = {"norm": "mlp_norm", "attention": "attn", "mlp": "mlp", "linear": "mlp.Wi"}
    albert = {"norm": "full_layer_layer_norm", "attention": "attention", "mlp": "ffn", "linear": "ffn_output"}
    roberta = {**SMALL, "max_position_embeddings": 66, "pad_token_id": 1}
    return [
        _encoder("bert", "encoder", "BertForMaskedLM", t.BertConfig(**SMALL), "bert.encoder.layer", bert),
        _encoder("roberta", "encoder, positions from padding", "RobertaForMaskedLM", t.RobertaConfig(**roberta),
                 "roberta.encoder.layer", bert),
        _encoder("electra", "encoder, classifier", "ElectraForSequenceClassification", t.ElectraConfig(**SMALL, embedding_size=16),
                 "electra.encoder.layer", bert),
        _encoder("distilbert", "encoder, small", "DistilBertForMaskedLM",
                 t.DistilBertConfig(vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64),
                 "distilbert.transformer.layer", distil),
        _encoder("modernbert", "encoder, rotary, windows", "ModernBertForMaskedLM",
                 t.ModernBertConfig(**SMALL, local_attention=4, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1,
                                    eos_token_id=2, cls_token_id=1, sep_token_id=2),
                 "model.layers", modern),
        Specimen("albert", "encoder, one layer many times", make("AlbertForMaskedLM", t.AlbertConfig(**SMALL, embedding_size=16)), masked,
                 ("albert.encoder.albert_layer_groups.0.albert_layers.0", "albert.encoder"),
                 {kind: f"albert.encoder.albert_layer_groups.0.albert_layers.0.{path}" for kind, path in albert.items()},
                 Operation("albert.encoder.albert_layer_groups.0.albert_layers.0.attention", "attention_interface_0"), skips=False),
    ]  # fmt: skip


def _two_sided() -> list[Specimen]:
    t5 = t.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
                    pad_token_id=0)  # fmt: skip
    bart = t.BartConfig(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
                        decoder_start_token_id=2, forced_eos_token_id=None)  # fmt: skip
    whisper = t.WhisperConfig(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                              decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
                              max_source_positions=FRAMES, max_target_positions=64, decoder_start_token_id=1,
                              pad_token_id=0, bos_token_id=1, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
    block = {"norm": "layer.0.layer_norm", "attention": "layer.0.SelfAttention", "mlp": "layer.2"}
    block["linear"] = "layer.2.DenseReluDense.wi"
    crossed = {"norm": "self_attn_layer_norm", "attention": "self_attn", "mlp": "fc1", "linear": "fc2"}
    return [
        _encoder("t5", "encoder-decoder, relative positions", "T5ForConditionalGeneration", t5, "decoder.block", block, inputs=translated,
                 operation=Operation("decoder.block.0.layer.2", "self_DenseReluDense_0", "decoder.block.0.layer.2.DenseReluDense"),
                 generates=True, head="lm_head", language=True),
        _encoder("bart", "encoder-decoder", "BartForConditionalGeneration", bart, "model.decoder.layers", crossed, inputs=translated,
                 generates=True, head="lm_head", language=True),
        _encoder("whisper", "sound to text", "WhisperForConditionalGeneration", whisper, "model.decoder.layers", crossed, inputs=sound,
                 generates=True, head="proj_out"),
    ]  # fmt: skip


def _visual() -> list[Specimen]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes: dict[str, Any] = {name: SMALL[name] for name in names}
    patches = {**sizes, "image_size": IMAGE, "patch_size": 8}
    vit = {"norm": "layernorm_before", "attention": "attention", "mlp": "mlp", "linear": "mlp.fc1"}
    clip = {"norm": "layer_norm1", "attention": "self_attn", "mlp": "mlp", "linear": "mlp.fc1"}
    resnet = {
        "norm": "layer.0.normalization",
        "attention": "shortcut",
        "mlp": "layer.0",
        "linear": "layer.1.convolution",
    }
    llama = {"norm": "input_layernorm", "attention": "self_attn", "mlp": "mlp", "linear": "mlp.down_proj"}
    tokens = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    texts: dict[str, Any] = {**sizes, **tokens, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    llava = t.LlavaConfig(
        text_config=t.LlamaConfig(**GROUPED), vision_config=t.CLIPVisionConfig(**patches, projection_dim=32),
        image_token_index=IMAGE_TOKEN, vision_feature_layer=-1, image_seq_length=4,
    )  # fmt: skip
    return [
        _encoder("vit", "images", "ViTForImageClassification", t.ViTConfig(**patches), "vit.layers", vit, inputs=images),
        _encoder("clip", "images and texts", "CLIPModel",
                 t.CLIPConfig(text_config=texts, vision_config=patches, projection_dim=16), "text_model.encoder.layers", clip, inputs=pairs,
                 batches=False),
        _encoder("resnet", "convolutions, batch norm", "ResNetForImageClassification",
                 t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 16], depths=[2, 2], layer_type="basic"),
                 "resnet.encoder.stages.0.layers", resnet, inputs=sized_images,
                 operation=Operation("resnet.encoder.stages.0.layers.0", "self_layer_0", "resnet.encoder.stages.0.layers.0.layer")),
        _encoder("llava", "vision and language", "LlavaForConditionalGeneration", llava, "model.language_model.layers", llama,
                 inputs=illustrated, generates=True, head="lm_head"),
    ]  # fmt: skip


def encoders() -> list[Specimen]:
    """Return all of them."""
    return [*_texts(), *_two_sided(), *_visual()]
