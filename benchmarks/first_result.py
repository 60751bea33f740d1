"""The time to the first compiled result of a new block, and the later cost of lowering in regions.

A GPT-2-shaped model (12 layers, width 768, random weights; batch 1 x 32 tokens, no_grad) runs a block that steers at one
layer and saves logits. Each contender runs in a separate process, with an empty cache of compiled code unless stated
otherwise, and measures in turn:

* the first plain result of the model, capture included;
* the first result of a block on the model that has just run, and of the same block at another layer;
* the median time of later runs, interleaved with runs of the plain compiled model;
* memory of a block that saves only logits, relative to that of the plain compiled model: the peak of tensor memory during a run
  (``running_mib``), and the peak of resident memory of the process, which includes the compilation (``peak_mib``).

Contenders are regions (the default), one whole graph (``compile={"regions": False}``), regions in a second process that finds
the code of the first, and the model edited by hand and compiled again with ``torch.compile``.

``python benchmarks/first_result.py [--quick] [--rounds N]`` prints a table and writes
``benchmarks/results/first_result.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "first_result.json"
CONTENDERS = {
    "regions": {"regions": True},
    "whole graph": {"regions": False},
    "regions, second process": {"regions": True},
}
BY_HAND, PLAIN = "edited by hand", "not edited"


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def tensor_peak(function: Callable[[], Any]) -> int:
    """Return the peak of tensor memory during a call, in bytes above the memory before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    handed_out = (event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(itertools.accumulate(handed_out), default=0)


def measure(contender: str, layers: int, width: int, rounds: int) -> dict[str, Any]:
    """Measure one contender in this process."""
    import torch
    from overhead import Steered, gpt2

    from nnsight import NNsight, fx

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["FIRST_RESULT_CACHE"]  # instead of the folder that `overhead` has set
    torch.set_grad_enabled(False)
    ids = torch.randint(0, 50257, (1, 32), generator=torch.Generator().manual_seed(0))
    vector = torch.randn(width, generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    if contender in (BY_HAND, PLAIN):
        net = gpt2(layers, width)
        compiled = torch.compile(net)
        found["plain_s"] = timed(lambda: compiled(ids))
        if contender == BY_HAND:
            net.transformer.h[layers // 2] = Steered(net.transformer.h[layers // 2], vector)
            found["new_block_s"] = timed(lambda: compiled(ids))

        def run() -> None:
            compiled(ids)
    else:
        model = NNsight(gpt2(layers, width), compile=CONTENDERS[contender])

        def steer(layer: int) -> None:
            with model.trace(ids):
                model.transformer.h[layer].output[:, -1] += 4.0 * vector
                model.output.logits.save()

        found["plain_s"] = timed(lambda: model(ids))
        found["new_block_s"] = timed(lambda: steer(layers // 2))
        found["other_layer_s"] = timed(lambda: steer(layers // 2 + 1))
        found["compiles"], found["loads"] = fx.counters.compiles, fx.counters.loads

        def run() -> None:
            steer(layers // 2)

    for _ in range(5):
        run()
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found["running_mib"] = tensor_peak(run) / 2**20
    if contender != PLAIN:
        reference = torch.compile(gpt2(layers, width))
        reference(ids)
        times: dict[str, list[float]] = {"run": [], "reference": []}
        for index in range(rounds):
            for name in sorted(times, reverse=bool(index % 2)):
                times[name].append(timed(run if name == "run" else lambda: reference(ids)))
        found["steady_ms"] = statistics.median(times["run"]) * 1e3
        found["steady_ratio"] = statistics.median(times["run"]) / statistics.median(times["reference"])
    return found


def measure_apart(contender: str, arguments: list[str], cache: str) -> dict[str, Any]:
    """Measure one contender in a separate process."""
    command = [sys.executable, __file__, "--contender", contender, *arguments]
    done = subprocess.run(
        command, env={**os.environ, "FIRST_RESULT_CACHE": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds of the steady state")
    parser.add_argument("--quick", action="store_true", help="a smaller model, few rounds, no file: to try the script")
    parser.add_argument("--contender", help="measure one contender in this process")
    arguments = parser.parse_args()
    rounds = 10 if arguments.quick else arguments.rounds
    layers, width = (4, 128) if arguments.quick else (12, 768)
    if arguments.contender:
        print(json.dumps(measure(arguments.contender, layers, width, rounds)))
        return
    passed_on = ["--rounds", str(rounds), *(["--quick"] if arguments.quick else [])]
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="first_result_") as folder:
        for contender in (PLAIN, BY_HAND, *CONTENDERS):
            name = "regions" if contender.startswith("regions") else contender.replace(" ", "_")
            rows[contender] = measure_apart(contender, passed_on, os.path.join(folder, name))
    for contender, row in rows.items():
        if contender in CONTENDERS:
            row["new_block_faster"] = rows[BY_HAND]["new_block_s"] / row["new_block_s"]
            for what in ("running", "peak"):
                row[f"{what}_ratio"] = row[f"{what}_mib"] / rows[PLAIN][f"{what}_mib"]
        shown = ", ".join(f"{name} {value:.3g}" for name, value in row.items())
        print(f"{contender:26} {shown}")
    if not arguments.quick:
        import torch
        from machine import machine_check

        RESULTS.parent.mkdir(exist_ok=True)
        account = {
            "command": " ".join(["python benchmarks/first_result.py", *sys.argv[1:]]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "machine_check": machine_check(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        RESULTS.write_text(json.dumps({"environment": account, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
