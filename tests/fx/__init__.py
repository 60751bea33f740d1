"""Tests of the compiler."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from nnsight import LanguageModel, demo


def small_gpt2() -> LanguageModel:
    """Return a stock model with its defaults, two layers, and the tokenizer of the demo."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=1024, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    return LanguageModel(GPT2LMHeadModel(config).eval(), tokenizer, compile={"backend": "eager"})
