"""The cost of this package in a vLLM engine: throughput over that of a plain compiled vLLM engine, each row with its bar.

The model (``--shape``) has random weights in fp32, on the device of vLLM: a GPT-2 with 12 layers of width 768, which spends its time in the
model; a Llama of that size, whose layers return a pair; or a tiny model, which spends nearly all time in the engine. Eight requests of
the same length run at once, with greedy sampling. Engines:

* a plain compiled engine; a second one, whose ratio to the first shows the error of the measurement; and a plain eager engine;
* with tables for edits, taps, or captures at all layers in the compiled graph; with one tap; and with one captured layer;
* with programs in the graph: one program at one layer, one at all layers, or four different programs at one layer.

Kinds of rows:

* *idle*: no request is steered or read. The row shows the cost of the feature when nobody uses it. Tokens and logprobs have to equal those
  of the plain engine, bit by bit, and the table says whether they do;
* *vector*: a table steers every request, with one vector at one layer or at all layers; also sixteen requests with sixteen vectors;
* *captured*: the block of every request saves captured values at every token, at one layer or at all layers; "one of all" reads one layer
  of an engine that captures all layers, at a cost between the other two;
* *program*: a program of the graph steers every request, at one layer or at all layers; also sixteen requests, each with its own
  parameters, or with four programs; and a program of the request at a tap;
* *handoff*: the block of every request adds a vector at the tap, at every token. It must be faster than the plain eager engine;
* *loop as a program*: the same block, which continues as a program;
* *Python in a step*: the microseconds that this package needs to assign the rows of a step to eight requests.

In every round each contender generates the same tokens once, in a new random order. A ratio is the median over the rounds of the ratio
in one round: of seconds, and of CPU seconds of this thread, which other processes disturb less (on a GPU only seconds are meaningful).
On a CPU all engines share their weight matrices, in huge pages where Linux supports them.
``python benchmarks/vllm_engine.py [--shape NAME] [--rounds N] [--tokens N] [--only WORD] [--quick]`` prints a table and, with neither
``--only`` nor ``--quick``, writes ``benchmarks/results/vllm.json``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

# With pages of 4 KB, the placement of weights in memory makes equal engines differ by several percent.
if __name__ == "__main__" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import transformers
from machine import machine_check
from tqdm.auto import tqdm

from nnsight import LanguageModel, Program, demo
from nnsight.vllm import VLLM
from nnsight.vllm.blocks import stepping
from nnsight.vllm.worker import hooks
from nnsight.vllm.worker.bookkeeping import Bookkeeping

RESULTS = Path(__file__).parent / "results" / "vllm.json"
PROMPTS = [f"Place number {number} is in the city of" for number in range(16)]
REQUESTS = 8

#: Layers, width, feed-forward width, and path of the layers, by shape.
SHAPES = {
    "gpt2": (12, 768, 3072, "transformer.h"),
    "llama": (12, 768, 2048, "model.layers"),
    "tiny": (6, 128, 512, "transformer.h"),
}
VOCABULARY = 1024  # of the tokenizer of the demo model

PLAIN, AGAIN, EAGER, SIXTEEN = "plain", "plain, another engine", "plain, eager", "plain, 16 requests"


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        name: Name of the row.
        engine: Name of its engine.
        run: The work of one round; called with the engine.
        bar: The least throughput, as a ratio to that of ``against``; ``None`` if there is no bar.
        against: Name of the row that it is compared with.
    """

    name: str
    engine: str
    run: Callable[[Any], object]
    bar: float | None = None
    against: str = PLAIN


# -- the model --------------------------------------------------------------------------------------------------------


def save_model(shape: str, folder: str) -> str:
    """Write a model of a shape with random weights to ``folder``, with the tokenizer of the demo model; return the folder."""
    layers, width, inner, _ = SHAPES[shape]
    torch.manual_seed(0)
    config: Any
    if shape == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=width // 64
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=width, n_inner=inner, n_layer=layers, n_head=max(width // 64, 4), bos_token_id=0, eos_token_id=0
        )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(demo.path()).save_pretrained(folder)
    return folder


