"""The overhead of a trace over the same edit by hand: ratios measured in one run.

Rows for GPT-2-shaped models (12 layers of width 768, and 4 of width 256; random weights, batch 1 x 32 tokens, no_grad). A block
steers at the middle layer, and saves the output of the last layer but one and the logits:

* a compiled trace against the model edited by hand and compiled with ``torch.compile``; also with the outputs of all layers
  saved and nothing edited; each with repeated layers lowered once, the default, and with the whole graph lowered at once
  (``compile={"regions": False}``, the final state of ``compile="background"``);
* the same program bound to the model, as a compiled edit, and baked into a module that ``torch.compile`` compiles;
* an eager trace against plain torch hooks that do the same;
* the wrapped compiled model without an edit against the plain compiled model;
* the time to the first compiled result of a new block on a model that is already captured.

Rows for a tiny net (12 x Linear(64), ``tiny_net.py``) that takes almost no time: the microseconds that a trace adds to the plain
call for 0, 1 and 12 saves and edits, and the same for plain hooks. The costs of a trace, of a save and of an edit are computed
from these times (see :func:`costs`). Compiled traces are compared with the net edited by hand and compiled, to which each may add
60 us. With ``--peer`` the table includes the public package, in a separate environment that is made if it is missing
(``workers.py``).

The contenders of a table run interleaved, in a new random order each round, so changes of the machine's speed affect all of them.
A ratio of the first table is the median over the rounds of the ratio in one round; the second table compares medians. In the
second table a round has many short turns, and a contender's time is the lower quartile of its calls, because interruptions only
make calls slower. With ``--processes N`` a ratio of the first table is the median over N processes, because the memory addresses
of compiled code change the times by up to two percent.
``python benchmarks/overhead.py [--rounds N] [--processes N] [--quick] [--only MODEL] [--peer]`` prints
tables and writes them to ``benchmarks/results/overhead.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# An empty cache of Inductor, so that compile times are those of a first run.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="overhead_")

import torch
import transformers
from machine import machine_check
from tiny_net import LAYERS
from tqdm.auto import tqdm
from workers import PEER, PEER_FOLDER, Worker, peer_python

import nnsight
from nnsight import NNsight

SEQUENCE = 32

#: Layers, width, and the bar: the largest time of a compiled trace over that of the model edited by hand.
SHAPES = ((12, 768, 1.02), (4, 256, 1.05))

RESULTS = Path(__file__).parent / "results" / "overhead.json"
OURS, THEIRS = "this package", PEER

#: Turns of each contender for the tiny net in a round.
TURNS = 10

#: Microseconds that a compiled trace of the tiny net may add to the net edited by hand and compiled.
COMPILED_BAR = 60

#: Microseconds of each round, by package and contender.
Times = dict[tuple[str, str], list[float]]


class Steered(torch.nn.Module):
    """A block with a vector added at the last position of its output: the edit in the source of the model."""

    def __init__(self, block: torch.nn.Module, vector: torch.Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("vector", vector)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = self.block(*args, **kwargs)
        hidden[:, -1] += 4.0 * self.vector
        return hidden


class StoringBlock(torch.nn.Module):
    """A block that stores its output in ``kept``."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block
        self.kept: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.kept = self.block(*args, **kwargs)
        return self.kept


class HandEdited(torch.nn.Module):
    """The model, edited by hand at layer ``steered`` unless that is None. Returns logits and the outputs of the layers ``saved``."""

    def __init__(self, model: torch.nn.Module, steered: int | None, vector: torch.Tensor, saved: list[int]) -> None:
        super().__init__()
        layers = model.transformer.h
        if steered is not None:
            layers[steered] = Steered(layers[steered], vector)
        for index in saved:
            layers[index] = StoringBlock(layers[index])
        self.keepers = torch.nn.ModuleList([layers[index] for index in saved])
        self.model = model

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits = self.model(ids).logits
        return logits, *[keeper.kept for keeper in self.keepers]


