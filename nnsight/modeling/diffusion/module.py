"""A pipeline of `diffusers` as a module.

A pipeline is not a module. It calls several modules (text encoder, denoiser, autoencoder) from Python, the denoiser once for each step.
:class:`Diffuser` is a module around the pipeline, with its components as children, so each component has an envoy. ``forward`` runs the
pipeline, or one step if it gets tensors for the denoiser.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...runtime.interleaver import active_interleaver
from ...runtime.rows.batching import RowList
from .images import make_classes, with_rows

#: An extra argument with the number of the prompt of each row, by which a probe varies the number of prompts. No pipeline takes it.
ROWS = "prompt_rows"

#: Names of the component that denoises.
_DENOISERS = ("unet", "transformer")


class Diffuser(torch.nn.Module):
    """A pipeline as a module. ``_denoiser_name`` names the component that runs once for each step: a known name, else the largest one."""

    pipeline: Any

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        if not (hasattr(pipeline, "components") and callable(pipeline)):
            raise TypeError(f"A {type(pipeline).__name__} is not a pipeline: it has no `components`, or cannot be called.")
        modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
        if not modules:
            raise TypeError(f"The {type(pipeline).__name__} has no component that is a torch.nn.Module.")
        for name, module in modules.items():
            self.add_module(name, module)
        self.pipeline = pipeline
        make_classes(pipeline)
        sizes = {name: sum(weight.numel() for weight in module.parameters()) for name, module in modules.items()}
        self._denoiser_name = next((name for name in _DENOISERS if name in modules), max(sizes, key=sizes.__getitem__))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline, or one denoising step if the input is for the denoiser."""
        if self._is_step(args, kwargs):
            return self._modules[self._denoiser_name](*args, **kwargs)  # type: ignore[misc]
        if ROWS in kwargs:
            raise TypeError(f"{type(self.pipeline).__name__} takes no argument `{ROWS}`.")
        plain = {name: list(value) if isinstance(value, RowList) else value for name, value in kwargs.items()}
        output = self.pipeline(*args, **plain)
        return output if active_interleaver() is None else with_rows(output)

    def _is_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether these are arguments of the denoiser: the first is a tensor, or one has the name of its first argument."""
        if args:
            return isinstance(args[0], torch.Tensor)
        return next(iter(self._step_arguments)) in kwargs.keys() - self._arguments.keys()

    @property
    def _step_arguments(self) -> list[str]:
        """Names of the arguments of the denoiser."""
        denoiser: Any = self._modules[self._denoiser_name]
        return list(inspect.signature(type(denoiser).forward).parameters)[1:]

    @property
    def _arguments(self) -> dict[str, inspect.Parameter]:
        """The arguments of the pipeline, by name."""
        return dict(list(inspect.signature(type(self.pipeline).__call__).parameters.items())[1:])

    def _prepare_for_fakes(self, original: Any) -> None:
        """Change this copy of ``original`` so that it runs on fake tensors.

        It makes black images, has no safety checker, and shows no progress. Its schedulers keep real tensors.
        """
        pipeline = self.pipeline
        if pipeline is original.pipeline:
            raise TypeError(f"The {type(pipeline).__name__} cannot be copied, so it cannot run on fake tensors.")
        for name, part in list(vars(pipeline).items()):
            if hasattr(part, "pt_to_numpy"):
                part.pt_to_numpy = _black
            if hasattr(part, "set_timesteps"):  # its tables need values, since numpy computes them
                setattr(pipeline, name, _with_real_timesteps(getattr(original.pipeline, name)))
        if getattr(pipeline, "safety_checker", None) is not None:
            pipeline.safety_checker = None
        if hasattr(pipeline, "set_progress_bar_config"):
            pipeline.set_progress_bar_config(disable=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pipeline = self.__dict__.get("pipeline")
            if pipeline is None or name.startswith("__"):
                raise
            return getattr(pipeline, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        pipeline = self.__dict__.get("pipeline")
        if name in self._modules and pipeline is not None and name in pipeline.components:
            setattr(pipeline, name, value)


def _with_real_timesteps(scheduler: Any) -> Any:
    """Return a copy of a scheduler that sets its timesteps outside of the fake mode, and whose ``step`` does not read them."""
    with unset_fake_temporarily():
        made = copy.deepcopy(scheduler)
    set_timesteps = made.set_timesteps

    @functools.wraps(set_timesteps)
    def outside(*args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            set_timesteps(*args, **kwargs)
        if hasattr(made, "set_begin_index"):
            made.set_begin_index(0)

    @functools.wraps(made.step)
    def step(model_output: Any, timestep: Any, sample: Any, *_: Any, return_dict: bool = True, **__: Any) -> Any:
        names = ("prev_sample", "pred_original_sample", "denoised")
        stepped = sample + model_output.narrow(1, 0, sample.shape[1])  # further channels are variances
        return types.SimpleNamespace(**dict.fromkeys(names, stepped)) if return_dict else (stepped,) * len(names)

    made.set_timesteps, made.step = outside, step
    return made


def _black(images: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return black images ``[batch, height, width, channels]`` for fake tensors ``[batch, channels, height, width]``."""
    batch, channels, *size = images.shape
    return np.zeros((batch, *size, channels), np.float32)
