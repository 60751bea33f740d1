"""Backward passes, against autograd with tensor hooks, gradients of parameters included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import nnsight

from .forward import new, once
from .subject import Feature, Subject, output, set_output
from .values import main, replaced, rough


def _watched(
    subject: Subject, edit: Callable[[str, torch.Tensor], Any], change: Callable[[str, Any], Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run the model by hand; return its logits, and a dict to which backward passes add the gradients of the places.

    Args:
        subject: The model and its arguments.
        edit: Gets a kind of module and the gradient of its output; may return another gradient.
        change: Gets a kind of module and what it returns; returns the value that takes its place.
    """
    found: dict[str, Any] = {}
    held: dict[str, torch.Tensor] = {}
    hooks = subject.hooks

    def hold(kind: str, value: Any) -> Any:
        value = change(kind, value)
        held[kind] = main(value)
        return value

    def watch(kind: str, hidden: torch.Tensor) -> None:
        def keep(gradient: torch.Tensor) -> Any:
            edited = edit(kind, gradient)
            found[kind] = gradient.clone() if edited is None else edited.clone()
            return edited

        hidden.register_hook(keep)

    for kind, path in subject.places.items():
        hooks.output(path, once(lambda value, kind=kind: hold(kind, value)))
    out = main(hooks(**subject.arguments))
    # After the model has edited them in place, and the last one first: a block finds them in this order in a backward pass.
    for kind, hidden in reversed(held.items()):
        watch(kind, hidden)
    return out, found


def _with_gradients_and_buffers(module: torch.nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """Return ``found`` with the gradients of parameters, and with statistics, which a run in train mode changes."""
    gradients = {f"gradient of {name}": value.grad for name, value in module.named_parameters() if value.grad is not None}
    return {**found, **gradients, **{name: value.clone() for name, value in module.named_buffers()}}


def _changed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5 + 0.01


def backward(subject: Subject) -> dict[str, Any]:
    """Read and edit gradients, run backward two more times in the block, and once behind it."""
    places = [(kind, subject.envoy(path)) for kind, path in subject.places.items()]
    with subject.model.trace(**subject.arguments) as tracer:
        found = nnsight.save({})
        held = {}
        for kind, envoy in places:
            if kind == "layer":
                set_output(envoy, replaced(output(envoy), new))
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
        if not subject.recorded:
            (one * 0.5).backward(retain_graph=True)
    rough(out).backward()
    return _with_gradients_and_buffers(subject.module, {**found, "second": second})


def backward_by_hand(subject: Subject) -> dict[str, Any]:
    passes = 0

    def edit(kind: str, gradient: torch.Tensor) -> Any:
        if passes or kind not in ("next", "layer"):
            return None
        if kind == "next":
            return _changed(gradient)
        edited = gradient.clone()
        edited[..., 0] = 0.25
        return edited

    out, found = _watched(subject, edit, lambda kind, value: replaced(value, new) if kind == "layer" else value)
    one, other = rough(out), out.float().sin().sum()
    one.backward(retain_graph=True)
    first, passes = dict(found), 1
    other.backward(retain_graph=True)
    second = found["layer"]
    if subject.recorded:
        subject.module.zero_grad()
    else:
        (one * 0.5).backward(retain_graph=True)
    rough(out).backward()
    return _with_gradients_and_buffers(subject.module, {**first, "second": second})


BACKWARD = [
    Feature("backward", backward, backward_by_hand, grad=True),
    Feature("training", backward, backward_by_hand, grad=True, variant="train"),
    Feature("half", backward, backward_by_hand, grad=True, variant="bfloat16"),
]
