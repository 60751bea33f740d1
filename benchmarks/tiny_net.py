"""A net that takes almost no time, which makes the time of a trace visible; and the worker that times it.

Two packages of the same name cannot be in one process. So this file runs as a worker in the environment of each, and
uses only names that both have: ``NNsight``, ``trace``, ``output``, ``save``. The parent (``workers.py``) writes a line
``run CALLS NAME`` and reads a line of CALLS times in nanoseconds. The first line of a worker has versions and names.
``--compiled`` adds contenders that only this package has.

Every worker also times the plain call and plain hooks, so the rows of an environment are compared with a base that is
measured in the same environment. Before it times anything, a worker compares each contender with plain hooks.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Container
from importlib.metadata import version
from typing import Any

import torch

from nnsight import NNsight

LAYERS, WIDTH = 12, 64
ONE = 5
WARM_UP = 30
X = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))

Tensors = list[torch.Tensor]


def make_net() -> torch.nn.Sequential:
    """Return the net, with the same weights each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


# -- traces: a function for each block, because a block is found by its line in the source ---------------------------------


def empty_block(model: Any, layers: list[Any]) -> None:
    with model.trace(X):
        pass


def one_save(model: Any, layers: list[Any]) -> Tensors:
    layer = layers[ONE]
    with model.trace(X):
        hidden = layer.output.save()
    return [hidden]


def all_saves(model: Any, layers: list[Any]) -> Tensors:
    kept: Tensors = []
    with model.trace(X):
        for layer in layers:
            kept.append(layer.output.save())
    return kept


def one_edit(model: Any, layers: list[Any]) -> None:
    layer = layers[ONE]
    with model.trace(X):
        layer.output[:] += 1


def all_edits(model: Any, layers: list[Any]) -> None:
    with model.trace(X):
        for layer in layers:
            layer.output[:] += 1


def one_edit_and_result(model: Any, layers: list[Any]) -> Tensors:
    layer = layers[ONE]
    with model.trace(X):
        layer.output[:] += 1
        result = layers[-1].output.save()
    return [result]


def all_edits_and_result(model: Any, layers: list[Any]) -> Tensors:
    with model.trace(X):
        for layer in layers:
            layer.output[:] += 1
        result = layers[-1].output.save()
    return [result]


def output_of_the_model(model: Any, layers: list[Any]) -> Tensors:
    with model.trace(X):
        output = model.output.save()
    return [output]


def result_of_the_trace(model: Any, layers: list[Any]) -> Tensors:
    with model.trace(X) as tracer:
        result = tracer.result.save()
    return [result]


Block = Callable[[Any, list[Any]], Tensors | None]

TRACES: dict[str, Block] = {
    "empty": empty_block,
    "1 save": one_save,
    f"{LAYERS} saves": all_saves,
    "1 edit": one_edit,
    f"{LAYERS} edits": all_edits,
}

#: Compiled traces save the result of their edits: without a used value, nothing would be computed.
COMPILED: dict[str, Block] = {
    "empty": empty_block,
    "1 save": one_save,
    f"{LAYERS} saves": all_saves,
    "the output": output_of_the_model,
    "the result": result_of_the_trace,
    "1 edit and the result": one_edit_and_result,
    f"{LAYERS} edits and the result": all_edits_and_result,
}


# -- the same with plain hooks -------------------------------------------------------------------------------------------


def hooked(net: torch.nn.Sequential, layers: list[torch.nn.Module], hook: Callable[[Any, Any, Any], None]) -> None:
    """Call ``net`` once with ``hook`` on ``layers``. The hooks are registered and removed in each call, as by a trace."""
    handles = [layer.register_forward_hook(hook) for layer in layers]
    net(X)
    for handle in handles:
        handle.remove()


def hooked_saves(net: torch.nn.Sequential, layers: list[torch.nn.Module]) -> Tensors:
    kept: Tensors = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        kept.append(output)

    hooked(net, layers, keep)
    return kept


def hooked_edits(net: torch.nn.Sequential, layers: list[torch.nn.Module]) -> None:
    def edit(module: Any, args: Any, output: torch.Tensor) -> None:
        output[:] += 1

    hooked(net, layers, edit)


# -- the same written into the model, and compiled ------------------------------------------------------------------------


class HandEdited(torch.nn.Module):
    """The net with edits in its source. Returns its result and the outputs of the layers ``saved``."""

    def __init__(self, edited: Container[int], saved: Container[int]) -> None:
        super().__init__()
        self.layers = make_net()
        self.edited, self.saved = edited, saved

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        kept = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if index in self.edited:
                hidden[:] += 1
            if index in self.saved:
                kept.append(hidden)
        return hidden, kept