class Plain:
    """A plain vLLM engine."""

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm import LLM

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.engine = LLM(folder, **options)


def recorded_programs(folder: str, shape: str) -> dict[str, Program]:
    """Return programs for the engine: one that adds a direction at all layers, and four that edit the middle layer."""
    model = LanguageModel(folder)
    layers, width = list(layers_of(model)), SHAPES[shape][1]
    alpha, direction = 1.0, torch.randn(width, generator=torch.Generator().manual_seed(99)) / 10
    middle = layers[len(layers) // 2]
    with model.trace("Place", remote="program") as everywhere:
        for layer in layers:
            layer.output[:] += alpha * direction
    with model.trace("Place", remote="program") as one:
        middle.output[:] += alpha * direction
    with model.trace("Place", remote="program") as scaled:
        middle.output[:] *= alpha
    with model.trace("Place", remote="program") as projected:
        middle.output -= (middle.output @ direction).unsqueeze(-1) * direction
    with model.trace("Place", remote="program") as gated:
        along = (middle.output @ direction).unsqueeze(-1)
        middle.output = torch.where(along > 0, middle.output + alpha * direction, middle.output)
    found = {"everywhere": everywhere, "one": one, "scaled": scaled, "projected": projected, "gated": gated}
    return {name: tracer.program for name, tracer in found.items()}


def engine_makers(folder: str, shape: str) -> dict[str, Callable[[], Any]]:
    """Return the functions that make the engines, by name."""
    layers, _, _, path = SHAPES[shape]
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 256 << 20}
    options |= {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    if torch.cuda.is_available():
        options["gpu_memory_utilization"] = 0.1  # for each engine; all are in memory at the same time
    everywhere, one = [f"{path}.*"], [f"{path}.{layers // 2}"]
    programs = recorded_programs(folder, shape)
    four = {name: program for name, program in programs.items() if name != "everywhere"}
    return {
        PLAIN: lambda: Plain(folder, **options),
        AGAIN: lambda: Plain(folder, **options),
        EAGER: lambda: Plain(folder, **options, enforce_eager=True),
        "tables": lambda: VLLM(folder, **options, edits=everywhere, dispatch=True),
        "taps": lambda: VLLM(folder, **options, taps=everywhere, dispatch=True),
        "captures": lambda: VLLM(folder, **options, captures=everywhere, dispatch=True),
        "one tap": lambda: VLLM(folder, **options, taps=one, dispatch=True),
        "one program": lambda: VLLM(folder, **options, programs={"one": programs["one"]}, dispatch=True),
        "program at all layers": lambda: VLLM(folder, **options, programs={"everywhere": programs["everywhere"]}, dispatch=True),
        "four programs": lambda: VLLM(folder, **options, programs=four, dispatch=True),
        "one capture": lambda: VLLM(folder, **options, captures=one, dispatch=True),
    }


def share_weights(engines: Collection[Any]) -> None:
    """Make all engines use the same weight matrices, which oneDNN stores on CPUs in its own layout.

    Reading the matrices takes most of the time of a step. This time depends on their addresses and on the caches, and differs by several
    percent between equal engines. A layer refers to its matrix by a pointer, in a tensor that is an argument of its graph.
    """
    given, *others = ([_matrix(layer) for layer in _module(engine).modules() if _matrix(layer) is not None] for engine in engines)
    for theirs in others:
        for mine, shared in zip(theirs, given, strict=True):
            mine.dtor(mine.handler_tensor.item())
            mine.handler_tensor.copy_(shared.handler_tensor)
            mine.dtor = lambda _: None


def _module(engine: Any) -> torch.nn.Module:
    """Return the module that an engine runs."""
    if isinstance(engine, VLLM):
        return engine._engine._runner.get_model()
    module: torch.nn.Module = engine.engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    return module


def _matrix(layer: torch.nn.Module) -> Any:
    """Return the oneDNN matrix of a linear layer, or ``None``."""
    cells = getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "handler_tensor")), None)