def gpt2(layers: int, width: int) -> torch.nn.Module:
    """Return a GPT-2 with fixed random weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=max(1, width // 64))
    return transformers.GPT2LMHeadModel(config).eval()


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round. Each round has a new random order."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        names = list(contenders)
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
    return times


def measure_gpt2(rounds: int, layers: int, width: int, bar: float) -> list[dict[str, Any]]:
    """Measure the rows of one GPT-2-shaped model."""
    middle, late, every = layers // 2, layers - 2, list(range(layers))
    ids = torch.randint(0, 50257, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    vector = torch.randn(width, generator=torch.Generator().manual_seed(1))

    net = gpt2(layers, width)

    def alike() -> torch.nn.Module:
        """Return another model with the same weight tensors, because their memory addresses change times by percents."""
        other = gpt2(layers, width)
        other.load_state_dict(net.state_dict(), assign=True)
        return other

    model = NNsight(net, compile=True)
    in_one = NNsight(alike(), compile={"regions": False})
    hand = torch.compile(HandEdited(alike(), middle, vector, [late]))
    hand_saved = torch.compile(HandEdited(alike(), None, vector, every))
    plain = torch.compile(alike())
    hooked = alike()
    results: dict[str, Any] = {}

    def trace(compile: bool, model: NNsight = model) -> None:
        with model.trace(ids, compile=compile):
            model.transformer.h[middle].output[:, -1] += 4.0 * vector
            kept = model.transformer.h[late].output.save()
            logits = model.lm_head.output.save()
        results["trace"] = (logits, kept)

    def trace_saves(model: NNsight = model) -> None:
        with model.trace(ids, compile=True):
            kept = [layer.output.save() for layer in model.transformer.h]
            logits = model.lm_head.output.save()
            kept.save()
        results["saves"] = (logits, *kept)

    def hooks() -> None:
        kept: dict[str, torch.Tensor] = {}

        def steer(module: Any, args: Any, output: torch.Tensor) -> None:
            output[:, -1] += 4.0 * vector

        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            kept["hidden"] = output

        handles = [
            hooked.transformer.h[middle].register_forward_hook(steer),
            hooked.transformer.h[late].register_forward_hook(keep),
        ]
        logits = hooked(ids).logits
        for handle in handles:
            handle.remove()
        results["hooks"] = (logits, kept["hidden"])

    def by_hand() -> None:
        results["hand"] = hand(ids)

    def saves_by_hand() -> None:
        results["hand saves"] = hand_saved(ids)

    with model.trace(ids, remote="program") as recorded:
        model.transformer.h[middle].output[:, -1] += 4.0 * vector
        kept = model.transformer.h[late].output.save()  # noqa: F841 - a saved name is part of the program
        logits = model.lm_head.output.save()  # noqa: F841
    bound = recorded.program.bind(model, inputs=["vector"])
    with model.edit() as edited:
        model.transformer.h[middle].output[:, -1] += 4.0 * vector
    baked = torch.compile(edited.bake())
    edited.compile()

    model(ids)
    start = time.perf_counter()
    trace(True)
    first = time.perf_counter() - start
    start = time.perf_counter()
    by_hand()
    first_by_hand = time.perf_counter() - start
    plain(ids)
    trace_saves()
    saves_by_hand()
    for who, whose in (("trace", "hand"), ("saves", "hand saves")):
        for ours, theirs in zip(results[who], results[whose], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    found = bound(ids, vector=vector)
    for ours in (found["logits"], edited(ids).logits, baked(ids).logits):
        torch.testing.assert_close(ours, results["hand"][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["kept"], results["hand"][1], atol=1e-4, rtol=1e-4)
    trace(False)
    hooks()
    for ours, theirs in zip(results["trace"], results["hooks"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)

    contenders: dict[str, Callable[[], Any]] = {
        "compiled trace": lambda: trace(True),
        "hand-edited compiled": by_hand,
        "compiled trace, all layers saved": trace_saves,
        "the same by hand": saves_by_hand,
        "bound program": lambda: bound(ids, vector=vector),
        "compiled edit": lambda: edited(ids),
        "baked edit, compiled": lambda: baked(ids),
        "compiled trace, one graph": lambda: trace(True, in_one),
        "compiled trace, one graph, all layers saved": lambda: trace_saves(in_one),
        "eager trace": lambda: trace(False),
        "torch hooks": hooks,
        "wrapped compiled": lambda: model(ids),
        "plain compiled": lambda: plain(ids),
    }
    for _ in range(3):
        for contender in contenders.values():
            contender()
    nnsight.fx.counters.reset()
    times = interleaved(contenders, rounds)
    assert nnsight.fx.counters.compiles == nnsight.fx.counters.recordings == 0, nnsight.fx.counters
    shape = f"GPT-2 {layers} x {width}"

    def row(ours: str, theirs: str, bar: float | None) -> dict[str, Any]:
        return {
            "model": shape,
            "what": f"{ours} / {theirs}",
            "ours_ms": statistics.median(times[ours]) * 1e3,
            "theirs_ms": statistics.median(times[theirs]) * 1e3,
            "ratio": statistics.median(mine / other for mine, other in zip(times[ours], times[theirs], strict=True)),
            "bar": bar,
        }

    return [
        row("compiled trace", "hand-edited compiled", bar),
        row("compiled trace, all layers saved", "the same by hand", bar),
        row("bound program", "hand-edited compiled", min(bar, 1.03)),
        row("compiled edit", "hand-edited compiled", min(bar, 1.03)),
        row("baked edit, compiled", "hand-edited compiled", min(bar, 1.03)),
        row("compiled trace, one graph", "hand-edited compiled", bar),
        row("compiled trace, one graph, all layers saved", "the same by hand", bar),
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


def measure_shapes(rounds: int, quick: bool) -> list[dict[str, Any]]:
    """Measure GPT-2 of each shape, or only of the smaller one if ``quick``."""
    with torch.no_grad():
        return [row for shape in SHAPES[quick:] for row in measure_gpt2(rounds, *shape)]


def of_processes(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of one row over several processes, and the ratio of each process."""
    medians = {name: statistics.median(row[name] for row in rows) for name in ("ours_ms", "theirs_ms", "ratio")}
    return {**rows[0], **medians, "ratios": [row["ratio"] for row in rows]}


