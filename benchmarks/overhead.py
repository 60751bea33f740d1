"""What a trace costs over doing the same by hand: ratios measured in one run.

Rows for a GPT-2-shaped model (12 layers, width 768, random weights; batch 1 x 32 tokens, no_grad), steering at layer 6
and saving layer 10 and the logits:

* a compiled trace against the model edited by hand and compiled with ``torch.compile``;
* an eager trace against plain torch hooks that do the same;
* the wrapped compiled model without an edit against the plain compiled model;
* time to the first compiled result of a new block on a model that is already captured.

Rows for a tiny net (12 x Linear(64)), where the model costs next to nothing: microseconds a trace adds to the plain call,
eager and compiled, for 0, 1 and 12 saves, with plain hooks in the same table.

The contenders of a row run interleaved, in an order shuffled anew each round, and medians are compared, so drift of
the machine hits all of them. ``python benchmarks/overhead.py [--rounds N] [--quick]`` prints a table and writes
``benchmarks/results/overhead.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Compile times are those of a first run, not of what an earlier one left in inductor's cache.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="overhead_")

import torch
import transformers

import nnsight
from nnsight import NNsight

STEER, SAVE = 6, 10
SEQUENCE = 32


class Steered(torch.nn.Module):
    """A block with a vector added to its output, as one would write it into the model."""

    def __init__(self, block: torch.nn.Module, vector: torch.Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("vector", vector)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = self.block(*args, **kwargs)
        hidden[:, -1] += 4.0 * self.vector
        return hidden


class Kept(torch.nn.Module):
    """A block that keeps its output."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block
        self.kept: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.kept = self.block(*args, **kwargs)
        return self.kept


class HandEdited(torch.nn.Module):
    """The model with the edit in its source; returns logits and the kept hidden state."""

    def __init__(self, model: torch.nn.Module, vector: torch.Tensor) -> None:
        super().__init__()
        model.transformer.h[STEER] = Steered(model.transformer.h[STEER], vector)
        self.keeper = model.transformer.h[SAVE] = Kept(model.transformer.h[SAVE])
        self.model = model

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = self.model(ids).logits
        return logits, self.keeper.kept


