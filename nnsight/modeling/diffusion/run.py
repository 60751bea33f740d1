"""Runs of a pipeline: inputs are converted to arguments of the pipeline or of the denoiser, and those of several invokes are joined.

Some arguments of a pipeline have an entry for each prompt or each image (``prompt``, ``latents``); others apply to the whole call. With as
many entries as prompts, entry ``i`` is for all images of prompt ``i``. With as many entries as images, entry ``i`` is for image ``i``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...runtime.interleaver import active_interleaver
from ...runtime.rows.batching import RowList, RowSequence
from ...runtime.tracer import Arguments
from .module import ROWS

if TYPE_CHECKING:
    from .model import DiffusionModel
    from .module import Diffuser

_TRACE, _CALL, _GENERATE = "trace", "call", "generate"

#: Names of arguments of pipelines with an entry for each prompt or image, and exceptions among them that apply to the whole call.
_OF_EACH = re.compile(r"prompt|image|latents|embeds|mask|video|audio|generator")
_OF_ALL = re.compile(r"^ip_adapter|^callback|^num_|guidance|_scale$|crop")
_IMAGE = re.compile(r"image$|mask$|video$")

#: Arguments of denoisers that are tensors without a batch axis.
_WITHOUT_ROWS = {"img_ids", "txt_ids", "image_rotary_emb", "controlnet_cond"}

#: Arguments that only pipelines for a certain task take, and the class that loads such a pipeline.
_OF_TASKS = {"image": "AutoPipelineForImage2Image", "strength": "AutoPipelineForImage2Image", "mask_image": "AutoPipelineForInpainting"}

NOT_RECORDED = (
    "A run of a pipeline is Python, and cannot be sent or recorded: leave out `remote=` and `program=`. A trace of the denoiser alone "
    "can be recorded: `model.trace(sample, timestep, encoder_hidden_states=..., program=True)`."
)

#: Names of the argument for the number of images of each prompt.
_PER_PROMPT = re.compile(r"^num_\w+_per_prompt$")


class DiffusionRun:
    """Runs the pipeline of a model, and prepares its input.

    Args:
        model: The model.
        call: ``"trace"``: the run makes one step unless the input specifies the number. ``"generate"``: the pipeline's default number
            of steps applies, and tensors for the denoiser are refused. ``"call"``: the pipeline's default applies.
    """

    def __init__(self, model: DiffusionModel, call: str = _GENERATE) -> None:
        self._model = model
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._model._module, args, kwargs)

    def _run(self, module: Diffuser, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if ROWS not in kwargs:
            return module(*args, **kwargs)
        final = {name: value for name, value in kwargs.items() if name not in (ROWS, "seed")}
        if self._call == _TRACE:
            final = {**_fewest_steps(module, final), **final}
        if kwargs.get("seed") is not None and final.get("generator") is None:
            prompts = 1 if kwargs[ROWS] is None else len(kwargs[ROWS])
            final["generator"] = self._generators(kwargs["seed"], prompts * _images_per_prompt(final) * final.get("batch_size", 1))
        return module(**final)

    def _generators(self, seed: int, count: int) -> Any:
        """Return a list with a seeded generator for each of ``count`` images, or the generator itself for a single image."""
        device = self._model._module.pipeline._execution_device
        device = "cpu" if device.type == "meta" else device
        made = [torch.Generator(device).manual_seed(seed + number) for number in range(count)]
        return made if count > 1 else made[0]

    # -- runs on fake tensors --------------------------------------------------------------------------------------

    def _call_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``module``, a fake copy, with as many prompts as there are rows, and for one step, for the probe."""
        if kwargs.get(ROWS) is not None:
            count = len(kwargs[ROWS])
            repeated = {
                name: [value[0]] * count
                for name, value in kwargs.items()
                if _is_of_each(name) and isinstance(value, (list, tuple, np.ndarray)) and len(value)
            }
            kwargs = {**kwargs, **repeated, **_fewest_steps(module, kwargs)}
        return self._scan_on(module, args, kwargs)

    def _scan_on(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``module``, a fake copy, without the user's seed and generators."""
        if ROWS in kwargs:
            module._prepare_for_fakes(self._model._module)
            kwargs = {**kwargs, "seed": None, "generator": None}
        return self._run(module, args, kwargs)

    # -- input -----------------------------------------------------------------------------------------------------

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of the denoiser as given, or those of the pipeline by name, with texts as lists."""
        if ROWS in kwargs:
            return inputs, kwargs
        module = self._model._module
        if module._is_step(inputs, kwargs):
            if self._call == _GENERATE:
                raise TypeError(
                    f"`generate` runs the pipeline, which takes a prompt. To run `{module._denoiser_name}` once on tensors, use "
                    "`model.trace(...)` with them."
                )
            return inputs, kwargs
        run = active_interleaver()
        if run is not None and run.recorder is not None:
            raise ValueError(NOT_RECORDED)
        if len(inputs) > 1:
            raise TypeError(f"A pipeline takes one input, not {len(inputs)}. Pass several prompts as a list, and other arguments by name.")
        accepted = module._arguments
        if inputs:
            name = next(iter(accepted))
            if name == "prompt" and not (isinstance(inputs[0], str) or _is_texts(inputs[0])):
                if isinstance(inputs[0], (list, tuple)) and not inputs[0]:
                    raise ValueError("The list of prompts is empty. Pass at least one prompt.")
                raise TypeError(
                    f"A prompt is a string or a list of strings, not {type(inputs[0]).__name__}. Pass other inputs of the pipeline "
                    "by name, such as `prompt_embeds=`."
                )
            if name in kwargs:
                raise TypeError(f"`{name}` is given twice: as the input and by name.")
            kwargs = {name: inputs[0], **kwargs}
        unknown = [name for name in kwargs if name not in accepted and name != "seed"]
        if any(argument.kind is argument.VAR_KEYWORD for argument in accepted.values()):
            unknown = [name for name in unknown if name in _OF_TASKS]  # the pipeline would ignore these
        if unknown:
            hint = f" `automodel={_OF_TASKS[unknown[0]]!r}` loads a pipeline that does." if unknown[0] in _OF_TASKS else ""
            known = f"{', '.join(accepted)}; and `seed`"
            raise TypeError(f"{type(module.pipeline).__name__} takes no argument `{unknown[0]}`, only {known}.{hint}")
        count = _count(kwargs)
        if count is None:
            return (), {**kwargs, ROWS: None}
        prepared: dict[str, Any] = {}
        for name, value in kwargs.items():
            is_text = "prompt" in name and (isinstance(value, str) or _is_texts(value))
            prepared[name] = RowList([value] * count if isinstance(value, str) else value) if is_text else value
        return (), {**prepared, ROWS: torch.arange(count)}

    def _batch(self, batched: Arguments | None, *args: Any, **kwargs: Any) -> tuple[Arguments, int]:
        """Join the input of one more invoke to those before it."""
        before = None if batched is None else batched[1]
        if before is not None and (ROWS in before) != (ROWS in kwargs):
            raise ValueError("Some invokes have prompts for the pipeline, and some have tensors for the denoiser: all run as one call.")
        if ROWS not in kwargs:
            given, rows = self._rows_of_step(args, kwargs)
            return ((), given if before is None else _joined(before, given, lambda name: name not in _WITHOUT_ROWS)), rows
        if kwargs[ROWS] is None:
            raise ValueError("Several invokes need prompts, or `prompt_embeds`, so that each invoke gets its own images.")
        rows = len(kwargs[ROWS])
        images = rows * _images_per_prompt(kwargs)
        seed = kwargs.pop("seed", None)
        if seed is not None and kwargs.get("generator") is None:
            kwargs["generator"] = self._generators(seed, images)
        given = {name: _entries(name, value, rows, images) for name, value in kwargs.items()}
        return ((), given if before is None else _joined(before, given, _is_of_each)), rows

    def _rows_of_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the arguments of the denoiser by name, with single rows expanded, and the number of rows."""
        given = {**dict(zip(self._model._module._step_arguments, args, strict=False)), **kwargs}
        rows = next((value.shape[0] for value in given.values() if isinstance(value, torch.Tensor) and value.ndim), 1)
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1 and name not in _WITHOUT_ROWS:
                given[name] = value.expand(rows, *value.shape[1:])
        return given, rows


def _fewest_steps(module: Diffuser, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Return ``num_inference_steps`` for which the denoiser runs once; nothing if the pipeline lacks it or the steps are given."""
    accepted = module._arguments
    if "num_inference_steps" not in accepted or any(kwargs.get(name) is not None for name in ("timesteps", "sigmas")):
        return {}
    steps, strength = 1, 1.0
    if "strength" in accepted:  # the fraction of the steps that the pipeline makes
        strength = kwargs.get("strength", accepted["strength"].default)
    while isinstance(strength, float) and 0 < strength < 1 and int(steps * strength) < 1:
        steps += 1
    return {"num_inference_steps": steps}


def _count(kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of prompts; ``None`` if neither ``prompt`` nor ``prompt_embeds`` is given."""
    prompts = kwargs.get("prompt")
    if prompts is None:
        prompts = kwargs.get("prompt_embeds")
    if prompts is None:
        return None
    count = 1 if isinstance(prompts, str) else len(prompts)
    if count == 0:
        raise ValueError("The list of prompts is empty. Pass at least one prompt.")
    return count


def _images_per_prompt(kwargs: Mapping[str, Any]) -> int:
    return next((value for name, value in kwargs.items() if _PER_PROMPT.match(name) and isinstance(value, int)), 1)


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) for item in value)


