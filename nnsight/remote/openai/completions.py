"""One answer while it is made: its tokens, its text so far, and why it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from ...steering.choices import Addition
from .requests import Body


class Logprob(NamedTuple):
    """A token with the logarithm of its probability, the likeliest tokens with theirs, and where it begins in the text."""

    text: str
    value: float
    likely: list[tuple[str, float]]
    offset: int


class Completion:
    """An answer to one prompt. The thread that generates adds tokens to it, and calls ``tell`` when its text grows or it ends.

    Attributes:
        prompt: Token ids of the prompt.
        additions: How it is steered, by layer.
        start: First position that is steered.
        tokens: Ids made so far, without that of an end.
        logprobs: What is told of each of them, if that is asked for.
        text: What may be shown of the text so far.
        reason: ``"stop"`` or ``"length"`` once it has ended, ``"cancelled"`` if nobody wants it any more.
        error: What went wrong, if it has ended so.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Body,
        additions: dict[int, Addition],
        tokenizer: Any,
        tell: Callable[[], None],
        seed: int,
        start: int = 0,
    ) -> None:
        self.prompt, self.sampling, self.additions, self.start = prompt, sampling, additions, start
        self._tokenizer, self._tell = tokenizer, tell
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.text = ""
        self.reason: str | None = None
        self.error: Exception | None = None
        self._ends: frozenset[int] = frozenset()
        self._processors: Any = ()

    def prepare(self, module: Any) -> None:
        """Take from a model of transformers which tokens end a text, and what its ``generation_config`` asks for besides sampling."""
        ends = module.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])
        # As `generate` does it: there is no public way to the processors of a configuration.
        length = len(self.prompt)
        options = {"do_sample": False, "num_beams": 1, "max_length": length + self.sampling.max_tokens}
        config = module._prepare_generation_config(None, **options)[0]
        module._prepare_special_tokens(config, True, device=module.device)
        ids = torch.tensor([self.prompt], device=module.device)
        self._processors = module._get_logits_processor(config, length, ids, device=module.device, model_kwargs={})

    @property
    def takes_likeliest(self) -> bool:
        """Whether its token is that of the largest logit, as the model gives them."""
        sampling = self.sampling
        changes = bool(self._processors or sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias)
        return self.is_over or (sampling.is_greedy and not changes)

    @property
    def is_over(self) -> bool:
        """Whether it gets no more tokens."""
        return self.reason is not None or self.error is not None

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Add a token that was chosen from ``logits``, ``[vocabulary]``, those of the model; do nothing if it is over."""
        if self.is_over:
            return
        if token in self._ends:
            self._end("stop")
            return
        if self.sampling.likely is not None:
            self._note(token, logits.float().log_softmax(-1).clamp_min(-9999.0), self.sampling.likely)  # JSON has no infinity
        self.tokens.append(token)
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        found = [place for place in (text.find(stop) for stop in self.sampling.stop) if place >= 0]
        if found:
            self.text = text[: min(found)]
            self._end("stop", whole=False)
        elif len(self.tokens) >= self.sampling.max_tokens:
            self._end("length")
        else:  # the end may be part of a character, or of a text to stop at
            held = max((len(stop) - 1 for stop in self.sampling.stop), default=0)
            shown = text.rstrip("\ufffd") if text.endswith("\ufffd") else text
            shown = shown[: len(shown) - held] if held else shown
            if len(shown) > len(self.text):
                self.text = shown
                self._tell()

    def _note(self, token: int, logs: torch.Tensor, count: int) -> None:
        likely = zip(*(found.tolist() for found in logs.topk(min(count, len(logs)))), strict=True)
        beside = [(self._tokenizer.decode([other]), value) for value, other in likely]
        offset = self.logprobs[-1].offset + len(self.logprobs[-1].text) if self.logprobs else 0
        self.logprobs.append(Logprob(self._tokenizer.decode([token]), logs[token].item(), beside, offset))

    def cancel(self) -> None:
        """End it, because nobody wants it any more."""
        if not self.is_over:
            self.reason = "cancelled"

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        if not self.is_over:
            self.error = error
            self._tell()

    def _end(self, reason: str, whole: bool = True) -> None:
        if whole:
            self.text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        self.reason = reason
        self._tell()

    def chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 ``[vocabulary]``, whose largest one is the token that is drawn.

        Noise from the Gumbel distribution is added: the largest sum is then distributed as a draw from the softmax, whatever else is in the
        batch (Gumbel 1954; https://arxiv.org/abs/1611.01144).
        """
        sampling = self.sampling
        if self._processors:
            ids = torch.tensor([[*self.prompt, *self.tokens]], device=logits.device)
            logits = self._processors(ids, logits[None])[0]
        if sampling.presence_penalty or sampling.frequency_penalty:
            made, counts = torch.tensor(self.tokens, dtype=torch.int64, device=logits.device).unique(return_counts=True)
            logits[made] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        for token, amount in sampling.logit_bias.items():
            logits[token] += amount
        if sampling.is_greedy:
            return logits
        row = logits[None] / sampling.temperature
        if sampling.top_k > 0:
            row = TopKLogitsWarper(sampling.top_k)(None, row)
        if sampling.top_p < 1.0:
            row = TopPLogitsWarper(sampling.top_p)(None, row)
        logits = row[0]
        uniform = torch.rand(len(logits), generator=self.generator).clamp_min(1e-20).to(logits.device)
        return logits - (-uniform.log()).log()
