"""Several features in one block: compiled, they are captured and lowered once, and must not get in each other's way."""

from __future__ import annotations

from typing import Any

import torch

import nnsight

from .backward import _buffers, _watched, _with_parameters
from .forward import _edit, _floats, _joined, _new, _once, _operation
from .reference import Hooks
from .steps import GREEDY, NEW, _generates_and_batches, _prompt
from .subject import Feature, Subject, output, set_output
from .values import main, replaced, rough

# -- a forward pass -------------------------------------------------------------------------------------------------------


def _is_replaced(kind: str) -> bool:
    return kind in ("mlp", "layer")


def forward(subject: Subject) -> dict[str, Any]:
    kinds = {path: kind for kind, path in subject.places.items()}
    second = subject.specimen.layers[1]
    operation = None if subject.specimen.operation is None else _operation(subject)
    with subject.model.trace(**subject.arguments) as tracer:
        cache = tracer.cache()
        found = nnsight.save({})
        for what, path in subject.order:
            if what == "operation":
                main(operation.output)[..., 0] = 2.0
                found[what] = main(operation.output).clone()
            elif path in kinds and what == "input":
                envoy = subject.envoy(path)
                found[f"input of {path}"] = main(envoy.input)
                if path == second:
                    envoy.input = replaced(envoy.input, _new)
            elif path in kinds:
                envoy = subject.envoy(path)
                found[f"output of {path}"] = main(output(envoy))
                _edit(kinds[path], main(output(envoy)))
                if _is_replaced(kinds[path]):
                    set_output(envoy, replaced(output(envoy), _new))
        out = subject.model.output.save()
        returned = tracer.result.save()
    cached = {path.removeprefix("model").lstrip("."): _floats(entry.output) for path, entry in cache.items()}
    return {**found, "out": out, "result": returned, "cache": cached}


def forward_by_hand(subject: Subject) -> dict[str, Any]:
    kinds = {path: kind for kind, path in subject.places.items()}
    hooks, found, cached = subject.hooks, dict[str, Any](), dict[str, list[Any]]()

    def at_operation(value: Any) -> None:
        main(value)[..., 0] = 2.0
        found["operation"] = main(value).clone()

    def at_input(path: str, value: Any) -> Any:
        found[f"input of {path}"] = main(value)
        return replaced(value, _new) if path == subject.specimen.layers[1] else None

    def at_output(path: str, value: Any) -> Any:
        found[f"output of {path}"] = main(value)
        _edit(kinds[path], main(value))
        return replaced(value, _new) if _is_replaced(kinds[path]) else None

    for what, path in subject.order:
        if path in kinds and what == "input":
            hooks.input(path, _once(lambda value, path=path: at_input(path, value)))
        elif path in kinds and what == "output":
            hooks.output(path, _once(lambda value, path=path: at_output(path, value)))
    for what, path in subject.order:
        if what == "output":
            hooks.output(path, lambda value, _, path=path: cached.setdefault(path, []).extend(_floats(value)))
    if subject.specimen.operation is not None:  # where it calls a module, it is done after the module, and after what keeps its output
        hooks.operation(subject.specimen.operation, _once(at_operation))
    out = hooks(**subject.arguments)
    return {**found, "out": out, "result": out, "cache": cached}


# -- several invokes ------------------------------------------------------------------------------------------------------


