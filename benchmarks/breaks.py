"""The cost of a cut: ratios measured in one run, on a GPT-2-shaped model (random weights; batch 1 x 32 tokens, no_grad).

* *one branch*: a compiled trace with ``if hidden.norm() > t:`` at layer 6, against the same compiled trace without the
  branch plus one eager block of the model. A branch has to wait for its value; it should not cost more than running one
  layer outside of the compiled graph.
* *a cut at every layer*: a compiled trace that reads the norm of every layer's output in Python, against the eager model
  with plain hooks that do the same.

Contenders run interleaved, in a new random order each round; the table shows the median over the rounds. Besides the times it shows
counts: cuts of a run, and captures, recordings and compilations after the first run. ``python benchmarks/breaks.py [--rounds N]
[--layers N] [--width N] [--backend NAME] [--quick]`` prints a table and writes ``benchmarks/results/breaks.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from machine import machine_check
from overhead import SEQUENCE, gpt2, interleaved

from nnsight import NNsight, fx

RESULTS = Path(__file__).parent / "results" / "breaks.json"


def contenders(layers: int, width: int, backend: str) -> dict[str, Callable[[], Any]]:
    """Return the measured functions by name. Those that run a trace return its report."""
    module = gpt2(layers, width)
    ids = torch.randint(0, 1000, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    model = NNsight(module, compile={"backend": backend})
    branch, norms = model.transformer.h[layers // 2], list[float]()
    block, hidden = module.transformer.h[layers // 2], torch.randn(1, SEQUENCE, width)

    def branching() -> Any:
        with model.trace(ids) as tracer:
            state = branch.output
            if state.norm() > 1.0:
                state[:, -1] *= 0.5
            model.lm_head.output.save()
        return tracer.report

    def straight() -> Any:
        with model.trace(ids) as tracer:
            branch.output[:, -1] *= 0.5
            model.lm_head.output.save()
        return tracer.report

    def one_block() -> None:
        block(hidden)

    def every_layer() -> Any:
        norms.clear()
        with model.trace(ids) as tracer:
            for layer in model.transformer.h:
                norms.append(layer.output.norm().item())
            model.lm_head.output.save()
        return tracer.report

    def hooks() -> None:
        norms.clear()
        handles = [
            layer.register_forward_hook(lambda _, __, out: norms.append(out.norm().item()))
            for layer in module.transformer.h
        ]
        module(ids)
        for handle in handles:
            handle.remove()

    return {
        "one branch": branching,
        "no branch": straight,
        "one eager block": one_block,
        "a cut at every layer": every_layer,
        "eager with hooks at every layer": hooks,
    }


def median_ratio(times: dict[str, list[float]], ours: str, *theirs: str) -> float:
    """Return the median over the rounds of the time of ``ours`` divided by the sum of the times of ``theirs``."""
    sums = map(sum, zip(*(times[name] for name in theirs), strict=True))
    return median(own / other for own, other in zip(times[ours], sums, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds, no file: to try the script")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.layers, options.width = 3, 4, 64
    torch.set_grad_enabled(False)
    measured = contenders(options.layers, options.width, options.backend)
    counts: dict[str, Any] = {}
    for name, run in measured.items():
        fx.counters.reset()
        run()
        first = {"compiles": fx.counters.compiles, "reuses": fx.counters.reuses}
        run()
        fx.counters.reset()
        report = run()
        if report is not None:
            steady = {key: getattr(fx.counters, key) for key in ("captures", "recordings", "compiles")}
            counts[name] = {"cuts": len(report.breaks), "first run": first, "later runs": steady}
    times = interleaved(measured, options.rounds)
    ratios = {
        "one branch / (no branch + one eager block)": median_ratio(times, "one branch", "no branch", "one eager block"),
        "a cut at every layer / eager with hooks": median_ratio(times, "a cut at every layer", "eager with hooks at every layer"),
    }
    for name, ratio in ratios.items():
        print(f"{name:48} {ratio:6.2f}")
    for name, count in counts.items():
        print(f"{name:24} {count}")
    if options.quick:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps(
            {
                "ratios": ratios,
                "milliseconds": {name: median(seconds) * 1e3 for name, seconds in times.items()},
                "counts": counts,
                "options": vars(options),
                "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                "machine": platform.processor() or platform.machine(),
                "machine_check": machine_check(),
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
