"""An engine that serves two thousand requests of all kinds, many at a time: the right tokens for each, and nothing left of any.

``python -m pytest -m vllm -s tests/vllm/test_soak.py`` prints what was counted on the way.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import gc
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight import LanguageModel, Program
from nnsight.runtime.mediator import Mediator
from nnsight.vllm import VLLM
from nnsight.vllm.asynchronous import Stream
from nnsight.vllm.samples import Request
from nnsight.vllm.worker.requests import RequestRun

from .llama import GREEDY, OPTIONS, adding, close, generated, states, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_environment"), pytest.mark.filterwarnings("ignore:The loop ended")]

#: How many requests are under way at a time; and rows of the longest step.
WORKERS, ROWS = 24, 320
#: Prompts by number: two of them begin alike, for as long as prefixes are cached, and one is short.
PROMPTS = [[*range(40, 180), 7], [*range(40, 180), 8, 9], [300, 301, 302], list(range(200, 260))]
#: Which layer is edited by which kind of request, and by which multiples of the vector.
EDITED = {"plain": (2, [0.0]), "steered": (2, [1.0, -1.0, 2.0]), "samples": (2, [1.0, 3.0]), "handoff": (1, [1.0, -2.0])}
EDITED |= {"program": (2, [1.0, -1.0]), "brought": (1, [1.0, -2.0])}
KINDS = [*EDITED, "misused", "steered", "capturing", "capturing", "failing", "left", "cancelled", "refused"]

LAYOUTS: dict[str, dict[str, Any]] = {
    "graph": {"edits": {"modules": ["model.layers.2"], "slots": 8}, "taps": ["model.layers.1"], "captures": ["model.layers.3"]},
    "modules": {},
}


class Soak:
    """Sends requests of random kinds to a model, and looks at what comes back.

    Args:
        model: The model, whose traces are awaited.
        reference: The same model of transformers.
        vector: What requests are steered with.
        seed: Of the kinds and their order.
    """

    def __init__(self, model: VLLM, reference: LanguageModel, vector: torch.Tensor, seed: int = 0) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.vector = vector
        self.done: collections.Counter[str] = collections.Counter()
        self.programs = {layer: pushing(reference, layer, vector) for layer in (1, 2)}
        self.expected = {
            (layer, coefficient, number): generated(reference, prompt, {layer: adding(coefficient * vector)})
            for layer, coefficients in EDITED.values()
            for coefficient in coefficients
            for number, prompt in enumerate(PROMPTS)
        }
        self.states = [
            states(reference, [*prompt, *self.expected[2, 0.0, number][:-1]])[3] for number, prompt in enumerate(PROMPTS)
        ]

    async def run(self, count: int) -> None:
        """Send ``count`` requests, some at a time."""
        kinds = iter([self.random.choice(KINDS) for _ in range(count)])
        await asyncio.gather(*(self._work(kinds) for _ in range(WORKERS)))

    async def _work(self, kinds: Iterator[str]) -> None:
        for kind in kinds:
            number = self.random.randrange(len(PROMPTS))
            await getattr(self, f"_{kind}")(number, PROMPTS[number])
            self.done[kind] += 1

    def _choice_of(self, kind: str, number: int) -> tuple[float, list[int]]:
        layer, coefficients = EDITED[kind]
        coefficient = self.random.choice(coefficients)
        return coefficient, self.expected[layer, coefficient, number]

    def _edit_of(self, kind: str, number: int) -> tuple[torch.Tensor, list[int]]:
        coefficient, expected = self._choice_of(kind, number)
        return coefficient * self.vector, expected

    async def _plain(self, number: int, prompt: list[int]) -> None:
        assert tokens(await self.model(prompt, **GREEDY)) == self.expected[2, 0.0, number]

    async def _steered(self, number: int, prompt: list[int]) -> None:
        model = self.model
        added, expected = self._edit_of("steered", number)
        with model.trace(prompt, **GREEDY) as tracer:
            model.model.layers[2].steer(add=added)
        assert tokens(await tracer.backend()) == expected

    async def _samples(self, number: int, prompt: list[int]) -> None:
        model = self.model
        added, expected = self._edit_of("samples", number)
        with model.trace(prompt, n=2, **{**GREEDY, "temperature": 1.0, "top_k": 1}) as tracer:
            model.model.layers[2].steer(add=added)
        output = await tracer.backend()
        assert [list(sample.token_ids) for sample in output.outputs] == [expected] * 2

    async def _handoff(self, number: int, prompt: list[int]) -> None:
        model = self.model
        added, expected = self._edit_of("handoff", number)
        with model.trace(prompt, **GREEDY) as tracer:
            for _ in tracer.iter[:6]:
                model.model.layers[1].residual += added
        assert tokens(await tracer.backend()) == expected

    async def _program(self, number: int, prompt: list[int]) -> None:
        """A program in the graph, or, in an engine without one, of the request."""
        model = self.model
        alpha, expected = self._choice_of("program", number)
        with model.trace(prompt, **GREEDY) as tracer:
            model.steer("push" if model._programs else self.programs[2], alpha=alpha)
        assert tokens(await tracer.backend()) == expected

    async def _brought(self, number: int, prompt: list[int]) -> None:
        model = self.model
        alpha, expected = self._choice_of("brought", number)
        with model.trace(prompt, **GREEDY) as tracer:
            model.steer(self.programs[1], alpha=alpha)
        assert tokens(await tracer.backend()) == expected

    async def _misused(self, number: int, prompt: list[int]) -> None:
        model = self.model
        with model.trace(prompt, **GREEDY) as tracer:
            model.steer(self.programs[1], beta=1.0)
        with pytest.raises(ValueError, match="has no parameter 'beta'"):
            await tracer.backend()

    async def _capturing(self, number: int, prompt: list[int]) -> None:
        model = self.model
        with model.trace(prompt, **GREEDY) as tracer:
            states = [].save()
            for _ in tracer.iter[:6]:
                states.append(model.model.layers[3].residual)
        output = await tracer.backend()
        assert tokens(output) == self.expected[2, 0.0, number]
        close(torch.cat(output.saves["states"]), self.states[number])

    async def _failing(self, number: int, prompt: list[int]) -> None:
        model, last = self.model, self.random.randrange(6)
        with model.trace(prompt, **GREEDY) as tracer:
            states = [].save()
            for step in tracer.iter[:6]:
                states.append(model.model.layers[3].residual)
                if step == last:
                    raise ArithmeticError(f"step {step}")
        with pytest.raises(ArithmeticError, match=f"step {last}"):
            await tracer.backend()

    async def _left(self, number: int, prompt: list[int]) -> None:
        model = self.model
        with model.trace(prompt, **{**GREEDY, "max_tokens": 40}) as tracer:
            model.model.layers[2].steer(add=self.vector)
            for _ in tracer.iter[:]:
                model.model.layers[3].residual  # noqa: B018
        async with tracer.backend() as stream:
            async for output in stream:
                if len(tokens(output)) >= 2:
                    break

    async def _cancelled(self, number: int, prompt: list[int]) -> None:
        stream = self.model(prompt, **{**GREEDY, "max_tokens": 40})

        async def wait() -> Any:
            return await stream

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(self.random.random() / 50)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def _refused(self, number: int, prompt: list[int]) -> None:
        with self.model.trace([1] * 300, **GREEDY) as tracer:
            self.model.logits.output  # noqa: B018
        with pytest.raises(ValueError, match="vLLM refuses the request"):
            await tracer.backend()


def pushing(reference: LanguageModel, layer: int, vector: torch.Tensor) -> Program:
    """Return a program that adds the vector after a layer, times its parameter."""
    alpha = 1.0
    with reference.trace("A", remote="program") as tracer:
        reference.model.layers[layer].output[:] += alpha * vector
    return tracer.program


def left_of(model: VLLM) -> dict[str, int]:
    """Return what engine and process have left of requests that have ended."""
    gc.collect()
    engine = model._engine
    assert engine is not None
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    counts = collections.Counter(type(found).__name__ for found in gc.get_objects() if type(found) in _OURS)
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "runs of the runner": len(engine._runner.bookkeeping.runs) + len(engine._runner.bookkeeping.slots),
        "entries": engine.entries.in_use,
        "unfinished": len(scheduler.requests) + engine.llm.llm_engine.get_num_unfinished_requests(),
        "blocks of the cache": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is vLLM's own
        **{name: counts[name] for name in sorted(kind.__name__ for kind in _OURS)},
    }


_OURS = {Stream, RequestRun, Request, Mediator}


def resident() -> float:
    """Return the memory of this process that is resident, in MB, without what its allocator only keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize(("layout", "rounds"), [("graph", 8), ("modules", 2)])