def batch(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    with subject.model.trace() as tracer:
        meet = tracer.barrier(2)
        with tracer.invoke(**subject.arguments):
            main(output(first))[:] *= 0.5
            hidden = main(output(first))[:, 0].mean(0)
            meet()
            one = main(subject.model.output).save()
        with tracer.invoke(**subject.others):
            meet()
            kept = main(output(first)).clone().save()
            main(output(first))[:, -1] = hidden
            main(output(second))[..., 0] = 1.0
            two = main(subject.model.output).save()
        with tracer.invoke():
            all = main(subject.model.output).save()
    return {"hidden": kept, "one": one, "two": two, "all": all}


def batch_by_hand(subject: Subject) -> dict[str, Any]:
    rows = next(iter(subject.arguments.values())).shape[0]
    found: dict[str, Any] = {}

    def at_first(value: Any) -> None:
        main(value)[:rows] *= 0.5
        found["hidden"] = main(value)[rows:].clone()
        main(value)[rows:, -1] = main(value)[:rows, 0].mean(0)

    def at_second(value: Any) -> None:
        main(value)[rows:][..., 0] = 1.0

    one, two = subject.specimen.layers
    out = main(subject.hooks.output(one, _once(at_first)).output(two, _once(at_second))(**_joined(subject)))
    return {"hidden": found["hidden"], "one": out[:rows], "two": out[rows:], "all": out}


# -- a generation ---------------------------------------------------------------------------------------------------------


def generation(subject: Subject) -> dict[str, Any]:
    layer, head = subject.envoy(subject.specimen.layers[0]), subject.envoy(subject.specimen.head or "")
    with subject.model.generate(**GREEDY) as tracer:
        meet = tracer.barrier(2)
        with tracer.invoke(**_prompt(subject.arguments)):
            for step in tracer.iter[:NEW]:
                main(output(layer))[:, -1] *= 1.0 + 0.5 * step
                hidden = main(output(layer))[:, -1].mean(0)
                meet()
        with tracer.invoke(**_prompt(subject.others)):
            logits = [].save()  # type: ignore[attr-defined]
            for _ in tracer.iter[:NEW]:
                meet()
                main(output(layer))[:, -1] = hidden
                logits.append(output(head)[:, -1])
        with tracer.invoke():
            ids = tracer.result.save()
    return {"logits": logits, "ids": ids}


def generation_by_hand(subject: Subject) -> dict[str, Any]:
    logits: list[Any] = []
    rows = next(iter(subject.arguments.values())).shape[0]

    def patch(value: Any, step: int) -> None:
        main(value)[:rows, -1] *= 1.0 + 0.5 * step
        main(value)[rows:, -1] = main(value)[:rows, -1].mean(0)

    hooks = Hooks(subject.module, subject.module.generate).output(subject.specimen.layers[0], patch)
    hooks.output(subject.specimen.head or "", lambda value, _: logits.append(value[rows:, -1]))
    return {"ids": hooks(**_prompt(_joined(subject)), **GREEDY), "logits": logits}


# -- backward passes ------------------------------------------------------------------------------------------------------


def _changed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5 + 0.01


def backward(subject: Subject) -> dict[str, Any]:
    places = [(kind, subject.envoy(path)) for kind, path in subject.places.items()]
    with subject.model.trace(**subject.arguments) as tracer:
        found = nnsight.save({})
        held = {}
        for kind, envoy in places:
            if kind == "layer":
                set_output(envoy, replaced(output(envoy), _new))
            held[kind] = main(output(envoy))
        out = main(subject.model.output).save()
        one, other = rough(out), out.float().sin().sum()
        with one.backward(retain_graph=True):
            for kind in reversed(held):
                if kind == "next":
                    held[kind].grad = _changed(held[kind].grad)
                if kind == "layer":
                    held[kind].grad[..., 0] = 0.25
                found[kind] = held[kind].grad.clone()
        with other.backward(retain_graph=True):
            second = held["layer"].grad.clone().save()
        (one * 0.5).backward(retain_graph=True)
    rough(out).backward()
    found = _with_parameters(subject, {**found, "second": second})
    return {**found, **_buffers(subject.model._module)}


def backward_by_hand(subject: Subject) -> dict[str, Any]:
    passes = 0

    def edit(kind: str, gradient: torch.Tensor) -> Any:
        if passes or kind not in ("next", "layer"):
            return None
        if kind == "next":
            return _changed(gradient)
        new = gradient.clone()
        new[..., 0] = 0.25
        return new

    out, found = _watched(subject, edit, new=lambda kind, value: replaced(value, _new) if kind == "layer" else value)
    one, other = rough(out), out.float().sin().sum()
    one.backward(retain_graph=True)
    first, passes = dict(found), 1
    other.backward(retain_graph=True)
    second = found["layer"]
    (one * 0.5).backward(retain_graph=True)
    rough(out).backward()
    return {**_with_parameters(subject, {**first, "second": second}), **_buffers(subject.module)}


_BACKWARD = ("one-gradient", "gradients", "gradient-edit", "second-backward", "backward-inside", "backward-after")
_FORWARD = ("read", "result", "edit", "replace", "replace-input", "cache", "source-read", "source-edit")

TOGETHER = [
    Feature("forward", forward, forward_by_hand, covers=_FORWARD),
    Feature("batch", batch, batch_by_hand, needs=lambda specimen: specimen.batches, covers=("invokes", "barrier")),
    Feature("generation", generation, generation_by_hand, needs=_generates_and_batches, covers=("generate", "generate-invokes")),
    Feature("backward", backward, backward_by_hand, grad=True, covers=_BACKWARD),
    Feature("training", backward, backward_by_hand, grad=True, variant="train", covers=("train", "train-gradients")),
    Feature("half", backward, backward_by_hand, grad=True, variant="bfloat16", covers=("bfloat16-gradients",)),
]