def by_hand_contenders() -> dict[str, Callable[[], Tensors]]:
    """Return the compiled nets that do the same as the blocks of ``COMPILED``."""
    nets = {
        "1 save": HandEdited((), (ONE,)),
        f"{LAYERS} saves": HandEdited((), range(LAYERS)),
        "the output": HandEdited((), (LAYERS - 1,)),
        "the result": HandEdited((), (LAYERS - 1,)),
        "1 edit and the result": HandEdited((ONE,), (LAYERS - 1,)),
        f"{LAYERS} edits and the result": HandEdited(range(LAYERS), (LAYERS - 1,)),
    }

    def bound(net: torch.nn.Module) -> Callable[[], Tensors]:
        compiled = torch.compile(net)
        return lambda: compiled(X)[1]

    return {f"compiled by hand, {name}": bound(net) for name, net in nets.items()}


# -- contenders ----------------------------------------------------------------------------------------------------------


def plain_contenders() -> tuple[torch.nn.Module, dict[str, Callable[[], Tensors | None]]]:
    """Return the net, and its contenders in plain torch."""
    net = make_net()
    layers = list(net)

    def plain_call() -> None:
        net(X)

    return net, {
        "plain call": plain_call,
        "hooks, 1 save": lambda: hooked_saves(net, [layers[ONE]]),
        f"hooks, {LAYERS} saves": lambda: hooked_saves(net, layers),
        "hooks, 1 edit": lambda: hooked_edits(net, [layers[ONE]]),
        f"hooks, {LAYERS} edits": lambda: hooked_edits(net, layers),
    }


def traced_contenders(
    prefix: str, traces: dict[str, Block], **options: Any
) -> tuple[torch.nn.Module, Any, dict[str, Callable[[], Tensors | None]]]:
    """Return the net, its wrapper with ``options``, and contenders for ``traces``."""
    net = make_net()
    model = NNsight(net, **options)
    layers = [model[index] for index in range(LAYERS)]

    def bound(trace: Block) -> Callable[[], Tensors | None]:
        return lambda: trace(model, layers)

    return net, model, {f"{prefix}, {name}": bound(trace) for name, trace in traces.items()}


def outcome(net: torch.nn.Module, contender: Callable[[], Tensors | None]) -> tuple[torch.Tensor, Tensors]:
    """Return the result of ``net`` in a call of ``contender``, and the tensors that ``contender`` returns."""
    seen: Tensors = []
    handle = net.register_forward_hook(lambda module, args, output: seen.append(output))
    kept = contender()
    handle.remove()
    return seen[0], kept or []


def check(net: torch.nn.Module, traces: dict[str, Any], plain_net: torch.nn.Module, plain: dict[str, Any]) -> None:
    """Raise unless each trace has the same effect on its net as hooks."""
    for name, trace in traces.items():
        what = name.partition(", ")[2]
        reference = plain.get(f"hooks, {what}", plain["plain call"])
        result, kept = outcome(net, trace)
        expected, expected_kept = outcome(plain_net, reference)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        assert len(kept) == len(expected_kept), name
        for ours, theirs in zip(kept, expected_kept, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def check_compiled(traces: dict[str, Any], by_hand: dict[str, Any]) -> None:
    """Raise unless each compiled trace saves the same values as the net edited by hand."""
    for name, contender in by_hand.items():
        kept = traces[f"compiled trace, {name.partition(', ')[2]}"]()
        torch.testing.assert_close(kept, contender(), rtol=1e-5, atol=1e-5)


def main() -> None:
    replies, sys.stdout = sys.stdout, sys.stderr  # prints of a package are not replies
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    plain_net, plain = plain_contenders()
    net, _, traces = traced_contenders("trace", TRACES)
    check(net, traces, plain_net, plain)
    contenders = {**plain, **traces}
    if "--compiled" in sys.argv:
        plain_compiled = torch.compile(make_net())
        _, wrapped, compiled = traced_contenders("compiled trace", COMPILED, compile=True)
        by_hand = by_hand_contenders()
        check_compiled(compiled, by_hand)
        contenders["plain compiled call"] = lambda: plain_compiled(X)
        contenders["wrapped compiled call"] = lambda: wrapped(X)
        contenders.update(compiled)
        contenders.update(by_hand)
    for contender in contenders.values():
        for _ in range(WARM_UP):
            contender()

    def reply(value: Any) -> None:
        print(json.dumps(value), file=replies, flush=True)

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: version(name) for name in ("nnsight", "transformers", "greenlet")}
    reply({"versions": versions, "contenders": list(contenders)})
    clock = time.perf_counter_ns
    for line in sys.stdin:
        _, calls, name = line.rstrip("\n").split(" ", 2)
        contender = contenders[name]
        times = []
        for _ in range(5):  # warm the caches again, after another process has run
            contender()
        for _ in range(int(calls)):
            start = clock()
            contender()
            times.append(clock() - start)
        reply(times)


if __name__ == "__main__":
    main()
