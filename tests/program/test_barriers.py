"""Barriers in programs: an edit that a block makes before it waits reaches the model, as in any trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nnsight

from ..conftest import same

PROMPT, OTHER = "The Eiffel Tower is in the city of", "The Colosseum is in the city of"


def edits_in_place(model: Any, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            model.transformer.h[1].output[:, -1] = 0
            barrier()
            first = model.transformer.h[2].input.save()
        with tracer.invoke(OTHER):
            model.transformer.h[1].output[:, -1] = 0
            barrier()
            second = model.transformer.h[2].input.save()
    return first, second


def replacements(model: Any, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        barrier = tracer.barrier(3)
        with tracer.invoke(PROMPT):
            model.transformer.h[1].output = model.transformer.h[1].output * 2
            barrier()
            first = model.lm_head.output.save()
        with tracer.invoke(OTHER):
            barrier()
            model.transformer.h[1].output = model.transformer.h[1].output + 1
            second = model.lm_head.output.save()
        with tracer.invoke():
            seen = model.transformer.h[1].output.save()
            barrier()
            both = model.lm_head.output.save()
    return first, second, seen, both


def patches_of_two_layers(model: Any, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            for layer in (1, 3):
                clean = model.transformer.h[layer].output[:, -1]
                barrier()
        with tracer.invoke(OTHER):
            for layer in (1, 3):
                barrier()
                model.transformer.h[layer].output[:, -1] = clean
            patched = model.lm_head.output.save()
    return patched


def patches_of_two_steps(model: Any, **where: Any) -> Any:
    with model.generate(max_new_tokens=3, do_sample=False, **where) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            for _ in tracer.iter[:2]:
                clean = model.transformer.h[1].output[:, -1]
                barrier()
        with tracer.invoke(OTHER):
            for _ in tracer.iter[:2]:
                hidden = model.transformer.h[1].output
                barrier()
                hidden[:, -1] = clean
        with tracer.invoke():
            tokens = tracer.result.save()
    return tokens


def a_barrier_before_all_locations(model: Any, **where: Any) -> Any:
    with model.trace(**where) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(PROMPT):
            barrier()
            model.transformer.h[0].output[:] = 1
            first = model.lm_head.output.save()
        with tracer.invoke(OTHER):
            model.transformer.wte.output[:] *= 2
            barrier()
            second = model.lm_head.output.save()
    return first, second


SCRIPTS = [edits_in_place, replacements, patches_of_two_layers, patches_of_two_steps, a_barrier_before_all_locations]


@pytest.fixture(scope="module")
def model() -> Any:
    return nnsight.demo_model()


@pytest.mark.parametrize("where", [{"remote": "local"}, {"program": True}], ids=str)
@pytest.mark.parametrize("script", SCRIPTS)
def test_edits_before_a_barrier_reach_the_model(script: Callable[..., Any], where: dict[str, Any], model: Any) -> None:
    with torch.no_grad():
        same(script(model, **where), script(model))
