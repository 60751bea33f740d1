"""Language models: transformers models that read and write text."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ..demo import NAME as DEMO_NAME
from .transformers.model import TransformersModel


class LanguageModel(TransformersModel):
    """A transformers model with its tokenizer: a :class:`TransformersModel` of the task "text-generation", whatever its class is.

    Args:
        model: Name of a repository on the model hub, folder written by ``save_pretrained``, or a model that
            is loaded already. ``"nnsight/demo"`` is the small model that comes with this package.
        tokenizer: The tokenizer, or the name or folder to load it from. By default that of ``model``.
        automodel: The class whose ``from_pretrained`` loads the model, or its name in transformers: ``AutoModelForSeq2SeqLM``
            for T5, ``AutoModelForMaskedLM`` for BERT. With a class that lacks ``from_config``, the weights load at once.
        **options: All other options of :class:`TransformersModel`.

    Example:
        >>> model = LanguageModel("nnsight/demo")
        >>> with model.trace("The Eiffel Tower is in the city of"):
        ...     logits = model.lm_head.output[:, -1].save()
        >>> model.tokenizer.decode(logits.argmax(dim=-1))
        ' Paris'
    """

    _own_task = "text-generation"

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
        *,
        automodel: Any = AutoModelForCausalLM,
        **options: Any,
    ) -> None:
        super().__init__(model, tokenizer=tokenizer, automodel=automodel, **options)


def demo_model(**kwargs: Any) -> LanguageModel:
    """Return the small language model that comes with this package, with its weights; ``kwargs`` are those of :class:`LanguageModel`."""
    return LanguageModel(DEMO_NAME, **{"dispatch": True, **kwargs})
