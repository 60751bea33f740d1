"""Stock modules of torch and transformers: parts like those of :mod:`~tests.fuzz.nets`, and whole decoders.

A *part* maps ``[batch, length, WIDTH]`` to the same shape, so it nests with all other parts. A *decoder* is a causal language model
with its key-value cache on, so keys and values are results of its graph. Both are as small as their code allows, and are not changed
otherwise: what is particular about them (statistics in buffers, caches that are filled in place, experts chosen by values, results in
objects) is why they are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from nnsight.fx.capturing.taps import Opaque

from .sizes import VOCABULARY, WIDTH

#: What most configurations call the sizes.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "initializer_range": 0.5,
}
#: A compiled Mamba scans in another order, also in plain torch; the part does not.
MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "state_size": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.5,
}


class BatchNorm(torch.nn.Module):
    """Normalises features over the batch and the positions.

    Args:
        trains: Whether it stays in train mode: it uses the statistics of the batch, and updates its buffers.
    """

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.trains = trains
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def train(self, mode: bool = True) -> BatchNorm:
        super().train(mode)
        self.norm.train(self.trains)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Of an input that is not contiguous the kernel has other strides than its fake, so a backend may fail.
        return self.norm(x.transpose(1, 2).contiguous()).transpose(1, 2)


class Recurrent(torch.nn.Module):
    """A recurrent cell of torch, which returns its last state beside the sequence."""

    def __init__(self, cell: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence, _ = self.cell(x)
        return sequence


class SelfAttention(torch.nn.Module):
    """``nn.MultiheadAttention``, which returns a tuple; the tuple has weights in it, or ``None``."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=self.weights)
        return mixed


class CachedLayer(torch.nn.Module):
    """Attention that appends its keys and values to a cache, and returns the cache, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.project = torch.nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, past: t.DynamicCache) -> tuple[torch.Tensor, t.DynamicCache]:
        keys, values = self.project(x)[:, None].chunk(2, dim=-1)
        keys, values = past.update(keys, values, self.number)
        return torch.nn.functional.scaled_dot_product_attention(x[:, None], keys, values)[:, 0], past


class Cached(torch.nn.Module):
    """Two layers that share a cache made in the same forward. Each concatenates its keys with an empty tensor first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CachedLayer(0), CachedLayer(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = t.DynamicCache()
        y, past = self.first(x, past=past)
        z, past = self.second(y, past=past)
        return y + z


class CausalConv(torch.nn.Module):
    """A convolution over positions that sees no later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class GatedRecurrence(torch.nn.Module):
    """``h[t] = a[t] h[t - 1] + x[t]`` with a decay that depends on the input, without a loop: cumulative sums of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.nn.functional.logsigmoid(self.gate(x).clamp(-2.0, 2.0)).cumsum(1)
        return torch.exp(decay) * (x * torch.exp(-decay)).cumsum(1)


def _drawn(module: torch.nn.Module) -> torch.nn.Module:
    """Give all parameters values: modules of transformers that stand alone leave some of them as their memory was."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def _experts() -> torch.nn.Module:
    config = t.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"  # what a whole model chooses; the loop over experts branches on values
    return _drawn(MixtralSparseMoeBlock(config))


def _encoder() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)


#: Parts, by name.
STOCK: dict[str, Callable[[], torch.nn.Module]] = {
    "rms": lambda: LlamaRMSNorm(WIDTH),
    "batchnorm": lambda: BatchNorm(trains=False),
    "batchnorm-train": lambda: BatchNorm(trains=True),
    "conv": CausalConv,
    "recurrence": GatedRecurrence,
    "lstm": lambda: Recurrent(torch.nn.LSTM),
    "gru": lambda: Recurrent(torch.nn.GRU),
    "attention-torch": lambda: SelfAttention(weights=False),
    "attention-weights": lambda: SelfAttention(weights=True),
    "cached": Cached,
    "encoder": _encoder,
    "experts": _experts,
    "mamba": lambda: _drawn(MambaMixer(t.MambaConfig(**MAMBA, use_associative_scan=False), layer_idx=0)),
}

#: Parts that dynamo does not trace: it breaks the graph at recurrent cells of torch.
BREAKING_STOCK = ("lstm", "gru")


def _gpt2() -> torch.nn.Module:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, **none, initializer_range=0.5))


def _deepseek() -> torch.nn.Module:
    attention = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2}
    experts = {"moe_intermediate_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {**SMALL, "num_key_value_heads": 2}
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**sizes, **attention, **experts, **groups))


#: Decoders of which plain torch compiles another algorithm than it runs: they agree closely, whatever lowers them.
INEXACT = ("mamba-lm",)

#: Whole language models, by name.
DECODERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt2": _gpt2,
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL)),
    "mixtral": lambda: t.MixtralForCausalLM(
        t.MixtralConfig(**{**SMALL, "num_hidden_layers": 1}, num_local_experts=3, num_experts_per_tok=2)
    ),
    "mamba-lm": lambda: t.MambaForCausalLM(t.MambaConfig(**MAMBA)),
    "deepseek": _deepseek,
}


class Language(torch.nn.Module):
    """Calls a decoder, and returns its logits, a tuple of logits and cache, or the object that has both."""

    def __init__(self, body: torch.nn.Module, returns: str) -> None:
        super().__init__()
        self.body = body
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        if self.returns == "tuple":
            return self.body(x, return_dict=False)
        found = self.body(x)
        return found if self.returns == "dict" else found.logits


def opened(value: Any) -> Any:
    """Return ``value`` with caches as lists: what their layers hold (keys and values, or states), each in a dict."""

    def layers(leaf: Any) -> Any:
        if not isinstance(leaf, t.Cache):
            return leaf
        return [opened(held(layer)) for layer in leaf.layers]

    return torch.utils._pytree.tree_map(layers, value)


def closed(value: Any) -> Any:
    """Return ``value`` with a word for each cache, and for what stands for one in a compiled trace."""

    def word(leaf: Any) -> Any:
        return "cache" if isinstance(leaf, (t.Cache, Opaque)) else leaf

    return torch.utils._pytree.tree_map(word, value)


def held(layer: Any) -> dict[str, Any]:
    """Return tensors of a cache layer by name, but for empty ones: a compiled trace leaves those where it skips what fills them."""
    found = {name: value for name, value in sorted(vars(layer).items()) if isinstance(value, (torch.Tensor, list, dict))}
    return {name: value for name, value in found.items() if not isinstance(value, torch.Tensor) or value.numel()}
