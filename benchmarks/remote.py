"""What it costs to run a block on a server: ratios measured in one run.

The server is a process of its own on this machine (``nnsight serve nnsight/demo``), so the numbers have the protocol, the
recording of the block and its checks in them, and no network. Measured:

* the time of a blocking steering trace on the server, over the same trace here: median, interleaved in shuffled order;
* jobs per second with 32 clients that submit jobs recorded before, where jobs share forward passes (``--together 32``), over a
  server that runs each alone (``--together 1``); batches of the two servers take turns.

``python benchmarks/remote.py [--rounds N] [--quick]`` prints a table and writes ``benchmarks/results/remote.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

import nnsight
from nnsight import CONFIG
from nnsight.remote.backend import ProgramBackend
from nnsight.remote.client import Client
from nnsight.remote.results import decode_results

RESULTS = Path(__file__).parent / "results" / "remote.json"
PROMPT = "The Eiffel Tower is in the city of"
KEY = "nnsight/demo"


@contextlib.contextmanager
def server(together: int, keep: float = 3600) -> Iterator[tuple[str, int]]:
    """Run a server in a process of its own, which keeps results for so many seconds; yield its address and the number of the process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as spool:
        # The account without a key has a queue for a few clients; 32 need a key of their own.
        keys = Path(spool) / "keys.json"
        command = [sys.executable, "-m", "nnsight.cli"]
        given = subprocess.run(
            [*command, "keys", "add", str(keys), "--name", "bench", "--queue", "1000"], capture_output=True, text=True, check=True
        )
        os.environ["NDIF_API_KEY"] = given.stdout.strip()
        options = ["--port", str(port), "--spool", f"{spool}/jobs", "--together", str(together), "--api-keys", str(keys)]
        options += ["--keep", str(keep)]
        process = subprocess.Popen([*command, "serve", KEY, *options], stderr=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}"
        try:
            Client(address, patience=120.0).status()
            yield address, process.pid
        finally:
            process.terminate()
            process.wait()


class Recording(ProgramBackend):
    """Keeps the payload of a block and runs nothing."""

    def submit(self, recorded: Any) -> None:
        self.payload = recorded.payload()


def payloads(model: Any, count: int) -> list[bytes]:
    """Return steering programs of several users: one prompt length, other layers and directions."""
    made = []
    for number in range(count):
        direction, layer, backend = torch.randn(model.config.n_embd), number % 4, Recording()
        with model.trace(PROMPT, backend=backend):
            model.transformer.h[layer].output[:, -1] += 4.0 * direction
            logits = model.lm_head.output[:, -1].save()  # noqa: F841 - what has a name is sent back
        made.append(backend.payload)
    return made


def latency(model: Any, address: str, rounds: int) -> dict[str, float]:
    """Return the median seconds of a steering trace, here and on the server."""
    direction = torch.randn(model.config.n_embd)

    def run(**where: Any) -> None:
        with model.trace(PROMPT, **where):
            model.transformer.h[2].output[:, -1] += 4.0 * direction
            logits = model.lm_head.output[:, -1].save()  # noqa: F841 - what has a name is sent back

    contenders: dict[str, Callable[[], None]] = {
        "here": run,
        "here, as data": lambda: run(remote="local"),
        "server": lambda: run(remote=address),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in tqdm(range(rounds + 3), desc="latency"):
        for name in random.sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            contenders[name]()
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def burst(client: Client, jobs: list[bytes], clients: int) -> float:
    """Run ``jobs`` from as many threads as ``clients``; return jobs per second."""
    left = list(jobs)
    lock = threading.Lock()
    failures: list[str] = []

    def work() -> None:
        while True:
            with lock:
                if not left:
                    return
                job = left.pop()
            message, result = list(client.run(job, KEY))[-1]
            if message["status"] != "COMPLETED" or not decode_results(client.result(message["id"]) if result is None else result):
                failures.append(message["description"])

    threads = [threading.Thread(target=work) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    return len(jobs) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works; writes nothing")
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    CONFIG.APP.REMOTE_LOGGING = False
    torch.manual_seed(0)
    random.seed(0)
    model = nnsight.demo_model()
    with server(1) as (alone_at, _):
        alone = Client(alone_at)
        seconds = latency(model, alone_at, rounds)
        jobs = payloads(model, 64)
        with server(32) as (together_at, _):
            together = Client(together_at)
            rates: dict[str, list[float]] = {"alone": [], "together": []}
            for turn in tqdm(range(2 if options.quick else 4), desc="throughput"):
                for name, client in random.sample([("alone", alone), ("together", together)], 2):
                    rate = burst(client, jobs, 32)
                    if turn:
                        rates[name].append(rate)
    rate = {name: statistics.median(found) for name, found in rates.items()}
    found = {
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {"nnsight": nnsight.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "command": f"python benchmarks/remote.py --rounds {rounds}",
        "rounds": rounds,
        "milliseconds": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "added_milliseconds": round(1e3 * (seconds["server"] - seconds["here"]), 2),
        "server_over_here": round(seconds["server"] / seconds["here"], 2),
        "jobs_per_second": {name: round(value, 1) for name, value in rate.items()},
        "together_over_alone": round(rate["together"] / rate["alone"], 2),
    }
    print(json.dumps(found, indent=2))
    if not options.quick:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
