"""The cost of a notebook with 15 typical cells, with all defaults: ``model.compile()``, gradients, cache, Inductor.

The cells are those of a newcomer's notebook on a GPT-2: prompts of several lengths, a batch, the logit lens, patching, steering,
attribution, generation, operations behind ``.source``, a skip, a cache, an edit. Each cell runs twice. The first run is the time that
a user waits; the second run shows the cost when everything is compiled. There are two models: the demo model, and a GPT-2 with 12
layers of width 768 and random weights.

Contenders, each in a separate process:

* *eager*: the same cells on the eager model, which is also the reference for values;
* *compiled*: with an empty cache of compiled code;
* *second process*: compiled, with the cache of compiled code that the previous contender has filled;
* with ``--against REV``: the last two with the package at that revision of git.

The counts of each cell come from ``nnsight.fx.counters``: captures, recordings, compiles, loads, reuses and breaks (a compiled trace
without a captured graph counts as a break, too). Once torch's own limit of captures is reached, a cell counts as failed, because new
code then runs uncompiled. A cell that raises is reported with the last line of its error, and a value that differs from eager by more
than rounding is an error. CPU seconds include the compilers that the process starts; on a shared machine they are more reliable than
the clock. Totals and ratios cover the first runs of the cells that failed for no contender.

``python benchmarks/notebook.py [--against REV] [--models NAME ...] [--cells NAME ...] [--quick]`` prints tables and writes
``benchmarks/results/notebook.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "notebook.json"
COUNTS = ("captures", "recordings", "compiles", "loads", "reuses", "breaks")

FACT = "The Eiffel Tower is in the city of"
SOURCE = "The Colosseum is in the city of"
PROMPTS = (
    "Hello",
    FACT,
    "The movie was good and the concert was",
    "The Eiffel Tower is in the city of Paris and the Colosseum is in the city of",
)
OPENERS = ["The movie was", "The concert was", "Hello", FACT]

#: Records the tracer and the tensors of a trace in a cell.
See = Callable[..., None]
Cell = Callable[[Any, See], None]
Row = dict[str, Any]


# -- the notebook ---------------------------------------------------------------------------------------------------------


def lengths(model: Any, see: See) -> None:
    """Prompts of several lengths."""
    for prompt in PROMPTS:
        with model.trace(prompt) as tracer:
            mlp = model.transformer.h[0].mlp.output.save()
            logits = model.lm_head.output.save()
        see(tracer, mlp, logits)


def every_layer(model: Any, see: See) -> None:
    """The residual stream after every layer."""
    with model.trace(FACT) as tracer:
        hidden = [layer.output.save() for layer in model.transformer.h].save()
    see(tracer, *hidden)


def logit_lens(model: Any, see: See) -> None:
    """The predictions of the head from every layer."""
    with model.trace(SOURCE) as tracer:
        streams = (model.transformer.ln_f(layer.output[:, -1]) for layer in model.transformer.h)
        lens = [model.lm_head(stream).softmax(-1).save() for stream in streams].save()
    see(tracer, *lens)


def batch(model: Any, see: See) -> None:
    """Several prompts as invokes of one trace."""
    with model.trace() as tracer:
        with tracer.invoke(FACT):
            one = model.lm_head.output[:, -1].save()
        with tracer.invoke(SOURCE):
            model.transformer.h[2].output *= 0.5
            two = model.lm_head.output[:, -1].save()
        with tracer.invoke("Hello"):
            three = model.transformer.h[1].output.save()
    see(tracer, one, two, three)


def patching(model: Any, see: See) -> None:
    """A hidden state of one prompt in the run of another, layer by layer."""
    with model.trace(SOURCE) as tracer:
        hidden = [layer.output[:, -1].save() for layer in model.transformer.h].save()
    see(tracer, *hidden)
    for index, state in enumerate(hidden):
        with model.trace(FACT) as tracer:
            model.transformer.h[index].output[:, -1] = state
            logits = model.lm_head.output[:, -1].save()
        see(tracer, logits)


def patching_in_a_batch(model: Any, see: See) -> None:
    """The same patch between two invokes, where one waits for the other."""
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(SOURCE):
            state = model.transformer.h[3].output[:, -1]
            barrier()
        with tracer.invoke(FACT):
            barrier()
            model.transformer.h[3].output[:, -1] = state
            patched = model.lm_head.output[:, -1].save()
    see(tracer, patched)


def steering(model: Any, see: See) -> None:
    """A vector added at one layer, with several strengths."""
    import torch

    vector = torch.linspace(-1, 1, model.config.n_embd)
    for strength in (1.0, 2.0, 4.0):
        with model.trace(OPENERS[0]) as tracer:
            model.transformer.h[4].output += strength * vector
            logits = model.lm_head.output.save()
        see(tracer, logits)


def attribution(model: Any, see: See) -> None:
    """Gradients of a logit with respect to the output of every layer, times this output."""
    with model.trace(FACT) as tracer:
        hidden = [layer.output for layer in model.transformer.h]
        loss = model.lm_head.output[0, -1].max()
        with loss.backward():
            scores = [(state * state.grad).sum(-1).save() for state in reversed(hidden)].save()
    see(tracer, *scores)


def source(model: Any, see: See) -> None:
    """An operation inside an attention module."""
    with model.trace(FACT) as tracer:
        attention = model.transformer.h[1].attn.source.attention_interface_0.output[0].save()
        logits = model.lm_head.output.save()
    see(tracer, attention, logits)


def skip(model: Any, see: See) -> None:
    """A skipped layer."""
    with model.trace(FACT) as tracer:
        model.transformer.h[1].skip(model.transformer.h[0].output)
        logits = model.lm_head.output.save()
    see(tracer, logits)


def cache(model: Any, see: See) -> None:
    """A cache of the outputs of all MLPs."""
    with model.trace(FACT) as tracer:
        kept = tracer.cache(modules=[layer.mlp for layer in model.transformer.h])
    see(tracer, *[kept[f"model.transformer.h.{index}.mlp"].output for index in range(len(model.transformer.h))])


def generation(model: Any, see: See) -> None:
    """Six generated tokens of one prompt, read one by one."""
    with model.generate(FACT, max_new_tokens=6, do_sample=False) as tracer:
        tokens = [].save()
        for _step in tracer.iter[:6]:
            tokens.append(model.lm_head.output[0, -1].argmax(-1))
        ids = tracer.result.save()
    see(tracer, ids, *tokens)


def steered_generation(model: Any, see: See) -> None:
    """Six generated tokens of a batch of four prompts, steered at each step."""
    import torch

    vector = torch.linspace(-1, 1, model.config.n_embd)
    with model.generate(OPENERS, max_new_tokens=6, do_sample=False) as tracer:
        for _step in tracer.iter[:6]:
            model.transformer.h[4].output += vector
        ids = tracer.result.save()
    see(tracer, ids)


def edit(model: Any, see: See) -> None:
    """A persistent edit: a trace and a generation of the edited model."""
    with model.edit() as edited:
        model.transformer.h[2].mlp.output[:] *= 0.5
    with edited.trace(SOURCE) as tracer:
        logits = edited.lm_head.output.save()
    see(tracer, logits)
    see(None, edited.generate(SOURCE, max_new_tokens=3, do_sample=False))


def without_gradients(model: Any, see: See) -> None:
    """An evaluation: many prompts under ``no_grad``, one by one and as a batch."""
    import torch

    with torch.no_grad():
        for prompt in PROMPTS:
            with model.trace(prompt) as tracer:
                logits = model.lm_head.output[:, -1].save()
            see(tracer, logits)
        with model.trace(OPENERS) as tracer:
            logits = model.lm_head.output[:, -1].save()
        see(tracer, logits)


CELLS: tuple[Cell, ...] = (
    lengths,
    every_layer,
    logit_lens,
    batch,
    patching,
    patching_in_a_batch,
    steering,
    attribution,
    source,
    skip,
    cache,
    generation,
    steered_generation,
    edit,
    without_gradients,
)


# -- one contender, in a separate process ---------------------------------------------------------------------------------


def demo() -> Any:
    import nnsight

    return nnsight.demo_model()


def gpt2() -> Any:
    """Return a GPT-2 of 12 layers and width 768 with random weights, and the tokenizer of the demo model."""
    import torch
    import transformers

    import nnsight
    from nnsight.demo import path

    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path())
    return nnsight.LanguageModel(module, tokenizer=tokenizer)


MODELS: dict[str, Callable[[], Any]] = {"demo": demo, "gpt2": gpt2}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all processes that it has started, including running ones."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    if not Path("/proc/self/stat").exists():
        return total
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            spent[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def is_below(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return total + sum(seconds for process, seconds in spent.items() if is_below(process))


class LimitReached(logging.Handler):
    """Detects that torch has reached its limit of captures, after which new code runs uncompiled."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reached = False

    def emit(self, record: logging.LogRecord) -> None:
        self.reached |= "recompile_limit" in record.getMessage()


def run_cell(cell: Cell, model: Any) -> Row:
    """Run a cell once."""
    from nnsight import fx

    fx.counters.reset()
    tensors: list[Any] = []
    uncompiled = 0

    def see(tracer: Any, *seen: Any) -> None:
        nonlocal uncompiled
        if tracer is not None and tracer.report.mode == "compiled":
            uncompiled += tracer.report.graphs == 0
        tensors.extend(tensor.detach().clone() for tensor in seen)

    row: Row = {"error": None}
    start, start_cpu = time.perf_counter(), cpu_seconds()
    try:
        cell(model, see)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
    row["seconds"], row["cpu_seconds"] = time.perf_counter() - start, cpu_seconds() - start_cpu
    row.update({name: getattr(fx.counters, name) for name in COUNTS})
    row["breaks"] += uncompiled
    row["tensors"] = tensors
    return row


def differs(tensors: list[Any], reference: list[Any]) -> str | None:
    """Return a message about the first value that differs from the eager one, or ``None``."""
    import torch

    for ours, theirs in zip(tensors, reference, strict=True):
        try:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        except AssertionError as error:
            return f"a value differs: {' '.join(str(error).split())}"
    return None


def measure(model_name: str, backend: str | None, cells: list[str], reference: Path) -> list[Row]:
    """Run the notebook in this process, compiled if ``backend`` is given, and compare values with the file of the eager run."""
    import torch
    from tqdm.auto import tqdm

    expected: dict[str, list[Any]] = torch.load(reference) if reference.exists() else {}
    model = MODELS[model_name]()
    if backend is not None:
        model.compile(**({} if backend == "default" else {"backend": backend}))
    rows: list[Row] = []
    seen: dict[str, list[Any]] = {}
    limit = LimitReached()
    logging.getLogger("torch._dynamo").addHandler(limit)
    for cell in tqdm([cell for cell in CELLS if cell.__name__ in cells], desc=model_name, leave=False):
        row = run_cell(cell, model)
        seen[cell.__name__] = row.pop("tensors")
        again = (
            run_cell(cell, model)
            if row["error"] is None
            else {"seconds": None, "error": None, **dict.fromkeys(COUNTS, 0)}
        )
        row["error"] = row["error"] or again["error"]
        if row["error"] is None and cell.__name__ in expected:
            row["error"] = differs(seen[cell.__name__], expected[cell.__name__]) or differs(
                again["tensors"], expected[cell.__name__]
            )
        if row["error"] is None and limit.reached:
            row["error"] = "torch captures no more: what is new runs uncompiled from here on"
        row["again_seconds"] = again["seconds"]
        row["again"] = {name: again[name] for name in COUNTS if again[name]}
        rows.append({"cell": cell.__name__, **row})
    if backend is None:
        torch.save(seen, reference)
    return rows


# -- all of them ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tree_at(revision: str) -> Iterator[Path]:
    """Check out ``revision`` in a temporary folder; yield the folder."""
    with tempfile.TemporaryDirectory(prefix="notebook_tree_") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(HERE)]
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def run_apart(
    tree: Path, model: str, backend: str | None, cells: list[str], reference: Path, compile_cache: Path
) -> list[Row]:
    """Run the notebook in a separate process, with the package of ``tree``."""
    result = compile_cache.parent / "rows.json"
    command = [sys.executable, __file__, "--in-this-process", str(result), "--models", model, "--cells", *cells]
    command += ["--reference", str(reference), *(["--backend", backend] if backend else [])]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compile_cache), "PYTHONPATH": str(tree)}
    subprocess.run(command, env=environment, check=True)
    rows: list[Row] = json.loads(result.read_text())
    return rows


def totals(rows: list[Row], cells: set[str]) -> Row:
    """Return the sums of times and counts over the first runs of ``cells``."""
    chosen = [row for row in rows if row["cell"] in cells]
    names = ("seconds", "cpu_seconds", *COUNTS)
    return {name: sum(row[name] for row in chosen) for name in names}


def show(model: str, found: dict[str, list[Row]]) -> None:
    """Print a table for each contender, with times and counts of each cell."""
    for contender, rows in found.items():
        print(f"\n{model}, {contender}")
        head = "".join(f"{name:>11}" for name in COUNTS)
        print(f"  {'cell':22}{'first s':>9}{'CPU s':>9}{'again ms':>10}{head}")
        for row in rows:
            again = "" if row["again_seconds"] is None else f"{1e3 * row['again_seconds']:.1f}"
            counts = "".join(f"{row[name]:>11}" for name in COUNTS)
            print(f"  {row['cell']:22}{row['seconds']:>9.2f}{row['cpu_seconds']:>9.2f}{again:>10}{counts}")
            if row["error"]:
                print(f"      {row['error'][:140]}")
            if row["again"]:
                print(f"      again: {row['again']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="a revision of git to compare with")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--cells", nargs="+", choices=[cell.__name__ for cell in CELLS], default=[cell.__name__ for cell in CELLS]
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the figures")
    for option in ("--in-this-process", "--reference"):
        parser.add_argument(option, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument(
        "--quick", action="store_true", help="the demo model, lowered node by node, no file: to try the script"
    )
    arguments = parser.parse_args()
    if arguments.in_this_process:
        rows = measure(arguments.models[0], arguments.backend, arguments.cells, arguments.reference)
        arguments.in_this_process.write_text(json.dumps(rows))
        return
    backend = "default"
    if arguments.quick:
        arguments.models, backend = ["demo"], "eager"

    contenders: dict[str, dict[str, list[Row]]] = {}
    with contextlib.ExitStack() as stack:
        trees = {"": HERE.parent}
        if arguments.against:
            trees[f" at {arguments.against}"] = stack.enter_context(tree_at(arguments.against))
        for model in arguments.models:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="notebook_")))
            reference = folder / "reference.pt"
            found = contenders[model] = {}
            found["eager"] = run_apart(HERE.parent, model, None, arguments.cells, reference, folder / "unused")
            for suffix, tree in trees.items():
                compile_cache = folder / f"cache{tree.name}"
                for name in ("compiled", "second process"):
                    found[name + suffix] = run_apart(tree, model, backend, arguments.cells, reference, compile_cache)
            show(model, found)

    summary: dict[str, Any] = {}
    for model, found in contenders.items():
        good = set.intersection(*({row["cell"] for row in rows if row["error"] is None} for rows in found.values()))
        sums = {name: totals(rows, good) for name, rows in found.items()}
        summary[model] = {
            "cells that no contender failed in": len(good),
            "failed": {name: [row["cell"] for row in rows if row["error"]] for name, rows in found.items()},
            "totals": sums,
            "second process / compiled": sums["second process"]["seconds"] / sums["compiled"]["seconds"],
        }
        if arguments.against:
            before = sums[f"compiled at {arguments.against}"]
            for unit in ("seconds", "cpu_seconds"):
                summary[model][f"compiled / compiled at {arguments.against}, {unit}"] = (
                    sums["compiled"][unit] / before[unit]
                )
            summary[model][f"second process / compiled at {arguments.against}"] = (
                sums["second process"]["seconds"] / before["seconds"]
            )
        print(f"\n{model}: " + json.dumps(summary[model], indent=2))
    if arguments.quick:
        return

    import torch
    import transformers
    from machine import machine_check

    account = {
        "command": " ".join(["python benchmarks/notebook.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "machine_check": machine_check(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(
        json.dumps({"environment": account, "summary": summary, "rows": contenders}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