def gpt2(layers: int, width: int) -> torch.nn.Module:
    """Return a GPT-2 with fixed random weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=max(1, width // 64))
    return transformers.GPT2LMHeadModel(config).eval()


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each contender; order is shuffled in each round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        names = list(contenders)
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_gpt2(rounds: int, layers: int, width: int) -> list[dict[str, Any]]:
    """Measure the rows of the GPT-2-shaped model."""
    ids = torch.randint(0, 50257, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    vector = torch.randn(width, generator=torch.Generator().manual_seed(1))

    model = NNsight(gpt2(layers, width), compile=True)
    hand = torch.compile(HandEdited(gpt2(layers, width), vector))
    plain_net = gpt2(layers, width)
    plain = torch.compile(plain_net)
    hooked = gpt2(layers, width)
    results: dict[str, Any] = {}

    def trace(compile: bool) -> None:
        with model.trace(ids, compile=compile):
            model.transformer.h[STEER].output[:, -1] += 4.0 * vector
            kept = model.transformer.h[SAVE].output.save()
            logits = model.lm_head.output.save()
        results["trace"] = (logits, kept)

    def hooks() -> None:
        kept: dict[str, torch.Tensor] = {}

        def steer(module: Any, args: Any, output: torch.Tensor) -> None:
            output[:, -1] += 4.0 * vector

        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            kept["hidden"] = output

        handles = [
            hooked.transformer.h[STEER].register_forward_hook(steer),
            hooked.transformer.h[SAVE].register_forward_hook(keep),
        ]
        logits = hooked(ids).logits
        for handle in handles:
            handle.remove()
        results["hooks"] = (logits, kept["hidden"])

    def by_hand() -> None:
        results["hand"] = hand(ids)

    model(ids)
    start = time.perf_counter()
    trace(True)
    first = time.perf_counter() - start
    start = time.perf_counter()
    by_hand()
    first_by_hand = time.perf_counter() - start
    plain(ids)
    for ours, theirs in zip(results["trace"], results["hand"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    trace(False)
    hooks()
    for ours, theirs in zip(results["trace"], results["hooks"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)

    contenders: dict[str, Callable[[], Any]] = {
        "compiled trace": lambda: trace(True),
        "hand-edited compiled": by_hand,
        "eager trace": lambda: trace(False),
        "torch hooks": hooks,
        "wrapped compiled": lambda: model(ids),
        "plain compiled": lambda: plain(ids),
    }
    for _ in range(3):
        for contender in contenders.values():
            contender()
    nnsight.fx.counters.reset()
    medians = interleaved(contenders, rounds)
    assert nnsight.fx.counters.compiles == nnsight.fx.counters.recordings == 0, nnsight.fx.counters
    shape = f"GPT-2 {layers} x {width}"

    def row(ours: str, theirs: str, bar: float | None) -> dict[str, Any]:
        return {
            "model": shape,
            "what": f"{ours} / {theirs}",
            "ours_ms": medians[ours] * 1e3,
            "theirs_ms": medians[theirs] * 1e3,
            "ratio": medians[ours] / medians[theirs],
            "bar": bar,
        }

    return [
        row("compiled trace", "hand-edited compiled", 1.05),
        row("eager trace", "torch hooks", 1.10),
        row("wrapped compiled", "plain compiled", 1.01),
        {
            "model": shape,
            "what": "first result of a new block (captured model) / hand-edit and compile",
            "ours_ms": first * 1e3,
            "theirs_ms": first_by_hand * 1e3,
            "ratio": first / first_by_hand,
            "bar": None,
        },
    ]


def measure_tiny(rounds: int) -> list[dict[str, Any]]:
    """Measure microseconds added per trace over the plain call of a tiny net."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
    x = torch.randn(1, 64)
    model = NNsight(net)
    compiled = NNsight(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)]), compile=True)
    plain_compiled = torch.compile(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)]))

    def no_save(wrapped: NNsight) -> None:
        with wrapped.trace(x):
            pass

    def one_save(wrapped: NNsight) -> None:
        with wrapped.trace(x):
            hidden = wrapped[5].output.save()  # noqa: F841

    def all_saves(wrapped: NNsight) -> None:
        with wrapped.trace(x):
            hidden = [layer.output for layer in wrapped].save()  # noqa: F841

    def hooks(count: int) -> None:
        kept = []
        handles = [
            layer.register_forward_hook(lambda module, args, output: kept.append(output)) for layer in list(net)[:count]
        ]
        net(x)
        for handle in handles:
            handle.remove()

    contenders: dict[str, Callable[[], Any]] = {
        "plain call": lambda: net(x),
        "hooks, 1 save": lambda: hooks(1),
        "hooks, 12 saves": lambda: hooks(12),
        "eager trace, 0 saves": lambda: no_save(model),
        "eager trace, 1 save": lambda: one_save(model),
        "eager trace, 12 saves": lambda: all_saves(model),
        "plain compiled call": lambda: plain_compiled(x),
        "wrapped compiled call": lambda: compiled(x),
        "compiled trace, 0 saves": lambda: no_save(compiled),
        "compiled trace, 1 save": lambda: one_save(compiled),
        "compiled trace, 12 saves": lambda: all_saves(compiled),
    }
    for _ in range(20):
        for contender in contenders.values():
            contender()
    medians = interleaved(contenders, rounds * 30)
    rows = []
    for name, median in medians.items():
        base = medians["plain compiled call" if "compiled" in name else "plain call"]
        rows.append(
            {"model": "12 x Linear(64)", "what": name, "us": median * 1e6, "added_us": (median - base) * 1e6, "bar": None}
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as text."""
    for row in rows:
        if "ratio" in row:
            bar = f"(bar {row['bar']:.2f})" if row["bar"] else ""
            print(
                f"{row['model']:16} {row['what']:70} {row['ours_ms']:9.2f} ms / {row['theirs_ms']:9.2f} ms = "
                f"{row['ratio']:6.3f} {bar}"
            )
        else:
            print(f"{row['model']:16} {row['what']:70} {row['us']:9.1f} us, {row['added_us']:+8.1f} us over the plain call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of the large model; the tiny net runs 30x more")
    parser.add_argument("--quick", action="store_true", help="a 4 x 256 model and few rounds, to try the script")
    parser.add_argument("--only", choices=["gpt2", "tiny"], help="measure one model only")
    arguments = parser.parse_args()
    rounds = 10 if arguments.quick else arguments.rounds
    layers, width = (12, 256) if arguments.quick else (12, 768)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        if arguments.only != "gpt2":
            rows += measure_tiny(rounds)
        if arguments.only != "tiny":
            rows += measure_gpt2(rounds, layers, width)
    show(rows)
    if not arguments.quick and arguments.only is None:
        target = Path(__file__).parent / "results" / "overhead.json"
        target.parent.mkdir(exist_ok=True)
        environment = {
            "command": "python benchmarks/overhead.py " + " ".join(sys.argv[1:]),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        target.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
