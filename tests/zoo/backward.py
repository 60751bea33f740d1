"""Features of a backward pass, against autograd with tensor hooks, gradients of parameters included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import nnsight

from .forward import _new, _once
from .subject import Feature, Subject, output, set_output
from .values import main, replaced, rough

#: Gets a kind of module and the gradient of its output; may return another gradient.
Edit = Callable[[str, torch.Tensor], Any]


def _watched(
    subject: Subject, edit: Edit = lambda *_: None, new: Callable[[str, Any], Any] = lambda _, value: value
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Run the model by hand; return its logits, and a dict to which backward passes add the gradients of the places.

    Args:
        subject: The model and its arguments.
        edit: Changes gradients.
        new: Gets a kind of module and what it returns; returns what is to be in its place.
    """
    found: dict[str, Any] = {}
    held: dict[str, torch.Tensor] = {}
    hooks = subject.hooks
    for kind, path in subject.places.items():
        hooks.output(path, _once(lambda value, kind=kind: _hold(held, kind, new(kind, value))))
    out = main(hooks(**subject.arguments))

    def watch(kind: str, hidden: torch.Tensor) -> None:
        def keep(gradient: torch.Tensor) -> Any:
            new = edit(kind, gradient)
            found[kind] = gradient.clone() if new is None else new.clone()
            return new

        hidden.register_hook(keep)

    # Once the model is done editing them in place, and the last one first: so a block finds them in a backward pass.
    for kind, hidden in reversed(held.items()):
        watch(kind, hidden)
    return out, found


def _hold(held: dict[str, torch.Tensor], kind: str, value: Any) -> Any:
    held[kind] = main(value)
    return value


def _with_parameters(subject: Subject, found: dict[str, Any]) -> dict[str, Any]:
    return {**found, **{f"gradient of {name}": gradient for name, gradient in subject.parameters.items()}}


def gradients(subject: Subject) -> dict[str, Any]:
    places = [(kind, subject.envoy(path)) for kind, path in subject.places.items()]
    with subject.model.trace(**subject.arguments) as tracer:
        found = nnsight.save({})
        held = []
        for kind, envoy in places:
            held.append((kind, main(output(envoy))))
        loss = rough(main(subject.model.output))
        with loss.backward():
            for kind, hidden in reversed(held):
                found[kind] = hidden.grad.clone()
    return _with_parameters(subject, found)


def gradients_by_hand(subject: Subject) -> dict[str, Any]:
    out, found = _watched(subject)
    rough(out).backward()
    return _with_parameters(subject, found)


def one_gradient(subject: Subject) -> dict[str, Any]:
    with subject.model.trace(**subject.arguments) as tracer:
        hidden = main(output(subject.envoy(subject.specimen.layers[0])))
        loss = rough(main(subject.model.output))
        with loss.backward():
            gradient = hidden.grad.save()
    return {"layer": gradient}


def one_gradient_by_hand(subject: Subject) -> dict[str, Any]:
    out, found = _watched(subject)
    rough(out).backward()
    return {"layer": found["layer"]}


def gradient_edit(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    with subject.model.trace(**subject.arguments) as tracer:
        early = main(output(first))
        late = main(output(second))
        loss = rough(main(subject.model.output))
        with loss.backward():
            late.grad = late.grad * 0.5 + 0.01
            early.grad[..., 0] = 0.25
            at_early = early.grad.clone().save()
    return _with_parameters(subject, {"layer": at_early})


def gradient_edit_by_hand(subject: Subject) -> dict[str, Any]:
    def edit(kind: str, gradient: torch.Tensor) -> Any:
        if kind == "next":
            return gradient * 0.5 + 0.01
        if kind == "layer":
            new = gradient.clone()
            new[..., 0] = 0.25
            return new
        return None

    out, found = _watched(subject, edit)
    rough(out).backward()
    return _with_parameters(subject, {"layer": found["layer"]})


def second_backward(subject: Subject) -> dict[str, Any]:
    with subject.model.trace(**subject.arguments) as tracer:
        hidden = main(output(subject.envoy(subject.specimen.layers[0])))
        out = main(subject.model.output)
        one = rough(out)
        other = out.float().sin().sum()
        with one.backward(retain_graph=True):
            first = hidden.grad.clone().save()
        with other.backward():
            second = hidden.grad.clone().save()
    return _with_parameters(subject, {"first": first, "second": second})


def second_backward_by_hand(subject: Subject) -> dict[str, Any]:
    out, found = _watched(subject)
    one, other = rough(out), out.float().sin().sum()
    one.backward(retain_graph=True)
    first = found["layer"]
    other.backward()
    return _with_parameters(subject, {"first": first, "second": found["layer"]})


def backward_inside(subject: Subject) -> dict[str, Any]:
    layer = subject.envoy(subject.specimen.layers[0])
    with subject.model.trace(**subject.arguments) as tracer:
        set_output(layer, replaced(output(layer), _new))
        loss = rough(main(subject.model.output))
        loss.backward()
        kept = loss.detach().save()
    return _with_parameters(subject, {"loss": kept})


def backward_after(subject: Subject) -> dict[str, Any]:
    layer = subject.envoy(subject.specimen.layers[0])
    with subject.model.trace(**subject.arguments) as tracer:
        set_output(layer, replaced(output(layer), _new))
        out = main(subject.model.output).save()
    loss = rough(out)
    loss.backward()
    return _with_parameters(subject, {"loss": loss.detach()})


def backward_by_hand(subject: Subject) -> dict[str, Any]:
    def change(value: Any, call: int) -> Any:
        return None if call else replaced(value, _new)

    loss = rough(main(subject.hooks.output(subject.specimen.layers[0], change)(**subject.arguments)))
    loss.backward()
    return _with_parameters(subject, {"loss": loss.detach()})


def trained(subject: Subject) -> dict[str, Any]:
    return {**backward_after(subject), **_buffers(subject.model._module)}


def trained_by_hand(subject: Subject) -> dict[str, Any]:
    return {**backward_by_hand(subject), **_buffers(subject.module)}


def _buffers(module: torch.nn.Module) -> dict[str, Any]:
    """Return a copy of statistics, which a run in train mode changes."""
    return {name: value.clone() for name, value in module.named_buffers()}


BACKWARD = [
    Feature("one-gradient", one_gradient, one_gradient_by_hand, grad=True),
    Feature("gradients", gradients, gradients_by_hand, grad=True),
    Feature("gradient-edit", gradient_edit, gradient_edit_by_hand, grad=True),
    Feature("second-backward", second_backward, second_backward_by_hand, grad=True),
    Feature("backward-inside", backward_inside, backward_by_hand, grad=True),
    Feature("backward-after", backward_after, backward_by_hand, grad=True),
    Feature("train", trained, trained_by_hand, grad=True, variant="train"),
    Feature("train-gradients", gradients, gradients_by_hand, grad=True, variant="train"),
]
