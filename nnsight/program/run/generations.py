"""Generations of several clients in one batch.

``generate`` pads a sequence that has ended until all sequences have ended. If a job runs alone, its generation ends when its own sequences
have ended. :class:`Tokens` follows the tokens, so that a job has the same results in a batch: after the end of its sequences it sees no
locations of the model any more, and its rows of the result have the columns that they would have alone.

This is correct for greedy generations by ``generate`` of transformers, where a token depends only on its own row. Sampling uses the random
number generator of a job, and beam search makes several rows from one, so such jobs run alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ...runtime.rows.batching import BatchGroup, View

#: Locations whose value is the result of a generation.
RETURNED = frozenset({"result", "model.generator.output"})

#: Options with which a generation does not end by its tokens, or does not return token ids.
_OTHER_ENDS = ("max_time", "stop_strings", "return_dict_in_generate", "token_healing")


def joins(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Whether generations with these options can share a batch: each token depends only on its row, and the end only on the tokens."""
    config: Any = getattr(module, "generation_config", None)
    if config is None or getattr(type(module), "generate", None) is not GenerationMixin.generate:
        return False
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    if "eos_token_id" in options and options["eos_token_id"] is None:
        return False  # versions of transformers differ in the meaning of `None`
    config = copy.deepcopy(config)
    try:
        config.update(**options)
    except (TypeError, ValueError):  # the options contradict each other, so the run will raise an error
        return False
    return (
        config.get_generation_mode() is GenerationMode.GREEDY_SEARCH
        and (config.num_return_sequences or 1) == 1
        and not any(getattr(config, name, None) for name in _OTHER_ENDS)
        and (getattr(config, "guidance_scale", None) or 1) == 1
    )


def ends_of(module: torch.nn.Module, kwargs: dict[str, Any]) -> list[int]:
    """Return the ids of the tokens that end a sequence."""
    config: Any = module.generation_config
    found = kwargs.get("eos_token_id", config.eos_token_id)
    return [] if found is None else found if isinstance(found, list) else [found]


class Tokens:
    """A streamer for ``generate`` that counts the tokens of a batch. ``ends`` are the ids that end a sequence.

    Attributes:
        made: Number of tokens that each row has so far, including padding.
        length: Number of tokens of each row at its end, shape ``[rows]``; 0 for a row that has not ended.
    """

    def __init__(self, ends: list[int]) -> None:
        self._ends = torch.tensor(ends, dtype=torch.int64, device="cpu")
        self.made = 0
        self.length: torch.Tensor | None = None

    def put(self, value: torch.Tensor) -> None:
        """Count the ids of a step. The ids of the first call are the prompts."""
        if self.length is None:
            self.length = torch.zeros(len(value), dtype=torch.int64, device="cpu")
            return
        self.made += 1
        ended = torch.isin(value.cpu(), self._ends) & (self.length == 0)
        self.length[ended] = self.made

    def end(self) -> None:
        """Do nothing: ``generate`` calls this at the end."""

    def made_for(self, group: BatchGroup) -> int:
        """Return the number of tokens that a generation of these rows alone would have made by now."""
        if self.length is None or not self.ended(group):
            return self.made
        return int(self.length[group.start : group.start + group.size].max())

    def ended(self, group: BatchGroup) -> bool:
        """Whether a generation of these rows alone would have ended by now."""
        return self.length is not None and bool(self.length[group.start : group.start + group.size].all())


class ReturnedRows(View):
    """The rows of one job in the result of a generation, with as many columns as if the job ran alone."""

    def __init__(self, group: BatchGroup, location: str, occurrence: int, whole: Any, tokens: Tokens) -> None:
        more = tokens.made - tokens.made_for(group)
        super().__init__(group, location, occurrence, whole[:, : whole.shape[1] - more])
        self._all = whole

    def widen(self, left: Any) -> Any:
        """Return the value of the whole batch. It is unchanged, because programs that replace the result of a generation run alone."""
        return self._all
