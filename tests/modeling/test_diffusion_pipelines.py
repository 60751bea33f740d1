"""Kinds of pipelines, of inputs and of loading, compared with `diffusers` and plain torch hooks."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from nnsight import DiffusionModel, fx
from nnsight.modeling.mixins import LoadingError

from .pipelines import FAMILIES, quiet, stable_diffusion
from .test_diffusion import hooked, reference, step_inputs

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # schedulers of diffusers

#: A denoiser is captured, which takes seconds.
both = pytest.mark.parametrize("compile", [False, pytest.param(True, marks=slow)], ids=["eager", "compiled"])
#: One of them by default.
families = pytest.mark.parametrize("family", ["sd", *(pytest.param(name, marks=slow) for name in FAMILIES if name != "sd")])

CAT, DOG = "a cat on the mat", "a dog"
OPTIONS: dict[str, Any] = {"num_inference_steps": 2, "seed": 0, "output_type": "pt"}


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return stable_diffusion()


@pytest.fixture(scope="module")
def model(pipeline: Any) -> DiffusionModel:
    return DiffusionModel(pipeline, compile={"backend": "eager"})


def inner_of(name: str) -> str:
    """Return the path of a module inside the denoiser that returns a tensor."""
    return "mid_block" if name == "unet" else "norm_out"


# -- the whole pipeline -----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("options", "steps"), [({}, 1), ({"num_inference_steps": 2}, 2)])
def test_a_trace_of_a_prompt_runs_the_pipeline(
    model: DiffusionModel, pipeline: Any, options: dict[str, int], steps: int, compile: bool
) -> None:
    """It makes one step unless told otherwise; `output` is the result and occurs once, at the end."""
    seen: list[torch.Tensor] = []
    with hooked(pipeline.unet, lambda out: seen.append(out[0].clone())):
        expected = reference(pipeline, CAT, num_inference_steps=steps)
    with model.trace(CAT, seed=0, output_type="pt", compile=compile, **options) as tracer:
        predictions = [].save()
        for _ in tracer.iter[:steps]:
            predictions.append(model.unet.output[0].clone())
        output = model.output.save()
        result = tracer.result.save()
    assert tracer.report.mode == ("compiled" if compile else "eager")
    assert output is result
    assert torch.equal(output.images, expected.images)
    assert len(seen) == steps
    assert all(torch.equal(*pair) for pair in zip(predictions, seen, strict=True))
    with pytest.warns(UserWarning, match=r"ended at `model.output.i1`"), model.trace(CAT, compile=compile) as tracer:
        for _ in tracer.iter[:]:
            model.output  # noqa: B018


@both
def test_an_edit_of_the_output_is_the_result(model: DiffusionModel, compile: bool) -> None:
    with model.trace(CAT, output_type="pt", compile=compile) as tracer:
        model.output.images[:] = 0.5
        result = tracer.result.save()
    assert (result.images == 0.5).all()


def test_ways_to_call_without_a_block(model: DiffusionModel, pipeline: Any) -> None:
    plain = DiffusionModel(pipeline)
    one, two = (reference(pipeline, CAT, num_inference_steps=steps).images for steps in (1, 2))
    assert torch.equal(plain.trace(CAT, seed=0, output_type="pt", trace=False).images, one)
    assert torch.equal(plain(CAT, **OPTIONS).images, two)
    assert torch.equal(plain.generate(CAT, **OPTIONS).images, two)
    with model.trace(CAT, **OPTIONS, compile=False) as tracer:
        inside = model("a dog", output_type="latent", num_inference_steps=1).images.save()
        result = tracer.result.images.save()
    assert inside.shape == (1, 4, 8, 8)
    assert torch.equal(result, two)


@slow
def test_embeddings_are_a_prompt(model: DiffusionModel, pipeline: Any) -> None:
    embedded = [pipeline.encode_prompt(text, "cpu", 1, True) for text in (CAT, DOG)]
    given = [{"prompt_embeds": prompt, "negative_prompt_embeds": negative} for prompt, negative in embedded]
    with model.trace(**given[0], seed=0, output_type="pt", compile=False) as tracer:
        alone = tracer.result.images.save()
    assert torch.equal(alone, reference(pipeline, CAT, num_inference_steps=1).images)
    with model.generate(**OPTIONS, compile=False) as tracer:
        with tracer.invoke(**given[0]):
            one = tracer.result.images.save()
        with tracer.invoke(**given[1]):
            two = tracer.result.images.save()
    torch.testing.assert_close(torch.cat([one, two]), reference(pipeline, [CAT, DOG], num_inference_steps=2).images)


@pytest.mark.slow
def test_seeds_of_images(model: DiffusionModel, pipeline: Any) -> None:
    """Image `i` has the seed `n + i`, counted over all prompts and the images of each; those of an invoke are its own."""
    options = {**OPTIONS, "seed": 7, "num_images_per_prompt": 2, "compile": False}
    expected = reference(pipeline, [CAT, DOG], 7, num_images_per_prompt=2, num_inference_steps=2).images
    assert torch.equal(model.generate([CAT, DOG], **options).images, expected)
    with model.generate(**options) as tracer:
        with tracer.invoke(CAT):
            one = tracer.result.images.save()
        with tracer.invoke(DOG):
            two = tracer.result.images.save()
        with tracer.invoke():
            prompts = model.inputs[1]["prompt"].save()
    assert torch.equal(torch.cat([one, two]), expected)
    assert prompts == [CAT, DOG]
    del options["seed"]
    with model.generate(**options) as tracer:
        with tracer.invoke(CAT, seed=7):
            one = tracer.result.images.save()
        with tracer.invoke(DOG, seed=3):
            two = tracer.result.images.save()
    torch.testing.assert_close(one, reference(pipeline, CAT, 7, num_images_per_prompt=2, num_inference_steps=2).images)
    torch.testing.assert_close(two, reference(pipeline, DOG, 3, num_images_per_prompt=2, num_inference_steps=2).images)
    chosen = model.generate(CAT, **OPTIONS, generator=torch.Generator().manual_seed(5), compile=False).images
    assert torch.equal(chosen, reference(pipeline, CAT, 5, num_inference_steps=2).images)


# -- rows -------------------------------------------------------------------------------------------------------------


@both
@families
def test_rows_of_invokes(family: str, compile: bool) -> None:
    """Each invoke has its rows of both halves of the guidance, `num_images_per_prompt` of each, and nothing of the others."""
    build, options = FAMILIES[family]
    pipeline, halves = build(), 1 if family == "flux" else 2
    model = DiffusionModel(pipeline, compile={"backend": "eager"} if compile else False)
    name = model._module._denoiser_name
    first, second = ([half * 4 + 2 * prompt + i for half in range(halves) for i in range(2)] for prompt in range(2))
    with model.generate(num_inference_steps=2, num_images_per_prompt=2, seed=0, output_type="pt", **options) as tracer:
        with tracer.invoke(CAT):
            model.get(f"{name}.{inner_of(name)}").output[:] *= 1.5
            one = tracer.result.images.save()
        with tracer.invoke(DOG):
            embedding = model.text_encoder.output.last_hidden_state.shape.save()
            prediction = model.get(name).output[0].save()
            decoded = model.vae.decoder.output.save()
            two = model.output.images.save()
    calls, predictions = [], []

    def at_first(output: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 1:
            output[first] *= 1.5

    with ExitStack() as stack:
        denoiser = getattr(pipeline, name)
        stack.enter_context(hooked(denoiser.get_submodule(inner_of(name)), at_first))
        stack.enter_context(hooked(denoiser, lambda output: predictions.append(output[0])))
        expected = reference(pipeline, [CAT, DOG], num_inference_steps=2, num_images_per_prompt=2, **options).images
    assert embedding == (1, 8, 16)
    assert torch.equal(prediction, predictions[0][second])
    assert torch.equal(torch.cat([one, two]), expected)
    assert torch.equal((decoded / 2 + 0.5).clamp(0, 1), expected[2:])


@slow
@pytest.mark.parametrize("scheduler", ["DDPM", "EulerAncestralDiscrete", "DPMSolverMultistep", "LCM", "HeunDiscrete", "UniPCMultistep"])
def test_rows_with_other_schedulers(scheduler: str) -> None:
    """Those that look for values of the timesteps run on fakes, too."""
    options = {"num_train_timesteps": 100, "steps_offset": 1, **({"clip_sample": False} if scheduler == "DDPM" else {})}
    pipeline = stable_diffusion(scheduler=getattr(diffusers, f"{scheduler}Scheduler")(**options))
    model = DiffusionModel(pipeline)
    with model.generate(num_inference_steps=3, seed=0, output_type="pt") as tracer:
        with tracer.invoke(CAT):
            one = tracer.result.images.save()
        with tracer.invoke(DOG):
            size = model.unet.output[0].shape.save()
            two = tracer.result.images.save()
    assert size == (2, 4, 8, 8)
    assert torch.equal(torch.cat([one, two]), reference(pipeline, [CAT, DOG]).images)


@slow
@families
def test_one_capture_serves_all_steps(family: str) -> None:
    build, options = FAMILIES[family]
    pipeline = build()
    model = DiffusionModel(pipeline, compile={"backend": "eager"})
    name = model._module._denoiser_name
    counts = []
    for steps in (4, 6):
        fx.counters.reset()
        with model.generate(CAT, num_inference_steps=steps, seed=0, output_type="pt", **options) as tracer:
            for _ in tracer.iter[:steps]:
                model.get(f"{name}.{inner_of(name)}").output[:] *= 1.1
            result = tracer.result.images.save()
        counts.append((fx.counters.captures, fx.counters.compiles))
        assert not tracer.report.breaks
        with hooked(getattr(pipeline, name).get_submodule(inner_of(name)), lambda output: output.mul_(1.1)):
            expected = reference(pipeline, CAT, num_inference_steps=steps, **options).images
        assert torch.equal(result, expected)
    assert counts == [(1, 1), (0, 0)]


@both
def test_steps_that_a_loop_only_counts(model: DiffusionModel, pipeline: Any, compile: bool) -> None:
    """A step in which the body asks nothing lasts until the denoiser returns."""
    seen: list[torch.Tensor] = []
    with hooked(pipeline.unet, lambda out: seen.append(out[0].clone())):
        reference(pipeline, CAT, num_inference_steps=4)
    with pytest.warns(UserWarning, match="loop"), model.generate(CAT, **{**OPTIONS, "num_inference_steps": 4}, compile=compile) as tracer:
        found = [].save()
        for step in tracer.iter[:]:
            if step in (1, 3):
                found.append(model.unet.output[0].clone())
    assert torch.equal(torch.stack(found), torch.stack([seen[1], seen[3]]))


# -- other features, of components ------------------------------------------------------------------------------------


@both
def test_caches_skips_and_operations(model: DiffusionModel, pipeline: Any, compile: bool) -> None:
    """A cache of several steps has a list."""
    seen: list[torch.Tensor] = []
    with hooked(pipeline.unet.mid_block.resnets[0], lambda out: seen.append(out.clone()) or out * 0.5):
        with hooked(pipeline.unet.mid_block.resnets[1], torch.zeros_like):
            expected = reference(pipeline, CAT, num_inference_steps=2).images
    with model.generate(CAT, **OPTIONS, compile=compile) as tracer:
        cache = tracer.cache(modules=[model.unet.mid_block.resnets[0].conv2, model.text_encoder])
        for _ in tracer.iter[:2]:
            model.unet.mid_block.resnets[0].source.self_conv2_0.output.shape  # noqa: B018
            model.unet.mid_block.resnets[0].output *= 0.5
            model.unet.mid_block.resnets[1].skip(torch.zeros(2, 16, 4, 4))
        result = tracer.result.images.save()
    assert torch.equal(result, expected)
    entry = cache["model.unet.mid_block.resnets.0.conv2"]
    assert len(entry) == 2 and entry[0].output.shape == (2, 16, 4, 4)
    assert len(cache["model.text_encoder"]) == 2  # the prompt and the empty one


@both
def test_a_component_by_itself(model: DiffusionModel, pipeline: Any, compile: bool) -> None:
    sample, timestep, prompt = step_inputs(2)
    with model.unet.trace(sample, timestep, encoder_hidden_states=prompt, compile=compile) as tracer:
        model.unet.mid_block.output[:] = 0
        result = tracer.result.sample.save()
    with hooked(pipeline.unet.mid_block, torch.zeros_like):
        expected = pipeline.unet(sample, timestep, prompt).sample
    assert torch.equal(result, expected)
    for given in ((sample, timestep, prompt), ()):
        by_name = {} if given else {"sample": sample, "timestep": timestep, "encoder_hidden_states": prompt}
        with model.trace(*given, **by_name, compile=compile) as tracer:
            model.unet.mid_block.output[:] = 0
            result = model.output.sample.save()
        assert tracer.report.mode == ("compiled" if compile else "eager")
        assert torch.equal(result, expected)
    assert torch.equal(DiffusionModel(pipeline)(sample, timestep, prompt).sample, pipeline.unet(sample, timestep, prompt).sample)
    with model.vae.decoder.trace(sample, compile=compile) as tracer:
        image = tracer.result.save()
    assert torch.equal(image, pipeline.vae.decoder(sample))


@families
def test_a_scan_of_a_pipeline(family: str) -> None:
    """It has the sizes of the run, black images, and leaves the pipeline as it was."""
    build, options = FAMILIES[family]
    pipeline = build()
    model = DiffusionModel(pipeline)
    name = model._module._denoiser_name
    state = torch.get_rng_state()
    with model.scan([CAT, DOG], num_images_per_prompt=2, num_inference_steps=2, seed=0, **options):
        size = model.get(name).output[0].shape.save()
        images = model.output.images.save()
    assert torch.equal(state, torch.get_rng_state())
    seen: list[torch.Size] = []
    with hooked(getattr(pipeline, name), lambda out: seen.append(out[0].shape)):
        expected = reference(pipeline, [CAT, DOG], num_images_per_prompt=2, num_inference_steps=2, output_type="pil", **options).images
    assert size == seen[0]
    assert [image.size for image in images] == [image.size for image in expected]
    with pytest.raises(RuntimeError, match="broadcast"):
        with model.trace(CAT, validate=True, **options):
            model.get(name).output[0] + torch.zeros(77)
    with model.generate(CAT, validate=True, scan=True, seed=0, num_inference_steps=1, output_type="np", **options):
        image = model.output.images[0].save()
    np.testing.assert_allclose(image, reference(pipeline, CAT, num_inference_steps=1, output_type="np", **options).images[0], atol=1e-5)


def test_invokes_with_prompts_and_with_tensors(model: DiffusionModel) -> None:
    with pytest.raises(ValueError, match="Some invokes have prompts for the pipeline, and some have tensors"):
        with model.trace(compile=False) as tracer:
            with tracer.invoke(CAT):
                model.unet.output  # noqa: B018
            with tracer.invoke(*step_inputs(1)):
                model.unet.output  # noqa: B018


def test_a_step_can_be_a_program_and_a_pipeline_cannot(model: DiffusionModel, pipeline: Any) -> None:
    inputs = step_inputs(2)
    with model.trace(*inputs, program=True, compile=False):
        model.unet.mid_block.output *= 2
        result = model.unet.output.sample.save()
    with hooked(pipeline.unet.mid_block, lambda output: output * 2):
        assert torch.equal(result, pipeline.unet(*inputs).sample)
    for options in ({"program": True}, {"remote": "local"}):
        with pytest.raises(ValueError, match="A run of a pipeline is Python, and cannot be sent or recorded"):
            with model.trace(CAT, **options):
                model.unet.output  # noqa: B018


# -- images as input --------------------------------------------------------------------------------------------------


def drawn(shade: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(shade).integers(0, 255, (16, 16, 3), np.uint8))


@pytest.mark.parametrize("form", ["image", *(pytest.param(form, marks=slow) for form in ("array", "tensor"))])
def test_images_are_inputs(form: str) -> None:
    """`trace` makes one step, whatever part of the steps `strength` leaves."""
    pipeline = stable_diffusion(diffusers.StableDiffusionImg2ImgPipeline)
    model = DiffusionModel(pipeline)
    given: Any = [drawn(number) for number in range(2)]
    if form != "image":
        given = [np.asarray(image, np.float32) / 255 for image in given]
    if form == "tensor":
        given = [torch.from_numpy(array).movedim(-1, 0) for array in given]
    plain = torch.stack(given) if form == "tensor" else given
    expected = reference(pipeline, [CAT, DOG], image=plain, strength=0.4, num_inference_steps=3).images
    with model.trace(strength=0.4, seed=0, output_type="pt") as tracer:
        with tracer.invoke(CAT, image=given[0]):
            one = tracer.result.images.save()
        with tracer.invoke(DOG, image=given[1]):
            steps = model.unet.output[0].shape.save()
            two = tracer.result.images.save()
    assert steps == (2, 4, 8, 8)
    assert torch.equal(torch.cat([one, two]), expected)
    with model.generate(CAT, image=given[0], strength=0.5, num_inference_steps=4, seed=0, output_type="pt") as tracer:
        alone = tracer.result.images.save()
    assert torch.equal(alone, reference(pipeline, CAT, image=given[0], strength=0.5, num_inference_steps=4).images)


@slow
def test_a_mask_is_an_input() -> None:
    pipeline = stable_diffusion(diffusers.StableDiffusionInpaintPipeline)
    model = DiffusionModel(pipeline)
    masks = [Image.fromarray(np.full((16, 16), shade, np.uint8)) for shade in (0, 255)]
    with model.trace(seed=0, output_type="pt", strength=0.5) as tracer:
        for prompt, image, mask in zip((CAT, DOG), (drawn(0), drawn(1)), masks, strict=True):
            with tracer.invoke(prompt, image=image, mask_image=mask):
                images = tracer.result.images.save()
    expected = reference(
        pipeline, [CAT, DOG], image=[drawn(0), drawn(1)], mask_image=masks, strength=0.5, num_inference_steps=2
    ).images
    assert torch.equal(images, expected[1:])


def test_inputs_of_another_number(model: DiffusionModel) -> None:
    for size, message in ((3, "`latents` has 3 entries in an invoke with 2 prompts"), (2, r"`latents` is .*only the first size may")):
        with pytest.raises(ValueError, match=message):
            with model.trace(compile=False) as tracer:
                with tracer.invoke(CAT, latents=torch.zeros(1, 4, 8, 7)):
                    model.unet.output  # noqa: B018
                with tracer.invoke([CAT, DOG], latents=torch.zeros(size, 4, 8, 8)):
                    model.unet.output  # noqa: B018


def test_a_pipeline_without_prompts() -> None:
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    pipeline = quiet(diffusers.DDPMPipeline(unet.eval(), diffusers.DDPMScheduler(num_train_timesteps=10)))
    model = DiffusionModel(pipeline)
    with model.trace(batch_size=2, seed=4, output_type="np") as tracer:
        prediction = model.unet.output[0].save()
        images = tracer.result.images.save()
    generators = [torch.Generator().manual_seed(seed) for seed in (4, 5)]
    assert prediction.shape == (2, 3, 8, 8)
    assert np.array_equal(images, pipeline(2, generators, num_inference_steps=1, output_type="np").images)
    with model.trace():
        assert model.unet.output[0].shape == (1, 3, 8, 8)
    with pytest.raises(ValueError, match="Several invokes need prompts"), model.trace() as tracer:
        for _ in range(2):
            with tracer.invoke(batch_size=1):
                model.unet.output  # noqa: B018


# -- names and loading ------------------------------------------------------------------------------------------------


def test_no_name_of_the_wrapper_is_in_the_way(pipeline: Any) -> None:
    names = {"unet": ["denoiser", "run", "model", "rows"], "text_encoder": "encoder", "unet.mid_block": "middle"}
    model = DiffusionModel(pipeline, rename=names)
    with model.trace(CAT, seed=0, output_type="pt") as tracer:
        model.middle.output[:] *= 2
        prediction = model.denoiser.output[0].save()
        images = tracer.result.images.save()
    assert model.denoiser is model.run is model.unet
    with hooked(pipeline.unet.mid_block, lambda out: out * 2), hooked(pipeline.unet, lambda out: seen.append(out[0])):
        seen: list[torch.Tensor] = []
        assert torch.equal(images, reference(pipeline, CAT, num_inference_steps=1).images)
    assert torch.equal(prediction, seen[0])


@pytest.fixture(scope="module", params=["flux", *(pytest.param(name, marks=slow) for name in FAMILIES if name != "flux")])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param][0]().save_pretrained(folder)
    return request.param, folder


def test_lazy_pipelines(saved: tuple[str, Path]) -> None:
    """Modules have no memory, other components are real; what is loaded has the same parameters."""
    family, folder = saved
    options = FAMILIES[family][1]
    lazy = DiffusionModel(folder)
    name = lazy._module._denoiser_name
    sizes = {path: (weight.shape, weight.dtype) for path, weight in lazy._module.named_parameters()}
    assert {weight.device.type for weight in lazy.parameters()} == {"meta"}
    assert lazy.pipeline.scheduler.config.num_train_timesteps and lazy.tokenizer(CAT)["input_ids"]
    assert getattr(lazy, {"flux": "image_encoder", "sd3": "image_encoder"}.get(family, "feature_extractor"), None) is None
    with lazy.scan(CAT, **options):
        size = lazy.get(name).output[0].shape.save()
    assert not lazy.dispatched
    with lazy.trace(CAT, seed=0, output_type="pt", **options) as tracer:
        prediction = lazy.get(name).output[0].save()
        images = tracer.result.images.save()
    assert lazy.dispatched
    assert sizes == {path: (weight.shape, weight.dtype) for path, weight in lazy._module.named_parameters()}
    assert prediction.shape == size
    plain = quiet(diffusers.DiffusionPipeline.from_pretrained(folder))
    assert torch.equal(images, reference(plain, CAT, num_inference_steps=1, **options).images)


@pytest.mark.parametrize(
    ("automodel", "expected"),
    [
        ("StableDiffusionImg2ImgPipeline", diffusers.StableDiffusionImg2ImgPipeline),
        (diffusers.StableDiffusionPipeline, diffusers.StableDiffusionPipeline),
        ("AutoPipelineForText2Image", diffusers.StableDiffusionPipeline),
        (diffusers.AutoPipelineForImage2Image, diffusers.StableDiffusionImg2ImgPipeline),
        ("AutoPipelineForInpainting", diffusers.StableDiffusionInpaintPipeline),
    ],
)
def test_classes_of_pipelines(stable: Path, automodel: Any, expected: type) -> None:
    model = DiffusionModel(stable, automodel=automodel, dtype=torch.float16)
    assert type(model.pipeline) is expected
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}
    model.dispatch()
    assert type(model.pipeline) is expected
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stable")
    stable_diffusion().save_pretrained(folder)
    return folder


def test_classes_that_do_not_fit(stable: Path, pipeline: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"diffusers [\d.]+ has no class of this name. Did you mean 'StableDiffusionPipeline'"):
        DiffusionModel(stable, automodel="StableDifusionPipeline")
    with pytest.raises(TypeError, match="automodel= is a class of pipelines"):
        DiffusionModel(stable, automodel="UNet2DConditionModel")
    with pytest.raises(LoadingError, match="FluxPipeline needs `text_encoder_2`, `tokenizer_2`, `transformer`, which the repository lacks"):
        DiffusionModel(stable, automodel="FluxPipeline")
    with pytest.raises(LoadingError, match="can't find a pipeline linked to StableDiffusionPipeline"):
        DiffusionModel(stable, automodel="AutoPipelineForText2Audio")
    with pytest.raises(TypeError, match="automodel: options for loading a model"):
        DiffusionModel(pipeline, automodel="StableDiffusionPipeline")
    config = json.loads((stable / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**config, "_class_name": "NewPipeline"}))
    with pytest.raises(LoadingError, match="declares NewPipeline, which diffusers .* lacks"):
        DiffusionModel(tmp_path)
