"""Generations of several clients in one batch.

``generate`` pads a sequence that has ended until all sequences have. Alone, the generation of a job ends when its own sequences have. So
:class:`Tokens` follows the tokens: after its end, a job sees no further location of the model, and of the result it sees the columns
that it would have alone.

This holds for greedy generations by ``generate`` of transformers, where a token depends on its row only. Sampling, which uses the generator
of a job, and beams, which make several rows of one, run alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from ...modeling.generation import Streamer
from ...runtime.rows.batching import BatchGroup, View

#: Locations of the result of a generation.
RETURNED = frozenset({"result", "model.generator.output"})

#: Options of a model that end a generation by something else than tokens, or return something else than ids.
_OTHER_ENDS = ("max_time", "stop_strings", "return_dict_in_generate", "token_healing")


def joins(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Whether the tokens of a generation with these options depend on their row only, and its end on its tokens."""
    config: Any = getattr(module, "generation_config", None)
    if config is None or getattr(type(module), "generate", None) is not GenerationMixin.generate:
        return False
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    if "eos_token_id" in options and options["eos_token_id"] is None:
        return False  # its meaning differs between versions of transformers
    config = copy.deepcopy(config)
    try:
        config.update(**options)
    except (TypeError, ValueError):  # the options contradict each other; the run raises
        return False
    return (
        config.get_generation_mode() is GenerationMode.GREEDY_SEARCH
        and (config.num_return_sequences or 1) == 1
        and not any(getattr(config, name, None) for name in _OTHER_ENDS)
        and (getattr(config, "guidance_scale", None) or 1) == 1
    )


def ends_of(module: torch.nn.Module, kwargs: dict[str, Any]) -> list[int]:
    """Return the tokens that end a sequence."""
    config: Any = module.generation_config
    found = kwargs.get("eos_token_id", config.eos_token_id)
    return [] if found is None else found if isinstance(found, list) else [found]


class Tokens(Streamer):
    """The tokens of a batch as they come: offered to the blocks, and counted; ``ends`` are those that end a sequence.

    Attributes:
        made: Number of tokens of each row.
        length: Number of tokens when a row ended, by row; 0 for a row that goes on.
    """

    def __init__(self, ends: list[int]) -> None:
        self._ends = torch.tensor(ends, dtype=torch.int64, device="cpu")
        self.made = 0
        self.length: torch.Tensor | None = None

    def put(self, value: torch.Tensor) -> None:
        """Offer ids; the first are those of the prompts."""
        super().put(value)
        if self.length is None:
            self.length = torch.zeros(len(value), dtype=torch.int64, device="cpu")
            return
        self.made += 1
        ended = torch.isin(value.cpu(), self._ends) & (self.length == 0)
        self.length[ended] = self.made

    def made_for(self, group: BatchGroup) -> int:
        """Return the number of tokens that a generation of these rows alone would have made by now."""
        if self.length is None or not self.ended(group):
            return self.made
        return int(self.length[group.start : group.start + group.size].max())

    def ended(self, group: BatchGroup) -> bool:
        """Whether a generation of these rows alone would have ended by now."""
        return self.length is not None and bool(self.length[group.start : group.start + group.size].all())


class Returned(View):
    """The rows of one job in what a generation returns, as long as it would be alone."""

    def __init__(self, group: BatchGroup, location: str, occurrence: int, whole: Any, tokens: Tokens) -> None:
        more = tokens.made - tokens.made_for(group)
        super().__init__(group, location, occurrence, whole[:, : whole.shape[1] - more])
        self._all = whole

    def widen(self, left: Any) -> Any:
        """Return the value of the whole batch: programs that replace what a generation returns run alone."""
        return self._all
