"""Programs of remote clients in a vLLM engine, against the local engine of the server: ratios measured in one run.

Two servers, in separate processes on this machine, serve the same model with random weights: one with ``--engine vllm``, and one with
``--engine local``, which runs up to eight similar jobs together. 32 clients submit recorded programs: generations of 32 tokens, steered at
four different layers, each by its own vector. The servers take turns in random order, and results are compared with those of a run in this
process. Measured:

* tokens per second of the 32 clients;
* the time of a generation of one token on an idle server, and in a plain vLLM engine in this process, without a server.

``.venv-vllm/bin/python benchmarks/remote_engines.py [--rounds N] [--shape S] [--quick]`` prints a table and writes
``benchmarks/results/remote_engines.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import remote
import torch
from machine import machine_check
from tqdm.auto import tqdm
from vllm_engine import SHAPES, save_model

import nnsight
from nnsight.program.format.payload import decode, encode
from nnsight.remote.client.client import Client
from nnsight.vllm import VLLM

RESULTS = Path(__file__).parent / "results" / "remote_engines.json"
OPTIONS = {"kv_cache_memory_bytes": 256 << 20}
CLIENTS = 32
TOKENS = 32


def generations(model: Any, count: int, tokens: int) -> list[bytes]:
    """Return payloads of generations, each steered at each token at one of four layers, by its own vector."""
    remote.TOKENS = tokens
    made = []
    for number, recorded in enumerate(itertools.islice(itertools.cycle(remote.generations(model, 4)), count)):
        job = decode(recorded)
        drawn = torch.Generator().manual_seed(number)
        directions = [name for name, tensor in job.tensors.items() if tensor.is_floating_point() and tensor.dim() == 1]
        assert directions
        job.tensors |= {name: torch.randn(job.tensors[name].shape, generator=drawn) for name in directions}
        made.append(encode(job))
    return made


def first_token(client: Client, jobs: list[bytes], times: int) -> float:
    """Return the median seconds of a generation of one token on an idle server."""
    found = []
    for number in range(times + 3):
        start = time.perf_counter()
        message = list(client.run(jobs[number % len(jobs)], remote.KEY))[-1][0]
        assert message["status"] == "COMPLETED", message["description"]
        found.append(time.perf_counter() - start)
    return statistics.median(found[3:])


def engine_alone(times: int) -> float:
    """Return the median seconds in which a plain vLLM engine makes the first token of such a prompt."""
    from vllm import SamplingParams

    model, found = VLLM(remote.KEY, dtype="float32", **OPTIONS), []
    for number in range(times + 3):
        start = time.perf_counter()
        model.engine.generate(f"{remote.PROMPT} {number}", SamplingParams(max_tokens=1), use_tqdm=False)
        found.append(time.perf_counter() - start)
    return statistics.median(found[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2", help="shape of the model, which has random weights")
    parser.add_argument("--quick", action="store_true", help="one round, to check the script; writes nothing")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        remote.KEY = save_model(options.shape, folder)
        table = measured(rounds) | {"shape": options.shape}
    print(json.dumps(table, indent=1))
    if not options.quick:
        RESULTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def measured(rounds: int) -> dict[str, Any]:
    """Return the figures of ``rounds`` rounds."""
    model = nnsight.LanguageModel(remote.KEY, dispatch=True)
    jobs, short = generations(model, CLIENTS, TOKENS), generations(model, 8, 1)
    due = {job: remote.decode_results(remote.execute_payload(model, job))["logits"] for job in jobs}
    more = {"local": [], "vllm": ["--engine", "vllm", "--vllm-options", json.dumps(OPTIONS)]}
    rates: dict[str, list[float]] = {name: [] for name in more}
    with remote.server(8, more=more["local"]) as local, remote.server(8, more=more["vllm"]) as vllm:
        clients = {"local": Client(local[0]), "vllm": Client(vllm[0])}
        for turn in tqdm(range(rounds + 1), desc="tokens"):
            for name in random.sample(list(clients), len(clients)):
                rate = TOKENS * remote.burst(clients[name], jobs, CLIENTS, due)
                if turn:
                    rates[name].append(rate)
        first = {name: first_token(client, short, 5 * rounds + 5) for name, client in clients.items()}
    first["vLLM's own engine"] = engine_alone(5 * rounds + 5)
    tokens = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "tokens per second": tokens,
        "ratio": tokens["vllm"] / tokens["local"],
        "first token, ms": {name: 1000 * seconds for name, seconds in first.items()},
        "added to the first token, ms": 1000 * (first["vllm"] - first["vLLM's own engine"]),
        "machine": {"fixed work, s": machine_check(), "processor": platform.processor(), "torch": torch.__version__},
    }


if __name__ == "__main__":
    main()