def layers_of(model: Any) -> Any:
    """Return the layers of a model of any shape."""
    return model.transformer.h if "transformer" in model._children else model.model.layers


# -- the work of the contenders ---------------------------------------------------------------------------------------


def without_blocks(model: Any, sampling: dict[str, Any], count: int = REQUESTS) -> list[Any]:
    """Run requests without traces; return their outputs."""
    from vllm import SamplingParams

    outputs: list[Any] = model.engine.generate(PROMPTS[:count], SamplingParams(**sampling), use_tqdm=False)
    return outputs


def steered(model: VLLM, sampling: dict[str, Any], vectors: list[torch.Tensor], numbers: list[int], count: int = REQUESTS) -> None:
    """Run requests that tables steer at the layers ``numbers``; each request uses the next of ``vectors``, in turn."""
    layers = [layers_of(model)[number] for number in numbers]
    with model.trace(**sampling) as tracer:
        for number in range(count):
            with tracer.invoke(PROMPTS[number]):
                for layer in layers:
                    layer.steer(add=vectors[number % len(vectors)])


def reading(model: VLLM, sampling: dict[str, Any], numbers: list[int]) -> None:
    """Run requests with a block that saves the outputs of the layers ``numbers`` at each token."""
    layers = [layers_of(model)[number] for number in numbers]
    with model.trace(**sampling) as tracer:
        for number in range(REQUESTS):
            with tracer.invoke(PROMPTS[number]):
                kept = [].save()
                for _ in tracer.iter[: sampling["max_tokens"]]:
                    for layer in layers:
                        kept.append(layer.output)


def editing(model: VLLM, sampling: dict[str, Any], vector: torch.Tensor, numbers: list[int], stops: float) -> None:
    """Run requests with a block that adds a vector after the layers ``numbers`` at each token, as a program after ``stops`` stops."""
    layers = [layers_of(model)[number] for number in numbers]
    with mock.patch.object(stepping, "STOPS", stops), model.trace(**sampling) as tracer:
        for each in range(REQUESTS):
            with tracer.invoke(PROMPTS[each]):
                for _ in tracer.iter[: sampling["max_tokens"]]:
                    for layer in layers:
                        layer.residual += vector


def programmed(model: VLLM, sampling: dict[str, Any], programs: list[Any], parameters: list[dict[str, Any]], count: int = REQUESTS) -> None:
    """Run requests with programs (or names of programs) and parameters; each request uses the next ones, in turn."""
    with model.trace(**sampling) as tracer:
        for number in range(count):
            with tracer.invoke(PROMPTS[number]):
                model.steer(programs[number % len(programs)], **parameters[number % len(parameters)])


