"""Admission of runs to the engine.

All rows of a batch have to be in the same steps. So a run enters the engine only when the next step has room for all of its tokens, and
when the key-value cache has room for all tokens that this run and all other runs can reach. Then the engine neither splits a batch nor
preempts a request. Runs enter in the order of their arrival.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ...program.format.errors import InvalidProgramError
from .batch import Batch
from .run import JobRun


class Room:
    """The capacity of ``engine``, vLLM's own object, and the runs that use it or wait for it."""

    def __init__(self, engine: Any) -> None:
        config = engine.vllm_config
        self._tokens, self._rows = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
        self._length, self._size = config.model_config.max_model_len, config.cache_config.block_size
        manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
        self._groups = max(len(manager.kv_cache_config.kv_cache_groups), 1)
        self._blocks = config.cache_config.num_gpu_blocks - 1  # vLLM never uses one block
        self._inside: list[JobRun] = []
        self._waiting: deque[JobRun] = deque()

    def check(self, batch: Batch) -> None:
        """Raise :class:`InvalidProgramError` if a batch is too large even for an empty engine."""
        longest, blocks = max(batch.most_tokens), self._blocks_of(batch)
        first = sum(map(len, batch.prompts))
        for what, found, most in (
            (f"{longest} tokens in a row", longest, self._length),
            (f"{len(batch.prompts)} rows", len(batch.prompts), self._rows),
            (f"{first} tokens of prompts in a step", first, self._tokens),
            (f"{blocks} blocks of its cache", blocks, self._blocks),
        ):
            if found > most:
                raise InvalidProgramError(f"The program needs {what}, and the vLLM engine of this server has {most}.")

    def ask(self, run: JobRun) -> bool:
        """Return whether a run may enter the engine now. If not, it keeps its place in the queue."""
        if run not in self._waiting:
            self._waiting.append(run)
        if self._waiting[0] is not run or not self._fits(run.batch):
            return False
        self._waiting.popleft()
        self._inside.append(run)
        return True

    def leave(self, run: JobRun) -> None:
        """Give up the room of a run, or its place in the queue."""
        for runs in (self._inside, self._waiting):
            if run in runs:
                runs.remove(run)

    def _blocks_of(self, batch: Batch) -> int:
        return self._groups * sum(-(-most // self._size) for most in batch.most_tokens)

    def _fits(self, batch: Batch) -> bool:
        """Whether the next step and the cache have room for a batch in addition to the runs inside, until all of them end."""
        begun = [row for run in self._inside for row in zip(run.batch.prompts, run.rows, strict=True) if row[1].tokens is None]
        tokens = sum(1 if row.steps else len(prompt) for prompt, row in begun) + sum(map(len, batch.prompts))
        blocks = sum(self._blocks_of(run.batch) for run in self._inside) + self._blocks_of(batch)
        return tokens <= self._tokens and len(begun) + len(batch.prompts) <= self._rows and blocks <= self._blocks
