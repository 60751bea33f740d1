"""Generates answers, several of them in one batch, each steered in its own way.

One thread generates. It takes what waits, up to a number of answers, pads the prompts on the left to one length, and runs ``generate`` of
transformers. Each answer has its own way of choosing tokens, and its own end. Those that come meanwhile wait for the next batch.

Directions are parameters of an edit, ``[batch, layers, hidden]``: each row of a batch has its own. The edit is the same at each step, so a
compiled model runs no Python of it, and other directions compile nothing. Layers that were steered before are steered by zeros where nobody
asks for them, and a batch of a compiled model has 1, 2, 4, ... rows, filled up with copies of the last one: so there are few kinds of
batches, whatever is asked for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from ...modeling.language import LanguageModel
from ...steering.layers import hidden_of, read, with_hidden, write
from .answers import Answer

_log = logging.getLogger("nnsight.remote.server")

#: How long the thread waits for further answers after the first one, in seconds.
_GATHERING = 0.002


class Steered:
    """A copy of ``model`` that steers ``rows`` rows at ``layers``, and removes ``rank`` directions from each; all are zeros at first."""

    def __init__(self, model: LanguageModel, at: str, layers: Sequence[int], rows: int, rank: int, hidden: int) -> None:
        like = next(iter(model._module.parameters()))
        self.layers = layers
        self.add = add = torch.zeros(rows, len(layers), hidden, dtype=like.dtype, device=like.device)
        self.remove = remove = torch.zeros(rows, len(layers), rank, hidden, dtype=like.dtype, device=like.device)
        paths = [f"{at}.{layer}" for layer in layers]
        with model.edit() as (tracer, edited):
            for _ in tracer.iter[:]:
                for number, path in enumerate(paths):
                    layer = edited.get(path)
                    output = read(layer)
                    state = hidden_of(output)
                    if rank:
                        basis = remove[:, number]
                        state = state - (state @ basis.transpose(1, 2)) @ basis
                    write(layer, with_hidden(output, state + add[:, number, None]))
        if model._compile_by_default:
            edited.compile()
        self.model = edited

    def set(self, answers: Sequence[Answer]) -> None:
        """Take the directions of ``answers``, one for each row."""
        self.add.zero_()
        self.remove.zero_()
        for row, answer in enumerate(answers):
            for layer, addition in answer.additions.items():
                place = self.layers.index(layer)
                if addition.add is not None:
                    self.add[row, place] = addition.add.to(self.add)
                if addition.remove is not None:
                    self.remove[row, place, : len(addition.remove)] = addition.remove.to(self.remove)


class Generator:
    """Answers for one model, which belongs to this process.

    ``at`` is the path of its layers, ``most`` the rows of a batch, and ``longest`` how many positions a row may have.
    """

    def __init__(self, model: LanguageModel, at: str, most: int, longest: int) -> None:
        self._model, self._at, self._most, self._longest = model, at, most, longest
        self._held: Answer | None = None  # the next one, which did not fit into the batch before
        self._waiting: queue.Queue[Answer] = queue.Queue()
        self._steered: dict[int, Steered] = {}  # by the number of rows
        self._layers: set[int] = set()  # those that were steered so far
        self._rank = 0  # and how many directions were removed at most
        self._thread = threading.Thread(target=self._work, name="nnsight-openai", daemon=True)
        self._thread.start()

    def submit(self, answer: Answer) -> None:
        """Let an answer be generated."""
        self._waiting.put(answer)

    def _work(self) -> None:
        while True:
            answers, self._held = [self._held or self._waiting.get()], None
            time.sleep(_GATHERING)
            while len(answers) < self._most and self._held is None:
                try:
                    found = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if self._fit([*answers, found]):
                    answers.append(found)
                else:
                    self._held = found
            try:
                self._generate([answer for answer in answers if not answer.is_over])
            except Exception as error:
                _log.exception("a batch failed")
                for answer in answers:
                    answer.fail(error)

    def _fit(self, answers: list[Answer]) -> bool:
        """Whether no row gets more positions than it may have: those that have ended are computed up to the end of the batch."""
        return max(len(answer.prompt) for answer in answers) + max(answer.sampling.max_tokens for answer in answers) <= self._longest

    @torch.no_grad()
    def _generate(self, answers: list[Answer]) -> None:
        if not answers:
            return
        model: Any = self._model
        rows = list(answers)
        if model._compile_by_default:
            rows += [answers[-1]] * ((1 << (len(answers) - 1).bit_length()) - len(answers))
        longest = max(len(answer.prompt) for answer in rows)
        config = model._module.generation_config
        ends = config.eos_token_id
        known = frozenset([ends] if isinstance(ends, int) else ends or [])
        pad = model._pad_id()
        ids = torch.full((len(rows), longest), pad)
        mask = torch.zeros_like(ids)
        for row, answer in enumerate(rows):
            ids[row, longest - len(answer.prompt) :] = torch.tensor(answer.prompt)
            mask[row, longest - len(answer.prompt) :] = 1
        options: dict[str, Any] = {"cache_implementation": "static"} if model._compile_by_default else {}
        self._of(rows).generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(answer.sampling.max_tokens for answer in answers),
            do_sample=False,
            num_beams=1,
            eos_token_id=None,  # each answer ends by itself
            pad_token_id=pad,
            streamer=_Tokens(answers, known),
            logits_processor=[_Choosing(answers)],
            stopping_criteria=[_Ending(answers, len(rows))],
            **options,
        )

    def _of(self, rows: list[Answer]) -> Any:
        """Return the model, steered as ``rows`` are."""
        asked = {layer for answer in rows for layer in answer.additions}
        if not asked:
            return self._model
        found = [addition for answer in rows for addition in answer.additions.values()]
        rank = max(0 if addition.remove is None else len(addition.remove) for addition in found)
        if not asked <= self._layers or rank > self._rank:
            self._layers, self._rank = self._layers | asked, max(self._rank, rank)
            self._steered.clear()
        steered = self._steered.get(len(rows))
        if steered is None:
            hidden = next(part.shape[-1] for addition in found for part in addition if part is not None)
            steered = Steered(self._model, self._at, sorted(self._layers), len(rows), self._rank, hidden)
            self._steered[len(rows)] = steered
        steered.set(rows)
        return steered.model


class _Tokens:
    """Hands the tokens of a batch to its answers; a streamer of transformers."""

    def __init__(self, answers: list[Answer], ends: frozenset[int]) -> None:
        self._answers, self._ends, self._has_prompt = answers, ends, False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        for answer, token in zip(self._answers, value.tolist(), strict=False):  # behind them are rows that fill the batch
            answer.add(token, self._ends)

    def end(self) -> None:
        """Nothing is left to hand on."""


class _Choosing:
    """Gives each row the logits whose largest one is the token that its answer draws; a logits processor of transformers."""

    def __init__(self, answers: list[Answer]) -> None:
        self._answers = answers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if all(answer.sampling.is_greedy for answer in self._answers):
            return scores
        chosen = scores.float().clone()
        for row, answer in enumerate(self._answers):
            if not answer.is_over:
                chosen[row] = answer.chosen(chosen[row])
        return chosen


class _Ending:
    """Says which rows have ended; a stopping criterion of transformers."""

    def __init__(self, answers: list[Answer], rows: int) -> None:
        self._answers, self._rows = answers, rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        over = [answer.is_over for answer in self._answers]
        return torch.tensor([*over, *[True] * (self._rows - len(over))], device=input_ids.device)
