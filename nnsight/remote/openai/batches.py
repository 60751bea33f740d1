"""Generates answers in one running batch. Answers join and leave the batch at any step, and each has its own steering.

One thread generates. A new answer is computed alone up to its first token, and then it joins the batch. From there on, each call of the
model generates one token for each answer (:mod:`.joined` keeps their keys and values). At most one answer joins between two such steps,
so running answers wait for one prompt, not for all. After the last answer, the memory is released.
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

#: Names of the cache in the arguments and outputs of models.
_CACHES = ("past_key_values", "cache", "cache_params")

#: Relative difference from which on two logits count as logits of different texts. Rounding in half precision causes some percent, and more
#: if it changes the choice of experts.
_FAR = 0.4


class Generator:
    """Generates answers with one model of this process.

    ``at`` is the path of the model's layers, ``most`` the maximum number of rows, and ``longest`` the maximum number of positions of a row.

    Raises:
        ValueError: If answers of the model cannot join a batch at different steps.
    """

    def __init__(self, model: LanguageModel, at: str, most: int, longest: int) -> None:
        self._module: Any = model._module
        self._served, self._most, self._longest = ServedModel(model, at), most, longest
        self._takes = inspect.signature(self._module.forward).parameters.keys()
        self._cache_name = next((name for name in _CACHES if name in self._takes), "")
        self._sees_all = getattr(self._module, "_can_compile_fullgraph", False)  # whether the model accepts a cache of a fixed size
        self._check(model._compile_by_default)
        self._joined: JoinedCache | None = None
        self._waiting: queue.Queue[Completion] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="nnsight-openai", daemon=True)
        self._thread.start()

    def submit(self, answer: Completion) -> None:
        """Add an answer to the queue of the generating thread."""
        self._waiting.put(answer)

    @torch.no_grad()
    def _check(self, compiled: bool) -> None:
        """Compare the logits of two short texts in a joined cache with those of each alone. Raises a ``ValueError`` if they differ."""
        texts, joined = [[1, 2, 3, 4, 5, 6], [6, 5, 1]], None
        try:
            if getattr(self._module.config, "is_encoder_decoder", False) or not self._cache_name or not hasattr(self._module, "generate"):
                raise ValueError("it is not a decoder that generates with a cache")
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
                raise ValueError("its logits change if the cache of a text is padded")
        except Exception as error:  # the model may raise any error
            raise ValueError(
                f"{type(self._module).__name__} cannot be served with --openai: {error}. This option needs a decoder whose cache has, for "
                "each layer, keys and values, or states of convolutions or linear attention. Without --openai, programs can be served."
            ) from error

    def _call(self, model: Any, ids: Sequence[Sequence[int]], positions: Sequence[int], mask: Any, cache: Any = None) -> Any:
        """Call a model with token ids, ``[rows][tokens]``. ``positions`` are the positions of the first token of each row."""
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
        """Add one waiting answer to the batch, if there is room. If the batch is empty, wait for an answer."""
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
        """Generate one token for each answer, and remove the answers that are over."""
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
        """Choose the next token of each answer from ``logits``, ``[rows, tokens, vocabulary]``, and add it to the answer."""
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
    """Let an error in the context end ``answer`` only, and not the whole batch."""
    try:
        yield
    except Exception as error:
        _log.exception("an answer failed")
        answer.fail(error)