def test_two_thousand_requests_leave_nothing(
    folder: Path, reference: LanguageModel, vector: torch.Tensor, layout: str, rounds: int
) -> None:
    options = {**OPTIONS, "kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": ROWS, "max_num_seqs": 16}
    programs = {"push": pushing(reference, 2, vector)} if layout == "graph" else None
    model = VLLM(folder, **options, **LAYOUTS[layout], programs=programs, mode="async", dispatch=True)
    for rows in range(1, ROWS + 1):  # kernels on CPUs are made and kept for each number of rows
        model._engine._runner._dummy_run(rows)
    soak = Soak(model, reference, vector)
    sizes, tensors = [], []
    for _ in range(rounds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asyncio.run(soak.run(250))
        while model._engine_thread._thread is not None:
            model._engine_thread._thread.join()
        left = left_of(model)
        sizes.append(round(resident(), 1))
        tensors.append(sum(isinstance(found, torch.Tensor) for found in gc.get_objects()))
        print(f"{sum(soak.done.values())} requests: {sizes[-1]} MB resident, {tensors[-1]} tensors, left: {left}")
    assert set(soak.done) == set(KINDS)
    assert sum(soak.done.values()) == 250 * rounds
    assert not any(left.values()), left
    assert tensors[-1] <= tensors[0] + 4, tensors  # the last step may have left one or two
    assert sizes[-1] - sizes[rounds // 4] < 8, sizes  # a hidden state that stays of every third request would be more