def measure_tiny(
    rounds: int, calls: int, peer: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Time the tiny net in workers of this package and of the public package, which take turns.

    Args:
        rounds: Number of rounds. Each contender has several short turns in a round.
        calls: Calls of a contender in a round; their lower quartile is the time of the round.
        peer: Folder of the environment of the public package; ``None`` leaves it out.

    Returns:
        The times by contender, the costs derived from them, and the versions in each environment.
    """
    with contextlib.ExitStack() as stack:
        workers = {OURS: stack.enter_context(Worker(Path(sys.executable), "--compiled"))}
        if peer is not None:
            workers[THEIRS] = stack.enter_context(Worker(peer_python(peer, torch.__version__)))
        jobs = [(who, name) for who, worker in workers.items() for name in worker.contenders]
        times: Times = {job: [] for job in jobs}
        order = random.Random(0)
        for _ in tqdm(range(rounds), desc="tiny net", leave=False):
            made: dict[tuple[str, str], list[int]] = {job: [] for job in jobs}
            for _ in range(TURNS):
                for job in order.sample(jobs, len(jobs)):
                    who, name = job
                    made[job] += workers[who].times(name, calls // TURNS)
            for job, nanoseconds in made.items():
                times[job].append(statistics.quantiles(nanoseconds, n=4)[0] / 1e3)
        versions = {who: worker.versions for who, worker in workers.items()}
    rows = []
    for (who, name), values in times.items():
        added = statistics.median(over(times, (who, name), (who, base_of(name))))
        bar = COMPILED_BAR if name.startswith("compiled trace") else None
        rows.append({"package": who, "what": name, **summary(values), "base": base_of(name), "added_us": added, "bar": bar})
    return rows, costs(times), versions


def base_of(name: str) -> str:
    """Return the contender without a trace that ``name`` is compared with: the same edit by hand, or a plain call."""
    if name == "compiled trace, empty" or name in ("wrapped compiled call", "plain compiled call"):
        return "plain compiled call"
    if name.startswith("compiled"):
        return name.replace("compiled trace", "compiled by hand")
    return "plain call"


def over(times: Times, job: tuple[str, str], base: tuple[str, str]) -> list[float]:
    """Return the time of ``job`` minus that of ``base``, in each round."""
    return [value - other for value, other in zip(times[job], times[base], strict=True)]


def summary(values: list[float]) -> dict[str, Any]:
    """Return the median over rounds, and the quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"us": statistics.median(values), "middle_half_us": [low, high]}


