"""Features of a forward pass: reads, edits, replacements, batches, skips, operations, caches, stops."""

from __future__ import annotations

from typing import Any

import torch

import nnsight

from .reference import Hooks
from .subject import Feature, Subject, output, set_output
from .values import main, replaced, tensors


def _keep(found: dict[str, Any], name: str, read: Any = lambda value: value) -> Any:
    """Return a hook that keeps what ``read`` makes of the first value."""

    def hook(value: Any, call: int) -> None:
        if not call:
            found[name] = read(value)

    return hook


def _once(function: Any) -> Any:
    """Return a hook that calls ``function`` with the first value."""
    return lambda value, call: None if call else function(value)


# -- read ---------------------------------------------------------------------------------------------------------------


def read(subject: Subject) -> dict[str, Any]:
    places = [(f"{kind} of {path}", kind, subject.envoy(path)) for kind, path in subject.read]
    with subject.model.trace(**subject.arguments) as tracer:
        found = nnsight.save({})
        for name, kind, envoy in places:
            found[name] = main(envoy.input if kind == "input" else output(envoy))
        out = main(subject.model.output).save()
    return {**found, "out": out}


def read_by_hand(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = {}
    hooks = subject.hooks
    for kind, path in subject.read:
        getattr(hooks, kind)(path, _keep(found, f"{kind} of {path}", main))
    return {"out": main(hooks(**subject.arguments)), **found}


# -- the result, with caches and all ----------------------------------------------------------------------------------


def result(subject: Subject) -> dict[str, Any]:
    with subject.model.trace(**subject.arguments) as tracer:
        hidden = main(output(subject.envoy(subject.specimen.layers[0]))).save()
        out = subject.model.output.save()
        returned = tracer.result.save()
    return {"hidden": hidden, "out": out, "result": returned}


def result_by_hand(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out = subject.hooks.output(subject.specimen.layers[0], _keep(found, "hidden", main))(**subject.arguments)
    return {"hidden": found["hidden"], "out": out, "result": out}


# -- edits in place and replacements ------------------------------------------------------------------------------------


def _edit(kind: str, hidden: torch.Tensor) -> None:
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


def edit(subject: Subject) -> dict[str, Any]:
    places = [(kind, subject.envoy(path)) for kind, path in subject.places.items()]
    with subject.model.trace(**subject.arguments) as tracer:
        for kind, envoy in places:
            _edit(kind, main(output(envoy)))
        out = main(subject.model.output).save()
    return {"out": out}


def edit_by_hand(subject: Subject) -> dict[str, Any]:
    hooks = subject.hooks
    for kind, path in subject.places.items():
        hooks.output(path, _once(lambda value, kind=kind: _edit(kind, main(value))))
    return {"out": main(hooks(**subject.arguments))}


def _new(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 0.75 + 0.1


def replace(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    mlp = subject.envoy(subject.places["mlp"])
    with subject.model.trace(**subject.arguments) as tracer:
        set_output(mlp, replaced(output(mlp), _new))
        set_output(first, replaced(output(first), _new))
        out = main(subject.model.output).save()
    return {"out": out}


def replace_by_hand(subject: Subject) -> dict[str, Any]:
    hooks = subject.hooks
    for path in (subject.places["mlp"], subject.specimen.layers[0]):
        hooks.output(path, _once(lambda value: replaced(value, _new)))
    return {"out": main(hooks(**subject.arguments))}


def replace_input(subject: Subject) -> dict[str, Any]:
    layer = subject.envoy(subject.specimen.layers[0])
    with subject.model.trace(**subject.arguments) as tracer:
        layer.input = replaced(layer.input, _new)
        out = main(subject.model.output).save()
    return {"out": out}


def replace_input_by_hand(subject: Subject) -> dict[str, Any]:
    hooks = subject.hooks.input(subject.specimen.layers[0], _once(lambda value: replaced(value, _new)))
    return {"out": main(hooks(**subject.arguments))}


# -- everything -----------------------------------------------------------------------------------------------------------


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
            hooks.output(path, _keep(found, path))
    hooks(**subject.arguments)
    return {path: tensors(value) for path, value in found.items()}


def cached(subject: Subject) -> dict[str, Any]:
    with subject.model.trace(**subject.arguments) as tracer:
        cache = tracer.cache()
    return {path.removeprefix("model").lstrip("."): _floats(entry.output) for path, entry in cache.items()}


def _floats(value: Any) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors(value)]


def cached_by_hand(subject: Subject) -> dict[str, Any]:
    calls: dict[str, list[Any]] = {}
    hooks = subject.hooks
    for kind, path in subject.order:
        if kind == "output":
            hooks.output(path, lambda value, _, path=path: calls.setdefault(path, []).extend(_floats(value)))
    hooks(**subject.arguments)
    return dict(calls)


# -- several invokes ------------------------------------------------------------------------------------------------------


def invokes(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    with subject.model.trace() as tracer:
        with tracer.invoke(**subject.arguments):
            main(output(first))[:] *= 0.5
            one = main(subject.model.output).save()
        with tracer.invoke(**subject.others):
            hidden = main(output(first)).clone().save()
            main(output(second))[..., 0] = 1.0
            two = main(subject.model.output).save()
        with tracer.invoke():
            all = main(subject.model.output).save()
    return {"hidden": hidden, "one": one, "two": two, "all": all}


def invokes_by_hand(subject: Subject) -> dict[str, Any]:
    rows = next(iter(subject.arguments.values())).shape[0]
    found: dict[str, Any] = {}

    def at_first(value: Any) -> None:
        main(value)[:rows] *= 0.5
        found["hidden"] = main(value)[rows:].clone()

    def at_second(value: Any) -> None:
        main(value)[rows:][..., 0] = 1.0

    one, two = subject.specimen.layers
    out = main(subject.hooks.output(one, _once(at_first)).output(two, _once(at_second))(**_joined(subject)))
    return {"hidden": found["hidden"], "one": out[:rows], "two": out[rows:], "all": out}


def barrier(subject: Subject) -> dict[str, Any]:
    layer = subject.envoy(subject.specimen.layers[0])
    with subject.model.trace() as tracer:
        meet = tracer.barrier(2)
        with tracer.invoke(**subject.arguments):
            hidden = main(output(layer))[:, 0].mean(0)
            meet()
        with tracer.invoke(**subject.others):
            meet()
            main(output(layer))[:, -1] = hidden
            out = main(subject.model.output).save()
    return {"out": out}


def barrier_by_hand(subject: Subject) -> dict[str, Any]:
    rows = next(iter(subject.arguments.values())).shape[0]

    def patch(value: Any) -> None:
        main(value)[rows:, -1] = main(value)[:rows, 0].mean(0)

    out = subject.hooks.output(subject.specimen.layers[0], _once(patch))(**_joined(subject))
    return {"out": main(out)[rows:]}


def _joined(subject: Subject) -> dict[str, Any]:
    """Return the arguments of both calls as those of one."""
    return {name: torch.cat([value, subject.others[name]]) for name, value in subject.arguments.items()}


# -- skips and stops ------------------------------------------------------------------------------------------------------


def skip(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    with subject.model.trace(**subject.arguments) as tracer:
        second.skip(output(first))
        out = main(subject.model.output).save()
    return {"out": out}


def skip_by_hand(subject: Subject) -> dict[str, Any]:
    return {"out": main(_skipping(subject.hooks, subject)(**subject.arguments))}


def skip_result(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    with subject.model.trace(**subject.arguments) as tracer:
        second.skip(output(first))
        out = subject.model.output.save()
    return {"out": main(out)}  # a cache has no entry for the layer, or one with nothing in it


def skip_result_by_hand(subject: Subject) -> dict[str, Any]:
    return {"out": main(_skipping(subject.hooks, subject)(**subject.arguments))}


def _skipping(hooks: Hooks, subject: Subject) -> Hooks:
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
    subject.hooks.output(subject.specimen.layers[0], _keep(found, "hidden", main))(**subject.arguments)
    return found


# -- operations -----------------------------------------------------------------------------------------------------------


def _operation(subject: Subject) -> Any:
    operation = subject.specimen.operation
    assert operation is not None
    return getattr(subject.envoy(operation.module).source, operation.name)


def source_read(subject: Subject) -> dict[str, Any]:
    operation = _operation(subject)
    with subject.model.trace(**subject.arguments) as tracer:
        value = main(operation.output).save()
        out = main(subject.model.output).save()
    return {"value": value, "out": out}


def source_read_by_hand(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out = subject.hooks.operation(subject.specimen.operation, _keep(found, "value", main))(**subject.arguments)  # type: ignore[arg-type]
    return {**found, "out": main(out)}


def source_edit(subject: Subject) -> dict[str, Any]:
    operation = _operation(subject)
    with subject.model.trace(**subject.arguments) as tracer:
        main(operation.output)[..., 0] = 2.0
        out = main(subject.model.output).save()
    return {"out": out}


def source_edit_by_hand(subject: Subject) -> dict[str, Any]:
    def change(value: Any) -> None:
        main(value)[..., 0] = 2.0

    out = subject.hooks.operation(subject.specimen.operation, _once(change))(**subject.arguments)  # type: ignore[arg-type]
    return {"out": main(out)}


FORWARD = [
    Feature("read", read, read_by_hand),
    Feature("result", result, result_by_hand),
    Feature("edit", edit, edit_by_hand),
    Feature("replace", replace, replace_by_hand),
    Feature("replace-input", replace_input, replace_input_by_hand),
    Feature("everything", everything, everything_by_hand),
    Feature("cache", cached, cached_by_hand),
    Feature("invokes", invokes, invokes_by_hand, needs=lambda specimen: specimen.batches),
    Feature("barrier", barrier, barrier_by_hand, needs=lambda specimen: specimen.batches),
    Feature("skip", skip, skip_by_hand, needs=lambda specimen: specimen.skips),
    Feature("skip-result", skip_result, skip_result_by_hand, needs=lambda specimen: specimen.skips, covers=("skip",)),
    Feature("stop", stop, stop_by_hand),
    Feature("source-read", source_read, source_read_by_hand, needs=lambda specimen: specimen.operation is not None),
    Feature("source-edit", source_edit, source_edit_by_hand, needs=lambda specimen: specimen.operation is not None),
]
