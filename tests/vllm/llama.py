"""A small Llama with random weights and a tokenizer of its own, as a folder that vLLM and transformers load; and what its tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .. import ROOT
from ..conftest import Hooks

if TYPE_CHECKING:
    from nnsight import LanguageModel
    from nnsight.vllm import VLLM
    from nnsight.vllm.steering.graph_parts import GraphPart

HIDDEN, LAYERS = 128, 4

PROMPTS = ["The Eiffel Tower is in the city of", "A block", "def trace(self, prompt, temperature=0.0):"]
#: Of the engine, and of a request.
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality to a relative 1e-5 of the largest value."""
    assert found.shape == expected.shape
    assert expected.numel()
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-5


def tokens(result: Any) -> list[int]:
    """Return the ids that vLLM generated for a request."""
    return list(result.outputs[0].token_ids)


def plain(model: VLLM, prompts: list[Any], **sampling: Any) -> list[list[int]]:
    """Return the ids that the engine generates by itself."""
    from vllm import SamplingParams

    outputs = model.engine.generate(prompts, SamplingParams(**{**GREEDY, **sampling}), use_tqdm=False)
    return [tokens(output) for output in outputs]


def computed(part: GraphPart, hidden: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what a part of a graph makes of hidden states that all belong to one request with these parameters."""
    [new] = part(hidden, *(parameters[name].expand(len(hidden), *parameters[name].shape) for name in part.parameters))
    return new


# -- the same by plain hooks on the transformers model ------------------------------------------------------------------

#: Functions of hidden states by the number of a layer, or by the path of a module; with ``.input`` behind it, of its input.
Edits = Mapping[Any, Callable[[torch.Tensor], Any]]


def adding(vector: torch.Tensor, start: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that adds ``vector`` to hidden states from a position on."""

    def added(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[:, start:] += vector
        return hidden

    return added


def hooks(reference: LanguageModel, edits: Edits) -> AbstractContextManager[None]:
    """Return a context in which hooks edit outputs and inputs."""
    made = Hooks(reference._module)
    for place, edit in edits.items():
        path = f"model.layers.{place}" if isinstance(place, int) else place
        if path.endswith(".input"):
            made.input(path.removesuffix(".input"), lambda args, kwargs, edit=edit: ((edit(args[0]), *args[1:]), kwargs))
        else:
            made.output(path, edit)
    return made.installed()


def generated(reference: LanguageModel, ids: list[int], edits: Edits | None = None, count: int = 6) -> list[int]:
    """Return the likeliest tokens that follow ``ids``."""
    ids = list(ids)
    with torch.no_grad(), hooks(reference, edits or {}):
        for _ in range(count):
            ids.append(int(reference._module(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


def states(reference: LanguageModel, ids: list[int], edits: Edits | None = None) -> list[torch.Tensor]:
    """Return the hidden state after each layer, and the logits."""
    found: list[torch.Tensor] = []
    keep = dict.fromkeys(range(LAYERS), lambda hidden: found.append(hidden[0]))
    with torch.no_grad(), hooks(reference, edits or {}), hooks(reference, keep):
        logits = reference._module(torch.tensor([ids]), use_cache=False).logits[0]
    return [*found, logits]


def save_tiny_llama(folder: Path) -> Path:
    """Write model and tokenizer to ``folder`` and return it. Heads have 32 channels, which vLLM's attention on CPUs wants."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(ROOT / "LICENSE")], trainer)  # of whose words no test depends on an edit
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder
