"""The cost of steering and reading during a generation: tokens per second, as ratios measured in one run.

A GPT-2 with 12 layers of width 768 and random weights decodes 64 tokens greedily with a static cache, batch 1 and 8, without gradients:

* the wrapped compiled model without a block, against ``generate`` of transformers with its own compiled decoding;
* one layer steered at every token, by a compiled edit and in a trace with ``tracer.iter[:64]``, and with eager torch hooks, against the
  model edited by hand, which ``generate`` compiles;
* a trace that saves one layer, or all layers, at every token, against ``generate`` of transformers.

On the same shape, with gradients where they are needed:

* attribution patching over the outputs of all MLPs, batch 32, against eager hooks;
* activation patching, batch 32, against eager hooks.

The last two tables also have the model edited by hand and compiled. Its gain over hooks is the upper bound for a trace.

All contenders of a table must give the same tokens. They take turns in a new random order each round, and a ratio is the median over
the rounds of the ratio in one round. After the warm-up no contender may capture, record or compile.

``python benchmarks/decode.py [--rounds N] [--quick]`` prints tables and writes ``benchmarks/results/decode.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine_check
from tqdm.auto import tqdm

import nnsight
from nnsight import LanguageModel, NNsight

RESULTS = Path(__file__).parent / "results" / "decode.json"
TOKENS, PROMPT = 64, 16

#: Layers, width, tokens of the vocabulary.
SHAPE, QUICK_SHAPE = (12, 768, 50257), (2, 64, 128)

Contenders = dict[str, Callable[[], Any]]


class Steered(torch.nn.Module):
    """A block whose output has a vector added at the last position: the edit in the source of the model."""

    def __init__(self, block: torch.nn.Module, vector: torch.Tensor) -> None:
        super().__init__()
        self.block, self.vector = block, vector

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output of the block, steered."""
        hidden: torch.Tensor = self.block(*args, **kwargs)
        hidden[:, -1] += self.vector
        return hidden


def gpt2(shape: tuple[int, int, int]) -> torch.nn.Module:
    """Return a GPT-2 of this shape with fixed random weights and without an end token."""
    layers, width, vocabulary = shape
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=max(1, width // 64), vocab_size=vocabulary, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def measure(title: str, contenders: Contenders, base: str, rounds: int, work: int, bars: dict[str, float]) -> list[dict[str, Any]]:
    """Time ``contenders``, print their work per second and its ratio to that of ``base``, and return the rows of the table.

    ``work`` is the work of one call: the number of tokens, or 1.
    """
    expected = None
    for run in contenders.values():
        for _ in range(3):
            found = run()
        expected = found if expected is None else expected
        assert torch.equal(found, expected) if not found.is_floating_point() else torch.allclose(found, expected, atol=1e-3, rtol=1e-3)
    nnsight.fx.counters.reset()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in tqdm(range(rounds), desc=title):
        for name in random.sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
    counted = nnsight.fx.counters
    assert counted.captures == counted.recordings == counted.compiles == 0, f"{title}: work after the warm-up: {counted}"
    rows = []
    for name, found in times.items():
        ratio = statistics.median(one / other for one, other in zip(times[base], found, strict=True))
        row = {"table": title, "contender": name, "per_second": work / statistics.median(found), "ratio": ratio, "bar": bars.get(name)}
        rows.append(row)
        bar = f"  (bar {bars[name]})" if name in bars else ""
        print(f"{title:28} {name:44} {row['per_second']:9.1f} / s   {ratio:6.3f}{bar}", flush=True)
    return rows


def decoding(shape: tuple[int, int, int], batch: int, rounds: int, only: str | None) -> list[dict[str, Any]]:
    """Measure generations: both tables, or the ``only`` one of "plain" and "steered"."""
    layers, width, vocabulary = shape
    middle = layers // 2
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(width, generator=generator)
    ids = torch.randint(1, vocabulary, (batch, PROMPT), generator=generator)
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "cache_implementation": "static"}
    compiling = transformers.CompileConfig()
    compiling._compile_all_devices = True  # else `generate` compiles on accelerators only

    plain, hand, hooked = gpt2(shape), gpt2(shape), gpt2(shape)
    hand.transformer.h[middle] = Steered(hand.transformer.h[middle], vector)
    model = LanguageModel(gpt2(shape), compile=True)
    editable = LanguageModel(gpt2(shape))
    with editable.edit() as (steps, edited):
        for _ in steps.iter[:]:
            edited.transformer.h[middle].output[:, -1] += vector
    edited.compile()

    def of_transformers(net: Any = plain) -> torch.Tensor:
        made: torch.Tensor = net.generate(ids, attention_mask=torch.ones_like(ids), compile_config=compiling, **options)
        return made

    def of_wrapper(net: Any = model) -> torch.Tensor:
        made: torch.Tensor = net.generate(ids, **options)
        return made

    def steer(module: Any, args: Any, output: torch.Tensor) -> None:
        output[:, -1] += vector

    def hooks() -> torch.Tensor:
        handle = hooked.transformer.h[middle].register_forward_hook(steer)
        try:
            made: torch.Tensor = hooked.generate(ids, attention_mask=torch.ones_like(ids), **options)
        finally:
            handle.remove()
        return made

    def trace() -> torch.Tensor:
        with model.generate(ids, **options) as tracer:
            for _ in tracer.iter[:TOKENS]:
                model.transformer.h[middle].output[:, -1] += vector
            made = tracer.result.save()
        return made

    def saves(chosen: list[int]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            kept: list[list[torch.Tensor]] = []
            with model.generate(ids, **options) as tracer:
                kept = nnsight.save([])
                for _ in tracer.iter[:TOKENS]:
                    kept.append([model.transformer.h[layer].output for layer in chosen])
                made = tracer.result.save()
            assert len(kept) == TOKENS and len(kept[-1]) == len(chosen)
            return made

        return run

    steered: Contenders = {
        "hand-edited, generate of transformers": lambda: of_transformers(hand),
        "compiled edit": lambda: of_wrapper(edited),
        "trace, edit at every token": trace,
        "eager hooks": hooks,
    }
    others: Contenders = {
        "plain, generate of transformers": of_transformers,
        "plain, wrapped and compiled": of_wrapper,
        "trace, one layer saved at every token": saves([middle]),
        "trace, all layers saved at every token": saves(list(range(layers))),
    }
    with torch.no_grad():
        work, found = batch * TOKENS, []
        if only != "steered":
            found += measure(f"decode, batch {batch}", others, next(iter(others)), rounds, work, {
                "plain, wrapped and compiled": 1.0,
                "trace, one layer saved at every token": 0.93,
                "trace, all layers saved at every token": 0.80,
            })  # fmt: skip
        if only != "plain":
            bars = {"compiled edit": 0.97, "trace, edit at every token": 0.97}
            found += measure(f"decode, steered, batch {batch}", steered, next(iter(steered)), rounds, work, bars)
        return found


def patching(shape: tuple[int, int, int], rounds: int, batch: int = 32) -> list[dict[str, Any]]:
    """Measure attribution patching and activation patching."""
    layers, width, vocabulary = shape
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, vocabulary, (batch, PROMPT), generator=generator)
    model, hooked = NNsight(gpt2(shape), compile=True), gpt2(shape)
    clean = torch.randn(batch, PROMPT, width, generator=generator)

    def attribution() -> torch.Tensor:
        with model.trace(ids):
            outputs = [block.mlp.output for block in model.transformer.h]
            loss = model.lm_head.output[:, -1, 0].sum()
            with loss.backward():
                found = torch.stack([(output.grad * output).sum(-1) for output in reversed(outputs)]).detach().save()
        model._module.zero_grad()
        return found

    def attribution_by_hooks() -> torch.Tensor:
        outputs: list[torch.Tensor] = []

        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            outputs.append(output)

        handles = [block.mlp.register_forward_hook(keep) for block in hooked.transformer.h]
        try:
            hooked(ids).logits[:, -1, 0].sum().backward()
        finally:
            for handle in handles:
                handle.remove()
            hooked.zero_grad()
        return torch.stack([(output.grad * output).sum(-1) for output in reversed(outputs)]).detach()  # type: ignore[operator]

    def activation() -> torch.Tensor:
        with torch.no_grad(), model.trace(ids):
            model.transformer.h[layers // 2].output[:] = clean
            found = model.lm_head.output[:, -1].save()
        return found

    def patch(module: Any, args: Any, output: torch.Tensor) -> None:
        output[:] = clean

    def activation_by_hooks() -> torch.Tensor:
        handle = hooked.transformer.h[layers // 2].register_forward_hook(patch)
        try:
            with torch.no_grad():
                return hooked(ids).logits[:, -1]  # type: ignore[no-any-return]
        finally:
            handle.remove()

    by_hand, inputs = gpt2(shape), _Edits()
    for number, block in enumerate(by_hand.transformer.h):
        block.mlp = _Edited(block.mlp, number, inputs)

    @torch.compile
    def attributed(ids: torch.Tensor, zeros: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        inputs.zeros, inputs.outputs = zeros, []
        return by_hand(ids).logits[:, -1, 0].sum(), inputs.outputs

    def attribution_by_hand() -> torch.Tensor:
        zeros = [torch.zeros(batch, PROMPT, width, requires_grad=True) for _ in range(layers)]
        loss, outputs = attributed(ids, zeros)
        loss.backward()
        by_hand.zero_grad()
        pairs = zip(reversed(zeros), reversed(outputs), strict=True)
        return torch.stack([(zero.grad * output).sum(-1) for zero, output in pairs]).detach()  # type: ignore[operator]

    patched = gpt2(shape)
    patched.transformer.h[layers // 2].register_forward_hook(patch)
    compiled = torch.compile(lambda ids: patched(ids).logits[:, -1])

    def activation_by_hand() -> torch.Tensor:
        with torch.no_grad():
            return compiled(ids)  # type: ignore[no-any-return]

    attributions = {"eager hooks": attribution_by_hooks, "hand-edited, compiled": attribution_by_hand, "trace": attribution}
    activations = {"eager hooks": activation_by_hooks, "hand-edited, compiled": activation_by_hand, "trace": activation}
    found = measure("attribution patching", attributions, "eager hooks", rounds, 1, {"trace": 1.3})
    return found + measure("activation patching", activations, "eager hooks", rounds, 1, {"trace": 1.2})


class _Edits:
    """Inputs and outputs of the edits in a model edited by hand for attribution patching: one zero tensor and one output for each MLP."""

    zeros: list[torch.Tensor]
    outputs: list[torch.Tensor]


class _Edited(torch.nn.Module):
    """An MLP with a zero input added to its output; the gradient of this input is the gradient of the output."""

    def __init__(self, mlp: torch.nn.Module, number: int, edits: _Edits) -> None:
        super().__init__()
        self.mlp, self.number, self.edits = mlp, number, edits

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP."""
        output: torch.Tensor = self.mlp(hidden) + self.edits.zeros[self.number]
        self.edits.outputs.append(output)
        return output


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--only", choices=["plain", "steered", "patching"], help="one of the tables; writes nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds, to check the script; writes nothing")
    options = parser.parse_args()
    nnsight.CONFIG.APP.PROGRESS = False
    shape, rounds = (QUICK_SHAPE, 2) if options.quick else (SHAPE, options.rounds)
    rows = []
    if options.only != "patching":
        rows += [row for batch in options.batches for row in decoding(shape, batch, rounds, options.only)]
    if options.only in (None, "patching"):
        rows += patching(shape, rounds)
    machine = {"system": platform.platform(), "python": platform.python_version(), **machine_check()}
    versions = {"nnsight": nnsight.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    if not options.quick and options.only is None:
        command = f"python benchmarks/decode.py --rounds {rounds}"
        RESULTS.write_text(json.dumps({"machine": machine, "versions": versions, "command": command, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
