"""Features of a generation, in which each location occurs once for each token."""

from __future__ import annotations

from typing import Any

from .forward import joined, skipping
from .reference import Hooks
from .subject import Feature, Subject, output
from .values import main

NEW = 3
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def _prompt(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``generate``: it counts positions and starts decoders itself."""
    return {name: value for name, value in arguments.items() if not name.startswith(("decoder", "position"))}


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
    return {"ids": hooks(**_prompt(joined(subject)), **GREEDY), "logits": logits}


def generate_skip(subject: Subject) -> dict[str, Any]:
    first, second = (subject.envoy(path) for path in subject.specimen.layers)
    head = subject.envoy(subject.specimen.head or "")
    with subject.model.generate(**_prompt(subject.arguments), **GREEDY) as tracer:
        logits = [].save()  # type: ignore[attr-defined]
        for _ in tracer.iter[:NEW]:
            second.skip(output(first))
            logits.append(output(head)[:, -1])
    return {"logits": logits}


def generate_skip_by_hand(subject: Subject) -> dict[str, Any]:
    logits: list[Any] = []
    hooks = skipping(Hooks(subject.module, subject.module.generate), subject)
    hooks.output(subject.specimen.head or "", lambda value, _: logits.append(value[:, -1]))
    hooks(**_prompt(subject.arguments), **GREEDY)
    return {"logits": logits}


STEPS = [
    Feature("generation", generation, generation_by_hand, needs=lambda specimen: specimen.generates and specimen.batches),
    Feature("generate-skip", generate_skip, generate_skip_by_hand, needs=lambda specimen: specimen.generates and specimen.skips),
]
