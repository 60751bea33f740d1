"""What blocks cost in a vLLM engine, as ratios of decoding time to engines without them.

The model of this package (GPT-2, 6 layers, width 128, fp32: so small that nearly all time is the engine's own) on a CPU. Eight
requests at once, all of the same length; in turn, in every round and in random order, each contender generates the same tokens:

* ``plain``: vLLM compiled, without this package;
* ``plain, eager``: vLLM that compiles nothing, likewise;
* ``tables, idle``: compiled with tables for edits at all layers, no request steered;
* ``tables``: the same, half of the requests steered at one layer, with two vectors;
* ``taps, idle``: compiled with a tap at every layer, no request with a block;
* ``taps``: the same, half of the requests with a block that adds a vector at one layer;
* ``captures, idle``: compiled with captures of every layer, no request with a block;
* ``captures of one layer``, ``of all``: the same, half of the requests with a block that saves one hidden state, or all, at each token;
* ``blocks, eager``: the same blocks as ``taps`` in an engine that compiles nothing.

``python benchmarks/vllm_engine.py [--rounds N] [--tokens N]`` prints a table and writes ``benchmarks/results/vllm_engine.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from machine import machine_check

from nnsight import demo
from nnsight.modeling.vllm import VLLM

RESULTS = Path(__file__).parent / "results" / "vllm_engine.json"
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}
PROMPTS = [f"{place} is in the city of" for place in list(demo.FACTS)[:8]]


def without_blocks(model: VLLM, sampling: dict[str, Any]) -> None:
    """Run the requests as plain ones, past this package's traces."""
    from vllm import SamplingParams

    model.engine.generate(PROMPTS, SamplingParams(**sampling), use_tqdm=False)


def with_edits(model: VLLM, sampling: dict[str, Any], vectors: list[torch.Tensor], steer: bool) -> None:
    """Run the requests, every other one with a vector added at layer 3: by parameters, or by a block."""
    with model.trace(**sampling) as tracer:
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                if number % 2 == 0 and steer:
                    model.transformer.h[3].steer(add=vectors[number % 4 // 2])
                elif number % 2 == 0:
                    for _ in tracer.iter[: sampling["max_tokens"]]:
                        model.transformer.h[3].residual += vectors[number % 4 // 2]


def with_reads(model: VLLM, sampling: dict[str, Any], layers: list[int]) -> None:
    """Run the requests, every other one with a block that saves the hidden states after some layers."""
    with model.trace(**sampling) as tracer:
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                if number % 2 == 0:
                    kept = [].save()
                    for _ in tracer.iter[: sampling["max_tokens"]]:
                        for layer in layers:
                            kept.append(model.transformer.h[layer].residual)


def contenders(sampling: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """Start the engines; return what each contender does in a round."""
    vectors = [torch.randn(128, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    # A tap that no request uses would still be in the graph: the plain engine is one of vLLM's own.
    plain = _Plain(enforce_eager=False)
    eager = VLLM("nnsight/demo", **OPTIONS)
    tables = VLLM("nnsight/demo", **OPTIONS, edits=["transformer.h.*"])
    taps = VLLM("nnsight/demo", **OPTIONS, taps=["transformer.h.*"])
    captures = VLLM("nnsight/demo", **OPTIONS, captures=["transformer.h.*"])
    return {
        "plain": lambda: without_blocks(plain, sampling),  # type: ignore[arg-type]
        "plain, eager": lambda: without_blocks(eager, sampling),
        "tables, idle": lambda: without_blocks(tables, sampling),
        "tables": lambda: with_edits(tables, sampling, vectors, steer=True),
        "taps, idle": lambda: without_blocks(taps, sampling),
        "taps": lambda: with_edits(taps, sampling, vectors, steer=False),
        "captures, idle": lambda: without_blocks(captures, sampling),
        "captures of one layer": lambda: with_reads(captures, sampling, [3]),
        "captures of all": lambda: with_reads(captures, sampling, list(range(6))),
        "blocks, eager": lambda: with_edits(eager, sampling, vectors, steer=False),
    }


class _Plain:
    """An engine of vLLM's own."""

    def __init__(self, **options: Any) -> None:
        from vllm import LLM

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.engine = LLM(demo.path(), **OPTIONS, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    sampling = {"temperature": 0.0, "max_tokens": arguments.tokens, "ignore_eos": True}
    runs = contenders(sampling)
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name in random.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    print(f"{'contender':22} {'ratio to plain':>15} {'quartiles':>16}   (paired, {arguments.rounds} rounds)")
    table = {}
    for name, found in times.items():
        ratios = [mine / plain for mine, plain in zip(found, times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table[name] = {"ratio": middle, "quartiles": [low, high], "median_s": statistics.median(found)}
        print(f"{name:22} {middle:15.2f} {f'{low:.2f} .. {high:.2f}':>16}")
    import vllm

    RESULTS.parent.mkdir(exist_ok=True)
    machine = {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "machine_check": machine_check(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }
    RESULTS.write_text(
        json.dumps({**machine, **vars(arguments), "contenders": table}, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
