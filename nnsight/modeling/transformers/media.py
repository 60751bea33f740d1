"""Inputs of transformers models that read images and text.

A prompt has an image token for each image. The model's processor repeats this token for each vector of the image, and converts the pixels
to tensors. So text and images go to the processor together; the resulting ids are then handled as in :mod:`.inputs`.

The tensors of images have no fixed shape. Most families list all images of a batch, or all their patches, in the first dimension, so
the tensors of several invokes are concatenated. Other families have a row for each prompt, and pad the number of images. Images of
different sizes are padded with zeros, as processors do.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...runtime.tracer import Arguments
from ..forms import all_are
from .fields import stack
from .inputs import _CHAT_OPTIONS, TextInput, ending, refuse_options

#: Inputs of the processor other than text.
_MEDIA = ("images", "videos", "audio")

#: Arguments with an entry for each token that only these models have. They are padded with zeros.
_TOKEN_ROWS = {"mm_token_type_ids", "token_type_ids", "image_attention_mask", "cross_attention_mask"}

#: Number of dimensions of pixels with one row for each prompt, or more: prompt, image, channel, height, width.
_ROW_OF_IMAGES = 5


class MediaInput(TextInput):
    """Converts prompts, with or without images, to the arguments of a model; a base class of root envoys with a processor, or None."""

    processor: Any
    #: Whether the processor prepares prompts with images.
    _reads_media: bool

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Convert prompts, with or without images, to the arguments of the model, as :class:`TextInput` does.

        Args:
            *inputs: With images, a text, a list of texts, a chat or a list of chats; or a dict with ``text`` and ``images``.
            **kwargs: ``text`` in place of the input; ``images`` or ``image`` (and ``videos``, ``audio``), in any form that the processor
                takes, including a single image; options of processor and chat template. All others are arguments of the model.
        """
        if not self._reads_media:
            return super()._prepare_input(*inputs, **kwargs)
        if inputs and isinstance(inputs[0], Mapping) and "text" in inputs[0]:
            inputs, kwargs = inputs[1:], {**inputs[0], **kwargs}
        if kwargs.get("image") is not None:
            kwargs.setdefault("images", kwargs.pop("image"))
        if kwargs.get("text") is not None:
            if inputs:
                raise ValueError("There are two prompts, a positional one and `text=`: pass one of them.")
            inputs = (kwargs.pop("text"),)
        media = {name: kwargs.pop(name) for name in _MEDIA if kwargs.get(name) is not None}
        for name in _MEDIA:
            kwargs.pop(name, None)
        if media or (len(inputs) == 1 and (_has_media(inputs[0]) or self._renders(inputs[0]))):
            if len(inputs) != 1 or _without_text(inputs[0]):
                raise ValueError(
                    f"There are {', '.join(media) or 'images'} and no text. Pass the prompt as text or as a chat, with the image "
                    "token at the place of each image. Pass tensors that the processor has made without `images=`."
                )
            options = {name: kwargs.pop(name) for name in self._options_of_invokes & kwargs.keys()}
            inputs = (self._process(inputs[0], media, options),)
        given = {**(inputs[0] if inputs and isinstance(inputs[0], Mapping) else {}), **kwargs}
        args, prepared = super()._prepare_input(*inputs, **kwargs)
        if "position_ids" not in given and self._counts_positions:
            prepared.pop("position_ids", None)
        dtype = getattr(self._module, "dtype", None)
        for name, value in prepared.items():
            if name.startswith("pixel_values") and isinstance(value, torch.Tensor) and dtype is not None:
                prepared[name] = value.to(dtype)
        return args, prepared

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the prompts of one more invoke, and their images, to those before it."""
        if not self._reads_media:
            return super()._batch(batched, *args, **kwargs)
        before = {} if batched is None else batched[1]
        extra = sorted(name for name in {**before, **kwargs} if name in _TOKEN_ROWS or _is_of_media(name))
        parts = [{name: value for name, value in part.items() if name not in extra} for part in (before, kwargs)]
        joined, rows = super()._batch(None if batched is None else ((), parts[0]), **parts[1])
        if batched is None:
            return ((), kwargs), rows
        for name in extra:
            above, below = before.get(name), kwargs.get(name)
            if name in _TOKEN_ROWS:
                joined[1][name] = self._stack_tokens(_or_blank(above, below, parts[0]), _or_blank(below, above, parts[1]))
            else:
                by_prompt = _has_row_for_each_prompt({**before, **kwargs})
                rows_each = [_size(part)[0] if by_prompt else 0 for part in parts]
                joined[1][name] = _concatenated(above, below, *rows_each)
        return joined, rows

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``module``, a fake copy of the model, for the probe."""
        return module(*args, **self._probed(module, kwargs))

    def _probed(self, module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a probe without images, after a run of the image encoder alone. To join both needs real values."""
        if not self._reads_media:
            return kwargs
        _read_images(module, kwargs)
        return _without_images(kwargs)

    def _stack_tokens(self, above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        """Join two tensors ``[batch, sequence, ...]``: the sequence is padded on the padding side, other dimensions on the right."""
        width, padded = max(above.shape[1], below.shape[1]), []
        for part in (above, below):
            filling = part.new_zeros(part.shape[0], width - part.shape[1], *part.shape[2:])
            padded.append(torch.cat([filling, part] if self._padding_side == "left" else [part, filling], dim=1))
        return stack(padded[0], padded[1])

    def _process(self, prompt: Any, media: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return the processor's tensors for text or chats, and ``media``; ``given`` are its options and those of chat templates."""
        if self.processor is None:
            raise AttributeError(
                "Processor not found: the input has images, and this model was wrapped without a processor. Pass a processor, as in "
                "`VisionLanguageModel(module, processor=AutoProcessor.from_pretrained(...))`, or trace with prepared inputs."
            )
        options: dict[str, Any] = {"padding": True, **(given.pop("tokenizer_kwargs", None) or {}), "return_tensors": "pt"}
        of_chat = {name: given.pop(name) for name in _CHAT_OPTIONS & given.keys()}
        of_chat |= of_chat.pop("chat_template_kwargs", None) or {}
        options |= given
        if not _is_text(prompt):
            chats = [list(chat) for chat in (prompt if isinstance(prompt[0], (list, tuple)) else [prompt])]
            if not media:
                return self._process_chats(chats, options, of_chat)
            prompt = [self.processor.apply_chat_template(chat, tokenize=False, **{**ending(chat), **of_chat}) for chat in chats]
            start = getattr(self.tokenizer, "bos_token", None)
            if start is not None and prompt[0].startswith(start):  # the template has written what the tokenizer would add
                options.setdefault("add_special_tokens", False)
        else:
            refuse_options(of_chat, "text and no chat")
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        token = getattr(self.processor, "image_token", None)
        if "images" in media and isinstance(token, str) and not any(token in text for text in texts):
            raise ValueError(
                f"There are images, and no image tokens in the prompt: put {token!r} at the place of each image, or pass a chat."
            )
        if "images" in media and not isinstance(media["images"], (list, tuple)):
            media = {**media, "images": [media["images"]]}
        return dict(self.processor(text=texts, **media, **options))

    def _renders(self, prompt: Any) -> bool:
        """Whether a prompt is a chat for which the processor has a template. Its template applies to all chats, also to those of text."""
        return getattr(self.processor, "chat_template", None) is not None and bool(_messages(prompt)) and "role" in _messages(prompt)[0]

    def _process_chats(self, chats: list[Any], options: dict[str, Any], of_chat: dict[str, Any]) -> dict[str, Any]:
        """Return the processor's tensors for chats that contain their images. Chats with different ends are processed one by one."""
        groups = [chats] if all(ending(chat) == ending(chats[0]) for chat in chats) else [[chat] for chat in chats]
        joined: Arguments | None = None
        for group in groups:
            rendering = {"tokenize": True, "return_dict": True, "processor_kwargs": dict(options)} | ending(group[0]) | of_chat
            joined, _ = self._batch(joined, **self.processor.apply_chat_template(group, **rendering))
        assert joined is not None
        return dict(joined[1])

    @property
    def _counts_positions(self) -> bool:
        """Whether the model computes positions itself, from the place of tokens in an image, so that a mask does not determine them."""
        return any(hasattr(module, "get_rope_index") for module in self._module.modules())


def _without_images(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in _TOKEN_ROWS and not _is_of_media(name)}


def _read_images(module: Any, arguments: Mapping[str, Any]) -> None:
    """Run the image encoder of ``module``. Errors are ignored: they only leave some batch axes unknown."""
    read, pixels = getattr(module, "get_image_features", None), arguments.get("pixel_values")
    if read is not None and pixels is not None and pixels.ndim == 4:  # other forms count images, which takes values
        known = inspect.signature(read).parameters
        with contextlib.suppress(Exception):
            read(**{name: value for name, value in arguments.items() if name in known and _is_of_media(name)})


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, (list, tuple)) and all_are(prompt, str))


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    """Return the messages of a chat or of a list of chats; an empty list if the prompt has another form."""
    chats = prompt if isinstance(prompt, (list, tuple)) else []
    messages = [message for item in chats for message in (item if isinstance(item, (list, tuple)) else [item])]
    return messages if messages and all(isinstance(message, Mapping) for message in messages) else []


