"""A demonstration of the compiler on the demo model: `python -m tools.demo` in the root of the repository.

It runs classic experiments as blocks that are spliced into the captured graph: an answer with its logit lens, activation
patching, and steering. Finally it compares the time of a steered trace with that of the same edit in the source of the model.

The lengths of prompts differ, so the model is captured with symbolic sizes. Each block is then compiled once, for all
lengths of prompts and all tensors from outside.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import logging as transformers_logging

import nnsight
from nnsight import demo
from nnsight.runtime.report import Report

from .prompts import fact_prompt, labelled_prefixes

CLEAN = fact_prompt("the Eiffel Tower", "{L} is in the city of")
SOURCE = fact_prompt("the Colosseum", "{L} is in the city of")
OPENERS = ("The movie was", "The concert was")
CONTINUATION = 20
EXAMPLES = 60
ROUNDS = 150


def heading(text: str) -> None:
    """Print the title of an experiment."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Print that the model is being compiled, and afterwards the time and the number of compiled graphs."""
    print(f"  compiling {what} ...", end=" ", flush=True)
    before, started = nnsight.fx.counters.compiles, time.perf_counter()
    yield
    compiled = nnsight.fx.counters.compiles - before
    print(f"{time.perf_counter() - started:.1f} s, {compiled} graph{'s' * (compiled != 1)}", flush=True)


class Views:
    """Values of one traced run of a prompt.

    Attributes:
        hidden: Residual stream after each block, [layer, position, width].
        lens: Probabilities of the next token if the model ended after each block, [layer, vocabulary].
        token: The most likely next token.
        report: The report of the trace.
    """

    def __init__(self, hidden: Tensor, lens: Tensor, token: int, report: Report) -> None:
        self.hidden = hidden
        self.lens = lens
        self.token = token
        self.report = report


def look(model: Any, text: str) -> Views:
    """Run `text`, and return the residual stream after every block and its logit lens."""
    with model.trace(text) as tracer:
        hidden = nnsight.save(torch.cat([block.output for block in model.transformer.h]))
        lens = model.lm_head(model.transformer.ln_f(hidden[:, -1])).softmax(-1).save()
        token = model.lm_head.output[0, -1].argmax(-1).save()
    return Views(hidden, lens, int(token), tracer.report)


def patched(model: Any, text: str, layer: int, position: int, value: Tensor) -> int:
    """Run `text` with the residual stream after block `layer` replaced at one position; return the next token."""
    with model.trace(text):
        model.transformer.h[layer].output[:, position] = value
        token = model.lm_head.output[0, -1].argmax(-1).save()
    return int(token)


def steered(model: Any, text: str, layer: int, shift: Tensor) -> tuple[int, Report]:
    """Run `text` with `shift` added to the residual stream after block `layer`; return the next token."""
    with model.trace(text) as tracer:
        model.transformer.h[layer].output += shift
        token = model.lm_head.output[0, -1].argmax(-1).save()
    return int(token), tracer.report


def answer(model: Any) -> dict[str, Views]:
    """Print the model's answers and the layers at which they appear; return the views by prompt."""
    heading("An answer, and the layer where it appears (logit lens)")
    with compiling("the model with a block that reads every layer"):
        look(model, CLEAN.text)
    seen = {prompt.text: look(model, prompt.text) for prompt in (CLEAN, SOURCE)}
    for text, views in seen.items():
        print(f"  {text!r} ->{model.tokenizer.decode(views.token)!r}")
    lens = seen[CLEAN.text].lens
    wanted = model.tokenizer.encode(" " + CLEAN.answer)[0]
    ranks = 1 + (lens > lens[:, wanted, None]).sum(-1)
    width = 18
    print(f"\n  after block  rank of {CLEAN.answer!r}  most likely tokens")
    for layer, (rank, row) in enumerate(zip(ranks, lens, strict=True)):
        top = row.topk(3)
        cells = [
            f"{model.tokenizer.decode(int(token))!r} {probability:.2f}"
            for token, probability in zip(top.indices, top.values, strict=True)
        ]
        print(f"  {layer:11d}  {int(rank):15d}  {''.join(cell.ljust(width) for cell in cells).rstrip()}")
    return seen


def patch(model: Any, seen: dict[str, Views]) -> None:
    """Replace one hidden state by that of another prompt, and print how the answer changes."""
    heading("Activation patching")
    layer = demo.PATCH_SUBJECT_LAYER
    into, out_of = CLEAN.subject_token(model.tokenizer), SOURCE.subject_token(model.tokenizer)
    value = seen[SOURCE.text].hidden[layer, out_of]
    with compiling(f"the model with a patch after block {layer}"):
        token = patched(model, CLEAN.text, layer, into, value)
    print(f"  {CLEAN.text!r} with the hidden state of {SOURCE.subject!r} at {CLEAN.subject!r}")
    print(f"  ->{model.tokenizer.decode(token)!r} instead of{model.tokenizer.decode(seen[CLEAN.text].token)!r}")


