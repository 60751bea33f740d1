"""Language models from transformers, traced with text, token ids or chats as input.

A transformers model wants ``input_ids`` and ``attention_mask``, both ``[batch, sequence]``; people have prompts. A
:class:`LanguageModel` keeps the tokenizer next to the model and turns whatever it is given into those tensors:

- Prompts of different lengths are padded to one rectangle, and the mask says which places are real. Decoders are
  padded on the left, so that ``logits[:, -1]`` is the prediction after every prompt; encoders and encoder-decoder
  models are padded on the right, as they were trained.
- A decoder numbers the places of a row from its start, where a left-padded prompt does not begin. It is therefore
  given ``position_ids`` counted from the mask, as ``generate`` of transformers does: every row is then what it would
  be alone.
- Which arguments there are never depends on the prompts, only their sizes do. So a compiled model is captured
  again when dynamo first sees a size vary, and from then on serves prompts of any number and length.

Attributes of the transformers model, such as ``model.config`` and ``model.device``, are found on the wrapper.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..demo import NAME as DEMO_NAME
from ..demo import path as demo_path
from .base import NNsight

logger = logging.getLogger("nnsight.modeling")

#: Options of ``from_pretrained`` that say how to get files, and so hold for the tokenizer too.
_REPOSITORY_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token", "trust_remote_code")

#: What tokenizers return beside ids and mask; models take some of them or none.
_TOKENIZER_EXTRAS = {
    "length",
    "num_truncated_tokens",
    "offset_mapping",
    "overflow_to_sample_mapping",
    "overflowing_tokens",
    "special_tokens_mask",
    "token_type_ids",
}

#: Arguments with one row per prompt, which may be given as lists.
_ROWS = ("attention_mask", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask", "labels")

#: Arguments that can stand in for ``input_ids``.
_INSTEAD_OF_IDS = ("inputs_embeds", "encoder_outputs", "decoder_input_ids", "decoder_inputs_embeds")

#: Target that the losses of PyTorch skip.
_IGNORED_LABEL = -100

_FORMS = (
    "a string, a list of strings, token ids (a list, a list of lists, or an integer tensor or array with one or two "
    "dimensions), a dict or BatchEncoding with `input_ids`, a chat (a list of {'role': ..., 'content': ...}) or a "
    "list of chats"
)


class LanguageModel(NNsight):
    """A transformers model with its tokenizer, whose internals can be read and edited while it runs.

    Args:
        model: Name of a repository on the model hub, folder written by ``save_pretrained``, or a model that is
            loaded already. ``"nnsight/demo"`` is the small model that comes with this package.
        tokenizer: The tokenizer, or the name or folder to load it from. By default that of ``model``, where
            ``model`` is a name; a model that is loaded already has none and then takes token ids only.
        compile: ``True``, or the keyword arguments of ``torch.compile``, to run traces compiled.
        automodel: The class whose ``from_pretrained`` loads the model: ``AutoModelForSeq2SeqLM`` for T5,
            ``AutoModelForMaskedLM`` for BERT.
        dispatch: Accepted for scripts that pass it; the weights are loaded at once.
        **from_pretrained_kwargs: Passed to ``automodel.from_pretrained``, for instance ``device_map``, ``dtype`` (or
            ``torch_dtype``), ``attn_implementation``, ``revision`` and ``trust_remote_code``.

    Attributes:
        tokenizer: The tokenizer, or None. Padding has to fit the model, so its ``padding_side`` is set to "left" for
            decoders and to "right" otherwise, and a missing pad token becomes the end-of-sequence token. This
            changes a tokenizer that was passed in, too; what is set on it later is respected.

    Raises:
        TypeError: If ``model`` is neither a name nor a module, or is a module and there are options to load it with.

    Example:
        >>> model = LanguageModel("nnsight/demo")
        >>> with model.trace("The Eiffel Tower is in the city of"):
        ...     hidden = model.transformer.h[2].output.save()
        ...     logits = model.lm_head.output[:, -1].save()
        >>> model.tokenizer.decode(logits.argmax(dim=-1))
        ' Paris'
    """

    tokenizer: Any

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase | str | os.PathLike[str] | None = None,
        *,
        compile: bool | dict[str, Any] = False,
        automodel: Any = AutoModelForCausalLM,
        dispatch: bool = True,
        **from_pretrained_kwargs: Any,
    ) -> None:
        if isinstance(model, torch.nn.Module):
            if from_pretrained_kwargs:
                raise TypeError(
                    f"{', '.join(sorted(from_pretrained_kwargs))}: options for loading a model, but the "
                    f"{type(model).__name__} that was passed is loaded already. Pass them to its `from_pretrained`."
                )
            module = model
        elif isinstance(model, (str, os.PathLike)):
            if "torch_dtype" in from_pretrained_kwargs:  # the name that transformers is giving up
                from_pretrained_kwargs["dtype"] = from_pretrained_kwargs.pop("torch_dtype")
            module = automodel.from_pretrained(_source(model), **from_pretrained_kwargs)
            if tokenizer is None:
                options = {name: from_pretrained_kwargs[name] for name in _REPOSITORY_OPTIONS if name in from_pretrained_kwargs}
                tokenizer = AutoTokenizer.from_pretrained(_source(model), **options)
        else:
            raise TypeError(
                f"LanguageModel takes the name or folder of a model, or a torch.nn.Module, not {type(model).__name__}."
            )
        if isinstance(tokenizer, (str, os.PathLike)):
            options = {"trust_remote_code": True} if from_pretrained_kwargs.get("trust_remote_code") else {}
            tokenizer = AutoTokenizer.from_pretrained(_source(tokenizer), **options)
        super().__init__(module, compile=compile)
        self.tokenizer = tokenizer
        if tokenizer is not None:
            self._adapt_tokenizer()

    def _adapt_tokenizer(self) -> None:
        """Let the tokenizer pad as the model needs it."""
        side = "left" if self._is_decoder else "right"
        if self.tokenizer.padding_side != side:
            logger.info("padding_side of the tokenizer set to %r for %s", side, type(self._module).__name__)
            self.tokenizer.padding_side = side
        if self.tokenizer.pad_token is None and self.tokenizer.eos_token is not None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self._module, "config", None), "is_encoder_decoder", False))

    @property
    def _is_decoder(self) -> bool:
        """Whether the model reads left to right; of the masked language models' families, none counts."""
        family = getattr(getattr(self._module, "config", None), "model_type", None)
        return not self._is_encoder_decoder and family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES

    # -- input ---------------------------------------------------------------------------------------------------

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turn prompts into the arguments of the model.

        Args:
            *inputs: At most one: a string, a list of strings, token ids as a list, a list of lists, or an integer
                tensor or array ``[sequence]`` or ``[batch, sequence]``, a dict or ``BatchEncoding``, a chat or a
                list of chats. A chat goes through the tokenizer's chat template; the model is to answer it, or
                to go on with its last message if that one is the assistant's.
            **kwargs: Arguments of the model by name. ``input_ids`` may have all the forms above. ``labels`` may be
                text or ids; lists of different lengths are padded with -100.

        Returns:
            No positional arguments, and keyword arguments on the model's device: ``input_ids`` and
            ``attention_mask``, int64 ``[batch, sequence]``; ``position_ids`` of the same shape for decoders that
            take them; ``decoder_input_ids`` ``[batch, 1]`` with the start token for encoder-decoder models, if there
            are neither those nor labels; then all others. What tokenizers return and the model does not take is
            left out. A tensor of ids without a mask is taken to have no padding. A call that continues a cache
            (``past_key_values``) keeps the mask it is given, which covers the cache too, or leaves it to the model.

        Raises:
            ValueError: If there is no prompt, or one without tokens.
            TypeError: If the input has none of the forms above.
            AttributeError: If the input is text and there is no tokenizer.
        """
        if len(inputs) > 1:
            raise TypeError(f"A language model takes one input, not {len(inputs)}. For several prompts pass a list.")
        if inputs:
            named = dict(inputs[0]) if isinstance(inputs[0], Mapping) else {"input_ids": inputs[0]}
            if "input_ids" in named and "input_ids" in kwargs:
                raise TypeError("`input_ids` was passed twice: as the input and by name.")
            kwargs = {**named, **kwargs}
        ids = kwargs.pop("input_ids", None)
        if ids is None and not any(kwargs.get(name) is not None for name in _INSTEAD_OF_IDS):
            if inputs:
                raise TypeError(f"The input is {_describe(inputs[0])} without `input_ids`. Pass {_FORMS}.")
            raise ValueError(f"The model did not execute: it was given no input. Pass {_FORMS}.")

        encoded = {} if ids is None else self._encode(ids)
        rows = {name: self._rows(name, kwargs.pop(name), encoded) for name in _ROWS if kwargs.get(name) is not None}
        prepared = {**encoded, **rows, **kwargs}
        accepted, open_ended = _parameters(self._module)
        self._complete_mask(prepared, "attention_mask" in rows)
        if self._is_encoder_decoder:
            if "decoder_input_ids" in accepted:
                self._complete_decoder(prepared)
        elif self._is_decoder and "position_ids" in accepted:
            _complete_positions(prepared)

        refused = {name for name in _TOKENIZER_EXTRAS if name not in accepted}
        if not open_ended and "attention_mask" not in accepted:
            refused.add("attention_mask")
        first = [name for name in ("input_ids", "attention_mask", "position_ids") if name in prepared]
        order = dict.fromkeys([*first, *prepared])
        device = self._input_device()
        return (), {name: _moved(prepared[name], device) for name in order if name not in refused}

    def _encode(self, prompts: Any) -> dict[str, torch.Tensor]:
        """Return the ids of ``prompts``, and the mask and what else comes with them, as ``[batch, sequence]``."""
        if isinstance(prompts, numpy.ndarray) and prompts.dtype.kind == "U":
            prompts = prompts.tolist()
        if isinstance(prompts, (torch.Tensor, numpy.ndarray)):
            return {"input_ids": _id_tensor(prompts)}
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence):
            raise TypeError(f"A prompt cannot be {_describe(prompts)}. Pass {_FORMS}.")
        if len(prompts) == 0:
            raise ValueError("The list of prompts is empty. Pass at least one prompt or one token id.")

        if _all(prompts, str):
            columns = dict(self._need_tokenizer()(list(prompts)))
        elif _all(prompts, Mapping):
            columns = self._apply_chat_template([prompts])
        elif _all(prompts, (list, tuple)) and all(chat and _all(chat, Mapping) for chat in prompts):
            columns = self._apply_chat_template(prompts)
        else:
            columns = {"input_ids": _id_rows(prompts)}
        for index, row in enumerate(columns["input_ids"]):
            if len(row) == 0:
                raise ValueError(self._without_tokens(prompts, index))
        columns.setdefault("attention_mask", [[1] * len(row) for row in columns["input_ids"]])
        return {name: self._pad(name, rows) for name, rows in columns.items() if name not in _TOKENIZER_EXTRAS or name == "token_type_ids"}

    def _apply_chat_template(self, chats: Sequence[Any]) -> dict[str, Any]:
        """Return the tokenizer's columns for ``chats``, one row each."""
        tokenizer = self._need_tokenizer()
        columns: dict[str, list[list[int]]] = {}
        for chat in chats:
            answered = chat[-1].get("role") == "assistant"
            encoding = tokenizer.apply_chat_template(
                list(chat),
                add_generation_prompt=not answered,
                continue_final_message=answered,
                return_dict=True,
            )
            for name, row in encoding.items():
                columns.setdefault(name, []).append(row)
        return columns

    def _rows(self, name: str, value: Any, encoded: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the argument ``name``, given with one row per prompt or as a single row, as a tensor."""
        if name == "labels" and (isinstance(value, str) or (isinstance(value, Sequence) and _all(value, str))):
            value = self._need_tokenizer()(text_target=[value] if isinstance(value, str) else list(value))["input_ids"]
        if isinstance(value, Sequence) and value and _all(value, (list, tuple)):
            own_length = self._is_encoder_decoder and name in ("labels", "decoder_input_ids", "decoder_attention_mask")
            width = 0 if own_length or not encoded else encoded["input_ids"].shape[1]
            value = self._pad(name, value, width)
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        if tensor.ndim != 1:
            return tensor
        if name == "labels" and not self._is_encoder_decoder:  # one class per row, unless it is as long as the row
            single = bool(encoded) and encoded["input_ids"].shape == (1, tensor.shape[0])
            return tensor.unsqueeze(0) if single else tensor
        return tensor.unsqueeze(0)

    def _pad(self, name: str, rows: Sequence[Sequence[int]], width: int = 0) -> torch.Tensor:
        """Return ``rows`` as a tensor as wide as the longest, or ``width``, padded with what ``name`` calls for."""
        width = max(width, *(len(row) for row in rows))
        if name in ("input_ids", "decoder_input_ids"):
            fill = self._pad_id()
        elif name == "labels":
            fill = _IGNORED_LABEL
        else:
            fill = getattr(self.tokenizer, "pad_token_type_id", 0) if name == "token_type_ids" else 0
        side = self.tokenizer.padding_side if self.tokenizer is not None else "left" if self._is_decoder else "right"
        padding = [[fill] * (width - len(row)) for row in rows]
        if side == "left":
            return torch.tensor([[*fillers, *row] for fillers, row in zip(padding, rows, strict=True)])
        return torch.tensor([[*row, *fillers] for fillers, row in zip(padding, rows, strict=True)])

    def _pad_id(self) -> int:
        """Return the id for padding; any that the embedding knows will do, since the mask hides it."""
        for owner in (self.tokenizer, getattr(self._module, "config", None)):
            for name in ("pad_token_id", "eos_token_id"):
                found = getattr(owner, name, None)
                if isinstance(found, int) and found >= 0:
                    return found
        return 0

    def _complete_mask(self, prepared: dict[str, Any], given: bool) -> None:
        """Add a mask without padding where there is none; a cache needs one that covers what it holds."""
        if given or "input_ids" not in prepared:
            return
        if prepared.get("past_key_values") is not None and not self._is_encoder_decoder:
            prepared.pop("attention_mask", None)
        elif "attention_mask" not in prepared:
            prepared["attention_mask"] = torch.ones_like(prepared["input_ids"])

    def _complete_decoder(self, prepared: dict[str, Any]) -> None:
        """Let the decoder of an encoder-decoder model begin, if it is not told with what."""
        if any(prepared.get(name) is not None for name in ("labels", "decoder_input_ids", "decoder_inputs_embeds")):
            return
        sources = (self._module.config, getattr(self._module, "generation_config", None))
        starts = [getattr(source, name, None) for name in ("decoder_start_token_id", "bos_token_id") for source in sources]
        start = next((found for found in starts if isinstance(found, int)), None)
        reference = next((prepared[name] for name in ("input_ids", "inputs_embeds") if name in prepared), None)
        if start is not None and reference is not None:
            prepared["decoder_input_ids"] = torch.full((reference.shape[0], 1), start, device=reference.device)

    def _input_device(self) -> torch.device | None:
        """Return where the model expects its input, or None if that is not up to the weights."""
        try:
            device = self._module.get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
        except (AttributeError, NotImplementedError):
            parameter = next(self._module.parameters(), None)
            device = None if parameter is None else parameter.device
        return None if device is None or device.type == "meta" else device

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise AttributeError(
                "Tokenizer not found: text was passed to a model that was wrapped without one. Pass tokenizer= as in "
                "`LanguageModel(module, tokenizer=AutoTokenizer.from_pretrained(...))`, or trace with token ids."
            )
        return self.tokenizer

    def _without_tokens(self, prompts: Sequence[Any], index: int) -> str:
        text = f"Prompt {index} of {len(prompts)} is empty: it has no tokens, and the model needs at least one."
        if isinstance(prompts[index], str) and prompts[index]:
            text = (
                f"The tokenizer found no tokens in {prompts[index]!r}. It knows {len(self.tokenizer)} tokens: probably "
                "its files are missing from the model's folder. Save it there with `tokenizer.save_pretrained(folder)`."
            )
        return text


def demo_model(**kwargs: Any) -> LanguageModel:
    """Return the small language model that comes with this package; nothing is downloaded.

    Args:
        **kwargs: Those of :class:`LanguageModel`, for instance ``compile=True``.
    """
    return LanguageModel(DEMO_NAME, **kwargs)


def _source(name: str | os.PathLike[str]) -> str:
    """Return what ``from_pretrained`` is to be given for ``name``."""
    return demo_path() if str(name) == DEMO_NAME else os.fspath(name)


def _parameters(module: torch.nn.Module) -> tuple[set[str], bool]:
    """Return the names of the parameters of ``module.forward``, and whether it takes any other keyword."""
    parameters = inspect.signature(module.forward).parameters
    return set(parameters), any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _complete_positions(prepared: dict[str, Any]) -> None:
    """Add positions counted from the mask."""
    reference = prepared["input_ids"] if "input_ids" in prepared else prepared.get("inputs_embeds")
    mask = prepared.get("attention_mask")
    if prepared.get("position_ids") is not None or reference is None or mask is None or mask.ndim != 2:
        return
    # The mask of a call that continues a cache is longer than the ids of the call.
    prepared["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -reference.shape[1] :]


def _id_tensor(ids: torch.Tensor | numpy.ndarray[Any, Any]) -> torch.Tensor:
    """Return ``ids`` as an int64 tensor ``[batch, sequence]``."""
    if isinstance(ids, numpy.ndarray):
        if ids.dtype.kind not in "iu":
            raise TypeError(f"Token ids are integers; the array is {ids.dtype}. Pass {_FORMS}.")
        ids = torch.tensor(ids.astype(numpy.int64))
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"Token ids are integers; the tensor is {ids.dtype}. Pass embeddings as `inputs_embeds=`.")
    if ids.ndim not in (1, 2):
        raise ValueError(f"Token ids are [sequence] or [batch, sequence]; the shape is {tuple(ids.shape)}.")
    if ids.numel() == 0:
        raise ValueError(f"The tensor of token ids is empty: its shape is {tuple(ids.shape)}.")
    return ids.long().reshape(-1, ids.shape[-1])


def _id_rows(prompts: Sequence[Any]) -> list[list[int]]:
    """Return token ids given as one row or a list of rows as a list of rows."""
    if _all(prompts, Integral) and not any(isinstance(item, bool) for item in prompts):
        return [[int(item) for item in prompts]]
    rows = []
    for row in prompts:
        if isinstance(row, (torch.Tensor, numpy.ndarray)) and row.ndim == 1:
            rows.append([] if len(row) == 0 else _id_tensor(row)[0].tolist())
        elif isinstance(row, (list, tuple)) and _all(row, Integral) and not any(isinstance(item, bool) for item in row):
            rows.append([int(item) for item in row])
        else:
            raise TypeError(f"A list with {_describe(row)} in it is no list of prompts. Pass {_FORMS}.")
    return rows


def _all(values: Sequence[Any], kind: type | tuple[type, ...]) -> bool:
    return all(isinstance(value, kind) for value in values)


def _describe(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if device is not None and isinstance(value, torch.Tensor) else value
