"""Pipelines of `diffusers` that are small enough to run in milliseconds, with seeded weights."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["<|startoftext|>", "<|endoftext|>", "a", "cat", "dog", "on", "the", "mat"]


def tokenizer() -> Any:
    parts = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[1]))
    parts.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts.post_processor = processors.TemplateProcessing(
        single=f"{WORDS[0]} $A {WORDS[1]}", special_tokens=[(WORDS[0], 0), (WORDS[1], 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=parts, pad_token=WORDS[1], eos_token=WORDS[1], bos_token=WORDS[0], model_max_length=8
    )


def clip(kind: Any = transformers.CLIPTextModel) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1, projection_dim=16,
    )
    return kind(config).eval()


def t5() -> Any:
    config = transformers.T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return transformers.T5EncoderModel(config).eval()


def vae(latent_channels: int = 4) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, sample_size=16, latent_channels=latent_channels, shift_factor=0.1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()


def unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **{"cross_attention_dim": 16, **options},
    ).eval()


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stable_diffusion(kind: Any = diffusers.StableDiffusionPipeline, scheduler: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    parts = {"unet": unet(), "vae": vae(), "tokenizer": tokenizer(), "text_encoder": clip()}
    scheduler = scheduler or diffusers.DDIMScheduler(
        num_train_timesteps=100, clip_sample=False, set_alpha_to_one=False, steps_offset=1
    )
    return quiet(
        kind(**parts, scheduler=scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False, **options)
    )


def stable_diffusion_xl() -> Any:
    torch.manual_seed(0)
    denoiser = unet(
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=64, cross_attention_dim=32
    )
    return quiet(
        diffusers.StableDiffusionXLPipeline(
            unet=denoiser, vae=vae(), scheduler=diffusers.EulerDiscreteScheduler(num_train_timesteps=100),
            text_encoder=clip(), text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
            tokenizer=tokenizer(), tokenizer_2=tokenizer(), add_watermarker=False,
        )
    )


def stable_diffusion_3() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, out_channels=4,
    )
    projected = [clip(transformers.CLIPTextModelWithProjection) for _ in range(2)]
    return quiet(
        diffusers.StableDiffusion3Pipeline(
            transformer=transformer.eval(), vae=vae(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            text_encoder=projected[0], text_encoder_2=projected[1], text_encoder_3=t5(),
            tokenizer=tokenizer(), tokenizer_2=tokenizer(), tokenizer_3=tokenizer(),
        )
    )


def flux() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )
    return quiet(
        diffusers.FluxPipeline(
            transformer=transformer.eval(), vae=vae(1), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            text_encoder=clip(), text_encoder_2=t5(), tokenizer=tokenizer(), tokenizer_2=tokenizer(),
        )
    )


#: By name: the function that makes the pipeline, and options of a call.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sd": (stable_diffusion, {}),
    "sdxl": (stable_diffusion_xl, {}),
    "sd3": (stable_diffusion_3, {"height": 16, "width": 16, "max_sequence_length": 8}),
    "flux": (flux, {"height": 8, "width": 8, "max_sequence_length": 8}),
}
