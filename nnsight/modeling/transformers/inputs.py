"""Conversion of prompts to arguments of a transformers model: ``input_ids`` and ``attention_mask``, both ``[batch, sequence]``.

- Prompts of different lengths are padded, and the mask says which positions are real. Decoders are padded on the left, so that
  ``logits[:, -1]`` is the prediction after every prompt; encoders and encoder-decoder models are padded on the right, as in training.
- A model that is padded on the left gets ``position_ids`` counted from the mask, so a padded row has the values that it has alone.
- The set of arguments never depends on the prompts, only their sizes do. So a compiled model is captured again when dynamo first sees a
  size vary, and then serves any number of prompts of any length.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ...runtime.tracer import Arguments
from ..forms import CACHES, FORMS, all_are, by_name, describe, id_rows, id_tensor
from .fields import FIELDS, PAD_TOKEN, positions, refuse_to_share, stack

logger = logging.getLogger("nnsight.modeling")

#: Names of values that tokenizers return in addition to ids and mask. Each model takes only some of them.
_TOKENIZER_EXTRAS = {
    *("length", "num_truncated_tokens", "offset_mapping", "overflow_to_sample_mapping", "overflowing_tokens"),
    *("special_tokens_mask", "token_type_ids"),
}

#: Arguments with one row per prompt that can be given as lists.
_ROWS = FIELDS.keys() - {"input_ids", "inputs_embeds", "decoder_inputs_embeds"}

#: Options of chat templates, and of tokenizers for text and chats.
_CHAT_OPTIONS = {
    *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents", "tools"),
}
_TEXT_OPTIONS = {
    *("add_special_tokens", "max_length", "pad_to_multiple_of", "padding", "return_overflowing_tokens", "stride"),
    *("text_pair", "truncation", "tokenizer_kwargs"),
}

_NO_MASK_OF_CACHE = (
    "Prompts of different lengths continue a cache, so a mask must hide their padding: pass an `attention_mask=` with an entry for each "
    "token of the cache and of the prompts."
)

#: The tensors ``decoder_input_ids`` that :meth:`TextInput._start_decoder` made, because none were given.
_started = WeakIdKeyDictionary()


class TextInput:
    """Converts prompts to the arguments of a model; a base class of root envoys whose ``tokenizer`` is a tokenizer or None."""

    tokenizer: Any
    _module: torch.nn.Module

    @property
    def _options_of_invokes(self) -> set[str]:
        """Names of those arguments of a trace that also apply to the prompts of its invokes."""
        return _TEXT_OPTIONS | _CHAT_OPTIONS

    def _adapt_tokenizer(self) -> None:
        """Set the padding side and the pad token of the tokenizer as the model needs them."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return
        side = "left" if self._is_decoder else "right" if self._is_encoder_decoder else tokenizer.padding_side
        if tokenizer.padding_side != side:
            logger.info("tokenizer set to pad on the %s for %s", side, type(self._module).__name__)
            tokenizer.padding_side = side
        if tokenizer.pad_token is None and tokenizer.eos_token is not None:
            tokenizer.pad_token = tokenizer.eos_token

    @property
    def _is_encoder_decoder(self) -> bool:
        return bool(getattr(getattr(self._module, "config", None), "is_encoder_decoder", False))

    @property
    def _is_decoder(self) -> bool:
        """Whether the model is causal. Families with a masked language model do not count."""
        family = getattr(getattr(self._module, "config", None), "model_type", None)
        return not self._is_encoder_decoder and family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Convert prompts to the arguments of the model.

        Args:
            *inputs: At most one, in one of the forms of :data:`~nnsight.modeling.forms.FORMS`. The tokenizer's chat template is applied
                to a chat, so that the model answers it, or continues the last message if that is the assistant's.
            **kwargs: Arguments of the model by name. ``input_ids`` can have any of these forms. Masks, labels and other arguments with
                rows can be lists, also of different lengths; labels are padded with -100. Options of the tokenizer, such as
                ``truncation``, ``max_length`` and ``add_special_tokens``, and of chat templates, such as ``tools``, are passed on.

        Returns:
            No positional arguments, and as keyword arguments, on the model's device:

            - ``input_ids`` and ``attention_mask``, int64 ``[batch, sequence]``. Ids in a tensor without a mask are taken as unpadded.
              If a decoder continues a cache that is not empty, only a given mask is passed on, and it must cover the cache, too.
            - ``position_ids``, of the same shape, for models that take them and are padded on the left. They count the tokens after
              the padding; in a row whose mask has gaps, they count every entry. Absent if the mask also covers a cache.
            - ``decoder_input_ids`` ``[batch, 1]``, the start token, for encoder-decoder models that get neither those nor labels.
            - All other arguments as they were given, without outputs of tokenizers that this model does not take.
        """
        given = by_name(inputs, kwargs)
        ids = given.pop("input_ids", None)
        accepted, any_name = _parameters(self._module)
        options = {name: given.pop(name) for name in (self._options_of_invokes - accepted) & given.keys()}
        prepared = {} if ids is None else self._encode(ids, options)
        continues = not self._is_encoder_decoder and _continues_cache(given)
        made = prepared.pop("attention_mask", None) if continues else None
        if made is not None and given.get("attention_mask") is None and not made.all():
            raise ValueError(_NO_MASK_OF_CACHE)
        count, width = (0, 0) if ids is None else (len(prepared["input_ids"]), prepared["input_ids"].shape[-1])
        for name, value in given.items():
            is_rows = name in _ROWS and value is not None
            prepared[name] = self._tensor(name, value, count, width) if is_rows else value
        for name in ("inputs_embeds", "decoder_inputs_embeds"):
            if getattr(prepared.get(name), "ndim", 0) == 2:  # one row
                prepared[name] = prepared[name].unsqueeze(0)
        if ids is None and prepared.get("inputs_embeds") is not None and not continues:
            embeds = prepared["inputs_embeds"]
            prepared.setdefault("attention_mask", torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device))
        check_rows(prepared)
        if self._is_encoder_decoder and "decoder_input_ids" in accepted:
            self._start_decoder(prepared)
        elif "position_ids" in accepted and self._is_padded_left:
            _count_positions(prepared)
        optional = _TOKENIZER_EXTRAS if any_name else _TOKENIZER_EXTRAS | {"attention_mask"}
        device = self._input_device()
        arguments = {
            name: value.to(device) if device is not None and isinstance(value, torch.Tensor) else value
            for name, value in prepared.items()
            if name in accepted or name not in optional
        }
        return (), arguments

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the prompts of one more invoke to those before it, and pad them to one length."""
        rows = next((len(value) for value in kwargs.values() if isinstance(value, torch.Tensor) and value.ndim), 1)
        if batched is None:
            return (args, kwargs), rows
        for part in (batched, (args, kwargs)):
            refuse_to_share(part)
        joined: dict[str, Any] = {}
        for name in {**batched[1], **kwargs}:
            before, added = batched[1].get(name), kwargs.get(name)
            if isinstance(before, torch.Tensor) or isinstance(added, torch.Tensor):
                joined[name] = self._join(name, before, added, batched[1], kwargs)
            elif before is not added and before != added:
                raise ValueError(f"`{name}` differs between invokes: {before!r} and {added!r}. They run as one batch.")
            else:
                joined[name] = added
        widths = {part["input_ids"].shape[-1] for part in (batched[1], kwargs) if "input_ids" in part}
        if len(widths) > 1 and "attention_mask" not in joined and _continues_cache(joined):
            raise ValueError(_NO_MASK_OF_CACHE)
        return ((), joined), rows

    def _join(self, name: str, before: Any, added: Any, above: Mapping[str, Any], below: Mapping[str, Any]) -> torch.Tensor:
        """Return the rows of both tensors. If one invoke lacks the argument, its field may have default rows."""
        default = FIELDS[name].default if name in FIELDS else None
        if default is not None and (before is None) != (added is None):
            own_length = self._is_encoder_decoder and FIELDS[name].is_of_decoder
            before = default(above, added, own_length) if before is None else before
            added = default(below, before, own_length) if added is None else added
        if before is None or added is None or (before in _started) != (added in _started):
            raise ValueError(f"Only some of the invokes have `{name}`: they run as one batch, so all need it.")
        if before.ndim != added.ndim:
            raise ValueError(f"`{name}` has {before.ndim} dimensions in one invoke, and {added.ndim} in another: they run as one batch.")
        joined = stack(before, added, self._filler(name, {before.shape[1:], added.shape[1:]}), self._side(name))
        if added in _started:
            _started[joined] = True
        return joined

    def _encode(self, prompts: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return ids and mask of ``prompts``, and token types if the tokenizer makes them, all ``[batch, sequence]``.

        Raises:
            ValueError: If ``options`` of the tokenizer are given with token ids, or options of chats without a chat.
        """
        if isinstance(prompts, np.ndarray) and prompts.dtype.kind == "U":
            prompts = prompts.tolist()
        if isinstance(prompts, (torch.Tensor, np.ndarray)):
            ids = id_tensor(prompts)
            refuse_options(options, "token ids")
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise TypeError(f"A prompt cannot be {describe(prompts)}. Pass {FORMS}.")
        if len(prompts) == 0:
            raise ValueError("The list of prompts is empty. Pass at least one prompt or one token id.")

        if all_are(prompts, str):
            refuse_options({name: value for name, value in options.items() if name in _CHAT_OPTIONS}, "text and no chat")
            more = options.pop("tokenizer_kwargs", None) or {}
            if isinstance(options.get("text_pair"), str):
                options["text_pair"] = [options["text_pair"]]
            columns = dict(self._require_tokenizer()(list(prompts), **options, **more))
        elif all_are(prompts, Mapping):
            if any("input_ids" in message for message in prompts):
                raise TypeError(f"The list of prompts contains {describe(prompts[0])}, an encoding. Pass {FORMS}.")
            columns = self._render([prompts], options)
        elif all_are(prompts, (list, tuple)) and all(chat and all_are(chat, Mapping) for chat in prompts):
            columns = self._render(prompts, options)
        else:
            refuse_options(options, "token ids")
            if all_are(prompts, (list, tuple)) and all(row and all_are(row, (list, tuple)) for row in prompts):  # choices
                return self._encode(torch.tensor(prompts), {})
            columns = {"input_ids": id_rows(prompts)}
        for index, row in enumerate(columns["input_ids"]):
            if len(row) == 0:
                raise ValueError(self._without_tokens(prompts, index))
        columns.setdefault("attention_mask", [[1] * len(row) for row in columns["input_ids"]])
        wanted = ("input_ids", "attention_mask", "token_type_ids")
        return {name: self._pad(name, columns[name]) for name in wanted if name in columns}

    def _render(self, chats: Sequence[Sequence[Mapping[str, Any]]], options: dict[str, Any]) -> dict[str, list[list[int]]]:
        """Apply the chat template to each of ``chats``; return the tokenizer's values by name, with a row for each chat."""
        tokenizer = self._require_tokenizer()
        columns: dict[str, list[list[int]]] = {}
        of_tokenizer = {name: value for name, value in options.items() if name in _TEXT_OPTIONS - {"tokenizer_kwargs"}}
        of_tokenizer |= options.get("tokenizer_kwargs") or {}
        rendering = {name: value for name, value in options.items() if name in _CHAT_OPTIONS}
        rendering |= rendering.pop("chat_template_kwargs", None) or {}
        for name in ("padding", "truncation", "max_length"):
            if name in of_tokenizer:
                rendering[name] = of_tokenizer.pop(name)
        for chat in chats:
            encoding = tokenizer.apply_chat_template(
                list(chat), return_dict=True, tokenizer_kwargs=of_tokenizer, **{**ending(chat), **rendering}
            )
            for name, row in encoding.items():
                columns.setdefault(name, []).append(row)
        return columns

    def _tensor(self, name: str, value: Any, count: int, width: int) -> torch.Tensor:
        """Return the argument ``name`` as a tensor with a row for each of ``count`` prompts; short rows are padded to their ``width``."""
        if isinstance(value, Sequence) and value and all_are(value, (list, tuple, torch.Tensor, np.ndarray)):
            own_length = self._is_encoder_decoder and FIELDS[name].is_of_decoder
            value = self._pad(name, [list(row) for row in value], 0 if own_length else width)
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        if tensor.ndim == 0:  # the class label of a single prompt
            return tensor.unsqueeze(0)
        if tensor.ndim != 1:
            return tensor
        # Labels of several prompts, or whose number differs from the length of the prompt, are class labels, one for each prompt.
        classes = name == "labels" and (count > 1 or (not self._is_encoder_decoder and len(tensor) != width))
        return tensor if classes or FIELDS[name].is_one_per_row else tensor.unsqueeze(0)

    def _pad(self, name: str, rows: Sequence[Sequence[int]], width: int = 0) -> torch.Tensor:
        """Return ``rows`` as a tensor as wide as the longest, or ``width``, padded as ``name`` requires."""
        filler, side = self._filler(name, {len(row) for row in rows}), self._side(name)
        width = max(width, *(len(row) for row in rows))
        padded = []
        for row in rows:
            padding = [filler] * (width - len(row))
            padded.append([*padding, *row] if side == "left" else [*row, *padding])
        return torch.tensor(padded)

    def _side(self, name: str) -> str:
        """Return the side, "left" or "right", on which rows of the argument ``name`` are padded."""
        is_of_decoder = self._is_encoder_decoder and name in FIELDS and FIELDS[name].is_of_decoder
        return "right" if is_of_decoder or name not in FIELDS else self._padding_side

    @property
    def _padding_side(self) -> str:
        own = "left" if self._is_decoder else "right"
        return own if self.tokenizer is None else self.tokenizer.padding_side

    @property
    def _is_padded_left(self) -> bool:
        """Whether prompts are padded on the left, and the model does not find the padding itself, as RoBERTa does by its token id."""
        if self._padding_side == "right":
            return False
        return self._is_decoder or not any(hasattr(part, "create_position_ids_from_input_ids") for part in self._module.modules())

    def _filler(self, name: str, lengths: Collection[Any]) -> Any:
        """Return the value that pads rows of the argument ``name``, which have these ``lengths``.

        Raises:
            ValueError: If the lengths differ, and the tokenizer has no pad token.
        """
        if name == "token_type_ids":
            return getattr(self.tokenizer, "pad_token_type_id", 0)
        filler = FIELDS[name].filler if name in FIELDS else 0
        if filler is not PAD_TOKEN:
            return filler
        if len(lengths) > 1 and self.tokenizer is not None and self.tokenizer.pad_token is None:
            raise ValueError(
                f"The rows of `{name}` differ in length, and the tokenizer has no pad token to fill them with. Set one: "
                "`model.tokenizer.pad_token = ...`."
            )
        return self._pad_id()

    def _pad_id(self) -> int:
        """Return the token id for padding. Any id with an embedding works, since the mask hides it."""
        for owner in (self.tokenizer, getattr(self._module, "config", None)):
            for name in ("pad_token_id", "eos_token_id"):
                found = getattr(owner, name, None)
                if isinstance(found, int) and found >= 0:
                    return found
        return 0

    def _start_decoder(self, prepared: dict[str, Any]) -> None:
        """Add ``decoder_input_ids`` with the start token, unless the decoder has other inputs, or the model classifies and starts it."""
        begun = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
        module: Any = self._module
        starts_itself = getattr(module, "base_model", module) is not module and not (hasattr(module, "generate") and module.can_generate())
        if starts_itself or any(prepared.get(name) is not None for name in begun):
            return
        names = ("input_ids", "inputs_embeds", getattr(self._module, "main_input_name", "input_ids"))
        source = next((prepared[name] for name in names if prepared.get(name) is not None), None)
        owners = (self._module.config, getattr(self._module, "generation_config", None))
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")  # T5 starts with its pad token
        found = (getattr(owner, name, None) for name in names for owner in owners)
        start = next((token for token in found if token is not None), None)
        if source is not None and start is not None:
            ids = prepared["decoder_input_ids"] = torch.full((source.shape[0], 1), start, device=self._input_device() or source.device)
            _started[ids] = True

    def _without_derived(self, prepared: dict[str, Any], given: set[str]) -> None:
        """Remove positions and decoder ids that are not ``given`` by the user but were derived from the input."""
        if "position_ids" not in given:
            prepared.pop("position_ids", None)
        if "decoder_input_ids" in prepared and prepared["decoder_input_ids"] in _started:
            del prepared["decoder_input_ids"]

    def _input_device(self) -> torch.device | None:
        """Return the device of the first parameter. None if that is on the meta device: hooks of an offloaded model then move inputs."""
        weight = next(self._module.parameters(), None)
        return None if weight is None or weight.is_meta else weight.device

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise AttributeError(
                "Tokenizer not found: the input is text, and this model was wrapped without a tokenizer. "
                "Pass a tokenizer, as in `LanguageModel(module, tokenizer=AutoTokenizer.from_pretrained(...))`, "
                "or trace with token ids."
            )
        return self.tokenizer

    def _without_tokens(self, prompts: Sequence[Any], index: int) -> str:
        """Return the error message for prompt ``index``, which has no tokens."""
        if isinstance(prompts[index], str) and prompts[index]:
            return (
                f"The tokenizer found no tokens in {prompts[index]!r}. Its vocabulary has {len(self.tokenizer)} tokens. "
                "If these are too few, its files are missing from the model's folder: save it there, too, with "
                "`tokenizer.save_pretrained`."
            )
        which = f"Prompt {index} of {len(prompts)}" if len(prompts) > 1 else "The prompt"
        return f"{which} is empty: it has zero tokens, and the model needs at least one."


def _parameters(module: torch.nn.Module) -> tuple[set[str], bool]:
    """Return the names of the parameters of ``module.forward``, and whether it takes arguments of any other name."""
    own = module.__dict__.get("forward")  # set by a hook; not cached, since the cache would keep the module alive
    return _signature_of(type(module).forward) if own is None else _signature_of.__wrapped__(own)


@functools.lru_cache(maxsize=256)
def _signature_of(function: Any) -> tuple[set[str], bool]:
    parameters = inspect.signature(function).parameters
    names = {name for name in parameters if name != "self"}
    return names, any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())


