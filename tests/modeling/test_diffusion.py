"""Diffusion pipelines, compared with the pipeline itself run with plain torch hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from nnsight import DiffusionModel, NNsight, fx

from ..conftest import both
from .pipelines import stable_diffusion

#: Captured and generated with, they take minutes in all; the other file has the fast ones.
pytestmark = pytest.mark.slow

STEPS = 3
CAT, DOG = "a cat on the mat", "a dog"

#: More tokens than the pipeline keeps.
LONG = " ".join([CAT] * 4)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return stable_diffusion()


@pytest.fixture(scope="module")
def model(pipeline: Any) -> DiffusionModel:
    return DiffusionModel(pipeline, compile={"backend": "eager"})


@contextmanager
def hooked(module: torch.nn.Module, function: Callable[[Any], Any]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, __, output: function(output))
    try:
        yield
    finally:
        handle.remove()


def reference(pipeline: Any, prompts: Any, first: int = 0, **kwargs: Any) -> Any:
    """Run the pipeline itself; image ``i`` has the seed ``first + i``."""
    count = (1 if isinstance(prompts, str) else len(prompts)) * kwargs.get("num_images_per_prompt", 1)
    generator = [torch.Generator().manual_seed(first + number) for number in range(count)]
    return pipeline(prompts, **{"num_inference_steps": STEPS, "generator": generator, "output_type": "pt", **kwargs})


OPTIONS: dict[str, Any] = {"num_inference_steps": STEPS, "seed": 0, "output_type": "pt"}


@both
def test_a_plain_call_is_the_pipeline(model: DiffusionModel, pipeline: Any, compile: bool) -> None:
    expected = reference(pipeline, [CAT, DOG])
    for again in (False, True):
        fx.counters.reset()
        found = model.generate([CAT, DOG], **OPTIONS, compile=compile)
        assert type(found) is type(expected)
        assert torch.equal(found.images, expected.images)
        assert not again or (fx.counters.captures, fx.counters.compiles) == (0, 0)
    (image,) = model.generate(prompt=CAT, num_inference_steps=1, generator=torch.Generator().manual_seed(3), compile=compile).images
    assert image.size == (16, 16)


# -- reading and editing ----------------------------------------------------------------------------------------------


@both
def test_every_step_is_read(model: DiffusionModel, pipeline: Any, compile: bool) -> None:
    seen: list[torch.Tensor] = []
    with hooked(pipeline.unet, lambda out: seen.append(out[0].clone())):
        expected = reference(pipeline, CAT)
    with model.generate(CAT, **OPTIONS, compile=compile) as tracer:
        embedding = model.text_encoder.output[0].save()
        predictions = [].save()
        for _ in tracer.iter[:STEPS]:
            predictions.append(model.unet.output[0].clone())
        decoded = model.vae.decoder.output.save()
        output = model.output.save()
        result = tracer.result.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    assert embedding.shape == (1, 8, 16)
    assert len(seen) == STEPS
    assert all(torch.equal(one, two) for one, two in zip(seen, predictions, strict=True))
    assert result is output
    assert torch.equal(result.images, expected.images)
    assert torch.equal((decoded / 2 + 0.5).clamp(0, 1), expected.images)


@both
def test_one_step_is_edited(model: DiffusionModel, pipeline: Any, compile: bool) -> None:
    calls: list[int] = []

    def at_second(output: torch.Tensor) -> Any:
        calls.append(1)
        return output * 1.5 if len(calls) == 2 else None

    with hooked(pipeline.unet.mid_block, at_second):
        expected = reference(pipeline, CAT)
    assert len(calls) == STEPS
    with model.generate(CAT, **OPTIONS, compile=compile) as tracer:
        for _ in tracer.iter[1]:
            model.unet.mid_block.output *= 1.5
        result = tracer.result.save()
    assert torch.equal(result.images, expected.images)
    assert not torch.equal(result.images, reference(pipeline, CAT).images)


def test_the_pipeline_is_as_it_was_after_a_run(model: DiffusionModel, pipeline: Any, clean: Any) -> None:
    with pytest.raises(ZeroDivisionError), model.generate(CAT, **OPTIONS):
        model.unet.output  # noqa: B018
        1 / 0  # noqa: B018
    clean(model._module)
    assert pipeline.unet._compiled_call_impl is None
    assert "_compiled_call_impl" not in pipeline.unet.__dict__


# -- several prompts --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("prompt", [DOG, LONG], ids=["short", "long"])
def test_each_invoke_has_its_rows(model: DiffusionModel, pipeline: Any, prompt: str, compile: bool) -> None:
    """The empty prompt of the guidance and the prompt are two rows of one invoke, though they do not lie side by side."""
    with model.generate(**OPTIONS, compile=compile) as tracer:
        with tracer.invoke(prompt):
            embedding = model.text_encoder.output[0].save()
            model.unet.mid_block.output *= 3
            one = tracer.result.images.save()
        with tracer.invoke([CAT, "the mat"]):
            prediction = model.unet.output[0].clone().save()
            two = tracer.result.images.save()
        with tracer.invoke():
            latents = model.unet.conv_in.input.shape.save()
    assert embedding.shape == (1, 8, 16)
    assert latents == (6, 4, 8, 8)
    calls: list[int] = []

    def at_first(output: torch.Tensor) -> Any:
        calls.append(1)
        return output * 3 if len(calls) == 1 else None

    with hooked(pipeline.unet.mid_block, at_first):
        torch.testing.assert_close(one, reference(pipeline, prompt).images)
    seen: list[torch.Tensor] = []
    with hooked(pipeline.unet, lambda out: seen.append(out[0].clone())):
        expected = reference(pipeline, [CAT, "the mat"], first=1)
    torch.testing.assert_close(two, expected.images)
    torch.testing.assert_close(prediction, seen[0])


@pytest.mark.parametrize("output_type", ["pil", "np"])
def test_images_of_each_invoke(model: DiffusionModel, pipeline: Any, output_type: str) -> None:
    options = {**OPTIONS, "output_type": output_type, "compile": False}
    with model.generate(**options) as tracer:
        with tracer.invoke(DOG):
            one = tracer.result.images.save()
        with tracer.invoke([CAT, "the mat"]):
            two = tracer.result.images.save()
        with tracer.invoke():
            whole = tracer.result.save()
    assert (len(one), len(two), len(whole.images)) == (1, 2, 3)
    assert isinstance(whole, diffusers.pipelines.stable_diffusion.StableDiffusionPipelineOutput)
    assert whole.nsfw_content_detected is None
    again = pickle.loads(pickle.dumps(whole))
    assert np.array_equal(np.asarray(again.images[1]), np.asarray(whole.images[1]))
    for found, prompts, first in ((one, [DOG], 0), (two, [CAT, "the mat"], 1)):
        assert isinstance(found, list if output_type == "pil" else np.ndarray)
        for image, expected in zip(found, reference(pipeline, prompts, first, output_type=output_type).images, strict=True):
            assert isinstance(image, Image.Image if output_type == "pil" else np.ndarray)
            np.testing.assert_allclose(np.asarray(image, float), np.asarray(expected, float), atol=1)


def test_generators_and_negative_prompts_of_invokes(model: DiffusionModel, pipeline: Any) -> None:
    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    options = {"num_inference_steps": STEPS, "output_type": "pt", "compile": False}
    with model.generate(**options) as tracer:
        with tracer.invoke(DOG, negative_prompt="a cat", generator=generator(5)):
            one = tracer.result.images.save()
        with tracer.invoke(CAT, negative_prompt="the", generator=generator(6)):
            two = tracer.result.images.save()
    for found, prompt, negative, seed in ((one, DOG, "a cat", 5), (two, CAT, "the", 6)):
        expected = reference(pipeline, prompt, negative_prompt=negative, generator=[generator(seed)]).images
        torch.testing.assert_close(found, expected)


def test_invokes_that_do_not_fit_together(model: DiffusionModel) -> None:
    with pytest.raises(ValueError, match="Only some of the invokes have `negative_prompt`"):
        with model.generate(**OPTIONS) as tracer:
            with tracer.invoke(DOG, negative_prompt="a"):
                model.unet.output  # noqa: B018
            with tracer.invoke(CAT):
                model.unet.output  # noqa: B018
    with pytest.raises(ValueError, match=r"`guidance_scale` differs between invokes: 2.0 and 3.0"):
        with model.generate(**OPTIONS) as tracer:
            with tracer.invoke(DOG, guidance_scale=2.0):
                model.unet.output  # noqa: B018
            with tracer.invoke(CAT, guidance_scale=3.0):
                model.unet.output  # noqa: B018


# -- a single step ----------------------------------------------------------------------------------------------------


def step_inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    draw = [torch.randn(rows, *shape, generator=generator) for shape in ((4, 8, 8), (8, 16))]
    return draw[0], torch.tensor(7), draw[1]


def test_steps_of_several_invokes_are_joined(model: DiffusionModel, pipeline: Any) -> None:
    first, second = step_inputs(1), step_inputs(2)
    with model.trace(compile=False) as tracer:
        with tracer.invoke(*first):
            one = model.unet.output.sample.save()
        with tracer.invoke(second[0], second[1], encoder_hidden_states=second[2]):
            two = model.unet.output.sample.save()
    for found, inputs in ((one, first), (two, second)):
        torch.testing.assert_close(found, pipeline.unet(*inputs).sample)


# -- loading ----------------------------------------------------------------------------------------------------------


def test_attributes_of_the_pipeline(model: DiffusionModel, pipeline: Any) -> None:
    assert model.pipeline is pipeline
    assert model.scheduler is pipeline.scheduler
    assert model.tokenizer is pipeline.tokenizer
    assert model.unet._module is pipeline.unet
    assert set(model._children) == {"vae", "text_encoder", "unet"}
    with pytest.raises(AttributeError, match="no attribute `unets`"):
        model.unets  # noqa: B018


def test_a_replaced_component_is_used_by_the_pipeline() -> None:
    made = DiffusionModel(stable_diffusion())
    torch.manual_seed(5)
    other = stable_diffusion().unet
    with torch.no_grad():
        other.conv_out.weight.zero_()
        other.conv_out.bias.zero_()
    made.unet = other
    assert made.pipeline.unet is other
    with made.generate(CAT, **OPTIONS):
        prediction = made.unet.output[0].save()
    assert not prediction.any()


def test_a_folder_is_loaded_late(tmp_path: Path, pipeline: Any) -> None:
    pipeline.save_pretrained(tmp_path)
    lazy = DiffusionModel(tmp_path)
    unet = lazy.unet
    assert not lazy.dispatched
    assert {weight.device.type for weight in lazy.parameters()} == {"meta"}
    with lazy.edit(inplace=True):
        lazy.unet.conv_in.output[:] = 0
    with lazy.generate(CAT, **OPTIONS) as tracer:
        result = tracer.result.save()
    assert lazy.dispatched
    assert lazy.unet is unet
    calls: list[int] = []

    def at_first(output: torch.Tensor) -> Any:
        calls.append(1)
        return torch.zeros_like(output) if len(calls) == 1 else None

    with hooked(pipeline.unet.conv_in, at_first):
        assert torch.equal(result.images, reference(pipeline, CAT).images)
    loaded = DiffusionModel(tmp_path, dispatch=True)
    assert loaded.dispatched
    assert torch.equal(loaded.unet.conv_in.weight, pipeline.unet.conv_in.weight)


def test_a_deep_copy_is_a_pipeline_of_its_own(model: DiffusionModel, pipeline: Any) -> None:
    copied = copy.deepcopy(model)
    assert copied.pipeline is not pipeline
    assert copied.pipeline.unet is copied._module.unet is not pipeline.unet
    with copied.generate(CAT, **OPTIONS, compile=False) as tracer:
        result = tracer.result.save()
    assert torch.equal(result.images, reference(pipeline, CAT).images)


# -- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ((CAT, DOG), {}, TypeError, "one input, not 2"),
        ((3,), {}, TypeError, "A prompt is a string or a list of strings, not int"),
        ((torch.ones(2),), {}, TypeError, "`generate` runs the pipeline, which takes a prompt. To run `unet` once on tensors"),
        ((CAT,), {"strength": 0.5}, TypeError, "StableDiffusionPipeline takes no argument `strength`"),
        ((CAT,), {"remote": True}, ValueError, "A run of a pipeline is Python, and cannot be sent"),
        ((CAT,), {"prompt": DOG}, TypeError, "`prompt` is given twice"),
        (([],), {}, ValueError, "The list of prompts is empty"),
    ],
)
def test_inputs_of_a_generation(
    model: DiffusionModel, inputs: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        model.generate(*inputs, num_inference_steps=1, **options)


def test_what_is_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere' could not be loaded"):
        DiffusionModel(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="a whole pipeline, not one module"):
        DiffusionModel(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="a name, a folder or a pipeline, not int"):
        DiffusionModel(3)
    assert isinstance(DiffusionModel(stable_diffusion()), NNsight)
