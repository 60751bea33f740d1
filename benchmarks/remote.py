"""The cost of a block on a server: ratios measured in one run.

The server is a separate process on this machine (``nnsight serve nnsight/demo``). The figures therefore include the protocol, the
recording of the block and its checks, but no network. Measured:

* the median time of a blocking steering trace on the server, over that of the same trace in this process, interleaved in random order;
  and the time for reading the payload and checking the program;
* jobs per second of 32 clients that submit recorded jobs, on a server where jobs share forward passes (``--together 32``), over a server
  that runs each job alone (``--together 1``). The two servers take turns, and all results are compared with those of a run alone in this
  process. Three more figures limit the possible gain: the CPU time of the server for a job, which other load does not change; the time of
  a forward pass of 32 rows, in passes of one row; and the cost of jobs on a server whose engine does nothing;
* the same for jobs that generate 16 tokens, steered at each token;
* the time of fixed work, which characterizes the machine.

``python benchmarks/remote.py [--rounds N] [--quick]`` prints a table and writes ``benchmarks/results/remote.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine_check
from tqdm.auto import tqdm

import nnsight
from nnsight import CONFIG
from nnsight.program.format.payload import decode_known
from nnsight.program.format.results import decode_results
from nnsight.program.run.validation import validate
from nnsight.remote import execute_payload
from nnsight.remote.client.backend import ProgramBackend
from nnsight.remote.client.client import Client
from nnsight.remote.server.keys import hash_of

RESULTS = Path(__file__).parent / "results" / "remote.json"
PROMPT = "The Eiffel Tower is in the city of"
KEY = "nnsight/demo"
TOKENS = 16
SECRET = secrets.token_urlsafe(32)

#: A server whose engine gives the same result to every job. Only the protocol, the queue and the files cost time.
IDLE = """
import sys
from pathlib import Path
from nnsight.remote.protocol import ModelKey
from nnsight.remote.server.engine import ThreadEngine
from nnsight.remote.server.keys import KeyFile
from nnsight.remote.server.serve import serve
port, spool, keys, result = sys.argv[1:]
found = Path(result).read_bytes()
serve({ModelKey("nnsight/demo"): ThreadEngine(lambda payloads, logs: [found])}, KeyFile(Path(keys)), Path(spool), port=int(port))
"""


@contextlib.contextmanager
def server(
    together: int, keep: float = 3600, result: bytes | None = None, more: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """Run a server in a separate process that keeps results for ``keep`` seconds; yield its address and the process id.

    With ``result``, the server runs no job and returns this result for each. ``more`` are further options of the command.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as spool:
        # The account without a key has a short queue. 32 clients need a key, which is the same for all servers.
        keys = Path(spool) / "keys.json"
        os.environ["NDIF_API_KEY"] = SECRET
        keys.write_text(json.dumps({"keys": [{"name": "bench", "sha256": hash_of(SECRET), "queue": 1000}]}), encoding="utf-8")
        options = ["--port", str(port), "--spool", f"{spool}/jobs", "--together", str(together), "--api-keys", str(keys)]
        options += ["--keep", str(keep), *more]
        started = [sys.executable, "-m", "nnsight.cli", "serve", KEY, *options]
        if result is not None:
            (Path(spool) / "result").write_bytes(result)
            started = [sys.executable, "-c", IDLE, str(port), f"{spool}/jobs", str(keys), f"{spool}/result"]
        process = subprocess.Popen(started, stderr=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}"
        try:
            Client(address, patience=120.0).status()
            yield address, process.pid
        finally:
            process.terminate()
            process.wait()


class Recording(ProgramBackend):
    """Stores the payload of a block and runs nothing."""

    def submit(self, recorded: Any) -> None:
        self.payload = recorded.payload()


def payloads(model: Any, count: int) -> list[bytes]:
    """Return steering programs of several users: one prompt, with different layers and directions."""
    made = []
    for number in range(count):
        direction, layer, backend = torch.randn(model.config.n_embd), number % 4, Recording()
        with model.trace(PROMPT, backend=backend):
            model.transformer.h[layer].output[:, -1] += 4.0 * direction
            logits = model.lm_head.output[:, -1].save()  # noqa: F841 - named saves are sent back
        made.append(backend.payload)
    return made


def generations(model: Any, count: int) -> list[bytes]:
    """Return generations of several users, steered at each token, with different layers and directions."""
    made = []
    for number in range(count):
        direction, layer, backend = torch.randn(model.config.n_embd), number % 4, Recording()
        with model.generate(max_new_tokens=TOKENS, backend=backend) as tracer:
            with tracer.invoke(PROMPT):
                for _ in tracer.iter[:TOKENS]:
                    model.transformer.h[layer].output[:, -1] += direction
            with tracer.invoke():
                logits = tracer.result.save()  # noqa: F841 - named saves are sent back
        made.append(backend.payload)
    return made