def ending(chat: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return the options of a chat template with which the model answers a chat, or continues its last message if it is its own."""
    unfinished = chat[-1].get("role") == "assistant"
    return {"add_generation_prompt": not unfinished, "continue_final_message": unfinished}


def refuse_options(options: Mapping[str, Any], form: str) -> None:
    """Raise ``ValueError`` for ``options`` that have no effect on a prompt of this ``form``."""
    if any(options.values()):
        names = ", ".join(f"`{name}`" for name, value in options.items() if value)
        raise ValueError(f"{names}: such options of tokenizers and chat templates do not apply here, as the prompt is {form}.")


def check_rows(prepared: dict[str, Any], count: int | None = None) -> None:
    """Expand single rows of token types and positions to all prompts; ``count`` is their number if there are no ids.

    Raises:
        ValueError: If another argument does not have one row for each prompt.
    """
    source = prepared.get("input_ids", prepared.get("inputs_embeds"))
    count = count if source is None else len(source)
    for name in _ROWS & prepared.keys():
        value = prepared[name]
        if count is None or value is None or value.ndim > 2 or len(value) == count:
            continue
        if len(value) != 1 or name not in ("position_ids", "token_type_ids"):
            raise ValueError(f"`{name}` has {len(value)} rows, and there are {count} prompts: it needs one row for each.")
        prepared[name] = value.expand(count, -1)


def _continues_cache(given: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments continues a cache that is not empty."""
    caches = [given[name] for name in CACHES if given.get(name) is not None]
    return any(not hasattr(cache, "get_seq_length") or int(cache.get_seq_length()) > 0 for cache in caches)


def _count_positions(prepared: dict[str, Any]) -> None:
    """Add ``position_ids``, unless they are given, or the mask does not have the shape of the input because it also covers a cache."""
    source = prepared.get("input_ids", prepared.get("inputs_embeds"))
    mask = prepared.get("attention_mask")
    if prepared.get("position_ids") is not None or source is None or mask is None or mask.shape != source.shape[:2]:
        return
    prepared["position_ids"] = positions(mask)
