"""Models of transformers: one for each family whose code differs, with random weights.

Sizes are the smallest that keep what is particular about a family: fewer key heads than query heads, windows shorter than the
prompts, experts that are not all chosen, layers of different kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

from .specimen import VOCABULARY, Operation, Specimen, ids, masked

#: What most configurations call the sizes.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
#: Parts of a layer, as most decoders call them.
PARTS = {"norm": "input_layernorm", "attention": "self_attn", "mlp": "mlp", "linear": "mlp.down_proj"}


def make(architecture: str, config: Any) -> Callable[[], torch.nn.Module]:
    """Return what makes a model of ``config``, without dropout, which never ends a text."""

    def build() -> torch.nn.Module:
        for part in [config, *(value for value in vars(config).values() if isinstance(value, t.PreTrainedConfig))]:
            for name, value in vars(part).items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
            if hasattr(part, "initializer_range"):
                part.initializer_range = 0.2
        module = getattr(t, architecture)(config)
        if module.can_generate():
            module.generation_config.eos_token_id = None
            module.generation_config.pad_token_id = 0
        return module

    return build


def decoder(
    name: str,
    kind: str,
    architecture: str,
    config: Any,
    *,
    layers: str = "model.layers",
    parts: dict[str, str] = PARTS,
    operation: tuple[str, str] | None = None,
    head: str = "lm_head",
    inputs: Any = masked,
    **flags: Any,
) -> Specimen:
    """Describe a model that generates text; paths of parts are below its first layer.

    Args:
        operation: Path of a module below the layer, and the name of a submodule that it calls. By default the attention
            function of transformers.
    """
    first = f"{layers}.0"
    places = {kind: f"{first}.{path}" for kind, path in parts.items()}
    if operation is None:
        inside = Operation(places["attention"], "attention_interface_0")
    else:
        module = f"{first}.{operation[0]}".rstrip(".")
        inside = Operation(module, f"self_{operation[1]}_0", f"{module}.{operation[1]}")
    return Specimen(
        name, kind, make(architecture, config), inputs, (first, f"{layers}.1"), places, inside, head,
        **{"generates": True, "language": True, **flags},
    )  # fmt: skip


def _decoders() -> list[Specimen]:
    conv = {"norm": "ln_1", "attention": "attn", "mlp": "mlp", "linear": "mlp.c_proj"}
    neox = {"norm": "input_layernorm", "attention": "attention", "mlp": "mlp", "linear": "mlp.dense_h_to_4h"}
    bloom = {"norm": "input_layernorm", "attention": "self_attention", "mlp": "mlp", "linear": "mlp.dense_h_to_4h"}
    fused = {**PARTS, "linear": "mlp.gate_up_proj"}
    phi = {**PARTS, "linear": "mlp.fc1"}
    biasless = {**PARTS, "norm": "post_attention_layernorm"}
    windowed = {**GROUPED, "head_dim": 8, "sliding_window": 4}
    old = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    experts = {**PARTS, "linear": "self_attn.o_proj"}
    gpt_neo = {"norm": "ln_1", "attention": "attn", "mlp": "mlp", "linear": "mlp.c_fc"}
    return [
        decoder("gpt2", "fused projections", "GPT2LMHeadModel", t.GPT2Config(**old), layers="transformer.h", parts=conv),
        decoder("gptj", "parallel attention, rotary", "GPTJForCausalLM", t.GPTJConfig(**old, rotary_dim=4), layers="transformer.h",
                parts={**conv, "linear": "mlp.fc_in"}, operation=("mlp", "act")),
        decoder("gpt-neo", "local attention", "GPTNeoForCausalLM",
                t.GPTNeoConfig(vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, window_size=4,
                               attention_types=[[["global", "local"], 1]], max_position_embeddings=64),
                layers="transformer.h", parts=gpt_neo, operation=("mlp", "act")),
        decoder("gpt-bigcode", "multi-query", "GPTBigCodeForCausalLM", t.GPTBigCodeConfig(**old), layers="transformer.h",
                parts={**conv, "linear": "mlp.c_fc"}),
        decoder("codegen", "parallel attention, fused", "CodeGenForCausalLM", t.CodeGenConfig(**old, rotary_dim=4),
                layers="transformer.h", parts={**conv, "linear": "mlp.fc_in"}, operation=("mlp", "act")),
        decoder("gpt-neox", "parallel residual", "GPTNeoXForCausalLM", t.GPTNeoXConfig(**SMALL), layers="gpt_neox.layers",
                parts=neox),
        decoder("bloom", "ALiBi", "BloomForCausalLM", t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
                layers="transformer.h", parts=bloom, operation=("mlp", "dense_h_to_4h")),
        decoder("mpt", "ALiBi, no biases", "MptForCausalLM", t.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4),
                layers="transformer.blocks", parts={"norm": "norm_1", "attention": "attn", "mlp": "ffn", "linear": "ffn.up_proj"},
                operation=("ffn", "up_proj")),
        decoder("falcon", "multi-query, parallel", "FalconForCausalLM",
                t.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
                layers="transformer.h", parts=bloom, operation=("mlp", "dense_h_to_4h")),
        decoder("opt", "learned positions", "OPTForCausalLM",
                t.OPTConfig(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                            max_position_embeddings=64, word_embed_proj_dim=32),
                layers="model.decoder.layers",
                parts={"norm": "self_attn_layer_norm", "attention": "self_attn", "mlp": "fc1", "linear": "fc2"}),
        decoder("llama", "grouped-query, rotary", "LlamaForCausalLM", t.LlamaConfig(**GROUPED)),
        decoder("mistral", "sliding window", "MistralForCausalLM", t.MistralConfig(**windowed)),
        decoder("qwen2", "biased projections", "Qwen2ForCausalLM", t.Qwen2Config(**GROUPED)),
        decoder("qwen3", "norms of queries and keys", "Qwen3ForCausalLM", t.Qwen3Config(**GROUPED, head_dim=8)),
        decoder("gemma2", "alternating windows, soft caps", "Gemma2ForCausalLM", t.Gemma2Config(**windowed)),
        decoder("gemma3", "alternating windows", "Gemma3ForCausalLM",
                t.Gemma3TextConfig(**windowed, layer_types=["sliding_attention", "full_attention"])),
        decoder("phi", "partial rotary", "PhiForCausalLM", t.PhiConfig(**SMALL), parts=phi),
        decoder("phi3", "fused projections, rotary", "Phi3ForCausalLM", t.Phi3Config(**GROUPED, pad_token_id=0), parts=fused),
        decoder("olmo2", "norms after the sublayers", "Olmo2ForCausalLM", t.Olmo2Config(**GROUPED), parts=biasless),
        decoder("stablelm", "layer norms", "StableLmForCausalLM", t.StableLmConfig(**GROUPED)),
        decoder("cohere", "parallel, scaled logits", "CohereForCausalLM", t.CohereConfig(**GROUPED)),
        decoder("starcoder2", "biased, windowed", "Starcoder2ForCausalLM", t.Starcoder2Config(**GROUPED),
                parts={**PARTS, "linear": "mlp.c_fc"}),
        decoder("glm", "fused, partial rotary", "GlmForCausalLM", t.GlmConfig(**GROUPED, head_dim=8, pad_token_id=0), parts=fused),
        decoder("mixtral", "mixture of experts", "MixtralForCausalLM",
                t.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2), parts=experts),
        decoder("qwen3-moe", "mixture of experts, normed", "Qwen3MoeForCausalLM",
                t.Qwen3MoeConfig(**GROUPED, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2), parts=experts),
        decoder("gpt-oss", "experts, attention sinks", "GptOssForCausalLM",
                t.GptOssConfig(**windowed, num_local_experts=4, num_experts_per_tok=2), parts=experts),
        decoder("deepseek-v3", "latent attention, experts", "DeepseekV3ForCausalLM",
                t.DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4,
                                   num_experts_per_tok=2, n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=8,
                                   qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1, n_shared_experts=1)),
        decoder("lfm2", "convolutions and attention", "Lfm2ForCausalLM",
                t.Lfm2Config(**GROUPED, layer_types=["full_attention", "conv"], block_auto_adjust_ff_dim=False),
                parts={"norm": "operator_norm", "attention": "self_attn", "mlp": "feed_forward", "linear": "feed_forward.w1"}),
    ]  # fmt: skip


def _recurrent() -> list[Specimen]:
    mamba = {"norm": "norm", "attention": "mixer", "mlp": "mixer.in_proj", "linear": "mixer.out_proj"}
    state = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    hybrid = {"norm": "input_layernorm", "attention": "mamba", "mlp": "feed_forward", "linear": "mamba.out_proj"}
    gated = {
        "norm": "temporal_pre_norm",
        "attention": "temporal_block",
        "mlp": "mlp_block",
        "linear": "mlp_block.down_proj",
    }
    rwkv = {"norm": "ln1", "attention": "attention", "mlp": "feed_forward", "linear": "attention.output"}
    return [
        decoder("mamba", "state space", "MambaForCausalLM", t.MambaConfig(**state, state_size=4), layers="backbone.layers", parts=mamba,
                operation=("mixer", "out_proj"), inputs=ids),
        decoder("mamba2", "state space, heads", "Mamba2ForCausalLM",
                t.Mamba2Config(**state, state_size=8, head_dim=16, num_heads=4, n_groups=1, chunk_size=4),
                layers="backbone.layers", parts=mamba, operation=("", "norm"), inputs=ids),
        decoder("jamba", "state space, attention, experts", "JambaForCausalLM",
                t.JambaConfig(**GROUPED, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                              num_experts=4, num_experts_per_tok=2, mamba_d_state=4, use_mamba_kernels=False, pad_token_id=0),
                parts=hybrid, operation=("mamba", "out_proj")),
        decoder("recurrent-gemma", "gated recurrence", "RecurrentGemmaForCausalLM",
                t.RecurrentGemmaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=96, num_hidden_layers=3,
                                       num_attention_heads=4, lru_width=32, attention_window_size=16),
                parts=gated, operation=("mlp_block", "down_proj"), inputs=ids),
        decoder("rwkv", "recurrence", "RwkvForCausalLM",
                t.RwkvConfig(**{**state, "attention_hidden_size": 32, "intermediate_size": 48, "context_length": 64}),
                layers="rwkv.blocks", parts=rwkv, head="head", operation=("attention", "output"), inputs=ids, differentiates=False),
    ]  # fmt: skip


def specimens() -> dict[str, Specimen]:
    """Return all models by name: those of transformers, then plain nets."""
    from .encoders import encoders
    from .plain import plain_nets

    return {one.name: one for one in (*_decoders(), *_recurrent(), *encoders(), *plain_nets())}
