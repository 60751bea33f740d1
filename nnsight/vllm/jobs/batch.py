"""Conversion of the input of a program's run to prompts and sampling parameters of an engine."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from ...program.format.errors import InvalidProgramError
from ...program.format.payload import Job
from ...program.run.fake_runs import generation_size
from ...program.run.validation import inputs_of
from ..prompts import refusals

#: Inputs of the model that the prompts replace.
_INPUTS = ("input_ids", "inputs", "attention_mask", "position_ids")

#: Options that are converted to sampling parameters, or that ask for the engine's usual behaviour.
_OTHERS = {"use_cache", "return_dict", "pad_token_id", "bos_token_id", "max_new_tokens", "max_length", "min_new_tokens", "min_length"}

#: Options for sampling that vLLM has under the same names.
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")

#: Options that an engine does not have, each with its neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "logits_to_keep": (None, 0),
    "output_hidden_states": (None, False),
    "output_attentions": (None, False),
    "return_dict_in_generate": (None, False),
}


@dataclass(frozen=True)
class Batch:
    """The prompts of one run.

    Attributes:
        ids: Token ids, [batch, positions], int64.
        prompts: The token ids of each row, without padding.
        starts: The position in its padded row at which each prompt begins.
        new: Most tokens that are generated.
        pad: The token id for padding.
        sampling: vLLM's sampling parameters for each row.
    """

    ids: torch.Tensor
    prompts: list[list[int]]
    starts: list[int]
    new: int
    pad: int
    sampling: Any

    @classmethod
    def of(cls, job: Job, number: int, module: Any) -> Batch:
        """Return the batch of run ``number`` of a job. ``module`` is the model of transformers.

        Raises:
            InvalidProgramError: If an engine cannot run it.
        """
        run = job.runs[number]
        args, kwargs = inputs_of(run, job.tensors, None)
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        if len(args) > 1 or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
            raise InvalidProgramError("A vLLM engine takes token ids, [batch, positions], but this program has another input.")
        options = {name: value for name, value in kwargs.items() if name not in _INPUTS}
        starts, lengths = _spans(ids, kwargs.get("attention_mask"))
        _check_positions(kwargs.get("position_ids"), starts, lengths)
        prompts = [row[start : start + length].tolist() for row, start, length in zip(ids, starts, lengths, strict=True)]
        known = range(module.get_input_embeddings().num_embeddings)
        unknown = [token for prompt in prompts for token in (min(prompt), max(prompt)) if token not in known]
        if unknown:
            raise InvalidProgramError(f"A vLLM engine has no token {unknown[0]}: the token ids of this model are below {len(known)}.")
        allowed = {*_OTHERS, *_NEUTRAL, *_SAMPLED, "repetition_penalty", "do_sample", "eos_token_id"}
        for name, value in options.items():
            if name not in allowed or value not in _NEUTRAL.get(name, (value,)):
                raise InvalidProgramError(f"A vLLM engine has no `{name}={str(value)[:40]}`.")
        if run["call"] == "trace":
            return cls(ids, prompts, starts, 1, 0, _sampling(max_tokens=1, temperature=0.0))
        if any(start + length != ids.shape[1] for start, length in zip(starts, lengths, strict=True)):
            raise InvalidProgramError("A vLLM engine generates from prompts with padding on the left, but these have padding on the right.")
        new = generation_size(module, args, kwargs)[0]
        config = _configured(module, options)
        ends = config.eos_token_id
        ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
        least = config.min_new_tokens or max((config.min_length or 0) - ids.shape[1], 0)
        pad = config.pad_token_id if config.pad_token_id is not None else (ends or [0])[0]
        asked: dict[str, Any] = {"temperature": 0.0}
        if config.do_sample:
            found = {name: getattr(config, name, None) for name in _SAMPLED}
            asked = {"seed": job.seed, **{name: value for name, value in found.items() if value is not None}}
        repetition = config.repetition_penalty or 1.0
        sampling = _sampling(
            max_tokens=new, min_tokens=min(least, new), stop_token_ids=ends, ignore_eos=True, repetition_penalty=repetition, **asked
        )
        return cls(ids, prompts, starts, new, pad, sampling)

    @property
    def length(self) -> int:
        """The number of positions of a padded row."""
        return self.ids.shape[1]

    @property
    def most_tokens(self) -> list[int]:
        """For each row, the largest number of tokens that it can reach."""
        return [len(prompt) + self.new for prompt in self.prompts]


def _spans(ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """Return, for all rows, the first positions of their tokens, and the numbers of their tokens."""
    if mask is None:
        return [0] * len(ids), [ids.shape[1]] * len(ids)
    if mask.shape != ids.shape:
        raise InvalidProgramError("A vLLM engine takes an attention mask with the shape of the ids.")
    there = mask.bool()
    lengths, starts = there.sum(1), there.int().argmax(1)
    positions = torch.arange(ids.shape[1])[None]
    whole = (positions >= starts[:, None]) & (positions < (starts + lengths)[:, None])
    if not bool((there == whole).all()) or not bool(lengths.all()):
        raise InvalidProgramError("A vLLM engine takes prompts with consecutive tokens, but this attention mask has gaps.")
    return starts.tolist(), lengths.tolist()


def _check_positions(given: torch.Tensor | None, starts: list[int], lengths: list[int]) -> None:
    """Raise ``InvalidProgramError`` unless position ids count from the first token of each row."""
    if given is None:
        return
    for row, start, length in zip(given.expand(len(starts), -1), starts, lengths, strict=True):
        if row[start : start + length].tolist() != list(range(length)):
            raise InvalidProgramError("A vLLM engine counts positions from the first token of each prompt; these `position_ids` do not.")


def _configured(module: Any, options: dict[str, Any]) -> Any:
    """Return the generation config of the checkpoint, updated with ``options``."""
    config = copy.deepcopy(module.generation_config)
    config.update(**options)
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise InvalidProgramError(f"A vLLM engine has no `{name}={str(value)[:40]}`, which the model's generation config asks for.")
    return config


def _sampling(**options: Any) -> Any:
    from vllm import SamplingParams

    try:
        with refusals():
            return SamplingParams(**options, detokenize=False)
    except ValueError as error:
        raise InvalidProgramError(str(error)) from error
