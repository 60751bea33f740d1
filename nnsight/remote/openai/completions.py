"""One answer during its generation: its tokens, its text so far, and the reason of its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from ...steering.choices import Addition
from .requests import Body


class Logprob(NamedTuple):
    """The log probability of a token."""

    text: str  # text of the token
    value: float  # natural logarithm of its probability
    likely: list[tuple[str, float]]  # the likeliest tokens, with their log probabilities
    offset: int  # position of the token in the text of the answer


class Completion:
    """An answer to one prompt. The generating thread adds tokens, and ``tell`` is called when the text grows and at the end.

    Attributes:
        prompt: Token ids of the prompt.
        additions: The steering, by layer.
        start: First position that is steered.
        tokens: Ids of the tokens so far, without the end token.
        logprobs: Log probabilities of these tokens, if the request asks for them.
        text: The text so far, without an end that could still change or become part of a stop text.
        reason: ``"stop"`` or ``"length"`` at the end; ``"cancelled"`` if the client is gone.
        error: The error that ended the answer, if there is one.
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
        """Read the end tokens and the logits processors from the ``generation_config`` of a model of transformers."""
        ends = module.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or [])
        # The same calls as in `generate`: transformers has no public function for the processors of a configuration.
        length = len(self.prompt)
        options = {"do_sample": False, "num_beams": 1, "max_length": length + self.sampling.max_tokens}
        config = module._prepare_generation_config(None, **options)[0]
        module._prepare_special_tokens(config, True, device=module.device)
        ids = torch.tensor([self.prompt], device=module.device)
        self._processors = module._get_logits_processor(config, length, ids, device=module.device, model_kwargs={})

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the argmax of the model's unchanged logits."""
        sampling = self.sampling
        changes = bool(self._processors or sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias)
        return self.is_over or (sampling.is_greedy and not changes)

    @property
    def is_over(self) -> bool:
        """Whether the answer gets no more tokens."""
        return self.reason is not None or self.error is not None

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Add a token. ``logits``, ``[vocabulary]``, are those of the model. Does nothing if the answer is over."""
        if self.is_over:
            return
        if token in self._ends:
            self._end("stop")
            return
        if self.sampling.likely is not None:
            self._add_logprob(token, logits.float().log_softmax(-1).clamp_min(-9999.0), self.sampling.likely)  # JSON has no infinity
        self.tokens.append(token)
        text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        found = [place for place in (text.find(stop) for stop in self.sampling.stop) if place >= 0]
        if found:
            self.text = text[: min(found)]
            self._end("stop", whole=False)
        elif len(self.tokens) >= self.sampling.max_tokens:
            self._end("length")
        else:  # the end of the text may be part of a character or of a stop text, so it is held back
            held = max((len(stop) - 1 for stop in self.sampling.stop), default=0)
            shown = text.rstrip("\ufffd") if text.endswith("\ufffd") else text
            shown = shown[: len(shown) - held] if held else shown
            if len(shown) > len(self.text):
                self.text = shown
                self._tell()

    def _add_logprob(self, token: int, logs: torch.Tensor, count: int) -> None:
        likely = zip(*(found.tolist() for found in logs.topk(min(count, len(logs)))), strict=True)
        beside = [(self._tokenizer.decode([other]), value) for value, other in likely]
        offset = self.logprobs[-1].offset + len(self.logprobs[-1].text) if self.logprobs else 0
        self.logprobs.append(Logprob(self._tokenizer.decode([token]), logs[token].item(), beside, offset))

    def cancel(self) -> None:
        """End the answer, because the client is gone."""
        if not self.is_over:
            self.reason = "cancelled"

    def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        if not self.is_over:
            self.error = error
            self._tell()

    def _end(self, reason: str, whole: bool = True) -> None:
        if whole:
            self.text = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        self.reason = reason
        self._tell()

    def chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return changed logits whose argmax is the sampled token. ``logits`` and the result are float32 ``[vocabulary]``.

        Sampling adds noise from the Gumbel distribution: then the argmax is distributed like a draw from the softmax (Gumbel 1954;
        https://arxiv.org/abs/1611.01144). So each answer has its own random numbers, independent of the rest of the batch.
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