def rows_of(shape: str, sampling: dict[str, Any], of_requests: dict[str, Program]) -> list[Row]:
    """Return the contenders for a shape; ``of_requests`` are programs that requests contain."""
    count, width, _, _ = SHAPES[shape]
    middle, everywhere = count // 2, list(range(count))
    vectors = [torch.randn(width, generator=torch.Generator().manual_seed(seed)) / 10 for seed in range(16)]
    idle = functools.partial(without_blocks, sampling=sampling)
    sixteen = functools.partial(without_blocks, sampling=sampling, count=16)
    first = vectors[:1]
    own = [{"alpha": number / 8, "direction": vectors[number]} for number in range(16)]
    four = ["one", "scaled", "projected", "gated"]
    return [
        Row(PLAIN, PLAIN, idle),
        Row(AGAIN, AGAIN, idle),
        Row(SIXTEEN, PLAIN, sixteen),
        Row(EAGER, EAGER, idle),
        Row("idle: tables at all layers", "tables", idle, 0.99),
        Row("idle: taps at all layers", "taps", idle, 0.99),
        Row("idle: captures at all layers", "captures", idle, 0.99),
        Row("vector at one layer", "tables", lambda model: steered(model, sampling, first, [middle]), 0.98),
        Row("vector at all layers", "tables", lambda model: steered(model, sampling, first, everywhere), 0.94),
        Row("16 vectors in one batch", "tables", lambda model: steered(model, sampling, vectors, [middle], 16), 0.97, SIXTEEN),
        Row("idle: a program at one layer", "one program", idle, 0.99),
        Row("idle: a program at all layers", "program at all layers", idle, 0.99),
        Row("program at one layer", "one program", lambda model: programmed(model, sampling, ["one"], [{}]), 0.98),
        Row("program at all layers", "program at all layers", lambda model: programmed(model, sampling, ["everywhere"], [{}]), 0.94),
        Row("16 parameters of a program", "one program", lambda model: programmed(model, sampling, ["one"], own, 16), 0.97, SIXTEEN),
        Row("4 programs in one batch", "four programs", lambda model: programmed(model, sampling, four, [{}], 16), 0.95, SIXTEEN),
        Row("program of requests at a tap", "one tap", lambda model: programmed(model, sampling, [of_requests["one"]], own)),
        Row("captured: one layer", "one capture", lambda model: reading(model, sampling, [middle]), 0.97),
        Row("captured: one layer of all", "captures", lambda model: reading(model, sampling, [middle])),
        Row("captured: all layers", "captures", lambda model: reading(model, sampling, everywhere), 0.80),
        Row("handoff at one layer", "one tap", lambda model: editing(model, sampling, first[0], [middle], math.inf), 1.0, EAGER),
        Row("handoff at all layers", "taps", lambda model: editing(model, sampling, first[0], everywhere, math.inf)),
        Row("loop as a program at one layer", "one tap", lambda model: editing(model, sampling, first[0], [middle], 0), 1.0, EAGER),
        Row("loop as a program at all layers", "taps", lambda model: editing(model, sampling, first[0], everywhere, 0)),
    ]


# -- measurements -----------------------------------------------------------------------------------------------------