def _has_media(prompt: Any) -> bool:
    """Whether a prompt is a chat with images, or other content than text."""
    contents = [message.get("content") for message in _messages(prompt)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def _without_text(prompt: Any) -> bool:
    """Whether a prompt is neither text nor a chat."""
    return not (_messages(prompt) or (_is_text(prompt) and len(prompt) > 0))


def _is_of_media(name: str) -> bool:
    """Whether an argument is a processor's result for images, videos or sound."""
    return name.startswith(("pixel_", "image_", "video_", "input_features", "audio_", "feature_", "aspect_ratio_", "num_"))


def _has_row_for_each_prompt(arguments: Mapping[str, Any]) -> bool:
    """Whether pixels have a row for each prompt, not for each image or patch."""
    pixels = arguments.get("pixel_values")
    return isinstance(pixels, torch.Tensor) and pixels.ndim >= _ROW_OF_IMAGES and "image_sizes" not in arguments


def _size(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of prompts and their length in tokens."""
    tokens = next(text[name] for name in ("input_ids", "inputs_embeds") if text.get(name) is not None)
    return tokens.shape[0], tokens.shape[1]


def _or_blank(rows: torch.Tensor | None, like: torch.Tensor | None, text: Mapping[str, Any]) -> torch.Tensor:
    """Return ``rows``; if they are None, zeros ``[batch, sequence, ...]`` for the prompts of ``text``."""
    if rows is not None:
        return rows
    assert like is not None
    return like.new_zeros(*_size(text), *like.shape[2:])


def _concatenated(above: Any, below: Any, rows_above: int = 0, rows_below: int = 0) -> Any:
    """Concatenate two tensors or lists; other dimensions are padded with zeros. None stands for the given number of rows of zeros."""
    if not isinstance(above, torch.Tensor) and not isinstance(below, torch.Tensor):
        return [*(above or []), *(below or [])] if isinstance(above or below, Sequence) else (above or below)
    like = below if above is None else above
    above = like.new_zeros(rows_above, *like.shape[1:]) if above is None else above
    below = like.new_zeros(rows_below, *like.shape[1:]) if below is None else below
    return stack(above, below)
