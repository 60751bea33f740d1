"""Models that read images and text."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase, ProcessorMixin

from .language import LanguageModel


class VisionLanguageModel(LanguageModel):
    """A transformers model of images and text with its processor, whose internals can be read and edited while it runs.

    All inputs of :class:`LanguageModel` work here, too. With images, the prompt is text, a list of texts or a chat, and the images
    are passed as ``images=`` or inside the chat, to ``trace``, ``generate`` and ``tracer.invoke``. ``scan`` supports images if no size
    in the model depends on values, such as those of a grid of patches, or the number of images that are only padding.

    Args:
        model: Name of a repository on the model hub, folder written by ``save_pretrained``, or a model that is loaded already.
        processor: The processor, or the name or folder to load it from. By default that of ``model``. Without a processor, the
            model takes only prepared inputs.
        tokenizer: As for :class:`LanguageModel`; by default the processor's.
        automodel: The class whose ``from_pretrained`` loads the model.
        **options: All other options of :class:`TransformersModel`.

    Example:
        >>> model = VisionLanguageModel("llava-hf/llava-1.5-7b-hf")
        >>> with model.trace("<image> What is this?", images=image):
        ...     patches = model.model.multi_modal_projector.output.save()
        ...     logits = model.lm_head.output[:, -1].save()
    """

    _own_task = "image-text-to-text"

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        processor: ProcessorMixin | str | os.PathLike[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
        *,
        automodel: Any = AutoModelForImageTextToText,
        **options: Any,
    ) -> None:
        super().__init__(model, tokenizer, processor=processor, automodel=automodel, **options)
