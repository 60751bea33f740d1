"""Features of a forward pass: reads, edits, replacements, operations and a cache in one block; batches, skips, stops."""

from __future__ import annotations

from typing import Any

import torch

import nnsight

from .reference import Hooks
from .subject import Feature, Subject, output, set_output
from .values import main, replaced, tensors


def once(function: Any) -> Any:
    """Return a hook that calls ``function`` with the first value."""
    return lambda value, call: None if call else function(value)


def new(hidden: torch.Tensor) -> torch.Tensor:
    """Return what replaces ``hidden``."""
    return hidden * 0.75 + 0.1


def _change(kind: str, hidden: torch.Tensor) -> None:
    """Edit ``hidden`` in place, each kind of module in another way."""
    if kind == "norm":
        hidden *= 1.5
    elif kind == "attention":
        hidden[..., 0] = 0.5
    elif kind == "mlp":
        hidden += 0.25
    elif kind == "linear":
        hidden[:] = hidden.flip(-1)
    else:
        hidden[:, -1] = hidden[:, -1] * 0.5 + hidden[:, 0]


# -- reads, edits, replacements, an operation and a cache -----------------------------------------------------------------


def _is_replaced(kind: str) -> bool:
    return kind in ("mlp", "layer")


def _floats(value: Any) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors(value)]


def forward(subject: Subject) -> dict[str, Any]:
    kinds = {path: kind for kind, path in subject.places.items()}
    second, operation = subject.specimen.layers[1], subject.specimen.operation
    if operation is not None:
        operation = getattr(subject.envoy(operation.module).source, operation.name)
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
                    envoy.input = replaced(envoy.input, new)
            elif path in kinds:
                envoy = subject.envoy(path)
                found[f"output of {path}"] = main(output(envoy))
                _change(kinds[path], main(output(envoy)))
                if _is_replaced(kinds[path]):
                    set_output(envoy, replaced(output(envoy), new))
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
        return replaced(value, new) if path == subject.specimen.layers[1] else None

    def at_output(path: str, value: Any) -> Any:
        found[f"output of {path}"] = main(value)
        _change(kinds[path], main(value))
        return replaced(value, new) if _is_replaced(kinds[path]) else None

    for what, path in subject.order:
        if path in kinds and what == "input":
            hooks.input(path, once(lambda value, path=path: at_input(path, value)))
        elif path in kinds and what == "output":
            hooks.output(path, once(lambda value, path=path: at_output(path, value)))
    for what, path in subject.order:
        if what == "output":
            hooks.output(path, lambda value, _, path=path: cached.setdefault(path, []).extend(_floats(value)))
    if subject.specimen.operation is not None:  # behind the hooks of the module that the operation calls, if it calls one
        hooks.operation(subject.specimen.operation, once(at_operation))
    out = hooks(**subject.arguments)
    return {**found, "out": out, "result": out, "cache": cached}


def edit(subject: Subject) -> dict[str, Any]:
    places = [(kind, subject.envoy(path)) for kind, path in subject.places.items()]
    with subject.model.trace(**subject.arguments) as tracer:
        for kind, envoy in places:
            _change(kind, main(output(envoy)))
        out = main(subject.model.output).save()
    return {"out": out}


def edit_by_hand(subject: Subject) -> dict[str, Any]:
    hooks = subject.hooks
    for kind, path in subject.places.items():
        hooks.output(path, once(lambda value, kind=kind: _change(kind, main(value))))
    return {"out": main(hooks(**subject.arguments))}


def everything(subject: Subject) -> dict[str, Any]:
    envoys = [(path, subject.envoy(path)) for kind, path in subject.order if kind == "output"]
    with subject.model.trace(**subject.arguments) as tracer:
        found = nnsight.save({})
        for path, envoy in envoys:
            found[path] = output(envoy)
    return {path: tensors(value) for path, value in found.items()}


def everything_by_hand(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hooks = subject.hooks
    for kind, path in subject.order:
        if kind == "output":
            hooks.output(path, once(lambda value, path=path: found.update({path: value})))
    hooks(**subject.arguments)
    return {path: tensors(value) for path, value in found.items()}


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
    out = main(subject.hooks.output(one, once(at_first)).output(two, once(at_second))(**joined(subject)))
    return {"hidden": found["hidden"], "one": out[:rows], "two": out[rows:], "all": out}


def joined(subject: Subject) -> dict[str, Any]:
    """Return the arguments of both calls as those of one."""
    return {name: torch.cat([value, subject.others[name]]) for name, value in subject.arguments.items()}


# -- skips and stops ------------------------------------------------------------------------------------------------------


def skip(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    with subject.model.trace(**subject.arguments) as tracer:
        second.skip(output(first))
        out = subject.model.output.save()
    return {"out": main(out)}  # a cache has no entry for the layer, or an empty one


def skip_by_hand(subject: Subject) -> dict[str, Any]:
    return {"out": main(skipping(subject.hooks, subject)(**subject.arguments))}


def skipping(hooks: Hooks, subject: Subject) -> Hooks:
    """Let the second layer return what the first one did, in every call."""
    kept: dict[str, Any] = {}
    one, two = subject.specimen.layers
    return hooks.output(one, lambda value, _: kept.update(value=value)).skip(two, lambda: kept["value"])


def stop(subject: Subject) -> dict[str, Any]:
    with subject.model.trace(**subject.arguments) as tracer:
        hidden = main(output(subject.envoy(subject.specimen.layers[0]))).save()
        tracer.stop()
    return {"hidden": hidden}


def stop_by_hand(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = {}
    keep = once(lambda value: found.update(hidden=main(value)))
    subject.hooks.output(subject.specimen.layers[0], keep)(**subject.arguments)
    return found


FORWARD = [
    Feature("forward", forward, forward_by_hand),
    Feature("everything", everything, everything_by_hand),
    Feature("batch", batch, batch_by_hand, needs=lambda specimen: specimen.batches),
    Feature("skip-result", skip, skip_by_hand, needs=lambda specimen: specimen.skips),
    Feature("stop", stop, stop_by_hand),
    Feature("bfloat16", edit, edit_by_hand, variant="bfloat16"),
]
