"""Models of every task, traced with an input of the task and compared with its pipeline of transformers under plain hooks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import ModelOutput

from nnsight import TransformersModel
from nnsight.modeling.transformers import tasks
from nnsight.program.format.errors import NotExpressibleError

from ..conftest import both
from .tiny_tasks import TINY, Tiny

#: Models with several components, each made, captured and run: they take a minute in all.
pytestmark = pytest.mark.slow


#: Those whose pipeline calls the model once for each part of an input, and those whose pipeline runs with these preprocessors.
CALLED = [name for name, tiny in TINY.items() if not tiny.generates]
RUN = [name for name in TINY if name != "automatic-speech-recognition (seq2seq)"]


def wrapped(tiny: Tiny) -> TransformersModel:
    return TransformersModel(tiny.module(), task=tiny.task, compile={"backend": "eager"}, **tiny.preprocessors())


def given(tiny: Tiny) -> Any:
    return copy.copy(tiny.given)


def first_tensor(output: Any) -> torch.Tensor:
    values = output.values() if isinstance(output, ModelOutput) else output if isinstance(output, tuple) else [output]
    return next(value for value in values if isinstance(value, torch.Tensor) and value.ndim)


def expected(model: TransformersModel, tiny: Tiny, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the layer and the model return in all calls that the pipeline makes; the layer's output is scaled."""
    module, inner, outer = model._module, [], []
    layer = module.get_submodule(tiny.layer)

    def scale(_: Any, __: Any, output: Any) -> Any:
        value = first_tensor(output)
        inner.append(value)
        return (value * factor, *output[1:]) if isinstance(output, tuple) else value * factor

    def keep(_: Any, __: Any, output: Any) -> None:
        outer.append(first_tensor(output).clone())  # some pipelines change it afterwards

    hooks = [layer.register_forward_hook(scale), module.register_forward_hook(keep)]
    try:
        model.pipeline(given(tiny), **tiny.options)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(inner), torch.cat(outer)


@both
@pytest.mark.parametrize("name", CALLED)
def test_an_input_is_read_and_edited_as_the_pipeline_runs_it(name: str, compile: bool) -> None:
    tiny = TINY[name]
    model = wrapped(tiny)
    layer = model.get(tiny.layer)
    with torch.no_grad(), model.trace(given(tiny), **tiny.options, compile=compile) as tracer:
        output = layer.output
        hidden = (output[0] if isinstance(output, tuple) else output).save()
        layer.output = (hidden * 0.5, *output[1:]) if isinstance(output, tuple) else hidden * 0.5
        result = tracer.result.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    inner, outer = expected(model, tiny, 0.5)
    assert len(hidden) == tiny.rows
    torch.testing.assert_close(hidden, inner, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first_tensor(result), outer.reshape(first_tensor(result).shape), rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize("name", RUN)
def test_a_whole_pipeline_is_traced(name: str, compile: bool) -> None:
    tiny = TINY[name]
    options = {**tiny.options, **({"max_new_tokens": 3, "do_sample": False} if tiny.generates else {})}
    model = wrapped(tiny)
    layer = model.get(tiny.layer)
    plain = model.pipeline(given(tiny), **options)
    with model.pipe(given(tiny), **options, compile=compile) as tracer:
        seen = [].save()
        for _ in tracer.iter[:1]:
            seen.append(layer.output)
        records = tracer.result.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    assert len(seen) == 1 and repr(records)[:60] == repr(plain)[:60]
    assert repr(model.pipe(given(tiny), **options, compile=compile))[:60] == repr(plain)[:60]


@pytest.mark.parametrize("name", TINY)
def test_a_lazy_model_is_made_as_it_is_loaded(name: str, tmp_path: Path) -> None:
    tiny = TINY[name]
    module = tiny.module()
    module.save_pretrained(tmp_path)
    for part in tiny.preprocessors().values():
        part.save_pretrained(tmp_path)
    model = TransformersModel(tmp_path, task=tiny.task)
    assert type(model._module) is type(module) and all(weight.is_meta for weight in model.parameters())
    wanted = {name for name, flag in tasks.preprocessors_of(tiny.task).items() if flag}
    assert {name for name in wanted if getattr(model, name) is not None} == wanted
    if "tokenizer" not in tasks.preprocessors_of(tiny.task):
        assert model.tokenizer is None
    with model.scan(given(tiny), **tiny.options):
        shape = model.get(tiny.layer).output[0].shape.save()
    assert not model.dispatched
    lazy = model.config.to_dict()
    with model.trace(given(tiny), **tiny.options):
        hidden = model.get(tiny.layer).output[0].save()
    assert hidden.shape == shape and model.config.to_dict() == lazy


@both
def test_sound_is_written_down(compile: bool) -> None:
    """By an encoder-decoder: a trace is the first step of its decoder."""
    tiny = TINY["automatic-speech-recognition (seq2seq)"]
    model = wrapped(tiny)
    features = dict(model.feature_extractor(tiny.given, sampling_rate=16000, return_tensors="pt"))
    with model.trace(given(tiny), compile=compile):
        logits = model.proj_out.output.save()
    start = torch.full((1, 1), 2)
    torch.testing.assert_close(logits, model._module(**features, decoder_input_ids=start).logits)

    with model.generate(given(tiny), max_new_tokens=3, do_sample=False, compile=compile) as tracer:
        steps = [].save()
        for _ in tracer.iter[:3]:
            steps.append(model.proj_out.output)
        ids = tracer.result.save()
    assert torch.equal(ids, model._module.generate(**features, max_new_tokens=3, do_sample=False)) and len(steps) == 3
    with pytest.raises(NotExpressibleError, match="needs values before it calls the model"):
        with model.generate(given(tiny), max_new_tokens=3, do_sample=False, remote="local", compile=False):
            hidden = model.proj_out.output.save()
