"""The cost of steering and reading on a GPU: ratios measured in one run, at the shapes of Llama.

The weights are random, in bfloat16; nothing is loaded. Measured for each shape:

* a forward pass of 1 x 128 tokens without gradients, steered at the middle layer: the eager model with torch hooks, the model edited by
  hand and compiled, a compiled trace, the same program bound to the model, as a compiled edit, and baked. The model edited by hand, the
  compiled trace and the baked model also run with CUDA graphs (``mode="reduce-overhead"``);
* the same pass with the output of one layer saved, and of all layers;
* attribution patching over the outputs of all MLPs, batch 8 x 64: a compiled trace against torch hooks;
* decoding of 64 tokens, without an edit, with one layer saved at each token, and steered at each token: tokens per second, also as a part
  of the rate that the memory bandwidth allows (the measured bytes per second of a copy, over the bytes of the weights);
* the seconds until the first result of a steered trace, on a model that was never compiled and on a compiled one.

Before it is timed, the result of each contender is compared with that of the first one. A contender that fails is in the table with its
error. Generations may differ, because rounding can decide between two equal logits and thus change all later tokens; the table shows the
share of equal tokens. The contenders of a table take turns, in a new random order each round; a figure is the median of the rounds.

``python benchmarks/gpu.py [--shapes 1B,8B] [--rounds N] [--device cpu] [--out FILE]`` prints a table and writes it to
``benchmarks/results/gpu.json``. On the CPU, with ``--shapes tiny``, it checks itself.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# An empty cache of Inductor, so that compile times are those of a first run.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="gpu_")

import torch
import transformers

import nnsight
from nnsight import LanguageModel, NNsight

RESULTS = Path(__file__).parent / "results" / "gpu.json"

#: Layers, width, width of the MLP, heads, heads of keys and values, tokens of the vocabulary.
SHAPES = {
    "tiny": (3, 64, 128, 4, 2, 320),
    "1B": (16, 2048, 8192, 32, 8, 128256),
    "8B": (32, 4096, 14336, 32, 8, 128256),
}
SEQUENCE, TOKENS = 128, 64
GRAPHS = "reduce-overhead"

#: The largest distance of a result from that of the first contender, relative to its norm. bfloat16 has eight bits, and a compiled model
#: rounds at other places. A result without the edit has a larger distance.
TOLERANCE = 5e-2

Contenders = dict[str, Callable[[], Any]]


class Bench:
    """One model and its measurements.

    Args:
        shape: A name in :data:`SHAPES`.
        device: Where the weights are.
        rounds: How often each contender is timed.
    """

    def __init__(self, shape: str, device: str, rounds: int) -> None:
        self.shape, self.device, self.rounds = shape, device, rounds
        layers, width, wide, heads, groups, vocabulary = SHAPES[shape]
        self.config = transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=wide, num_attention_heads=heads,
            num_key_value_heads=groups, vocab_size=vocabulary, max_position_embeddings=4096,
            bos_token_id=0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            self.net = transformers.LlamaForCausalLM(self.config).to(torch.bfloat16).eval()
        self.middle = layers // 2
        self.vector = torch.randn(width, device=device).to(torch.bfloat16)
        self.ids = torch.randint(1, vocabulary, (1, SEQUENCE), device=device)
        self.rows: list[dict[str, Any]] = []

    def fresh(self) -> torch.nn.Module:
        """Return a model with new modules and the same weight tensors."""
        with torch.device("meta"):
            other = transformers.LlamaForCausalLM(self.config).to(torch.bfloat16).eval()
        other.load_state_dict(self.net.state_dict(), assign=True)
        # Its buffers are computed from the configuration and are not in the state dict.
        other.model.rotary_emb = copy.deepcopy(self.net.model.rotary_emb)
        return other

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the time of one call, including all its work on the device."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def table(self, title: str, contenders: Contenders, reference: str, rounds: int, warm: int = 3, tolerance: float = TOLERANCE) -> None:
        """Compare the results of the contenders with those of ``reference``, time them, and add rows with ratios to its time."""
        expected, errors, same = flat(contenders[reference]()), {}, {}
        for name, contender in contenders.items():
            try:
                for _ in range(warm):
                    same[name] = check(flat(contender()), expected, tolerance)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        running = {name: contender for name, contender in contenders.items() if name not in errors}
        nnsight.fx.counters.reset()
        times: dict[str, list[float]] = {name: [] for name in running}
        order = random.Random(0)
        for _ in range(rounds):
            for name in order.sample(list(running), len(running)):
                times[name].append(self.seconds(running[name]))
        again = nnsight.fx.counters.captures, nnsight.fx.counters.compiles
        for name in contenders:
            row: dict[str, Any] = {"shape": self.shape, "table": title, "what": name}
            if name in errors:
                row["error"] = errors[name]
            else:
                ratios = [mine / other for mine, other in zip(times[name], times[reference], strict=True)]
                row |= {"milliseconds": 1e3 * statistics.median(times[name]), "ratio": statistics.median(ratios)}
            if same.get(name) is not None:
                row["same_tokens"] = same[name]
            self.rows.append(row)
            print_row(row)
        if any(again):
            print(f"  {again[0]} captures and {again[1]} compiles while timed", flush=True)
            self.rows[-1]["captures, compiles while timed"] = again
        torch._dynamo.reset()
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    # -- tables ---------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def steering(self) -> None:
        """One edit in a forward pass."""
        layer, ids, vector = self.middle, self.ids, self.vector
        options: list[Any] = [True, True, {"regions": False}, {"mode": GRAPHS}]
        model, edited_model, in_one, graphs = (NNsight(self.fresh(), compile=compile) for compile in options)
        hooked, by_hand = self.fresh(), hand_edited(self.fresh(), layer, vector)

        def trace(model: NNsight, compile: bool = True) -> Any:
            with model.trace(ids, compile=compile):
                model.model.layers[layer].output[:, -1] += 4.0 * vector
                logits = model.lm_head.output.save()
            return logits

        with model.trace(ids, program=True) as recorded:
            model.model.layers[layer].output[:, -1] += 4.0 * vector
            logits = model.lm_head.output.save()  # noqa: F841 - a saved name is part of the program
        bound = recorded.program.bind(model, inputs=["vector"])
        with edited_model.edit() as edited:
            edited_model.model.layers[layer].output[:, -1] += 4.0 * vector
        baked = edited.bake()
        edited.compile()
        plain, hand, baked_compiled = (torch.compile(net) for net in (self.fresh(), by_hand, baked))
        hand_graphs = torch.compile(hand_edited(self.fresh(), layer, vector), mode=GRAPHS)
        baked_graphs = torch.compile(edited.bake(), mode=GRAPHS)

        def hooks() -> Any:
            with steering_hook(hooked, layer, vector):
                return hooked(ids).logits

        self.table(
            "steer one layer, forward",
            {
                "hand-edited, compiled": lambda: hand(ids).logits,
                "torch hooks": hooks,
                "eager trace": lambda: trace(model, False),
                "compiled trace": lambda: trace(model),
                "compiled trace, one graph": lambda: trace(in_one),
                "bound program": lambda: bound(ids, vector=vector)["logits"],
                "compiled edit": lambda: edited(ids).logits,
                "baked, compiled": lambda: baked_compiled(ids).logits,
                "hand-edited, CUDA graphs": lambda: hand_graphs(ids).logits,
                "compiled trace, CUDA graphs": lambda: trace(graphs),
                "baked, CUDA graphs": lambda: baked_graphs(ids).logits,
            },
            "hand-edited, compiled",
            self.rounds,
        )
        self.table(
            "no edit, forward",
            {
                "plain, compiled": lambda: plain(ids).logits,
                "wrapped, compiled": lambda: model(ids).logits,
                "plain, eager": lambda: hooked(ids).logits,
            },
            "plain, compiled",
            self.rounds,
        )

    @torch.no_grad()
    def capture(self) -> None:
        """Outputs of one layer and of all layers."""
        ids = self.ids
        model, hooked = NNsight(self.fresh(), compile=True), self.fresh()
        for title, layers in (("save one layer", [self.middle]), ("save all layers", list(range(self.config.num_hidden_layers)))):
            hand = torch.compile(Keeping(self.fresh(), layers))

            def trace(layers: list[int] = layers) -> Any:
                with model.trace(ids):
                    kept = [model.model.layers[layer].output.save() for layer in layers]
                    kept.save()
                    logits = model.lm_head.output.save()
                return logits, kept

            def hooks(layers: list[int] = layers) -> Any:
                kept: list[torch.Tensor] = []
                handles = [
                    hooked.model.layers[layer].register_forward_hook(lambda module, args, output: kept.append(output)) for layer in layers
                ]
                logits = hooked(ids).logits
                for handle in handles:
                    handle.remove()
                return logits, kept

            def by_hand(hand: Any = hand) -> Any:
                return hand(ids)

            contenders = {"hand-edited, compiled": by_hand, "torch hooks": hooks, "compiled trace": trace}
            self.table(title, contenders, "hand-edited, compiled", self.rounds)

    def attribution(self) -> None:
        """Gradient times activation at the output of each MLP, for a metric of the logits."""
        ids = torch.randint(1, self.config.vocab_size, (8, 64), device=self.device)
        model, hooked = NNsight(self.fresh(), compile=True), self.fresh()

        def trace(compile: bool) -> Any:
            with model.trace(ids, compile=compile):
                kept = [layer.mlp.output for layer in model.model.layers]
                metric = model.lm_head.output[:, -1].float().logsumexp(-1).sum()
                with metric.backward():
                    effects = [(each.grad * each).sum((1, 2)) for each in reversed(kept)]
                    effects.save()
            return effects

        def hooks() -> Any:
            kept: list[torch.Tensor] = []

            def keep(module: Any, args: Any, output: torch.Tensor) -> None:
                output.retain_grad()
                kept.append(output)

            handles = [layer.mlp.register_forward_hook(keep) for layer in hooked.model.layers]
            hooked(ids).logits[:, -1].float().logsumexp(-1).sum().backward()
            for handle in handles:
                handle.remove()
            return [(each.grad * each).sum((1, 2)) for each in reversed(kept)]

        for net in (hooked, model._module):
            net.requires_grad_(False)
            net.model.embed_tokens.weight.requires_grad_(True)

        def cleared(work: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                result = work()
                self.net.zero_grad()
                return result

            return run

        contenders = {
            "torch hooks": cleared(hooks), "compiled trace": cleared(lambda: trace(True)), "eager trace": cleared(lambda: trace(False)),
        }  # fmt: skip
        # A sum of products of rounded gradients is less exact than the logits.
        self.table("attribution patching, 8 x 64", contenders, "torch hooks", self.rounds, tolerance=0.2)

    @torch.no_grad()
    def decoding(self) -> None:
        """Tokens per second, without an edit, and with one layer saved at each token."""
        ids, layer, (_, static) = self.ids[:, :32], self.middle, self.decoding_options()
        plain = self.fresh()
        model, graphs = (LanguageModel(self.fresh(), compile=compile) for compile in (True, {"mode": GRAPHS}))

        def save(model: LanguageModel) -> Any:
            with model.generate(ids, **static) as tracer:
                kept = nnsight.save([])
                for _ in tracer.iter[:TOKENS]:
                    kept.append(model.model.layers[layer].output)
                tokens = tracer.result.save()
            assert len(kept) == TOKENS
            return tokens

        self.decode(
            f"decode {TOKENS} tokens",
            {
                "transformers compiles, static cache": lambda: plain.generate(ids, **static),
                "wrapped, compiled, static cache": lambda: model.generate(ids, **static),
                "wrapped, CUDA graphs, static cache": lambda: graphs.generate(ids, **static),
                "one layer saved, static cache": lambda: save(model),
                "one layer saved, CUDA graphs, static cache": lambda: save(graphs),
            },
        )

    @torch.no_grad()
    def steered_decoding(self) -> None:
        """Tokens per second, steered at each token."""
        ids, layer, vector, (options, static) = self.ids[:, :32], self.middle, self.vector, self.decoding_options()
        hooked, hand = self.fresh(), hand_edited(self.fresh(), layer, vector)
        model, graphs = (LanguageModel(self.fresh(), compile=compile) for compile in (True, {"mode": GRAPHS}))
        with LanguageModel(self.fresh()).edit() as (steps, edited):
            for _ in steps.iter[:]:
                edited.model.layers[layer].output[:, -1] += 4.0 * vector
        baked = edited.bake()
        edited.compile(mode=GRAPHS)

        def hooks() -> Any:
            with steering_hook(hooked, layer, vector):
                return hooked.generate(ids, **options)

        def trace(model: LanguageModel, **given: Any) -> Any:
            with model.generate(ids, **given) as tracer:
                for _ in tracer.iter[:TOKENS]:
                    model.model.layers[layer].output[:, -1] += 4.0 * vector
                tokens = tracer.result.save()
            return tokens

        self.decode(
            f"decode {TOKENS} tokens, steered",
            {
                "hand-edited, transformers compiles, static cache": lambda: hand.generate(ids, **static),
                "baked, transformers compiles, static cache": lambda: baked.generate(ids, **static),
                "torch hooks": hooks,
                "eager trace": lambda: trace(model, compile=False, **options),
                "compiled trace, static cache": lambda: trace(model, **static),
                "compiled trace, CUDA graphs, static cache": lambda: trace(graphs, **static),
                "compiled edit, CUDA graphs, static cache": lambda: edited.generate(ids, **static),
            },
        )

    def decoding_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return options of ``generate`` for a growing cache and for a static one."""
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        return options, {**options, "cache_implementation": "static"}

    def decode(self, title: str, contenders: Contenders) -> None:
        """Compare and time generations; print tokens per second."""
        first = len(self.rows)
        self.table(title, contenders, next(iter(contenders)), max(2, self.rounds // 8), warm=2)
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.net.parameters())
        limit = self.bandwidth() / (weights - self.net.model.embed_tokens.weight.numel() * 2)
        for row in self.rows[first:]:
            if "milliseconds" in row:
                row["tokens_per_second"] = TOKENS / row["milliseconds"] * 1e3
                row["of_bandwidth_limit"] = row["tokens_per_second"] / limit
                rate, part = row["tokens_per_second"], row["of_bandwidth_limit"]
                print(f"  {row['what']:50} {rate:9.1f} tokens/s, {part:.2f} of the limit", flush=True)

    def bandwidth(self) -> float:
        """Return the bytes per second that a copy within the device reads and writes."""
        source = torch.empty(2**28 if self.device != "cpu" else 2**22, dtype=torch.float32, device=self.device).normal_()
        target = torch.empty_like(source)
        times = [self.seconds(lambda: target.copy_(source)) for _ in range(9)]
        return 2 * source.numel() * 4 / statistics.median(times)

    @torch.no_grad()
    def first_result(self) -> None:
        """Seconds until a new block has its first compiled result."""
        model = NNsight(self.fresh(), compile=True)

        def trace(layer: int) -> Any:
            with model.trace(self.ids):
                model.model.layers[layer].output[:, -1] += 4.0 * self.vector
                logits = model.lm_head.output.save()
            return logits

        cold = self.seconds(lambda: trace(self.middle))
        other = self.seconds(lambda: trace(self.middle - 1))
        torch._dynamo.reset()
        hand = torch.compile(hand_edited(self.fresh(), self.middle, self.vector))
        by_hand = self.seconds(lambda: hand(self.ids))
        for what, seconds in (("hand-edited, compiled", by_hand), ("compiled trace", cold), ("another layer", other)):
            row = {"shape": self.shape, "table": "first result", "what": what, "milliseconds": seconds * 1e3, "ratio": seconds / by_hand}
            self.rows.append(row)
            print_row(row)
        torch._dynamo.reset()


class Keeping(torch.nn.Module):
    """A model edited by hand to return its logits and the outputs of ``layers``."""

    def __init__(self, net: torch.nn.Module, layers: list[int]) -> None:
        super().__init__()
        for layer in layers:
            net.model.layers[layer] = StoringLayer(net.model.layers[layer])
        self.net, self.layers = net, layers

    def forward(self, ids: torch.Tensor) -> Any:
        logits = self.net(ids).logits
        return logits, [self.net.model.layers[layer].kept for layer in self.layers]


class Wrapping(torch.nn.Module):
    """A module that replaces ``block`` and has its attributes."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class StoringLayer(Wrapping):
    """A layer that stores its output in ``kept``."""

    kept: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.kept = self.block(*args, **kwargs)
        return self.kept


class Steered(Wrapping):
    """A layer with a vector added to the last position of its output."""

    def __init__(self, block: torch.nn.Module, vector: torch.Tensor) -> None:
        super().__init__(block)
        self.register_buffer("vector", vector, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.block(*args, **kwargs)
        hidden[:, -1] += 4.0 * self.vector
        return hidden


def hand_edited(net: torch.nn.Module, layer: int, vector: torch.Tensor) -> torch.nn.Module:
    """Replace a layer by :class:`Steered`; return ``net``."""
    net.model.layers[layer] = Steered(net.model.layers[layer], vector)
    return net


@contextmanager
def steering_hook(net: torch.nn.Module, layer: int, vector: torch.Tensor) -> Iterator[None]:
    """Add the vector in a torch hook."""

    def steer(module: Any, args: Any, output: torch.Tensor) -> None:
        output[:, -1] += 4.0 * vector

    handle = net.model.layers[layer].register_forward_hook(steer)
    try:
        yield
    finally:
        handle.remove()


def flat(value: Any) -> list[torch.Tensor]:
    """Return copies of the tensors in a result: CUDA graphs write into the same memory at the next call."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    return [tensor for item in value for tensor in flat(item)]


def check(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> float | None:
    """Compare results, and return the share of equal tokens, or ``None`` if the results are not tokens."""
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    same = None
    for one, other in zip(found, expected, strict=True):
        if one.is_floating_point():
            apart = (one.double() - other.double()).norm() / other.double().norm()
            assert apart <= tolerance, f"the result is {apart:.3g} of its norm away from that of the first contender"
        else:
            same = (one == other).double().mean().item()
    return same


def print_row(row: dict[str, Any]) -> None:
    """Print one line of a table."""
    figures = row.get("error") or f"{row['milliseconds']:10.3f} ms  x {row['ratio']:.3f}"
    if "same_tokens" in row:
        figures += f"  {row['same_tokens']:.2f} of the tokens the same"
    print(f"{row['shape']:5} {row['table']:30} {row['what']:50} {figures}", flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1B,8B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tables", default="steering,capture,attribution,decoding,steered_decoding,first_result")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    nnsight.CONFIG.APP.PROGRESS = False
    card = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    command = f"python benchmarks/gpu.py --shapes {options.shapes} --rounds {options.rounds}"
    report: dict[str, Any] = {"device": card, "versions": versions, "command": command, "rows": []}
    for shape in options.shapes.split(","):
        bench = Bench(shape, options.device, options.rounds)
        for table in options.tables.split(","):
            start, before = time.perf_counter(), len(bench.rows)
            try:
                getattr(bench, table)()
            except Exception as error:
                bench.rows.append({"shape": shape, "table": table, "what": "", "error": f"{type(error).__name__}: {error}"[:500]})
                print_row(bench.rows[-1])
            print(f"{'':5} {table}: {time.perf_counter() - start:.0f} s", flush=True)
            # Write after each table, so that an interrupted run loses only one table.
            report["rows"] += bench.rows[before:]
            options.out.write_text(json.dumps(report, indent=2) + "\n")
        del bench
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