def costs(times: Times) -> list[dict[str, Any]]:
    """Return the costs of parts of a trace, as differences between contenders of one environment.

    The differences are taken round by round, so changes of the machine's speed cancel out. With `t` the time of a round:

    * an empty trace: ``t(empty) - t(plain call)``;
    * a trace with one save: ``t(1 save) - t(plain call)``;
    * each further save: ``(t(12 saves) - t(1 save)) / 11``;
    * each edit: ``(t(12 edits) - t(empty)) / 12``, minus the time of the addition itself, which is the difference between
      a hook that adds and a hook that stores: ``(t(hooks, 12 edits) - t(hooks, 12 saves)) / 12``.

    For hooks, `empty` is the plain call.
    """
    found: list[dict[str, Any]] = []
    for who in dict.fromkeys(who for who, _ in times):

        def difference(name: str, base: str, count: int, who: str = who) -> list[float]:
            return [value / count for value in over(times, (who, name), (who, base))]

        addition = difference(f"hooks, {LAYERS} edits", f"hooks, {LAYERS} saves", LAYERS)
        for how, empty in (("hooks", "plain call"), ("trace", "trace, empty")):
            edit = difference(f"{how}, {LAYERS} edits", empty, LAYERS)
            parts = {
                "nothing in it": difference(empty, "plain call", 1),
                "one save": difference(f"{how}, 1 save", "plain call", 1),
                "each further save": difference(f"{how}, {LAYERS} saves", f"{how}, 1 save", LAYERS - 1),
                "each edit": [whole - part for whole, part in zip(edit, addition, strict=True)],
            }
            for part, values in parts.items():
                if (how, part) != ("hooks", "nothing in it"):
                    found.append({"package": who, "how": how, "part": part, **summary(values)})
    return found


def ratios(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the costs of our traces as multiples of those of hooks, and of the public package if it was measured."""
    by_key = {(cost["package"], cost["how"], cost["part"]): cost["us"] for cost in found}
    return [
        {
            "part": part,
            "of": f"{OURS} / {other if how == 'trace' else how}",
            "ratio": by_key[OURS, "trace", part] / value,
        }
        for (other, how, part), value in by_key.items()
        if (how == "trace" and other == THEIRS) or (how == "hooks" and other == OURS)
    ]


def show_tiny(rows: list[dict[str, Any]], found: list[dict[str, Any]], multiples: list[dict[str, Any]]) -> None:
    """Print times, costs and ratios as text."""
    for row in rows:
        low, high = row["middle_half_us"]
        spread = f"({low:7.1f} to {high:7.1f})"
        bar = f" (bar {row['bar']})" if row["bar"] else ""
        print(
            f"tiny net  {row['package']:14} {row['what']:39} {row['us']:8.1f} us {spread}, "
            f"{row['added_us']:+8.1f} us over {row['base']}{bar}"
        )
    for cost in found:
        low, high = cost["middle_half_us"]
        spread = f"({low:7.2f} to {high:7.2f})"
        print(f"cost      {cost['package']:14} {cost['how'] + ': ' + cost['part']:26} {cost['us']:8.2f} us {spread}")
    for multiple in multiples:
        print(f"ratio     {multiple['of']:30} {multiple['part']:20} {multiple['ratio']:8.3f}")


def show_gpt2(rows: list[dict[str, Any]]) -> None:
    """Print the rows as text."""
    for row in rows:
        bar = f"(bar {row['bar']:.2f})" if row["bar"] else ""
        print(
            f"{row['model']:16} {row['what']:70} {row['ours_ms']:9.2f} ms / {row['theirs_ms']:9.2f} ms = "
            f"{row['ratio']:6.3f} {bar}"
        )


def write(section: str, content: dict[str, Any]) -> None:
    """Replace one section of the results. The other section keeps the figures and the environment of its own run."""
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    account = {
        "command": " ".join(["python benchmarks/overhead.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "machine_check": machine_check(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    results[section] = {"environment": account, **content}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each table")
    parser.add_argument("--quick", action="store_true", help="the smaller models, few rounds, no file: to try the script")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="processes that measure GPT-2, one after the other; ratios are medians over them",
    )
    parser.add_argument("--only", choices=["gpt2", "tiny"], help="measure one model only")
    parser.add_argument(
        "--peer",
        nargs="?",
        type=Path,
        const=PEER_FOLDER,
        metavar="FOLDER",
        help=f"time {PEER} too, in the virtual environment FOLDER (benchmarks/.peer), which is made if it is missing",
    )
    arguments = parser.parse_args()
    rounds = 10 if arguments.quick else arguments.rounds
    if arguments.only != "gpt2":
        tiny, found, versions = measure_tiny(rounds, 50 if arguments.quick else 200, arguments.peer)
        multiples = ratios(found)
        show_tiny(tiny, found, multiples)
        if not arguments.quick:
            write("tiny net", {"versions": versions, "rows": tiny, "costs": found, "ratios": multiples})
    if arguments.only != "tiny":
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # a process for each
            measured = [pool.apply(measure_shapes, (rounds, arguments.quick)) for _ in range(arguments.processes)]
        rows = [of_processes(same) for same in zip(*measured, strict=True)]
        show_gpt2(rows)
        if not arguments.quick:
            write("gpt2", {"threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()
