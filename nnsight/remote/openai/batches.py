"""Generates answers in one running batch, which they join and leave at any step, each steered in its own way.

One thread generates. A new answer is computed alone up to its first token, then it joins: from there on each call of the model makes one
token for each answer (:mod:`.joined` has their keys and values). Between two such steps one answer joins at most, so those that run
wait for one prompt, not for all. When none is left, the memory is released.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...modeling.language import LanguageModel
from .completions import Completion
from .joined import JoinedCache
from .steered import ServedModel

_log = logging.getLogger("nnsight.remote.server")

#: What models call their cache, as an argument and in what they return.
_CACHES = ("past_key_values", "cache", "cache_params")

#: How far apart logits are, in parts of their norm, that are not of the same text. Rounding in half precision is some percent, and more
#: where it chooses experts.
_FAR = 0.4


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
        self._sees_all = getattr(self._module, "_can_compile_fullgraph", False)  # whether it works with caches of a fixed size
        self._check(model._compile_by_default)
        self._joined: JoinedCache | None = None
        self._waiting: queue.Queue[Completion] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="nnsight-openai", daemon=True)
        self._thread.start()

    def submit(self, answer: Completion) -> None:
        """Let an answer be generated."""
        self._waiting.put(answer)

    @torch.no_grad()
    def _check(self, compiled: bool) -> None:
        """Raise a ``ValueError`` if the model does not compute in a joined cache what it computes alone: see it for two short texts."""
        texts, joined = [[1, 2, 3, 4, 5, 6], [6, 5, 1]], None
        try:
            if getattr(self._module.config, "is_encoder_decoder", False) or not self._cache_name or not hasattr(self._module, "generate"):
                raise ValueError("it is no decoder that generates with a cache")
            for text in texts:
                alone = self._call(self._module, [text[:-1]], [0], torch.ones(1, len(text) - 1)).get(self._cache_name)
                joined = joined or JoinedCache(alone, 2, self._longest, self._sees_all)
                joined.add(text, alone, len(text) - 1)
            assert joined is not None
            joined.make_room()
            if compiled and joined.mask is not None and not self._sees_all:
                raise ValueError("transformers does not compile it with a cache of a fixed size; serve it without --compile")
            found = self._call(self._module, [text[-1:] for text in texts], joined.lengths, joined.mask, joined.cache).logits[:, -1]
            due = torch.stack([self._call(self._module, [text], [0], torch.ones(1, len(text))).logits[0, -1] for text in texts])
            if not (found - due).float().norm() < _FAR * (due - due.mean()).float().norm():
                raise ValueError("it computes something else if the cache of a text is padded")
        except Exception as error:  # whatever the model raises
            raise ValueError(
                f"{type(self._module).__name__} cannot be served with --openai: {error}. What is served is decoders whose caches have keys "
                "and values, or states of convolutions and linear attention, for each layer. Without --openai, programs are served."
            ) from error

    def _call(self, model: Any, ids: Sequence[Sequence[int]], positions: Sequence[int], mask: Any, cache: Any = None) -> Any:
        """Call a model with ``ids``, ``[rows][tokens]``, whose first ones are at ``positions``."""
        tokens = torch.tensor(ids)
        places = torch.tensor(positions)[:, None] + torch.arange(tokens.shape[1])
        given: dict[str, Any] = {"input_ids": tokens, "position_ids": places, "attention_mask": None if mask is None else mask.long()}
        given = {name: value if value is None else value.to(self._module.device) for name, value in given.items()}
        given |= {"use_cache": True, "logits_to_keep": 1} | ({} if cache is None else {self._cache_name: cache})
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
        with _failing_alone(answer):
            answer.prepare(self._module)
            length = len(answer.prompt)
            model = self._served.of([answer], [0], is_prompt=True)
            output = self._call(model, [answer.prompt], [0], torch.ones(1, length))
            self._choose([answer], output.logits)
        if answer.is_over:
            return
        alone = output[self._cache_name]
        try:
            if joined is None:
                joined = self._joined = JoinedCache(alone, self._most, self._longest, self._sees_all)
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

    def _choose(self, answers: Sequence[Completion | None], logits: torch.Tensor) -> None:
        """Add a token to each answer, from ``logits``, ``[rows, tokens, vocabulary]``."""
        scores = logits[:, -1].to(torch.float32, copy=True)
        for row, answer in enumerate(answers):
            if answer is not None and not answer.takes_likeliest:
                with _failing_alone(answer):
                    scores[row] = answer.chosen(scores[row])
        for row, (answer, token) in enumerate(zip(answers, scores.argmax(-1).tolist(), strict=True)):
            if answer is not None:
                with _failing_alone(answer):
                    answer.add(token, logits[row, -1])


@contextlib.contextmanager
def _failing_alone(answer: Completion) -> Iterator[None]:
    """Let an error be that of one answer."""
    try:
        yield
    except Exception as error:
        _log.exception("an answer failed")
        answer.fail(error)