def latency(model: Any, address: str, rounds: int) -> dict[str, float]:
    """Return the median seconds of a steering trace: in this process, in this process as data, and on the server."""
    direction = torch.randn(model.config.n_embd)

    def run(**where: Any) -> None:
        with model.trace(PROMPT, **where):
            model.transformer.h[2].output[:, -1] += 4.0 * direction
            logits = model.lm_head.output[:, -1].save()  # noqa: F841 - named saves are sent back

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


def check_time(model: Any, payload: bytes, times: int = 50) -> float:
    """Return the median seconds for reading and checking a payload whose program has been checked before."""

    def timed() -> float:
        start = time.perf_counter()
        validate(decode_known(payload), model)
        return time.perf_counter() - start

    timed()
    return statistics.median(timed() for _ in range(times))


def rows_at_once(model: Any, rows: int, times: int = 30) -> float:
    """Return the CPU time of a forward pass of ``rows`` rows, over that of a pass of one row."""
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    def timed(batch: torch.Tensor) -> float:
        start = time.process_time()
        model._module(input_ids=batch)
        return time.process_time() - start

    with torch.no_grad():
        found = [(timed(ids), timed(ids.repeat(rows, 1))) for _ in range(times)]
    return statistics.median(many for _, many in found) / statistics.median(one for one, _ in found)


def processor_time(process: int) -> float:
    """Return the seconds of CPU time that a process has used."""
    with open(f"/proc/{process}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def burst(client: Client, jobs: list[bytes], clients: int, due: dict[bytes, torch.Tensor]) -> float:
    """Run ``jobs`` from ``clients`` threads, compare their results with ``due``, and return the jobs per second."""
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
            if message["status"] != "COMPLETED":
                failures.append(message["description"])
                continue
            found = decode_results(client.result(message["id"]) if result is None else result)["logits"]
            if not torch.allclose(found, due[job], atol=1e-4, rtol=1e-4):
                failures.append("The result is not that of a run alone.")

    threads = [threading.Thread(target=work) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    return len(jobs) / (time.perf_counter() - start)


def throughput(
    servers: dict[str, tuple[str, int]], jobs: list[bytes], due: dict[bytes, torch.Tensor], turns: int, title: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the jobs per second of 32 clients, and the CPU seconds for each job, by server. The first turn does not count."""
    clients = {name: Client(address) for name, (address, _) in servers.items()}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    taken: dict[str, list[float]] = {name: [] for name in servers}
    for turn in tqdm(range(turns), desc=title):
        for name in random.sample(list(servers), len(servers)):
            before = processor_time(servers[name][1])
            rate = burst(clients[name], jobs, 32, due)
            if turn:
                rates[name].append(rate)
                taken[name].append((processor_time(servers[name][1]) - before) / len(jobs))
    return {name: statistics.median(rates[name]) for name in servers}, {name: statistics.median(taken[name]) for name in servers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to check the script; writes nothing")
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    CONFIG.APP.REMOTE_LOGGING = False
    torch.manual_seed(0)
    random.seed(0)
    model = nnsight.demo_model()
    turns = 2 if options.quick else 8
    with server(1) as alone, server(32) as together:
        seconds = latency(model, alone[0], rounds)
        jobs, long_jobs = payloads(model, 64), generations(model, 64)
        due = {job: decode_results(execute_payload(model, job))["logits"] for job in (*jobs, *long_jobs)}
        servers = {"alone": alone, "together": together}
        rate, spent = throughput(servers, 2 * jobs, due, turns, "throughput")
        long_rate, long_spent = throughput(servers, long_jobs, due, turns, "generations")
    result = execute_payload(model, jobs[0])
    with server(1, result=result) as idle:
        same = dict.fromkeys(jobs, decode_results(result)["logits"])
        idle_rate, idle_spent = throughput({"no model": idle}, 2 * jobs, same, turns, "no model")
    rate, spent = rate | idle_rate, spent | idle_spent
    found = {
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "machine_check": machine_check(),
        "threads_of_torch": torch.get_num_threads(),
        "versions": {"nnsight": nnsight.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "command": f"python benchmarks/remote.py --rounds {rounds}",
        "rounds": rounds,
        "milliseconds": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "added_milliseconds": round(1e3 * (seconds["server"] - seconds["here"]), 2),
        "server_over_here": round(seconds["server"] / seconds["here"], 2),
        "payload_bytes": len(jobs[0]),
        "check_milliseconds": round(1e3 * check_time(model, jobs[0]), 2),
        "jobs_per_second": {name: round(value, 1) for name, value in rate.items()},
        "together_over_alone": round(rate["together"] / rate["alone"], 2),
        "server_milliseconds_per_job": {name: round(1e3 * value, 2) for name, value in spent.items()},
        "generations": {
            "tokens": TOKENS,
            "jobs_per_second": {name: round(value, 1) for name, value in long_rate.items()},
            "together_over_alone": round(long_rate["together"] / long_rate["alone"], 2),
            "server_milliseconds_per_job": {name: round(1e3 * value, 2) for name, value in long_spent.items()},
        },
        "forward_of_32_rows_over_one": round(rows_at_once(model, 32), 1),
    }
    print(json.dumps(found, indent=2))
    if not options.quick:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
