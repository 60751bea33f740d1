"""Features of a generation, in which each location occurs once for each token."""

from __future__ import annotations

from typing import Any

from .forward import _skipping
from .reference import Hooks
from .specimen import Specimen
from .subject import Feature, Subject, output
from .values import main

NEW = 3
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def _call(subject: Subject) -> dict[str, Any]:
    """Return the arguments of ``generate``: it counts positions and starts decoders itself."""
    given = {name: value for name, value in subject.arguments.items() if not name.startswith(("decoder", "position"))}
    return {**given, **GREEDY}


def generate(subject: Subject) -> dict[str, Any]:
    layer, head = subject.envoy(subject.specimen.layers[0]), subject.envoy(subject.specimen.head or "")
    with subject.model.generate(**_call(subject)) as tracer:
        logits = [].save()  # type: ignore[attr-defined]
        for step in tracer.iter[:NEW]:
            main(output(layer))[:, -1] *= 1.0 + 0.5 * step
            logits.append(output(head)[:, -1])
        ids = tracer.result.save()
    return {"logits": logits, "ids": ids}


def generate_by_hand(subject: Subject) -> dict[str, Any]:
    logits: list[Any] = []

    def change(value: Any, step: int) -> None:
        main(value)[:, -1] *= 1.0 + 0.5 * step

    hooks = Hooks(subject.module, subject.module.generate)
    hooks.output(subject.specimen.layers[0], change)
    hooks.output(subject.specimen.head or "", lambda value, _: logits.append(value[:, -1]))
    return {"ids": hooks(**_call(subject)), "logits": logits}


def generate_skip(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    head = subject.envoy(subject.specimen.head or "")
    with subject.model.generate(**_call(subject)) as tracer:
        logits = [].save()  # type: ignore[attr-defined]
        for _ in tracer.iter[:NEW]:
            second.skip(output(first))
            logits.append(output(head)[:, -1])
    return {"logits": logits}


def generate_skip_by_hand(subject: Subject) -> dict[str, Any]:
    logits: list[Any] = []
    hooks = _skipping(Hooks(subject.module, subject.module.generate), subject)
    hooks.output(subject.specimen.head or "", lambda value, _: logits.append(value[:, -1]))(**_call(subject))
    return {"logits": logits}


def _generates(specimen: Specimen) -> bool:
    return specimen.generates


def _generates_and_skips(specimen: Specimen) -> bool:
    return specimen.generates and specimen.skips


STEPS = [
    Feature("generate", generate, generate_by_hand, needs=_generates),
    Feature("generate-skip", generate_skip, generate_skip_by_hand, needs=_generates_and_skips),
]