def steer(model: Any) -> tuple[Tensor, Report]:
    """Print texts steered by a direction from the model's hidden states; return the direction and a report."""
    heading("Steering")
    layer = demo.STEERING_LAYER
    positive, negative = (
        torch.stack([look(model, text).hidden[layer, -1] for text in texts]).mean(0)
        for texts in labelled_prefixes(EXAMPLES)
    )
    direction = (demo.STEERING_COEFFICIENT * (positive - negative)).detach()
    print(f"  direction: mean state of {EXAMPLES} positive texts minus that of {EXAMPLES} negative ones, block {layer}")
    with compiling(f"the model with a shift after block {layer}"):
        _, report = steered(model, OPENERS[0], layer, direction)
    before = copy.copy(nnsight.fx.counters)
    tokens, started = 0, time.perf_counter()
    for opener in OPENERS:
        for sign in (0.0, 1.0, -1.0):
            text = opener
            for _ in range(CONTINUATION):
                token, report = steered(model, text, layer, sign * direction)
                tokens += 1
                if token == model.tokenizer.eos_token_id:
                    break
                text += model.tokenizer.decode(token)
            print(f"  {sign:+.0f}  {text}")
    seconds = time.perf_counter() - started
    after = nnsight.fx.counters
    print(
        f"  {tokens} traces in {seconds:.1f} s: {after.recordings - before.recordings} recordings, "
        f"{after.compiles - before.compiles} compiles, {after.breaks - before.breaks} breaks"
    )
    return direction, report


def excerpt(code: str, around: int = 1) -> list[str]:
    """Return the lines of spliced code that come from a block, with `around` lines before and after each."""
    lines = code.splitlines()
    marked = [number for number, line in enumerate(lines) if "# <--" in line]
    kept = sorted({near for number in marked for near in range(number - around, number + around + 1)})
    shown: list[str] = []
    for previous, number in zip([-1, *kept], kept, strict=False):
        if not 0 <= number < len(lines):
            continue
        if number > previous + 1:
            shown.append("  ...")
        line = lines[number].strip()
        body, arrow, mark = line.partition("  # <-- ")
        body = body.split(";")[0]
        shown.append(f"  {body if len(body) <= 88 else body[:85] + '...'}{arrow}{mark}")
    return shown


def show(report: Report) -> None:
    """Print the report of a steered trace, and the edited part of its graph."""
    heading("What was spliced (print(tracer.report), and lines of tracer.report.code)")
    print("  " + str(report).replace("\n", "\n  "))
    print("\n".join(excerpt(report.code)))


def written_by_hand(model: Any, layer: int, shift: Tensor) -> torch.nn.Module:
    """Return a copy of the model whose block `layer` has the shift in its source."""
    network = copy.deepcopy(model._module)
    block = network.transformer.h[layer]
    original = type(block)

    class ShiftedBlock(original):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) + self.shift

    block.__class__ = ShiftedBlock
    block.register_buffer("shift", shift, persistent=False)
    return network


def interleaved_medians(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median seconds of each function. The functions take turns, so that other load affects all of them."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, measured in zip(functions, times, strict=True):
            started = time.perf_counter()
            function()
            measured.append(time.perf_counter() - started)
    return [statistics.median(measured) for measured in times]


def arguments_of(model: Any, text: str) -> dict[str, Tensor]:
    """Return the keyword arguments with which the wrapped model is called for `text`."""
    with model.trace(text, compile=False):
        _, arguments = model.inputs
        arguments.save()
    return arguments


def measure(model: Any, direction: Tensor, options: dict[str, Any]) -> None:
    """Print the time of a steered trace relative to the hand-edited model under `torch.compile`."""
    heading("What it costs, against the same edit written into the model's source")
    layer = demo.STEERING_LAYER
    by_hand = torch.compile(written_by_hand(model, layer, direction), **options)
    short, long = (arguments_of(model, text) for text in (OPENERS[0], " ".join([CLEAN.text] * 10)))

    def traced(inputs: dict[str, Tensor]) -> Tensor:
        with model.trace(**inputs):
            model.transformer.h[layer].output += direction
            logits = model.lm_head.output.save()
        return logits

    with compiling("the block with all logits"):
        for inputs in (short, long):
            traced(inputs)
    print("  compiling the hand-edited model ...", end=" ", flush=True)
    started = time.perf_counter()
    for inputs in (short, long):
        by_hand(**inputs)
    print(f"{time.perf_counter() - started:.1f} s")
    print("\n  prompt       by hand       traced  ratio  largest difference of logits")
    for inputs in (short, long):
        difference = (traced(inputs) - by_hand(**inputs).logits).abs().max()
        hand, trace = interleaved_medians(
            [lambda inputs=inputs: by_hand(**inputs), lambda inputs=inputs: traced(inputs)],  # type: ignore[misc]
            ROUNDS,
        )
        length = inputs["input_ids"].shape[1]
        print(
            f"  {length:3d} tokens  {hand * 1e3:7.3f} ms  {trace * 1e3:7.3f} ms  {trace / hand:5.2f}  {difference:.1e}"
        )
    print("  A trace adds a fixed time, so the ratio approaches 1 for larger models. This model is tiny.")


def main() -> None:
    """Run all experiments."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description="Interventions, compiled.")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: %(default)s)")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    options = {"backend": arguments.backend, "dynamic": True}
    started = time.perf_counter()
    model = nnsight.demo_model(compile=options)
    seen = answer(model)
    patch(model, seen)
    direction, report = steer(model)
    show(report)
    measure(model, direction, options)
    print(f"\ndone in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
