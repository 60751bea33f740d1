"""Load test of a server with valid and invalid jobs of many clients: every answer must be right, and memory must not grow.

A server of the demo model, in a separate process, gets jobs from 64 clients at a time. One in four jobs is wrong: it has damaged bytes,
names a module that does not exist, or fails while it runs. Each answer is compared with the expected one. Values are compared with those
of the same program run alone in this process, so a result for another client is noticed.
The memory of the server is measured after each tenth of the jobs. After the second tenth it must not grow by more than 10 percent.

``python benchmarks/remote_load.py [--jobs N] [--clients N]`` prints the measurements, and exits with 1 if a check failed. A run with the
default number of jobs or more writes ``benchmarks/results/remote_load.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine_check
from remote import KEY, Recording, payloads, server
from tqdm.auto import tqdm

import nnsight
from nnsight import CONFIG
from nnsight.program.format.results import decode_results
from nnsight.remote import execute_payload
from nnsight.remote.client.client import Client, RemoteError

RESULTS = Path(__file__).parent / "results" / "remote_load.json"

#: The frequency of each kind of job. The first word is the expected verdict.
KINDS = {"right": 12, "refused: damaged": 1, "refused: no such module": 2, "failed: bad index": 1}


def jobs_of(model: Any) -> dict[str, list[bytes]]:
    """Return some jobs of each kind."""
    right = payloads(model, 16)
    missing = [payload.replace(b"model.transformer.h.1.output", b"model.transformer.g.1.output") for payload in right]
    with model.trace("The Eiffel Tower is in", backend=Recording()) as tracer:
        hidden = model.lm_head.output[0]
        found = hidden.gather(0, (hidden.argmax(-1, keepdim=True) + 1_000_000)).save()  # noqa: F841 - named saves are sent back
    return {
        "right": right,
        "refused: damaged": [payload[:-7] for payload in right],
        "refused: no such module": [payload for payload, other in zip(missing, right, strict=True) if payload != other],
        "failed: bad index": [tracer.backend.payload],
    }


def verdict(client: Client, payload: bytes, due: torch.Tensor | None) -> str:
    """Run a job and return a verdict. Values must equal ``due`` up to the rounding of another batch size."""
    try:
        message, result = list(client.run(payload, KEY))[-1]
    except RemoteError as error:
        return "refused" if error.code == 415 else f"error {error}"
    if message["status"] == "COMPLETED":
        found = decode_results(client.result(message["id"]) if result is None else result)
        return "right" if due is not None and torch.allclose(found["logits"], due, atol=1e-3, rtol=1e-3) else "wrong"
    return {"InvalidProgramError": "refused", "ExecutionFailedError": "failed"}.get(message["data"]["error"], message["description"])


def resident(process: int) -> float:
    """Return the resident memory of a process, in MiB."""
    with open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    CONFIG.APP.REMOTE_LOGGING = False
    torch.manual_seed(0)
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    model = nnsight.demo_model()
    jobs = jobs_of(model)
    due = {payload: decode_results(execute_payload(model, payload))["logits"] for payload in jobs["right"]}
    nearest = min((one - two).abs().max().item() for one in due.values() for two in due.values() if one is not two)
    assert nearest > 0.1, "two programs have almost equal results, so swapped results would not be noticed"
    answered = 0
    surprises: Counter[str] = Counter()
    memory: list[float] = []
    lock, numbers = threading.Lock(), iter(range(options.jobs))
    with server(32, keep=20) as (address, process):
        client = Client(address)
        bar = tqdm(total=options.jobs, desc="jobs")

        def work() -> None:
            nonlocal answered
            while True:
                with lock:
                    number = next(numbers, None)
                    if number is None:
                        return
                kind = kinds[number % len(kinds)]
                of_kind = jobs[kind]
                payload = of_kind[number % len(of_kind)]
                found = verdict(client, payload, due.get(payload))
                with lock:
                    bar.update()
                    answered += 1
                    if found != kind.partition(":")[0]:
                        surprises[f"{kind}: {found}"] += 1
                    if answered % max(options.jobs // 10, 1) == 0:
                        memory.append(resident(process))

        start = time.perf_counter()
        threads = [threading.Thread(target=work) for _ in range(options.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        bar.close()
    growth = memory[-1] / memory[1] if len(memory) > 1 else 1.0
    found = {
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()},
        "machine_check": machine_check(),
        "versions": {"nnsight": nnsight.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "command": f"python benchmarks/remote_load.py --jobs {options.jobs} --clients {options.clients}",
        "jobs": options.jobs,
        "answered": answered,
        "clients": options.clients,
        "jobs_per_second": round(options.jobs / seconds, 1),
        "memory_mib": [round(size) for size in memory],
        "growth": round(growth, 3),
        "surprises": dict(surprises),
    }
    print(json.dumps(found, indent=2))
    if options.jobs >= 10_000:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(bool(surprises) or answered != options.jobs or growth > 1.1)


if __name__ == "__main__":
    sys.exit(main())
