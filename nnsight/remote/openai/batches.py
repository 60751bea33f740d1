"""Generates answers in one running batch, which they join and leave at any step, each steered in its own way.

One thread generates. A new answer is computed alone up to its first token, then it joins: from there on each call of the model makes one
token for each answer (:mod:`.joined` has their keys and values). Between two such steps one answer joins at most, so those that run
wait for one prompt, not for all. When none is left, the memory is released.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ...modeling.language import LanguageModel
from .answers import Answer
from .joined import JoinedCache
from .steered import ServedModel

_log = logging.getLogger("nnsight.remote.server")

#: What models call their cache, as an argument and in what they return.
_CACHES = ("past_key_values", "cache", "cache_params")


class Generator:
    """Answers for one model, which belongs to this process.

    ``at`` is the path of its layers, ``most`` the rows of a batch, and ``longest`` how many positions a row may have.

    Raises:
        ValueError: If answers of the model cannot share a batch that they join at different steps.
    """

    def __init__(self, model: LanguageModel, at: str, most: int, longest: int) -> None:
        self._module: Any = model._module
        self._served, self._most, self._longest = ServedModel(model, at), most, longest
        self._takes = inspect.signature(self._module.forward).parameters.keys()
        self._cache_name = next((name for name in _CACHES if name in self._takes), "")
        self._check()
        self._joined: JoinedCache | None = None
        self._waiting: queue.Queue[Answer] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="nnsight-openai", daemon=True)
        self._thread.start()

    def submit(self, answer: Answer) -> None:
        """Let an answer be generated."""
        self._waiting.put(answer)

    @torch.no_grad()
    def _check(self) -> None:
        """Raise a ``ValueError`` if caches of the model cannot be joined: look at the cache of one token."""
        name, why = type(self._module).__name__, ""
        if getattr(self._module.config, "is_encoder_decoder", False) or not self._cache_name:
            why = "it is an encoder and a decoder" if self._cache_name else "it takes no cache"
        else:
            cache = self._call(self._module, [[0]], [0], torch.ones(1, 1, dtype=torch.int64), None).get(self._cache_name)
            why = "" if type(cache) is DynamicCache else f"its cache is of the kind {type(cache).__name__}"
        try:
            if not why:
                JoinedCache(cache, self._most, self._longest)
        except ValueError as error:
            why = str(error)
        if why:
            raise ValueError(
                f"{name} cannot be served with --openai: {why}. What is served is decoders whose caches have keys and values, "
                "or states of convolutions and linear attention, for each layer. Leave out --openai: programs are served."
            )

    def _call(self, model: Any, ids: Sequence[Sequence[int]], positions: Sequence[int], mask: torch.Tensor, cache: Any) -> Any:
        """Call a model with ``ids``, ``[rows][tokens]``, whose first ones are at ``positions``."""
        tokens = torch.tensor(ids, device=self._module.device)
        places = torch.tensor(positions)[:, None] + torch.arange(tokens.shape[1])
        given = {
            "input_ids": tokens, "position_ids": places.to(tokens.device), "attention_mask": mask.to(tokens.device), "use_cache": True,
            "logits_to_keep": 1, **({} if cache is None else {self._cache_name: cache}),
        }  # fmt: skip
        return model(**{name: value for name, value in given.items() if name in self._takes})

    def _work(self) -> None:
        while True:
            try:
                self._admit()
                self._step()
            except Exception as error:
                _log.exception("a step of a batch failed")
                for answer in self._joined.answers if self._joined else ():
                    if answer is not None:
                        answer.fail(error)
                self._joined = None

    @torch.no_grad()
    def _admit(self) -> None:
        """Let one answer join if there is room; wait for it if there is no other."""
        joined = self._joined
        if joined is not None and sum(answer is not None for answer in joined.answers) == self._most:
            return
        try:
            answer = self._waiting.get(block=joined is None)
        except queue.Empty:
            return
        if answer.is_over:
            return
        try:
            answer.prepare(self._module)
            length = len(answer.prompt)
            model = self._served.of([answer], [0], is_prompt=True)
            output = self._call(model, [answer.prompt], [0], torch.ones(1, length, dtype=torch.int64), None)
            self._choose([answer], output.logits)
        except Exception as error:
            _log.exception("an answer failed at its prompt")
            answer.fail(error)
        if answer.is_over:
            return
        alone = output[self._cache_name]
        try:
            if joined is None:
                joined = self._joined = JoinedCache(alone, self._most, self._longest)
            joined.add(answer, alone, length)
        except Exception as error:
            answer.fail(error)
            raise

    @torch.no_grad()
    def _step(self) -> None:
        """Make one token for each answer."""
        joined = self._joined
        if joined is None:
            return
        for row, answer in enumerate(joined.answers):
            if answer is not None and answer.is_over:
                joined.remove(row)
        if not any(joined.lengths):
            self._joined = None
            return
        joined.make_room()
        model = self._served.of(joined.answers, joined.lengths, is_prompt=False)
        last = [[answer.tokens[-1] if answer else 0] for answer in joined.answers]
        output = self._call(model, last, joined.lengths, joined.mask, joined.cache)
        joined.advance()
        self._choose(joined.answers, output.logits)

    def _choose(self, answers: Sequence[Answer | None], logits: torch.Tensor) -> None:
        """Add a token to each answer, from ``logits``, ``[rows, tokens, vocabulary]``."""
        scores = logits[:, -1].to(torch.float32, copy=True)
        for row, answer in enumerate(answers):
            if answer is not None and not answer.takes_likeliest:
                try:
                    scores[row] = answer.chosen(scores[row])
                except Exception as error:
                    _log.exception("the choice of a token failed")
                    answer.fail(error)
        for answer, token in zip(answers, scores.argmax(-1).tolist(), strict=True):
            if answer is not None:
                answer.add(token)