def as_plain(model: Any, plain: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    """Compare requests without traces with those of the plain engine: tokens, logprobs, and the largest distance of logprobs."""
    asked = {**sampling, "logprobs": 5}
    pairs = zip(without_blocks(model, asked), without_blocks(plain, asked), strict=True)
    tokens, furthest = True, 0.0
    for mine, expected in ((one.outputs[0], other.outputs[0]) for one, other in pairs):
        tokens &= list(mine.token_ids) == list(expected.token_ids)
        for step, known in zip(mine.logprobs, expected.logprobs, strict=True):
            both = [(step[token].logprob, known[token].logprob) for token in step.keys() & known.keys()]
            furthest = max([furthest, *(abs(found - wanted) for found, wanted in both)])
            tokens &= step.keys() == known.keys()
    return {"tokens": tokens, "logprobs": tokens and furthest == 0.0, "furthest_logprob": furthest}


def bookkeeping(row: Row, model: Any) -> float:
    """Return the median microseconds of Python that assign the rows of a step to the requests of a row."""
    spent: list[float] = []
    places = [(hooks, "batch_of_v1", True), (hooks, "batch_of_v2", True), (Bookkeeping, "step", False)]
    functions = [getattr(owner, name) for owner, name, _ in places]

    def timed(function: Any, first: bool) -> Any:
        def run(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            seconds = time.perf_counter() - start
            if first:
                spent.append(seconds)
            else:
                spent[-1] += seconds
            return result

        return run

    for (owner, name, first), function in zip(places, functions, strict=True):
        setattr(owner, name, timed(function, first))
    try:
        row.run(model)
    finally:
        for (owner, name, _), function in zip(places, functions, strict=True):
            setattr(owner, name, function)
    return 1e6 * statistics.median(spent)


def measured(rows: list[Row], engines: dict[str, Any], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each row in each round, and the CPU seconds of this thread."""
    times: dict[str, list[tuple[float, float]]] = {row.name: [] for row in rows}
    for number in tqdm(range(rounds + 1), desc="rounds"):
        for row in random.sample(rows, len(rows)):
            gc.collect()
            start, busy = time.perf_counter(), time.thread_time()
            row.run(engines[row.engine])
            found = time.perf_counter() - start, time.thread_time() - busy
            if number:  # the first round is a warm-up
                times[row.name].append(found)
    return times


def ratios(row: Row, times: dict[str, list[tuple[float, float]]], clock: int) -> tuple[float, float, float]:
    """Return the throughput of a row over that of ``row.against``: the median over the rounds, and the quartiles."""
    found = [theirs[clock] / mine[clock] for mine, theirs in zip(times[row.name], times[row.against], strict=True)]
    if len(found) < 2:
        return found[0], found[0], found[0]
    low, middle, high = statistics.quantiles(found, n=4)
    return middle, low, high


def table_of(rows: list[Row], times: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, Any]]:
    """Print the rows, and return them as a table."""
    print(f"{'':30} {'seconds':>8} {'throughput':>11} {'quartiles':>16} {'of processor time':>18} {'bar':>7}")
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        ratio, low, high = ratios(row, times, 0)
        busy, *quartiles = ratios(row, times, 1)
        seconds = statistics.median(found for found, _ in times[row.name])
        bar = "" if row.bar is None else f"{row.bar:.2f}"
        print(f"{row.name:30} {seconds:8.3f} {ratio:11.3f} {f'{low:.3f} .. {high:.3f}':>16} {busy:18.3f} {bar:>7}")
        table[row.name] = {
            "against": row.against,
            "ratio": round(ratio, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "ratio_of_processor_time": round(busy, 4),
            "quartiles_of_processor_time": [round(found, 4) for found in quartiles],
            "median_s": round(seconds, 4),
            "bar": row.bar,
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", choices=SHAPES, default="gpt2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", default="", help="rows with this word, and the rows that they are compared with")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens, to check the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.tokens = 1, 4
    sampling = {"temperature": 0.0, "max_tokens": arguments.tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        programs = recorded_programs(save_model(arguments.shape, folder), arguments.shape)
    rows = rows_of(arguments.shape, sampling, programs)
    chosen = [row for row in rows if arguments.only in row.name and row.engine not in {PLAIN, AGAIN, EAGER}]
    rows = [row for row in rows if row in chosen or row.name in {PLAIN, AGAIN} or row.name in {other.against for other in chosen}]
    with tempfile.TemporaryDirectory() as folder:
        save_model(arguments.shape, folder)
        makers = engine_makers(folder, arguments.shape)
        engines = {name: makers[name]() for name in tqdm(list(dict.fromkeys(row.engine for row in rows)), desc="engines")}
    share_weights(engines.values())
    same = {row.name: as_plain(engines[row.engine], engines[PLAIN], sampling) for row in rows if row.name.startswith("idle")}
    table = table_of(rows, measured(rows, engines, arguments.rounds))
    steps = {row.name: round(bookkeeping(row, engines[row.engine]), 1) for row in rows if row.bar and not row.name.startswith("idle")}
    for name, found in same.items():
        print(f"{name}: tokens {found['tokens']}, logprobs {found['logprobs']} (furthest {found['furthest_logprob']:.1e})")
    for name, microseconds in steps.items():
        print(f"{name}: {microseconds} us of Python in a step assign rows to requests (bar 20)")
    if not arguments.only and not arguments.quick:
        write({**vars(arguments), "rows": table, "as_plain": same, "bookkeeping_us": steps})


def write(found: dict[str, Any]) -> None:
    """Write the results with a description of the machine."""
    import vllm

    machine = {
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "machine_check": machine_check(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }
    RESULTS.write_text(json.dumps({**machine, **found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