def _is_of_each(name: str) -> bool:
    return name == ROWS or (_OF_EACH.search(name) is not None and _OF_ALL.search(name) is None)


def _entries(name: str, value: Any, rows: int, images: int) -> Any:
    """Return an argument of an invoke, expanded to an entry for each of its ``rows`` prompts, or for each of their ``images``."""
    if not _is_of_each(name) or value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Generator):
        return [value] * images
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if _IMAGE.search(name) and value.ndim == 3:
            value = value[None]
        if len(value) == 1 and rows > 1:
            repeat = torch.cat if isinstance(value, torch.Tensor) else np.concatenate
            value = repeat([value] * rows)
    elif not isinstance(value, (list, tuple)):  # an image
        value = [value] * rows
    elif len(value) == 1:
        value = [*value] * (images if name == "generator" else rows)
    if len(value) not in (rows, images):
        raise ValueError(f"`{name}` has {len(value)} entries in an invoke with {rows} prompts: it needs one for each prompt or image.")
    return value


def _joined(before: Mapping[str, Any], added: Mapping[str, Any], is_of_each: Callable[[str], bool]) -> dict[str, Any]:
    """Join the arguments of two invokes to those of one call.

    Raises:
        ValueError: If only one of them has an argument with rows, or an argument without rows differs.
    """
    made: dict[str, Any] = {}
    for name in {**before, **added}:
        above, below = before.get(name), added.get(name)
        have_rows = [is_of_each(name) and (isinstance(v, (list, tuple)) or getattr(v, "ndim", 0) > 0) for v in (above, below)]
        if isinstance(above, torch.Tensor) and isinstance(below, torch.Tensor) and all(have_rows):
            if above.shape[1:] != below.shape[1:]:
                sizes = f"{tuple(above.shape)} and {tuple(below.shape)}"
                raise ValueError(f"`{name}` is {sizes} in two invokes: only the first size may differ.")
            made[name] = torch.cat([above, below])
        elif above is not None and below is not None and all(have_rows):
            made[name] = (RowList if isinstance(above, RowSequence) else list)([*above, *below])
        elif any(have_rows):
            raise ValueError(f"Only some of the invokes have `{name}`: they run as one batch, so all need it.")
        elif isinstance(above, dict) and isinstance(below, dict):
            made[name] = _joined(above, below, is_of_each)
        elif _are_equal(above, below):
            made[name] = above
        else:
            raise ValueError(f"`{name}` differs between invokes: {above!r} and {below!r}. They run as one batch.")
    return made


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, (torch.Tensor, np.ndarray)) or isinstance(other, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
